"""Which parameters of a model go to Muon and which to its backup, and why, for a person to read.

Names and whole shapes decide, nothing else: a DTensor's shape is that of the whole parameter, so
all ranks come to the same answer without asking. Nothing here communicates or writes a parameter.

[Note: vectors that look like matrices]
    A matrix of one row or one column is a vector: all that orthogonalising does to it is to make
    its length 1. Muon would then move it equally far in every step, however small its gradient.
    Such parameters are heads with one output, gates and the magnitudes of weight normalisation,
    so they go to the backup unless a list gives them to Muon.

[Note: parameters without elements]
    FSDP1 and ZeRO-3 leave flat or empty tensors where the matrices were. Judged by these shapes,
    no parameter is a matrix, and everything would silently train with the backup. ZeRO-3 keeps
    small parameters whole, so one empty parameter and no matrix are enough to refuse.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter

#: A parameter with one of these in its name goes to the backup; upper and lower case are the same.
#: Source: gefen-x 0.5.0.
DEFAULT_BACKUP_SUBSTRINGS = ("embed", "wte", "wpe", "lm_head", "classifier", "score")

MAX_LISTING_LINES = 40
MAX_NAMES_IN_ERROR = 8

_NUMBER = re.compile(r"(?<![^.])(0|[1-9][0-9]*)(?![^.])")  # a whole part of a dotted name
_WIDEST_RANGES = 16  # characters of "0..3,5,7"; what is longer becomes "*"


# No comparison by value: the == of two tensors is a tensor.
@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where one parameter goes, and why."""

    name: str  # the first of its names
    param: Tensor
    use_muon: bool
    reason: str  # a few words, as in "name contains 'lm_head'"


def route_model(
    model: nn.Module, *, backup_substrings: Iterable[str] = DEFAULT_BACKUP_SUBSTRINGS
) -> tuple[Route, ...]:
    """Return one route for each trainable parameter of ``model``, in the model's order.

    Muon gets the matrices of more than one row and column, except those of an embedding and those
    whose name contains one of ``backup_substrings``. A parameter that the model has under several
    names, such as a head tied to its embedding, goes to the backup if any of them says so.

    Args:
        model: Read, not written. Its parameters may be sharded DTensors.
        backup_substrings: Compared without regard to case.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: No parameter is trainable, or FSDP1, ZeRO-3 or a lazy module hides the shapes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {_kind(model)}")
    substrings = lowered(backup_substrings, "backup_substrings")
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), (param, []))[1].append(name)
    in_embeddings = _names_in_embeddings(model)
    routes = [
        _judged(names, param, substrings, in_embeddings.get(key, ()))
        for key, (param, names) in found.items()
        if param.requires_grad
    ]
    return _checked(routes, what=f"{_kind(model)} has no parameter that requires a gradient")


def route_named(
    named: Iterable[tuple[str, Tensor]],
    *,
    backup_substrings: Iterable[str] = DEFAULT_BACKUP_SUBSTRINGS,
) -> tuple[Route, ...]:
    """Return one route for each (name, parameter) pair, by its name and shape only.

    As :func:`route_model`, but without the model: an embedding that is not called one goes to
    Muon. All pairs are taken, also those that require no gradient now.

    Args:
        named: Such as ``model.named_parameters()``.
        backup_substrings: Compared without regard to case.

    Raises:
        TypeError: Something is not a pair of a name and a tensor.
        ValueError: There is no pair; a parameter or name comes twice; or FSDP1, ZeRO-3 or a lazy
            module hides the shapes.
    """
    substrings = lowered(backup_substrings, "backup_substrings")
    pairs = _pairs(named, "the list")
    _check_unique([("the list", name, param) for name, param in pairs])
    routes = [_judged([name], param, substrings) for name, param in pairs]
    return _checked(routes, what="there is no (name, parameter) pair")


def route_lists(
    muon: Iterable[tuple[str, Tensor]], backup: Iterable[tuple[str, Tensor]]
) -> tuple[Route, ...]:
    """Return the routes that two lists of (name, parameter) pairs ask for, Muon's first.

    Raises:
        TypeError: Something is not a pair of a name and a tensor.
        ValueError: Both lists are empty; a parameter or name comes twice; Muon is given what is
            not a matrix with elements; or only the backup is given any, and all without elements.
    """
    lists = ("Muon's list", muon), ("the backup's list", backup)
    placed = [(where, *pair) for where, pairs in lists for pair in _pairs(pairs, where)]
    _check_unique(placed)
    routes = []
    for where, name, param in placed:
        _check_initialised(name, param)
        use_muon = where == lists[0][0]
        if use_muon and (param.ndim != 2 or not param.numel()):
            raise ValueError(
                f"Muon needs 2-D parameters with elements; got {name} with shape "
                f"{tuple(param.shape)} in {where}. Move it to {lists[1][0]}."
            )
        routes.append(Route(name, param, use_muon, f"in {where}"))
    # A list without matrices is what the caller wanted, unless there is nothing in it to optimise.
    if any(route.param.numel() for route in routes):
        return tuple(routes)
    return _checked(routes, what="both lists are empty")


def check_covers(routes: Iterable[Route], model: nn.Module) -> None:
    """Raise unless each trainable parameter of ``model`` has exactly one route.

    Routes of frozen parameters, and of parameters outside the model, may be there as well: a loss
    may have parameters of its own.

    Raises:
        ValueError: A trainable parameter has no route, or several.
    """
    routes = tuple(routes)
    times = Counter(id(route.param) for route in routes)
    named = tuple(model.named_parameters())
    trainable = [(name, times[id(param)]) for name, param in named if param.requires_grad]
    doubled = [name for name, count in trainable if count > 1]
    missing = [name for name, count in trainable if count == 0]
    problems = []
    if doubled:
        problems.append(f"given more than once: {_enumerated(doubled)}. Leave one of each.")
    if missing:
        problems.append(
            f"given to neither half: {_enumerated(missing)}. Add them to a list, or set their "
            "requires_grad to False."
        )
        own = {id(param) for _, param in named}
        foreign = [route.name for route in routes if id(route.param) not in own]
        if foreign:  # the usual cause: sharding or converting a model replaces its parameters
            problems.append(
                f"Not in the model, but given: {_enumerated(foreign)}. If the model was sharded or "
                "converted after its parameters were read, read them again."
            )
    if problems:
        raise ValueError(
            f"expected each trainable parameter of {_kind(model)} once; {' '.join(problems)}"
        )


def decays(name: str, no_decay_substrings: Iterable[str]) -> bool:
    """Return whether weight decay applies: the name contains none of these, in whatever case.

    Raises:
        TypeError: ``no_decay_substrings`` is one string, or holds something else than strings.
        ValueError: It holds an empty string, which every name contains.
    """
    return _contained([name], lowered(no_decay_substrings, "no_decay_substrings")) is None


def listing(routes: Iterable[Route], headings: tuple[str, str] = ("Muon", "backup")) -> str:
    """Return a table of Muon's half and the backup's: name, shape and reason of each parameter.

    Equal parameters of repeated layers share a line, as in ``layers.{0..11}.attn.weight``; numbers
    that do not fit such ranges are a ``*``. At most ``MAX_LISTING_LINES`` lines, whatever comes.
    """
    routes = tuple(routes)
    halves = [[route for route in routes if route.use_muon is muon] for muon in (True, False)]
    lines = [_lines(half) for half in halves]
    room = MAX_LISTING_LINES - len(headings)
    # What one half leaves of its share is the other's.
    first = min(len(lines[0]), max(room // 2, room - len(lines[1])))
    rooms = (first, min(len(lines[1]), room - first))
    shown = [_shortened(part, fit) for part, fit in zip(lines, rooms, strict=True)]
    rows = [line.cells for part in shown for line in part]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    text = []
    for heading, half, part in zip(headings, halves, shown, strict=True):
        text.append(f"{heading}: {_amount(len(half), sum(each.param.numel() for each in half))}")
        for name, shape, reason in (line.cells for line in part):
            text.append(f"  {name:<{widths[0]}}  {shape:<{widths[1]}}  {reason}".rstrip())
    return "\n".join(text)


def _names_in_embeddings(model: nn.Module) -> dict[int, list[str]]:
    """The names, inside embeddings, of all parameters that an embedding holds.

    All of them, not only ``weight``: a parametrised embedding keeps its weight elsewhere.
    """
    found: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            for name, param in module.named_parameters(prefix, remove_duplicate=False):
                found.setdefault(id(param), []).append(name)
    return found


def _judged(
    names: Sequence[str],
    param: Tensor,
    substrings: Sequence[str],
    in_embeddings: Sequence[str] = (),
) -> Route:
    """The route of a parameter of these names, with the strongest reason against Muon."""
    _check_initialised(names[0], param)
    if isinstance(param, FlatParameter):
        raise ValueError(
            f"expected parameters as the model defines them; {names[0]} is one of FSDP1's flat "
            "parameters, in which the matrices cannot be told apart. Shard with fully_shard."
        )
    if in_embeddings:
        others = [name for name in names if name not in in_embeddings]
        reason: str | None = f"embedding (also {', '.join(others)})" if others else "embedding"
        if names[0] in others:
            reason = f"tied to embedding {in_embeddings[0]}"
    else:
        # A shape is the stronger reason: other backup_substrings would not change it.
        reason = _shape_reason(param) or _contained(names, substrings)
    return Route(names[0], param, reason is None, reason or "hidden matrix")


def _shape_reason(param: Tensor) -> str | None:
    if not param.numel():
        return "no elements"
    if param.ndim != 2:
        return f"{param.ndim}-D"
    # See [Note: vectors that look like matrices].
    if 1 in param.shape:
        return "a single row" if param.shape[0] == 1 else "a single column"
    return "complex" if param.is_complex() else None


def _contained(names: Sequence[str], substrings: Sequence[str]) -> str | None:
    """Which name contains which substring, or None."""
    for name in names:
        for substring in substrings:
            if substring in name.lower():
                whose = "name" if name == names[0] else f"its other name {name}"
                return f"{whose} contains {substring!r}"
    return None


def lowered(substrings: Iterable[str], option: str) -> tuple[str, ...]:
    """Return substrings in lower case; see :func:`decays` for what is refused."""
    # A string is an iterable of strings too: its letters, which nearly every name contains.
    found = () if isinstance(substrings, str) else tuple(substrings)
    if isinstance(substrings, str) or not all(isinstance(each, str) for each in found):
        raise TypeError(f"{option} must be several strings, such as ('norm',), got {substrings!r}")
    if "" in found:
        raise ValueError(f"{option} holds an empty string, which every name contains: {found!r}")
    return tuple(each.lower() for each in found)


def _pairs(named: Iterable[tuple[str, Tensor]], where: str) -> list[tuple[str, Tensor]]:
    expected = f"{where}: expected (name, parameter) pairs, as from model.named_parameters();"
    if not isinstance(named, Iterable):
        raise TypeError(f"{expected} got {_kind(named)}")
    pairs = list(named)
    for index, item in enumerate(pairs):
        kinds = [_kind(item)]
        if isinstance(item, tuple | list):
            if len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor):
                continue
            kinds = [_kind(each) for each in item]
        raise TypeError(f"{expected} got ({', '.join(kinds)}) at position {index}")
    return pairs


def _check_unique(found: Iterable[tuple[str, str, Tensor]]) -> None:
    """Raise if two of these (place, name, parameter) are the same parameter, or of one name."""
    seen: dict[object, str] = {}
    for where, name, param in found:
        this = f"{name} in {where}"
        if id(param) in seen:
            raise ValueError(
                f"expected each parameter once; {this} is the same tensor as {seen[id(param)]}. "
                "Leave one of them."
            )
        if name.lower() in seen:
            raise ValueError(
                f"expected names that differ in more than case; {this} and {seen[name.lower()]} "
                "are two parameters. Rename one of them."
            )
        seen[id(param)] = seen[name.lower()] = this


def _check_initialised(name: str, param: Tensor) -> None:
    if nn.parameter.is_lazy(param):
        raise ValueError(
            f"expected parameters that have shapes; {name} belongs to a lazy module that has seen "
            "no data. Run the model once before the optimizer is made."
        )


def _checked(routes: Sequence[Route], *, what: str) -> tuple[Route, ...]:
    """The routes, if they are those of a model that still has its shapes."""
    if not routes:
        raise ValueError(f"expected at least one parameter to optimise, but {what}.")
    empty = [route.name for route in routes if not route.param.numel()]
    # See [Note: parameters without elements].
    if empty and not any(route.use_muon for route in routes):
        raise ValueError(
            "expected parameters with their whole shapes; none is a matrix for Muon, and "
            f"{len(empty)} of {len(routes)} have no elements: {_enumerated(empty)}. FSDP1 and "
            "ZeRO-3 leave such parameters. Make the optimizer before they take the model over, or "
            "shard with fully_shard."
        )
    return tuple(routes)


def _enumerated(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES_IN_ERROR
    return ", ".join(names[:MAX_NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")


def _kind(value: object) -> str:
    return type(value).__name__


@dataclass(frozen=True, slots=True)
class _Line:
    cells: tuple[str, str, str]  # name, shape, reason
    num_params: int
    numel: int


def _lines(routes: Sequence[Route]) -> list[_Line]:
    """One line for all parameters that differ only in the numbers in their names."""
    alike: dict[tuple[str, tuple[int, ...], str], list[Route]] = {}
    for route in routes:
        pattern = _NUMBER.sub("#", route.name)
        alike.setdefault((pattern, tuple(route.param.shape), route.reason), []).append(route)
    lines = []
    for (_, shape, reason), group in alike.items():
        name = _common_name([route.name for route in group])
        if len(group) > 1:
            name += f" ({len(group)}x)"
        cells = (name, " x ".join(map(str, shape)) or "scalar", reason)
        lines.append(_Line(cells, len(group), sum(route.param.numel() for route in group)))
    return lines


def _common_name(names: Sequence[str]) -> str:
    """One name for several: ranges of numbers, or ``*`` where ranges would say too much."""
    columns = list(zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True))
    values = [sorted(set(column)) for column in columns]
    # layers.{0,1}.experts.{0,1} claims four names. If there are only three, no range is true.
    is_grid = math.prod(map(len, values)) == len(names)
    texts = (
        str(found[0]) if len(found) == 1 else _ranges(found) if is_grid else "*" for found in values
    )
    return _NUMBER.sub(lambda match: next(texts), names[0])


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as in ``{0..3,5}``."""
    parts = []
    # Neighbours that follow each other are equally far from their positions.
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        first, *others = (number for _, number in run)
        parts.append(f"{first}..{others[-1]}" if others else str(first))
    text = ",".join(parts)
    return f"{{{text}}}" if len(text) <= _WIDEST_RANGES else "*"


def _shortened(lines: Sequence[_Line], room: int) -> list[_Line]:
    if len(lines) <= room:
        return list(lines)
    kept, rest = list(lines[: room - 1]), lines[room - 1 :]
    amount = _amount(sum(each.num_params for each in rest), sum(each.numel for each in rest))
    return [*kept, _Line(("...", "", f"and {amount} more"), 0, 0)]


def _amount(num_params: int, numel: int) -> str:
    plural = "s" if num_params != 1 else ""
    return f"{num_params:,} parameter{plural}, {numel:,} element{'s' if numel != 1 else ''}"

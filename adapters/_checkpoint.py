"""State dicts of optimizers with quantised momenta: packed as they are, loaded by all or by none.

A state dict is torch's, with three additions::

    {
        "state": {0: {"automatic_period": 64, "step": 3, "m_codebook": ..., ...}, ...},
        "param_groups": [{..., "gefen": {"format": 1, "codebook": ..., "global_step": 3}}, ...],
    }

The codebook stands in the groups, next to the indices that it decodes and where every tool that
handles state dicts of torch keeps it. State of a sharded parameter is this rank's, as DTensors; see
[Note: rows] in ``_rows``. A state dict without DTensors holds whole tensors, and can be loaded into
sharded parameters too: each rank takes its part.

[Note: stage, then publish]
    Loading checks everything, and makes everything that the optimizer will hold, before anything
    of it is written; ranks then agree; what remains are assignments.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from adapters._dense_state import (
    ALL_ROWS,
    OWN_ROWS,
    dense_entry,
    is_alone,
    row_key,
    with_place_for_rows,
)
from adapters._legacy import from_gefen_x, is_gefen_x
from adapters._momenta import digest, digest_of
from adapters._muon_rule import MuonRule
from adapters._rows import ORIGIN, Origin, as_param, as_row, is_cut, own_part, own_row
from adapters._rules import Member, Rule, local, spans_ranks
from adapters._shards import read_shards
from adapters._state import FORMAT, RECORD, Entry, Kind, Record, kinds_of, parse
from adapters.options import check_options

# What Muon's state never has, and what the state of other rules never has.
_FOREIGN = {True: {"vmean", "v_row", "v_col"}, False: {ALL_ROWS, OWN_ROWS}}

# ---- packing ----


def pack(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Complete what torch's ``state_dict`` returned, in place.

    Collectives:
        None.
    """
    members = list(optimizer._members())
    for member, group in zip(
        members, _group_of_each(state_dict["param_groups"], len(members)), strict=True
    ):
        rule = optimizer._rule_of(member.group)
        record = None if rule.momenta is None else rule.momenta.record()
        if record is not None:
            group[RECORD] = {"format": FORMAT, **record}
        entry = state_dict["state"].get(member.position)
        if entry and isinstance(member.param, DTensor):
            levels = None if record is None else record["codebook"]
            state_dict["state"][member.position] = _pack_entry(entry, rule, levels, member)


def _group_of_each(groups: Sequence[dict[str, Any]], total: int) -> list[dict[str, Any]]:
    found = [group for group in groups for _ in group["params"]]
    if len(found) != total:
        raise AssertionError("torch packs every parameter once")
    return found


def _pack_entry(
    entry: Mapping[str, Any], rule: Rule, levels: Tensor | None, member: Member
) -> dict[str, Any]:
    param = member.param
    if not isinstance(param, DTensor):
        raise AssertionError("plain parameters have plain state")
    packed = with_place_for_rows(entry, rule, member)
    entry = packed.copy()
    if rule.momenta is None:
        packed[ORIGIN] = Origin.of(param, alone=is_alone(rule)).packed(param)
        for key in {ALL_ROWS, OWN_ROWS} & set(entry):
            packed[key] = as_row(entry[key], param, param.size(0))
        return packed
    alone, period = rule.momenta.alone, entry["automatic_period"]
    kinds = kinds_of(read_shards(param, name=member.name, alone=alone), period)
    for key, value in entry.items():
        if key == "m_codebook":
            packed[key] = as_param(value, param)
        elif isinstance(value, Tensor):
            packed[key] = as_row(value, param, _width(kinds[key], param, alone=alone))
    digest = "" if levels is None else digest_of(levels)
    origin = Origin.of(param, alone=alone, period=period, digest=digest)
    return {**packed, ORIGIN: origin.packed(param)}


def _width(kind: Kind, param: DTensor, *, alone: bool) -> int:
    if not alone:
        return max(kind.lengths())
    # A rank that learns alone knows nothing of the others' blocks, but has their sizes.
    shards = read_shards(param, name="")
    return max(max(part.numel for part in shards.parts), sum(param.shape))


# ---- loading ----


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """What an optimizer will hold once all ranks agree to it."""

    state: dict[Any, Any]
    groups: list[dict[str, Any]]
    rules: tuple[Rule, ...]
    records: tuple[Record | None, ...]  # of the rules

    def common(self) -> list[Any]:
        """Return what must be equal on all ranks."""
        found: list[Any] = []
        for rule, record in zip(self.rules, self.records, strict=True):
            if record is not None:
                learned = record.codebook is not None and digest_of(record.codebook)
                # Ranks that learn alone have codebooks of their own.
                found.append([None if is_alone(rule) else learned, record.global_step])
        return found

    def by_mesh(self) -> dict[tuple[int, ...], str]:
        """Return, for the ranks of each mesh, what must be equal on them.

        Which counters and moments the parameters of the mesh have, one after the other, and how
        old they are. Not their places: on other meshes ranks may hold others between them.
        """
        texts: dict[tuple[int, ...], list[str]] = {}
        for group in self.groups:
            rule = next(rule for rule in self.rules if rule.owns(group))
            for param in group["params"]:
                if spans_ranks(param) and not is_alone(rule):
                    ranks = tuple(sorted(param.device_mesh.mesh.flatten().tolist()))
                    texts.setdefault(ranks, []).append(str(_facts(self.state.get(param, {}))))
        return {ranks: digest("\n".join(lines)) for ranks, lines in sorted(texts.items())}


def _facts(entry: Mapping[str, Any]) -> list[str]:
    # Ranks without elements of a matrix orthogonalise nothing, and so have no moment of its rows.
    return [
        f"{key}={float(value)}" if isinstance(value, int) or key == "step" else str(key)
        for key, value in sorted(entry.items())
        if not str(key).startswith("normuon_")
    ]


def stage(optimizer: Any, state_dict: Mapping[str, Any]) -> Staged:
    """Return what loading ``state_dict`` would make of the optimizer; nothing is written.

    Raises:
        ValueError: It does not belong to this optimizer, or is damaged. The text says where.

    Collectives:
        None.
    """
    is_imported = is_gefen_x(state_dict)
    if is_imported:
        state_dict = from_gefen_x(state_dict)
    _check_form(state_dict)
    saved = deepcopy(list(state_dict["param_groups"]))
    _check_groups(optimizer.param_groups, saved)
    found: dict[Rule, list[tuple[str, Any]]] = {rule: [] for rule in optimizer._rules}
    for i, (group, new) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        rule = optimizer._rule_of(group)
        found[rule].append((f"parameter group {i}", new.pop(RECORD, None)))
        if rule is not optimizer._rule_of({**group, **new}):
            raise ValueError(
                f"parameter group {i} was of the other half when it was saved; build the "
                "optimizer so that the same parameters go to Muon"
            )
        check_options(new, rule.options, f"parameter group {i}")
        for key, value in group.items():  # torch keeps what an old checkpoint does not know
            new.setdefault(key, value)
        new["params"] = group["params"]
    records = tuple(_record(rule, found[rule]) for rule in optimizer._rules)
    by_rule = dict(zip(optimizer._rules, records, strict=True))
    ids = [key for group in state_dict["param_groups"] for key in group["params"]]
    state: dict[Any, Any] = defaultdict(dict)
    with torch.no_grad():
        for key, member in zip(ids, optimizer._members(), strict=True):
            if key in state_dict["state"]:
                rule = optimizer._rule_of(member.group)
                entry = state_dict["state"][key]
                state[member.param] = _entry(rule, by_rule[rule], member, entry)
    if is_imported:
        for group in saved:
            _keep_form_of_moments(group, state)
    # As in torch, a user's own values may stand beside the state of parameters.
    known = set(ids)
    state.update({k: deepcopy(v) for k, v in state_dict["state"].items() if k not in known})
    return Staged(state, saved, optimizer._rules, records)


def _keep_form_of_moments(group: dict[str, Any], state: Mapping[Any, Any]) -> None:
    """Let matrices go on with what they have: gefen-x does not save how it was told to start."""
    matrices = [param for param in group["params"] if param.ndim == 2]
    moments = {key for param in matrices for key in state.get(param, {})}
    if "factored_v_2d" in group and not moments.isdisjoint({"vmean", "v_row"}):
        group["factored_v_2d"] = "v_row" in moments


def _check_form(state_dict: Mapping[str, Any]) -> None:
    for key, kind in (("state", Mapping), ("param_groups", Sequence)):
        if not isinstance(state_dict.get(key), kind):
            raise ValueError(
                f'the state dict has no "{key}"; expected what state_dict() of an optimizer '
                f"returns, got the keys {sorted(map(str, state_dict))}"
            )
    for i, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), Sequence):
            raise ValueError(f'parameter group {i} has no "params"; the state dict is damaged')
    ids = [key for group in state_dict["param_groups"] for key in group["params"]]
    if len(ids) != len(set(ids)):
        raise ValueError("the state dict lists a parameter twice; it is damaged")
    lost = [key for key in state_dict["state"] if isinstance(key, int) and key not in ids]
    if lost:
        raise ValueError(f"the state dict has state of {lost}, which none of its groups lists")


def _check_groups(groups: Sequence[Mapping[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
    sizes, saved_sizes = ([len(each["params"]) for each in some] for some in (groups, saved))
    if sizes != saved_sizes:
        raise ValueError(
            f"the optimizer has groups of {sizes} parameters, the state dict of {saved_sizes}; "
            "build the optimizer as the one that was saved"
        )
    for i, (group, new) in enumerate(zip(groups, saved, strict=True)):
        names, saved_names = group.get("param_names"), new.get("param_names")
        if not names or not saved_names:
            continue
        if len(names) != len(saved_names):
            raise ValueError(
                f"parameter group {i} of the state dict has {len(saved_names)} names for "
                f"{len(names)} parameters; it is damaged"
            )
        for mine, its in zip(names, saved_names, strict=True):
            if mine.lower() != str(its).lower():
                raise ValueError(
                    f"parameter group {i} has {mine} where the state dict has {its}; list "
                    "parameters in the order in which they were saved"
                )
        new["param_names"] = names


def _record(rule: Rule, found: Sequence[tuple[str, Any]]) -> Record | None:
    """Return what the groups of one rule say of all its parameters."""
    if rule.momenta is None:
        extra = [where for where, value in found if value is not None]
        if extra:
            raise ValueError(
                f"{extra[0]} was saved with a quantised momentum, but this optimizer keeps none"
            )
        return None
    records = []
    for where, value in found:
        if value is None:
            raise ValueError(
                f"{where} has no record of a codebook; the state dict was saved by an optimizer "
                "without quantised momenta, or a tool has removed it"
            )
        if isinstance(value, Mapping) and value.get("format", FORMAT) != FORMAT:
            raise ValueError(
                f"{where} has format {value['format']!r}; this version reads format {FORMAT}"
            )
        records.append(parse(Record, value, f"{where}, {RECORD}"))
    for other in records[1:]:
        if not _same_record(records[0], other):
            raise ValueError(f"{found[0][0]} and another have different codebooks or steps")
    return records[0] if records else Record(format=1, codebook=None, global_step=0)


def _same_record(one: Record, other: Record) -> bool:
    books = (one.codebook, other.codebook)
    if any(book is None for book in books):
        return books == (None, None) and one.global_step == other.global_step
    first, second = (book for book in books if book is not None)
    return torch.equal(first, second) and one.global_step == other.global_step


def _entry(rule: Rule, record: Record | None, member: Member, saved: Any) -> dict[str, Any]:
    where, param = f"the state of {member.name}", member.param
    if not isinstance(saved, Mapping):
        raise ValueError(f"{where} is a {type(saved).__name__}; expected a dict")
    if not saved:
        return {}
    saved, origin = dict(saved), saved.get(ORIGIN)
    saved.pop(ORIGIN, None)
    if not local(param).numel():
        saved = {key: value for key, value in saved.items() if not key.startswith("normuon_")}
    if rule.momenta is None or record is None:
        return dense_entry(rule, member, saved, origin)
    alone = rule.momenta.alone
    entry: Entry = parse(Entry, saved, where)
    if entry.m_codebook is not None and record.codebook is None:
        raise ValueError(
            f"{where} has indices, but there is no codebook to read them with; the state dict is "
            "incomplete"
        )
    if origin is not None or any(isinstance(value, DTensor) for value in saved.values()):
        book = "" if record.codebook is None else digest_of(record.codebook)
        mine = Origin.of(param, alone=alone, period=entry.automatic_period, digest=book)
        mine.check(origin, param, where)
    elif alone and is_cut(param):
        raise ValueError(
            f'{where} is that of the whole parameter. With sharded_mode "approx" each rank has '
            "blocks of its own, so only what this mode saved on the same ranks can be loaded; "
            '"exact" can load it.'
        )
    shards = read_shards(param, name=member.name, alone=alone)
    numel = sum(part.numel for part in shards.parts)
    if numel % entry.automatic_period:
        raise ValueError(
            f"{where}: blocks of {entry.automatic_period} elements do not divide a parameter of "
            f"{numel}"
        )
    foreign = _FOREIGN[isinstance(rule, MuonRule)] & set(saved)
    if foreign:
        raise ValueError(f"{where} has {sorted(foreign)}; another optimizer has saved it")
    has_second = entry.vmean is not None or entry.v_row is not None
    if entry.m_codebook is not None and not has_second and not isinstance(rule, MuonRule):
        raise ValueError(f"{where} has no second moment; another optimizer has saved it")
    kinds = kinds_of(shards, entry.automatic_period)
    staged: dict[str, Any] = {}
    for key in saved:
        value = getattr(entry, key)
        if isinstance(value, Tensor):
            if key not in kinds:
                raise ValueError(f"{where}: only matrices have {key}")
            value = _quantised_part(value, key, kinds[key], param, f"{where}, {key}", alone=alone)
            _check_values(value, key, where)
            if key in (ALL_ROWS, OWN_ROWS):
                saved_as, key = key, row_key(rule, key, param, f"{where}, {key}")
                if saved_as != key:
                    value = kinds[key].take(value.flatten()).view(kinds[key].shape).clone()
        if value is not None:
            staged[key] = value
    return staged


def _quantised_part(
    value: Tensor, key: str, kind: Kind, param: Tensor, where: str, *, alone: bool
) -> Tensor:
    """Return this rank's part of a saved tensor, from its own or from the whole."""
    if isinstance(value, DTensor):
        if key == "m_codebook" or not isinstance(param, DTensor):
            part = own_part(value, param, where)
        else:
            width = _width(kind, param, alone=alone)
            part = own_row(value, math.prod(kind.shape), width, param, where)
    elif kind.is_whole(value):
        part = kind.take(value.flatten())
    else:
        raise ValueError(
            f"{where} has shape {tuple(value.shape)}; expected {kind.whole}, as of the whole "
            "parameter"
        )
    return part.reshape(kind.shape).to(local(param).device, copy=True)


def _check_values(value: Tensor, key: str, where: str) -> None:
    wanted = torch.uint8 if key == "m_codebook" else torch.float32
    if value.dtype != wanted:
        raise ValueError(f"{where}, {key} is {value.dtype}; expected {wanted}")
    if wanted == torch.float32 and not bool(((value >= 0) & value.isfinite()).all()):
        raise ValueError(f"{where}, {key} holds values that are negative or not finite")

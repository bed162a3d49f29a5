"""Remember all that an optimizer's step could change, byte for byte, and compare it later.

Nothing here communicates: of a DTensor only this rank's shard is read, so one rank may take a
snapshot alone. And nothing here changes what it looks at: no generator is advanced, no state entry
made, no tensor kept whose memory the optimizer writes.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_SHOWN = 20  # differences in one message
_SHOWN_CHARACTERS = 80  # of one value


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What :func:`snapshot` saw; compare it with :func:`assert_unchanged`.

    Attributes:
        facts: Path ("state[layers.0.weight].momentum_buffer") -> what was there.
        gradients: Whether gradients are among them.
        parameters: Kept, so that the identity of one is not given to another tensor.
    """

    facts: Mapping[str, _Fact]
    gradients: bool
    parameters: tuple[Tensor, ...]


def snapshot(optimizer: torch.optim.Optimizer, *, gradients: bool = True) -> Snapshot:
    """Return a copy of all that ``optimizer`` could change, to compare it with later.

    That is: parameters (identity, values, layout, placement), gradients, state, hyper-parameters,
    what else a copy of the optimizer takes along (``__getstate__``), Python's ``random`` and
    torch's generators of the CPU and of the parameters' CUDA devices. It takes as much memory as
    what it copies.

    Args:
        optimizer: Read, not written.
        gradients: Whether to include them; leave them out where a backward runs in between.

    Collectives:
        None. Of a DTensor, only this rank's shard is read.
    """
    parameters = tuple(p for group in optimizer.param_groups for p in group["params"])
    with torch.no_grad():
        facts = dict(_facts_of(optimizer, gradients=gradients))
    return Snapshot(facts, gradients, parameters)


def assert_unchanged(optimizer: torch.optim.Optimizer, before: Snapshot) -> None:
    """Raise unless ``optimizer`` is as it was ``before``, byte for byte.

    Equal bytes are equal, also those of a NaN; 0.0 and -0.0 differ, and so do 1 and 1.0.

    Args:
        optimizer: The optimizer that the snapshot was taken of.
        before: What it must still be.

    Raises:
        AssertionError: Something changed; the text says what, and at how many elements.

    Collectives:
        None.
    """
    now = snapshot(optimizer, gradients=before.gradients)
    paths = dict.fromkeys([*before.facts, *now.facts])
    found = [
        f"{path} {what}"
        for path in paths
        for what in _differences(before.facts.get(path), now.facts.get(path))
    ]
    if found:
        more = [f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        raise AssertionError("\n".join(["changed since the snapshot:", *found[:_SHOWN], *more]))


@dataclass(frozen=True, slots=True, eq=False)
class _TensorFact:
    """One tensor: what is said about it, and a copy of its bytes."""

    about: Mapping[str, Hashable]
    data: Tensor | None  # uint8, (elements, bytes an element); None on the meta device


@dataclass(frozen=True, slots=True)
class _PlainFact:
    """Any other value, as bytes: two NaNs of one pattern are equal so, and 1 is not 1.0."""

    data: bytes
    text: str = dataclasses.field(compare=False)


_Fact: TypeAlias = _TensorFact | _PlainFact


def _differences(before: _Fact | None, now: _Fact | None) -> Iterator[str]:
    if before is None or now is None:
        yield "appeared" if before is None else "disappeared"
    elif isinstance(before, _TensorFact) and isinstance(now, _TensorFact):
        yield from _tensor_differences(before, now)
    elif isinstance(before, _PlainFact) and isinstance(now, _PlainFact):
        if before != now:
            yield f"changed from {before.text} to {now.text}"
    else:
        yield "changed between a tensor and another value"


def _tensor_differences(before: _TensorFact, now: _TensorFact) -> Iterator[str]:
    if before.about.get("identity") != now.about.get("identity"):
        yield "is another tensor"
    for what in dict.fromkeys([*before.about, *now.about]):
        old, new = before.about.get(what), now.about.get(what)
        if old != new and what != "identity":
            yield f"changed its {what} from {old} to {new}"
    a, b = before.data, now.data
    if a is not None and b is not None and a.shape == b.shape and a.device == b.device:
        count = int((a != b).any(dim=1).sum())
        if count:
            yield f"changed at {count} of {len(a)} elements"


def _facts_of(optimizer: torch.optim.Optimizer, *, gradients: bool) -> Iterator[tuple[str, _Fact]]:
    names = _names(optimizer.param_groups)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        name = names[id(parameter)]
        yield from _tensor_facts(f"parameter[{name}]", parameter, identity=id(parameter))
        if gradients and parameter.grad is not None:
            yield from _tensor_facts(f"gradient[{name}]", parameter.grad)
    for number, (key, value) in enumerate(optimizer.state.items()):
        unknown = f"<tensor {number}, in no group>" if isinstance(key, Tensor) else repr(key)
        yield from _walk(f"state[{names.get(id(key), unknown)}]", value)
    for number, group in enumerate(optimizer.param_groups):
        order = [names[id(parameter)] for parameter in group["params"]]
        yield from _walk(f"param_groups[{number}]", {**group, "params": order})
    for name, carried in optimizer.__getstate__().items():
        if name not in ("defaults", "state", "param_groups"):
            yield from _walk(name, carried)
    yield "rng.python", _plain(random.getstate())
    yield from _tensor_facts("rng.torch", torch.get_rng_state())
    for device in sorted({p.device.index for p in parameters if p.device.type == "cuda"}):
        yield from _tensor_facts(f"rng.cuda:{device}", torch.cuda.get_rng_state(device))


def _names(groups: Sequence[Mapping[str, object]]) -> dict[int, str]:
    """Name each parameter: as the user did, or by its place in its group."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for number, group in enumerate(groups):
        parameters = group["params"]
        assert isinstance(parameters, list)
        given = group.get("param_names")
        for place, parameter in enumerate(parameters):
            positional = f"group{number}[{place}]"
            name = str(given[place]) if isinstance(given, list) else positional
            if name in taken:  # torch refuses equal names in one group, not in two
                name = f"{name} of {positional}"
            taken.add(name)
            names[id(parameter)] = name
    return names


def _walk(path: str, value: object) -> Iterator[tuple[str, _Fact]]:
    """Yield the facts of a nested value, leaf by leaf; a container is a fact by its kind."""
    items: list[tuple[str, object]]
    if isinstance(value, Tensor):
        yield from _tensor_facts(path, value)
        return
    if isinstance(value, Mapping):
        items = [(f".{k}" if isinstance(k, str) else f"[{k!r}]", v) for k, v in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"[{place}]", item) for place, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    else:
        yield path, _plain(value)
        return
    yield path, _plain(type(value))
    for step, item in items:
        yield from _walk(path + step, item)


def _plain(value: object) -> _PlainFact:
    text = repr(value)
    if len(text) > _SHOWN_CHARACTERS:
        text = text[:_SHOWN_CHARACTERS] + "..."
    try:
        return _PlainFact(pickle.dumps(value), text)
    except Exception:  # a lambda, a lock: what can be said is which object it is
        return _PlainFact(str(id(value)).encode(), text)


def _tensor_facts(
    path: str, tensor: Tensor, *, identity: int | None = None
) -> Iterator[tuple[str, _TensorFact]]:
    about: dict[str, Hashable] = {
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "layout": tensor.layout,
        "device": tensor.device,
        "requires_grad": tensor.requires_grad,
    }
    if identity is not None:
        about["identity"] = identity
    local = tensor
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        about["placements"] = tensor.placements
        about["mesh"] = f"{mesh.mesh.tolist()} {mesh.mesh_dim_names or ''}"
        local = tensor.to_local()
        about["local shape"] = tuple(local.shape)
    if local.layout == torch.strided:
        about["stride"] = tensor.stride()
        about["local stride"] = local.stride()
        yield path, _TensorFact(about, _bytes(local))
        return
    yield path, _TensorFact(about, None)
    for name, part in _sparse_parts(local):
        yield from _tensor_facts(f"{path}.{name}", part)


def _sparse_parts(tensor: Tensor) -> list[tuple[str, Tensor]]:
    if tensor.layout == torch.sparse_coo:
        return [("indices", tensor._indices()), ("values", tensor._values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        places = [("crow_indices", tensor.crow_indices()), ("col_indices", tensor.col_indices())]
    else:
        places = [("ccol_indices", tensor.ccol_indices()), ("row_indices", tensor.row_indices())]
    return [*places, ("values", tensor.values())]


def _bytes(tensor: Tensor) -> Tensor | None:
    """Return a copy of a strided tensor's bytes, (elements, bytes an element), in logical order."""
    if tensor.is_meta:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    copy = plain.clone(memory_format=torch.contiguous_format)
    return copy.reshape(-1).view(torch.uint8).reshape(tensor.numel(), tensor.element_size())

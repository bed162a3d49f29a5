"""What an optimizer holds, as facts: read from torch once, checked cheaply before every vote.

Only sharded parameters (DTensors over more than one rank) are facts of a group; a plain tensor
is nobody else's business, and comparing it could only raise a false alarm.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import compress
from numbers import Integral, Real
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from consensus._wire import digest
from consensus.vote import Fact, Ranks

ParamGroups = Sequence[Mapping[str, Any]]

_LOCAL, _SPEC = attrgetter("_local_tensor"), attrgetter("_spec")
_REQUIRES_GRAD = attrgetter("requires_grad")
_GRADIENT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHAPE, _LAYOUT, _DEVICE = attrgetter("shape"), attrgetter("layout"), Tensor.get_device
_GRAD = attrgetter("grad")
# Else each read of a DTensor looks for an override of it, which takes longer than the read.
_reading_plainly = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """One DTensor parameter: what must be equal on its mesh, and what its gradient looks like."""

    name: str
    tensor: DTensor
    group: int  # index in param_groups
    scope: Ranks  # ranks of its mesh
    text: str  # global shape, dtype, placements, mesh: equal on every rank of the scope
    shape: torch.Size  # of the local shard
    device: int  # of the local shard; -1 is the CPU
    spec: Any  # DTensorSpec: mesh, placements, global shape and dtype


@dataclass(slots=True)
class Manifest:
    """The parameters of one optimizer (or of a list) as they were when last read."""

    params: tuple[Tensor, ...]  # all of them, in order, plain ones included
    requires_grad: tuple[bool, ...]
    sharded: tuple[ShardedParameter, ...]
    meshes: tuple[Any, ...]  # distinct DeviceMeshes, in parameter order
    by_scope: dict[Ranks, tuple[ShardedParameter, ...]] = field(default_factory=dict)
    digests: dict[Ranks, int] = field(default_factory=dict)
    _tensors: list[DTensor] = field(default_factory=list)  # those of ``sharded``
    _expected: tuple[list[Any], ...] = ([], [], [])  # of gradients: specs, local shapes, devices
    places: dict[int, int] = field(default_factory=dict)  # id -> where it was first seen
    _option_texts: tuple[tuple[str, ...], ...] = ()
    _option_keys: tuple[bytes, ...] = ()

    def is_current(self, groups: ParamGroups) -> bool:
        """Return whether ``groups`` still hold these very tensors; reads no values."""
        params = [param for group in groups for param in group["params"]]
        if len(params) != len(self.params) or not all(map(is_, params, self.params)):
            return False
        with _reading_plainly():
            return tuple(map(_REQUIRES_GRAD, params)) == self.requires_grad

    def what_changed(self, groups: ParamGroups) -> str:
        """Return the first difference from what was read, for an error message."""
        params = [param for group in groups for param in group["params"]]
        if len(params) != len(self.params):
            return f"expected {len(self.params)} parameters; got {len(params)}"
        for i, (now, then) in enumerate(zip(params, self.params, strict=True)):
            name = self.name_of(then) or f"parameter {i}"
            if now is not then:
                return f"{name} is another tensor (shape {tuple(now.shape)}) than was planned"
            if now.requires_grad is not self.requires_grad[i]:
                return f"{name} now has requires_grad={now.requires_grad}"
        return "nothing"

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name under which a sharded parameter travels."""
        return next((p.name for p in self.sharded if p.tensor is tensor), None)

    def gradients(self) -> bytes:
        """Return one byte for each sharded parameter: 0 without a gradient, 1 with one.

        A gradient of another dtype than its parameter has a number of its own: on ranks that
        share a mesh it must be the same.

        Raises:
            ValueError: A gradient that cannot belong to its parameter, named.
        """
        # Whole columns at a time: a loop over attributes costs three times as much.
        with _reading_plainly():
            grads = list(map(_GRAD, self._tensors))
        present = bytes(grad is not None for grad in grads)
        specs, shapes, devices = self._expected
        held = grads
        if 0 in present:
            specs, shapes, devices = (list(compress(column, present)) for column in self._expected)
            held = list(compress(grads, present))
        try:
            locals_ = list(map(_LOCAL, held))
            fits = (
                list(map(_SPEC, held)) == specs
                and list(map(_SHAPE, locals_)) == shapes
                and list(map(_DEVICE, locals_)) == devices
                and {torch.strided}.issuperset(map(_LAYOUT, locals_))
            )
        except AttributeError:  # a plain tensor among them
            fits = False
        if not fits:
            present = bytes(map(_gradient_code, self.sharded, grads))
        return present

    def facts(self, groups: ParamGroups, present: bytes) -> tuple[Fact, ...]:
        """Return everything that must be equal on the ranks that share a mesh."""
        option_keys = self._read_options(groups)
        facts = []
        uniform = len(self.by_scope) == 1
        for scope, params in self.by_scope.items():
            used = {param.group for param in params}
            keys = [option_keys[i] for i in sorted(used)]
            shown = present if uniform else _presence_in(self.sharded, present, scope)
            key = self.digests[scope].to_bytes(8, "little")
            texts = self._option_texts
            facts += [
                Fact("parameters", key, lambda ps=params: _describe(ps), scope),  # type: ignore[misc]
                Fact("options", b"".join(keys), lambda u=used, t=texts: _options(u, t), scope),  # type: ignore[misc]
                Fact("gradients", shown, lambda ps=params: _presence(ps), scope),  # type: ignore[misc]
            ]
        return tuple(facts)

    def _read_options(self, groups: ParamGroups) -> tuple[bytes, ...]:
        texts = tuple(_option_texts(group) for group in groups)
        if texts != self._option_texts:
            self._option_texts = texts
            self._option_keys = tuple(
                digest(text.encode() for text in group).to_bytes(8, "little") for group in texts
            )
        return self._option_keys


def read_manifest(groups: ParamGroups, before: Manifest | None = None) -> Manifest:
    """Read all facts of ``groups`` from torch; costs some 20 us a mesh and 5 us a parameter.

    Names come from ``param_names`` (as torch keeps them for named parameters), else from the
    position. Positional identity cannot tell two parameters of equal shape apart: a warning says
    so, once for each call.

    What was read ``before`` tells tensors that have changed places under the same names since: the
    list then says so, and differs from that of ranks where they have not.

    Raises:
        ValueError: The same tensor or the same name twice.
    """
    params = tuple(param for group in groups for param in group["params"])
    _refuse_duplicates(params)
    ranks_of: dict[int, Ranks] = {}
    meshes: list[Any] = []
    sharded: list[ShardedParameter] = []
    named = True
    position = 0
    for index, group in enumerate(groups):
        names = group.get("param_names")
        for i, param in enumerate(group["params"]):
            name = names[i] if names else f"parameter {position}"
            position += 1
            if not isinstance(param, DTensor):
                continue
            mesh = param.device_mesh
            if id(mesh) not in ranks_of:  # DeviceMesh.mesh costs 22 us an access
                ranks_of[id(mesh)] = tuple(sorted(mesh.mesh.flatten().tolist()))
                meshes.append(mesh)
            if len(ranks_of[id(mesh)]) > 1:
                named = named and bool(names)
                sharded.append(_sharded_parameter(name, param, index, ranks_of[id(mesh)]))
    grouped: dict[Ranks, list[ShardedParameter]] = {}
    for item in sharded:
        grouped.setdefault(item.scope, []).append(item)
    places = _first_places(params, before)
    by_scope = {scope: _with_old_places(items, places) for scope, items in grouped.items()}
    if sharded:
        _check_identities(sharded, named)
    digests = {
        scope: digest(part.encode() for name, text in _lines(items) for part in (name, text))
        for scope, items in by_scope.items()
    }
    requires = tuple(bool(param.requires_grad) for param in params)
    expected = ([p.spec for p in sharded], [p.shape for p in sharded], [p.device for p in sharded])
    tensors = [param.tensor for param in sharded]
    return Manifest(
        params,
        requires,
        tuple(sharded),
        tuple(meshes),
        by_scope,
        digests,
        tensors,
        expected,
        places,
    )


def _first_places(params: Sequence[Tensor], before: Manifest | None) -> dict[int, int]:
    """Return id -> the place at which each tensor was first seen, later ones behind."""
    known = {} if before is None else {id(p): before.places[id(p)] for p in before.params}
    behind = max(known.values(), default=-1) + 1
    return {id(param): known.get(id(param), behind + i) for i, param in enumerate(params)}


def _with_old_places(
    items: Sequence[ShardedParameter], places: Mapping[int, int]
) -> tuple[ShardedParameter, ...]:
    """Return the parameters of a mesh; the text of one that has moved says from where."""
    order = sorted(range(len(items)), key=lambda i: places[id(items[i].tensor)])
    was = {i: old for old, i in enumerate(order)}
    return tuple(
        item if was[i] == i else replace(item, text=f"{item.text}, at first number {was[i]}")
        for i, item in enumerate(items)
    )


def _sharded_parameter(name: str, param: DTensor, group: int, scope: Ranks) -> ShardedParameter:
    mesh = param.device_mesh
    axes = ", ".join(
        f"{axis}={size}" if axis else str(size)
        for axis, size in zip(mesh.mesh_dim_names or (None,) * mesh.ndim, mesh.shape, strict=True)
    )
    placed = ", ".join(str(placement) for placement in param.placements)
    dtype = str(param.dtype).removeprefix("torch.")
    text = f"{tuple(param.shape)} {dtype} [{placed}] on mesh ({axes})"
    local = param._local_tensor
    return ShardedParameter(
        name, param, group, scope, text, local.shape, local.get_device(), param._spec
    )


def _refuse_duplicates(params: Iterable[Tensor]) -> None:
    seen: set[int] = set()
    for i, param in enumerate(params):
        if id(param) in seen:
            raise ValueError(
                f"parameter {i} (shape {tuple(param.shape)}) is listed twice; list it once"
            )
        seen.add(id(param))


def _check_identities(sharded: Sequence[ShardedParameter], named: bool) -> None:
    if named:
        name, times = Counter(param.name for param in sharded).most_common(1)[0]
        if times > 1:
            raise ValueError(f"{times} parameters are named {name!r}; names identify them")
        return
    alike, times = Counter(param.text for param in sharded).most_common(1)[0]
    if times > 1:
        warnings.warn(
            f"parameters without names and with equal shapes ({alike}) can only be told apart by "
            "their position: if their order differs between ranks, nobody will notice. Build the "
            "optimizer from model.named_parameters().",
            stacklevel=2,
        )


def _gradient_code(param: ShardedParameter, grad: Tensor | None) -> int:
    if grad is None:
        return 0
    _check_gradient(param, grad)
    return 1 if grad.dtype == param.tensor.dtype else 2 + _GRADIENT_DTYPES.index(grad.dtype)


def _check_gradient(param: ShardedParameter, grad: Tensor) -> None:
    expected = param.tensor
    if grad.layout is not torch.strided:
        raise ValueError(f"{param.name}: expected a dense gradient; got layout {grad.layout}")
    if grad.dtype not in _GRADIENT_DTYPES:
        raise ValueError(f"{param.name}: expected a real gradient; got dtype {grad.dtype}")
    if not isinstance(grad, DTensor):
        raise ValueError(
            f"{param.name}: expected a DTensor gradient like the parameter; got a plain "
            f"{type(grad).__name__} of shape {tuple(grad.shape)}"
        )
    if grad.placements != expected.placements or grad.device_mesh != expected.device_mesh:
        raise ValueError(
            f"{param.name}: expected a gradient placed {expected.placements} on "
            f"{expected.device_mesh}; got {grad.placements} on {grad.device_mesh}"
        )
    local = grad._local_tensor
    if local.layout is not torch.strided:
        raise ValueError(f"{param.name}: expected a dense gradient; got layout {local.layout}")
    if grad.shape != expected.shape or local.shape != param.shape:
        raise ValueError(
            f"{param.name}: expected a gradient of shape {tuple(expected.shape)} (local "
            f"{tuple(param.shape)}); got {tuple(grad.shape)} (local {tuple(local.shape)})"
        )
    if local.device != expected._local_tensor.device:
        raise ValueError(
            f"{param.name}: expected its gradient on {expected._local_tensor.device}; "
            f"got it on {local.device}"
        )


def _option_texts(group: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"{name}={option_text(value)}"
        for name, value in group.items()
        if name not in ("params", "param_names")
    )


def option_text(value: Any) -> str:
    """Return a hyper-parameter's value as text that is equal on ranks that mean the same.

    Numbers compare by value (1 equals 1.0). A tensor on an accelerator is never read, since that
    would wait for queued work: it is compared by how often it was written.
    """
    if isinstance(value, Integral):  # bool and numpy's own included
        whole = int(value)
        exact = abs(whole) < 2**63 and float(whole) == whole
        return repr(float(whole)) if exact else str(whole)
    if isinstance(value, Real):
        return repr(float(value) + 0.0)
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or isinstance(value, DTensor):
            return f"tensor written {value._version} times"
        return repr(value.tolist())
    if isinstance(value, tuple | list):
        return f"({', '.join(option_text(item) for item in value)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {option_text(item)}' for key, item in value.items())}}}"
    if value is None or isinstance(value, str | torch.dtype | Enum):
        return repr(value)
    return type(value).__qualname__  # a repr may hold an address


def _presence_in(sharded: Sequence[ShardedParameter], present: bytes, scope: Ranks) -> bytes:
    return bytes(p for p, param in zip(present, sharded, strict=True) if param.scope == scope)


def _describe(params: Sequence[ShardedParameter]) -> dict[str, str]:
    return {f"number {i}": f"{name} {text}" for i, (name, text) in enumerate(_lines(params))}


def _lines(params: Sequence[ShardedParameter]) -> list[tuple[str, str]]:
    """Return name and facts of each parameter, its option group among those of the scope too."""
    number = {group: i for i, group in enumerate(sorted({param.group for param in params}))}
    if len(number) == 1:
        return [(param.name, param.text) for param in params]
    return [(param.name, f"{param.text} in group {number[param.group]}") for param in params]


def _presence(params: Sequence[ShardedParameter]) -> dict[str, str]:
    return {p.name: _presence_of(p.tensor) for p in params}


def _presence_of(param: DTensor) -> str:
    if param.grad is None:
        return "missing"
    return "present" if param.grad.dtype == param.dtype else f"present as {param.grad.dtype}"


def _options(used: Iterable[int], texts: Sequence[Sequence[str]]) -> dict[str, str]:
    return {
        f"{name} of group {number}": value
        for number, i in enumerate(sorted(used))  # as all ranks of the scope count them
        for name, _, value in (text.partition("=") for text in texts[i])
    }

"""Every optimizer here that votes, beside a twin that nothing happens to."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from adapters import Muon
from adapters._base import VotingOptimizer
from adapters.gefen import Gefen, GefenMuon
from adapters.hybrid import Hybrid
from consensus.testing import assert_unchanged, snapshot
from tests.gloo._cases import Met, caught, cause_of
from tests.threaded.muon_cases import shard

Shapes: TypeAlias = dict[str, tuple[int, ...]]
Named: TypeAlias = dict[str, nn.Parameter]
Contents: TypeAlias = dict[str, object]
Place: TypeAlias = Sequence[Placement]

ROWS: tuple[Placement, ...] = (Shard(0),)
# Uneven rows, and a shard that is empty on all ranks but the first.
MATRICES: Shapes = {"up": (6, 4), "down": (5, 3), "gate": (1, 8)}
OTHERS: Shapes = {"head": (5, 8), "norm": (7,), "scale": (1,)}


def values_of(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return numbers that are the same on all ranks, and others for each name and seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    return torch.randn(tuple(shape), generator=generator)


def parameters(
    shapes: Shapes, mesh: DeviceMesh | None, placements: Sequence[Placement] = ROWS
) -> Named:
    """Return parameters of these names and shapes, on a mesh or as plain tensors."""
    found = {}
    for name, shape in shapes.items():
        whole = values_of(name, shape, 0)
        found[name] = nn.Parameter(whole if mesh is None else shard(whole, mesh, placements))
    return found


def give_gradient(name: str, param: Tensor, seed: int, *, factor: float = 1.0) -> None:
    grad = values_of(name, param.shape, seed) * factor
    if isinstance(param, DTensor):
        grad = shard(grad, param.device_mesh, param.placements)
    param.grad = grad


def members(optimizer: VotingOptimizer) -> Iterable[tuple[str, Tensor]]:
    return [(name, param) for _, name, param, _ in optimizer._members()]


def give_gradients(optimizer: VotingOptimizer, seed: int, *, factor: float = 1.0) -> None:
    for name, param in members(optimizer):
        give_gradient(name, param, seed, factor=factor)


def contents(optimizer: VotingOptimizer) -> Contents:
    """Return all that a step writes, byte for byte: codebooks too, which are no state of torch."""
    found: Contents = {}
    for name, param in members(optimizer):
        found[name] = _data(param)
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{key} of {name}"] = _data(value)
    for number, rule in enumerate(optimizer._rules):
        if rule.momenta is not None:
            for key, value in rule.momenta.record().items():
                found[f"{key} of rule {number}"] = _data(value)
    return found


def _data(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    part = (value.to_local() if isinstance(value, DTensor) else value).detach()
    return str(part.dtype), tuple(part.shape), bytes(part.flatten().view(torch.uint8).tolist())


def learned(optimizer: VotingOptimizer) -> Contents:
    """Return the codebooks, and the block length of each parameter."""
    kinds = ("codebook of rule", "automatic_period")
    return {key: at for key, at in contents(optimizer).items() if key.startswith(kinds)}


def changes(before: Contents, after: Contents) -> list[str]:
    """Return what is not the same in both."""
    missing = object()
    names = dict.fromkeys([*before, *after])
    return [name for name in names if before.get(name, missing) != after.get(name, missing)]


class Make(Protocol):
    """Makes an optimizer of parameters on a mesh, placed like this."""

    def __call__(self, mesh: DeviceMesh, on: Place = ROWS, /) -> VotingOptimizer: ...


@dataclass(frozen=True)
class Kind:
    """One row of the table."""

    name: str
    make: Make
    moves_data: bool = True  # its update has collectives of its own
    learns: bool = True

    @property
    def title(self) -> str:
        """The name of its class, with which its messages begin."""
        return self.name.partition(",")[0].partition(" ")[0]

    def __reduce__(self) -> Any:
        return kind_of, (self.name,)  # functions made in functions do not travel


def _pairs(*some: Named) -> list[tuple[str, nn.Parameter]]:
    return [pair for each in some for pair in each.items()]


def _muon(mesh: DeviceMesh, on: Place = ROWS) -> Muon:
    return Muon(_pairs(parameters(MATRICES, mesh, on)), lr=0.02)


def _gefen(mesh: DeviceMesh, on: Place = ROWS) -> Gefen:
    return Gefen(_pairs(parameters(MATRICES, mesh, on), parameters(OTHERS, mesh, on)), lr=0.02)


def _gefen_muon(mesh: DeviceMesh, on: Place = ROWS) -> GefenMuon:
    return GefenMuon(_pairs(parameters(MATRICES, mesh, on)), lr=0.02)


def _muon_by_owners(mesh: DeviceMesh, on: Place = ROWS) -> Muon:
    named = _pairs(parameters(MATRICES, mesh, on))
    return Muon(named, lr=0.02, sharded_mode="distributed")


def _gefen_muon_by_owners(mesh: DeviceMesh, on: Place = ROWS) -> GefenMuon:
    named = _pairs(parameters(MATRICES, mesh, on))
    return GefenMuon(named, lr=0.02, normuon=True, sharded_mode="distributed")


def _hybrid_of(muon: Named, backup: Named, options: dict[str, Any]) -> Hybrid:
    return Hybrid(muon.items(), backup.items(), lr=0.02, backup_factored_v_2d=True, **options)


def _hybrid(**options: Any) -> Make:
    def make(mesh: DeviceMesh, on: Place = ROWS) -> Hybrid:
        muon, backup = parameters(MATRICES, mesh, on), parameters(OTHERS, mesh, on)
        return _hybrid_of(muon, backup, options)

    return make


def _backup_mesh(**options: Any) -> Make:
    def make(mesh: DeviceMesh, on: Place = ROWS) -> Hybrid:
        muon, backup = parameters(MATRICES, None), parameters(OTHERS, mesh, on)
        return _hybrid_of(muon, backup, options)

    return make


def _no_muon(**options: Any) -> Make:
    def make(mesh: DeviceMesh, on: Place = ROWS) -> Hybrid:
        return _hybrid_of({}, parameters(OTHERS, mesh, on), options)

    return make


KINDS = (
    Kind("Muon", _muon, learns=False),
    Kind("Gefen", _gefen),
    Kind("GefenMuon", _gefen_muon),
    Kind("Hybrid, backup Gefen", _hybrid(backup="gefen")),
    Kind("Hybrid, backup AdamW", _hybrid(backup="adamw")),
    Kind("Hybrid of dense Muon and AdamW", _hybrid(muon="dense", backup="adamw"), learns=False),
    Kind("Hybrid, only Gefen sharded", _backup_mesh(backup="gefen")),
    Kind("Hybrid, only AdamW sharded", _backup_mesh(backup="adamw"), moves_data=False),
    Kind("Hybrid without matrices, Gefen", _no_muon(muon="dense", backup="gefen")),
    Kind(
        "Hybrid without matrices, AdamW",
        _no_muon(backup="adamw"),
        moves_data=False,
        learns=False,
    ),
    Kind("Muon, distributed", _muon_by_owners, learns=False),
    Kind("GefenMuon, distributed", _gefen_muon_by_owners),
)


def kind_of(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


@dataclass
class Pair:
    """One optimizer, and one like it that always makes its steps undisturbed."""

    optimizer: VotingOptimizer
    twin: VotingOptimizer
    seed: int = 0

    @classmethod
    def of(cls, kind: Kind, mesh: DeviceMesh) -> Pair:
        return cls(kind.make(mesh), kind.make(mesh))

    def give_gradients(self) -> None:
        """Give the optimizer new gradients; the twin gets the same when it steps."""
        self.seed += 1
        give_gradients(self.optimizer, self.seed)

    def healthy_step(self) -> None:
        self.give_gradients()
        self.step()

    def step(self) -> None:
        """Step both with the optimizer's gradients."""
        self.optimizer.step()
        give_gradients(self.twin, self.seed)
        self.twin.step()

    def differences(self) -> list[str]:
        return changes(contents(self.optimizer), contents(self.twin))


def met_in(optimizer: VotingOptimizer, call: Callable[[], object]) -> Met:
    """Make a step that should not take place, and see what it met and what it left behind."""
    before, held = snapshot(optimizer), contents(optimizer)
    error = caught(call)
    changed = [str(caught(lambda: assert_unchanged(optimizer, before)) or "")]
    changed += changes(held, contents(optimizer))
    left = {"found_inf", "grad_scale"} & set(vars(optimizer))
    return Met(error, cause_of(error), "\n".join(filter(None, changed)), tuple(sorted(left)))

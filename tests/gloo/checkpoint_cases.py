"""What tests of sharded checkpoints share: a training run, its successor, and one that refuses."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adapters import Gefen, GefenMuon, Hybrid
from adapters._quantized import QuantizedOptimizer
from consensus.testing import assert_unchanged, snapshot
from tests.gloo._cases import caught
from tests.threaded.gefen_cases import (
    LAYOUTS,
    Layout,
    Recipe,
    Shape,
    Twins,
    gradients,
    local,
    records,
    weights,
)

MATRICES: tuple[Shape, ...] = ((6, 8), (5, 9), (3, 3), (1, 4), (4, 1))

GEFEN = Recipe("Gefen, factored", Gefen, {"weight_decay": 0.1, "codebook_refresh_every": 2})
BLOCK = Recipe("Gefen, block", Gefen, {"factored_v_2d": False, "betas": (0.8, 0.95)})
MUON = Recipe("GefenMuon", GefenMuon, {"cautious": True}, MATRICES)
NORMUON = Recipe("GefenMuon, normuon", GefenMuon, {"normuon": True}, MATRICES)
HYBRID = Recipe("Hybrid", Hybrid, {"backup_factored_v_2d": True})
ADAMW = Recipe("Hybrid with AdamW", Hybrid, {"backup": "adamw", "weight_decay": 0.1})
DENSE = Recipe("Hybrid, both dense", Hybrid, {"muon": "dense", "backup": "adamw"})
WHOLE = (GEFEN, BLOCK, MUON, NORMUON, HYBRID, ADAMW, DENSE)
BY_OWNERS = (
    Recipe("by owners", GefenMuon, {"sharded_mode": "distributed", "normuon": True}, MATRICES),
    Recipe("dense, by owners", Hybrid, {"sharded_mode": "distributed", "muon": "dense"}),
)
ALONE = Recipe("alone", GefenMuon, {"sharded_mode": "approx", "normuon": True}, MATRICES)
APPROX = (
    ALONE,
    Recipe("Hybrid, half of it alone", Hybrid, {"sharded_mode": "approx"}),
    Recipe("dense, alone", Hybrid, {"sharded_mode": "approx", "muon": "dense"}),
)


def layout(name: str) -> Layout:
    return next(each for each in LAYOUTS if each.name == name)


@dataclass
class Run:
    """Sharded parameters and their optimizer."""

    twins: Twins
    optimizer: QuantizedOptimizer

    @classmethod
    def on(cls, where: Layout, recipe: Recipe) -> Run:
        twins = Twins.of(recipe, where, recipe.shapes)
        return cls(twins, recipe.make(twins.sharded))

    def train(self, *steps: int) -> None:
        for step in steps:
            self.twins.set_gradients(step)
            self.optimizer.step()

    def successor(self) -> Run:
        """Fresh: other parameters with the same values, another optimizer."""
        sharded = [nn.Parameter(param.detach().clone()) for param in self.twins.sharded]
        twins = Twins(
            self.twins.mesh, self.twins.layout, self.twins.recipe, self.twins.whole, sharded
        )
        return Run(twins, twins.recipe.make(sharded))

    def saved(self) -> bytes:
        return to_bytes(self.optimizer.state_dict())

    def values(self) -> list[Any]:
        """All of this rank's numbers."""
        found: list[Any] = [records(self.optimizer)]
        for param in self.twins.sharded:
            found.append(local(param).clone())
            entry = self.optimizer.state.get(param, {})
            for key in sorted(entry):
                value = entry[key]
                found.append(local(value).clone() if isinstance(value, Tensor) else (key, value))
        return found


def same(left: Iterable[Any], right: Iterable[Any]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(left, right, strict=True)
    )


def to_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def of_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def unsharded(recipe: Recipe, *steps: int) -> QuantizedOptimizer:
    """The optimizer of one device, trained."""
    shapes = recipe.shapes
    params = [nn.Parameter(weight) for weight in weights(shapes)]
    optimizer = recipe.make(params)
    for step in steps:
        for param, grad in zip(params, gradients(shapes, step), strict=True):
            param.grad = grad
        optimizer.step()
    return optimizer


@dataclass(frozen=True)
class Refused:
    """What a rank met in a load that should not take place."""

    error: BaseException | None
    changed: str  # what it should have left alone

    @property
    def text(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


def refused(optimizer: torch.optim.Optimizer, call: Callable[[], object]) -> Refused:
    before = snapshot(optimizer)
    error = caught(call)
    return Refused(error, str(caught(lambda: assert_unchanged(optimizer, before)) or ""))

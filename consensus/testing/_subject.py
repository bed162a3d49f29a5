"""An optimizer under trial: over sharded parameters, beside a twin over the whole ones."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

Named: TypeAlias = list[tuple[str, nn.Parameter]]
Closure: TypeAlias = Callable[[], float]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

# Matrices, since some optimizers take nothing else. Two of one shape, which ranks can mistake for
# each other; rows that divide by no number of ranks; one row, so that later ranks hold nothing.
SHAPES: Shapes = {"up": (6, 4), "gate": (6, 4), "down": (5, 3), "head": (1, 8)}


class NoOptimizer(TypeError):
    """What should make an optimizer made something else, so there is nothing to try."""


_SCALE = 4.0  # of the loss; a power of two, so that unscaling gives the same bits


@dataclass(frozen=True, slots=True)
class Likeness:
    """How this rank's shards compare with the same part of the twin's tensors.

    Attributes:
        differences: What differs by more than the tolerance; empty if all is well.
        note: How equal the rest is.
    """

    differences: tuple[str, ...]
    note: str


@dataclass
class Subject:
    """One optimizer over parameters that are sharded by rows, and one like it on this rank alone.

    Built from the same numbers on every rank. Neither makes a collective here; the optimizer may.
    """

    optimizer: Optimizer
    twin: Optimizer
    sharded: Mapping[str, nn.Parameter]
    whole: Mapping[str, nn.Parameter]
    _seed: int = field(default=0)

    @classmethod
    def on(cls, mesh: DeviceMesh, make: Callable[[Named], Optimizer], shapes: Shapes) -> Subject:
        """Build both; ``make`` is called twice on every rank."""
        whole = {name: nn.Parameter(_numbers(name, shapes[name], 0)) for name in shapes}
        sharded = {name: nn.Parameter(shard(param.detach(), mesh)) for name, param in whole.items()}
        return cls(make(list(sharded.items())), make(list(whole.items())), sharded, whole)

    def new_gradients(self) -> None:
        """Give both optimizers gradients they have not seen."""
        self._seed += 1
        self.give_gradients()

    def give_gradients(self) -> None:
        """Do what a backward pass would: set the gradients of this step."""
        for name, param in self.whole.items():
            param.grad = _numbers(name, param.shape, self._seed)
            sharded = self.sharded[name]
            assert isinstance(sharded, DTensor)
            sharded.grad = shard(param.grad, sharded.device_mesh)

    def healthy_step(self) -> None:
        """Step both with new gradients."""
        self.new_gradients()
        self.optimizer.step()
        self.twin.step()

    @property
    def unscales(self) -> bool:
        """Whether the optimizer says that it knows of AMP, and so unscales its gradients itself."""
        return bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

    def scale_gradients(self) -> None:
        """Give an optimizer that unscales something to unscale."""
        for param in self.sharded.values() if self.unscales else ():
            if param.grad is not None:
                param.grad *= _SCALE

    def scaled_step(self, overflow: bool) -> None:
        """Step as ``torch.amp.GradScaler`` would, on a rank that found an overflow or did not.

        An optimizer that unscales is told; any other is not stepped at all where there is one.
        """
        if not self.unscales:
            if not overflow:
                self.optimizer.step()
            return
        self.optimizer.found_inf = torch.tensor([float(overflow)])  # type: ignore[attr-defined]
        self.optimizer.grad_scale = torch.tensor([_SCALE])  # type: ignore[attr-defined]
        self.optimizer.step()

    def stepped(self, before: Mapping[str, Tensor]) -> str:
        """Say what this rank has done to its :meth:`shards`; nothing if it holds none."""
        held = [name for name, local in before.items() if local.numel()]
        now = self.shards()
        same = [name for name in held if torch.equal(_bits(before[name]), _bits(now[name]))]
        if same and same != held:
            return f"did not write {', '.join(same)}"
        return "" if not held else "wrote nothing" if same else "stepped"

    def shards(self) -> dict[str, Tensor]:
        """Return copies of this rank's parts of the parameters."""
        params = {name: param.detach() for name, param in self.sharded.items()}
        return {
            name: (param.to_local() if isinstance(param, DTensor) else param).clone()
            for name, param in params.items()
        }

    def likeness(self, tolerance: float) -> Likeness:
        """Compare parameters and what state can be compared: tensors of one name and shape."""
        apart, worst, inexact, left_out = [], 0.0, 0, 0
        pairs = list(self._pairs())
        for what, mine, expected in pairs:
            if mine is None or expected is None:
                left_out += 1
                continue
            distance = _distance(mine, expected)
            worst, inexact = max(worst, distance), inexact + (distance > 0.0)
            if not distance <= tolerance:
                apart.append(f"has {what} off by up to {distance:.2g}")
        note = f"{len(pairs) - left_out} tensors"
        note += f", off by up to {worst:.2g}" if inexact else ", bit for bit"
        note += f"; {left_out} of the state have another layout" if left_out else ""
        return Likeness(tuple(apart), note)

    def _pairs(self) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
        for name, param in self.sharded.items():
            whole = self.whole[name]
            yield f"parameter {name}", *_counterparts(param.detach(), whole.detach())
            mine, theirs = self.optimizer.state.get(param, {}), self.twin.state.get(whole, {})
            for key in dict.fromkeys([*mine, *theirs]):
                a, b = mine.get(key), theirs.get(key)
                if isinstance(a, Tensor) or isinstance(b, Tensor):
                    yield f"{key} of {name}", *_counterparts(a, b)


def made_by(make: Callable[[Named], Optimizer], named: Named) -> Optimizer:
    """Return the optimizer of these parameters.

    Raises:
        NoOptimizer: ``make`` returned none.
    """
    made = make(named)
    # Not by its class: a wrapper around an optimizer is one too.
    if isinstance(made, type) or not (hasattr(made, "step") and hasattr(made, "param_groups")):
        raise NoOptimizer(
            f"expected make_optimizer to return an optimizer, with step and param_groups; got "
            f"{reprlib.repr(made)}. Is a `return` missing?"
        )
    return made


def shard(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return ``whole`` as a tensor of which each rank of a mesh with one axis holds some rows."""
    return DTensor.from_local(
        _rows_of(whole, mesh).clone(),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _rows_of(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the rows of this rank: as torch's Shard and FSDP2 cut them, the last rank's fewest."""
    rows = -(-len(whole) // mesh.size())
    start = min(mesh.get_local_rank() * rows, len(whole))
    return whole[start : start + rows]


def _counterparts(mine: Any, whole: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return this rank's part of both, or None for what cannot be compared."""
    if not isinstance(mine, Tensor) or not isinstance(whole, Tensor) or mine.shape != whole.shape:
        return None, None
    if not isinstance(mine, DTensor):
        return mine, whole
    if tuple(mine.placements) != (Shard(0),):
        return None, None
    return mine.to_local(), _rows_of(whole, mine.device_mesh)


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors of one shape; 0.0 only for equal bits."""
    if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
        return 0.0
    distance = float((a.double() - b.double()).abs().max())
    return max(distance, torch.finfo(torch.float64).tiny)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def _numbers(name: str, shape: tuple[int, ...] | torch.Size, seed: int) -> Tensor:
    """Return numbers that are the same on all ranks, and others for each name and seed."""
    letters = int.from_bytes(name.encode()[:4], "big")
    generator = torch.Generator().manual_seed(1_000_003 * letters + seed)
    return torch.randn(tuple(shape), generator=generator)

"""What Muon is tried on: placements, shapes, and models in two copies, whole and sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard

# The same shape several times, more ranks than rows, a single row, a single column.
SHAPES = ((8, 8), (6, 16), (16, 6), (9, 5), (5, 9), (1, 4), (4, 1), (2, 4), (3, 3), (8, 8))


@dataclass(frozen=True)
class Case:
    """Matrices of these shapes, placed like this."""

    name: str
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    shapes: tuple[tuple[int, int], ...] = SHAPES

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh)


CASES = (
    Case("rows on 2 ranks", (2,), (Shard(0),)),
    Case("rows on 3 ranks", (3,), (Shard(0),)),
    Case("rows on 4 ranks", (4,), (Shard(0),)),
    Case("columns on 2 ranks", (2,), (Shard(1),)),
    Case("columns on 4 ranks", (4,), (Shard(1),)),
    Case("an axis of one rank", (2, 1), (Shard(0), Shard(0))),
    Case("copies of whole matrices", (2,), (Replicate(),)),
    Case("HSDP", (2, 2), (Replicate(), Shard(0))),
    Case("HSDP, copies inside", (2, 2), (Shard(0), Replicate())),
    Case("rows cut twice", (2, 2), (Shard(0), Shard(0))),
    Case("FSDP over row TP", (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    Case("FSDP over column TP", (2, 2), (Shard(0), Shard(1))),
    Case("columns, then rows", (2, 2), (Shard(1), Shard(0))),
    Case("columns cut twice", (2, 2), (_StridedShard(1, split_factor=2), Shard(1))),
    Case("large enough to vectorise", (3,), (Shard(0),), ((100, 130), (257, 65), (64, 512))),
    Case("HSDP over TP", (2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
)


def names(cases: Sequence[Case | FsdpCase]) -> list[str]:
    return [case.name for case in cases]


def slice_of(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's shard by torch's own account of placements."""
    shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    for dim, (length, start) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(dim, start if length else 0, length)
    return whole.contiguous().clone()


def shard(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return DTensor.from_local(
        slice_of(whole, mesh, placements),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def named(params: Sequence[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"layer.{index}", param) for index, param in enumerate(params)]


def torchs_muon(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, **options)


def random_matrices(shapes: Sequence[tuple[int, int]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@dataclass
class Twins:
    """One model twice: whole with torch's Muon, sharded with ours."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    whole: list[nn.Parameter]
    sharded: list[nn.Parameter]

    @classmethod
    def of(cls, case: Case, mesh: DeviceMesh | None = None) -> Twins:
        mesh = mesh or init_device_mesh("cpu", case.mesh)
        weights = random_matrices(case.shapes, seed=1)
        return cls(
            mesh,
            case.placements,
            [nn.Parameter(weight.clone()) for weight in weights],
            [nn.Parameter(shard(weight, mesh, case.placements)) for weight in weights],
        )

    def set_gradients(self, seed: int, *, skip: Sequence[int] = (), scale: float = 1.0) -> None:
        shapes = [(param.shape[0], param.shape[1]) for param in self.whole]
        for index, grad in enumerate(random_matrices(shapes, seed)):
            missing = index in skip
            self.whole[index].grad = None if missing else grad
            self.sharded[index].grad = (
                None if missing else shard(grad * scale, self.mesh, self.placements)
            )

    def differences(self, ours: torch.optim.Optimizer, torchs: torch.optim.Optimizer) -> list[str]:
        """What is not equal bit for bit between this rank's shards and the whole matrices."""
        found = []
        for index, (whole, sharded) in enumerate(zip(self.whole, self.sharded, strict=True)):
            pairs = {"weight": (whole, sharded)}
            state = torchs.state.get(whole, {})
            for key in {*state, *ours.state.get(sharded, {})}:
                pairs[key] = (state[key], ours.state[sharded][key])
            for what, (expected, actual) in pairs.items():
                part = slice_of(expected.detach(), self.mesh, self.placements)
                if not torch.equal(local(actual), part):
                    found.append(f"{what} {index} of shape {tuple(whole.shape)}")
        return found


class Model(nn.Module):
    """Two hidden matrices whose rows divide by no number of ranks used here."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, rows, bias=False)
        self.down = nn.Linear(rows, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.up(x).relu()
        out: Tensor = self.down(hidden)
        return out


def fully_sharded(mesh_shape: tuple[int, ...], rows: int, *, tensor_parallel: bool) -> Model:
    """A model as users shard it: FSDP2, HSDP, or FSDP2 over tensor parallelism."""
    generator = torch.Generator().manual_seed(3)
    model = Model(rows)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    axes = ("replicate", "shard", "tensor")[-len(mesh_shape) :]
    if not tensor_parallel:
        axes = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes)
    if tensor_parallel:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        mesh = mesh["shard"]
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=mesh)
    return model


def whole_of(tensor: Tensor | None) -> Tensor:
    """Put the shards together, on all ranks of the job, which must be those of the mesh."""
    # full_tensor() of torch 2.9 gets strided shards of uneven size wrong.
    assert isinstance(tensor, DTensor)
    shape, mesh, placements = tensor.shape, tensor.device_mesh, tensor.placements
    places = slice_of(torch.arange(shape.numel()).view(shape), mesh, placements)
    whole = torch.full((shape.numel(),), -math.inf, dtype=tensor.dtype)
    whole[places.flatten()] = local(tensor).flatten()
    dist.all_reduce(whole, dist.ReduceOp.MAX)
    return whole.view(shape)


class FsdpCase(NamedTuple):
    """How to shard the model below: a mesh, the model's rows, and whether TP comes first."""

    name: str
    mesh: tuple[int, ...]
    rows: int
    tensor_parallel: bool


FSDP_CASES = (
    FsdpCase("FSDP, uneven rows", (2,), 7, False),
    FsdpCase("FSDP, empty last shard", (4,), 5, False),
    FsdpCase("FSDP on three ranks", (3,), 6, False),
    FsdpCase("HSDP by fully_shard", (2, 2), 7, False),
    FsdpCase("FSDP over TP by fully_shard", (2, 2), 8, True),
    FsdpCase("FSDP over TP, uneven rows", (2, 2), 6, True),
    FsdpCase("FSDP over TP, an empty shard", (2, 2), 2, True),
)

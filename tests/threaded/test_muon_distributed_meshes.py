"""One Muon by owners for several groups, layouts and meshes, ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from adapters import Muon
from adapters.options import ShardedMode
from consensus.testing._threads import run_threads
from tests.threaded.muon_cases import (
    SHAPES,
    local,
    named,
    random_matrices,
    shard,
    slice_of,
    torchs_muon,
)

MIB = 2**20

Placed = tuple[DeviceMesh, tuple[Placement, ...]]


def groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    pairs = named(params)
    third = len(pairs) // 3
    return [
        {"params": pairs[:third], "lr": 0.1},
        {"params": pairs[third : 2 * third], "weight_decay": 0.0, "ns_steps": 3},
        {"params": pairs[2 * third :], "nesterov": False, "momentum": 0.5},
    ]


def on_meshes(
    placed: Sequence[Placed | None], bucket_bytes: int, mode: ShardedMode = "distributed"
) -> list[str]:
    """One optimizer of three groups for parameters placed like this; None is a plain one."""
    shapes = (SHAPES * 2)[: len(placed)]
    whole = [nn.Parameter(weight) for weight in random_matrices(shapes, seed=1)]

    def cut(tensor: Tensor, where: Placed | None) -> Tensor:
        return tensor.detach().clone() if where is None else shard(tensor.detach(), *where)

    mine = [nn.Parameter(cut(w, where)) for w, where in zip(whole, placed, strict=True)]
    ours, torchs = Muon(groups(mine), sharded_mode=mode), torchs_muon(groups(whole))
    ours.bucket_bytes = bucket_bytes
    for seed in range(3):
        for i, grad in enumerate(random_matrices(shapes, seed)):
            whole[i].grad, mine[i].grad = grad, cut(grad, placed[i])
        ours.step()
        torchs.step()
    return [
        f"weight {i} on {where}"
        for i, where in enumerate(placed)
        if not torch.equal(
            mine[i].detach() if where is None else local(mine[i]),
            whole[i].detach() if where is None else slice_of(whole[i].detach(), *where),
        )
    ]


def groups_and_plain_ones(rank: int) -> list[str]:
    mesh, flat = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    placed: list[Placed | None] = [
        (mesh, (Shard(0), Shard(1))),
        (flat, (Shard(0),)),
        (mesh, (Replicate(), Shard(0))),
        None,
        (flat, (Replicate(),)),
    ]
    return on_meshes(placed * 3, 300)


def test_groups_layouts_and_plain_parameters_may_be_mixed() -> None:
    assert run_threads(groups_and_plain_ones, 4).values() == ([],) * 4


def copies_across_and_along(rank: int, mode: ShardedMode) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2))
    across, along = (Replicate(), Shard(0)), (Shard(0), Replicate())
    return on_meshes([(mesh, across), (mesh, along)] * 3, MIB, mode)


def copies_on_other_axes(rank: int, mode: ShardedMode) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2, 2))
    across: Placed = (mesh, (Replicate(), Replicate(), Shard(0)))
    along: Placed = (mesh, (Replicate(), Shard(0), Replicate()))
    return on_meshes([across, along, across] * 2, MIB, mode)


def a_mesh_and_its_transpose(rank: int, mode: ShardedMode) -> list[str]:
    one = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]))
    other = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]))
    cuts = (Shard(0), Shard(1))
    return on_meshes([(one, cuts), (other, cuts)] * 3, MIB, mode)


@pytest.mark.parametrize("mode", ["exact", "distributed"])
@pytest.mark.parametrize(
    ("worker", "world_size"),
    [(copies_across_and_along, 4), (copies_on_other_axes, 8), (a_mesh_and_its_transpose, 4)],
)
def test_the_same_ranks_may_be_placed_in_several_ways(
    worker: Callable[[int, ShardedMode], list[str]], world_size: int, mode: ShardedMode
) -> None:
    assert run_threads(worker, world_size, mode).values() == ([],) * world_size

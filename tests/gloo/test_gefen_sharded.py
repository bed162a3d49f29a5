"""Gefen, GefenMuon and Hybrid on real processes: the threaded cases again, and exact counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from adapters import Gefen, GefenMuon, Hybrid
from adapters._quantized import QuantizedOptimizer
from consensus.testing._processes import run_ranks
from tests.gloo.test_muon_exact import Collectives
from tests.threaded.gefen_cases import (
    CASES_OF,
    COMMON,
    LARGE,
    RECIPES,
    Layout,
    Recipe,
    Twins,
    against_one_device,
    close,
    local,
    named,
    records,
    weights,
)
from tests.threaded.muon_cases import FSDP_CASES, shard, slice_of
from tests.threaded.test_gefen import on_fsdp

pytestmark = pytest.mark.slow


def every_case(rank: int, world_size: int) -> dict[str, list[str]]:
    """One start of processes for all cases of this size: the start is the dear part."""
    found = {
        f"{recipe.name} - {layout.name}": against_one_device(rank, recipe, layout, recipe.shapes)
        for recipe, layout in CASES_OF
        if layout.world_size == world_size
        if recipe in (RECIPES[0], RECIPES[3]) or layout.name in COMMON
    }
    for fsdp_case in FSDP_CASES:
        if math.prod(fsdp_case.mesh) == world_size:
            found[fsdp_case.name] = on_fsdp(rank, fsdp_case)
    rows = Layout("rows", (world_size,), (Shard(0),))
    found["many levels"] = against_one_device(rank, RECIPES[0], rows, LARGE)
    return found


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_shards_are_trained_as_on_one_device(world_size: int) -> None:
    for found in run_ranks(every_case, world_size, world_size, timeout=100.0).values():
        assert len(found) >= 3
        assert {name: differences for name, differences in found.items() if differences} == {}


def collectives_of_a_step(
    rank: int, recipe: Recipe, mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> dict[str, int]:
    """In the second step, where nothing is learned; agreements pass elsewhere."""
    twins = Twins.of(recipe, Layout("", mesh, placements), recipe.shapes)
    optimizer = recipe.make(twins.sharded)
    twins.set_gradients(4)
    optimizer.step()
    with Collectives() as seen:
        optimizer.step()
    return dict(seen.calls)


FACTORED, BLOCK, TUNED, HYBRID = (
    Recipe(each.name, each.cls, {**each.options, "codebook_refresh_every": 0}, each.shapes)
    for each in RECIPES[:4]
)
UNCUT = Recipe(
    "", Gefen, {"factored_v_2d": False, "force_2d_period_one": True}, ((4, 8), (2, 4), (8, 8))
)
ROWS = ((2,), (Shard(0),))


@pytest.mark.parametrize(
    ("recipe", "mesh", "placements", "expected"),
    [
        pytest.param(FACTORED, *ROWS, {"allreduce": 2}, id="factored: maxima, sums"),
        pytest.param(BLOCK, *ROWS, {"allreduce": 2}, id="block: maxima, sums"),
        pytest.param(
            FACTORED, (2, 2), (Replicate(), Shard(0)), {"allreduce": 2}, id="HSDP: no more"
        ),
        pytest.param(
            FACTORED, (2, 2), (Shard(0), Shard(1)), {"allreduce": 4}, id="two cuts: twice as many"
        ),
        pytest.param(FACTORED, (2,), (Replicate(),), {}, id="copies: none"),
        pytest.param(UNCUT, *ROWS, {}, id="no block on two ranks: none"),
        pytest.param(
            TUNED, *ROWS, {"allreduce": 2, "gather": 1}, id="Muon: maxima, one gather, cautious"
        ),
        pytest.param(
            HYBRID, *ROWS, {"allreduce": 4, "gather": 1}, id="Hybrid: those of both halves"
        ),
    ],
)
def test_a_step_takes_as_few_collectives_as_promised(
    recipe: Recipe,
    mesh: tuple[int, ...],
    placements: tuple[Placement, ...],
    expected: dict[str, int],
) -> None:
    world_size = math.prod(mesh)
    found = run_ranks(collectives_of_a_step, world_size, recipe, mesh, placements).values()
    assert found == (expected,) * world_size


def first_steps(rank: int) -> list[dict[str, int]]:
    """Collectives of optimizers whose ranks have nothing to tell each other."""
    mesh = init_device_mesh("cpu", (2,))
    approx = Recipe("", GefenMuon, {"sharded_mode": "approx", "normuon": True, "cautious": True})
    made: list[tuple[QuantizedOptimizer, list[nn.Parameter]]] = []
    shapes = ((6, 8), (5, 9), (2, 4))
    twins = Twins.of(approx, Layout("", mesh.shape, (Shard(0),)), shapes)
    made.append((approx.make(twins.sharded), twins.sharded))
    kinds: list[Any] = [Gefen, GefenMuon, Hybrid]
    for kind in kinds:
        params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        made.append((kind(named(params)), params))
    found = []
    for optimizer, params in made:
        for param in params:
            param.grad = param.detach().cos()
        optimizer.step()  # the first step plans
        with Collectives() as seen:
            optimizer.step()
        found.append(dict(seen.calls))
    return found


def test_what_ranks_do_not_share_causes_no_collective() -> None:
    assert run_ranks(first_steps, 2).values() == ([{}] * 4,) * 2


def meshes_in_a_ring(rank: int) -> list[str]:
    """Three ranks, a mesh for each pair of them; reducing in list order would deadlock."""
    pairs = ((0, 1), (1, 2), (0, 2))
    meshes = {pair: DeviceMesh("cpu", list(pair)) for pair in pairs}
    order = {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}[rank]
    whole = dict(zip(pairs, map(nn.Parameter, weights([(5, 9)] * 3)), strict=True))
    grads = dict(zip(pairs, weights([(9, 5)] * 3), strict=True))
    held = {
        pair: nn.Parameter(shard(whole[pair].detach(), meshes[pair], [Shard(0)])) for pair in order
    }
    ours = Gefen([(f"of ranks {pair}", param) for pair, param in held.items()])
    twin = Gefen([(f"of ranks {pair}", param) for pair, param in whole.items()])
    for pair in pairs:
        whole[pair].grad = grads[pair].view(5, 9)
        if pair in held:
            held[pair].grad = shard(grads[pair].view(5, 9), meshes[pair], [Shard(0)])
    for _ in range(2):
        ours.step()
        twin.step()
    found = [] if records(ours) == records(twin) else ["codebook"]
    for pair, param in held.items():
        part = slice_of(whole[pair].detach(), meshes[pair], [Shard(0)])
        if not close(local(param), part, exact=False):
            found.append(f"weight of {pair}")
    return found


def test_meshes_that_overlap_in_a_ring_do_not_wait_for_each_other() -> None:
    assert run_ranks(meshes_in_a_ring, 3, timeout=40.0).values() == ([],) * 3

"""Gefen, GefenMuon and Hybrid on sharded parameters against one device, ranks as threads.

The gloo tests run the same cases on processes, so that the fake is verified.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from adapters import Gefen, GefenMuon, Hybrid
from adapters._quantized import QuantizedOptimizer
from consensus.testing._threads import run_threads
from tests.threaded.gefen_cases import (
    CASES_OF,
    HEAD,
    LARGE,
    LAYOUTS,
    NUM_STEPS,
    RECIPES,
    Layout,
    Recipe,
    Twins,
    against_one_device,
    local,
    named,
    names,
    outcome,
    records,
    weights,
)
from tests.threaded.muon_cases import FSDP_CASES, FsdpCase, fully_sharded, shard, whole_of
from tests.threaded.muon_cases import names as names_of
from tests.unit.test_gefen import differences, params_of

BY_NAME = {each.name: each for each in LAYOUTS}
ROWS, ROWS_OF_2 = BY_NAME["rows on 3 ranks"], BY_NAME["rows on 2 ranks"]
FACTORED, BLOCK, TUNED, HYBRID = RECIPES[:4]
# Of copies and of what exists once.
MANY_LEVELS = (ROWS, BY_NAME["columns, and plain parameters"])


@pytest.mark.parametrize(
    ("recipe", "layout"), CASES_OF, ids=[" - ".join(names(pair)) for pair in CASES_OF]
)
def test_shards_are_trained_as_on_one_device(recipe: Recipe, layout: Layout) -> None:
    args = (recipe, layout, recipe.shapes)
    found = run_threads(against_one_device, layout.world_size, *args).values()
    assert found == ([],) * layout.world_size


@pytest.mark.slow
@pytest.mark.parametrize("layout", MANY_LEVELS, ids=names(MANY_LEVELS))
@pytest.mark.parametrize("recipe", [FACTORED, HYBRID], ids=names([FACTORED, HYBRID]))
def test_a_codebook_of_many_levels_is_that_of_one_device(recipe: Recipe, layout: Layout) -> None:
    """Only there it matters how often an element is counted."""
    found = run_threads(against_one_device, layout.world_size, recipe, layout, LARGE).values()
    assert found == ([],) * layout.world_size


def trained(recipe: Recipe, layout: Layout) -> tuple[Twins, QuantizedOptimizer]:
    twins = Twins.of(recipe, layout, recipe.shapes)
    optimizer = recipe.make(twins.sharded)
    for step in range(1, NUM_STEPS + 1):
        twins.set_gradients(step)
        optimizer.step()
    return twins, optimizer


def what_the_cases_hold(rank: int) -> tuple[list[tuple[int, int]], list[int], list[bool]]:
    """Periods with numbers of cut blocks; steps of parameters; which shards are empty."""
    twins, optimizer = trained(FACTORED, ROWS)
    (rule,) = optimizer._rules
    assert rule.momenta is not None
    states = [optimizer.state[param] for param in twins.sharded]
    periods = [state["automatic_period"] for state in states]
    grids = [rule.momenta.grid(*each) for each in zip(twins.sharded, periods, strict=True)]
    cut = [(grid.period, grid.num_cut) for grid in grids]
    empty = [not local(param).numel() for param in twins.sharded]
    return cut, [state["step"] for state in states], empty


def test_the_cases_have_cut_blocks_late_gradients_and_empty_shards() -> None:
    (cut, steps, _), _, (_, _, empty) = run_threads(what_the_cases_hold, 3).values()
    assert cut == [(8, 0), (45, 1), (9, 1), (1, 0), (30, 1), (1, 0), (12, 0), (8, 1)]
    assert steps == [5, 3, 4, 5, 5, 5, 5, 5]
    assert empty == [False] * 5 + [True] * 3


def on_fsdp(rank: int, case: FsdpCase) -> list[str]:
    """Train a real model; whole matrices get the gradients that FSDP computed."""
    model = fully_sharded(case.mesh, case.rows, tensor_parallel=case.tensor_parallel)
    backward: Callable[[Tensor], None] = Tensor.backward
    params = list(model.parameters())
    whole = [nn.Parameter(whole_of(param)) for param in params]
    pairs = zip(["up.weight", "down.weight"], whole, strict=True)
    ours, twin = Gefen(model.named_parameters(), lr=0.01), Gefen(list(pairs), lr=0.01)
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        backward(model(torch.randn(4, 8, generator=generator)).square().mean())
        for param, other in zip(params, whole, strict=True):
            other.grad = whole_of(param.grad)
        ours.step()
        twin.step()
        ours.zero_grad()
    found = [] if records(ours) == records(twin) else ["codebook"]
    for param, other in zip(params, whole, strict=True):
        if not torch.allclose(whole_of(param), other, rtol=2e-6, atol=1e-7):
            found.append(f"weight of {tuple(other.shape)}")
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("case", FSDP_CASES, ids=names_of(FSDP_CASES))
def test_fully_sharded_models_are_trained_as_on_one_device(case: FsdpCase) -> None:
    world_size = math.prod(case.mesh)
    assert run_threads(on_fsdp, world_size, case).values() == ([],) * world_size


# ---- each rank for itself ----


def approximate(rank: int, cls: Any) -> list[str]:
    """Rows of wide matrices, where a shard has the learning rate of the whole."""
    shapes = ((6, 8), (5, 9), (3, 24))
    options: dict[str, Any] = {"lr": 0.1, "normuon": True, "cautious": True}
    twins = Twins.of(TUNED, ROWS, shapes)
    alone = [nn.Parameter(local(param).clone()) for param in twins.sharded]
    ours: QuantizedOptimizer = cls(
        named(twins.sharded), sharded_mode="approx", **MUON_OF_HYBRID, **options
    )
    twin = GefenMuon(
        [pair for pair in named(alone) if pair[0] != HEAD or cls is GefenMuon],
        **MUON_OF_HYBRID,
        **options,
    )
    whole = Gefen(named(twins.whole)[-1:], lr=0.1, factored_v_2d=False)
    for step in (1, 2, 3):
        twins.set_gradients(step)
        for param, other in zip(twins.sharded, alone, strict=True):
            other.grad = None if param.grad is None else local(param.grad)
        for each in (ours, twin, whole):
            each.step()
    found = []
    for param, other in zip(twins.sharded, params_of(twin), strict=False):
        left, right = {**ours.state[param], "": local(param)}, {**twin.state[other], "": other}
        found += differences(left, {**right, "": other.detach()})
    if cls is Hybrid:
        last, reference = twins.sharded[-1], whole.state[twins.whole[-1]]
        indices = reference["m_codebook"].view(3, 24)[rank : rank + 1]
        found += differences({"": ours.state[last]["m_codebook"]}, {"": indices})
    return found


MUON_OF_HYBRID: dict[str, Any] = {
    "ns_schedule": "tuned3",
    "adjust_lr_fn": "original",
    "weight_decay": 0.1,
}


@pytest.mark.parametrize("cls", [GefenMuon, Hybrid])
def test_approx_trains_each_shard_as_a_matrix_of_its_own(cls: type[QuantizedOptimizer]) -> None:
    assert run_threads(approximate, 3, cls).values() == ([],) * 3


def saved_weights(rank: int, recipe: Recipe) -> list[str]:
    """Step between forward and backward: autograd must not go on with the new weights."""
    twins = Twins.of(recipe, ROWS_OF_2, recipe.shapes)
    optimizer = recipe.make(twins.sharded)
    losses = [(param * param).sum() for param in twins.sharded]
    twins.set_gradients(4)
    optimizer.step()
    return [outcome(partial(torch.autograd.backward, loss)) for loss in losses]


@pytest.mark.parametrize("recipe", RECIPES, ids=names(RECIPES))
def test_autograd_sees_that_weights_were_written(recipe: Recipe) -> None:
    for found in run_threads(saved_weights, 2, recipe).values():
        assert all("modified by an inplace operation" in text for text in found)


# ---- what cannot be done ----


def refused(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2))
    param = nn.Parameter(shard(torch.ones(2, 4, 4), mesh, [Shard(1), Shard(2)]))
    optimizer = Gefen([("first", nn.Parameter(torch.ones(2)))])
    try:
        optimizer.add_param_group({"params": [("conv.weight", param)]})
    except NotImplementedError as error:
        return f"{len(optimizer.param_groups)} group; {error}"
    return "accepted"


def test_cuts_of_two_inner_dims_are_refused_by_name() -> None:
    for text in run_threads(refused, 4).values():
        assert text.startswith("1 group; conv.weight with placements")
        assert "got cuts of [1, 2]" in text


def state_bytes(rank: int, shape: tuple[int, int]) -> float:
    mesh = init_device_mesh("cpu", (4,))
    (weight,) = weights([shape])
    param = nn.Parameter(shard(weight, mesh, [Shard(0)]))
    param.grad = shard(weight, mesh, [Shard(0)])
    optimizer = GefenMuon([("layer", param)])
    optimizer.step()
    tensors = [each for each in optimizer.state[param].values() if isinstance(each, Tensor)]
    return sum(each.numel() * each.element_size() for each in tensors) / param.numel()


@pytest.mark.slow
def test_a_rank_keeps_its_share_of_the_state_of_exact_muon() -> None:
    for found in run_threads(state_bytes, 4, (256, 250)).values():
        assert 0.25 < found <= 1.01 / 4

"""What ranks learn together from gradients that are spread over them, and what stops them all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from adapters import Gefen
from adapters import _learning as learning
from adapters._period import find_period
from adapters._quantized import QuantizedOptimizer
from consensus.testing._threads import run_threads
from tests.threaded.gefen_cases import (
    LAYOUTS,
    RECIPES,
    Recipe,
    Twins,
    local,
    named,
    names,
    outcome,
    records,
)
from tests.threaded.muon_cases import shard
from tests.unit.test_gefen import differences, random_tensor, snapshot

BY_NAME = {each.name: each for each in LAYOUTS}
ROWS, ROWS_OF_2 = BY_NAME["rows on 3 ranks"], BY_NAME["rows on 2 ranks"]
FACTORED, BLOCK, TUNED, HYBRID = RECIPES[:4]
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=names(RECIPES))


def plain_copies(rank: int) -> tuple[bool, bool, bool]:
    """Ranks with different plain parameters, one of which both hold, share a codebook."""
    shapes = {"a": (16, 24), "both": (20, 25), "c": (30, 32)}
    grads = {name: random_tensor(*shape, seed=shape[0]) for name, shape in shapes.items()}

    def stepped(held: tuple[str, ...], scope: Any) -> QuantizedOptimizer:
        optimizer = Gefen(
            [(name, nn.Parameter(torch.ones(shapes[name]))) for name in held],
            codebook_scope=scope,
        )
        for name, param in zip(held, optimizer.param_groups[0]["params"], strict=True):
            param.grad = grads[name]
        optimizer.step()
        return optimizer

    held = (("a", "both"), ("both", "c"))[rank]
    together = stepped(held, init_device_mesh("cpu", (2,)))
    everything, alone = stepped(tuple(shapes), "auto"), stepped(held, "auto")
    return (
        records(together) == records(everything),
        records(together) == records(alone),
        periods(together).items() <= periods(everything).items(),
    )


def periods(optimizer: QuantizedOptimizer) -> dict[str, int]:
    return {
        name: optimizer.state[param]["automatic_period"]
        for _, name, param, _ in optimizer._members()
    }


@pytest.mark.slow
def test_plain_parameters_that_several_ranks_hold_count_once() -> None:
    assert run_threads(plain_copies, 2).values() == ((True, False, True),) * 2


def spoilt(rank: int, recipe: Recipe, value: float, first_gradient: str) -> tuple[str, list[str]]:
    """A value of rank 1 alone makes the first gradients useless; then training goes on."""
    options = {**recipe.options, "first_gradient": first_gradient}
    recipe = Recipe(recipe.name, recipe.cls, options, recipe.shapes)
    twins = Twins.of(recipe, ROWS, recipe.shapes)
    ours, twin = recipe.make(twins.sharded), recipe.make(twins.whole)
    before = snapshot(ours)
    twins.set_gradients(1)
    if rank == 1:
        grad = twins.sharded[0].grad
        assert grad is not None
        local(grad)[0, 3] = value
    text = outcome(ours.step)
    found = differences(before, snapshot(ours))
    twins.set_gradients(1)
    ours.step()
    twin.step()
    return text, found + twins.differences(ours, twin)


@EVERY_RECIPE
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e20])
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all(recipe: Recipe, value: float) -> None:
    if recipe.options.get("muon") == "dense":
        recipe = BLOCK
    for text, found in run_threads(spoilt, 3, recipe, value, "raise").values():
        assert text.startswith("GroupFailure")
        assert "the gradient of layer.0 is not finite" in text
        assert found == []


@pytest.mark.parametrize("recipe", [BLOCK, TUNED, HYBRID], ids=names([BLOCK, TUNED, HYBRID]))
def test_or_all_ranks_skip_the_step(recipe: Recipe) -> None:
    assert run_threads(spoilt, 3, recipe, math.nan, "defer").values() == (("stepped", []),) * 3


def without_signal(rank: int, zeros_on: tuple[int, ...], lr: float) -> tuple[str, bool]:
    """Only the given ranks have gradients of zeros."""
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(shard(torch.ones(4, 6), mesh, [Shard(0)]))
    param.grad = shard(random_tensor(4, 6, seed=1), mesh, [Shard(0)])
    if rank in zeros_on:
        local(param.grad).zero_()
    optimizer = Gefen([("layer", param)], lr=lr)
    before = snapshot(optimizer)
    text = outcome(optimizer.step)
    return text, differences(before, snapshot(optimizer)) == []


def test_zeros_on_all_ranks_are_nothing_to_learn_from() -> None:
    for text, unchanged in run_threads(without_signal, 2, (0, 1), 0.1).values():
        assert text.startswith("GroupFailure")
        assert "are zeros" in text
        assert unchanged
    assert run_threads(without_signal, 2, (0,), 0.1).values() == (("stepped", False),) * 2


def test_zeros_are_no_fault_where_nothing_is_to_be_updated() -> None:
    assert run_threads(without_signal, 2, (0, 1), 0.0).values() == (("stepped", True),) * 2


STAGES = ("largest_square", "plan_search", "make_grid", "block_histogram", "learn_levels")


def interrupted(rank: int) -> tuple[str, list[str]]:
    """The first step fails on all ranks, and the next one makes up for it."""
    twins = Twins.of(HYBRID, ROWS, HYBRID.shapes)
    ours, twin = HYBRID.make(twins.sharded), HYBRID.make(twins.whole)
    before = snapshot(ours)
    twins.set_gradients(1)
    text = outcome(ours.step)
    found = differences(before, snapshot(ours))
    outcome(ours.step)
    twin.step()
    return text, found + twins.differences(ours, twin)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_fails_while_it_learns_takes_the_others_along(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(learning, stage)
    fails = [True]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if torch.distributed.get_rank() == 1 and fails:
            fails.clear()
            raise MemoryError("no room")
        return original(*args, **kwargs)

    monkeypatch.setattr(learning, stage, failing)
    for text, found in run_threads(interrupted, 3).values():
        assert text.startswith("GroupFailure")
        assert "MemoryError: no room" in text
        assert found == []


def disagreeing(rank: int, recipe: Recipe, what: str) -> tuple[str, bool]:
    """Rank 1 has another codebook, other blocks, another plan or another option."""
    twins = Twins.of(recipe, ROWS_OF_2, recipe.shapes)
    ours = recipe.make(twins.sharded)
    twins.set_gradients(1)
    ours.step()
    (rule,) = ours._rules
    momenta = rule.momenta
    assert momenta is not None
    if rank == 1 and what == "codebook":
        record = momenta.record()
        record["codebook"][1] = -1.0
        momenta.set_record(record)
    if rank == 1 and what == "periods":
        ours.state[twins.sharded[0]]["automatic_period"] = 16
        momenta.forget_facts()
    if rank == 1 and what == "steps with the codebook":
        momenta.num_steps = 7
    if rank == 1 and what == "first_gradient":
        ours.first_gradient = "defer"
    if rank == 1 and what == "bucket_bytes":
        ours.bucket_bytes = 1000
    before = snapshot(ours)
    twins.set_gradients(4)
    text = outcome(ours.step)
    return text, differences(before, snapshot(ours)) == []


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        *(
            (BLOCK, what)
            for what in ("codebook", "periods", "steps with the codebook", "first_gradient")
        ),
        *(
            (TUNED, what)
            for what in ("codebook", "periods", "steps with the codebook", "bucket_bytes")
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_ranks_whose_momenta_mean_different_things_are_told(recipe: Recipe, what: str) -> None:
    for text, unchanged in run_threads(disagreeing, 2, recipe, what).values():
        assert text.startswith("Disagreement")
        assert what in text
        assert unchanged


def looked_at_first(rank: int) -> list[str]:
    """torch's checkpointing makes a step of zeros to see what state an optimizer has."""
    twins = Twins.of(HYBRID, ROWS, HYBRID.shapes)
    ours, twin = HYBRID.make(twins.sharded), HYBRID.make(twins.whole)
    model = nn.ParameterDict({name.replace(".", "_"): p for name, p in named(twins.sharded)})
    before = snapshot(ours)
    get_optimizer_state_dict(model, ours)
    found = differences(before, snapshot(ours))
    for step in (1, 2, 3):
        twins.set_gradients(step)
        ours.step()
        twin.step()
        found += twins.differences(ours, twin)
    return found


def test_a_look_at_the_state_before_training_changes_nothing() -> None:
    assert run_threads(looked_at_first, 3).values() == ([],) * 3


# The gradients of two ranks for one matrix, with blocks of 12 and of 8 elements.
UNEQUAL = tuple(
    random_tensor(8, 12, seed=4).sign()
    * random_tensor(96 // length, seed=3).exp().repeat_interleave(length).view(8, 12)
    for length in (12, 8)
)


def copies_that_differ(rank: int) -> list[int]:
    """Copies have other gradients than each other, which they should not."""
    mesh = init_device_mesh("cpu", (2,))
    plain = nn.Parameter(torch.ones(8, 12))
    copied = nn.Parameter(shard(torch.ones(8, 12), mesh, [Replicate()]))
    plain.grad, copied.grad = UNEQUAL[rank], shard(UNEQUAL[rank], mesh, [Replicate()])
    optimizer = Gefen([("plain", plain), ("copied", copied)])
    optimizer.step()
    return list(periods(optimizer).values())


def test_copies_have_the_period_of_the_first() -> None:
    assert [find_period(grad) for grad in UNEQUAL] == [12, 8]
    assert run_threads(copies_that_differ, 2).values() == ([12, 12], [12, 12])

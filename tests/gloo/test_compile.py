"""A whole training step on FSDP2 under torch.compile, on two ranks that vote in it."""

from __future__ import annotations

from functools import cache

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from adapters import Gefen, GefenMuon, Muon
from consensus.testing import run_ranks
from tests.unit.test_compile import (
    FAILING,
    NUM_STEPS,
    Make,
    Steps,
    hybrid,
    small_model,
    train,
)

pytestmark = pytest.mark.slow

# A run that takes longer hangs: compiling takes seconds, and longer where others work too. Ranks
# would wait longer still in a collective, so that none is released early by a timeout.
LIVENESS_S = 90.0
DATA_PLANE_S = 200.0

MAKE: dict[str, Make] = {
    "Muon, exact": lambda named: Muon(named, sharded_mode="exact"),
    "Muon, distributed": lambda named: Muon(named, sharded_mode="distributed"),
    "Gefen": Gefen,
    "GefenMuon": GefenMuon,
    "GefenMuon, distributed": lambda named: GefenMuon(named, sharded_mode="distributed"),
    "Hybrid, Gefen": hybrid,
    "Hybrid, AdamW": lambda named: hybrid(
        named, muon="dense", backup="adamw", sharded_mode="distributed"
    ),
}


def sharded_model() -> nn.Module:
    model = small_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def train_on_rank(rank: int, name: str | None) -> Steps:
    """Rank 1 is the one that fails."""
    return train(sharded_model, MAKE[name] if name else None, is_at_fault=rank == 1)


@cache
def trained(name: str | None) -> tuple[Steps, ...]:
    """One start of processes for all tests of an optimizer."""
    ranks = run_ranks(train_on_rank, 2, name, timeout=LIVENESS_S, group_timeout=DATA_PLANE_S)
    return ranks.values()


@pytest.mark.parametrize("name", MAKE)
def test_an_optimizer_adds_no_more_than_one_graph_break_for_its_vote(name: str) -> None:
    added = [
        mine.breaks - its.breaks for mine, its in zip(trained(name), trained(None), strict=True)
    ]
    assert max(added) <= 1


@pytest.mark.parametrize("name", MAKE)
def test_a_failure_of_one_rank_reaches_all_from_a_compiled_step(name: str) -> None:
    expected = ["GroupFailure" * (number == FAILING) for number in range(NUM_STEPS)]
    assert [[each.error for each in steps.seen] for steps in trained(name)] == [expected] * 2


@pytest.mark.parametrize("name", MAKE)
def test_nothing_is_compiled_again_after_a_failure_of_one_rank(name: str) -> None:
    after = [[each.frames for each in steps.seen[FAILING:]] for steps in trained(name)]
    assert after == [[0] * (NUM_STEPS - FAILING)] * 2


@pytest.mark.parametrize("name", MAKE)
def test_a_compiled_step_has_the_bits_of_one_that_is_not(name: str) -> None:
    assert [steps.differences for steps in trained(name)] == [()] * 2

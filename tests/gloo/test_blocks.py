"""Blocks of different groups inside of each other: who waits for ever leaves, and all go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from consensus import ConsensusError, ControlGroup, GroupFailure, control_group, fail_together
from consensus.testing import assert_unchanged, snapshot
from tests.gloo._cases import Trained, caught, on_ranks

pytestmark = pytest.mark.slow

EVERYONE, SOME = (0, 1, 2), (0, 1)


def nested(
    outer: ControlGroup | None, inner: ControlGroup | None, act: Callable[[str], Any]
) -> None:
    """Go through the blocks that this rank is a member of; ``act`` may raise or say "skip"."""

    def within() -> None:
        if act("outer") != "skip" and inner is not None:
            with fail_together("inner", inner):
                act("inner")
        act("end")

    if outer is None:
        within()
    else:
        with fail_together("outer", outer):
            within()


def groups(rank: int, *members: tuple[int, ...]) -> list[ControlGroup | None]:
    meshes = [DeviceMesh("cpu", list(ranks)) for ranks in members]
    pairs = zip(meshes, members, strict=True)
    return [control_group(mesh) if rank in ranks else None for mesh, ranks in pairs]


def does(rank: int, odd: int, place: str, what: str) -> Callable[[str], str]:
    def act(at: str) -> str:
        if (rank, at) == (odd, place) and what == "raise":
            raise ValueError(f"{place}, rank {rank}")
        return what if (rank, at) == (odd, place) else ""

    return act


# Who does what: (rank, in which block, what); the first finds the inner group not made yet.
FAULTS = [(0, "outer", "raise"), (1, "outer", "raise"), (0, "outer", "skip"), (0, "inner", "raise")]


def failures_in_turn(rank: int) -> list[tuple[str, tuple[int, ...], str]]:
    outer, inner = groups(rank, EVERYONE, SOME)
    found = []
    for odd, place, what in FAULTS:
        error = caught(lambda: nested(outer, inner, does(rank, odd, place, what)))  # noqa: B023
        assert isinstance(error, GroupFailure), error
        found.append((type(error).__name__, tuple(f.rank for f in error.failures), str(error)))
        nested(outer, inner, lambda at: "")  # all go on
    return found


def test_a_rank_that_never_enters_an_inner_block_strands_nobody() -> None:
    by_rank = on_ranks(failures_in_turn, 3)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    before, other, skipped, inside = by_rank[0]
    assert before[1] == (0,)
    assert "ValueError: outer, rank 0" in before[2]
    assert other[1] == (1,)
    # Rank 1 waited in the inner block for rank 0, which was at the end of the outer one.
    assert skipped[1] == (1,)
    assert "rank 0 did not come to 'inner', but to the end of 'outer' around it" in skipped[2]
    assert inside[1] == (0,)


def a_block_inside_of_a_larger_one(rank: int) -> tuple[str, str]:
    """The inner group is the larger: rank 2 waits there, and is in no block of the others."""
    outer, inner = groups(rank, SOME, EVERYONE)
    nested(outer, inner, lambda at: "")
    error = caught(lambda: nested(outer, inner, does(rank, 0, "outer", "raise")))
    assert isinstance(error, ConsensusError), error
    return type(error).__name__, str(error)


def test_a_rank_outside_of_the_block_is_not_left_waiting_either() -> None:
    first, second, third = on_ranks(a_block_inside_of_a_larger_one, 3)
    assert first == second
    assert first[0] == "GroupFailure"
    assert "ValueError: outer, rank 0" in first[1]
    assert "rank 0" in third[1]


def a_first_step_that_one_rank_never_reaches(rank: int) -> tuple[str, int]:
    """The optimizer has not been planned: its ranks meet nowhere but in the store."""
    trained = Trained.on(shape=(dist.get_world_size(),))
    trained.give_gradients()
    before = snapshot(trained.optimizer)

    def step() -> None:
        with fail_together("train step", None):
            if rank == 1:
                raise ValueError("no data")
            trained.optimizer.step()

    error = caught(step)
    assert_unchanged(trained.optimizer, before)
    for _ in range(2):
        trained.healthy_step()
    return str(error), len(trained.optimizer.state)


def test_a_failure_before_the_first_step_of_an_optimizer_reaches_all() -> None:
    by_rank = on_ranks(a_first_step_that_one_rank_never_reaches, 3)
    for text, num_states in by_rank:
        # Whoever leaves planning first gives it up for the others, who then say so as well.
        assert "train step failed on rank" in text
        assert "rank 1: ValueError: no data" in text
        assert num_states > 0

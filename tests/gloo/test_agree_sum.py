"""agree_sum on real groups: exact, counted message by message, and never a part of a sum."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import consensus
from consensus import agree_sum, any_failed, control_group, fail_together
from consensus._waiting import Patience
from consensus.testing import run_ranks, without_agreement
from tests.gloo._cases import (
    DATA_PLANE_S,
    LIVENESS_S,
    Recorder,
    caught,
    cause_of,
    on_ranks,
    wait_for,
)

pytestmark = pytest.mark.slow

INT64_MAX = 2**63 - 1
BACKENDS = ("gloo", "store", "inherit")


def sums(rank: int, world_size: int, backend: str) -> list[tuple[int, ...]]:
    group = control_group(None, backend=backend)
    limit = INT64_MAX // world_size
    found = [
        agree_sum([1, rank, -rank, 0], group),
        agree_sum((limit, -limit, 2**53 + rank), group),
        agree_sum((rank**2 for _ in range(3)), group),
        agree_sum(torch.tensor([5, -(2**40) * rank]), group),
        agree_sum(torch.arange(12).reshape(3, 4)[:, rank], group),  # not contiguous
        agree_sum([torch.tensor(rank), True], group),  # type: ignore[list-item]
    ]
    many = agree_sum(torch.arange(4096) * (rank + 1), group)
    factor = sum(range(1, world_size + 1))
    assert many == tuple(i * factor for i in range(4096))
    assert {type(count) for row in (*found, many) for count in row} == {int}
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_are_exact_and_the_same_on_every_rank(world_size: int, backend: str) -> None:
    limit = INT64_MAX // world_size
    total = sum(range(world_size))
    squares = sum(rank**2 for rank in range(world_size))
    expected = [
        (world_size, total, -total, 0),
        (limit * world_size, -limit * world_size, 2**53 * world_size + total),
        (squares,) * 3,
        (5 * world_size, -(2**40) * total),
        tuple(row * world_size + total for row in (0, 4, 8)),
        (total, world_size),
    ]
    assert on_ranks(sums, world_size, world_size, backend) == (expected,) * world_size


def messages(rank: int) -> list[tuple[list[int], list[int], tuple[int, ...] | None]]:
    """Words of the messages by maximum and by sum, and what came of each call."""
    recorder = Recorder.on(None)
    seen = []
    calls: tuple[Callable[[], tuple[int, ...] | None], ...] = (
        lambda: agree_sum([rank]),
        lambda: agree_sum([1, 2]),
        lambda: agree_sum([1] * 64)[:1],
        lambda: agree_sum([1] * (65))[:1],
        lambda: agree_sum(torch.ones(4096, dtype=torch.int64))[:1],
        lambda: agree_sum([]),
        lambda: agree_sum(torch.empty(0, dtype=torch.int64)),
        lambda: differ_in_length(rank),
        lambda: agree_sum([7]),
    )
    for call in calls:
        recorder.words.clear()
        recorder.sums.clear()
        result = call()
        assert recorder.lowest >= 0
        seen.append((list(recorder.words), list(recorder.sums), result))
    return seen


def differ_in_length(rank: int) -> None:
    assert isinstance(caught(lambda: agree_sum([1] * (rank + 1))), consensus.Disagreement)


def test_a_sum_takes_a_vote_of_two_words_and_one_message_more() -> None:
    first, second = on_ranks(messages, 2)
    assert first == second
    *healthy, nothing, no_tensor, differing, last = first
    for size, (words, summed, _) in zip((1, 2, 64, 65, 4096), healthy, strict=True):
        assert (words, summed) == ([2], [size])
    assert [result for *_, result in healthy] == [(1,), (2, 4), (2,), (2,), (2,)]
    assert nothing == no_tensor == ([2], [], ())
    assert len(differing[0]) == 3
    assert differing[1] == []
    assert last == ([2], [1], (14,))


def unequal_lengths(rank: int, backend: str) -> list[BaseException | None]:
    """The last call shows that the group is still in step."""
    group = control_group(None, backend=backend)
    errors = [
        caught(lambda: agree_sum([1, 2, 3][: rank + 1], group, name="entries")),
        caught(lambda: agree_sum([] if rank == 1 else [0], group, name="entries")),
        caught(lambda: agree_sum([1], group, name="a" if rank == 1 else "b")),
        caught(lambda: any_failed(False, group) if rank == 1 else agree_sum([1, 0], group)),
    ]
    assert agree_sum([rank], group) == (3,)
    return errors


@pytest.mark.parametrize("backend", ["gloo", "store"])
def test_calls_that_do_not_match_are_told_to_all_before_anything_is_added(backend: str) -> None:
    by_rank = on_ranks(unequal_lengths, 3, backend)
    assert len({str(errors) for errors in by_rank}) == 1
    lengths, empty, name, call = by_rank[0]
    assert isinstance(lengths, consensus.Disagreement)
    assert lengths.phase == "agree_sum(entries)"
    assert lengths.name == "length of entries"
    assert lengths.values == {"1": (0,), "2": (1,), "3": (2,)}
    assert isinstance(empty, consensus.Disagreement)
    assert empty.values == {"1": (0, 2), "0": (1,)}
    assert isinstance(name, consensus.PhaseMismatch)
    assert name.phases == {0: "agree_sum(b)", 1: "agree_sum(a)", 2: "agree_sum(b)"}
    assert isinstance(call, consensus.PhaseMismatch)
    assert call.phases[1] == "any_failed"


def broken() -> Any:
    yield 1
    raise OSError("no more")


# What rank 1 brings -> what the cause must say. The first four are no integers at all.
UNUSABLE: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: [1, 2.5], "TypeError: expected entries to be integers; got 2.5 at 1"),
    (lambda: ["1"], "TypeError: expected entries to be integers; got '1' at 0"),
    (lambda: [None], "TypeError: expected entries to be integers; got None at 0"),
    (lambda: 1, "TypeError"),
    (lambda: torch.ones(1), "TypeError: expected entries of dtype torch.int64"),
    (lambda: torch.ones(1, dtype=torch.int32), "TypeError: expected entries of dtype torch.int64"),
    (lambda: torch.tensor(1), "ValueError: expected entries of one dimension"),
    (lambda: torch.ones(1, 1, dtype=torch.int64), "ValueError: expected entries of one dimension"),
    (lambda: [INT64_MAX // 2 + 1], f"ValueError: expected entries of at most {INT64_MAX // 2}"),
    (lambda: [-(INT64_MAX // 2) - 1], "so that the sum over 2 ranks fits int64"),
    (lambda: [2**80], "ValueError"),
    (broken, "OSError: no more"),
)


def unusable_on_one_rank(rank: int) -> list[tuple[BaseException | None, str | None]]:
    found = []
    for make, _ in UNUSABLE:
        brought = make() if rank == 1 else [1]
        error = caught(lambda brought=brought: agree_sum(brought, name="entries"))  # type: ignore[misc]
        found.append((error, cause_of(error)))
    assert agree_sum([INT64_MAX // 2]) == (INT64_MAX - 1,)
    return found


def test_counts_that_one_rank_cannot_use_are_told_to_all() -> None:
    first, second = on_ranks(unusable_on_one_rank, 2)
    for (mine, no_cause), (theirs, cause), (_, says) in zip(first, second, UNUSABLE, strict=True):
        assert isinstance(mine, consensus.GroupFailure), mine
        assert str(mine) == str(theirs)
        assert mine.recoverable
        assert [failure.rank for failure in mine.failures] == [1]
        assert no_cause is None
        assert cause is not None
        assert says in cause


def fails_before_it(rank: int) -> tuple[BaseException | None, list[int], tuple[int, ...]]:
    """Rank 1 fails in the block in which the others add up."""
    recorder = Recorder.on(None)

    def run() -> None:
        with fail_together("epoch"):
            if rank == 1:
                raise OSError("no such file")
            agree_sum([rank])

    error = caught(run)
    summed = list(recorder.sums)
    with fail_together("epoch"):
        after = agree_sum([rank, 1])
    return error, summed, after


def test_a_rank_that_fails_before_the_sum_stops_all_of_them() -> None:
    for error, summed, after in on_ranks(fails_before_it, 3):
        assert isinstance(error, consensus.GroupFailure)
        assert error.recoverable
        assert error.phases == {0: "agree_sum(counts)", 1: "epoch", 2: "agree_sum(counts)"}
        assert [failure.message for failure in error.failures] == ["no such file"]
        assert summed == []
        assert after == (3, 3)


class Between(Recorder):
    """Lets a rank do something else when the others are on their way to the sum."""

    instead: Callable[[], Any] = staticmethod(lambda: None)

    def all_reduce_sum(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        self.instead()
        return super().all_reduce_sum(words, patience)


def instead_of_the_sum(group: consensus.ControlGroup, call: Callable[[], Any]) -> None:
    between = Between.on(group)
    assert isinstance(between, Between)
    between.instead = call


def dies_before_the_sum(rank: int, backend: str, waits: bool) -> list[Any]:
    """Rank 1 has voted, and is gone; with ``waits`` it had posted that it came to the vote."""
    patience = 4.0 if backend == "store" else None
    group = control_group(None, timeout=patience, backend=backend).prepare()
    survivors = torch.distributed.new_group([0, 2])
    apart = control_group(survivors if rank != 1 else None)
    if rank != 1:
        apart.prepare()
    channel = group.channel
    assert channel is not None
    if rank == 1:
        instead_of_the_sum(group, lambda: os._exit(3))
    torch.distributed.barrier()  # rank 1 did not prepare a second group: it would wait in vain
    if rank == 2 and waits:
        wait_for(f"consensus/{channel.name}/at/1")
    error = caught(lambda: agree_sum([rank, 1], group))
    again = caught(lambda: agree_sum([rank, 1], group))
    return [error, again, agree_sum([rank, 1], apart)]


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after a wait"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_survivors_of_a_rank_that_dies_before_the_sum_are_told_who_it_was(
    backend: str, waits: bool
) -> None:
    ranks = run_ranks(
        dies_before_the_sum, 3, backend, waits, timeout=LIVENESS_S, group_timeout=DATA_PLANE_S
    )
    assert ranks.hung == ()
    assert ranks[1].exitcode == 3
    for rank in (0, 2):
        value = ranks[rank].value
        assert value is not None, ranks.report()
        error, again, apart = value
        assert isinstance(error, consensus.LateRanks), error
        assert error.phase == "agree_sum(counts)"
        assert error.ranks == (1,)
        assert error.gone == (() if backend == "store" else (1,))
        assert type(again) is consensus.ConsensusError  # at once: the group is closed
        assert apart == (2, 2)


def interrupted_before_the_sum(rank: int, backend: str) -> list[BaseException | None]:
    """Ctrl-C on rank 1 after the vote: its next vote must not meet the sum of the others."""
    group = control_group(None, backend=backend).prepare()

    def interrupt() -> None:
        raise KeyboardInterrupt

    if rank == 1:
        instead_of_the_sum(group, interrupt)
    return [caught(lambda: agree_sum([1, 1], group)), caught(lambda: any_failed(False, group))]


@pytest.mark.parametrize("backend", ["gloo", "store"])
def test_a_rank_that_is_interrupted_before_the_sum_frees_its_peers(backend: str) -> None:
    (waiting, closed), (interrupted, again) = on_ranks(interrupted_before_the_sum, 2, backend)
    assert isinstance(interrupted, KeyboardInterrupt)
    assert isinstance(waiting, consensus.LateRanks)
    assert waiting.ranks == (1,)
    for error in (closed, again):
        assert type(error) is consensus.ConsensusError
        assert "closed" in str(error)


def by_itself(rank: int) -> list[BaseException | None]:
    assert agree_sum([3, -4]) == (3, -4)
    assert agree_sum(torch.tensor([INT64_MAX])) == (INT64_MAX,)
    assert agree_sum(()) == ()
    bad: tuple[Any, ...] = ([1.5], torch.ones(1), [INT64_MAX + 1])
    return [caught(lambda counts=counts: agree_sum(counts)) for counts in bad]  # type: ignore[misc]


@pytest.mark.parametrize("init", [False, True], ids=["not distributed", "alone"])
def test_one_process_has_its_own_counts_and_errors_come_unwrapped(init: bool) -> None:
    ((*found,),) = run_ranks(by_itself, 1, init=init, timeout=LIVENESS_S).values()
    assert [type(error) for error in found] == [TypeError, TypeError, ValueError]


def without_the_others(rank: int) -> tuple[int, ...]:
    with without_agreement():
        return agree_sum([rank])


def test_without_agreement_every_rank_has_its_own_counts() -> None:
    assert on_ranks(without_the_others, 2) == ((0,), (1,))


def on_a_part(rank: int) -> tuple[int, ...]:
    groups = [torch.distributed.new_group(list(ranks)) for ranks in ((0, 1), (2, 3))]
    counts: Tensor = torch.tensor([rank, INT64_MAX // 2 - 4])
    return agree_sum(counts, groups[rank // 2])


def test_a_group_adds_up_its_own_members_only() -> None:
    low, high = (1, 2 * (INT64_MAX // 2 - 4)), (5, 2 * (INT64_MAX // 2 - 4))
    assert on_ranks(on_a_part, 4) == (low, low, high, high)

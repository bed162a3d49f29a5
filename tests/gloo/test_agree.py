"""any_failed, agree_range, agree_same on real groups: never a wrong value, whoever holds what."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import consensus
from consensus import agree_range, agree_same, any_failed
from consensus.testing import run_ranks
from tests.gloo._cases import LIVENESS_S, Recorder, caught, cause_of, on_ranks

pytestmark = pytest.mark.slow

NAN = math.nan


def one_rank_in_turn(rank: int, world_size: int) -> list[str]:
    """Let each rank be the odd one, first alone and then last in a row of five values."""
    wrong = []
    for odd in range(world_size):
        is_odd = rank == odd
        if any_failed(is_odd) is not True:
            wrong.append(f"failure on {odd}")
        for special in (NAN, math.inf, -math.inf, 2.0):
            value = special if is_odd else 1.0
            for row in ([value], [0.0, 0.0, 0.0, 0.0, value]):
                found = agree_range(row)
                low, high = found.minimum[-1], found.maximum[-1]
                expected = (1.0, special) if special > 1 or math.isnan(special) else (special, 1.0)
                if str((low, high)) != str(expected) or found.unanimous:
                    wrong.append(f"{special} on {odd}: {found}")
                if found.disagreeing != (f"value {len(row) - 1}",):
                    wrong.append(f"names on {odd}: {found.disagreeing}")
        error = caught(partial(agree_same, "odd" if is_odd else "even"))
        if not isinstance(error, consensus.Disagreement) or error.values['"odd"'] != (odd,):
            wrong.append(f"agree_same on {odd}: {error}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_one_rank_brings_reaches_all_whichever_rank_it_is(world_size: int) -> None:
    assert on_ranks(one_rank_in_turn, world_size, world_size) == ([],) * world_size


# What rank 0 and rank 1 bring -> (minimum, maximum), exactly, and whether they agree.
PAIRS: tuple[tuple[Any, Any, Any, Any, bool], ...] = (
    (1, 1.0, 1, 1, True),
    (True, 1, 1, 1, True),
    (0.0, -0.0, 0, 0, True),
    (NAN, NAN, NAN, NAN, True),
    (2**53, 2**53 + 1, 2**53, 2**53 + 1, False),
    (2**63 - 1, -(2**63), -(2**63), 2**63 - 1, False),
    (2.0**53, 2**53 + 1, 2.0**53, 2**53 + 1, False),
    (5e-324, 0, 0, 5e-324, False),
    (math.inf, 2**63 - 1, 2**63 - 1, math.inf, False),
    (1e308, -1e308, -1e308, 1e308, False),
    # These kinds of a group's own all_reduce abort the process or are read as each other's bits.
    (torch.tensor(3, dtype=torch.int32), torch.tensor([3.0]), 3, 3, True),
    (torch.tensor(200, dtype=torch.uint8), torch.tensor(200.0).double(), 200, 200, True),
    (torch.tensor(True), torch.tensor(0, dtype=torch.int8), 0, 1, False),
    (torch.tensor(256.0).bfloat16(), torch.tensor(257), 256, 257, False),
    (torch.tensor([[2048.0]]).half(), 2049.0, 2048, 2049, False),
)


def brought_by_two(rank: int) -> list[str]:
    wrong = []
    for pair in PAIRS:
        found = agree_range([pair[rank]])
        low, high, unanimous = pair[2:]
        same_ends = str((found.minimum[0] + 0, found.maximum[0] + 0)) == str((low, high))
        exact = same_ends or (found.minimum[0], found.maximum[0]) == (low, high)
        if not exact or found.unanimous is not unanimous:
            wrong.append(f"{pair[:2]}: {found}")
    return wrong


def test_numbers_compare_by_value_whatever_their_types() -> None:
    assert on_ranks(brought_by_two, 2) == ([], [])


def many_values(rank: int, count: int) -> consensus.ControlRange:
    return agree_range(
        [i * (rank + 1) for i in range(count)], names=[f"v{i}" for i in range(count)]
    )


@pytest.mark.parametrize("count", [1, 8, 9, 40])
def test_many_values_keep_their_order(count: int) -> None:
    for found in on_ranks(many_values, 3, count):
        assert found.minimum == tuple(range(count))
        assert found.maximum == tuple(3 * i for i in range(count))
        assert found.disagreeing == tuple(f"v{i}" for i in range(1, count))


def words_of(rank: int) -> list[list[int]]:
    """Number of words of the messages of each call."""
    recorder = Recorder.on(None)
    seen = []
    for call in (
        lambda: any_failed(False),
        lambda: any_failed(rank == 1),
        lambda: agree_range([1, 2.5, True]),
        lambda: agree_range([rank]),
        lambda: agree_same({"a": [1, None]}),
        lambda: caught(lambda: agree_same(rank)),
        lambda: caught(lambda: agree_range([0])),
    ):
        recorder.words.clear()
        call()
        assert recorder.lowest >= 0  # backends differ about MAX of negative integers
        seen.append(list(recorder.words))
    return seen


def test_agreement_takes_two_words_and_more_only_to_say_what_differs() -> None:
    first, second = on_ranks(words_of, 2)
    assert first == second
    counts = [len(words) for words in first]
    assert counts == [1, 2, 1, 2, 1, 3, 1]
    assert all(words[0] == 2 for words in first)


def attempt(call: Callable[[], object]) -> tuple[BaseException | None, str | None]:
    error = caught(call)
    return error, cause_of(error)


def different_lengths(rank: int) -> list[BaseException | None]:
    """Calls that do not match; a last one that does shows that the group is still in step."""
    shorter, longer = [1.0, NAN], [1.0, NAN, 2.0]
    errors = [
        caught(lambda: agree_range(shorter if rank else longer)),
        caught(lambda: agree_range(range(20) if rank else range(9))),
        caught(lambda: agree_range([1]) if rank else agree_same(1)),
        caught(lambda: any_failed(True) if rank else agree_range([1])),
    ]
    assert agree_range([rank]).maximum == (1,)
    return errors


def test_calls_that_do_not_match_are_told_where_each_rank_is() -> None:
    first, second = on_ranks(different_lengths, 2)
    for mine, theirs in zip(first, second, strict=True):
        assert isinstance(mine, consensus.PhaseMismatch)
        assert isinstance(theirs, consensus.PhaseMismatch)
        assert str(mine) == str(theirs)
        assert mine.phases == theirs.phases
    assert first[2].phases == {0: "agree_same(value)", 1: "agree_range(value 0)"}


def bytes_and_json(rank: int) -> list[BaseException | None]:
    pairs: Sequence[tuple[object, object]] = (
        (b"1", 1),
        (b'"a"', "a"),
        (b"x" * 100_000, b"x" * 100_001),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1, "c": 3}),
        ("é", "\ud800"),
        (2**80, 2**80 + 1),
    )
    errors = [caught(partial(agree_same, pair[rank], name="settings")) for pair in pairs]
    agree_same({"b": 1, "a": (2, 3)} if rank else {"a": [2, 3], "b": 1})
    agree_same(b"x" * 100_000)
    return errors


def test_values_that_differ_are_shown_with_their_ranks() -> None:
    first, second = on_ranks(bytes_and_json, 2)
    for mine, theirs in zip(first, second, strict=True):
        assert isinstance(mine, consensus.Disagreement)
        assert str(mine) == str(theirs)
        assert mine.name == "settings"
        assert sorted(mine.values.values()) == [(0,), (1,)]


def unusable_arguments(rank: int) -> list[tuple[BaseException | None, str | None]]:
    """Arguments that cannot be sent, on rank 1 only; then the group goes on."""
    bad = rank == 1
    found = [
        attempt(lambda: agree_range([2**63 if bad else 1])),
        attempt(lambda: agree_range([torch.ones(2) if bad else 1])),
        attempt(lambda: agree_range([1, 2], names=["a"] if bad else ["a", "b"])),
        attempt(lambda: agree_range(["text" if bad else 1])),  # type: ignore[list-item]
        attempt(lambda: agree_same({1, 2} if bad else 1)),
        attempt(lambda: any_failed(torch.ones(2) if bad else False)),
        attempt(lambda: any_failed(False, device="cuda" if bad else None)),
    ]
    assert any_failed(rank == 0) is True
    return found


def test_an_argument_that_one_rank_cannot_send_is_told_to_all() -> None:
    first, second = on_ranks(unusable_arguments, 2)
    causes = []
    for (mine, no_cause), (theirs, cause) in zip(first, second, strict=True):
        for error in (mine, theirs):
            assert isinstance(error, consensus.GroupFailure)
            assert error.recoverable
            assert [failure.rank for failure in error.failures] == [1]
        assert no_cause is None
        assert cause is not None
        causes.append(cause.partition(":")[0])
    assert causes == ["ValueError"] * 3 + ["TypeError"] * 2 + ["RuntimeError", "ValueError"]


def without_a_group(rank: int) -> list[tuple[BaseException | None, str | None]]:
    assert any_failed(True) is True
    assert any_failed(False) is False
    assert agree_range([3, NAN]).unanimous
    agree_same("anything")
    return [
        attempt(lambda: agree_range([2**63])),
        attempt(lambda: agree_same({1})),
        attempt(lambda: any_failed(torch.ones(2))),
    ]


@pytest.mark.parametrize("init", [False, True], ids=["not distributed", "alone"])
def test_one_process_agrees_with_itself_and_errors_come_unwrapped(init: bool) -> None:
    ((*found,),) = run_ranks(without_a_group, 1, init=init, timeout=LIVENESS_S).values()
    assert [type(error) for error, _ in found] == [ValueError, TypeError, RuntimeError]

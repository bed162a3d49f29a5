"""fail_together on real groups: whatever a block raises on one rank, every rank is told of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import consensus
from consensus import GroupFailure, any_failed, fail_together
from tests.gloo._cases import Recorder, caught, cause_of, on_ranks

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Told:
    error: BaseException | None
    cause: str | None
    caused_by: bool = False

    @property
    def group_failure(self) -> GroupFailure:
        assert isinstance(self.error, GroupFailure), self.error
        return self.error


def block(
    error: BaseException | None, *, phase: str = "evaluate", group: Any = None, by: Any = OSError
) -> Told:
    """Raise ``error`` in a block, or go through it."""

    def run() -> None:
        with fail_together(phase, group):
            if error is not None:
                raise error

    found = caught(run)
    return Told(found, cause_of(found), isinstance(found, GroupFailure) and found.caused_by(by))


def each_rank_in_turn(rank: int, world_size: int) -> list[Told]:
    """One rank fails, each in turn; then the first and the last; then none."""
    told = [
        block(FileNotFoundError(f"shard {odd}") if rank == odd else None)
        for odd in range(world_size)
    ]
    ends = rank in (0, world_size - 1)
    told.append(block(FileNotFoundError("shard 0") if ends else None))
    told.append(block(None))
    return told


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_failure_on_any_rank_is_told_to_all(world_size: int) -> None:
    by_rank = on_ranks(each_rank_in_turn, world_size, world_size)
    for odd in range(world_size):
        texts = set()
        for rank, told in enumerate(by_rank):
            error = told[odd].group_failure
            (failure,) = error.failures
            assert (failure.rank, failure.type_name) == (odd, "FileNotFoundError")
            assert failure.message == f"shard {odd}"
            assert "raise error" in failure.traceback
            assert told[odd].caused_by  # OSError, of which FileNotFoundError is one
            assert error.recoverable
            assert not error.fatal
            own = f"FileNotFoundError: shard {odd}"
            assert told[odd].cause == (own if rank == odd else None)
            texts.add(str(error))
        assert len(texts) == 1
    for told in by_rank:
        assert [f.rank for f in told[-2].group_failure.failures] == [0, world_size - 1]
        assert told[-1].error is None


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Unprintable(Exception):
    def __str__(self) -> NoReturn:
        raise RuntimeError("no text")

    __repr__ = __str__


class NeedsArguments(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def local_class() -> Exception:
    class Local(Exception):
        pass

    return Local("of a function")


def deep() -> Exception:
    error: Exception = ValueError("innermost")
    for level in range(200):
        outer = ValueError(f"level {level}")
        outer.__cause__ = error
        error = outer
    return error


HOSTILE: tuple[tuple[Callable[[], Exception], str, str], ...] = (
    (Unpicklable, "tests.Unpicklable", "holds a lock"),
    (Unprintable, "tests.Unprintable", "whose text raised RuntimeError"),
    (partial(NeedsArguments, 1, 2), "tests.NeedsArguments", "1 and 2"),
    (local_class, "tests.local_class.<locals>.Local", "of a function"),
    (partial(ValueError, "x" * 2_000_000), "ValueError", "2000000 bytes in all"),
    (partial(ValueError, "é" * 5_000), "ValueError", "10000 bytes in all"),
    (partial(ValueError, "a \ud800 surrogate and \0 nul"), "ValueError", "surrogate and \0 nul"),
    (ValueError, "ValueError", ""),
    (deep, "ValueError", "level 199"),
)


def hostile_exceptions(rank: int) -> list[tuple[str, str, int]]:
    found = []
    for make, *_ in HOSTILE:
        (failure,) = block(make() if rank == 1 else None).group_failure.failures
        found.append((failure.type_name, failure.message, len(failure.message.encode())))
    return found


def test_any_exception_survives_the_trip() -> None:
    first, second = on_ranks(hostile_exceptions, 2)
    assert first == second
    for (kind, message, size), (_, expected_kind, part) in zip(first, HOSTILE, strict=True):
        assert kind == expected_kind
        assert part in message
        assert size <= 4096


FATAL = (KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit)


def leaves_for_good(rank: int, kind: type[BaseException]) -> tuple[Told, Told]:
    """Rank 1 is interrupted; afterwards the others try to go on without it."""
    told = block(kind("now") if rank == 1 else None, by=kind)
    return told, block(None)


@pytest.mark.parametrize("kind", FATAL)
def test_an_interrupt_is_told_to_the_peers_and_raised_as_it_is(kind: type[BaseException]) -> None:
    by_rank = on_ranks(leaves_for_good, 3, kind)
    for rank, (told, later) in enumerate(by_rank):
        if rank == 1:
            assert type(told.error) is kind
            assert told.cause is None
        else:
            error = told.group_failure
            assert error.fatal
            assert not error.recoverable
            assert told.caused_by
            assert [failure.rank for failure in error.failures] == [1]
        assert type(later.error) is consensus.ConsensusError  # closed, and nobody waits
        assert "closed" in str(later.error)


def inside_another(rank: int) -> tuple[list[Told], list[int]]:
    """An inner block fails; the outer one passes its error, also when it is swallowed."""
    recorder = Recorder.on(None)

    def nested(swallow: bool) -> None:
        with fail_together("outer"):
            try:
                with fail_together("inner"):
                    if rank == 1:
                        raise ValueError("inside")
            except GroupFailure:
                if not swallow:
                    raise

    told = []
    for swallow in (False, True):
        error = caught(partial(nested, swallow))
        told.append(Told(error, cause_of(error)))
    messages = len(recorder.words)
    told.append(block(None))
    return told, [messages, len(recorder.words)]


def test_an_error_decided_inside_passes_the_block_around_it_without_a_vote() -> None:
    for told, messages in on_ranks(inside_another, 2):
        assert [item.group_failure.phase for item in told[:2]] == ["inner", "inner"]
        assert told[2].error is None
        assert messages == [6, 7]  # three for each failure, one for the healthy block


def one_at_the_exit(rank: int) -> Told:
    """Rank 1 fails between two agreements and is at its exit when the others are in the inner."""

    def run() -> None:
        with fail_together("train step"):
            if rank == 1:
                raise ValueError("before the inner block")
            with fail_together("validate"):
                pass

    error = caught(run)
    assert any_failed(False) is False  # nobody is a message ahead
    return Told(error, cause_of(error))


def test_a_failure_outranks_being_in_different_phases() -> None:
    by_rank = on_ranks(one_at_the_exit, 3)
    for told in by_rank:
        error = told.group_failure
        assert [failure.rank for failure in error.failures] == [1]
        assert error.phases == {0: "validate", 1: "train step", 2: "validate"}
    assert by_rank[1].cause == "ValueError: before the inner block"


def in_two_phases(rank: int) -> list[str]:
    errors = [block(None, phase="save" if rank == 1 else "load") for _ in range(2)]
    return [f"{type(told.error).__name__}: {told.error}" for told in errors]


def test_ranks_in_different_phases_are_both_told_where_each_is() -> None:
    (first, again), other = on_ranks(in_two_phases, 2)
    assert other == [first, again]
    assert first.startswith("PhaseMismatch")
    assert "rank 0 is in 'load'" in first
    assert "rank 1 is in 'save'" in first
    assert again == first


def exchanged_flag(rank: int) -> tuple[str, str]:
    """A rank swallows its failure and reduces its loss; that must not meet a vote."""
    told = block(ValueError("swallowed") if rank == 1 else None)
    loss = torch.tensor([float(rank)])
    dist.all_reduce(loss)
    return type(told.error).__name__, f"{loss.item()}"


def test_a_swallowed_failure_cannot_be_mistaken_for_data() -> None:
    assert on_ranks(exchanged_flag, 2) == (("GroupFailure", "1.0"),) * 2


def between_phases(rank: int) -> Told:
    """Rank 1 raises between two phases while all others go on to a barrier."""

    def run() -> None:
        with fail_together("write shards"):
            if rank == 1:
                raise OSError("disk full")
        dist.barrier()

    error = caught(run)
    return Told(error, cause_of(error))


def test_nobody_waits_at_a_barrier_behind_a_block_that_failed() -> None:
    for told in on_ranks(between_phases, 3):
        assert "disk full" in str(told.group_failure)

"""Ranks as processes: what each of them did comes back, whatever it did."""

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from consensus.testing._processes import run_ranks
from consensus.testing._rank_main import StoreKind
from consensus.testing._ranks import ErrorRecord, RankError, Ranks
from consensus.testing._threads import run_threads
from tests.threaded.test_threads import collectives, small_model, train

LIVENESS_SECONDS = 30  # for what should take milliseconds


def error_of(ranks: Ranks[object], rank: int) -> ErrorRecord:
    error = ranks[rank].error
    assert error is not None
    return error


# Healthy ranks.


def describe(rank: int, word: str, *, number: int) -> tuple[int, int, str, int, int]:
    return rank, dist.get_world_size(), word, number, torch.get_num_threads()


@pytest.mark.slow
def test_values_come_in_rank_order() -> None:
    ranks = run_ranks(describe, 3, "word", number=7)
    assert ranks.values() == tuple((rank, 3, "word", 7, 1) for rank in range(3))
    assert [result.exitcode for result in ranks] == [0, 0, 0]
    assert ranks.errors() == (None, None, None)
    assert ranks.hung == ()


@pytest.mark.parametrize("store", ["rank0", "file"])
def test_the_store_can_be_elsewhere(store: StoreKind) -> None:
    assert len(run_ranks(collectives, 2, store=store).values()) == 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_are_equal_on_threads_and_on_processes(world_size: int) -> None:
    on_threads = run_threads(collectives, world_size).values()
    on_processes = run_ranks(collectives, world_size).values()
    for expected, actual in zip(on_threads, on_processes, strict=True):
        assert all(map(torch.equal, expected, actual))


@pytest.mark.slow
def test_training_is_equal_on_threads_and_on_processes() -> None:
    model = small_model()
    # Two ranks: a sum of two numbers does not depend on their order.
    on_threads = run_threads(train, 2, model).values()
    on_processes = run_ranks(train, 2, model).values()
    for expected, actual in zip(on_threads, on_processes, strict=True):
        assert all(map(torch.equal, expected, actual))


def initialized(rank: int) -> bool:
    return dist.is_initialized()


def test_a_group_is_formed_only_if_asked() -> None:
    assert run_ranks(initialized, 2, init=False).values() == (False, False)


def surroundings(rank: int) -> tuple[str | None, str, list[str]]:
    return os.environ.get("RUN_RANKS_TEST"), os.getcwd(), sys.path


def test_a_rank_has_the_surroundings_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[tuple[str | None, str, list[str]]] = []
    for value in ("first", None):
        if value is None:
            monkeypatch.delenv("RUN_RANKS_TEST")
        else:
            monkeypatch.setenv("RUN_RANKS_TEST", value)
        monkeypatch.syspath_prepend(f"/nowhere/{value}")
        expected = [(value, os.getcwd(), sys.path)]
        assert list(run_ranks(surroundings, 1, init=False).values()) == expected


def speak(rank: int) -> None:
    print("from python: é")
    print("no newline", end="", file=sys.stderr)
    os.write(1, b"from a descriptor\n")
    subprocess.run(["echo", "from a child"], check=True)


def test_output_is_captured_by_rank() -> None:
    ranks = run_ranks(speak, 2, init=False)
    for result in ranks:
        for text in ("from python: é\n", "no newline", "from a descriptor\n", "from a child\n"):
            assert result.output.count(text) == 1


def return_a_lock(rank: int) -> object:
    return threading.Lock()


class Unreadable:
    def __reduce__(self) -> str:
        raise RuntimeError("cannot be pickled")

    def __repr__(self) -> str:
        raise RuntimeError("cannot be shown")


def return_unreadable(rank: int) -> object:
    return Unreadable()


def test_a_value_that_cannot_be_pickled_becomes_its_repr() -> None:
    (lock,) = run_ranks(return_a_lock, 1, init=False).values()
    assert str(lock).startswith("<unlocked _thread.lock object")
    (unreadable,) = run_ranks(return_unreadable, 1, init=False).values()
    assert unreadable == "<Unreadable whose repr raised RuntimeError>"


# Ranks that fail.


def raise_in_one(rank: int) -> None:
    if rank == 1:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("boom") from error
    dist.all_reduce(torch.ones(1))


def test_an_error_is_reported_and_releases_the_others() -> None:
    ranks = run_ranks(raise_in_one, 3)
    error = error_of(ranks, 1)
    assert (error.type_name, error.qualified_name, error.message) == (
        "ValueError",
        "builtins.ValueError",
        "boom",
    )
    assert error.is_a(ValueError)
    assert error.is_a(Exception)
    assert not error.is_a(KeyError)
    assert isinstance(error.exception, ValueError)
    assert error.cause is not None
    assert error.cause.is_a(LookupError)
    assert 'raise ValueError("boom") from error' in error.traceback
    assert error_of(ranks, 0).type_name == error_of(ranks, 2).type_name == "RuntimeError"
    assert ranks.hung == ()
    with pytest.raises(RankError, match=r"(?s)3 of 3 ranks failed.*rank 1 raised .*: boom"):
        ranks.values()


class Odd(Exception):
    """Cannot be pickled, rebuilt or shown."""

    def __init__(self, first: int, second: threading.Lock) -> None:
        super().__init__(first)
        self.second = second

    def __str__(self) -> str:
        raise RuntimeError("no text")


class NeedsTwo(Exception):
    """Can be pickled, but rebuilding it fails: its arguments are not in ``args``."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raise_odd(rank: int) -> None:
    if rank == 0:
        raise Odd(1, threading.Lock())
    raise NeedsTwo(1, 2)


def test_an_error_that_cannot_be_pickled_is_reported_as_text() -> None:
    ranks = run_ranks(raise_odd, 2, init=False)
    odd, needs_two = error_of(ranks, 0), error_of(ranks, 1)
    assert odd.type_name == "Odd"
    assert odd.message == "<str() of this exception raised RuntimeError>"
    assert (needs_two.type_name, needs_two.message) == ("NeedsTwo", "1 and 2")
    assert odd.exception is needs_two.exception is None


def end_early(rank: int) -> None:
    ends: list[Callable[[], object]] = [
        lambda: os._exit(3),
        lambda: os._exit(0),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        lambda: sys.exit(4),
        lambda: sys.exit("text"),
    ]
    ends[rank]()


def test_a_rank_that_ends_early_shows_its_exit_code_and_has_failed() -> None:
    ranks = run_ranks(end_early, 5, init=False)
    assert [result.exitcode for result in ranks] == [3, 0, -signal.SIGTERM, 4, 1]
    assert all(result.failed for result in ranks)
    assert error_of(ranks, 3).type_name == "SystemExit"
    report = ranks.report()
    assert "rank 0 ended with exit code 3, no result" in report
    assert "rank 1 ended with exit code 0, no result" in report
    assert "rank 2 was killed by SIGTERM" in report


def outlive_rank_0(rank: int) -> str:
    """Rank 0 dies once rank 1 watches it; rank 1 then tries the store."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("pid", str(os.getpid()))
        store.wait(["watched"])
        os._exit(7)
    watch = os.pidfd_open(int(store.get("pid")))
    store.set("watched", "")
    select.select([watch], [], [])
    try:
        store.add("count", 1)  # unlike set(), it waits for an answer
    except RuntimeError:
        return "the store is gone"
    return "the store is there"


@pytest.mark.parametrize(
    ("store", "expected"), [("tcp", "the store is there"), ("rank0", "the store is gone")]
)
def test_the_stores_host_is_whom_the_caller_chose(store: StoreKind, expected: str) -> None:
    ranks = run_ranks(outlive_rank_0, 2, store=store)
    assert ranks[0].exitcode == 7
    assert ranks[1].value == expected


def wait_for_a_peer_in_vain(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["rank 1 has given up"], timedelta(seconds=LIVENESS_SECONDS))
        return
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        store.set("rank 1 has given up", "")


@pytest.mark.slow
def test_a_collective_ends_at_the_groups_timeout() -> None:
    ranks = run_ranks(wait_for_a_peer_in_vain, 2, group_timeout=0.5)
    assert "Timed out" in error_of(ranks, 1).message
    assert not ranks[0].failed


pending: dist.Work | None = None  # outlives the function, as a caller's own variable would


def leave_an_operation_pending(rank: int) -> str:
    """Rank 0 returns, though rank 1 never joins its operation; rank 1 waits for its end."""
    global pending
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        pending = dist.all_reduce(torch.ones(1), async_op=True)
        store.set("pid", str(os.getpid()))
    else:
        select.select([os.pidfd_open(int(store.get("pid")))], [], [])
    return "done"


@pytest.mark.slow
def test_a_group_that_cannot_be_closed_does_not_hold_the_run_up() -> None:
    ranks = run_ranks(leave_an_operation_pending, 2)
    assert ranks.values() == ("done", "done")
    assert "the group was not closed" in ranks[0].output


# What is refused.


def test_a_function_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(TypeError, match="at the top level of a module"):
        run_ranks(lambda rank: rank, 2)


def test_a_function_that_a_rank_cannot_import_is_the_ranks_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("only_here")
    exec("def f(rank): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    assert pickle.dumps(module.f)
    assert error_of(run_ranks(module.f, 1, init=False), 0).is_a(ModuleNotFoundError)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="needs 1 rank and some time"):
        run_ranks(describe, 0)
    with pytest.raises(ValueError, match="needs 1 rank and some time"):
        run_ranks(describe, 1, timeout=0)
    with pytest.raises(ValueError, match="got 'disk'"):
        run_ranks(describe, 1, store="disk")  # type: ignore[arg-type]

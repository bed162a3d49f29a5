"""Where late ranks are: asked by ranks that wait, answered while a rank is busy in its own code.

Ranks are ordered by words in the job's store and by what they log, never by time.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import consensus
from consensus import GroupFailure, LateRanks, any_failed, control_group, fail_together
from consensus.testing import run_ranks
from tests.gloo._cases import LIVENESS_S, caught, form_group, on_ranks, tell, wait_for
from tests.gloo.test_group_lifetime import consensus_threads

pytestmark = pytest.mark.slow

Records = tuple[consensus.log.Agreement, ...]

SOFT_S, HARD_S = 1.2, 1.6  # later than ranks post where they are


class Heard(logging.Handler):
    """What this rank logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("consensus").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def sleeps_in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=release_when_told, args=(lock,), name="helper").start()
    lock.acquire()


def release_when_told(lock: threading.Lock) -> None:
    wait_for("0 gave up")
    lock.release()


def sleeps_in_a_socket() -> None:
    ours, theirs = socket.socketpair()
    threading.Thread(target=write_when_told, args=(theirs,), name="helper").start()
    ours.recv(1)


def write_when_told(theirs: socket.socket) -> None:
    wait_for("0 gave up")
    theirs.send(b"x")


def is_stopped() -> None:
    _get_default_store().set("pid", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def waits_for_the_others() -> None:
    wait_for("0 gave up")


LATE: tuple[Callable[[], None], ...] = (
    sleeps_in_a_lock,
    sleeps_in_a_socket,
    is_stopped,
    waits_for_the_others,
)


def late_in_many_ways(rank: int) -> tuple[BaseException | None, list[str]]:
    """Rank 0 waits for the others; each is late in a way of its own, the last does not watch."""
    heard = Heard()
    if rank != len(LATE):
        assert consensus.watch()
    group = control_group(None, timeout=HARD_S)
    group.soft_timeout = SOFT_S
    any_failed(False, group, timeout=LIVENESS_S)
    if rank > 0:
        LATE[rank - 1]()
    error = caught(lambda: any_failed(False, group))
    tell(f"{rank} gave up")
    if rank == 0:
        os.kill(int(_get_default_store().get("pid")), signal.SIGCONT)
        for other in range(1, len(LATE) + 1):  # so that the store is there
            wait_for(f"{other} gave up")
    return error, heard.texts


def test_a_rank_that_waits_shows_where_each_late_rank_is() -> None:
    (error, texts), *late = on_ranks(late_in_many_ways, 1 + len(LATE))
    assert isinstance(error, LateRanks)
    assert error.ranks == (1, 2, 3, 4)
    (warning,) = texts
    assert re.match(r"any_failed: still waiting for ranks 1-4 after \d+ s\n  rank 1: ", warning)
    for text in (warning, str(error)):
        assert "rank 1: MainThread, innermost call first\n" in text
        assert "in sleeps_in_a_lock" in text
        assert "in sleeps_in_a_socket" in text
        assert "rank 3: gave no answer within 2 s: stopped, gone, or in C code" in text
        assert "rank 4: does not watch (it has not called consensus.watch()" in text
    assert "test_watch.py" in error.stacks[1].split("\n")[1]
    assert "helper, innermost call first\n" in error.stacks[1]
    assert "in release_when_told" in error.stacks[1]
    assert "consensus/_watch.py" not in error.stacks[1]  # the thread that answers
    for each, _ in late:
        assert isinstance(each, LateRanks)
        assert each.stacks == {}


def in_groups_one_after_the_other(rank: int, folder: str) -> tuple[BaseException | None, Records]:
    """Watch in three process groups; in the second, rank 0 fails while rank 1 is busy."""
    error = None
    for number in range(3):
        form_group(rank, folder, number)
        assert consensus.watch()
        assert consensus.watch()  # does nothing more
        dist.all_reduce(torch.ones(1))
        any_failed(False)
        assert [each.name for each in consensus_threads()].count("consensus-store-watch") == 1
        if number == 1:  # what is raised holds the group, which ends when the next one begins
            error = caught(partial(fails_beside_a_busy_rank, rank))
        dist.destroy_process_group()
        assert number == 1 or consensus_threads() == []
    return error, consensus.log.records()


def fails_beside_a_busy_rank(rank: int) -> None:
    if rank == 1:
        wait_for("0 gave up")
    try:
        with fail_together("load", timeout=HARD_S):
            if rank == 0:
                raise OSError("no such file")
    finally:
        tell(f"{rank} gave up")
        wait_for(f"{1 - rank} gave up")  # so that rank 0's store is there


def test_watching_ends_with_its_group_and_begins_again_with_the_next(tmp_path: Path) -> None:
    ranks = run_ranks(
        in_groups_one_after_the_other, 2, str(tmp_path), init=False, timeout=LIVENESS_S
    )
    (failed, by_failed), (busy, by_busy) = ranks.values()
    assert isinstance(failed, GroupFailure)
    assert failed.late_ranks == (1,)
    assert "in fails_beside_a_busy_rank" in failed.stacks[1]
    assert "rank 1: MainThread, innermost call first\n" in str(failed)
    assert isinstance(busy, GroupFailure)
    assert busy.stacks == {}
    # Also of groups that are gone: what ranks share, and what they do not.
    for records in (by_failed, by_busy):
        phases = [(each.phase, each.sequence, each.messages) for each in records]
        first = [("making the control group", 0, None), ("any_failed", 0, 1)]
        assert phases == [*first, *first, ("load", 1, None), *first]
        votes = [each for each in records if not each.phase.startswith("making")]
        assert {each.data_plane for each in votes} == {(("0", 1),)}
        assert len({each.channel for each in votes}) == 3
    assert [each.channel for each in by_failed] == [each.channel for each in by_busy]
    assert [each.decision for each in by_failed] == [*["agreed"] * 4, "late", *["agreed"] * 2]
    assert {each.rank for each in by_failed} == {0}
    assert {each.rank for each in by_busy} == {1}

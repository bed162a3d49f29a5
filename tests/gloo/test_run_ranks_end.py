"""Ranks that hang, and what a run leaves behind: nothing."""

import multiprocessing
import os
import select
import signal
import subprocess
import tempfile
import threading
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from consensus.testing import _processes, _stacks
from consensus.testing._processes import run_ranks
from consensus.testing._rank_main import StoreKind
from consensus.testing._ranks import RankError, Ranks

LIVENESS_SECONDS = 30  # for what should take milliseconds


def wait_until_gone(pid: int) -> bool:
    """Whether a process has ended, or ends soon."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], LIVENESS_SECONDS)[0])
    finally:
        os.close(handle)


def hang(rank: int) -> None:
    child = subprocess.Popen(["sleep", "1000"])  # to be killed with this rank
    print(os.getpid(), child.pid)  # for the test
    dist.barrier()
    if rank == 0:
        threading.Event().wait()
    if rank == 1:
        dist.all_reduce(torch.ones(1))
    for _ in range(30):  # any of them could answer for it, while it goes on
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.fixture(scope="module")
def hung_run() -> Ranks[None]:
    return run_ranks(hang, 3, timeout=5)


@pytest.mark.slow
def test_every_kind_of_hang_is_reported(hung_run: Ranks[None]) -> None:
    assert hung_run.hung == (0, 1, 2)
    assert [result.exitcode for result in hung_run] == [None] * 3
    with pytest.raises(RankError, match=r"(?s)rank 0 hung.*rank 1 hung.*rank 2 hung"):
        hung_run.values()


@pytest.mark.parametrize(("rank", "line"), [(0, "in wait"), (1, "in all_reduce"), (2, "in hang")])
def test_a_stack_says_where_a_rank_hangs(hung_run: Ranks[None], rank: int, line: str) -> None:
    stack = hung_run[rank].stack
    assert line in stack
    assert "in hang" in stack
    assert "in rank_main" in stack


def test_hung_ranks_are_killed_with_their_children(hung_run: Ranks[None]) -> None:
    pids = [int(pid) for result in hung_run for pid in result.output.split()]
    assert len(pids) == 6
    assert all(map(wait_until_gone, pids))


def hang_without_an_answer(rank: int) -> None:
    if rank == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    else:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    threading.Event().wait()


@pytest.mark.slow
def test_a_report_without_a_stack_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stacks, "_DUMP_SECONDS", 1.0)
    blocking, replacing = run_ranks(hang_without_an_answer, 2, init=False, timeout=5)
    assert blocking.hung
    assert "(no stack was written: the process did not react to SIGUSR1 in 1 s" in blocking.stack
    assert "its state is S (sleeping)" in blocking.stack
    assert replacing.hung
    assert "SIGUSR1 ended the process at once; its code must have replaced" in replacing.stack


class Ended:
    """A process that has ended, as its parent sees it."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode


@pytest.mark.parametrize(
    ("exitcode", "reason"),
    [(-signal.SIGUSR1, "still starting"), (-signal.SIGKILL, "had just ended, with exit code -9")],
)
def test_a_rank_that_ended_before_it_could_answer_is_told(
    exitcode: int, reason: str, tmp_path: Path
) -> None:
    process: Any = Ended(exitcode)
    assert reason in _stacks.stack_or_reason(process, tmp_path / "absent")


def test_ranks_that_ended_while_the_parent_was_stopped_have_not_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def be_stopped(sentinels: list[int], seconds: float) -> list[int]:
        monkeypatch.setattr(_processes, "wait", wait)
        assert all(wait([each], LIVENESS_SECONDS) for each in sentinels)
        threading.Event().wait(0.5)  # past the deadline
        return []

    monkeypatch.setattr(_processes, "wait", be_stopped)
    assert run_ranks(abs, 2, init=False, timeout=0.5).values() == (0, 1)


def return_but_run_on(rank: int) -> str:
    threading.Thread(target=threading.Event().wait, name="never ends").start()
    return "value"


@pytest.mark.slow
def test_a_rank_that_returns_but_does_not_end_has_hung() -> None:
    (result,) = run_ranks(return_but_run_on, 1, init=False, timeout=4)
    assert result.hung
    assert result.returned
    assert result.value == "value"


# What is left behind.


def open_things() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("boom")
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("store", ["tcp", "rank0", "file"])
def test_nothing_is_left_behind(
    store: StoreKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(fail_on_rank_1, 1)  # the first run starts the forkserver, which stays
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = open_things()
    run_ranks(fail_on_rank_1, 2, store=store)
    assert open_things() == before
    assert multiprocessing.active_children() == []
    assert list(tmp_path.iterdir()) == []


def interrupt_the_parent(rank: int, folder: Path, parent: int, number: int) -> None:
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    dist.barrier()
    if rank == 0:
        os.kill(parent, number)
    threading.Event().wait()


def pids_in(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("*.pid")]


def test_ctrl_c_in_the_parent_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(fail_on_rank_1, 1)  # the first run starts the forkserver, which stays
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # A job in the background, such as CI's may be, starts with SIGINT ignored.
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    before, handler = open_things(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(interrupt_the_parent, 2, tmp_path, os.getpid(), signal.SIGINT)
    assert open_things() == before
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, found)
    assert len(pids_in(tmp_path)) == 2
    assert all(map(wait_until_gone, pids_in(tmp_path)))
    assert [path.suffix for path in tmp_path.iterdir()] == [".pid", ".pid"]


def run_until_killed(rank: int, folder: Path) -> None:
    """A rank that has ranks of its own, one of which kills it."""
    run_ranks(interrupt_the_parent, 2, folder, os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_ranks_end_with_a_parent_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed parent cannot remove its folder
    ranks = run_ranks(run_until_killed, 1, tmp_path, init=False, timeout=50)
    assert ranks[0].exitcode == -signal.SIGKILL
    assert len(pids_in(tmp_path)) == 2
    assert all(map(wait_until_gone, pids_in(tmp_path)))

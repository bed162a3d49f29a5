"""Ask a stuck process where it is, without its cooperation, and be rid of it.

[Note: a stack from a stuck rank]
A rank that hangs sits in a collective's C++ code, in a lock, or is stopped by a signal, so it runs
no Python handler. faulthandler's handler is C: it runs in whichever thread the signal interrupts,
reads the frames of all threads without the GIL, and writes to an open file. Registered with
``chain=True`` it then raises the signal again with the disposition it found, which ends the
process. So the end of the process says that the stack is written: no size to poll, no marker.

The signal goes to the main thread alone, where the system can (tgkill). A signal to the process is
taken by whichever thread wakes first: the main thread of a stopped rank, going on at the same time,
would have left the place where it stopped before another thread has written it down.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

_SIGNAL = signal.SIGUSR1
_DUMP_SECONDS = 5.0  # a dump takes milliseconds; a rank that blocks the signal gets no longer


def answer_with_stacks(path: Path) -> None:
    """In a rank: when asked, write the stacks of all threads to ``path`` and end."""
    signal.signal(_SIGNAL, signal.SIG_DFL)
    # Never closed: the handler needs the descriptor until the process ends.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    faulthandler.register(_SIGNAL, file=descriptor, all_threads=True, chain=True)


def end_with_parent(parent: int) -> None:
    """In a rank: have the kernel kill this process group when the parent is gone.

    A test runner that gives up ends without clean-up, and a rank that hangs then hangs forever.
    The kernel sends the signal, so this also holds for a rank that is stopped or stuck in C.
    Where the kernel cannot (outside Linux), orphans are left to the user.

    Args:
        parent: Descriptor that is at its end of file once the parent has gone.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return
    fcntl.fcntl(parent, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(parent, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(parent, fcntl.F_GETFL)
    fcntl.fcntl(parent, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([parent], [], [], 0)[0]:  # it went before we could say so
        os.killpg(os.getpgrp(), signal.SIGKILL)


def demand_stacks(processes: Sequence[BaseProcess]) -> None:
    """In the parent: have each of these processes write its stacks and end, for a bounded time."""
    for process in processes:
        _send(process, _SIGNAL, _kill_main_thread)
        _send(process, signal.SIGCONT)  # a stopped process takes no other signal
    waiting = [process.sentinel for process in processes]
    deadline = time.monotonic() + _DUMP_SECONDS
    while waiting and (left := deadline - time.monotonic()) > 0:
        ended = wait(waiting, left)
        waiting = [sentinel for sentinel in waiting if sentinel not in ended]


def stack_or_reason(process: BaseProcess, path: Path) -> str:
    """In the parent, after :func:`demand_stacks`: return the stacks, or why there are none."""
    return read_text(path) or f"(no stack was written: {_why_none(process, path)})"


def _why_none(process: BaseProcess, path: Path) -> str:
    name, code = _SIGNAL.name, process.exitcode
    if code is None:
        return (
            f"the process did not react to {name} in {_DUMP_SECONDS:g} s, {_state_of(process)}; "
            f"code that blocks {name}, or sets a handler of its own, keeps it from answering"
        )
    if code != -_SIGNAL:
        return f"the process had just ended, with exit code {code}"
    if not path.exists():
        return "the process was still starting; the import of the main module may take long"
    return f"{name} ended the process at once; its code must have replaced the handler"


def _state_of(process: BaseProcess) -> str:
    lines = read_text(Path(f"/proc/{process.pid}/status")).splitlines()  # empty outside Linux
    state = [line.partition(":")[2].strip() for line in lines if line.startswith("State:")]
    return f"its state is {state[0] if state else 'unknown'}"


def read_text(path: Path) -> str:
    """Return what a file holds, or nothing if there is none."""
    return path.read_text("utf-8", "replace") if path.exists() else ""


def kill_group(process: BaseProcess) -> None:
    """In the parent: kill this rank, and what it started, even if the rank itself has ended.

    Call it soon after an end: the number stays taken while the group has members, and an empty
    group's number is given away again only when the kernel has used all others.
    """
    if process.pid is not None:
        # Not the leader of a group, if it was killed before its first line.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.exitcode is None:
            process.kill()


def _send(process: BaseProcess, number: int, kill: Callable[[int, int], object] = os.kill) -> None:
    if process.pid is not None and process.exitcode is None:
        with contextlib.suppress(ProcessLookupError):
            kill(process.pid, number)


def _kill_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process; to the process where that is not offered."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "tgkill"):  # outside Linux
        os.kill(pid, number)
    else:
        libc.tgkill(pid, pid, number)  # fails only when it has just ended


def stack_of(thread: threading.Thread) -> str:
    """Return where this thread is, as faulthandler writes it: without making it a frame object.

    It holds the GIL throughout, so that no frame moves while it is read; ``traceback`` does not.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().split("\n\n")
    number = f"0x{thread.ident or 0:016x}"
    found = [stack for stack in stacks if number in stack.partition("\n")[0]]
    return f"{thread.name}: {found[0] if found else 'it has just ended'}"

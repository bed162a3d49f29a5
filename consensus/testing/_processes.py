"""Run a function on real rank processes, and always come back with what each of them did.

[Note: how a rank starts]
fork hangs once the parent has used OpenMP, and spawn imports torch anew in each rank (seconds).
A forkserver imports torch once and forks ranks from a process that has computed nothing. It is
started by the first run of a process and stays; later runs take well under a second.

[Note: how a rank ends]
A rank leaves its result in a file that appears in one piece, so the parent reads no pipe that a
killed rank could leave half written. The parent waits for the *ends of processes*, until one
deadline. Whoever is left then writes its stacks (see [Note: a stack from a stuck rank]) and is
killed. Ranks lead process groups of their own, so what they started is killed with them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar, get_args

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in __all__

from consensus.testing import _stacks
from consensus.testing._rank_main import HOST, Group, Job, Report, StoreKind, rank_main
from consensus.testing._ranks import RankResult, Ranks

T = TypeVar("T")

# torch.optim imports torch._dynamo on first use: half a second in each rank, once in the server.
_PRELOAD = ("torch.distributed.fsdp", "torch._dynamo", "consensus.testing")
_REAP_SECONDS = 5.0  # SIGKILL works at once, unless the kernel itself is stuck
_SLICE_SECONDS = 0.1  # how long Ctrl-C may go unnoticed


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout: float = 60.0,
    backend: str = "gloo",
    init: bool = True,
    group_timeout: float = 30.0,
    store: StoreKind = "tcp",
    **kwargs: object,
) -> Ranks[T]:
    """Return what ``fn(rank, *args, **kwargs)`` did on each of ``world_size`` processes.

    A rank that still runs when ``timeout`` is over is reported with the stacks of all of its
    threads, and killed. No process, file, socket or thread of a run is left behind, also after
    Ctrl-C; only the forkserver that ranks are forked from stays until this process ends.

    Each rank has this process's environment, ``sys.path`` and working directory, one torch
    thread, and its stdout and stderr captured. A variable that torch reads on import must be set
    before the first run.

    Args:
        fn: A function at the top level of an importable module; its first argument is the rank.
        world_size: Number of processes, 1 or more.
        *args: Passed on; pickled, a module by its name.
        timeout: Seconds from the moment all ranks are started until all must have ended.
        backend: As in ``init_process_group``.
        init: Whether to form the default process group before ``fn`` and destroy it after.
        group_timeout: Seconds a collective of the default group may take.
        store: Who holds the rendezvous store. "tcp": this process, so that no rank's death takes
            it away. "rank0": rank 0, so that its death does. "file": a file.
        **kwargs: Passed on; pickled. Bind an argument that has a name of this function's with
            ``functools.partial``.

    Returns:
        One result a rank, in rank order. Nothing a rank does is raised here: ask ``values()``.

    Raises:
        TypeError: ``fn`` or an argument cannot be pickled.
        ValueError: ``world_size``, ``timeout`` or ``store`` is out of range.
        RuntimeError: No process could be started.

    Collectives:
        None here. In each rank, with ``init``: those of ``init_process_group``.
    """
    _check(world_size, timeout, store)
    call = _pickled_call(fn, args, kwargs)
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(_Interrupts())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="run_ranks-"))
        port, listener = stack.enter_context(_rendezvous(store if init else "file"))
        group = Group(backend, timedelta(seconds=group_timeout), store, port) if init else None
        job = Job(call, world_size, Path(folder), dict(os.environ), group)
        crew = [_Rank.of(rank, job, listener if rank == 0 else None) for rank in range(world_size)]
        stack.callback(_release, crew)
        _start(crew)
        if listener is not None:
            listener.close()  # rank 0 holds it now, alone
        _follow(crew, job, timeout, interrupts)
        return Ranks(tuple(_result(member, job) for member in crew))


@dataclass(slots=True)
class _Rank:
    """One rank, as its parent sees it."""

    rank: int
    process: ForkServerProcess
    seconds: float = 0.0
    hung: bool = False
    stack: str = ""  # where it hung, or why that is not known

    @classmethod
    def of(cls, rank: int, job: Job, listener: socket.socket | None) -> _Rank:
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=rank_main, args=(rank, job, listener), name=f"rank{rank}")
        return cls(rank, process)


@dataclass(slots=True)
class _Interrupts:
    """Holds signal handlers back, so that none can cut a start or a clean-up in two.

    Ctrl-C and a test runner's alarm raise wherever the main thread happens to be. Here they run
    where :meth:`deliver` is called, and otherwise on leaving. Other threads run no handlers, so
    there is nothing to hold back. A signal without a handler ends this process at once.
    """

    _came: list[int] = field(default_factory=list)
    _handlers: dict[int, Callable[[int, FrameType | None], Any]] = field(default_factory=dict)

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, lambda number, _: self._came.append(number))
        return self

    def deliver(self) -> None:
        """Run the handlers that were held back; what they raise ends the run."""
        while self._came:
            number = self._came.pop(0)
            self._handlers[number](number, None)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.deliver()


class _Pickler(pickle.Pickler):
    """Sends a module by its name, as pickle sends functions: it may be the owner in a point."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType):
            return importlib.import_module, (value.__name__,)
        return NotImplemented


def pickled(value: object) -> bytes:
    """Return ``value`` as it is sent to a rank; what pickle raises where it cannot be."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _check(world_size: int, timeout: float, store: str) -> None:
    if world_size < 1 or timeout <= 0:
        raise ValueError(f"run_ranks needs 1 rank and some time; got {world_size=}, {timeout=}.")
    if store not in get_args(StoreKind):
        raise ValueError(f"store is one of {get_args(StoreKind)}; got {store!r}.")


def _pickled_call(fn: Callable[..., T], args: object, kwargs: object) -> bytes:
    try:
        return pickled((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"run_ranks sends its function and arguments to new processes; {fn!r} or an argument "
            f"cannot be pickled: {error}. Use a function at the top level of a module."
        ) from error


@contextlib.contextmanager
def _rendezvous(kind: StoreKind) -> Iterator[tuple[int, socket.socket | None]]:
    """Hold what ranks need to find each other: a port, and rank 0's listening socket if any."""
    if kind == "file":
        yield 0, None
    elif kind == "rank0":
        with socket.create_server((HOST, 0)) as listener:
            yield listener.getsockname()[1], listener
    else:
        # A socket of our own, since torch's would be IPv6: torch looks up the name of each peer,
        # and that of an IPv4 address in disguise is asked of DNS, which may take 5 s to fail.
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        server = TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        try:
            yield server.port, None
        finally:
            del server  # the last reference: its destructor ends the server's thread


def _start(crew: Sequence[_Rank]) -> None:
    """Start all ranks; the first start of a process starts the forkserver and waits for it."""
    # With pytest loaded there, ranks import the modules of tests faster.
    preload = [*_PRELOAD, *(["pytest"] if "pytest" in sys.modules else [])]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    for member in crew:
        try:
            member.process.start()
        except (EOFError, OSError) as error:
            raise RuntimeError(
                f"rank {member.rank} could not be started: the forkserver is gone ({error!r}). "
                "If it failed on import, its stderr above says why."
            ) from error


def _follow(crew: Sequence[_Rank], job: Job, timeout: float, interrupts: _Interrupts) -> None:
    """Wait until every rank has ended, or the deadline; then collect stacks from the rest."""
    start = time.monotonic()
    running = {member.process.sentinel: member for member in crew}
    left = timeout
    while running and left > 0:
        interrupts.deliver()
        left = max(0.0, start + timeout - time.monotonic())
        # At the deadline too: this process may have been stopped, and ranks have ended meanwhile.
        ended = wait(list(running), min(left, _SLICE_SECONDS))
        for sentinel in [sentinel for sentinel in running if sentinel in ended]:
            member = running.pop(sentinel)
            member.seconds = time.monotonic() - start
            _stacks.kill_group(member.process)  # what it started and left
    for member in running.values():
        member.hung = True
        member.seconds = time.monotonic() - start
    _stacks.demand_stacks([member.process for member in running.values()])
    for member in running.values():
        member.stack = _stacks.stack_or_reason(member.process, job.path(member.rank, "stack"))
        _stacks.kill_group(member.process)


def _release(crew: Sequence[_Rank]) -> None:
    """Kill what still runs, and give back what the parent held of each rank."""
    started = [member.process for member in crew if member.process.pid is not None]
    for process in started:
        if process.exitcode is None:
            _stacks.kill_group(process)
    for process in started:
        process.join(_REAP_SECONDS)
        with contextlib.suppress(ValueError):  # not even SIGKILL ended it
            process.close()


def _result(member: _Rank, job: Job) -> RankResult[Any]:
    """Read what a rank left behind; its process has ended, or is about to be killed."""
    rank, hung = member.rank, member.hung
    report = _read_report(job.path(rank, "report"))
    returned = report is not None and report.error is None
    return RankResult(
        rank=rank,
        value=_unpickled(report.value) if report is not None and returned else None,
        error=report.error if report is not None else None,
        exitcode=None if hung else member.process.exitcode,
        hung=hung,
        stack=member.stack,
        output=_stacks.read_text(job.path(rank, "output")),
        seconds=member.seconds,
        returned=returned,
    )


def _read_report(path: Path) -> Report | None:
    if not path.exists():
        return None
    report: Report = pickle.loads(path.read_bytes())
    if report.error is None or report.exception is None:
        return report
    exception = _unpickled(report.exception)
    if not isinstance(exception, BaseException):  # its class exists in the rank only
        return report
    return replace(report, error=replace(report.error, exception=exception))


def _unpickled(data: bytes) -> object:
    try:
        return pickle.loads(data)
    except Exception as error:
        return f"<a rank's value that cannot be unpickled here: {error!r}>"

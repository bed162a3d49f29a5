"""Run ranks as threads of one process, on torch's in-process group: fast, and for CPU tensors only.

The only file that knows torch's private ``multi_threaded_pg``.

[Note: when threaded ranks are stranded]
In this group a rank waits in ``Collective.join`` until the others have joined, with no timeout.
A rank that waits there can be freed by another rank only. So when every rank that still runs
waits in a collective that is not complete, none will ever go on, and the run can end at once: with
no clock, and with no guess about how slow a rank may be. A look at one rank after another is not
a look at one instant, hence two of them: whatever moved after the first shows in the second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
from torch.distributed import HashStore  # type: ignore[attr-defined]  # missing in __all__
from torch.testing._internal.distributed import multi_threaded_pg

from consensus._session import end_session
from consensus.testing._ranks import ErrorRecord, RankResult, Ranks
from consensus.testing._stacks import stack_of

T = TypeVar("T")
torch_threads: Any = multi_threaded_pg  # torch leaves it untyped

_LOOK_SECONDS = 0.01  # between two looks at the ranks
_LEAVE_SECONDS = 1.0  # for a released rank to end
_RELEASED = "[run_threads] released: another rank had failed, and this one waited for it\n"

# Ranks of earlier runs that could not be ended: Python has no way to end a thread.
_left_behind: list[threading.Thread] = []


def run_threads(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout: float = 60.0,
    **kwargs: object,
) -> Ranks[T]:
    """Return what ``fn(rank, *args, **kwargs)`` did on each of ``world_size`` threads.

    Each thread has a default process group of backend "threaded" and one torch thread. A
    collective costs microseconds and a run milliseconds, but it is not a real backend: reductions
    run in rank order, nothing is sent, and nothing times out. What ranks share that processes
    would not: arguments, modules, and torch's default generator, so a seed set in one rank moves
    the others.

    When ranks are stranded in collectives, the run ends at once: after another rank raised, they
    are released, without an error of their own; when none raised, they are reported as hung. A
    rank that hangs elsewhere is reported at the deadline, and left behind if it cannot be ended.

    Args:
        fn: Any callable.
        world_size: Number of threads, 1 or more.
        *args: Passed on, the same objects to every rank.
        timeout: Seconds until all ranks must have ended.
        **kwargs: Passed on.

    Returns:
        As :func:`run_ranks`; ``exitcode`` is None and ``output`` is not captured.

    Raises:
        ValueError: ``world_size`` or ``timeout`` is out of range.
        RuntimeError: A rank of an earlier run is still running, and would mix with these.

    Collectives:
        None here. In each rank: those of ``init_process_group``.
    """
    if world_size < 1 or timeout <= 0:
        raise ValueError(f"run_threads needs 1 rank and some time; got {world_size=}, {timeout=}.")
    _refuse_if_left_behind()
    store = HashStore()
    crew = [
        _RankThread(rank, world_size, store, timeout, partial(fn, rank, *args, **kwargs))
        for rank in range(world_size)
    ]
    with _threaded_world():
        try:
            for thread in crew:
                thread.start()
            stacks = _follow(crew, time.monotonic() + timeout)
        finally:
            _free_waiting_ranks()
            _join(crew, _LEAVE_SECONDS)
            _left_behind.extend(thread for thread in crew if thread.is_alive())
    return Ranks(tuple(thread.result(stacks.get(thread.rank)) for thread in crew))


class _RankThread(threading.Thread):
    """One rank: a thread with a process group of its own, and what became of it."""

    def __init__(
        self, rank: int, world_size: int, store: Any, timeout: float, call: Callable[[], object]
    ) -> None:
        super().__init__(name=f"rank{rank}", daemon=True)
        self.rank = rank
        self._world_size = world_size
        self._store = store
        self._timeout = timeout
        self._call = call
        self._value: object = None
        self._started_at = self._ended_at = time.monotonic()
        self._returned = False
        self._released = False
        self.error: ErrorRecord | None = None

    def run(self) -> None:
        torch.set_num_threads(1)  # as in a rank process, since the count changes the bits
        try:
            dist.init_process_group(
                "threaded",
                rank=self.rank,
                world_size=self._world_size,
                store=self._store,
                timeout=timedelta(seconds=self._timeout),
            )
            self._value = self._call()
            self._returned = True
        except BaseException as error:
            # torch wakes a waiting rank with SystemExit: the echo of what another rank did.
            self._released = isinstance(error, SystemExit) and is_over()
            if not self._released:
                self.error = replace(ErrorRecord.of(error), exception=error)
        finally:
            self._ended_at = time.monotonic()
            # Else this thread outlived its run, and the default group is someone else's.
            if isinstance(dist.group.WORLD, torch_threads.ProcessLocalGroup):
                end_session()  # torch's caches may hold the group, and so the session, for good
                dist.destroy_process_group()

    def result(self, stack: str | None) -> RankResult[Any]:
        """Return what this rank did; ``stack`` is where it hung, if it did."""
        hung = stack is not None
        return RankResult(
            rank=self.rank,
            value=self._value if self._returned and not hung else None,
            error=None if hung else self.error,
            exitcode=None,
            hung=hung,
            stack=stack or "",
            output=_RELEASED if self._released and not hung else "",
            seconds=(time.monotonic() if hung else self._ended_at) - self._started_at,
            returned=self._returned and not hung,
        )


def _refuse_if_left_behind() -> None:
    _left_behind[:] = [thread for thread in _left_behind if thread.is_alive()]
    if _left_behind:
        where = "\n".join(stack_of(thread) for thread in _left_behind)
        raise RuntimeError(
            f"{len(_left_behind)} rank(s) of an earlier run_threads still run and would mix with "
            f"this one. End them, or use run_ranks for what hangs outside a collective.\n{where}"
        )


@contextmanager
def _threaded_world() -> Iterator[None]:
    """Give each thread a torch.distributed of its own, and undo that."""
    torch_thread_count = torch.get_num_threads()
    _set_thread_isolation_mode(True)
    torch_threads.ProcessLocalGroup.reset()
    torch_threads._install_threaded_pg()
    untold, torch_threads.Collective = torch_threads.Collective, _Collective
    try:
        yield
    finally:
        torch_threads.Collective = untold
        torch_threads._uninstall_threaded_pg()
        if not _left_behind:  # else what runs on is to end at its next collective
            torch_threads.ProcessLocalGroup.reset()
        _set_thread_isolation_mode(False)
        torch.set_num_threads(torch_thread_count)


def _follow(crew: Sequence[_RankThread], deadline: float) -> dict[int, str]:
    """Wait for the ranks; return rank -> stack for those that hang."""
    while running := [thread for thread in crew if thread.is_alive()]:
        late = time.monotonic() >= deadline
        if late or _stranded(running):
            # Stranded ranks hang because of a rank that raised, if one did: that is the error.
            released = not late and any(thread.error is not None for thread in crew)
            return {} if released else {thread.rank: stack_of(thread) for thread in running}
        running[0].join(_LOOK_SECONDS)
    return {}


def _stranded(running: Sequence[threading.Thread]) -> bool:
    """Whether none of these can go on. See [Note: when threaded ranks are stranded]."""
    first = [_waits_in(thread) for thread in running]
    return None not in first and first == [_waits_in(thread) for thread in running]


def _waits_in(thread: threading.Thread) -> object | None:
    """Return the collective in which this thread waits for another rank to come."""
    condition = _waits.get(thread.ident or 0)
    if condition is None:
        return None
    collective = condition.collective
    leads = condition is collective._start_cond  # rank 0 waits for all, the others for its work
    complete = collective._count == collective._world_size if leads else collective._done
    return None if complete else collective


class _Condition(threading.Condition):
    """Notes which thread waits in it, and in which collective.

    Reading that off the frames of a running thread would need nothing of torch's, but has crashed
    the interpreter (Python 3.11, with torch.compile at work).
    """

    def __init__(self, collective: Any) -> None:
        super().__init__()
        self.collective = collective

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        _waits[threading.get_ident()] = self
        try:
            return super().wait_for(predicate, timeout)
        finally:
            del _waits[threading.get_ident()]


_waits: dict[int, _Condition] = {}


class _Collective(torch_threads.Collective):  # type: ignore[misc]  # torch leaves it untyped
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._start_cond, self._done_cond = _Condition(self), _Condition(self)


def is_over() -> bool:
    """Return whether this run is over, so that a rank that is still there should end."""
    return bool(torch_threads.ProcessLocalGroup._terminate.is_set())


def _free_waiting_ranks() -> None:
    """Make every rank that waits in a collective, or enters one from now on, raise SystemExit."""
    group = torch_threads.ProcessLocalGroup
    group._terminate.set()
    with group._coll_lock:  # torch's own exception_handle reads a dict that ranks still change
        waited_for = list(group._cur_coll_on_pgs.values())
    for collective in waited_for:
        for condition in (collective._start_cond, collective._done_cond):
            with condition:
                condition.notify_all()


def _join(crew: Sequence[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in crew:
        if thread.ident is not None:  # it was started
            thread.join(max(0.0, deadline - time.monotonic()))

"""Make one rank fail at a named point, or take the agreement away to see what it prevents.

[Note: what ranks that are threads share]
Attributes of modules and classes, and the one hook at named places. So only the faulty rank puts
its fault there, whoever passes looks which rank it is, and an attribute gets its function back
when the last fault has left it, in whatever order the ranks leave.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist

from consensus import _seams
from consensus.testing.faults import Call, Fault, as_fault

Point: TypeAlias = str | tuple[object, str]


@contextmanager
def inject(
    point: Point,
    *,
    rank: int,
    fault: Fault | BaseException | Callable[[], object],
    nth: int = 1,
    times: int = 1,
) -> Iterator[None]:
    """Let ``rank`` fail when it comes to ``point``; every rank calls this, on threads as well.

    Args:
        point: Where. Of any code: ``(owner, name)``, a call of this function or method, such as
            ``(torch.distributed, "all_reduce")``, ``(optimizer, "step")`` or
            ``(torch.optim.AdamW, "step")``; calls through a name that was imported from the owner
            are not seen. Of an optimizer with :class:`consensus.preflight`: "phase: place", where
            ``closure`` is before the user's code and ``check`` after it, before the local checks:
            "Muon.step: closure".
        rank: Which global rank fails.
        fault: An exception to raise, a fault of :mod:`consensus.testing.faults`, or a function
            that is called before the rank goes on.
        nth: Which visit of that rank to the point meets the fault first, counted from 1.
        times: How many visits from then on meet it.

    Raises:
        ValueError: There is no such rank, a number is below 1, the fault needs a call and the
            point is a place, or it would end a process of which other ranks are threads.
        RuntimeError: There is no default process group, so nobody knows which rank this is.
        AttributeError: The owner has nothing of this name.
        TypeError: The fault is none.
        AssertionError: On that rank, on leaving without another error: it never came to the
            point, so the block shows nothing. Most often the name is wrong.

    Collectives:
        None.
    """
    what = as_fault(fault)
    if not dist.is_initialized():
        raise RuntimeError("inject needs the default process group: it says which rank this is")
    _check(point, rank, what, nth, times)
    if dist.get_rank() != rank:
        yield
        return
    injection = _Injection(rank, what, nth, times)
    _add(point, injection)
    try:
        yield
    finally:
        _remove(point, injection)
    if not injection.met:
        raise AssertionError(
            f"inject: rank {rank} came to {_name(point)} {injection.visits} times, and the fault "
            f"waits for visit {nth}: nothing was injected. Is the point right?"
        )


@contextmanager
def without_agreement() -> Iterator[None]:
    """Let every rank decide alone: a test that passes in here protects nothing."""
    before, _seams.agreement = _seams.agreement, False
    try:
        yield
    finally:
        _seams.agreement = before


@dataclass(slots=True, eq=False)
class _Injection:
    """One fault of one rank, and how often the rank came to it."""

    rank: int
    fault: Fault
    nth: int
    times: int
    visits: int = 0
    met: bool = False
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _held_back: list[Callable[[], Any]] = field(default_factory=list)

    def pass_by(self, make: Callable[[], Any]) -> Any:
        """Make a call, or meet the fault instead."""
        self.visits = number = next(self._numbers)  # also where the rank has several threads
        if self.nth <= number < self.nth + self.times:
            self.met = True
            return self.fault.meet(Call(make, self._held_back))
        result = make()
        while self._held_back:
            self._held_back.pop(0)()
        return result


def _check(point: Point, rank: int, fault: Fault, nth: int, times: int) -> None:
    if not 0 <= rank < dist.get_world_size():
        raise ValueError(f"inject: there are {dist.get_world_size()} ranks; got {rank=}")
    if nth < 1 or times < 1:
        raise ValueError(f"inject: visits are counted from 1; got {nth=}, {times=}")
    kind = type(fault).__name__
    if fault.of_a_call and isinstance(point, str):
        raise ValueError(
            f"inject: {kind} changes a call, and {point!r} is a place where nothing is called; "
            "give an owner and a name, such as (torch.distributed, 'all_reduce')"
        )
    if fault.ends_the_process and dist.get_backend() == "threaded":
        raise ValueError(
            f"inject: {kind} ends the process, and these ranks are threads of one; "
            "use it on processes (run_ranks)"
        )
    if not isinstance(point, str):
        getattr(*point)  # an AttributeError on all ranks, not on one


def _name(point: Point) -> str:
    if isinstance(point, str):
        return repr(point)
    owner, name = point
    named = inspect.ismodule(owner) or inspect.isclass(owner)
    return f"{owner.__name__ if named else type(owner).__name__}.{name}"  # type: ignore[attr-defined]


# ---- where faults are put ----
# See [Note: what ranks that are threads share].

_lock = threading.Lock()
_at_places: list[tuple[str, _Injection]] = []
_patches: dict[tuple[int, str], _Patch] = {}


@dataclass(slots=True)
class _Patch:
    """An attribute that leads past some faults, for as long as there are any."""

    owner: Any
    name: str
    raw: Any  # what the owner itself held; absent when it came from a class above
    injections: list[_Injection] = field(default_factory=list)

    @classmethod
    def on(cls, owner: Any, name: str) -> _Patch:
        function = getattr(owner, name)
        raw = getattr(owner, "__dict__", {}).get(name, _ABSENT)
        patch = cls(owner, name, raw)

        @functools.wraps(function)
        def passing(*args: Any, **kwargs: Any) -> Any:
            return _pass(patch.injections, partial(function, *args, **kwargs))

        # Bound already, so it must not be bound again.
        bound = isinstance(raw, staticmethod | classmethod)
        setattr(owner, name, staticmethod(passing) if bound else passing)
        return patch

    def undo(self) -> None:
        if self.raw is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.raw)


_ABSENT = object()


def _add(point: Point, injection: _Injection) -> None:
    with _lock:
        if isinstance(point, str):
            _at_places.append((point, injection))
            _seams.fault = _reached
            return
        owner, name = point
        key = (id(owner), name)
        if key not in _patches:
            _patches[key] = _Patch.on(owner, name)
        _patches[key].injections.append(injection)


def _remove(point: Point, injection: _Injection) -> None:
    with _lock:
        if isinstance(point, str):
            _at_places.remove((point, injection))
            _seams.fault = _reached if _at_places else None
            return
        owner, name = point
        patch = _patches[id(owner), name]
        patch.injections.remove(injection)
        if not patch.injections:
            _patches.pop((id(owner), name)).undo()


def _reached(place: str) -> None:
    _pass([injection for at, injection in list(_at_places) if at == place], lambda: None)


def _pass(injections: list[_Injection], make: Callable[[], Any]) -> Any:
    """Make a call past these faults: the one put there last is met first."""
    here = dist.get_rank() if dist.is_initialized() else None
    for injection in list(injections):
        if injection.rank == here:
            make = partial(injection.pass_by, make)
    return make()

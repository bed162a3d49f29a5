"""Make one rank fail at a named point, or take the agreement away to see what it prevents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from consensus import _seams


@contextmanager
def inject(
    point: str, *, rank: int, fault: BaseException | Callable[[], None], times: int = 1
) -> Iterator[None]:
    """Let ``rank`` fail when it reaches ``point``; every rank calls this.

    Args:
        point: Where, as "phase: place". The step protocol has two places: ``closure`` (the
            user's code is about to run) and ``check`` (it has run and local checks begin), so
            "Muon.step: closure". Optimizers add their own.
        rank: Which global rank fails.
        fault: An exception to raise, or a function to call (it may raise, stall or exit).
        times: How often; later visits pass.
    """
    left = times

    def reached(name: str) -> None:
        nonlocal left
        if name != point or left <= 0 or dist.get_rank() != rank:
            return
        left -= 1
        if isinstance(fault, BaseException):
            raise fault
        fault()

    before, _seams.fault = _seams.fault, reached
    try:
        yield
    finally:
        _seams.fault = before


@contextmanager
def without_agreement() -> Iterator[None]:
    """Let every rank decide alone: a test that passes in here protects nothing."""
    before, _seams.agreement = _seams.agreement, False
    try:
        yield
    finally:
        _seams.agreement = before

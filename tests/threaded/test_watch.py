"""Ranks that are threads answer too: with their own thread, not with those of other ranks."""

from __future__ import annotations

import gc
import threading

import consensus
from consensus import LateRanks, any_failed, control_group
from consensus.testing import run_threads


def one_is_late(rank: int, gave_up: threading.Event, stacks: list[str]) -> None:
    assert consensus.watch()
    group = control_group(None, timeout=0.5, backend="store")
    any_failed(False, group, timeout=30.0)
    if rank == 1:
        gave_up.wait()
    try:
        any_failed(False, group)
    except LateRanks as error:
        stacks.extend(error.stacks.values())
    finally:
        gave_up.set()


def test_a_rank_that_is_a_thread_shows_its_own_stack_and_leaves_no_thread() -> None:
    stacks: list[str] = []
    run_threads(one_is_late, 2, threading.Event(), stacks, timeout=30.0).values()
    gc.collect()  # tracebacks hold the groups
    (shown,) = set(stacks)
    assert shown.startswith("rank1, innermost call first\n")
    assert "in one_is_late" in shown
    assert "rank0" not in shown
    assert not [each for each in threading.enumerate() if each.name == "consensus-store-watch"]


def test_alone_there_is_nobody_to_watch() -> None:
    assert run_threads(lambda rank: consensus.watch(), 1).values() == (False,)
    assert not consensus.watch()

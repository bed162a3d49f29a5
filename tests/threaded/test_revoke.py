"""A rank that waits in a collective for a failed one is freed; the group is a stand-in for NCCL's.

gloo cannot abort, and NCCL needs GPUs. Ranks are ordered by events and words in the store.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import pytest
from torch.distributed.distributed_c10d import _get_default_store

import consensus
from consensus import ControlGroup, GroupFailure, control_group, fail_together
from consensus._session import current_session
from consensus.revoke import Revoker
from consensus.testing import run_threads

LIVENESS_S = 30.0


@dataclass(eq=False)
class StandIn:
    """A group of one rank's, in whose collective it waits until it is aborted."""

    group_name: str = "stand-in"
    breaks: bool = False
    aborts: int = 0
    freed: threading.Event = field(default_factory=threading.Event)

    def _get_sequence_number_for_group(self) -> int:
        return 7

    @property
    def _device_types(self) -> list[object]:
        return []

    def abort(self) -> None:
        self.aborts += 1
        self.freed.set()
        if self.breaks:
            raise RuntimeError("cannot abort")

    def collective(self) -> None:
        assert self.freed.wait(LIVENESS_S), "nobody freed this rank"
        raise RuntimeError("communicator was aborted")


def told_by(failing: Callable[[], None], group: ControlGroup) -> GroupFailure:
    try:
        with fail_together("train step", group):
            failing()
    except GroupFailure as error:
        return error
    raise AssertionError("expected a GroupFailure")


def prepared(after: float) -> ControlGroup:
    """Return a group whose waiting ranks say so soon."""
    assert consensus.revoke_when_stranded(after)
    group = control_group(None, backend="store").prepare()
    group.soft_timeout = 0.1
    return group


def watched(group: ControlGroup, stand_in: StandIn) -> StandIn:
    assert group.channel is not None
    group.channel.watch({group.ranks: [stand_in]})
    return stand_in


def consensus_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "consensus-store-revoke"]


def bad() -> None:
    raise ValueError("bad data")


def stranded(rank: int) -> tuple[str, bool, tuple[int, ...], int]:
    group = prepared(after=0.1)
    data = watched(group, StandIn(breaks=rank == 2))
    error = told_by(bad if rank == 1 else data.collective, group)
    return str(error), error.recoverable, error.late_ranks, data.aborts


def test_stranded_ranks_are_freed_and_hear_of_the_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "consensus"):
        seen = run_threads(stranded, 3, timeout=LIVENESS_S).values()
    for text, recoverable, late, _ in seen:
        assert "rank 1: ValueError: bad data" in text.splitlines()[1]
        assert "ranks 0, 2: RuntimeError: communicator was aborted" in text
        assert (recoverable, late) == (False, ())
    assert [aborts for *_, aborts in seen] == [1, 0, 1]  # not the one that failed
    gc.collect()  # tracebacks hold the groups
    assert not consensus_threads()
    texts = [record.getMessage() for record in caplog.records]
    assert any("could not abort group stand-in: cannot abort" in text for text in texts)
    assert any("rank 0 did not come to vote 0 within 0.1 s" in text for text in texts)


def slow(rank: int) -> list[tuple[bool, int]]:
    """Rank 0 comes when the other has said that it waits, and keeps its groups, twice."""
    group = prepared(after=2 * LIVENESS_S)
    data = watched(group, StandIn())
    assert group.channel is not None
    seen = []
    for vote in range(2):
        said = f"consensus/{group.channel.name}/revoke/{vote}"
        waits = partial(_get_default_store().wait, [said], timedelta(seconds=LIVENESS_S))
        error = told_by(bad if rank == 1 else waits, group)
        session = current_session()
        assert session is not None
        revoker = session._whereabouts.revoker
        assert isinstance(revoker, Revoker)
        revoker.abort_if_stranded(group.channel.name, vote)
        seen.append((error.recoverable, data.aborts))
    return seen


def test_a_rank_that_comes_in_time_keeps_its_groups_and_training_can_go_on() -> None:
    assert run_threads(slow, 2, timeout=LIVENESS_S).values() == ([(True, 0)] * 2,) * 2
    gc.collect()
    assert not consensus_threads()  # though they had been given longer than this run took


def test_negative_seconds_are_refused_and_alone_nobody_is_freed() -> None:
    with pytest.raises(ValueError, match="expected after >= 0 seconds; got -1"):
        consensus.revoke_when_stranded(-1)
    assert not consensus.revoke_when_stranded()

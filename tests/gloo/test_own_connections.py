"""Groups of more ranks than vote directly: over their own connections, else over gloo."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import pytest

import consensus
from consensus import GroupFailure, LateRanks, _sockets, any_failed, control_group
from consensus._hops import DIRECT_RANKS
from consensus.testing import run_ranks
from tests.gloo._cases import DATA_PLANE_S, LIVENESS_S, Recorder, caught, wait_for
from tests.gloo.test_groups import Messages

pytestmark = pytest.mark.slow

NUM_RANKS = DIRECT_RANKS + 1
DIES = 4


def cannot_connect(rank: int) -> tuple[str, list[str], bool]:
    """Rank 1 cannot connect, so all go over to gloo; return the link and what was logged."""
    messages = Messages()
    logging.getLogger("consensus").addHandler(messages)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no route to host")

    if rank == 1:
        _sockets.connect = fails
    channel = control_group(None).prepare().channel
    assert channel is not None
    return type(channel.link).__name__, messages.texts, any_failed(rank == 3)


def votes(rank: int) -> dict[str, Any]:
    """What ranks agree on, over each link; then one of them is killed while the others wait."""
    found: dict[str, Any] = {}
    recorder = Recorder.on(None)
    found["link"] = type(recorder.link).__name__
    found["healthy"] = any_failed(False)
    found["failed"] = any_failed(rank == 5)
    ranges = consensus.agree_range([rank], names=["rank"])
    found["range"] = ranges.minimum, ranges.maximum
    found["sum"] = consensus.agree_sum([rank, 1])

    def fail() -> None:
        with consensus.fail_together("load"):
            if rank == 7:
                raise OSError("no such file")

    error = caught(fail)
    assert isinstance(error, GroupFailure)
    found["failure"] = [(f.rank, f.message) for f in error.failures]
    found["words"] = (recorder.words, recorder.sums)
    name = _channel_name()
    if rank == DIES:
        for other in set(range(NUM_RANKS)) - {DIES}:
            wait_for(f"consensus/{name}/at/{other}")
        os.kill(os.getpid(), signal.SIGKILL)
    found["killed"] = caught(lambda: any_failed(False))
    return found


def _channel_name() -> str:
    channel = control_group(None).prepare().channel
    assert channel is not None
    return channel.name


def test_votes_over_own_connections_and_a_killed_rank() -> None:
    ranks = run_ranks(votes, NUM_RANKS, timeout=LIVENESS_S, group_timeout=DATA_PLANE_S)
    assert ranks.hung == ()
    assert ranks[DIES].exitcode == -signal.SIGKILL
    for rank in set(range(NUM_RANKS)) - {DIES}:
        found = ranks[rank].value
        assert found is not None, ranks.report()
        error = found.pop("killed")
        assert isinstance(error, LateRanks)
        assert error.ranks == (DIES,)
        assert "rank 4 is gone, its connection broke" in str(error)
        words, sums = found.pop("words")
        assert (words[:5], sums) == ([2, 2, 23 * NUM_RANKS, 2, 23 * NUM_RANKS], [2])
        assert found == {
            "link": "HopLink",
            "healthy": False,
            "failed": True,
            "range": ((0,), (8,)),
            "sum": (36, 9),
            "failure": [(7, "no such file")],
        }


def test_all_go_over_to_gloo_when_one_cannot_connect() -> None:
    ranks = run_ranks(cannot_connect, NUM_RANKS, timeout=LIVENESS_S, group_timeout=DATA_PLANE_S)
    for rank, (link, (text,), failed) in enumerate(ranks.values()):
        assert link == "GroupLink"
        assert "no tcp control group for ranks [0, 1," in text
        assert "votes go over gloo," in text
        assert ("no route to host" in text) == (rank == 1)
        # Told so, instead of waiting for it.
        assert ("another rank could not connect" in text) == (rank != 1)
        assert failed

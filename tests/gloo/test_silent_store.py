"""When the job's store falls silent or its host dies, errors say so, in time, and blame nobody."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import Store

from benchmarks._failures import Kind, Moment, Row
from benchmarks.failures import outcomes
from consensus import _transport, control_group
from consensus._waiting import LinkBroken
from consensus.enclosure import scope_id
from tests.gloo._cases import LIVENESS_S, Trained, caught, needs_list_keys, on_ranks, wait_for
from tests.gloo.test_group_lifetime import new_keys

pytestmark = pytest.mark.slow

ROWS: tuple[tuple[Kind, Moment], ...] = (("SIGKILL", "closure"), ("SIGSTOP", "closure"))


@pytest.mark.parametrize(("kind", "moment"), ROWS)
def test_nobody_is_blamed_when_the_stores_host_is_the_one(kind: Kind, moment: Moment) -> None:
    row = Row(kind, moment, "exact", (0, 1, 2), victim=0, hosts=True)
    (outcome,) = outcomes([row], grace=LIVENESS_S)
    assert outcome.problems == ()


class SilentStore(Store):
    """Takes requests and answers none, as one whose host is stopped, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def _silent(self, *_: Any) -> Any:
        self.released.wait()
        raise RuntimeError("released")

    set = get = add = check = wait = _silent

    def clone(self) -> Any:
        return self

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=LIVENESS_S)


def test_making_a_group_ends_though_gloo_waits_for_a_silent_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_transport, "NAMING_S", 0.1)
    store = SilentStore()
    with pytest.raises(LinkBroken, match="store does not answer"):
        _transport.make_gloo(store, "test", (0, 1), 0, seconds=1.0)
    store.released.set()


def run_out_of_descriptors(rank: int) -> str:
    group = control_group(timeout=1.0)
    dist.barrier()
    held = []
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
    text = str(caught(group.prepare))
    for descriptor in held:  # for the report
        os.close(descriptor)
    return text


def test_a_rank_without_a_descriptor_does_not_blame_the_stores_host() -> None:
    other, full = on_ranks(run_out_of_descriptors, 2)
    assert "rank 1 did not come" in other
    assert "this rank has no file descriptor left: raise its limit (ulimit -n)" in full
    assert "hosts it" not in full


def one_comes_late(rank: int) -> list[str]:
    """Rank 0 waits so long, to plan and to connect, that it says where it is."""
    group = control_group(Trained.on().optimizer)

    def prepare() -> None:
        if rank == 1:
            wait_for(f"consensus/plan/{scope_id((0, 1))}/0/at/0")
        plan = group.plan()
        assert plan is not None
        if rank == 1:
            wait_for(f"consensus/channel/{plan.key:016x}/0/at/0")
        group.connect()

    return new_keys(prepare)


@needs_list_keys
def test_what_a_rank_says_while_it_waits_to_connect_is_taken_back() -> None:
    assert on_ranks(one_comes_late, 2) == ([], [])

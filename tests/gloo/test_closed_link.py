"""A vote that breaks in the middle must not keep its rank: gloo's own clean-up can wait forever."""

from __future__ import annotations

import os

import pytest
from torch.distributed import distributed_c10d

from consensus import _transport
from consensus._transport import EAGER_RANKS
from consensus._waiting import LinkBroken, Patience
from consensus.testing import run_ranks

pytestmark = pytest.mark.slow


def vote_while_another_dies(rank: int, world_size: int, dies: int) -> str:
    """Rank 0 is in a vote when another dies; the rest enters it then, and rank 0 leaves last.

    So rank 0 has said that it is ready for data, has failed, and gets the data nevertheless.
    """
    store = distributed_c10d._get_default_store()
    link = _transport.make_gloo(store, "test", tuple(range(world_size)), rank)
    link.all_reduce_max((1, 2), Patience("first", hard=20.0))
    if rank == dies:
        store.wait(["rank 0 waits"])
        os._exit(0)
    if rank > 0:
        store.wait(["rank 0 has failed"])
    patience = Patience("second", hard=10.0)
    if rank == 0:
        patience.on_wait = lambda: store.set("rank 0 waits", "")
    with pytest.raises(LinkBroken):
        link.all_reduce_max((1, 2), patience)
    if rank == 0:
        store.set("rank 0 has failed", "")
        store.wait([f"rank {r} has tried" for r in range(1, world_size) if r != dies])
    else:
        store.set(f"rank {rank} has tried", "")
        store.wait(["rank 0 has closed"])
    link.close()
    if rank == 0:
        store.set("rank 0 has closed", "")
    return "closed"


@pytest.mark.parametrize("dies", ["next", "last"])
@pytest.mark.parametrize("world_size", [3, EAGER_RANKS + 1])
def test_a_broken_link_can_be_closed(world_size: int, dies: str) -> None:
    dead = 1 if dies == "next" else world_size - 1
    ranks = run_ranks(vote_while_another_dies, world_size, world_size, dead, timeout=40)
    others = [ranks[rank] for rank in range(world_size) if rank != dead]
    assert [result.value for result in others] == ["closed"] * len(others), ranks.report()

"""A new link for a control group, which must answer a known question before it is relied on."""

from __future__ import annotations

import errno
import os
from typing import Any

import torch.distributed as dist

from consensus import _sockets, _transport
from consensus._planning import count_key
from consensus._store import StoreClient
from consensus._transport import Link
from consensus._waiting import (
    NAMING_S,
    NO_DESCRIPTOR,
    LinkBroken,
    Patience,
    has_no_descriptor,
)
from consensus.vote import Ranks

TRIAL_S = 30.0  # within which it must answer


def trial_key(kind: str, name: str) -> str:
    """Return under which key the members tally whether the link works for all."""
    return f"{name}/{kind}/trial"


def make_link(
    kind: str,
    name: str,
    members: Ranks,
    rank: int,
    *,
    job_store: Any,
    client: StoreClient,
    patience: Patience,
) -> tuple[Link | None, str]:
    """Return a link that works, or None and why there is none.

    Args:
        kind: "tcp" for own connections, or "gloo".
        name: Never used before.
        members: Its ranks.
        rank: This one of them.
        job_store: Where ranks of the job find each other's addresses.
        client: This rank's own connections to that store.
        patience: How long to wait for the others.

    Collectives:
        What makes the link, and a maximum of two int64 over it; all members must call.
    """
    if kind == "gloo" and not dist.is_gloo_available():
        return None, "this torch has no gloo"
    index, size = members.index(rank), len(members)
    seconds = min(patience.left / 2, _transport.CONNECT_S)
    link: Link

    def look() -> None:
        # Who says how its trial went has failed: without this rank it cannot have gone well.
        asking = Patience("control group trial", hard=NAMING_S)
        if client.peek(count_key(trial_key(kind, name)), asking) is not None:
            raise LinkBroken("another rank could not connect", expired=False)

    try:
        where = (name, members, rank)
        if kind == "tcp":
            link = _sockets.connect(job_store, client, *where, seconds=seconds, look=look)
        else:
            link = _transport.make_gloo(job_store, *where, seconds=seconds)
        asked = (index + 1, size - index)
        trial = Patience("control group trial", hard=min(TRIAL_S, patience.left))
        got = tuple(link.all_reduce_max(asked, trial))
    except (RuntimeError, OSError, ImportError, LinkBroken) as error:
        reason = str(error)
        # By its text, which gloo's errors have too, and since closing may have made room by now.
        full = os.strerror(errno.EMFILE) in reason or has_no_descriptor()
        return None, f"{reason}; {NO_DESCRIPTOR}" if full else reason
    if got != (size, size):
        return None, f"expected ({size}, {size}) from a MAX over int64; got {got}"
    return link, ""

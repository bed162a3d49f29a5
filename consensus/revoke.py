"""Free a rank that waits in a collective which a failed rank will never enter; opt-in.

[Note: who is stranded]
A rank that failed and waits for the others tells them so. A thread of each of them gives its rank
some time to come to that agreement by itself, and judges by the number of the vote. A rank that has
not come takes its data-plane groups to be lost, which makes the failure not recoverable, and aborts
them. The channel's lock is held while it judges: a rank that is in a vote is never touched, and one
that comes to it afterwards brings positions that say its groups are lost.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from consensus._channel import Channel
from consensus._session import current_session
from consensus._store import StoreClient, get_within
from consensus._waiting import NAMING_S, LinkBroken, Patience

AFTER_S = 5.0  # seconds a rank has to come to the agreement by itself

# torch's store logs a warning each time that a wait runs out.
_LONG_S = 86400.0
_STOP = b"stop"

logger = logging.getLogger("consensus")


def revoke_when_stranded(after: float = AFTER_S) -> bool:
    """Abort this rank's data-plane groups when it waits in a collective that cannot complete.

    Without it a stranded rank waits until the failed rank's process ends, or until its watchdog.
    With it the collective ends in an error, or its numbers are garbage, ``after`` seconds after the
    failed rank said that it waits (1 second after its failure). Then the rank comes to the vote and
    all raise :class:`GroupFailure` with the original error, not recoverable: the process groups are
    to be destroyed and made anew.

    The price: a rank that is merely slow, for longer than that, loses its groups too.

    Only backends that can abort are freed: NCCL. gloo's ``abort`` does nothing (torch 2.13), so
    there a stranded rank waits as without this. What NCCL does has **not been verified on a GPU**;
    tests use a stand-in for the group. torch advises ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` where a
    program aborts groups itself.

    Call it after ``init_process_group`` on every rank; it ends with the group. A second call
    changes nothing. It costs a thread that sleeps and a connection to the store; no message until
    a rank has failed and waited for a second, then one for each member.

    Args:
        after: Seconds.

    Returns:
        Whether it is on: False before ``init_process_group``, or with a single process.

    Raises:
        ValueError: ``after`` is negative.

    Collectives:
        None.
    """
    if not after >= 0:
        raise ValueError(f"expected after >= 0 seconds; got {after!r}")
    session = current_session()
    if session is None:
        return False
    with session.lock:
        if session._whereabouts.revoker is None:
            session._whereabouts.revoker = Revoker(
                session._client, session.rank, session._channels, after
            )
    return True


class Revoker:
    """Tells others that this rank failed, and listens. See the module's note."""

    def __init__(
        self, client: StoreClient, rank: int, channels: Mapping[Any, Channel], after: float
    ) -> None:
        """Listen on a thread of ``client``, until it is closed.

        Args:
            client: This rank's.
            rank: Global.
            channels: All that this rank votes on; read anew each time.
            after: Seconds that this rank has to come to an agreement by itself.
        """
        self._client, self._rank, self._channels, self._after = client, rank, channels, after
        self._ended = threading.Event()
        self._claims: set[str] = set()
        client.serve("revoke", self._listen, self._end)

    def failed(self, name: str, sequence: int) -> None:
        """Say that this rank failed and waits; the first that does tells all members.

        Args:
            name: Of the channel it waits in.
            sequence: Number of the vote.
        """
        channel, claim = self._channel(name), f"{name}/revoke/{sequence}"
        if channel is None or claim in self._claims:
            return
        own = b"%d" % self._rank
        with contextlib.suppress(LinkBroken):  # peers then wait as without this
            if self._client.claim(claim, own, Patience("revoking", hard=NAMING_S)) == own:
                self._claims.add(claim)
                for member in channel.members:
                    self._client.tell(_told(member), f"{sequence} {name}".encode())

    def _listen(self, store: Any) -> None:
        told = _told(self._rank)
        try:
            while not self._ended.is_set():
                found = get_within(store, keys=[told], seconds=_LONG_S)
                if found is None or bytes(found[0]) == _STOP:
                    continue
                store.delete_key(told)
                sequence, _, name = bytes(found[0]).decode().partition(" ")
                if not self._ended.wait(self._after):
                    self.abort_if_stranded(name, int(sequence))
        finally:
            with contextlib.suppress(RuntimeError):  # the store may be what has gone
                for key in (told, *self._claims):
                    store.delete_key(key)

    def _end(self) -> None:
        self._ended.set()
        self._client.tell(_told(self._rank), _STOP)

    def abort_if_stranded(self, name: str, sequence: int) -> None:
        """Abort what data moves over, unless this rank has come to that vote of that channel."""
        channel = self._channel(name)
        if channel is None or not channel.lock.acquire(blocking=False):
            return
        try:
            lost = channel.lose_data_groups() if channel.sequence <= sequence else []
        finally:
            channel.lock.release()
        if lost:
            logger.warning(
                "rank %d did not come to vote %d within %.1f s after another rank had failed: "
                "aborting its process groups %s, in which it may wait for that rank",
                self._rank,
                sequence,
                self._after,
                [group.group_name for group in lost],
            )
            _abort(lost)

    def _channel(self, name: str) -> Channel | None:
        return next((each for each in list(self._channels.values()) if each.name == name), None)


def _abort(groups: Sequence[Any]) -> None:
    """Abort all of them as one: NCCL communicators aborted one by one can wait for each other."""
    nccl = [found for group in groups for found in _nccl_backends(group)]
    if nccl:
        nccl[0]._group_start()
    for group in groups:
        try:
            group.abort()
        except RuntimeError as error:
            logger.warning("could not abort group %s: %s", group.group_name, str(error))
    if nccl:
        nccl[0]._group_end()


def _nccl_backends(group: Any) -> list[Any]:
    if not dist.is_nccl_available():
        return []
    backends = [group._get_backend(device) for device in group._device_types]
    return [each for each in backends if isinstance(each, dist.ProcessGroupNCCL)]


def _told(rank: int) -> str:
    return f"revoke/{rank}"

"""Carry the words of a vote over real groups: with `_store`, all that communicates here.

Every way to hold a vote answers the same request, the elementwise maximum of equally many words
over fixed ranks, so one protocol runs over all of them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ReduceOp

from consensus._protocol import AllReduceMax
from consensus._store import StoreClient
from consensus._waiting import NAMING_S, SLICE_S, LinkBroken, Patience
from consensus.vote import Ranks

T = TypeVar("T")

_SLICE = timedelta(seconds=SLICE_S)
_WORDS, _GIVEN_UP = b"=", b"!"  # what a key of a vote over the store begins with


class Link(Protocol):
    """One way to hold a vote: the elementwise maximum of equally many words over fixed ranks."""

    device: torch.device

    def all_reduce_max(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        """Return the maximum; raises :class:`LinkBroken`. Every member calls."""

    def close(self) -> None:
        """Let no peer wait for this rank."""


def drive(protocol: Generator[AllReduceMax, Sequence[int], T], link: Link, p: Patience) -> T:
    """Run a voting protocol over ``link``; all members of the link call together."""
    try:
        wanted = next(protocol)
        while True:
            wanted = protocol.send(link.all_reduce_max(wanted.words, p))
    except StopIteration as stop:
        result: T = stop.value
        return result


class GroupLink:
    """A vote as one ``allreduce`` of a process group: a private gloo group, or the caller's own.

    Collectives: one all_reduce(MAX) of int64 a message; 16 bytes on the healthy path of one mesh.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.device = device
        self._group = group
        self._pending = False
        self._options: dict[float, AllreduceOptions] = {}

    def all_reduce_max(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        """Return the maximum of each word over the group."""
        if self._group is None:
            raise LinkBroken("the control group was closed", expired=False)
        layout = f"{len(words)}q"
        buffer = bytearray(struct.pack(layout, *words))
        host = torch.frombuffer(buffer, dtype=torch.int64)  # three times faster than torch.tensor
        tensor = host if self.device.type == "cpu" else host.to(self.device)
        self._pending = True
        try:
            self._wait(self._group.allreduce([tensor], self._timeout(patience.left)), patience)
        except RuntimeError as error:
            self._pending = False
            raise LinkBroken(str(error), expired=patience.left <= SLICE_S) from error
        self._pending = False
        return struct.unpack(layout, buffer) if tensor is host else tensor.tolist()

    def close(self) -> None:
        """Close the connections, so that peers in a vote of this group get an error at once."""
        group, self._group = self._group, None
        if group is not None and self._pending:
            # The destructor would block until the abandoned operation reaches its own timeout.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _timeout(self, seconds: float) -> AllreduceOptions:
        rounded = max(1.0, float(round(seconds)))
        options = self._options.get(rounded)
        if options is None:
            options = AllreduceOptions()
            options.reduceOp = ReduceOp(ReduceOp.MAX)
            options.timeout = timedelta(seconds=rounded)
            self._options = {rounded: options}
        return options

    @staticmethod
    def _wait(work: Any, patience: Patience) -> None:
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError:
                if work.is_completed():  # the operation ended, perhaps just after the slice
                    work.wait(_SLICE)
                    return
            else:
                return
            patience.look_up()


class StoreLink:
    """A vote over the job's store: set own words, read everybody's. No group at all.

    Names late ranks by itself, but one server answers N^2 reads, so it is the fallback where no
    control group can be made.

    [Note: a vote over the store is given up by all or by none]
    The words of a rank that gives up stay readable, so a late rank could still complete the vote
    and then step alone. Therefore who gives up claims the place of a rank that has not come: a
    key holds what is written first, so either that rank's words arrive after all, or every rank,
    the late one included, finds that the vote was given up.
    """

    device = torch.device("cpu")

    def __init__(self, client: StoreClient, name: str, members: Ranks, rank: int) -> None:
        self._client, self._name, self._rank = client, name, rank
        self._members = members
        self._round = 0
        self._closed = False

    def all_reduce_max(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        """Return the maximum of each word over the members."""
        if self._closed:
            raise LinkBroken("the control group was closed", expired=False)
        layout = f"<{len(words)}q"
        own = _WORDS + struct.pack(layout, *words)
        self._raise_if_given_up(
            self._client.claim(self._key(self._round, self._rank), own, patience)
        )
        rows = []
        for member in self._members:
            data = self._words_of(member, patience)
            if len(data) != len(own):
                raise LinkBroken(f"rank {member} sent {len(data)} bytes", expired=False)
            rows.append(struct.unpack(layout, data[len(_WORDS) :]))
        if self._round:  # everyone who wrote this round has read the one before
            self._client.drop([self._key(self._round - 1, self._rank)], patience)
        self._round += 1
        return [max(column) for column in zip(*rows, strict=True)]

    def close(self) -> None:
        """Refuse further votes; peers that wait, and those that come, are told."""
        if self._closed:
            return
        self._closed = True
        said = _GIVEN_UP + b"rank %d left" % self._rank
        patience = Patience("closing the control group", hard=NAMING_S)
        for member in (self._rank, *self._members):
            try:
                found = self._client.claim(self._key(self._round, member), said, patience)
            except LinkBroken:
                return  # they wait until their own deadline
            if found.startswith(_GIVEN_UP):
                return

    def _words_of(self, member: int, patience: Patience) -> bytes:
        key = self._key(self._round, member)
        try:
            data = self._client.wait(key, patience)
        except LinkBroken as broken:
            if not broken.expired:
                raise
            said = b"rank %d waited %.1f s for rank %d" % (self._rank, patience.waited, member)
            data = self._client.claim(key, _GIVEN_UP + said, patience)
        self._raise_if_given_up(data, expired=patience.left <= 0)
        return data

    @staticmethod
    def _raise_if_given_up(data: bytes, *, expired: bool = False) -> None:
        if data.startswith(_GIVEN_UP):
            said = data[len(_GIVEN_UP) :].decode()
            raise LinkBroken(f"the vote was given up: {said}", expired=expired)

    def _key(self, number: int, member: int) -> str:
        return f"{self._name}/vote/{number}/{member}"


def make_gloo(job_store: Any, name: str, members: Ranks, rank: int) -> GroupLink:
    """Return a link over a private gloo group of ``members``; connects on the first vote.

    Built from its parts, not by ``new_group``: with ``use_local_synchronization=True`` that
    hashes a rank-local counter into the name and times out on overlapping groups, and without
    it every rank of the job would have to call.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    # The operations carry the deadline; this one only bounds connecting.
    options._timeout = timedelta(seconds=60)
    options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
    store = PrefixStore(f"consensus/{name}/gloo", job_store)
    group = dist.ProcessGroupGloo(store, members.index(rank), len(members), options)
    return GroupLink(group, torch.device("cpu"))

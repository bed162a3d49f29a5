"""Carry the words of a vote over process groups, or over the job's store.

Every way to hold a vote answers the same requests, the elementwise maximum or sum of equally many
words over fixed ranks, so one protocol runs over all of them.

[Note: a group that does not end]
When an operation of gloo fails, data for it that a peer sends afterwards is never read, and the
thread that watches the connections finds it again and again. A device that connects lazily waits,
when it is destroyed, until that thread has nothing to do: for good. (gloo 2026: ``Loop::run``
ends only when ``epoll_wait`` returns no event, and ``tcp::Context`` stops the loop before it
closes the connections if the device is lazy.) So small groups connect at once, where the
connections are closed first; and no group is ever destroyed by a thread that has work to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    PrefixStore,
    ReduceOp,
)

from consensus._protocol import AllReduceMax
from consensus._store import StoreClient
from consensus._waiting import NAMING_S, SLICE_S, LinkBroken, Patience
from consensus.vote import Ranks

T = TypeVar("T")

EAGER_RANKS = 8  # more would each connect to too many others that they send nothing to

CONNECT_S = 30.0  # for all members to find each other
CLOSE_S = 1.0  # for ending the connections; they are left if it takes longer

_SLICE = timedelta(seconds=SLICE_S)
_WORDS, _GIVEN_UP = b"=", b"!"  # what a key of a vote over the store begins with


class Link(Protocol):
    """One way to hold a vote: reduces equally many words over fixed ranks, element by element."""

    device: torch.device

    def all_reduce_max(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        """Return the maximum; raises :class:`LinkBroken`. Every member calls."""

    def all_reduce_sum(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        """Return the sum, which must fit int64; raises :class:`LinkBroken`. Every member calls."""

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


class _Reduction(NamedTuple):
    """What becomes of the words of all members: torch's name for it, and the same on the host."""

    operation: ReduceOp
    of: Callable[[Sequence[int]], int]


_MAX = _Reduction(ReduceOp(ReduceOp.MAX), max)
_SUM = _Reduction(ReduceOp(ReduceOp.SUM), sum)


class _Reducing(ABC):
    """The two requests of a :class:`Link`, for one that can reduce in any way."""

    def all_reduce_max(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        """Return the maximum of each word over the members."""
        return self._reduce(words, _MAX, patience)

    def all_reduce_sum(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        """Return the sum of each word over the members."""
        return self._reduce(words, _SUM, patience)

    @abstractmethod
    def _reduce(
        self, words: Sequence[int], reduction: _Reduction, patience: Patience
    ) -> Sequence[int]: ...


class GroupLink(_Reducing):
    """A vote as one ``allreduce`` of a process group: a private gloo group, or the caller's own.

    Collectives: one all_reduce(MAX or SUM) of int64 a message; 16 bytes on the healthy path of one
    mesh.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.device = device
        self._group = group
        self._pending = False
        self._reducing = AllreduceOptions()

    def _reduce(
        self, words: Sequence[int], reduction: _Reduction, patience: Patience
    ) -> Sequence[int]:
        buffer = bytearray(struct.pack(f"{len(words)}q", *words))
        host = torch.frombuffer(buffer, dtype=torch.int64)  # three times faster than torch.tensor
        tensor = host.to(self.device)
        self._reducing.reduceOp = reduction.operation
        self._reducing.timeout = timedelta(seconds=_seconds_left(patience))
        self._complete(patience, "allreduce", [tensor], self._reducing)
        reduced: list[int] = tensor.tolist()
        return reduced

    def close(self) -> None:
        """Close the connections, so that peers in a vote of this group get an error at once."""
        held, self._group = [self._group], None
        if held[0] is not None and self._pending:
            # The destructor would block until the abandoned operation reaches its own timeout.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held[0]))
        # See [Note: a group that does not end].
        ending = threading.Thread(target=held.clear, daemon=True, name="consensus-close")
        ending.start()
        ending.join(CLOSE_S)

    def _complete(self, patience: Patience, operation: str, *args: Any) -> None:
        """Start an operation of the group and wait until it has ended."""
        if self._group is None:
            raise LinkBroken("the control group was closed", expired=False)
        self._pending = True
        broken: LinkBroken | None = None
        try:
            _wait(getattr(self._group, operation)(*args), patience)
        except RuntimeError as error:
            expired = patience.left <= SLICE_S
            broken = LinkBroken(str(error), expired=expired, connection=not expired)
        self._pending = False
        if broken is not None:
            # Not within the handler: the traceback of gloo's error holds the operation, and that
            # holds the connections, which close() must be able to end.
            raise broken


def _seconds_left(patience: Patience) -> float:
    return max(1.0, round(patience.left, 1))  # rounded, so that it is the same in most votes


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


class StoreLink(_Reducing):
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

    def _reduce(
        self, words: Sequence[int], reduction: _Reduction, patience: Patience
    ) -> Sequence[int]:
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
        return [reduction.of(column) for column in zip(*rows, strict=True)]

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

    def forget(self) -> None:
        """Drop what this rank has said: every member knows that nobody votes here again."""
        said = (self._round - 1, self._round)
        with contextlib.suppress(LinkBroken):
            keys = [self._key(number, self._rank) for number in said if number >= 0]
            self._client.drop(keys, Patience("closing the control group", hard=NAMING_S))

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


def make_gloo(
    job_store: Any, name: str, members: Ranks, rank: int, *, seconds: float = CONNECT_S
) -> GroupLink:
    """Return a link over a private gloo group of ``members``; a large one connects when it votes.

    Built from its parts, not by ``new_group``: with ``use_local_synchronization=True`` that
    hashes a rank-local counter into the name and times out on overlapping groups, and without
    it every rank of the job would have to call.

    Raises:
        RuntimeError: Some member did not connect within ``seconds``.
        LinkBroken: Nor did gloo come back from the job's store, whose host may be stopped.
    """
    seconds = max(1.0, min(seconds, CONNECT_S))
    made: queue.SimpleQueue[GroupLink | RuntimeError] = queue.SimpleQueue()

    def make() -> None:
        try:
            made.put(_connect_gloo(job_store, name, members, rank, seconds))
        except RuntimeError as error:  # carried to the thread that asked
            made.put(error)

    # gloo reads the store with no end of its own, and Ctrl-C would wait for it.
    threading.Thread(target=make, daemon=True, name="consensus-connect").start()
    try:
        found = made.get(timeout=seconds + NAMING_S)
    except queue.Empty:
        raise LinkBroken("the store does not answer, or a peer", expired=True) from None
    if isinstance(found, RuntimeError):
        raise found
    return found


def _connect_gloo(
    job_store: Any, name: str, members: Ranks, rank: int, seconds: float
) -> GroupLink:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    # The operations carry the deadline; this one only bounds connecting.
    options._timeout = timedelta(seconds=seconds)
    lazy = len(members) > EAGER_RANKS  # see [Note: a group that does not end]
    options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=lazy)]
    store = PrefixStore(f"consensus/{name}/gloo", job_store)
    group = dist.ProcessGroupGloo(store, members.index(rank), len(members), options)
    return GroupLink(group, torch.device("cpu"))


def agree_flag_on_device(flag: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Return the highest ``flag`` of all ranks of a mesh, where it is; nobody waits for it.

    This is the one agreement that a CUDA graph can hold: it is made in the stream, on the groups
    that move data, and its outcome is never read on the host.

    Args:
        flag: One element, not negative, not NaN. Not written.
        groups: One for each axis of the mesh, in the same order on all ranks.

    Collectives:
        One all_reduce(MAX) of one element on each of ``groups``; all ranks of the mesh must call.
    """
    agreed = flag.clone()
    for group in groups:  # the maximum over one axis after the other is that over all
        if group.size() > 1:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
    return agreed

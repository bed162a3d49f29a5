"""Run protocols on real process groups and stores: the only module here that communicates.

[Note: every wait has an end, and is sliced]
No call here blocks for more than half a second without looking up, so Ctrl-C arrives and a late
rank can be named while the operation stays pending and the group usable. A collective's own
timeout is the hard deadline: when it passes, gloo closes its connections, so a rank that comes
afterwards gets an error and can never complete the abandoned vote on its own. Store requests run
on a cloned client in a helper thread: a TCPStore wait may block past its own timeout when the
server is stopped, and a blocked wait locks its client.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import struct
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp

from consensus._protocol import AllReduceMax
from consensus.vote import Ranks

T = TypeVar("T")
logger = logging.getLogger("consensus")

SLICE_S = 0.5  # longest uninterrupted wait of the calling thread
STORE_SLICE_S = 10.0  # longest uninterrupted wait of a helper thread
POST_AFTER_S = 1.0  # a rank that waits longer says in the store where it is
NAMING_S = 2.0  # how long late ranks are looked up before an error is raised without them
_SLICE = timedelta(seconds=SLICE_S)


class LinkBroken(Exception):
    """A message did not get through; ``expired`` when our own deadline ended the wait."""

    def __init__(self, reason: str, *, expired: bool) -> None:
        super().__init__(reason)
        self.expired = expired


@dataclass(slots=True)
class Patience:
    """How long one rank waits in one agreement, and what it does meanwhile."""

    phase: str
    hard: float  # seconds until the wait is given up
    soft: float = 60.0  # seconds until late ranks are named in a warning
    on_wait: Callable[[], None] = lambda: None  # after POST_AFTER_S, once
    on_soft: Callable[[float], None] = lambda seconds: None  # after soft, once
    started: float = field(default_factory=time.monotonic)
    _posted: bool = False
    _warned: bool = False

    @property
    def waited(self) -> float:
        """Seconds since the agreement began."""
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        """Seconds until the hard deadline; never negative."""
        return max(0.0, self.hard - self.waited)

    def look_up(self) -> None:
        """Do what is due after a slice without an answer."""
        waited = self.waited
        if waited >= POST_AFTER_S and not self._posted:
            self._posted = True
            self.on_wait()
        if waited >= self.soft and not self._warned:
            self._warned = True
            self.on_soft(waited)


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

    Cannot be poisoned and names late ranks by itself, but one server answers N^2 reads, so it is
    the fallback where no control group can be made.
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
        self._client.put(self._key(self._round, self._rank), struct.pack(layout, *words), patience)
        rows = []
        for member in self._members:
            data = self._client.wait(self._key(self._round, member), patience)
            if len(data) != 8 * len(words):
                raise LinkBroken(f"rank {member} sent {len(data)} bytes", expired=False)
            rows.append(struct.unpack(layout, data))
        if self._round:  # everyone who wrote this round has read the one before
            self._client.drop([self._key(self._round - 1, self._rank)], patience)
        self._round += 1
        return [max(column) for column in zip(*rows, strict=True)]

    def close(self) -> None:
        """Refuse further votes; peers find this rank late."""
        self._closed = True

    def _key(self, number: int, member: int) -> str:
        return f"{self._name}/vote/{number}/{member}"


class StoreClient:
    """The job's key-value store on connections and threads of its own.

    One for requests that are answered at once and one for waits, since a wait locks its client.
    """

    def __init__(self, store: Any) -> None:
        self._base = store
        self._workers: dict[str, queue.SimpleQueue[_Request | None]] = {}

    def put(self, key: str, value: bytes, patience: Patience) -> None:
        """Set ``key``."""
        self._call(lambda store: store.set(key, value), patience)

    def add(self, key: str, amount: int, patience: Patience) -> int:
        """Add to a counter and return its new value."""
        return int(self._call(lambda store: store.add(key, amount), patience))

    def drop(self, keys: Sequence[str], patience: Patience) -> None:
        """Forget ``keys``."""
        self._call(lambda store: [store.delete_key(key) for key in keys], patience)

    def peek(self, key: str, patience: Patience) -> bytes | None:
        """Return the value of ``key`` if it is set now."""
        found = self._call(
            lambda store: bytes(store.get(key)) if store.check([key]) else None, patience
        )
        return found if found is None else bytes(found)

    def wait(self, key: str, patience: Patience) -> bytes:
        """Return the value of ``key`` once somebody sets it."""
        while True:
            # torch logs a warning each time a wait runs out, so these slices are long.
            seconds = min(STORE_SLICE_S, max(patience.left, 0.01))
            found = self._call(partial(_get_within, key=key, seconds=seconds), patience, "wait")
            if found is not None:
                return bytes(found)
            if patience.left <= 0:
                raise LinkBroken(f"nobody set {key!r}", expired=True)

    def close(self) -> None:
        """End the helper threads."""
        for requests in self._workers.values():
            requests.put(None)
        self._workers.clear()

    def _call(self, work: Callable[[Any], Any], patience: Patience, worker: str = "ask") -> Any:
        requests = self._workers.get(worker)
        if requests is None:
            requests = self._workers[worker] = queue.SimpleQueue()
            threading.Thread(
                target=_serve,
                args=(self._base, requests),
                daemon=True,
                name=f"consensus-store-{worker}",
            ).start()
        request = _Request(work)
        requests.put(request)
        until = time.monotonic() + max(patience.left, 0.0) + NAMING_S
        while not request.done.wait(SLICE_S):
            patience.look_up()
            if time.monotonic() > until:
                self._workers.pop(worker).put(None)  # stuck; the next request starts another
                raise LinkBroken(
                    "the store does not answer; the process that hosts it may be stopped or gone",
                    expired=True,
                )
        if request.error is not None:
            raise LinkBroken(f"the store failed: {request.error}", expired=False)
        return request.result


@dataclass(slots=True)
class _Request:
    work: Callable[[Any], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None


def _serve(base: Any, requests: queue.SimpleQueue[_Request | None]) -> None:
    try:
        store = PrefixStore("consensus", base.clone())
    except (RuntimeError, NotImplementedError):  # in-process stores cannot be cloned, or need not
        store = PrefixStore("consensus", base)
    while True:
        request = requests.get()
        if request is None:
            return
        try:
            request.result = request.work(store)
        except Exception as error:  # carried to the thread that asked
            request.error = error
        request.done.set()


def _get_within(store: Any, *, key: str, seconds: float) -> bytes | None:
    """Return the value of ``key``, or None when it is not set within ``seconds``."""
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError as error:  # DistStoreError is one; only its text says which kind
        if "imeout" in str(error) or "imed out" in str(error):
            return None
        raise
    return bytes(store.get(key))


def drive_store(protocol: StoreProtocol[T], client: StoreClient, patience: Patience) -> T:
    """Run a store protocol; raises :class:`LinkBroken` when its deadline passes."""
    answer: int | bytes | None = None
    try:
        while True:
            wanted = protocol.send(answer)
            answer = None
            if isinstance(wanted, Add):
                answer = client.add(wanted.key, wanted.amount, patience)
            elif isinstance(wanted, Put):
                client.put(wanted.key, wanted.value, patience)
            elif isinstance(wanted, Await):
                answer = client.wait(wanted.key, patience)
            elif isinstance(wanted, Drop):
                client.drop(wanted.keys, patience)
    except StopIteration as stop:
        result: T = stop.value
        return result


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


def warn_late(phase: str, ranks: Ranks, seconds: float) -> None:
    """Log that this rank still waits, and for whom."""
    who = join_ranks(ranks) if ranks else "ranks that did not post where they are"
    logger.warning("%s: still waiting for %s after %.0f s", phase, who, seconds)

"""Votes over TCP connections between the ranks themselves: no thread, no process group.

Ranks exchange words as `_hops` says. The thread that votes waits for all connections at once, in
slices, so it is as free as in any other wait: see [Note: every wait has an end, and is sliced].
(gloo's send and recv carry the same schedules, but a recv that is waited for in slices closes the
connections when a slice is over, so it would need a thread, and each message two hand-overs to it.)

[Note: who gives up says so]
What a rank has sent stays readable when it gives up, and a late rank finds there all that it
needs from ranks that have long gone on: by itself it could complete the vote, and step alone.
(gloo hands words over only while both ends are in the call.) Therefore
- a rank that gives up, for whatever reason, tells all its peers from which message on it takes no
  part, and closes its connections;
- a rank that hears so, or finds a connection closed on which it has to send or to hear something,
  gives up too, and passes on whose fault it was. It listens on all connections while it waits on
  one, so the news spreads among those that wait as fast as a vote does;
- a rank listens before it says anything, so one that comes late hears the news first.
So if a rank gives up before all have come, nobody concludes, unless the last one comes in the very
moment in which the news spreads: nobody has concluded yet, so all that hold words of that rank
still wait and are told, and who comes later hears so from those it would have these words from.
And if a rank gives up while the last words are on their way, some conclude and some do not. Any
deadline without an arbiter has such moments; these last about as long as a vote. Who did conclude
is told in the next message. Words of a rank that was killed after it had sent them do count.
"""

from __future__ import annotations

import contextlib
import errno
import json
import operator
import os
import selectors
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from consensus import _hops
from consensus._address import on_own_link, own_address
from consensus._hops import Exchange, Hop, Reducing
from consensus._store import StoreClient
from consensus._text import join_ranks
from consensus._waiting import NAMING_S, SLICE_S, LinkBroken, Patience
from consensus._wire import digest
from consensus.vote import Ranks

_HEAD = struct.Struct("<qq")  # number of a message, how many words follow
_HELLO = struct.Struct("<qqq")  # name of the group, index of the sender, index of the receiver
_GAVE_UP, _GONE = -1, -2  # instead of a number of words; the index of the rank at fault follows
_READ = 1 << 18  # bytes
_FULL = (errno.EMFILE, errno.ENFILE)  # no descriptor is left


class _Connection:
    """One peer: what it has sent, and what it has yet to be sent."""

    def __init__(self, connected: socket.socket, index: int) -> None:
        self.socket, self.index = connected, index
        self.heard: deque[tuple[int, bytes]] = deque()  # whole messages: number, words
        self.unsent = bytearray()
        self.ended = False
        self._read = bytearray()
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setblocking(False)

    def __del__(self) -> None:
        """Give back what nobody closed; the peer sees a rank that is gone, not one that gave up."""
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send as much as the kernel takes now; the rest is left in ``unsent``."""
        if not self.unsent:
            with contextlib.suppress(BlockingIOError):
                data = data[self.socket.send(data) :]
        self.unsent += data

    def send_more(self) -> None:
        """Go on with what is unsent."""
        try:
            del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True

    def read(self) -> tuple[int, int, int] | None:
        """Take in what has come; return what the peer said if it gave up: number, kind, who."""
        try:
            data = self.socket.recv(_READ)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self.ended = not data
        self._read += data
        while len(self._read) >= _HEAD.size:
            number, count = _HEAD.unpack_from(self._read)
            end = _HEAD.size + 8 * max(count, 1)
            if len(self._read) < end:
                break
            words = bytes(self._read[_HEAD.size : end])
            del self._read[:end]
            if count < 0:
                return number, count, struct.unpack("<q", words)[0]
            self.heard.append((number, words))
        return None

    def close(self) -> None:
        """Close; what was sent before is still delivered."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.recv(_READ)  # with data unread the kernel would reset the connection
        self.socket.close()


class HopLink:
    """A vote over own connections between ranks; see [Note: who gives up says so].

    Collectives: for each message a reduction of int64 by the schedule that `_hops.cheapest` names;
    every member calls. A healthy vote of N > 8 ranks is ceil(log2 N) rounds of one message of 32
    bytes a rank.
    """

    device = torch.device("cpu")

    def __init__(self, connected: Mapping[int, socket.socket], members: Ranks, rank: int) -> None:
        """Use ``connected``, by the index of the peer among ``members``; it is closed with this."""
        self._members, self._index = members, members.index(rank)
        self._peers = {index: _Connection(found, index) for index, found in connected.items()}
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        self._hops: dict[tuple[int, bool], list[Hop]] = {}
        self.way: str | None = None  # a key of `_hops.WAYS`; None is the cheapest
        self._number = 0  # of the message this rank is in, or of the next
        self._news: tuple[int, int, int] | None = None  # the first message a peer takes no part in
        self._fault = (_GAVE_UP, self._index)  # what peers are told when this rank ends
        self._closed = False
        _links.add(self)

    def all_reduce_max(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        """Return the maximum of each word over the members."""
        return self._reduce(words, max, patience, sums=False)

    def all_reduce_sum(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        """Return the sum of each word over the members."""
        return self._reduce(words, operator.add, patience, sums=True)

    def close(self) -> None:
        """Tell the peers that this rank takes no part in what comes next."""
        if self._closed:
            return
        self._closed = True
        self._selector.close()
        kind, who = self._fault
        said = _HEAD.pack(self._number, kind) + struct.pack("<q", who)
        for peer in self._peers.values():
            if not peer.unsent:  # else a message is cut off here, which says as much
                with contextlib.suppress(OSError):
                    peer.socket.send(said)
            peer.close()

    def _reduce(
        self,
        words: Sequence[int],
        of: Callable[[int, int], int],
        patience: Patience,
        *,
        sums: bool,
    ) -> Sequence[int]:
        if self._closed:
            raise LinkBroken("the control group was closed", expired=False)
        program = _hops.reduction(self._hops_for(len(words), sums), words, of)
        try:
            while self._listen(0):  # all that has come: the news stands behind the words
                pass
            reduced = self._run(program, patience)
        except BaseException as error:  # Ctrl-C too: the peers must neither wait nor go on
            if self._closed and isinstance(error, Exception):  # by another thread, amid a wait
                raise LinkBroken("the control group was closed", expired=False) from None
            self.close()
            raise
        self._number += 1
        return reduced

    def _run(self, program: Reducing, patience: Patience) -> list[int]:
        try:
            wanted = next(program)
            while True:
                wanted = program.send(self._exchange(wanted, patience))
        except StopIteration as done:
            reduced: list[int] = done.value
        while any(peer.unsent for peer in self._peers.values()):
            self._wait(patience)
        return reduced

    def _hops_for(self, num_words: int, sums: bool) -> list[Hop]:
        hops = self._hops.get((num_words, sums))
        if hops is None:
            num_ranks = len(self._members)
            way = _hops.WAYS[self.way or _hops.cheapest(num_ranks, num_words, sums=sums)]
            every = way.schedule(self._index, num_ranks, num_words)
            hops = self._hops[num_words, sums] = [h for h in every if h.sends or h.receives]
        return hops

    def _exchange(self, wanted: Exchange, patience: Patience) -> list[Sequence[int]]:
        for index, words in wanted.sends:
            peer = self._peers[index]
            if peer.ended:
                raise self._broken(_GONE, index)
            try:
                peer.send(struct.pack(f"<qq{len(words)}q", self._number, len(words), *words))
            except OSError:
                self._listen(0)  # it may have said why
                raise self._broken(_GONE, index) from None
            if peer.unsent:
                self._watch(peer)
        return [self._words_of(self._peers[i], count, patience) for i, count in wanted.receives]

    def _words_of(self, peer: _Connection, count: int, patience: Patience) -> Sequence[int]:
        while not peer.heard:
            if peer.ended:
                raise self._broken(_GONE, peer.index)
            self._wait(patience)
        number, data = peer.heard.popleft()
        if (number, len(data)) != (self._number, 8 * count):
            raise LinkBroken(
                f"rank {self._members[peer.index]} sent {len(data)} bytes in message {number}; "
                f"rank {self._members[self._index]} expected {8 * count} in {self._number}",
                expired=False,
            )
        return struct.unpack(f"<{count}q", data)

    def _wait(self, patience: Patience) -> None:
        """Wait for one slice at most."""
        if not self._listen(min(SLICE_S, patience.left)):
            patience.look_up()
            if patience.left <= 0 and not self._listen(0):  # this rank may have been stopped
                raise LinkBroken(f"no answer in {patience.waited:.1f} s", expired=True)

    def _listen(self, seconds: float) -> bool:
        """Take in what has come on any connection; return whether anything has."""
        ready = self._selector.select(seconds)
        for key, events in ready:
            peer: _Connection = key.data
            if events & selectors.EVENT_READ:
                said = peer.read()
                if said is not None and (self._news is None or said < self._news):
                    self._news = said
            if events & selectors.EVENT_WRITE and not peer.ended:
                peer.send_more()
                self._watch(peer)
            if peer.ended:
                self._selector.unregister(peer.socket)
                if peer.unsent:
                    raise self._broken(_GONE, peer.index)
        if self._news is not None and self._news[0] <= self._number:
            raise self._broken(*self._news[1:])
        return bool(ready)

    def _watch(self, peer: _Connection) -> None:
        writing = selectors.EVENT_WRITE if peer.unsent else 0
        self._selector.modify(peer.socket, selectors.EVENT_READ | writing, peer)

    def _broken(self, kind: int, who: int) -> LinkBroken:
        """Remember whose fault it is, for the peers, and return the error."""
        self._fault = kind, who
        rank = self._members[who]
        if kind == _GONE:
            text = f"the connection to rank {rank} was closed by peer"
            return LinkBroken(text, expired=False, connection=True, gone=rank)
        return LinkBroken(f"rank {rank} gave up", expired=False)


_links: weakref.WeakSet[HopLink] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close a forked child's copies of connections, so that peers see it when the rank itself ends.

    The kernel ends a connection with its last descriptor, and a fork copies them all. Nothing is
    said to the peers here: they would take it for the rank's word.
    """
    for link in list(_links):
        link._closed = True
        link._selector.close()
        for peer in link._peers.values():
            peer.socket.close()


if hasattr(os, "register_at_fork"):  # not everywhere
    os.register_at_fork(after_in_child=_leave_to_parent)


def connect(
    job_store: Any,
    client: StoreClient,
    name: str,
    members: Ranks,
    rank: int,
    *,
    seconds: float,
    look: Callable[[], None] = lambda: None,
) -> HopLink:
    """Return a link of ``members``; each calls, and connects to the peers that `_hops.peers` says.

    A rank that waits calls ``look`` every now and then, which raises when it waits in vain.

    Raises:
        OSError: No address to listen on, or a peer that cannot be reached there.
        LinkBroken: A peer did not come within ``seconds``, or what ``look`` raises.

    Collectives:
        None. Over the store four requests, and those of ``look``: an address is set, those of the
        peers with a lower index are awaited and read, and the address is dropped.
    """
    index = members.index(rank)
    patience = Patience("connecting", hard=seconds, on_slice=look)
    wanted = set(_hops.peers(index, len(members)))
    below = sorted(peer for peer in wanted if peer < index)  # they listen to this rank
    word = digest([name.encode()])  # known to who can read the store, since the name is random
    address = own_address(job_store)
    key = f"{name}/address"
    with contextlib.ExitStack() as undo:
        # All of it: the number of the interface is a part of where a link-local one is.
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = undo.enter_context(
            socket.create_server(where, family=family, backlog=len(wanted) + 8)
        )
        client.put(f"{key}/{index}", json.dumps(listener.getsockname()[:2]).encode(), patience)
        undo.callback(_drop, client, f"{key}/{index}")
        connected: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as unless_all:
            for peer, (host, port) in _addresses(client, key, below, patience).items():
                seconds = max(patience.left, 0.1)
                there = on_own_link(host, address), port
                found = socket.create_connection(there, timeout=seconds)
                connected[peer] = unless_all.enter_context(found)
                found.sendall(_HELLO.pack(word, index, peer))
            missing = wanted - set(connected)
            for peer, found in _accept(listener, word, index, missing, patience):
                connected[peer] = unless_all.enter_context(found)
            if missing:
                late = join_ranks([members[peer] for peer in missing])
                raise LinkBroken(f"{late} did not connect to rank {rank}", expired=True)
            unless_all.pop_all()
    return HopLink(connected, members, rank)


def _addresses(
    client: StoreClient, key: str, peers: Sequence[int], patience: Patience
) -> dict[int, tuple[str, int]]:
    if not peers:
        return {}
    found = client.wait_for_all([f"{key}/{peer}" for peer in peers], patience)
    return {peer: tuple(json.loads(said)) for peer, said in zip(peers, found, strict=True)}


def _accept(
    listener: socket.socket, word: int, index: int, missing: set[int], patience: Patience
) -> Iterator[tuple[int, socket.socket]]:
    """Yield peers and their connections, until none is ``missing`` or time is up.

    Who does not know the word is none. All are heard at once, so one that is silent delays nobody.
    """
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as undo:
        selector.register(listener, selectors.EVENT_READ)
        while missing and patience.left > 0:
            patience.look_up()
            for key, _ in selector.select(min(SLICE_S, patience.left)):
                if key.fileobj is listener:
                    try:
                        came, _ = listener.accept()
                    except OSError as error:  # it may be gone again
                        if error.errno in _FULL:
                            raise
                        continue
                    undo.callback(came.close)
                    came.setblocking(False)
                    selector.register(came, selectors.EVENT_READ)
                    continue
                found: Any = selector.unregister(key.fileobj).fileobj
                said, peer, to = 0, -1, -1
                with contextlib.suppress(OSError, struct.error):
                    said, peer, to = _HELLO.unpack(found.recv(_HELLO.size))
                if (said, to) == (word, index) and peer in missing:
                    own = found.dup()  # raises where no descriptor is left
                    missing.remove(peer)
                    yield peer, own


def _drop(client: StoreClient, key: str) -> None:
    with contextlib.suppress(LinkBroken):
        client.drop([key], Patience("connecting", hard=NAMING_S))

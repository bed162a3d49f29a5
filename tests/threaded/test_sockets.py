"""Votes over the ranks' own connections: right, together, and given up by all or by none.

Ranks are threads, each with its own end of real connections; events order them, never time.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from consensus import _hops, _sockets
from consensus._sockets import HopLink
from consensus._store import StoreClient
from consensus._waiting import LinkBroken, Patience
from consensus.testing import run_threads

LIVENESS_S = 30.0
BRIEF_S = 0.2  # the patience of a rank that is to give up


@dataclass
class Job:
    """What the ranks of one test share."""

    num_ranks: int
    store: Any
    events: dict[str, threading.Event] = field(default_factory=dict)

    @contextlib.contextmanager
    def linked(self, rank: int, name: str = "group") -> Iterator[HopLink]:
        client = StoreClient(self.store)
        members = tuple(range(10, 10 + self.num_ranks))  # ranks are not indices
        try:
            link = _sockets.connect(
                self.store, client, name, members, rank + 10, seconds=LIVENESS_S
            )
        finally:
            client.close()
        try:
            yield link
        finally:
            link.close()

    def tell(self, word: str) -> None:
        self.events.setdefault(word, threading.Event()).set()

    def wait_for(self, word: str) -> None:
        assert self.events.setdefault(word, threading.Event()).wait(LIVENESS_S), word


def on_ranks(worker: Callable[..., Any], num_ranks: int, *args: object) -> list[Any]:
    job = Job(num_ranks, HashStore())  # a TCPStore looks up names, which can take seconds
    found = list(run_threads(worker, num_ranks, job, *args, timeout=LIVENESS_S).values())
    assert job.store.num_keys() == 0
    return found


@pytest.fixture(autouse=True)
def _on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def patience(seconds: float = LIVENESS_S, **options: Any) -> Patience:
    return Patience("test", hard=seconds, **options)


def broken(call: Callable[[], object]) -> LinkBroken:
    with pytest.raises(LinkBroken) as caught:
        call()
    return caught.value


def many_messages(rank: int, job: Job) -> list[Sequence[int]]:
    """Short and long ones, maxima and sums; ranks leave as soon as they have the last."""
    n = job.num_ranks
    long = [rank * 7919 % n + i for i in range(70_000)]  # more than a connection takes at once
    with job.linked(rank) as link:
        found = [link.all_reduce_max((rank ^ i, -rank), patience()) for i in range(50)]
        found += [link.all_reduce_sum((1, rank, -rank, 2**40), patience())]
        maximum = link.all_reduce_max(long, patience())
        total = link.all_reduce_sum(long, patience())
        found += [link.all_reduce_max((rank,), patience())]
    assert maximum == [n - 1 + i for i in range(len(long))]  # 7919 is prime: each residue once
    assert total == [n * (n - 1) // 2 + n * i for i in range(len(long))]
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 9, 16])
def test_words_are_reduced_on_every_rank(num_ranks: int) -> None:
    ranks = range(num_ranks)
    expected = [
        *([max(rank ^ i for rank in ranks), 0] for i in range(50)),
        [num_ranks, sum(ranks), -sum(ranks), num_ranks * 2**40],
        [num_ranks - 1],
    ]
    for found in on_ranks(many_messages, num_ranks):
        assert found == expected


def gives_up(rank: int, job: Job, late: int, first: int | None) -> LinkBroken:
    """Rank ``first`` (or everybody) gives up waiting for ``late``, which comes after all have."""
    others = [r for r in range(job.num_ranks) if r != late]
    with job.linked(rank) as link:
        link.all_reduce_max((1, 2), patience())
        if rank == late:
            for other in others:
                job.wait_for(f"{other} gave up")
        brief = rank != late and first in (None, rank)
        error = broken(lambda: link.all_reduce_max((1, 2), patience(BRIEF_S if brief else 30.0)))
        job.tell(f"{rank} gave up")
        assert "closed" in str(broken(lambda: link.all_reduce_max((1, 2), patience())))
        return error


@pytest.mark.parametrize("num_ranks", [2, 8, 9, 16])
def test_a_late_rank_does_not_complete_what_all_others_gave_up(num_ranks: int) -> None:
    """With 16 ranks all that it needs is there to be read when it comes."""
    for rank, error in enumerate(on_ranks(gives_up, num_ranks, num_ranks - 1, None)):
        if rank == num_ranks - 1:
            assert "gave up" in str(error)
        assert not error.connection  # all live


@pytest.mark.parametrize(("num_ranks", "first", "late"), [(16, 0, 3), (16, 5, 2), (11, 1, 7)])
def test_all_give_up_when_one_does_though_it_speaks_to_few(
    num_ranks: int, first: int, late: int
) -> None:
    assert late not in _hops.peers(first, num_ranks)
    for rank, error in enumerate(on_ranks(gives_up, num_ranks, late, first)):
        assert error.expired == (rank == first)
        if rank != first:
            assert str(error) == f"rank {first + 10} gave up"  # who began, not who passed it on


def tree_is_given_up(rank: int, job: Job) -> LinkBroken:
    """As with the maximum: rank 6 gives up after its words have gone up, rank 3 comes late."""
    with job.linked(rank) as link:
        if rank == 3:
            job.wait_for("gave up")
        error = broken(lambda: link.all_reduce_sum((1,), patience(BRIEF_S if rank == 6 else 30.0)))
        if rank == 0:  # the root, which waits for rank 2, which waits for rank 3
            job.tell("gave up")
        return error


def test_a_sum_is_given_up_by_all() -> None:
    for rank, error in enumerate(on_ranks(tree_is_given_up, 9)):
        assert str(error) == "rank 16 gave up" or rank == 6


def one_is_interrupted(rank: int, job: Job) -> str:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with job.linked(rank) as link:
        if rank == 4:
            job.wait_for("rank 2 is told")
        if rank == 0:
            with pytest.raises(KeyboardInterrupt):
                link.all_reduce_max((1, 2), patience(on_wait=interrupt))
            return "interrupted"
        error = broken(lambda: link.all_reduce_max((1, 2), patience()))
        if rank == 2:
            job.tell("rank 2 is told")
        return str(error)


def test_an_interrupted_rank_frees_all_others_at_once() -> None:
    first, *others = on_ranks(one_is_interrupted, 9)
    assert first == "interrupted"
    assert others == ["rank 10 gave up"] * 8


def one_vanishes(rank: int, job: Job) -> LinkBroken | None:
    """Rank 5's connections end without a word, as the kernel ends those of a killed process."""
    with job.linked(rank) as link:
        link.all_reduce_max((1, 2), patience())
        if rank == 5:
            for peer in link._peers.values():
                peer.socket.close()
            return None
        return broken(lambda: link.all_reduce_max((1, 2), patience()))


def test_all_are_told_who_is_gone() -> None:
    for rank, error in enumerate(on_ranks(one_vanishes, 11)):
        if rank != 5:
            assert str(error) == "the connection to rank 15 was closed by peer"
            assert error.connection
            assert error.gone == 15
            assert not error.expired


def one_brings_more(rank: int, job: Job) -> str:
    with job.linked(rank) as link:
        words = (1,) * (3 if rank == 2 else 2)
        return str(broken(lambda: link.all_reduce_max(words, patience())))


def test_unequal_lengths_are_an_error_on_every_rank() -> None:
    said = on_ranks(one_brings_more, 9)
    assert any("bytes in message 0; rank" in text for text in said)


@contextlib.contextmanager
def by_hand() -> Iterator[tuple[HopLink, socket.socket]]:
    """Yield the link of rank 0 of two, and the other end of its connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as peer,
    ):
        own, _ = listener.accept()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        link = HopLink({1: own}, (0, 1), 0)
        try:
            yield link, peer
        finally:
            link.close()


def frame(number: int, *words: int) -> bytes:
    return struct.pack(f"<qq{len(words)}q", number, len(words), *words)


def test_words_that_came_early_do_not_hide_that_their_sender_has_given_up_since() -> None:
    with by_hand() as (link, peer):
        peer.sendall(frame(0, 5, 6) + frame(1, 7, 8))
        assert link.all_reduce_max((6, 5), patience()) == [6, 6]
        peer.sendall(struct.pack("<qqq", 1, -1, 1))
        assert str(broken(lambda: link.all_reduce_max((6, 5), patience()))) == "rank 1 gave up"


@pytest.mark.parametrize("cut", [1, 8, 17, 31])
def test_a_message_may_come_in_pieces(cut: int) -> None:
    with by_hand() as (link, peer):
        data = frame(0, 5, 6)
        peer.sendall(data[:cut])
        thread = threading.Thread(target=lambda: peer.sendall(data[cut:]))
        link._listen(LIVENESS_S)  # the first piece is there
        thread.start()
        assert link.all_reduce_max((6, 5), patience()) == [6, 6]
        thread.join()


def test_all_is_sent_before_a_rank_goes_on_though_it_has_heard_all() -> None:
    words = range(200_000)  # far more than the connection holds
    size = len(frame(0, *words))
    received: list[int] = []

    def read() -> None:
        peer.sendall(frame(0, *words))
        while data := peer.recv(1 << 20):
            received.append(len(data))
            if sum(received) >= size:
                return

    with by_hand() as (link, peer):
        thread = threading.Thread(target=read)
        thread.start()
        link.all_reduce_max(words, patience())
        link.close()
        thread.join()
    assert sum(received) >= size


def test_a_stranger_who_connects_is_no_peer() -> None:
    word, index, missing = 77, 3, {5, 6}
    hellos = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"short",
        struct.pack("<qqq", 78, 5, 3),  # of another group
        struct.pack("<qqq", 77, 5, 2),  # meant for another rank
        struct.pack("<qqq", 77, 4, 3),  # is not expected
    ]
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def says(hello: bytes) -> None:
            stranger = stack.enter_context(socket.create_connection(listener.getsockname()))
            stranger.sendall(hello)

        for hello in (b"", *hellos):  # the first says nothing, and delays nobody
            says(hello)
        says(struct.pack("<qqq", word, 6, index))
        patience = Patience("connecting", hard=20.0)
        accepted = _sockets._accept(listener, word, index, missing, patience)
        peer, connected = next(accepted)
        assert (peer, missing) == (6, {5})
        connected.close()


def one_does_not_connect(rank: int, job: Job) -> str:
    client = StoreClient(job.store)
    try:
        if rank == 1:
            return ""
        error = broken(
            lambda: _sockets.connect(job.store, client, "group", (0, 1, 2), rank, seconds=BRIEF_S)
        )
        return str(error)
    finally:
        client.close()


def test_a_peer_that_does_not_come_is_named_and_nothing_is_left() -> None:
    first, _, last = on_ranks(one_does_not_connect, 3)
    assert first.removeprefix("ranks 1, 2").removeprefix("rank 1") == " did not connect to rank 0"
    assert last == "nobody set at least one of 'group/address/0', 'group/address/1'"


class CountingClient(StoreClient):
    """Notes each call; all that `connect` makes are here."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.calls: list[str] = []

    def _call(self, work: Callable[[Any], Any], patience: Patience, worker: str = "ask") -> Any:
        self.calls.append(worker)
        return super()._call(work, patience, worker)


def requests_to_connect(rank: int, job: Job) -> list[str]:
    client = CountingClient(job.store)
    members = tuple(range(job.num_ranks))
    link = _sockets.connect(job.store, client, "group", members, rank, seconds=LIVENESS_S)
    link.close()
    client.close()
    return client.calls


def test_connecting_is_as_many_requests_whatever_the_number_of_ranks() -> None:
    """Own address, one wait for those of all that listen to this rank, and clearing up."""
    for num_ranks in (2, 17):
        first, *others = on_ranks(requests_to_connect, num_ranks)
        assert first == ["ask", "ask"]
        assert others == [["ask", "wait", "ask"]] * (num_ranks - 1)


def test_connections_that_nobody_closes_are_given_back_in_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    link = HopLink({1: here}, (0, 1), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del link
        gc.collect()
    assert here.fileno() == -1
    assert there.recv(1) == b""  # gone, without having said that it gives up
    there.close()

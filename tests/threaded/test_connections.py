"""What the ranks' own connections need of their host: addresses, descriptors, and no forks."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from consensus import _address, _sockets
from tests.threaded.test_sockets import (
    LIVENESS_S,
    Job,
    broken,
    by_hand,
    frame,
    on_ranks,
    patience,
)


class Exhausted(socket.socket):
    """A listener of a process that has no descriptor left."""

    def accept(self) -> tuple[socket.socket, Any]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_without_a_descriptor_left_a_rank_gives_up_at_once() -> None:
    with Exhausted() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()):
            accepted = _sockets._accept(listener, 77, 3, {5}, patience())
            with pytest.raises(OSError, match="Too many open files"):
                next(accepted)


def no_descriptor(self: socket.socket) -> socket.socket:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_peer_is_not_taken_for_connected_where_no_descriptor_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket.socket, "dup", no_descriptor)
    missing = {5}
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as peer,
    ):
        peer.sendall(_sockets._HELLO.pack(77, 5, 3))
        with pytest.raises(OSError, match="Too many open files"):
            next(_sockets._accept(listener, 77, 3, missing, patience()))
    assert missing == {5}


def one_vote(rank: int, job: Job) -> Sequence[int]:
    with job.linked(rank) as link:
        return link.all_reduce_max((rank, -rank), patience())


def test_ranks_connect_over_link_local_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [a for _, name in socket.if_nameindex() for a in _address._ipv6_addresses_of(name)]
    on_link = [address for address in known if "%" in address]
    if not on_link:
        pytest.skip("no link-local IPv6 address here")
    monkeypatch.setattr(_sockets, "own_address", lambda store: on_link[0])
    assert on_ranks(one_vote, 3) == [[2, 0]] * 3


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork beside threads
def test_a_forked_process_says_nothing_and_keeps_no_connection_open() -> None:
    """Data loaders fork: peers must hear from the rank alone, and see it when it is killed."""
    with by_hand() as (link, peer), contextlib.ExitStack() as undo:
        hear, say = os.pipe()
        undo.callback(os.close, hear)
        child = os.fork()
        if not child:
            try:
                text = str(broken(lambda: link.all_reduce_max((9, 9), patience())))
                link.close()
                os.write(say, text.encode())
                threading.Event().wait(LIVENESS_S)  # it outlives what follows
            finally:
                os._exit(0)
        undo.callback(os.waitpid, child, 0)
        undo.callback(os.kill, child, signal.SIGKILL)
        os.close(say)
        assert os.read(hear, 100) == b"the control group was closed"
        peer.settimeout(LIVENESS_S / 2)
        peer.sendall(frame(0, 5, 6))
        assert link.all_reduce_max((6, 5), patience()) == [6, 6]
        assert peer.recv(100) == frame(0, 6, 5)
        for each in link._peers.values():
            each.socket.close()  # as the kernel does when the rank is killed
        assert peer.recv(1) == b""

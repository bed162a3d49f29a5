"""Where other ranks reach this one: the named interface, or the way to the store."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from consensus import _address
from consensus._address import own_address


def test_the_address_is_that_of_the_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert own_address(HashStore()) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no such one")
    with pytest.raises(OSError, match="No such device"):
        own_address(HashStore())


def test_the_address_is_that_from_which_the_store_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert own_address(PrefixStore("a", PrefixStore("b", store))) == "127.0.0.1"


class NamedStore:
    """What tells at which name it is."""

    def __init__(self, host: str) -> None:
        self.host, self.port = host, 1


def test_a_hosts_own_name_is_not_taken_for_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian maps it to a loopback address, which other hosts cannot reach."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    routes = {"node0": "127.0.1.1", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    routes |= {"node1": "10.0.0.7", _address._ELSEWHERE: "10.0.0.7"}
    monkeypatch.setattr(_address, "_source_towards", lambda host, port: routes[host])
    found = {name: own_address(NamedStore(name)) for name in list(routes)[:4]}
    assert found == {
        "node0": "10.0.0.7",
        "localhost": "127.0.0.1",  # all ranks are on this host
        "127.0.0.1": "127.0.0.1",
        "node1": "10.0.0.7",
    }

    def no_network(host: str, port: int) -> str:
        if host == _address._ELSEWHERE:
            raise OSError("network is unreachable")
        return routes[host]

    monkeypatch.setattr(_address, "_source_towards", no_network)
    assert own_address(NamedStore("node0")) == "127.0.1.1"

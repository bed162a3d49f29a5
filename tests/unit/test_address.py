"""Where other ranks reach this one: the named interface, or the way to the store."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from consensus import _address
from consensus._address import on_own_link, own_address


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


def test_a_link_local_address_is_named_with_the_interface_of_who_uses_it() -> None:
    assert on_own_link("fe80::7", "fe80::1%4") == "fe80::7%4"
    assert on_own_link("fd00::7", "fe80::1%4") == "fd00::7"
    assert on_own_link("10.0.0.7", "10.0.0.1") == "10.0.0.7"
    assert on_own_link("169.254.0.7", "fe80::1%4") == "169.254.0.7"  # IPv4 has no such numbers
    assert on_own_link("fe80::7", "fd00::1") == "fe80::7"


def test_an_interface_without_ipv4_is_reached_over_ipv6(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_link = "fe8000000000000000fc00fffe000001 1f 40 20 80     ib7\n"
    known = tmp_path / "if_inet6"
    known.write_text(on_link + "fd000000000000000000000000000002 1f 40 00 82     ib7\n")
    monkeypatch.setattr(_address, "_IPV6_ADDRESSES", str(known))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    assert own_address(HashStore()) == "fd00::2"
    known.write_text(on_link)
    assert own_address(HashStore()) == "fe80::fc:ff:fe00:1%31"
    monkeypatch.setattr(_address, "_IPV6_ADDRESSES", str(tmp_path / "a kernel without IPv6"))
    with pytest.raises(OSError, match="No such device"):
        own_address(HashStore())


def test_the_way_to_a_link_local_store_names_the_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    known = [a for _, name in socket.if_nameindex() for a in _address._ipv6_addresses_of(name)]
    on_link = [address for address in known if "%" in address]
    if not on_link:
        pytest.skip("no link-local IPv6 address here")
    assert own_address(NamedStore(on_link[0])) == on_link[0]

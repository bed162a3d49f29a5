"""At which address other ranks reach this one. Nothing is sent to find out."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from typing import Any

_ELSEWHERE = "192.0.2.1"  # stands for any other network (RFC 5737)
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_IPV6_ADDRESSES = "/proc/net/if_inet6"  # Linux: address, interface, prefix, scope, flags, name
_LINK_LOCAL = 0x20  # a scope there


def own_address(store: Any) -> str:
    """Return where peers reach this rank: of GLOO_SOCKET_IFNAME, or that the job's store sees.

    A link-local one (IPv6) ends with the number of this host's interface: ``fe80::1%4``.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return _address_of(interface)
    while hasattr(store, "underlying_store"):  # a PrefixStore
        store = store.underlying_store
    host, port = getattr(store, "host", socket.gethostname()), getattr(store, "port", 1)
    found = _source_towards(host, port)
    if _is_loopback(found) and not _is_loopback(host):
        # The host's own name, which Debian maps to 127.0.1.1: other hosts know it by another.
        with contextlib.suppress(OSError):  # no network, so no other hosts
            return _source_towards(_ELSEWHERE, port)
    return found


def on_own_link(host: str, address: str) -> str:
    """Return the address of a peer as the rank at ``address`` has to name it.

    A link-local one is known on its link only, and the numbers of interfaces on their host only:
    so a peer tells the first alone, and who wants to reach it adds that of its own interface.
    """
    _, _, interface = address.partition("%")
    is_on_link = ":" in host and ipaddress.ip_address(host).is_link_local
    return f"{host}%{interface}" if is_on_link and interface else host


def _source_towards(host: str, port: int) -> str:
    """Return from which address this rank reaches another."""
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)  # sends nothing: it only chooses a route
        found, _, *more = probe.getsockname()  # with IPv6, the number of the interface last
        return f"{found}%{more[1]}" if more and more[1] else str(found)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host.partition(".")[0] == "localhost"


def _address_of(interface: str) -> str:
    import fcntl  # not everywhere; elsewhere the interface cannot be chosen

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:
            others = _ipv6_addresses_of(interface)
            if not others:
                raise
            return others[0]
    return socket.inet_ntoa(answer[20:24])


def _ipv6_addresses_of(interface: str) -> list[str]:
    """Return the IPv6 addresses of an interface, link-local ones last."""
    found = []
    with contextlib.suppress(OSError), open(_IPV6_ADDRESSES) as lines:  # none without IPv6
        for digits, index, _, scope, _, name in map(str.split, lines):
            if name == interface:
                host = str(ipaddress.IPv6Address(int(digits, 16)))
                is_on_link = int(scope, 16) == _LINK_LOCAL
                found.append((is_on_link, f"{host}%{int(index, 16)}" if is_on_link else host))
    return [address for _, address in sorted(found)]

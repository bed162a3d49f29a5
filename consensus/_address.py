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


def own_address(store: Any) -> str:
    """Return where peers reach this rank: of GLOO_SOCKET_IFNAME, or that the job's store sees."""
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


def _source_towards(host: str, port: int) -> str:
    """Return from which address this rank reaches another."""
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)  # sends nothing: it only chooses a route
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host.partition(".")[0] == "localhost"


def _address_of(interface: str) -> str:
    import fcntl  # not everywhere; elsewhere the interface cannot be chosen

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])

"""Count what one rank communicates, at the borders of torch and not from this library's own books.

Four instruments, so that none has to be believed alone:

- calls on a link of own connections, and on a process group's backend: a control group is a private
  one, which this library calls directly, so these are the votes;
- collectives that pass torch's dispatcher: those of the optimizer, on the groups of its meshes;
- requests to the job's store, from Python (gloo's own, while it connects, are made in C++);
- bytes that the kernel has sent on each TCP connection, headers of gloo included.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Backend, PrefixStore, Store
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from consensus._sockets import HopLink

BYTES_PER_WORD = 8

_BACKEND_CALLS = (
    *("allgather", "allgather_coalesced", "allreduce", "allreduce_coalesced", "alltoall"),
    *("alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv"),
    *("recv_anysource", "reduce", "reduce_scatter", "scatter", "send"),
    *("_allgather_base", "_reduce_scatter_base"),
)
_STORE_CALLS = (
    *("add", "append", "barrier", "check", "compare_set", "delete_key", "get", "list_keys"),
    *("multi_get", "multi_set", "num_keys", "queue_len", "queue_pop", "queue_push", "set", "wait"),
)
_COUNTED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (Backend, _BACKEND_CALLS),
    (Store, _STORE_CALLS),
    (HopLink, ("all_reduce_max", "all_reduce_sum")),
)
_INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "tensor", "tensors")

# Offsets in Linux's struct tcp_info.
_TCP_INFO_BYTES_SENT, _TCP_INFO_BYTES_RESENT, _TCP_INFO_SIZE = 200, 208, 216
_ACKNOWLEDGED_WITHIN_S = 10.0


@dataclass(slots=True)
class Ledger:
    """What has been counted since the last :meth:`settle`."""

    control: list[tuple[str, int]] = field(default_factory=list)  # (call, words to each member)
    data: list[tuple[str, int]] = field(default_factory=list)  # (collective, bytes brought)
    store: Counter[str] = field(default_factory=Counter)

    def settle(self) -> Ledger:
        """Return what was counted and begin anew."""
        counted = Ledger(self.control, self.data, self.store)
        self.control, self.data, self.store = [], [], Counter()
        return counted


@contextmanager
def counting() -> Iterator[Ledger]:
    """Count this rank's communication inside the block."""
    ledger = Ledger()
    before = {
        (owner, name): getattr(owner, name)
        for owner, names in _COUNTED
        for name in names
        if hasattr(owner, name)  # torch versions differ
    }
    for (owner, name), call in before.items():
        note = _note_store if owner is Store else _note_control
        setattr(owner, name, _counted(call, name, note, ledger))
    try:
        with _DataCollectives(ledger):
            yield ledger
    finally:
        for (owner, name), call in before.items():
            setattr(owner, name, call)


def bytes_sent() -> dict[str, int]:
    """Return, for each TCP connection but those to the store, the payload bytes sent so far.

    Empty where the kernel does not say. Called after a collective has returned: gloo has handed
    everything to the kernel by then, which may still be sending.
    """
    found = {}
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                    sent = _sent_on(connection)
                    if sent is not None:
                        found[name] = sent
        except TimeoutError:
            raise
        except OSError:  # closed meanwhile, or not connected
            continue
    return found


def _sent_on(connection: socket.socket) -> int | None:
    tcp = connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX
    if not tcp or connection.getpeername()[1] == _store_port():
        return None
    until = time.monotonic() + _ACKNOWLEDGED_WITHIN_S
    while struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]:
        if time.monotonic() > until:
            raise TimeoutError("the peer's kernel does not acknowledge what was sent")
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _TCP_INFO_SIZE:
        return None
    (sent,) = struct.unpack_from("<Q", info, _TCP_INFO_BYTES_SENT)
    (resent,) = struct.unpack_from("<Q", info, _TCP_INFO_BYTES_RESENT)
    return int(sent - resent)


def keys_in_store() -> int:
    """Return how many keys the job's store holds, but for those of ranks that had to wait."""
    return sum(not _is_late_notice(key) for key in _job_store().list_keys())


def _store_port() -> int:
    return int(getattr(_job_store(), "port", 0))


def _job_store() -> Any:
    store: Any = distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _is_late_notice(key: str) -> bool:
    # A rank that has waited for a second says in the store where it is. How often that happens
    # depends on the machine and not on the protocol.
    return "/at/" in key


def _counted(
    call: Callable[..., Any],
    name: str,
    note: Callable[[Ledger, str, Any, Any], None],
    ledger: Ledger,
) -> Callable[..., Any]:
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(ledger, name, self, args)
        return call(self, *args, **kwargs)

    return counted


def _note_control(ledger: Ledger, name: str, group: Any, args: tuple[Any, ...]) -> None:
    if isinstance(group, HopLink):
        ledger.control.append((name, len(args[0])))
        return
    output_first = "gather" in name or "alltoall" in name
    sent = args[1] if output_first else args[0] if args else ()
    words = sum(tensor.numel() for tensor in _tensors(sent))
    ledger.control.append((name, words // group.size() if "alltoall" in name else words))


def _note_store(ledger: Ledger, name: str, _: Any, args: tuple[Any, ...]) -> None:
    if not (args and isinstance(args[0], str) and _is_late_notice(args[0])):
        ledger.store[name] += 1


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class _DataCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes collectives that pass torch's dispatcher, with the bytes this rank brings to each."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the local tensors
        if func.namespace in ("c10d", "_c10d_functional"):
            named = {arg.name: value for arg, value in zip(func._schema.arguments, args)}  # noqa: B905
            brought = [tensor for name in _INPUTS for tensor in _tensors(named.get(name, ()))]
            size = sum(tensor.numel() * tensor.element_size() for tensor in brought)
            self._ledger.data.append((func._schema.name.split("::")[1].strip("_"), size))
        return func(*args, **(kwargs or {}))

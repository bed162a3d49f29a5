"""What goes wrong on one rank, what the others are promised, and the step in which it happens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from adapters import Muon, _by_owners, _reshard
from adapters._muon_rule import MuonRule
from consensus import GroupFailure, LateRanks, _session, control_group
from consensus._store import StoreClient
from consensus._text import says_transport
from consensus.testing import Snapshot, assert_unchanged, faults, inject, snapshot

Kind: TypeAlias = Literal["SIGKILL", "SIGSTOP", "os._exit", "exception"]
Moment: TypeAlias = Literal["planning", "connecting", "closure", "update", "exchange", "text"]
Mode: TypeAlias = Literal["exact", "distributed"]

KINDS: dict[Kind, Any] = {
    "SIGKILL": faults.Kill(),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "os._exit": faults.Exit(9),
    "exception": ValueError("out of order"),
}
MOMENTS: dict[Moment, str] = {
    "planning": "before its first word to the others",
    "connecting": "when the private group of the vote is made",
    "closure": "before the vote of a step",
    "update": "between the vote and the first collective of the update",
    "exchange": "before the second collective of the update",
    "text": "before the third message of a vote, which tells why another rank failed",
}
SHAPES = ((6, 4), (5, 3), (4, 6), (3, 9), (8, 2), (7, 5))
BUCKET_BYTES = 100  # several exchanges a step

HARD_S = 3.0  # the deadline of votes
DATA_S = 4.0  # the timeout of the data plane, whichever group
LIVENESS_S = 60.0  # a run that takes longer hangs
DEATH_S = 2.0  # within which a death is noticed where ranks are connected
SLACK_S = 2.0  # beyond a deadline: closing connections, and asking the store who is late
SILENT_S = 7.0  # the same where the store does not answer


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that goes wrong on one rank.

    Attributes:
        ranks: All ranks that step together; global.
        victim: The one of them that goes wrong.
        hosts: Whether the victim also hosts the job's store.
    """

    kind: Kind
    moment: Moment
    mode: Mode
    ranks: tuple[int, ...]
    victim: int
    hosts: bool = False

    @property
    def survivors(self) -> tuple[int, ...]:
        """The other ranks."""
        return tuple(rank for rank in self.ranks if rank != self.victim)

    @property
    def talker(self) -> int:
        """The rank that fails first, where the text of a failure is being told."""
        return self.survivors[-1 if self.victim == self.ranks[0] else 0]

    @property
    def dies(self) -> bool:
        """Whether connections to the victim break."""
        return self.kind in ("SIGKILL", "os._exit")


@dataclass(frozen=True, slots=True)
class Promise:
    """What must come of a row, apart from that nothing is written."""

    seconds: float  # from the event until the error, at most
    names: bool  # the victim
    kinds: tuple[type[BaseException], ...]  # of the error
    says: tuple[str, ...] = ()  # one of these, if any are given

    def text(self) -> str:
        """Return it in words."""
        kinds = " or ".join(kind.__name__ for kind in self.kinds)
        named = "names the rank" if self.names else f"says {self.says[0]!r}" if self.says else ""
        return ", ".join(filter(None, [kinds, named, f"{self.seconds:g} s"]))


_SILENT = ("the store", "job's store")


def promise(row: Row) -> Promise:
    """Return what the documentation promises about the ranks that survive ``row``."""
    slack = SILENT_S if row.hosts else SLACK_S
    in_update = row.moment in ("update", "exchange")
    if row.kind == "exception" and (in_update or row.moment == "closure"):
        return Promise(DEATH_S, True, (GroupFailure,))
    if in_update:  # others may wait in a collective of the data plane, which ends as it ends
        waits = DATA_S + (0.0 if row.dies else HARD_S)
        return Promise(waits + slack, not row.hosts, (GroupFailure,), _SILENT if row.hosts else ())
    connected = row.moment not in ("planning", "connecting")
    seconds = DEATH_S if connected and row.kind != "SIGSTOP" else HARD_S + slack
    kinds: tuple[type[BaseException], ...] = (LateRanks,)
    if row.moment == "text":
        kinds = (GroupFailure, LateRanks) if row.hosts else (GroupFailure,)
    return Promise(seconds, not row.hosts, kinds, _SILENT if row.hosts else ())


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank met.

    Attributes:
        error: Its type, or "" when the step was made.
        text: Of the error.
        names: Ranks that it says have failed or are gone, or late where none is gone. A rank whose
            connection broke has not failed, and where one is gone others are kept by that.
        kinds: Names of the error's class and bases.
        at: When, by a clock that all processes share; seconds.
        changed: What was written, which should be nothing.
    """

    error: str
    text: str
    names: tuple[int, ...]
    kinds: tuple[str, ...]
    at: float
    changed: str


@dataclass(frozen=True)
class _Noted(faults.Fault):
    """Writes down when it is met."""

    fault: faults.Fault
    path: Path
    ends_the_process = True

    def meet(self, call: faults.Call) -> Any:
        _note(self.path, time.monotonic())
        return self.fault.meet(call)


def _note(path: Path, number: float) -> None:
    part = path.with_suffix(".part")
    part.write_text(repr(number))
    part.rename(path)  # in one piece, for who looks at any time


def suffer(rank: int, rows: Sequence[Row], folder: str) -> Seen:
    """Make a step in which one rank goes wrong; rows have no ranks in common and run at once."""
    row = next(row for row in rows if rank in row.ranks)
    _note(Path(folder, f"pid {rank}"), os.getpid())
    meshes = {each: DeviceMesh("cpu", list(each.ranks)) for each in rows}  # all ranks make all
    group = meshes[row].get_group()
    optimizer = _optimizer(meshes[row], row.mode)
    if row.moment not in ("planning", "connecting"):
        optimizer.step()
    dist.barrier(group)  # until here with time, since the machine may be busy
    control_group(optimizer)._timeout = HARD_S
    distributed_c10d._set_pg_timeout(timedelta(seconds=DATA_S), group)
    before = snapshot(optimizer)
    fault = faults.as_fault(KINDS[row.kind])
    event = Path(folder, f"event {row.victim}")

    def closure() -> float:
        if row.moment == "text" and rank == row.talker:
            raise OSError("no such batch")
        return 0.0

    owner, name, nth = _place(row, optimizer)
    point = name if owner is None else (owner, name)
    error: BaseException | None = None
    try:
        with inject(point, rank=row.victim, fault=_Noted(fault, event), nth=nth):
            optimizer.step(closure)
    except Exception as raised:
        error = raised
    return _seen(error, optimizer, before)


def _seen(error: BaseException | None, optimizer: Muon, before: Snapshot) -> Seen:
    at, changed, names = time.monotonic(), "", set[int]()
    if isinstance(error, LateRanks):
        names |= set(error.gone or error.ranks)
    if isinstance(error, GroupFailure):
        own = {f.rank for f in error.failures if not says_transport(f.message)}
        names |= own | set(error.gone or error.late_ranks)
    try:
        assert_unchanged(optimizer, before)
    except AssertionError as difference:
        changed = str(difference)
    kind = type(error)
    bases = () if error is None else tuple(base.__name__ for base in kind.__mro__)
    return Seen(
        kind.__name__ if bases else "", str(error or ""), tuple(sorted(names)), bases, at, changed
    )


def _optimizer(mesh: DeviceMesh, mode: Mode) -> Muon:
    torch.manual_seed(0)
    params = [
        nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)], src_data_rank=None))
        for shape in SHAPES
    ]
    optimizer = Muon([(f"p{i}", param) for i, param in enumerate(params)], sharded_mode=mode)
    optimizer.bucket_bytes = BUCKET_BYTES
    optimizer.control_group = control_group(optimizer, timeout=LIVENESS_S)
    for param in params:
        param.grad = param.detach().clone()
    return optimizer


def _place(row: Row, optimizer: Muon) -> tuple[Any, str, int]:
    """Return where the victim goes wrong: whose function, its name, and in which call."""
    if row.moment == "planning":
        return StoreClient, "add", 1
    if row.moment == "connecting":
        return _session, "make_link", 1
    if row.moment == "closure":
        return None, "Muon.step: closure", 1
    if row.moment == "update":
        return MuonRule, "_prepare", 1
    if row.moment == "exchange":
        return _reshard if row.mode == "exact" else _by_owners, "_pack", 2
    channel = control_group(optimizer).channel
    assert channel is not None
    return channel.link, "all_reduce_max", 3


def judged(
    row: Row, seen: Mapping[int, Seen], seconds: Mapping[int, float], *, grace: float
) -> Iterator[str]:
    """Yield what is not as promised, times apart that are exceeded by ``grace`` seconds at most."""
    wanted = promise(row)
    for rank in row.survivors:
        if (met := seen.get(rank)) is None:
            continue  # told already
        if not {kind.__name__ for kind in wanted.kinds} & set(met.kinds):
            yield f"rank {rank} raised {met.error or 'nothing'}: {met.text}"
        if wanted.names and row.victim not in met.names:
            yield f"rank {rank} does not name the rank: {met.text}"
        if innocent := set(met.names) - {row.victim, row.talker if row.moment == "text" else -1}:
            yield f"rank {rank} names {sorted(innocent)}, which did nothing wrong: {met.text}"
        if wanted.says and not any(part in met.text for part in wanted.says):
            yield f"rank {rank} does not say that {wanted.says[0]} is the reason: {met.text}"
        if seconds[rank] > wanted.seconds + grace:
            yield f"rank {rank} took {seconds[rank]:.1f} s"
    for rank, met in seen.items():
        if met.changed:
            yield f"rank {rank} has written: {met.changed}"
        if rank == row.victim and not met.error:
            yield f"rank {rank} has made the step that the others have not"

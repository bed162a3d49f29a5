"""``python -m consensus check``: how this job's ranks would agree, and how long one vote takes.

Start it as you start your training, on the same machines and with the same settings:

    torchrun --nnodes 2 --nproc-per-node 8 ... -m consensus check

Every rank takes part, rank 0 prints.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

import consensus
from consensus._clock import VoteClock
from consensus._sockets import HopLink
from consensus._text import join_ranks
from consensus._transport import StoreLink
from consensus.groups import BACKENDS, SOFT_DEADLINE_S

VOTES = 200
WARM_UP = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to ``parser``."""
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="what carries the votes (default: auto, own connections, else gloo, else the store)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Report on standard output of rank 0; return the exit code.

    Returns:
        0, or 1 when the ranks cannot agree; the error is on standard error of every rank.

    Collectives:
        Those of ``init_process_group``, of planning, and of the votes. Every rank must call.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        print(_alone())
        return 0
    accelerator = _join()
    rank = dist.get_rank()
    try:
        report = _report(arguments.backend, accelerator)
    except consensus.ConsensusError as error:
        print(f"check: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if rank == 0:
        print(report, flush=True)
    dist.destroy_process_group()
    return 0


def _alone() -> str:
    lines = [
        f"{_versions()}",
        "This is a single process: there is nobody to agree with. No group is made, no vote is",
        "sent, and errors come out as they are. To check a job of several ranks, start this with",
        "    torchrun --nproc-per-node 2 -m consensus check",
    ]
    return "\n".join(lines)


def _versions() -> str:
    return f"torch {torch.__version__}, Python {sys.version.split()[0]}"


def _join() -> torch.device:
    """Form the default group as torch would by itself; return the device of the data plane."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and local_ranks <= torch.cuda.device_count():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group()
        return device
    dist.init_process_group("gloo")  # also when ranks would have to share a GPU
    return torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Latencies:
    """Seconds of each message on this rank."""

    votes: list[float]  # as a caller waits for them
    messages: list[float]  # the part of each vote that is spent in its message
    bare: list[float]


def _report(backend: str, accelerator: torch.device) -> str:
    start = time.perf_counter()
    group = consensus.control_group(None, backend=backend).prepare()
    planned = time.perf_counter() - start
    carried_by = _transport_of(group, backend)
    found = _measure(group, accelerator)
    ratio = median(found.messages) / median(found.bare)
    over_ranks = consensus.agree_range([median(found.votes)], group, names=["median"])
    low, high = over_ranks.minimum[0], over_ranks.maximum[0]
    late = f"named after {SOFT_DEADLINE_S:.0f} s, given up after {group.hard_deadline:.0f} s"
    rows = {
        "software": _versions(),
        "ranks": f"{dist.get_world_size()}, {os.environ.get('LOCAL_WORLD_SIZE', '?')} a machine",
        "backends": dist.get_backend_config(),
        "control device": str(group.device),
        "enclosing group": join_ranks(group.ranks),
        "votes go over": f"{carried_by}, ready after {1e3 * planned:.0f} ms",
        "a late rank is": late,
        "one vote": _spread(found.votes),
        "  its message": f"{_spread(found.messages)}, {ratio:.2f} times the bare all_reduce",
        "bare all_reduce": f"{_spread(found.bare)}, int32[1] on {accelerator.type}",
        "": f"{len(found.votes)} of each, interleaved, on rank 0; "
        f"a vote's median is {1e6 * low:.0f} to {1e6 * high:.0f} us over all ranks",
    }
    return "\n".join(f"{name:<16} {value}" for name, value in rows.items())


def _transport_of(group: consensus.ControlGroup, backend: str) -> str:
    link = None if group.channel is None else group.channel.link
    if isinstance(link, StoreLink):
        return "the job's store"
    if isinstance(link, HopLink):
        return "connections between the ranks"
    return "the job's own group" if backend == "inherit" else "a private gloo group"


def _measure(group: consensus.ControlGroup, device: torch.device) -> _Latencies:
    """Time votes and bare all_reduces, interleaved, so that both meet the same disturbances.

    Collectives:
        ``VOTES + WARM_UP`` agreements on ``group`` and as many all_reduces of one int32 on the
        default group.
    """
    flag = torch.zeros(1, dtype=torch.int32, device=device)

    def bare() -> None:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    assert group.channel is not None  # it is prepared, and spans several ranks
    clock = VoteClock(group.channel)
    found = _Latencies([], [], [])
    for _ in range(WARM_UP + VOTES):
        found.votes.append(_seconds(lambda: consensus.any_failed(False, group)))
        found.messages.append(sum(clock.take()))
        found.bare.append(_seconds(bare))
    warm = slice(WARM_UP, None)
    return _Latencies(found.votes[warm], found.messages[warm], found.bare[warm])


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _spread(seconds: list[float]) -> str:
    low, middle, high = (1e6 * value for value in (min(seconds), median(seconds), max(seconds)))
    return f"min {low:.0f}, median {middle:.0f}, max {high:.0f} us"

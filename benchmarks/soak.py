"""Hold thousands of agreements in a row that go wrong in every way, and look at what stays behind.

    python benchmarks/soak.py --write      # a minute or two; writes results/soak_*

Four ranks draw the same faults from one seed: ranks that raise, ranks that disagree or are in other
phases, ranges and sums, blocks in blocks, errors that are swallowed, groups that are made and
dropped. No rank dies. Every outcome is compared among the ranks that met; threads, descriptors,
memory and keys of the job's store are counted on the way.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import math
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Of a script the folder is searched too, and torch would take cuda.py in it for NVIDIA's package.
if __name__ == "__main__":
    sys.path.pop(1)

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks._common import Record, environment, markdown_table, write_results
from consensus import (
    ConsensusError,
    GroupFailure,
    agree_range,
    agree_same,
    agree_sum,
    any_failed,
    control_group,
    fail_together,
    preflight,
)
from consensus.testing import run_ranks

WORLD = 4
LOOKS = 10  # how often what is held is counted
LIVENESS_S = 600.0  # a run that takes longer hangs


class Held(NamedTuple):
    """What one rank holds after some votes."""

    votes: int
    threads: int
    descriptors: int
    resident: int  # bytes
    keys: int  # of the job's store, all ranks' together


class Met(NamedTuple):
    """One agreement, as one rank saw it."""

    fault: str  # what was to happen
    ranks: tuple[int, ...]  # that met
    kind: str  # of the outcome
    digest: str  # of all that it said


@dataclass
class Soaked:
    """What one rank saw."""

    met: list[Met] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Scene:
    """One fault, drawn alike on all ranks."""

    draw: random.Random  # the same numbers on all ranks, if all draw equally many
    rank: int
    ranks: tuple[int, ...]
    group: Any  # of these ranks, to agree in

    def some(self) -> tuple[int, ...]:
        """Return some of the ranks, at least one and not all."""
        return tuple(self.draw.sample(self.ranks, self.draw.randint(1, len(self.ranks) - 1)))

    def text(self) -> str:
        """Return some words, of up to some thousand characters."""
        return "ä error " * self.draw.choice((0, 1, 3, 300))


Ranks: TypeAlias = tuple[int, ...]
Fault: TypeAlias = Callable[[Scene], object]


# ---- faults: each is one agreement, or two of which one encloses the other ----


def nothing(scene: Scene) -> object:
    return any_failed(False, scene.group)


def flag(scene: Scene) -> object:
    return any_failed(scene.rank in scene.some(), scene.group)


def exception(scene: Scene) -> object:
    kind = scene.draw.choice((ValueError, OSError, MemoryError, ZeroDivisionError))
    bad, text = scene.some(), scene.text()
    with fail_together("work", scene.group) as together:
        together.same("text", text)
        if scene.rank in bad:
            raise kind(f"{text} on rank {scene.rank}")
    return None


def disagreement(scene: Scene) -> object:
    odd, text = scene.some(), scene.text()
    agree_same([text, scene.rank in odd], scene.group, name="settings")
    return None


def phase_mismatch(scene: Scene) -> object:
    if scene.rank in scene.some():
        return any_failed(False, scene.group)
    return agree_same(1, scene.group, name="step")


def ranges(scene: Scene) -> object:
    number = scene.draw.choice((1, 3, 8, 9, 20))
    odd = scene.some()
    special = scene.draw.choice((math.nan, math.inf, 2**63 - 1, -(2**63), -0.0, 0.5))
    values = [special if scene.rank in odd and i % 3 == 0 else float(i) for i in range(number)]
    found = agree_range(values, scene.group)
    low, high = ([value + 0.0 for value in end] for end in (found.minimum, found.maximum))
    return low, high, found.disagreeing  # -0.0 equals 0.0, and each rank may hold either


def sums(scene: Scene) -> object:
    number, odd = scene.draw.choice((0, 1, 5, 100)), scene.some()
    more = scene.draw.random() < 0.3 and scene.rank in odd
    return agree_sum([scene.rank * 2**40 - i for i in range(number + more)], scene.group)


def unusable(scene: Scene) -> object:
    value: Any = object() if scene.rank in scene.some() else 1
    return agree_same(value, scene.group)


def nested(scene: Scene) -> object:
    """Some leave the outer block while the others are in the inner one, or none does."""
    bad, inside = scene.some(), scene.draw.random() < 0.5
    with fail_together("outer", scene.group):
        if scene.rank in bad and not inside:
            raise OSError(f"outer on rank {scene.rank}")
        with fail_together("inner", scene.group):
            if scene.rank in bad:
                raise OSError(f"inner on rank {scene.rank}")
    return None


def swallowed(scene: Scene) -> object:
    bad = scene.some()
    with fail_together("outer", scene.group):
        try:
            with fail_together("inner", scene.group):
                if scene.rank in bad:
                    raise OSError(f"inner on rank {scene.rank}")
        except GroupFailure:
            pass
    return None


def step(scene: Scene) -> object:
    """A new optimizer, which agrees once or fails to, and is dropped."""
    mesh = control_group(scene.group).agreement_scopes()[0]
    whole = torch.ones(6, 4)
    params = [
        nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
        for _ in range(2)
    ]
    for param in params:
        param.grad = param.detach().clone()
    wrong, bad = scene.draw.choice(("nothing", "closure", "gradient", "lr")), scene.some()
    if wrong == "gradient" and scene.rank in bad:
        params[1].grad = None
    lr = 0.5 if wrong == "lr" and scene.rank in bad else 0.1
    optimizer = torch.optim.SGD([("a", params[0]), ("b", params[1])], lr=lr)

    def closure() -> float:
        if wrong == "closure" and scene.rank in bad:
            raise OSError("no such batch")
        return 0.0

    with preflight(optimizer) as vote:
        vote.closure(closure)
    return vote.skip


FAULTS: tuple[Fault, ...] = (
    nothing,
    flag,
    exception,
    disagreement,
    phase_mismatch,
    ranges,
    sums,
    unusable,
    nested,
    swallowed,
)


# ---- one rank ----


def soak(rank: int, num_votes: int, seed: int) -> Soaked:
    """Hold ``num_votes`` agreements, and compare nothing yet: the caller has what all ranks saw."""
    meshes = {pair: DeviceMesh("cpu", list(pair)) for pair in ((0, 1), (2, 3), (0, 1, 2, 3))}
    mine = [ranks for ranks in meshes if rank in ranks]
    kept = {ranks: control_group(meshes[ranks]) for ranks in mine}
    found, started = Soaked(), time.monotonic()
    every = num_votes // LOOKS
    for number in range(num_votes):
        if number % every == 0:
            found.held.append(_look(number, mine, meshes))
        draw = random.Random(f"{seed} {number}")
        ranks = mine[draw.random() < 0.7]
        # One that is kept, one that is made for the call, or one that votes over the store.
        group: Any = draw.choice((kept[ranks], kept[ranks], meshes[ranks], None))
        if group is None:
            group = control_group(meshes[ranks], backend="store")
        fault = step if number % 20 == 7 else draw.choice(FAULTS)
        found.met.append(_meet(fault, Scene(draw, rank, ranks, group)))
    found.held.append(_look(num_votes, mine, meshes))
    found.seconds = time.monotonic() - started
    return found


def _meet(fault: Fault, scene: Scene) -> Met:
    try:
        kind, said = "agreed", repr(fault(scene))
    except ConsensusError as error:
        kind, said = type(error).__name__, _said(error)
    digest = hashlib.sha256(said.encode("utf-8", "backslashreplace")).hexdigest()[:16]
    return Met(fault.__name__, scene.ranks, kind, digest)


def _said(error: ConsensusError) -> str:
    if not isinstance(error, GroupFailure):
        return str(error)
    # In words it begins with the phase that this very rank was in.
    failures = [(each.rank, each.type_name, each.message, each.phase) for each in error.failures]
    return repr((failures, sorted(error.phases.items()), error.recoverable, error.late_ranks))


def _look(votes: int, mine: Sequence[Ranks], meshes: Mapping[Ranks, DeviceMesh]) -> Held:
    if votes:
        for ranks in mine:  # some of what they vote on may have been dropped after a failure
            for backend in ("auto", "store"):
                any_failed(False, control_group(meshes[ranks], backend=backend))
    gc.collect()
    dist.barrier()  # nobody is about to make or drop a key
    store: Any = _get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    descriptors = len(os.listdir("/proc/self/fd"))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # But not where ranks that had to wait have said that they are: how many do depends on load.
    keys = sum("/at/" not in key for key in store.list_keys())
    held = Held(votes, threading.active_count(), descriptors, resident, keys)
    dist.barrier()
    return held


# ---- what all ranks saw ----


def differences(by_rank: Sequence[Soaked]) -> Iterator[str]:
    """Yield where ranks that met did not conclude the same."""
    for number, every in enumerate(zip(*(found.met for found in by_rank), strict=True)):
        for ranks in dict.fromkeys(met.ranks for met in every):
            saw = {rank: every[rank] for rank in ranks}
            if len(set(saw.values())) > 1:
                yield f"agreement {number}: {saw}"


def leaks(found: Soaked, *, resident: int) -> Iterator[str]:
    """Yield what one rank holds at the end beyond what it held after the first of its votes.

    Args:
        found: What it saw.
        resident: Bytes by which memory may grow.
    """
    # The first look is before anything was made, and the next after some of all faults.
    first, last = found.held[1], found.held[-1]
    for name in ("threads", "descriptors", "keys"):
        before, after = getattr(first, name), getattr(last, name)
        if after > before:
            yield f"{name}: {before} after {first.votes} votes, {after} after {last.votes}"
    if last.resident - first.resident > resident:
        grown = (last.resident - first.resident) / 1e6
        yield f"memory grew by {grown:.1f} MB from vote {first.votes} to {last.votes}"


# ---- the report ----

SEED = 20
GROWTH = 8_000_000  # bytes: what the interpreter and the allocator take, whatever the votes

TEXT = """# Agreements in a row that go wrong in every way

{votes} agreements on {world} ranks, {rate:.0f} a second, faults drawn at random. No rank hung.
{verdict}

"""


def report(by_rank: Sequence[Soaked]) -> tuple[str, list[str]]:
    """Return the text of the results, and what is wrong with them."""
    wrong = list(differences(by_rank))
    for rank, found in enumerate(by_rank):
        wrong += [f"rank {rank}: {leak}" for leak in leaks(found, resident=GROWTH)]
    verdict = "Every outcome was the same on all ranks that met, and nothing was left behind."
    if wrong:
        verdict = "**Not as it should be:**\n" + "\n".join(f"- {line}" for line in wrong[:50])
    first = by_rank[0]
    votes = len(first.met)
    text = TEXT.format(votes=votes, world=len(by_rank), rate=votes / first.seconds, verdict=verdict)
    outcomes = Counter((met.fault, met.kind) for met in first.met)
    rows = [(fault, kind, count) for (fault, kind), count in sorted(outcomes.items())]
    text += "What happened, as rank 0 saw it:\n\n"
    text += markdown_table(("fault", "outcome", "agreements"), rows)
    text += (
        "\n\nWhat each rank held; the first look is before anything was made. Of what memory grows"
    )
    text += "\nby, 170 bytes an agreement are this script's own record:\n\n"
    header = ("rank", "after", "threads", "descriptors", "resident, MB", "keys in the store")
    held = [
        (rank, look.votes, look.threads, look.descriptors, f"{look.resident / 1e6:.1f}", look.keys)
        for rank, found in enumerate(by_rank)
        for look in found.held
    ]
    return text + markdown_table(header, held), wrong


def main() -> int:
    """Run it; return 1 if ranks concluded differently or something was left behind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write results/soak_*")
    parser.add_argument("--votes", type=int, default=10_000)
    options = parser.parse_args()
    where = environment(seed=SEED)
    by_rank = run_ranks(soak, WORLD, options.votes, SEED, timeout=LIVENESS_S).values()
    text, wrong = report(by_rank)
    print(text)
    if options.write:
        held = [[look._asdict() for look in each.held] for each in by_rank]
        content: Record = {"wrong": wrong, "held, by rank": held}
        print("written:", write_results("soak", f"{options.votes}-votes", where, content, text))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

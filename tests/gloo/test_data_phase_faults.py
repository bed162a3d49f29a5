"""A rank that fails between agreement and writing, at each stage of every mode: who is told of it.

Either all ranks raise and none writes, or, where not all can hear of it, what is documented: the
rank raises its own error, those who heard stop too, the rest step, and the next agreement finds
out. The same judge looks at runs in which nothing is said, and must find fault with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import consensus
from adapters import Hybrid, Muon
from adapters._base import VotingOptimizer
from adapters._rules import local
from adapters.options import ShardedMode
from consensus.testing import run_ranks
from tests.gloo._cases import DATA_PLANE_S, Met, Recorder, caught, on_ranks
from tests.gloo.data_phase_cases import (
    FIRST,
    LAST,
    MODES,
    ON,
    Calls,
    Fault,
    Mode,
    Run,
    judged,
    mode_of,
    suffer,
    watched,
)
from tests.gloo.step_cases import (
    Pair,
    give_gradients,
    members,
    met_in,
    parameters,
)
from tests.gloo.test_owner_faults import HSDP, ROWS_ON_2, ROWS_ON_3, Meshes, nothing_is_said

pytestmark = pytest.mark.slow


# ---- every stage of every mode ----


def faults_of(mode: Mode, on: Meshes, calls: Sequence[Calls]) -> Iterator[Fault]:
    """Each stage, in its first and last call, on one of the ranks that come to it."""
    size = len(calls)
    for i, ((stage, call), is_heard) in enumerate(mode.heard.items()):
        able = [rank for rank in range(size) if calls[rank].get(stage)]
        bad = able[i // 2 % len(able)]
        peers = range(size)
        if on == HSDP and not mode.by_owners:
            peers = range(bad // 2 * 2, bad // 2 * 2 + 2)
        heard_by = tuple(rank for rank in peers if is_heard and rank != bad)
        is_agreed = len(heard_by) == size - 1 or mode.always_votes
        yield Fault(mode.name, stage, call, bad, heard_by, is_agreed)


class Bench:
    """An optimizer, its twin, and how often each rank comes to each stage."""

    def __init__(self, new: Callable[[], VotingOptimizer]) -> None:
        self._new = new
        self.pair = Pair(new(), new())
        self.pair.healthy_step()
        mine: Calls = {}
        self.pair.give_gradients()
        with watched(mine):
            self.pair.optimizer.step()
        give_gradients(self.pair.twin, self.pair.seed)
        self.pair.twin.step()
        assert self.pair.differences() == []
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        self.calls: list[Calls] = found

    def renew(self) -> None:
        """Put an optimizer that is like the twin in the place of one whose ranks are apart."""
        fresh, twin = self._new(), self.pair.twin
        for (_, param), (_, as_it_is) in zip(members(fresh), members(twin), strict=True):
            with torch.no_grad():
                local(param).copy_(local(as_it_is))
        fresh.load_state_dict(twin.state_dict())
        self.pair = Pair(fresh, twin, self.pair.seed)
        assert self.pair.differences() == []

    def words_of_a_step(self) -> list[int]:
        recorder = Recorder.on(self.pair.optimizer)
        self.pair.give_gradients()
        self.pair.optimizer.step()
        words = list(recorder.words)
        give_gradients(self.pair.twin, self.pair.seed)
        self.pair.twin.step()
        return words if not recorder.sums else []

    def suffer(self, rank: int, fault: Fault) -> Run:
        run = suffer(rank, self.pair, fault, self.calls[rank].get(fault.stage, 0) or 1)
        if not fault.is_agreed:
            self.renew()
        return run


@dataclass(frozen=True)
class Suffered:
    """What one rank met in all modes on one layout."""

    runs: list[Run]
    voted: list[Run]  # with a vote before writing
    words: dict[str, tuple[list[int], list[int]]]  # of a healthy step's votes: without, and with


def everything(rank: int, on: Meshes) -> Suffered:
    """One start of processes for all modes: the start is the dear part."""
    mesh = init_device_mesh("cpu", on[0])
    found = Suffered([], [], {})
    for mode in MODES:
        bench = Bench(partial(mode.on, mesh, on[1]))
        faults = list(faults_of(mode, on, bench.calls))
        # Every other stage, to save time: on three ranks those that two leave out.
        faults = faults[ON.index(on) % 2 :: 2]
        found.runs.extend(bench.suffer(rank, fault) for fault in faults)
        words = bench.words_of_a_step()
        bench.pair.optimizer.commit_vote = bench.pair.twin.commit_vote = True
        found.words[mode.name] = words, bench.words_of_a_step()
        # Of the faults that all hear of in any case, one will do.
        for fault in [fault for fault in faults if not fault.is_agreed] + faults[:1]:
            others = tuple(set(range(mesh.size())) - {fault.rank})
            found.voted.append(bench.suffer(rank, replace(fault, heard_by=others, is_agreed=True)))
    return found


@cache
def suffered(on: Meshes) -> tuple[Suffered, ...]:
    size = math.prod(on[0])
    return run_ranks(everything, size, on, timeout=100.0, group_timeout=DATA_PLANE_S).values()


@pytest.mark.parametrize("on", ON, ids=str)
def test_all_stop_or_those_who_heard_and_the_next_step_finds_out(on: Meshes) -> None:
    by_rank = [each.runs for each in suffered(on)]
    assert judged(by_rank) == {}
    faults = [run.fault for run in by_rank[0]]
    assert len(faults) >= sum(len(mode.heard) // 2 for mode in MODES)
    assert {fault.rank for fault in faults} == set(range(math.prod(on[0])))
    assert {fault.is_agreed for fault in faults} == {True, False}


def test_each_stage_of_each_mode_has_been_tried_on_rows() -> None:
    tried = [run.fault for on in (ROWS_ON_2, ROWS_ON_3) for run in suffered(on)[0].runs]
    stages = {(mode.name, *each) for mode in MODES for each in mode.heard}
    assert {(each.mode, each.stage, each.call) for each in tried} == stages


@pytest.mark.parametrize("on", ON, ids=str)
def test_with_a_vote_before_writing_all_stop_at_any_stage(on: Meshes) -> None:
    by_rank = [each.voted for each in suffered(on)]
    assert judged(by_rank) == {}
    assert {run.fault.mode for run in by_rank[0]} == {mode.name for mode in MODES}


@pytest.mark.parametrize("on", ON, ids=str)
def test_that_vote_is_one_more_message_of_two_words(on: Meshes) -> None:
    expected = {mode.name: ([2] * (1 + mode.always_votes), [2, 2]) for mode in MODES}
    for each in suffered(on):
        assert each.words == expected


# ---- an interrupt ----

INTERRUPTS: dict[Meshes, tuple[tuple[str, str], ...]] = {
    # First those that not all hear of: who agrees that it is interrupted leaves for good.
    ROWS_ON_3: (("Gefen", "compute"), ("Muon", "own part"), ("Muon", "pack")),
    HSDP: (("GefenMuon", "quantize"), ("Hybrid of Gefens by owners", "compute")),
}


def fault_in(bench: Bench, name: str, stage: str, on: Meshes) -> Fault:
    faults = faults_of(mode_of(name), on, bench.calls)
    return [fault for fault in faults if fault.stage == stage][-1]


def interrupted(rank: int, on: Meshes) -> list[Run]:
    mesh, found = init_device_mesh("cpu", on[0]), []
    for name, stage in INTERRUPTS[on]:
        bench = Bench(partial(mode_of(name).on, mesh, on[1]))
        fault = replace(fault_in(bench, name, stage, on), error=KeyboardInterrupt)
        found.append(bench.suffer(rank, fault))
    return found


@pytest.mark.parametrize("on", INTERRUPTS, ids=str)
def test_an_interrupt_is_a_failure_like_any_other_to_the_peers(on: Meshes) -> None:
    by_rank = on_ranks(interrupted, math.prod(on[0]), on)
    assert judged(by_rank) == {}
    assert [run.fault.is_agreed for run in by_rank[0]][-1]


# ---- meshes that overlap ----

# Buckets are taken in the order of (0, 1), (0, 2), (1, 2): who hears tells those who come later.
IN_A_RING = (
    Fault("a ring", "pack", FIRST, 0, heard_by=(1, 2)),
    Fault("a ring", "pack", LAST, 0, heard_by=(1, 2)),
    Fault("a ring", "pack", FIRST, 1, heard_by=(0, 2)),
    Fault("a ring", "pack", LAST, 1, heard_by=(2,)),
    Fault("a ring", "pack", FIRST, 2, heard_by=(0, 1)),
    Fault("a ring", "pack", LAST, 2, heard_by=(1,)),
    Fault("a ring", "own part", FIRST, 1, heard_by=(2,)),
    Fault("a ring", "own part", LAST, 0, heard_by=()),
)


def of_a_ring(rank: int) -> Callable[[], Muon]:
    meshes = {pair: DeviceMesh("cpu", list(pair)) for pair in [(0, 1), (1, 2), (0, 2)]}

    def new() -> Muon:
        named = [
            (f"matrix of {ranks}", param)
            for ranks, mesh in meshes.items()
            if rank in ranks
            for param in parameters({"q": (6, 4)}, mesh).values()
        ]
        return Muon(named, lr=0.02)

    return new


def in_a_ring(rank: int) -> list[Run]:
    new, found = of_a_ring(rank), []
    for fault in IN_A_RING:
        bench = Bench(new)
        found.append(suffer(rank, bench.pair, fault, bench.calls[rank][fault.stage]))
    return found


def test_all_may_have_heard_without_knowing_that_all_have() -> None:
    assert judged(on_ranks(in_a_ring, 3)) == {}


# Muon's half on the first two ranks, AdamW's on all three. Owners see that not all are in a crew.
IN_A_HALF: dict[ShardedMode, tuple[Fault, ...]] = {
    "exact": (
        Fault("a half", "moments", LAST, 0, heard_by=(1,)),
        Fault("a half", "moments", LAST, 2, heard_by=()),
    ),
    "distributed": (
        Fault("a half", "moments", LAST, 0, is_agreed=True),
        Fault("a half", "moments", LAST, 2, is_agreed=True),
        Fault("a half", "views", LAST, 1, is_agreed=True),
    ),
}


def in_a_half(rank: int, mode: ShardedMode) -> list[Run]:
    two, world = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])

    def new() -> Hybrid:
        matrices = parameters({"q": (6, 4)}, two) if rank < 2 else {}
        vectors = parameters({"norm": (7,)}, world)
        return Hybrid(
            matrices.items(), vectors.items(), muon="dense", backup="adamw", sharded_mode=mode
        )

    found = []
    for fault in IN_A_HALF[mode]:
        bench = Bench(new)
        found.append(suffer(rank, bench.pair, fault, bench.calls[rank].get(fault.stage, 1)))
    return found


@pytest.mark.parametrize("mode", IN_A_HALF)
def test_a_rank_without_matrices_is_heard_where_owners_compute(mode: ShardedMode) -> None:
    assert judged(on_ranks(in_a_half, 3, mode)) == {}


def load_in_a_ring(rank: int) -> str:
    optimizer = of_a_ring(rank)()
    give_gradients(optimizer, 1)
    optimizer.step()
    return repr(caught(lambda: optimizer.load_state_dict(optimizer.state_dict())))


def test_ranks_of_overlapping_meshes_load_their_own_state() -> None:
    assert on_ranks(load_in_a_ring, 3) == ("None",) * 3


# ---- the same when failures are not passed on ----

SILENT = {
    "Muon": "pack",
    "GefenMuon": "quantize",
    "GefenMuon, normuon and cautious": "count",
    "GefenMuon by owners": "orthogonalize",
    "Gefen": "measure",
    "Hybrid of Gefens": "compute",
}


def in_silence(rank: int, on: Meshes) -> list[Run]:
    mesh, found = init_device_mesh("cpu", on[0]), []
    for name, stage in SILENT.items():
        bench = Bench(partial(mode_of(name).on, mesh, on[1]))
        fault = fault_in(bench, name, stage, on)
        with nothing_is_said():
            found.append(suffer(rank, bench.pair, fault, bench.calls[rank][stage]))
    return found


@pytest.mark.parametrize("on", [ROWS_ON_3, HSDP], ids=str)
def test_without_the_bit_peers_write_what_is_wrong(on: Meshes) -> None:
    by_rank = on_ranks(in_silence, math.prod(on[0]), on)
    assert [fault.mode for fault in judged(by_rank)] == list(SILENT)
    for run in itertools.chain(*by_rank):
        assert run.was_struck or (run.met.error is None and run.met.changed)


# ---- ranks that would not vote alike ----


def at_odds(rank: int) -> list[Met]:
    mesh, found = init_device_mesh("cpu", (2,)), []
    for name in ("Muon", "Gefen that shares nothing", "Hybrid of Gefens by owners"):
        pair = Bench(partial(mode_of(name).on, mesh, ROWS_ON_2[1])).pair
        pair.give_gradients()
        pair.optimizer.commit_vote = rank == 1
        met = met_in(pair.optimizer, pair.optimizer.step)
        pair.optimizer.commit_vote = False
        error = caught(pair.step)
        found.append(replace(met, then=(repr(error),) if error else tuple(pair.differences())))
    return found


def test_ranks_that_would_not_all_vote_before_writing_disagree() -> None:
    for met in itertools.chain(*on_ranks(at_odds, 2)):
        assert isinstance(met.error, consensus.Disagreement)
        assert "commit_vote" in met.text
        assert (met.changed, met.left, met.then) == ("", (), ())

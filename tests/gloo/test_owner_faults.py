"""A rank that fails among the exchanges of a step by owners: all raise, none writes.

The same judge looks at runs in which a failure is not passed on, and must find fault with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import consensus
from adapters import GefenMuon, Muon, _muon_rule
from adapters._data_phase import DataPhase
from adapters._exchange import Courier
from adapters._owners import Round
from adapters.options import ShardedMode
from tests.gloo._cases import Met, caught, on_ranks
from tests.gloo.step_cases import Pair, Shapes, met_in, parameters

pytestmark = pytest.mark.slow

# Of each kind one for each owner, of equal work. Uneven rows, and fewer rows than ranks. The last
# two kinds share the last round.
KINDS = {
    **{"q": ((6, 4), (4, 6)), "up": ((3, 9), (9, 3))},
    **{"v": ((5, 3), (3, 5)), "gate": ((1, 8), (8, 1))},
}
BUCKET_BYTES, NUM_ROUNDS = 50, 3
STAGES = ("pack", "assemble", "orthogonalize", "pack_result", "views")
OF_OWNERS = ("assemble", "orthogonalize", "pack_result")

Meshes = tuple[tuple[int, ...], tuple[Placement, ...]]
ROWS_ON_2: Meshes = ((2,), (Shard(0),))
ROWS_ON_3: Meshes = ((3,), (Shard(0),))
HSDP: Meshes = ((2, 2), (Replicate(), Shard(0)))
ON: tuple[Meshes, ...] = (ROWS_ON_2, ROWS_ON_3, HSDP)


@dataclass(frozen=True)
class Fault:
    """These ranks fail at this stage of this round."""

    stage: str
    in_round: int
    ranks: tuple[int, ...]
    error: type[BaseException] = MemoryError

    @property
    def text(self) -> str:
        return f"{self.error.__name__}: no memory for {self.stage} in round {self.in_round}"

    def strikes(self, rank: int, round_: Round) -> bool:
        """Whether the rank comes to this stage in this round."""
        copy, number = divmod(rank, round_.crew.num_parts)
        if self.stage == "pack":  # for owners of its own copy
            return any(task.copy == copy for task in round_.tasks)
        owns = any((task.copy, task.owner) == (copy, number) for task in round_.tasks)
        return owns or self.stage not in OF_OWNERS


@contextmanager
def struck(rank: int, faults: Sequence[Fault]) -> Iterator[list[str]]:
    """Raise where these faults say; which of them struck is noted."""
    noted: list[str] = []
    made: list[Courier] = []  # one for each round
    current = 0  # the round that this rank works on

    def failing(fault: Fault, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal current
            if isinstance(args[0], Courier):
                current = made.index(args[0])
            if rank in fault.ranks and current == fault.in_round:
                noted.append(fault.text)
                raise fault.error(fault.text.partition(": ")[2])
            return call(*args, **kwargs)

        return wrapped

    begin, views = Courier.__init__, Courier.views

    def beginning(self: Courier, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        begin(self, *args, **kwargs)

    def viewing(self: Courier) -> Any:
        nonlocal current
        current = made.index(self)
        return views(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Courier, "__init__", beginning)
        patch.setattr(Courier, "views", viewing)
        for fault in faults:
            owner: Any = _muon_rule if fault.stage == "orthogonalize" else Courier
            patch.setattr(owner, fault.stage, failing(fault, getattr(owner, fault.stage)))
        yield noted


def matrices_on(mesh: DeviceMesh) -> Shapes:
    """Matrices that take so many rounds on a mesh of any size."""
    return {
        f"{name} {owner}": either[owner % 2]
        for name, either in KINDS.items()
        for owner in range(mesh.size())
    }


def pair_on(mesh: DeviceMesh, placements: Sequence[Placement], cls: Any = Muon) -> Pair:
    made = []
    for _ in range(2):
        named = parameters(matrices_on(mesh), mesh, placements).items()
        made.append(cls(named, lr=0.02, sharded_mode="distributed"))
        made[-1].bucket_bytes = BUCKET_BYTES
    return Pair(*made)


@dataclass(frozen=True)
class Run:
    """What one rank met under some faults."""

    faults: tuple[Fault, ...]
    met: Met
    struck: list[str] = field(default_factory=list)


def suffer(rank: int, pair: Pair, faults: tuple[Fault, ...]) -> Run:
    """Make a step under these faults; then a healthy one, which must be the twin's."""
    pair.give_gradients()
    with struck(rank, faults) as noted:
        met = met_in(pair.optimizer, pair.optimizer.step)
    if any(fault.error is KeyboardInterrupt for fault in faults):
        return Run(faults, met, noted)  # who is interrupted leaves for good
    error = caught(pair.step)
    then = (repr(error),) if error else tuple(pair.differences())
    return Run(faults, replace(met, then=then), noted)


def rounds_of(pair: Pair) -> list[Round]:
    (rule,) = pair.optimizer._rules
    assert isinstance(rule, _muon_rule.MuonRule)
    return [lines.round for lines in rule._lines]


def possible(pair: Pair, faults: Sequence[Fault]) -> list[tuple[Fault, ...]]:
    """Those that strike each of their ranks."""
    rounds = rounds_of(pair)
    assert len(rounds) == NUM_ROUNDS
    return [
        (fault,)
        for fault in faults
        if all(fault.strikes(rank, rounds[fault.in_round]) for rank in fault.ranks)
    ]


def all_faults(pair: Pair, size: int, error: type[BaseException]) -> list[tuple[Fault, ...]]:
    product = itertools.product(STAGES, range(NUM_ROUNDS), range(size))
    return possible(pair, [Fault(stage, at, (bad,), error) for stage, at, bad in product])


def every_fault(rank: int, on: Meshes, cls: Any) -> list[Run]:
    mesh, placements = init_device_mesh("cpu", on[0]), on[1]
    pair = pair_on(mesh, placements, cls)
    pair.healthy_step()
    return [suffer(rank, pair, each) for each in all_faults(pair, mesh.size(), MemoryError)]


def interrupted(rank: int, on: Meshes, stage: str, bad: int) -> list[Run]:
    """One interrupt, in the last round in which the rank comes to this stage."""
    mesh, placements = init_device_mesh("cpu", on[0]), on[1]
    pair = pair_on(mesh, placements)
    pair.healthy_step()
    some = all_faults(pair, mesh.size(), KeyboardInterrupt)
    *_, last = [each for each in some if (each[0].stage, each[0].ranks) == (stage, (bad,))]
    return [suffer(rank, pair, last)]


def problems(runs: Sequence[Run]) -> list[str]:
    """Judge what the ranks met under the same faults."""
    (faults,) = {run.faults for run in runs}
    found = []
    for rank, (met, noted) in enumerate((run.met, run.struck) for run in runs):
        own = [fault for fault in faults if rank in fault.ranks]
        interrupted = any(fault.error is KeyboardInterrupt for fault in own)
        expected = KeyboardInterrupt if interrupted else consensus.GroupFailure
        if noted != [fault.text for fault in own]:
            found.append(f"rank {rank} was struck by {noted}")
        if type(met.error) is not expected:
            found.append(f"rank {rank}: {met.text}")
        elif isinstance(met.error, consensus.GroupFailure):
            told = [(each.rank, f"{each.type_name}: {each.message}") for each in met.error.failures]
            if told != [(bad, fault.text) for fault in faults for bad in fault.ranks]:
                found.append(f"rank {rank} was told {told}")
            if "step: update failed on rank" not in met.text:
                found.append(f"rank {rank} does not say where: {met.text}")
            if own and met.cause != own[0].text:
                found.append(f"rank {rank} has the cause {met.cause}")
        found += [f"rank {rank}: {what}" for what in (met.changed, *met.left, *met.then) if what]
    return found


def judged(by_rank: Sequence[Sequence[Run]]) -> dict[tuple[Fault, ...], list[str]]:
    found = {runs[0].faults: problems(runs) for runs in zip(*by_rank, strict=True)}
    return {faults: wrong for faults, wrong in found.items() if wrong}


@pytest.mark.parametrize("on", ON, ids=str)
def test_a_failure_anywhere_among_the_exchanges_stops_all_and_nothing_is_written(
    on: Meshes,
) -> None:
    size = math.prod(on[0])
    by_rank = on_ranks(every_fault, size, on, Muon)
    faults = [fault for run in by_rank[0] for fault in run.faults]
    ranks = [(rank,) for rank in range(size)]
    assert {(f.stage, f.ranks) for f in faults} == set(itertools.product(STAGES, ranks))
    assert {fault.in_round for fault in faults} == set(range(NUM_ROUNDS))
    assert judged(by_rank) == {}


@pytest.mark.parametrize("on", [ROWS_ON_3, HSDP], ids=str)
def test_quantised_momenta_are_not_written_either(on: Meshes) -> None:
    assert judged(on_ranks(every_fault, math.prod(on[0]), on, GefenMuon)) == {}


@pytest.mark.parametrize(
    ("stage", "on", "bad"),
    [
        ("pack", ROWS_ON_3, 0),
        ("assemble", HSDP, 3),
        ("orthogonalize", ROWS_ON_3, 1),
        ("pack_result", ROWS_ON_2, 1),
        ("views", HSDP, 2),
    ],
)
def test_an_interrupt_reaches_the_peers_as_a_failure(stage: str, on: Meshes, bad: int) -> None:
    assert judged(on_ranks(interrupted, math.prod(on[0]), on, stage, bad)) == {}


# ---- several ranks at once ----

TOGETHER = (
    (Fault("pack", 0, (0, 1)),),
    (Fault("pack", 1, (0, 1, 2)),),
    (Fault("views", 2, (1, 2)),),
    (Fault("pack", 0, (0,)), Fault("views", 0, (2,))),
    (Fault("pack", 1, (0,)), Fault("views", 2, (1,))),
    (Fault("pack", 2, (0,)), Fault("views", 0, (1,), KeyboardInterrupt)),
)


def together(rank: int) -> list[Run]:
    pair = pair_on(init_device_mesh("cpu", (3,)), (Shard(0),))
    pair.healthy_step()
    return [suffer(rank, pair, faults) for faults in TOGETHER]


def test_all_ranks_that_failed_are_named() -> None:
    """Also one that fails in a later round than the first."""
    assert judged(on_ranks(together, 3)) == {}


# ---- meshes that overlap: who takes part in no exchange with the failing rank hears in a vote ----


def in_a_ring(rank: int) -> list[Run]:
    meshes = {pair: DeviceMesh("cpu", list(pair)) for pair in [(0, 1), (1, 2), (0, 2)]}
    made = []
    for _ in range(2):
        named = [
            (f"{name} of {ranks}", param)
            for ranks, mesh in meshes.items()
            if rank in ranks
            for name, param in parameters({"q": (6, 4), "k": (4, 6)}, mesh).items()
        ]
        made.append(Muon(named, lr=0.02, sharded_mode="distributed"))
    pair = Pair(made[0], made[1])
    pair.healthy_step()
    faults = itertools.product(("pack", "views"), range(2), range(3))
    return [suffer(rank, pair, (Fault(at, which, (bad,)),)) for at, which, bad in faults]


def test_ranks_of_other_meshes_are_told_before_they_write() -> None:
    assert judged(on_ranks(in_a_ring, 3)) == {}


# ---- the same when failures are not passed on ----


@contextmanager
def nothing_is_said() -> Iterator[None]:
    def nothing(self: DataPhase, device: torch.device) -> Tensor:
        return torch.zeros((), dtype=torch.bool, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataPhase, "word", nothing)
        yield


def in_silence(rank: int, on: Meshes) -> list[Run]:
    """One failure at each stage, of new optimizers: their ranks are not in step afterwards."""
    mesh, placements = init_device_mesh("cpu", on[0]), on[1]
    pair = pair_on(mesh, placements)
    pair.healthy_step()
    runs = []
    for faults in all_faults(pair, mesh.size(), MemoryError):
        if faults[0].stage in {run.faults[0].stage for run in runs}:
            continue
        pair = pair_on(mesh, placements)
        pair.healthy_step()
        with nothing_is_said():
            runs.append(suffer(rank, pair, faults))
    return runs


@pytest.mark.parametrize("on", ON, ids=str)
def test_without_the_failure_bit_ranks_write_what_is_wrong(on: Meshes) -> None:
    by_rank = on_ranks(in_silence, math.prod(on[0]), on)
    assert {run.faults[0].stage for run in by_rank[0]} == set(STAGES)
    assert set(judged(by_rank)) == {run.faults for run in by_rank[0]}
    for runs in zip(*by_rank, strict=True):
        for run in runs:  # its peers have stepped, with zeros for an update
            if run.struck:
                assert isinstance(run.met.error, MemoryError)
            else:
                assert run.met.error is None
                assert run.met.changed
            # The next step's agreement finds out.
            assert "updates made" in run.met.then[0]


# ---- before the first exchange ----


def no_room(rank: int, bad: int, mode: ShardedMode) -> Met:
    made, mesh = [], init_device_mesh("cpu", (2,))
    for _ in range(2):
        named = parameters(matrices_on(mesh), mesh).items()
        made.append(Muon(named, lr=0.02, sharded_mode=mode))
    pair = Pair(*made)
    pair.healthy_step()
    pair.give_gradients()

    def reserve(self: DataPhase, label: str, needed: Mapping[torch.device, int]) -> None:
        assert all(needed.values())
        raise MemoryError("no room for exchanges")

    with pytest.MonkeyPatch.context() as patch:
        if rank == bad:
            patch.setattr(DataPhase, "reserve", reserve)
        met = met_in(pair.optimizer, pair.optimizer.step)
    error = caught(pair.step)
    return replace(met, then=(repr(error),) if error else tuple(pair.differences()))


@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_a_rank_without_memory_for_its_exchanges_tells_its_peers(mode: ShardedMode) -> None:
    for met in on_ranks(no_room, 2, 1, mode):
        assert "rank 1: MemoryError: no room for exchanges" in met.text
        assert (met.changed, met.left, met.then) == ("", (), ())

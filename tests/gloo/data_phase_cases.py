"""Each mode in which ranks exchange within a step, its stages, and who hears of a failure there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import consensus
from adapters import (
    Gefen,
    GefenMuon,
    Hybrid,
    Muon,
    _adamw_rule,
    _by_all,
    _gefen_muon_rule,
    _gefen_rule,
    _momenta,
    _muon_rule,
    _reshard,
)
from adapters._base import VotingOptimizer
from adapters._exchange import Courier
from tests.gloo._cases import Met, caught, cause_of
from tests.gloo.step_cases import (
    OTHERS,
    Pair,
    Place,
    Shapes,
    changes,
    contents,
    give_gradients,
    parameters,
)
from tests.gloo.test_owner_faults import (
    HSDP,
    ROWS_ON_2,
    ROWS_ON_3,
    Meshes,
)

# Uneven rows, and fewer rows than ranks; in buckets of 100 bytes, two each.
BUCKET_BYTES = 100
MATRICES: Shapes = {"q": (6, 4), "v": (5, 3), "down": (3, 9), "gate": (1, 8)}

FSDP_OVER_TP: Meshes = ((2, 2), (Shard(0), Shard(1)))
ON: tuple[Meshes, ...] = (ROWS_ON_2, ROWS_ON_3, HSDP, FSDP_OVER_TP)

# What a rank calls at each stage of a step.
STAGES: dict[str, tuple[Any, str]] = {
    "prepare": (_muon_rule.MuonRule, "_prepare"),
    "dense direction": (_muon_rule.MuonRule.pending, "direction"),
    "dense directions": (_muon_rule.MuonRule.pending, "directions"),
    "quantised direction": (_gefen_muon_rule.QuantizedPending, "direction"),
    "pack": (_reshard, "_pack"),
    "assemble": (_by_all, "assemble"),
    "orthogonalize": (_muon_rule, "orthogonalize"),
    "normalize rows": (_muon_rule.MuonRule.pending, "finish"),
    "own part": (_by_all, "own_part"),
    "parcel": (Courier, "pack"),
    "views": (Courier, "views"),
    "count": (_muon_rule, "count_agreeing"),
    "mask": (_muon_rule, "mask_opposed"),
    "start": (_momenta.Momenta, "start"),
    "new momentum": (_momenta, "new_momentum"),
    "quantize": (_momenta, "quantize"),
    "fill": (_reshard, "_fill"),
    "factored measure": (_gefen_rule._Factored, "measure"),
    "measure": (_gefen_rule._Block, "measure"),
    "factored compute": (_gefen_rule._Factored, "compute"),
    "compute": (_gefen_rule._Block, "compute"),
    "moments": (_adamw_rule, "_moments"),
}

# Calls of a rank in one step.
FIRST, LAST = 0, -1

# Who hears of a failure: all ranks of the layout, or nobody as no exchange follows.
Heard = Mapping[tuple[str, int], bool]


def heard(*stages: str, calls: Sequence[int] = (LAST,), by_layout: bool = True) -> Heard:
    return {(stage, call): by_layout for stage in stages for call in calls}


def unheard(*stages: str, calls: Sequence[int] = (LAST,)) -> Heard:
    return heard(*stages, calls=calls, by_layout=False)


BY_ALL = heard("prepare", "pack")
AFTER_GATHER = ("assemble", "orthogonalize", "own part")
NEXT_BUCKET = {**heard(*AFTER_GATHER, calls=[FIRST]), **unheard(*AFTER_GATHER, calls=[LAST])}
BY_OWNERS = heard("prepare", "parcel", "orthogonalize", "views")
MOMENTUM = heard("start", "new momentum", "quantize")
SHARED_SUMS = heard("factored measure", "measure", "fill")
COMPUTE = ("factored compute", "compute")


@dataclass(frozen=True)
class Mode:
    """An optimizer in one of its modes, and who hears of a failure at which stage."""

    name: str
    make: Callable[[DeviceMesh, Place], VotingOptimizer]
    heard: Heard
    by_owners: bool = False  # then all ranks take part in one exchange, copies too
    always_votes: bool = False  # before it writes

    def on(self, mesh: DeviceMesh, placements: Place) -> VotingOptimizer:
        """Return a new optimizer, which takes several rounds or buckets a step."""
        made = self.make(mesh, placements)
        made.bucket_bytes = BUCKET_BYTES
        return made

    def __reduce__(self) -> Any:
        return mode_of, (self.name,)  # functions made in functions do not travel


def _named(mesh: DeviceMesh, on: Place, *, others: bool) -> list[tuple[str, Any]]:
    if not others:
        return list(parameters(MATRICES, mesh, on).items())
    where = [each if each in (Replicate(), Shard(0)) else Replicate() for each in on]
    found: list[tuple[str, Any]] = []
    for name, shape in OTHERS.items():
        found += parameters({name: shape}, mesh, where if len(shape) == 1 else on).items()
    return found


def _of_matrices(cls: Any, **options: Any) -> Any:
    def make(mesh: DeviceMesh, on: Place) -> Any:
        return cls(_named(mesh, on, others=False), lr=0.02, **options)

    return make


def _of_all(mesh: DeviceMesh, on: Place) -> Gefen:
    return Gefen(_named(mesh, on, others=False) + _named(mesh, on, others=True), lr=0.02)


def _hybrid(**options: Any) -> Any:
    def make(mesh: DeviceMesh, on: Place) -> Hybrid:
        halves = [_named(mesh, on, others=each) for each in (False, True)]
        return Hybrid(*halves, lr=0.02, backup_factored_v_2d=True, **options)

    return make


EXACT, OWNERS = {"sharded_mode": "exact"}, {"sharded_mode": "distributed"}
VARIANT = {"normuon": True, "cautious": True}
MODES = (
    Mode("Muon", _of_matrices(Muon), {**heard("dense direction"), **BY_ALL, **NEXT_BUCKET}),
    Mode(
        "GefenMuon",
        _of_matrices(GefenMuon, **EXACT),
        {**MOMENTUM, **heard("quantised direction"), **BY_ALL, **NEXT_BUCKET},
    ),
    Mode(
        "GefenMuon, normuon and cautious",
        _of_matrices(GefenMuon, **EXACT, **VARIANT),
        {
            **heard("start", "quantised direction", "pack", "normalize rows", *AFTER_GATHER),
            **heard("count", "fill"),
            **unheard("mask"),
        },
    ),
    Mode(
        "GefenMuon by owners",
        _of_matrices(GefenMuon, **OWNERS),
        {**MOMENTUM, **heard("quantised direction"), **BY_OWNERS},
        by_owners=True,
    ),
    Mode(
        "GefenMuon by owners, normuon and cautious",
        _of_matrices(GefenMuon, **OWNERS, **VARIANT),
        {**BY_OWNERS, **heard("normalize rows", "count"), **unheard("mask")},
        by_owners=True,
        always_votes=True,  # opposed elements are masked after the exchanges
    ),
    Mode("Gefen", _of_all, {**MOMENTUM, **SHARED_SUMS, **unheard(*COMPUTE)}),
    Mode(
        "Gefen that shares nothing",
        _of_matrices(Gefen, factored_v_2d=False, force_2d_period_one=True),
        unheard("start", "new momentum", "quantize", "measure", "compute"),
    ),
    Mode(
        "Hybrid of Gefens",
        _hybrid(backup="gefen", **EXACT),
        {**SHARED_SUMS, **heard(*COMPUTE, "prepare", "pack"), **unheard("own part")},
    ),
    Mode(
        "Hybrid of Gefens by owners",
        _hybrid(backup="gefen", **OWNERS),
        {**SHARED_SUMS, **heard(*COMPUTE), **BY_OWNERS},
        by_owners=True,
    ),
    Mode(
        "Hybrid of dense Muon and AdamW",
        _hybrid(muon="dense", backup="adamw", **EXACT, **VARIANT),
        {**heard("moments", "dense direction", "normalize rows", "count"), **unheard("mask")},
    ),
    Mode(
        "Hybrid of dense Muon by owners and AdamW",
        _hybrid(muon="dense", backup="adamw", **OWNERS),
        {**heard("moments", "dense directions"), **BY_OWNERS},
        by_owners=True,
    ),
)


def mode_of(name: str) -> Mode:
    return next(mode for mode in MODES if mode.name == name)


# ---- calls ----

Calls = dict[str, int]  # of each stage


@contextmanager
def watched(calls: Calls, *, stage: str = "", at: int = -1, error: Any = None) -> Iterator[None]:
    """Count the calls of each stage; raise in one of them."""

    def watching(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            if name == stage and calls[name] == at + 1:
                raise error(f"no memory for {name}")
            return call(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name, (owner, attribute) in STAGES.items():
            patch.setattr(owner, attribute, watching(name, getattr(owner, attribute)))
        yield


# ---- what a rank meets in a fault, and a judge ----


@dataclass(frozen=True)
class Fault:
    """This rank fails in this call of a stage."""

    mode: str
    stage: str
    call: int  # FIRST or LAST of the rank's in a step
    rank: int
    heard_by: tuple[int, ...] = ()  # of the others
    is_agreed: bool = False  # all ranks know that all know
    error: type[BaseException] = MemoryError

    @property
    def text(self) -> str:
        return f"{self.error.__name__}: no memory for {self.stage}"


@dataclass(frozen=True)
class Run:
    """What one rank met under a fault."""

    fault: Fault
    met: Met
    was_struck: bool
    after: tuple[str, ...] = field(default=())  # how its step, if made, differs from the twin's


def suffer(rank: int, pair: Pair, fault: Fault, num_calls: int) -> Run:
    """Make a step under this fault, and then a healthy one, beside the twin."""
    pair.give_gradients()
    calls: Calls = {}
    at = (num_calls + fault.call) % num_calls if rank == fault.rank else -1
    with watched(calls, stage=fault.stage, at=at, error=fault.error):
        held = contents(pair.optimizer)
        error = caught(pair.optimizer.step)
    changed = "; ".join(changes(held, contents(pair.optimizer)))
    met = Met(error, cause_of(error), changed)
    was_struck = rank == fault.rank and calls.get(fault.stage, 0) > at
    if fault.is_agreed and fault.error is KeyboardInterrupt:
        return Run(fault, met, was_struck)  # who is interrupted leaves for good
    everybody = 1 + len(fault.heard_by) == dist.get_world_size()
    if fault.is_agreed or everybody:
        error = caught(pair.step)
        then = (repr(error),) if error else tuple(pair.differences())
        return Run(fault, replace(met, then=then), was_struck)
    give_gradients(pair.twin, pair.seed)
    pair.twin.step()
    after = tuple(pair.differences()) if met.error is None else ()
    held = contents(pair.optimizer)
    give_gradients(pair.optimizer, pair.seed + 1)
    error = caught(pair.optimizer.step)
    then = (repr(error), *changes(held, contents(pair.optimizer)))
    return Run(fault, replace(met, then=then), was_struck, after)


def problems(runs: Sequence[Run]) -> list[str]:
    """Judge what the ranks met under the same fault."""
    (fault,) = {run.fault for run in runs}
    found = []
    stop = {fault.rank, *fault.heard_by}
    for rank, run in enumerate(runs):
        met = run.met
        said = [f"was struck: {run.was_struck}"] if run.was_struck != (rank == fault.rank) else []
        if fault.is_agreed:
            said += _not_agreed(rank, fault, met)
        elif rank == fault.rank:
            said += [met.text] * (met.text != fault.text)
        elif rank in stop:
            told = isinstance(met.error, RuntimeError) and not isinstance(
                met.error, consensus.ConsensusError
            )
            said += [met.text] * (not told or "set commit_vote = True" not in met.text)
        else:
            said += [f"stopped: {met.text}"] * (met.error is not None)
            said += ["wrote nothing"] * (not met.changed)
        if rank in stop or fault.is_agreed:
            said += [met.changed] * bool(met.changed)
        said += run.after
        if fault.is_agreed or len(stop) == len(runs):
            said += met.then
        else:
            error, *changed = met.then
            found_out = error.startswith("Disagreement") and "updates made" in error
            said += [*changed, *[f"then {error}"] * (not found_out)]
        found += [f"rank {rank}: {what}" for what in said]
    return found


def _not_agreed(rank: int, fault: Fault, met: Met) -> list[str]:
    """What is wrong with a rank's account of a failure that all ranks know of."""
    interrupted = fault.error is KeyboardInterrupt and rank == fault.rank
    if type(met.error) is not (KeyboardInterrupt if interrupted else consensus.GroupFailure):
        return [met.text]
    if not isinstance(met.error, consensus.GroupFailure):
        return []
    told = [(each.rank, f"{each.type_name}: {each.message}") for each in met.error.failures]
    found = [f"was told {told}"] if told != [(fault.rank, fault.text)] else []
    if "step: update failed on rank" not in met.text:
        found.append(f"does not say where: {met.text}")
    if rank == fault.rank and met.cause != fault.text:
        found.append(f"has the cause {met.cause}")
    return found


def judged(by_rank: Sequence[Sequence[Run]]) -> dict[Fault, list[str]]:
    found = {runs[0].fault: problems(runs) for runs in zip(*by_rank, strict=True)}
    return {fault: wrong for fault, wrong in found.items() if wrong}

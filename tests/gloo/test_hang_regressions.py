"""Faults of one rank that used to strand its peers, and proof that the agreement is what helps.

Each fault meets each optimizer twice, in its first step (in which codebooks are learned) and in a
later one; and then again with the agreement switched off. The same judge looks at both. It must
find fault with the second: a rank that waits until its data plane gives up, ranks that end in
different ways, or something written. Otherwise the first run would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import consensus
from consensus.testing import without_agreement
from tests.gloo._cases import Met, caught, on_ranks, tell, wait_for
from tests.gloo.step_cases import KINDS, Kind, Pair, give_gradients, met_in

pytestmark = pytest.mark.slow

STEPPED, SKIPPED = 4.0, 5.0  # losses
STEPS_BEFORE = (0, 2)  # nothing is learned yet; all is

Closure = Callable[[], float]


@dataclass(frozen=True)
class Fault:
    """What goes wrong before a step, and what every rank must say to it."""

    name: str
    prepare: Callable[[int, Pair], Closure | None]  # returns the closure
    says: tuple[str, ...]  # parts of the message, with {title} for the optimizer's class
    error: type[consensus.ConsensusError] = consensus.Disagreement
    strands: bool = False  # without the agreement one rank alone enters the update
    crashes: bool = False  # or both do, with vectors of different lengths, which ends a process


def closure_error(rank: int, pair: Pair) -> Closure:
    def closure() -> float:
        give_gradients(pair.optimizer, pair.seed)  # the backward pass
        if rank == 1:
            raise ValueError("no such batch")
        return STEPPED

    return closure


def set_controls(pair: Pair, **controls: float) -> None:
    for name, value in controls.items():
        setattr(pair.optimizer, name, torch.tensor([value]))


def overflow_on_one_rank(rank: int, pair: Pair) -> None:
    set_controls(pair, found_inf=float(rank == 1))


def amp_on_one_rank(rank: int, pair: Pair) -> None:
    if rank == 1:
        set_controls(pair, found_inf=0.0, grad_scale=8.0)


def different_scales(rank: int, pair: Pair) -> None:
    set_controls(pair, found_inf=0.0, grad_scale=8.0 if rank == 0 else 64.0)


def shared(pair: Pair) -> list[torch.Tensor]:
    params = [param for group in pair.optimizer.param_groups for param in group["params"]]
    return [param for param in params if hasattr(param, "placements")]


def one_gradient_missing(rank: int, pair: Pair) -> None:
    if rank == 1:
        shared(pair)[1].grad = None


def all_gradients_missing(rank: int, pair: Pair) -> None:
    for param in shared(pair) if rank == 1 else ():
        param.grad = None


def overflow_on_all_ranks(pair: Pair) -> Closure:
    set_controls(pair, found_inf=1.0, grad_scale=8.0)
    return lambda: SKIPPED


FAULTS = (
    Fault(
        "a closure fails on one rank",
        closure_error,
        ("{title}.step failed on rank 1", "rank 1: ValueError: no such batch"),
        consensus.GroupFailure,
        strands=True,
    ),
    Fault(
        "an overflow is seen by one rank",
        overflow_on_one_rank,
        ("overflow (found_inf)", "False on rank 0; True on rank 1"),
        strands=True,
    ),
    Fault(
        "one rank alone has AMP controls",
        amp_on_one_rank,
        ("absent on rank 0; False on rank 1", "absent on rank 0; 8.0 on rank 1"),
    ),
    Fault("loss scales differ", different_scales, ("grad_scale", "8.0 on rank 0; 64.0 on rank 1")),
    Fault(
        "a gradient is missing on one rank",
        one_gradient_missing,
        ("gradients: ", "present on rank 0; missing on rank 1"),
        crashes=True,
    ),
    Fault(
        "all gradients are missing on one rank",
        all_gradients_missing,
        ("gradients: ", "present on rank 0; missing on rank 1"),
        strands=True,
    ),
)
RUNS = [(fault, steps) for fault in FAULTS for steps in STEPS_BEFORE]

OPTIMIZERS = [pytest.param(kind, id=kind.name) for kind in KINDS]


def problems(kind: Kind, fault: Fault, mets: Sequence[Met]) -> list[str]:
    """Judge what the ranks met in one step that should not take place."""
    found = [met.text for met in mets if type(met.error) is not fault.error]
    if len({met.text for met in mets}) > 1:
        found.append(f"ranks end differently: {[met.text for met in mets]}")
    says = [part.format(title=kind.title) for part in fault.says]
    found += [f"not a word about {part}" for part in says if part not in mets[0].text]
    for rank, met in enumerate(mets):
        found += [f"rank {rank}: {part}" for part in (met.changed, *met.left, *met.then) if part]
    return found


def prepared(kind: Kind, mesh: DeviceMesh, steps: int) -> Pair:
    pair = Pair.of(kind, mesh)
    for _ in range(steps):
        pair.healthy_step()
    pair.give_gradients()
    return pair


def and_then(met: Met, pair: Pair) -> Met:
    """Make two healthy steps more, and look whether the fault has left a trace."""
    error = caught(pair.healthy_step) or caught(pair.healthy_step)
    return replace(met, then=(repr(error),) if error else tuple(pair.differences()))


def refused(rank: int, kind: Kind) -> list[Met]:
    mesh, found = init_device_mesh("cpu", (2,)), []
    for fault, steps in RUNS:
        pair = prepared(kind, mesh, steps)
        closure = fault.prepare(rank, pair)
        met = met_in(pair.optimizer, partial(pair.optimizer.step, closure))
        found.append(and_then(met, pair))
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_rank_raises_the_same_nothing_changes_and_training_goes_on(kind: Kind) -> None:
    by_rank = on_ranks(refused, 2, kind)
    found = {
        (fault.name, steps): problems(kind, fault, mets)
        for (fault, steps), *mets in zip(RUNS, *by_rank, strict=True)
    }
    assert {run: wrong for run, wrong in found.items() if wrong} == {}


# ---- an overflow that all ranks saw ----


def scaled_step(pair: Pair, closure: Closure, losses: list[float]) -> None:
    losses.append(pair.optimizer.step(closure))
    for name in ("found_inf", "grad_scale"):  # as a scaler does after the step
        delattr(pair.optimizer, name)


def skipped(rank: int, kind: Kind, agree: bool) -> list[tuple[float, Met, int]]:
    """Return the loss, what the step met, and how many agreements it held."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for steps in STEPS_BEFORE:
        pair = prepared(kind, mesh, steps)
        channel = consensus.control_group(pair.optimizer).prepare().channel
        assert channel is not None
        closure = overflow_on_all_ranks(pair)
        before = channel.sequence
        losses: list[float] = []
        with nullcontext() if agree else without_agreement():
            met = met_in(pair.optimizer, partial(scaled_step, pair, closure, losses))
        held = channel.sequence - before
        found.append((losses[0], and_then(met, pair), held))
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_overflow_on_all_ranks_is_skipped_by_all(kind: Kind) -> None:
    assert on_ranks(skipped, 2, kind, True) == ([(SKIPPED, Met(None), 1)] * 2,) * 2


@pytest.mark.parametrize("kind", [pytest.param(KINDS[0]), pytest.param(KINDS[3])])
def test_without_the_agreement_each_rank_skips_on_its_own_word(kind: Kind) -> None:
    assert on_ranks(skipped, 2, kind, False) == ([(SKIPPED, Met(None), 0)] * 2,) * 2


# ---- the same without the agreement ----

HEALTHY_S, STRANDED_S = 30.0, 0.3
ALONE = [(fault, steps) for fault, steps in RUNS if not fault.crashes]


def alone(rank: int, kind: Kind) -> list[Met]:
    """Nobody is released by a peer's end: all wait until all are back."""
    found = []
    for number, (fault, steps) in enumerate(ALONE):
        # Of its own: a group does not work any more when a collective has timed out in it. The
        # axis has a name of its own, or torch would take a mesh like an earlier one for that.
        group: Any = dist.new_group([0, 1], timeout=timedelta(seconds=HEALTHY_S))
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"run {number}",))
        pair = prepared(kind, mesh, steps)
        closure = fault.prepare(rank, pair)
        if fault.strands:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=STRANDED_S), group)
        with without_agreement():
            found.append(met_in(pair.optimizer, partial(pair.optimizer.step, closure)))
        tell(f"rank {rank} is back from {number}")
        wait_for(f"rank {1 - rank} is back from {number}")
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_without_the_agreement_ranks_hang_or_go_apart(kind: Kind) -> None:
    by_rank = on_ranks(alone, 2, kind)
    for (fault, steps), *mets in zip(ALONE, *by_rank, strict=True):
        assert problems(kind, fault, mets) != [], fault.name
        peer, faulty = mets
        if not fault.strands:  # both have stepped, with gradients of different scales
            assert (peer.error, faulty.error) == (None, None)
            assert peer.changed
            assert faulty.changed
        elif kind.moves_data:
            assert "Timed out" in peer.text, (fault.name, steps, peer.text)
            assert kind.title not in peer.text  # and not a word about the reason
            assert peer.changed == ""
        else:  # one rank has stepped alone, as far as its shared parameters go
            assert peer.error is None
            assert peer.changed
            assert peer.changed != faulty.changed

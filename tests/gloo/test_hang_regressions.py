"""Faults of one rank that used to strand its peers, and proof that the agreement is what helps.

Each fault is run twice: as it is, and with the agreement switched off. The second run must hang,
or mix up what the ranks hold; otherwise the first one would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import consensus
from consensus.testing import run_ranks, without_agreement
from tests.gloo._cases import (
    LIVENESS_S,
    Met,
    Trained,
    caught,
    on_ranks,
    refused,
    tell,
    wait_for,
)

pytestmark = pytest.mark.slow

STEPPED, SKIPPED = 4.0, 5.0  # losses


@dataclass(frozen=True)
class Fault:
    """What goes wrong before a step, and what every rank must say to it."""

    name: str
    prepare: Callable[[int, Trained], Callable[[], float] | None]  # returns the closure
    says: tuple[str, ...] = ()  # parts of the message; none: all ranks skip
    error: type[consensus.ConsensusError] | None = None


def closure_error(rank: int, trained: Trained) -> Callable[[], float]:
    def closure() -> float:
        if rank == 1:
            raise ValueError("no such batch")
        return STEPPED

    return closure


def overflow_on_one_rank(rank: int, trained: Trained) -> None:
    trained.optimizer.found_inf = torch.tensor([float(rank == 1)])  # type: ignore[attr-defined]


def amp_on_one_rank(rank: int, trained: Trained) -> None:
    if rank == 1:
        trained.optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
        trained.optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]


def different_scales(rank: int, trained: Trained) -> None:
    trained.optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
    trained.optimizer.grad_scale = torch.tensor(8.0 if rank == 0 else 64.0)  # type: ignore[attr-defined]


def overflow_on_all_ranks(rank: int, trained: Trained) -> Callable[[], float]:
    trained.optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
    trained.optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
    return lambda: SKIPPED


CLOSURE = Fault(
    "a closure fails on one rank",
    closure_error,
    ("Muon.step failed on rank 1", "rank 1: ValueError: no such batch"),
    consensus.GroupFailure,
)
OVERFLOW = Fault(
    "an overflow is seen by one rank",
    overflow_on_one_rank,
    ("overflow (found_inf)", "False on rank 0; True on rank 1"),
    consensus.Disagreement,
)
PRESENCE = Fault(
    "one rank alone has AMP controls",
    amp_on_one_rank,
    (
        "overflow (found_inf)",
        "absent on rank 0; False on rank 1",
        "absent on rank 0; 8.0 on rank 1",
    ),
    consensus.Disagreement,
)
SCALE = Fault(
    "loss scales differ",
    different_scales,
    ("grad_scale", "8.0 on rank 0; 64.0 on rank 1"),
    consensus.Disagreement,
)
SKIP = Fault("an overflow is seen by all ranks", overflow_on_all_ranks)
REFUSED = (CLOSURE, OVERFLOW, PRESENCE, SCALE)


def names(faults: tuple[Fault, ...]) -> list[str]:
    return [fault.name for fault in faults]


def faulty_step(rank: int, fault: Fault) -> Met:
    trained = Trained.on(lr=0.02)
    trained.healthy_step()  # there is state that could be changed
    trained.give_gradients()
    closure = fault.prepare(rank, trained)
    return refused(trained, lambda: trained.optimizer.step(closure))


@pytest.mark.parametrize("fault", REFUSED, ids=names(REFUSED))
def test_every_rank_raises_the_same_and_nothing_changes(fault: Fault) -> None:
    first, second = on_ranks(faulty_step, 2, fault)
    assert first.text == second.text
    assert type(first.error) is fault.error
    assert all(part in first.text for part in fault.says), first.text
    assert (first.changed, second.changed) == ("", "")
    assert (first.left, second.left) == ((), ())
    assert (first.then, second.then) == ((), ())


def skipped_step(rank: int, agree: bool) -> tuple[float, Met, int]:
    """Return the loss, what a step that should skip met, and how many agreements it held."""
    trained = Trained.on(lr=0.02)
    trained.healthy_step()
    trained.give_gradients()
    closure = overflow_on_all_ranks(rank, trained)
    channel = consensus.control_group(trained.optimizer).channel
    assert channel is not None
    before = channel.sequence
    losses: list[float] = []

    def step() -> None:
        losses.append(trained.optimizer.step(closure))
        for name in ("found_inf", "grad_scale"):  # as a scaler does after the step
            delattr(trained.optimizer, name)

    if agree:
        met = refused(trained, step)
        return losses[0], met, channel.sequence - before - 1  # one for the healthy step
    with without_agreement():
        met = refused(trained, step)
    return losses[0], met, channel.sequence - before


def test_an_overflow_on_all_ranks_is_skipped_by_all() -> None:
    assert on_ranks(skipped_step, 2, True) == ((SKIPPED, Met(None), 1),) * 2


def test_without_the_agreement_each_rank_skips_on_its_own_word() -> None:
    assert on_ranks(skipped_step, 2, False) == ((SKIPPED, Met(None), 0),) * 2


def alone_in_the_data_plane(rank: int, fault: Fault) -> str:
    """Rank 1 leaves early and stays alive, so that its end does not release rank 0."""
    trained = Trained.on(lr=0.02)
    trained.give_gradients()
    with without_agreement():
        closure = fault.prepare(rank, trained)
        error = caught(lambda: trained.optimizer.step(closure))
    if rank == 0:
        tell("rank 0 is back")
    wait_for("rank 0 is back")
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("fault", [CLOSURE, OVERFLOW], ids=names((CLOSURE, OVERFLOW)))
def test_without_the_agreement_the_peer_waits_for_the_data_plane_timeout(fault: Fault) -> None:
    ranks = run_ranks(alone_in_the_data_plane, 2, fault, timeout=LIVENESS_S, group_timeout=1.5)
    peer, faulty = ranks.values()
    assert "Timed out" in peer, peer  # and not a word about the reason
    assert "Muon" not in peer
    assert faulty == ("ValueError: no such batch" if fault is CLOSURE else "NoneType: None")


def mixed_up(rank: int, fault: Fault) -> list[str]:
    """Return what differs from a whole step with this rank's own scale."""
    trained = Trained.on(lr=0.02)
    trained.give_gradients()
    fault.prepare(rank, trained)
    scale = float(getattr(trained.optimizer, "grad_scale", 1.0))
    for param in trained.twins.whole:
        assert param.grad is not None
        param.grad /= scale
    with without_agreement():
        trained.optimizer.step()
    trained.reference.step()
    return trained.twins.differences(trained.optimizer, trained.reference)


@pytest.mark.parametrize("fault", [PRESENCE, SCALE], ids=names((PRESENCE, SCALE)))
def test_without_the_agreement_gradients_of_different_scales_are_mixed(fault: Fault) -> None:
    for differences in on_ranks(mixed_up, 2, fault):
        assert "weight 0 of shape (6, 4)" in differences

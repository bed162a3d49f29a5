"""After a failure that all ranks agreed on, training goes on with the numbers of one without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import consensus
from consensus import GroupFailure, control_group, fail_together
from tests.gloo._cases import caught, needs_fsdp_reset, on_ranks
from tests.gloo.wrapped_cases import Place, Wrapped, Wrapper

pytestmark = pytest.mark.slow

Case: TypeAlias = tuple[Wrapper, str]

ANYWHERE = ("told in forward", "all in backward", "NaN norm", "one after clip", "microbatch")
CASES: tuple[Case, ...] = (
    *(("fully_shard", failure) for failure in (*ANYWHERE, "one after backward")),
    *(("fully_shard one unit", failure) for failure in ANYWHERE),
    *(("DDP", failure) for failure in (*ANYWHERE, "one after backward", "one before clip")),
    *(("TP", failure) for failure in (*ANYWHERE, "one after backward")),
)
# HSDP, and FSDP of TP: only what leaves most behind.
CASES_ON_TWO_AXES: tuple[Case, ...] = (
    ("fully_shard", "told in forward"),
    ("fully_shard one unit", "all in backward"),
    ("fully_shard", "microbatch"),
    ("fully_shard of TP", "told in forward"),
    ("fully_shard of TP", "all in backward"),
)


def bad() -> None:
    raise ValueError("bad data")


def nothing() -> None:
    pass


def calls_of(failure: str, trained: Wrapped, fails: bool) -> dict[Place, Callable[[], None]]:
    """Return what a rank does at which place of a step."""
    mine = bad if fails else nothing

    def told() -> None:
        with fail_together("activations", trained.scope):
            mine()

    def before_clipping() -> None:  # which communicates
        with fail_together("backward", trained.scope):
            pass

    def poison() -> None:
        if fails:
            trained.batch.detach()[0, 0] = torch.nan

    def microbatch() -> None:
        trained.accumulate()
        told()

    calls: dict[str, dict[Place, Callable[[], None]]] = {
        "told in forward": {"forward": told},
        "all in backward": {"backward": bad},
        "one after backward": {"end of backward": mine, "clip": before_clipping},
        "NaN norm": {"start": poison},
        "one before clip": {"clip": mine},
        "one after clip": {"after": mine},
        "microbatch": {"start": microbatch},
    }
    return calls[failure]


def recover(trained: Wrapped, error: GroupFailure) -> None:
    """As docs/recovery.md says."""
    consensus.recover(trained.module, error)
    if trained.wrapper == "DDP":
        del trained.model
        trained.model = Wrapped.wrap(trained.module, "DDP", trained.mesh)


@dataclass(frozen=True)
class Seen:
    error: str
    recoverable: bool
    losses: list[float]  # of the steps after it
    expected: list[float]  # the same without a failure
    equal: bool  # parameters and optimizer state, byte for byte


def fails_and_recovers(rank: int, shape: tuple[int, ...], cases: tuple[Case, ...]) -> list[Seen]:
    """Meet one case after the other, in each of which a model and its twin are built."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor")[: len(shape)])
    seen = []
    for number, (wrapper, failure) in enumerate(cases):
        trained, twin = Wrapped.on(mesh, wrapper), Wrapped.on(mesh, wrapper)
        # Parameters of DDP do not say that other ranks hold copies.
        assert control_group(trained.optimizer).is_local == (wrapper == "DDP")
        trained.step()
        twin.step()
        batch = trained.batch.detach().clone()
        calls = calls_of(failure, trained, fails=rank == number % math.prod(shape))

        def step() -> None:
            with fail_together("forward and backward", trained.scope):  # noqa: B023
                trained.backward(calls)  # noqa: B023

        error = caught(step)
        assert isinstance(error, GroupFailure), (wrapper, failure, error)
        trained.batch.detach().copy_(batch)
        if error.recoverable:  # else peers may not even be here
            recover(trained, error)
        losses, expected = ([each.step() for _ in range(2)] for each in (trained, twin))
        equal = all(map(torch.equal, trained.numbers(), twin.numbers()))
        seen.append(Seen(str(error), error.recoverable, losses, expected, equal))
    return seen


@needs_fsdp_reset
@pytest.mark.parametrize(("shape", "cases"), [((2,), CASES), ((2, 2), CASES_ON_TWO_AXES)])
def test_training_goes_on_with_the_numbers_of_a_run_that_never_failed(
    shape: tuple[int, ...], cases: tuple[Case, ...]
) -> None:
    by_rank = on_ranks(fails_and_recovers, math.prod(shape), shape, cases)
    for rank, by_case in enumerate(by_rank):
        for case, seen in zip(cases, by_case, strict=True):
            assert "bad data" in seen.error or "non-finite" in seen.error, case
            assert seen.recoverable, case
            assert seen.losses == seen.expected, (rank, case)
            assert seen.equal, (rank, case)

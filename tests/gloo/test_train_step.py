"""A rank that fails in a real training step under FSDP2: after, inside or before the backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import consensus
from adapters import Muon
from consensus import GroupFailure, fail_together
from consensus.testing import assert_unchanged, run_ranks, snapshot, without_agreement
from tests.gloo._cases import (
    DATA_PLANE_S,
    LIVENESS_S,
    caught,
    cause_of,
    needs_fsdp_reset,
    on_ranks,
    small_model,
)

pytestmark = pytest.mark.slow

PATIENCE_S = 2.0  # how long a rank that failed waits for peers that cannot come

Where = Literal["forward", "backward"]


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ValueError("bad backward")


def fail_in_backward(x: Tensor) -> Tensor:
    failing: Tensor = RaisesInBackward.apply(x)  # type: ignore[no-untyped-call]
    return failing


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


@dataclass
class Training:
    """Two sharded layers, so that there are collectives between them."""

    model: nn.Sequential
    optimizer: Muon
    batch: Tensor

    @classmethod
    def start(cls, rank: int) -> Training:
        model = small_model()
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        batch = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))
        return cls(model, Muon(model.named_parameters(), lr=0.02), batch)

    def loss(self, failing: Where | None = None) -> Tensor:
        hidden: Tensor = self.model[0](self.batch)
        if failing == "forward":
            raise ValueError("bad forward")
        if failing == "backward":
            hidden = fail_in_backward(hidden)
        loss: Tensor = self.model[2](hidden).square().sum()
        return loss

    def whole(self) -> list[Tensor]:
        return [gathered(param) for param in self.model.parameters()]


def gathered(param: Tensor) -> Tensor:
    whole = param.detach()
    assert isinstance(whole, DTensor)
    return whole.full_tensor()


def one_training_step(training: Training, failing: bool = False) -> None:
    """A step with a closure, which fails after its backward, if at all."""

    def closure() -> float:
        training.optimizer.zero_grad()
        loss = training.loss()
        backward(loss)
        if failing:
            raise ValueError("no such metric")
        return loss.item()

    training.optimizer.step(closure)


@dataclass(frozen=True)
class Told:
    text: str
    failed: tuple[int, ...]
    recoverable: bool
    cause: str | None
    changed: str


def closure_fails_on_each_rank(rank: int, world_size: int) -> tuple[list[Told], bool]:
    """Each rank in turn fails after backward; a healthy step follows each time."""
    training, twin = Training.start(rank), Training.start(rank)
    one_training_step(training)
    one_training_step(twin)
    told = []
    for odd in range(world_size):
        before = snapshot(training.optimizer, gradients=False)
        error = caught(lambda: one_training_step(training, failing=rank == odd))  # noqa: B023
        changed = caught(lambda: assert_unchanged(training.optimizer, before))  # noqa: B023
        assert isinstance(error, GroupFailure), error
        failed = tuple(failure.rank for failure in error.failures)
        told.append(
            Told(str(error), failed, error.recoverable, cause_of(error), str(changed or ""))
        )
        one_training_step(training)
        one_training_step(twin)
    equal = all(map(torch.equal, training.whole(), twin.whole()))
    return told, equal


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_closure_that_fails_after_backward_stops_all_and_training_goes_on(
    world_size: int,
) -> None:
    by_rank = on_ranks(closure_fails_on_each_rank, world_size, world_size)
    for rank, (told, equal) in enumerate(by_rank):
        assert equal  # as if the failed steps had never been tried
        for odd, item in enumerate(told):
            assert item.text == by_rank[0][0][odd].text
            assert f"rank {odd}: ValueError: no such metric" in item.text
            assert item.failed == (odd,)
            assert item.recoverable
            assert item.cause == ("ValueError: no such metric" if rank == odd else None)
            assert item.changed == ""


def fails_in_the_data_plane(rank: int, where: Where, bad: int) -> tuple[Told, tuple[int, ...]]:
    """One rank fails where its peers wait in a gather that it will never enter."""
    training = Training.start(rank)
    one_training_step(training)

    def step() -> None:
        with fail_together("train step", training.optimizer, timeout=PATIENCE_S):
            backward(training.loss(where if rank == bad else None))
            training.optimizer.step()

    before = snapshot(training.optimizer, gradients=False)
    error = caught(step)
    changed = caught(lambda: assert_unchanged(training.optimizer, before))
    assert isinstance(error, GroupFailure), error
    failed = tuple(failure.rank for failure in error.failures)
    return (
        Told(str(error), failed, error.recoverable, cause_of(error), str(changed or "")),
        error.late_ranks,
    )


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("world_size", "bad"), [(2, 0), (2, 1), (3, 1)])
def test_a_failure_in_the_data_plane_ends_on_every_rank(
    where: Where, world_size: int, bad: int
) -> None:
    """Nobody waits for the timeout of the data plane: it is longer than this run may take."""
    by_rank = on_ranks(fails_in_the_data_plane, world_size, where, bad)
    others = tuple(rank for rank in range(world_size) if rank != bad)
    own = f"ValueError: bad {where}"
    for rank, (told, late) in enumerate(by_rank):
        assert not told.recoverable
        assert f"rank {bad}: {own}" in told.text  # also on the peers: by the store
        assert told.changed == ""
        if rank == bad:
            assert told.failed == (bad,)
            assert told.cause == own
            assert late == others
        else:
            assert bad in told.failed
            # The first thing a peer reads is what happened, and not that a connection is closed.
            assert own in told.text.splitlines()[1]


def without_agreement_in_the_data_plane(rank: int) -> str:
    training = Training.start(rank)
    with without_agreement():
        error = caught(lambda: backward(training.loss("forward" if rank == 1 else None)))
    return f"{type(error).__name__}: {error}"


def test_without_the_agreement_a_peer_learns_nothing_of_the_reason() -> None:
    peer, bad = on_ranks(without_agreement_in_the_data_plane, 2)
    assert bad == "ValueError: bad forward"
    assert "bad forward" not in peer
    assert "RuntimeError" in peer


class Gate(nn.Module):
    """Passes on what it gets, or fails in backward."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        return fail_in_backward(x) if self.fails else x


def all_fail_in_backward(
    rank: int, layers: bool, zero_grad: bool
) -> tuple[list[str], list[list[bool]]]:
    """All ranks fail in the same backward; FSDP2 then leaves gradients None, without an error."""
    gate = Gate()
    model = nn.Sequential(nn.Linear(8, 12, bias=False), gate, nn.Linear(12, 6, bias=False))
    for module in (model[0], model[2], model) if layers else (model,):
        fully_shard(module)
    optimizer = Muon(model.named_parameters())
    params = optimizer.param_groups[0]["params"]
    texts, missing = [], []
    for fails in (False, True, False, False):
        gate.fails = fails

        def step() -> None:
            with fail_together("train step", optimizer):
                model(torch.ones(2, 8)).sum().backward()
                missing.append([param.grad is None for param in params])
                optimizer.step()
            optimizer.zero_grad()

        texts.append(str(caught(step)))
        if zero_grad:
            optimizer.zero_grad()
    return texts, missing


@needs_fsdp_reset  # one that cannot be raises in the next forward
@pytest.mark.parametrize("layers", [False, True], ids=["one unit", "a unit a layer"])
def test_a_step_that_finds_no_gradient_anywhere_after_a_failure_is_refused(layers: bool) -> None:
    for texts, missing in on_ranks(all_fail_in_backward, 2, layers, True):
        assert texts[0] == "None"
        assert "ranks 0, 1: ValueError: bad backward" in texts[1]
        assert missing == [[False, False], [True, True], [True, True]]  # so the check is needed
        for text in texts[2:]:
            assert "no parameter has a gradient, in the first step after a failure" in text


@needs_fsdp_reset
def test_a_gradient_left_from_the_failure_does_not_hide_that_the_rest_stands_still() -> None:
    for texts, missing in on_ranks(all_fail_in_backward, 2, True, False):
        assert missing == [[False, False], [True, False], [True, True]]
        assert texts[2] == "None"
        assert "no parameter has a gradient, in the first step after a failure" in texts[3]


def no_gradient_at_first(rank: int) -> list[str]:
    training = Training.start(rank)
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        training.optimizer.step()
    one_training_step(training)
    return [f"{len(training.optimizer.state)} states"]


def test_a_step_without_gradients_is_only_a_warning_when_nothing_failed_before() -> None:
    assert on_ranks(no_gradient_at_first, 2) == (["2 states"],) * 2


def swallowed_and_retried(rank: int) -> list[str]:
    """Each rank retries as often as it likes; ranks that are a step apart are told."""
    training = Training.start(rank)
    one_training_step(training)
    attempts: list[Callable[[], object]] = [lambda: one_training_step(training, rank == 1)]
    if rank == 1:
        attempts.append(lambda: consensus.any_failed(False, training.optimizer))
    else:
        attempts.append(lambda: training.optimizer.step())
    found = [type(caught(attempt)).__name__ for attempt in attempts]
    training.optimizer.zero_grad()
    one_training_step(training)
    return found


def test_a_rank_that_goes_another_way_after_a_failure_is_told() -> None:
    expected = ["GroupFailure", "PhaseMismatch"]
    assert on_ranks(swallowed_and_retried, 2) == (expected, expected)


def peer_is_gone(rank: int) -> str:
    """Rank 1 ends before the step; rank 0 fails in its closure and must see its own error."""
    training = Training.start(rank)
    one_training_step(training)
    if rank == 1:
        return ""

    def closure() -> float:
        raise ValueError("my own")

    return f"{caught(lambda: training.optimizer.step(closure))!r}"


def test_a_rank_keeps_its_own_error_when_its_peer_is_gone() -> None:
    ranks = run_ranks(peer_is_gone, 2, timeout=LIVENESS_S, group_timeout=DATA_PLANE_S)
    text = ranks[0].value or ""
    assert "GroupFailure" in text
    assert "rank 0: ValueError: my own" in text
    assert "rank 1 is gone, its connection broke" in text

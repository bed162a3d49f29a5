"""Exact Muon in a CUDA graph, on shards: the bits of one device, and nothing read on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import consensus
from tests.gloo._cases import Recorder, Trained, on_ranks
from tests.gloo.step_cases import contents
from tests.unit.capture_cases import FakeGraph, NothingIsRead, capture, refused

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ((2,), (Shard(0),)),
    "columns on 3 ranks": ((3,), (Shard(1),)),
    "copies": ((2,), (Replicate(),)),
    "HSDP": ((2, 2), (Replicate(), Shard(0))),
}


def trained_on(layout: str, **options: Any) -> Trained:
    shape, placements = LAYOUTS[layout]
    trained = Trained.on(shape=shape, placements=placements, **options)
    trained.optimizer.param_groups[0]["capturable"] = True  # torch's, beside it, does not know it
    return trained


def captured_step(optimizer: Any) -> None:
    with capture(), NothingIsRead():
        optimizer.step()


def captured(rank: int, layout: str) -> tuple[list[str], list[int]]:
    trained = trained_on(layout)
    trained.healthy_step()
    recorder = Recorder.on(trained.optimizer)
    trained.give_gradients()
    captured_step(trained.optimizer)
    trained.reference.step()
    return trained.differences(), recorder.words


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_captured_step_has_the_bits_of_one_device_and_sends_no_vote(layout: str) -> None:
    size = torch.Size(LAYOUTS[layout][0]).numel()
    assert on_ranks(captured, size, layout) == (([], []),) * size


def overflowing(rank: int, layout: str) -> tuple[bool, bool]:
    """Rank 1 overflows; return whether something changed, and whether a healthy step does."""
    trained = trained_on(layout)
    optimizer: Any = trained.optimizer
    changed = []
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(1), torch.tensor(4.0)
    trained.healthy_step()
    for overflow in (float(rank == 1), 0.0):
        trained.give_gradients()
        before = contents(optimizer)
        optimizer.found_inf, optimizer.grad_scale = torch.full((1,), overflow), torch.tensor(4.0)
        captured_step(optimizer)
        changed.append(contents(optimizer) != before)
    return changed[0], changed[1]


@pytest.mark.parametrize("layout", ["rows", "HSDP"])
def test_an_overflow_on_one_rank_masks_the_writes_of_all(layout: str) -> None:
    size = torch.Size(LAYOUTS[layout][0]).numel()
    assert on_ranks(overflowing, size, layout) == ((False, True),) * size


def scaled(rank: int) -> tuple[bool, float]:
    """The whole of AMP in a capture: a gradient of rank 1 is infinite."""
    trained = trained_on("rows")
    optimizer: Any = trained.optimizer
    trained.healthy_step()
    trained.give_gradients()
    scaler = consensus.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(1), torch.tensor(8.0)
    optimizer.step()  # the warm-up has AMP too
    del optimizer.found_inf, optimizer.grad_scale
    if rank == 1:
        trained.twins.sharded[0].grad.to_local()[0, 0] = float("inf")  # type: ignore[union-attr]
    before = contents(optimizer)
    with capture(), NothingIsRead():
        scaler.step(optimizer)
        scaler.update()
    return contents(optimizer) == before, scaler.get_scale()


def test_a_scaler_in_a_capture_masks_all_ranks_and_halves_all_scales() -> None:
    assert on_ranks(scaled, 2) == ((True, 4.0),) * 2


def replayed(rank: int) -> tuple[str, int]:
    trained = trained_on("rows")
    trained.healthy_step()
    captured_step(trained.optimizer)
    graph = FakeGraph()
    step = consensus.CapturedStep(graph, trained.optimizer)
    step.replay()
    if rank == 1:
        trained.optimizer.param_groups[0]["lr"] = 0.5
    return refused(consensus.GroupFailure, step.replay), graph.replays


def test_a_learning_rate_that_changed_on_one_rank_stops_the_replay_on_all() -> None:
    first, second = on_ranks(replayed, 2)
    assert first == second
    assert "rank 1: RuntimeError: the graph still holds what was captured" in first[0]
    assert "lr of group 0 was 0.001 when captured, is 0.5" in first[0]
    assert first[1] == 1

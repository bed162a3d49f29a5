"""Muon in a real CUDA graph: captured, replayed, masked, refused. Not run on a GPU yet."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import consensus
from adapters import GefenMuon, Muon
from consensus import _capture

pytestmark = pytest.mark.cuda

Params = list[tuple[str, nn.Parameter]]
SHAPES = ((64, 32), (32, 64), (48, 48))


def parameters() -> Params:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"layer.{i}", nn.Parameter(torch.randn(shape, generator=generator).cuda()))
        for i, shape in enumerate(SHAPES)
    ]


def give_gradients(params: Params, seed: int) -> None:
    """Write them where they are, since a graph reads them there."""
    generator = torch.Generator().manual_seed(seed)
    for _, param in params:
        values = torch.randn(param.shape, generator=generator).cuda()
        if param.grad is None:
            param.grad = values
        else:
            param.grad.copy_(values)


def values_of(params: Params, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = [param.detach() for _, param in params]
    found += [optimizer.state[param]["momentum_buffer"] for _, param in params]
    return [value.clone() for value in found]


def warm_up(step: Callable[[], object]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.fixture
def pair() -> tuple[Params, Muon, Params, Muon]:
    """Two that have made the same step; the first is to be captured."""
    ours, twins = parameters(), parameters()
    lr = torch.tensor(0.02, device="cuda")
    optimizer, twin = Muon(ours, lr=lr, capturable=True), Muon(twins, lr=0.02)
    for params, each in ((ours, optimizer), (twins, twin)):
        give_gradients(params, 1)
        warm_up(each.step)
    return ours, optimizer, twins, twin


def test_a_capture_is_seen() -> None:
    seen: list[bool] = []
    x = torch.zeros(1, device="cuda")

    def work() -> None:
        x.add_(1)
        seen.append(_capture.is_capturing())

    work()
    captured(work)
    assert seen == [False, True]


def test_replays_make_the_steps_of_a_twin(pair: tuple[Params, Muon, Params, Muon]) -> None:
    ours, optimizer, twins, twin = pair
    step = consensus.CapturedStep(captured(optimizer.step), optimizer)
    for seed in (2, 3, 4):
        give_gradients(ours, seed)
        give_gradients(twins, seed)
        step.replay()
        twin.step()
    expected = values_of(twins, twin)
    torch.testing.assert_close(values_of(ours, optimizer), expected, rtol=1e-5, atol=1e-6)


def test_a_learning_rate_on_the_device_may_change(pair: tuple[Params, Muon, Params, Muon]) -> None:
    ours, optimizer, twins, twin = pair
    step = consensus.CapturedStep(captured(optimizer.step), optimizer)
    for lr in (0.05, 0.001):
        give_gradients(ours, 2)
        give_gradients(twins, 2)
        optimizer.param_groups[0]["lr"].fill_(lr)
        twin.param_groups[0]["lr"] = lr
        step.replay()
        twin.step()
    expected = values_of(twins, twin)
    torch.testing.assert_close(values_of(ours, optimizer), expected, rtol=1e-5, atol=1e-6)


def test_an_overflow_masks_one_replay_and_not_the_next(
    pair: tuple[Params, Muon, Params, Muon],
) -> None:
    ours, optimizer, _, _ = pair
    found_inf, grad_scale = torch.zeros(1, device="cuda"), torch.full((1,), 4.0, device="cuda")

    def scaled_step() -> None:
        optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale  # type: ignore[attr-defined]
        optimizer.step()

    step = consensus.CapturedStep(captured(scaled_step), optimizer)
    before = values_of(ours, optimizer)
    found_inf.fill_(1.0)
    give_gradients(ours, 2)
    for _, param in ours:
        assert param.grad is not None
        param.grad.mul_(float("inf"))
    step.replay()
    assert all(map(torch.equal, values_of(ours, optimizer), before))
    found_inf.zero_()
    give_gradients(ours, 2)
    step.replay()
    after = values_of(ours, optimizer)
    assert not any(map(torch.equal, after, before))
    assert all(bool(value.isfinite().all()) for value in after)


def test_a_whole_step_with_a_scaler_is_captured() -> None:
    model = nn.Linear(32, 32, bias=False, device="cuda")
    optimizer = Muon(model.named_parameters(), lr=0.02, capturable=True)
    scaler = consensus.GradScaler("cuda", init_scale=8.0, growth_interval=1000)
    inputs = torch.randn(16, 32, device="cuda")

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    warm_up(train)
    step = consensus.CapturedStep(captured(train), optimizer)
    before = model.weight.detach().clone()
    step.replay()
    assert not torch.equal(model.weight, before)
    assert scaler.get_scale() == 8.0
    before = model.weight.detach().clone()
    inputs.fill_(float("inf"))
    step.replay()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 4.0


def refused_in_capture(optimizer: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of an empty graph
        with pytest.raises((RuntimeError, NotImplementedError)) as caught:
            captured(optimizer.step)
    return str(caught.value)


def test_a_capture_without_a_warm_up_is_refused_before_anything_is_computed() -> None:
    params = parameters()
    give_gradients(params, 1)
    optimizer = Muon(params, capturable=True)
    assert "Muon.step: expected an agreed step" in refused_in_capture(optimizer)
    assert not optimizer.state


def test_what_decides_on_the_host_is_refused() -> None:
    params = parameters()
    give_gradients(params, 1)
    optimizer = GefenMuon(params)
    warm_up(optimizer.step)
    assert "GefenMuon: a step cannot be captured" in refused_in_capture(optimizer)


def test_a_replay_after_a_change_is_refused(pair: tuple[Params, Muon, Params, Muon]) -> None:
    ours, optimizer, _, _ = pair
    step = consensus.CapturedStep(captured(optimizer.step), optimizer)
    before = values_of(ours, optimizer)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(RuntimeError, match=r"weight_decay of group 0 was 0\.1 when captured"):
        step.replay()
    assert all(map(torch.equal, values_of(ours, optimizer), before))


def test_a_step_reads_nothing_on_the_host(pair: tuple[Params, Muon, Params, Muon]) -> None:
    """Outside of a capture, without AMP: the learning rate is a number here."""
    _, _, twins, twin = pair
    give_gradients(twins, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        twin.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")

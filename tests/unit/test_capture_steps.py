"""Our optimizers in a CUDA graph: what Muon's step does there, and what is refused before it does.

The host is told that it captures, and the step runs as always; nothing may be read meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import consensus
from adapters import Gefen, GefenMuon, Hybrid, Muon
from adapters._base import VotingOptimizer
from consensus.testing import assert_unchanged, snapshot
from tests.unit.capture_cases import FakeGraph, NothingIsRead, capture, refused

SHAPES = ((6, 4), (4, 6), (3, 3))
Named = list[tuple[str, nn.Parameter]]


def parameters(dtype: torch.dtype = torch.float32) -> Named:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"layer.{i}", nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for i, shape in enumerate(SHAPES)
    ]


def params_of(optimizer: VotingOptimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def give_gradients(optimizer: VotingOptimizer, seed: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params_of(optimizer):
        param.grad = (torch.randn(param.shape, generator=generator) * factor).to(param.dtype)


def values_of(optimizer: VotingOptimizer) -> list[Tensor]:
    found = [param.detach() for param in params_of(optimizer)]
    return [*found, *(optimizer.state[p]["momentum_buffer"] for p in params_of(optimizer))]


def captured_step(optimizer: VotingOptimizer) -> None:
    with capture(), NothingIsRead():
        optimizer.step()


def pair(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Muon, Muon]:
    """Return two optimizers that have made the same step."""
    both = Muon(parameters(dtype), capturable=True, **options), Muon(parameters(dtype), **options)
    for optimizer in both:
        give_gradients(optimizer, 1)
        optimizer.step()
    return both


def set_amp(optimizer: Any, overflow: float, scale: float) -> None:
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(overflow), torch.tensor(scale)


# ---- what Muon does ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"nesterov": False, "ns_schedule": "you5"}])
def test_a_captured_step_has_the_bits_of_an_ordinary_one_and_reads_nothing(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    ours, twin = pair(dtype, lr=0.02, **options)
    for optimizer in (ours, twin):
        give_gradients(optimizer, 2)
    captured_step(ours)
    twin.step()
    assert all(map(torch.equal, values_of(ours), values_of(twin)))


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_a_learning_rate_in_a_tensor_is_not_read(dtype: torch.dtype, rtol: float) -> None:
    ours, twin = pair(dtype, lr=torch.tensor(0.02))
    for optimizer in (ours, twin):
        give_gradients(optimizer, 2)
    captured_step(ours)
    twin.step()
    # The factor is a float32 tensor, not Python's float.
    torch.testing.assert_close(values_of(ours), values_of(twin), rtol=rtol, atol=0.1 * rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scaled_step_unscales_on_the_device(dtype: torch.dtype) -> None:
    ours, twin = pair(dtype, lr=0.02)
    for optimizer in (ours, twin):
        give_gradients(optimizer, 2, factor=96.0)
        set_amp(optimizer, 0.0, 96.0)
    captured_step(ours)
    twin.step()
    assert all(map(torch.equal, values_of(ours), values_of(twin)))


def test_an_overflow_leaves_parameters_and_momenta_as_they_were() -> None:
    ours, _ = pair(lr=torch.tensor(0.02))
    give_gradients(ours, 2, factor=float("inf"))
    set_amp(ours, 1.0, 96.0)
    before = [value.clone() for value in values_of(ours)]
    captured_step(ours)
    assert all(map(torch.equal, values_of(ours), before))


def test_a_gradient_that_is_missing_leaves_its_parameter_alone() -> None:
    ours, twin = pair(lr=0.02)
    for optimizer in (ours, twin):
        give_gradients(optimizer, 2)
        params_of(optimizer)[1].grad = None
    captured_step(ours)
    twin.step()
    assert all(map(torch.equal, values_of(ours), values_of(twin)))


@pytest.mark.parametrize("overflow", [False, True])
def test_a_scaler_hands_an_overflow_to_a_capturable_step(overflow: bool) -> None:
    ours, twin = pair(lr=0.02)
    scales = []
    for optimizer in (ours, twin):
        give_gradients(optimizer, 2, factor=8.0)
        if overflow:
            grad = params_of(optimizer)[0].grad
            assert grad is not None
            grad[0, 0] = float("inf")
        scaler = consensus.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        if optimizer is ours:
            with capture(), NothingIsRead():
                scaler.step(optimizer)
                scaler.update()
        else:
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4.0 if overflow else 8.0] * 2
    assert all(map(torch.equal, values_of(ours), values_of(twin)))


def test_replays_hold_what_was_captured() -> None:
    ours, _ = pair(lr=0.02)
    give_gradients(ours, 2)
    captured_step(ours)
    graph = FakeGraph()
    step = consensus.CapturedStep(graph, ours)
    step.replay()
    ours.load_state_dict(ours.state_dict())  # new tensors, with the same numbers
    said = refused(RuntimeError, step.replay)
    assert "state momentum_buffer of layer.0 has moved to other memory" in said
    assert graph.replays == 1


def test_the_option_is_there_only_if_it_is_asked_for_and_travels_in_a_state_dict() -> None:
    plain, capturable = Muon(parameters()), Muon(parameters(), capturable=True)
    assert "capturable" not in plain.param_groups[0]
    assert not plain._step_supports_amp_scaling
    assert capturable._step_supports_amp_scaling
    other = Muon(parameters())
    other.load_state_dict(capturable.state_dict())
    assert other.param_groups[0]["capturable"] is True
    assert other._step_supports_amp_scaling


# ---- what is refused ----

Make = Callable[..., VotingOptimizer]


def hybrid(params: Named, **options: Any) -> Hybrid:
    return Hybrid(params[:2], params[2:], **options)


KINDS: dict[str, Make] = {"Muon": Muon, "Gefen": Gefen, "GefenMuon": GefenMuon, "Hybrid": hybrid}
LEARNERS = {name: make for name, make in KINDS.items() if name != "Muon"}


def refused_in_capture(kind: type[Exception], optimizer: VotingOptimizer) -> str:
    """Return the text of the error; nothing may have changed."""
    before = snapshot(optimizer)
    with capture():
        said = refused(kind, optimizer.step)
    assert_unchanged(optimizer, before)
    return said


@pytest.mark.parametrize("name", KINDS)
def test_no_optimizer_is_captured_without_a_warm_up(name: str) -> None:
    optimizer = KINDS[name](parameters())
    give_gradients(optimizer, 1)
    said = refused_in_capture(RuntimeError, optimizer)
    assert said.startswith(f"{name}.step: expected an agreed step of this optimizer before")


@pytest.mark.parametrize("name", LEARNERS)
def test_no_optimizer_is_captured_without_its_codebook(name: str) -> None:
    optimizer = LEARNERS[name](parameters(), first_gradient="defer")
    give_gradients(optimizer, 1, factor=0.0)  # nothing to learn from
    optimizer.step()
    give_gradients(optimizer, 2)
    said = refused_in_capture(RuntimeError, optimizer)
    assert said.startswith(f"{name}: ")
    assert "expected a codebook before the capture of a step" in said


def test_the_half_of_a_hybrid_that_has_no_codebook_is_named() -> None:
    optimizer = Hybrid(parameters()[:2], parameters()[2:], muon="dense", first_gradient="defer")
    give_gradients(optimizer, 1, factor=0.0)
    optimizer.step()
    assert "Hybrid: backup half: expected a codebook" in refused_in_capture(RuntimeError, optimizer)


@pytest.mark.parametrize("name", LEARNERS)
def test_optimizers_that_decide_on_the_host_are_not_captured(name: str) -> None:
    optimizer = LEARNERS[name](parameters())
    give_gradients(optimizer, 1)
    optimizer.step()
    said = refused_in_capture(NotImplementedError, optimizer)
    assert "a step cannot be captured in a CUDA graph yet" in said
    assert "make the step outside of the graph" in said


@pytest.mark.parametrize("muon", ["dense", "gefen"])
def test_a_hybrid_with_adamw_is_not_captured(muon: Any) -> None:
    optimizer = Hybrid(parameters()[:2], parameters()[2:], muon=muon, backup="adamw")
    for group in optimizer.param_groups[:1] if muon == "dense" else ():
        group |= {"normuon": False, "capturable": True}
    give_gradients(optimizer, 1)
    optimizer.step()
    half = "backup half: " if muon == "dense" else "Muon half: "
    said = refused_in_capture(NotImplementedError, optimizer)
    assert f"Hybrid: {half}a step cannot be captured" in said


def stepped(**options: Any) -> Muon:
    optimizer = Muon(parameters(), **options)
    give_gradients(optimizer, 1)
    optimizer.step()
    return optimizer


def test_muon_is_not_captured_unless_it_is_capturable() -> None:
    said = refused_in_capture(RuntimeError, stepped())
    assert "capture of step() for an instance of Muon but param_groups' capturable is False" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"normuon": True}, "with normuon=True yet"),
        ({"cautious": True}, "with cautious=True yet"),
        ({"sharded_mode": "distributed"}, 'in sharded_mode="distributed" yet; use "exact"'),
        ({"sharded_mode": "approx"}, 'in sharded_mode="approx" yet; use "exact"'),
    ],
)
def test_options_that_cannot_be_captured_are_named(options: dict[str, Any], says: str) -> None:
    assert says in refused_in_capture(NotImplementedError, stepped(capturable=True, **options))


def test_a_second_agreement_cannot_be_captured() -> None:
    optimizer = stepped(capturable=True)
    optimizer.commit_vote = True
    assert "commit_vote = True asks for" in refused_in_capture(NotImplementedError, optimizer)


def test_a_momentum_that_is_not_there_yet_is_named() -> None:
    optimizer = Muon(parameters(), capturable=True)
    give_gradients(optimizer, 1)
    params_of(optimizer)[2].grad = None
    optimizer.step()
    give_gradients(optimizer, 2)
    said = refused_in_capture(RuntimeError, optimizer)
    assert "expected a momentum of layer.2 before the capture" in said

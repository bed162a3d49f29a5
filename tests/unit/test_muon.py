"""Muon on one process: torch's bits, torch's manners, and options that are checked once."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from adapters import Muon
from adapters._newton_schulz import newton_schulz

SHAPES = ((8, 8), (5, 12), (12, 5), (1, 4), (4, 1), (64, 33))


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(random_tensor(*shape, seed=1, dtype=dtype)) for shape in SHAPES]


def torchs_muon(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, **options)


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    for param in params:
        param.grad = random_tensor(*param.shape, seed=seed, dtype=param.dtype)


def assert_twins(
    ours: torch.optim.Optimizer,
    torchs: torch.optim.Optimizer,
    *,
    steps: int = 10,
) -> None:
    """Step both on equal gradients; parameters and momentum stay equal bit for bit."""
    left = [param for group in ours.param_groups for param in group["params"]]
    right = [param for group in torchs.param_groups for param in group["params"]]
    for step in range(steps):
        set_gradients(left, seed=10 + step)
        set_gradients(right, seed=10 + step)
        ours.step()
        torchs.step()
        for a, b in zip(left, right, strict=True):
            assert torch.equal(a, b), (step, a.shape)
            key = "momentum_buffer"
            assert torch.equal(ours.state[a][key], torchs.state[b][key]), (step, a.shape)


@pytest.mark.parametrize(
    ("dtype", "nesterov"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)],
    ids=str,
)
def test_ten_steps_are_bit_identical_to_torch(dtype: torch.dtype, nesterov: bool) -> None:
    options: dict[str, Any] = {"lr": 0.02, "nesterov": nesterov}
    ours, torchs = parameters(dtype), parameters(dtype)
    assert_twins(Muon(ours, **options), torchs_muon(torchs, **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 1},
        {"lr": torch.tensor(0.02)},
        {"lr": torch.tensor([0.02])},
        {"lr": torch.tensor(0.02, dtype=torch.float64)},
        {"weight_decay": 0.0, "momentum": 0.0},
        {"momentum": 0.8, "nesterov": False, "ns_steps": 3},
        {"ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
        {"ns_coefficients": [2.0, -1.5, 0.5]},
        {"adjust_lr_fn": "original"},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 0},
    ],
    ids=str,
)
def test_every_option_means_what_it_means_in_torch(options: dict[str, Any]) -> None:
    assert_twins(Muon(parameters(), **options), torchs_muon(parameters(), **options), steps=3)


def test_bfloat16_momentum_without_nesterov_is_not_normalised() -> None:
    """torch's own version orthogonalises the buffer in place, and its norm becomes 1."""
    grad = random_tensor(6, 4, seed=2, dtype=torch.bfloat16)
    param = nn.Parameter(random_tensor(6, 4, seed=1, dtype=torch.bfloat16))
    optimizer = Muon([param], lr=0.02, nesterov=False)
    expected, buffer = param.detach().clone(), torch.zeros_like(grad)
    for _ in range(3):
        param.grad = grad.clone()
        optimizer.step()
        buffer = torch.lerp(buffer, grad, 0.05)
        expected.mul_(1 - 0.02 * 0.1).add_(newton_schulz(buffer), alpha=-0.02 * (6 / 4) ** 0.5)
        assert torch.equal(optimizer.state[param]["momentum_buffer"], buffer)
        assert torch.equal(param, expected)


def test_signature_and_groups_are_torchs() -> None:
    ours, torchs = (
        list(inspect.signature(kind.__init__).parameters.values())
        for kind in (Muon, torch.optim.Muon)
    )
    assert [(p.name, p.default, p.kind) for p in ours[: len(torchs)]] == [
        (p.name, p.default, p.kind) for p in torchs
    ]
    added = ["sharded_mode", "ns_schedule", "ns_form"]
    added += ["normuon", "normuon_beta2", "normuon_eps", "cautious", "capturable"]
    assert [p.name for p in ours[len(torchs) :]] == [*added, "control_group"]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(torchs) :])
    params = parameters()
    assert Muon(params).param_groups == torch.optim.Muon(params).param_groups


def test_a_missing_gradient_leaves_a_parameter_alone() -> None:
    first, second = parameters()[:2]
    second.grad = random_tensor(*second.shape, seed=2)
    before = first.detach().clone()
    optimizer = Muon([first, second])
    optimizer.step()
    assert torch.equal(first, before)
    assert list(optimizer.state) == [second]


def test_gradients_are_read_not_written() -> None:
    params = parameters()
    set_gradients(params, seed=3)
    before = [param.grad.clone() for param in params if param.grad is not None]
    optimizer = Muon(params)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(1), torch.tensor(8.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(64), r"Muon only supports 2D parameters.*\[64\].*layers\.0\.bias"),
        (torch.zeros(2, 3, 4), r"Muon only supports 2D parameters.*\[2, 3, 4\].*layers\.0\.bias"),
        (torch.zeros(2, 2, dtype=torch.complex64), r"complex.*layers\.0\.bias is torch\.complex64"),
    ],
    ids=["1-D", "3-D", "complex"],
)
def test_a_parameter_that_is_no_matrix_is_refused_by_name(tensor: Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Muon([("layers.0.bias", nn.Parameter(tensor))])
    optimizer = Muon([("first", parameters()[0])])
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": [("layers.0.bias", nn.Parameter(tensor))]})
    assert optimizer.param_groups[0]["param_names"] == ["first"]
    assert len(optimizer.param_groups) == 1


def test_a_parameter_without_a_name_is_refused_by_position() -> None:
    params = [*parameters()[:2], nn.Parameter(torch.zeros(3))]
    with pytest.raises(ValueError, match="parameter 2"):
        Muon(params)


def test_sparse_gradients_are_refused_and_nothing_is_written() -> None:
    first, second = parameters()[:2]
    first.grad = random_tensor(*first.shape, seed=2)
    second.grad = random_tensor(*second.shape, seed=2).to_sparse()
    optimizer = Muon([first, second])
    before = first.detach().clone()
    with pytest.raises(RuntimeError, match="sparse gradients are not supported"):
        optimizer.step()
    assert torch.equal(first, before)
    assert not optimizer.state


def test_schedulers_drive_it_as_torchs() -> None:
    ours, torchs = Muon(parameters(), lr=0.1), torchs_muon(parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (ours, torchs)]
    for _ in range(3):
        assert_twins(ours, torchs, steps=1)
        for schedule in schedules:
            schedule.step()
    assert ours.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_state_dicts_load_in_both_directions() -> None:
    ours, torchs = Muon(parameters(), lr=0.1), torchs_muon(parameters(), lr=0.3, momentum=0.5)
    set_gradients(torchs.param_groups[0]["params"], seed=4)
    torchs.step()
    ours.load_state_dict(copy.deepcopy(torchs.state_dict()))
    assert ours.param_groups[0]["lr"] == 0.3
    mine, theirs = (each.param_groups[0]["params"] for each in (ours, torchs))
    with torch.no_grad():
        for a, b in zip(mine, theirs, strict=True):
            a.copy_(b)
    assert_twins(ours, torchs, steps=2)
    again = torchs_muon(parameters())
    again.load_state_dict(ours.state_dict())
    assert again.param_groups[0]["momentum"] == 0.5


def test_a_momentum_of_another_shape_is_refused_when_it_is_loaded() -> None:
    params = parameters()[:1]
    optimizer = Muon(params)
    set_gradients(params, seed=1)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0] = {"momentum_buffer": torch.zeros(3, 3)}
    with pytest.raises(ValueError, match=r"the state of parameter 0, .* has shape \(3, 3\)"):
        optimizer.load_state_dict(state)
    assert optimizer.state[params[0]]["momentum_buffer"].shape == params[0].shape


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_goes_on_as_the_original(copied: Any) -> None:
    optimizer = Muon(parameters(), lr=0.1, sharded_mode="approx", control_group=[])
    optimizer.bucket_bytes, optimizer.transport, optimizer.commit_vote = 1000, "p2p", True
    set_gradients(optimizer.param_groups[0]["params"], seed=4)
    optimizer.step()
    twin = copied(optimizer)
    assert twin.sharded_mode == "approx"
    assert (twin.bucket_bytes, twin.transport, twin.commit_vote) == (1000, "p2p", True)
    assert twin.control_group is None
    assert_twins(twin, optimizer, steps=2)


def test_a_saved_file_loads_with_weights_only() -> None:
    optimizer = Muon(parameters())
    set_gradients(optimizer.param_groups[0]["params"], seed=4)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    Muon(parameters()).load_state_dict(torch.load(file, weights_only=True))


def test_named_parameters_keep_their_names() -> None:
    optimizer = Muon((f"layer.{i}", param) for i, param in enumerate(parameters()))
    assert optimizer.param_groups[0]["param_names"][:2] == ["layer.0", "layer.1"]


def test_a_scale_is_folded_into_the_step() -> None:
    """A power of two is exact, so the scaled step has the bits of the unscaled one."""
    ours, torchs = Muon(parameters()), torchs_muon(parameters())
    for step in range(3):
        set_gradients(ours.param_groups[0]["params"], seed=step)
        set_gradients(torchs.param_groups[0]["params"], seed=step)
        for param in ours.param_groups[0]["params"]:
            param.grad *= 1024.0
        ours.found_inf, ours.grad_scale = torch.zeros(1), torch.tensor(1024.0)  # type: ignore[attr-defined]
        ours.step()
        torchs.step()
    for a, b in zip(ours.param_groups[0]["params"], torchs.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)


def test_a_step_that_fails_half_way_writes_nothing() -> None:
    """Options are checked where they enter; one that is set later is found by the arithmetic."""
    params = parameters()[:3]
    set_gradients(params, seed=1)
    optimizer = Muon(params)
    before = [param.detach().clone() for param in params]
    optimizer.param_groups[0]["ns_coefficients"] = (1.0, 2.0)
    with pytest.raises(ValueError, match="unpack"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert not optimizer.state


def test_amp_is_left_to_the_scaler_on_one_process() -> None:
    assert Muon(parameters())._step_supports_amp_scaling is False
    assert "_step_supports_amp_scaling" not in vars(Muon)


@pytest.mark.slow
def test_a_compiled_update_is_one_graph_with_the_same_bits() -> None:
    ours, torchs = Muon(parameters()), torchs_muon(parameters())
    assert_twins(ours, torchs, steps=1)
    counters.clear()
    compiled: Any = torch.compile(ours.step, backend="eager")
    ours.step = compiled  # type: ignore[method-assign]
    assert_twins(ours, torchs, steps=3)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("factors", [{}, {"normuon_beta2": 0.5, "normuon_eps": 1e-3}], ids=str)
def test_one_group_may_normalise_rows_where_the_optimizer_does_not(
    factors: dict[str, float],
) -> None:
    alone, twin = parameters()[0], parameters()[0]
    twin.grad = alone.grad = random_tensor(*alone.shape, seed=2)
    optimizers = (
        Muon([{"params": [alone], "normuon": True}], **factors),  # type: ignore[arg-type]
        Muon([twin], normuon=True, **factors),  # type: ignore[arg-type]
    )
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(alone, twin)
    assert set(optimizers[0].state[alone]) == set(optimizers[1].state[twin])

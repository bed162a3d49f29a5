"""The common step: hooks, closure and AMP as in torch, on one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from adapters import Muon


def parameters() -> list[nn.Parameter]:
    params = [nn.Parameter(torch.eye(3)), nn.Parameter(torch.ones(2, 3))]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def test_a_closure_runs_with_gradients_enabled_and_its_loss_is_returned() -> None:
    param = nn.Parameter(torch.eye(3))
    optimizer = Muon([param], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        torch.autograd.backward(loss)
        return float(loss.detach())

    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
        assert optimizer.step(closure=closure) < 3.0
    assert optimizer.step() is None


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def global_hooks(log: list[str]) -> Iterator[None]:
    handles = [
        register_optimizer_step_pre_hook(lambda *_: log.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: log.append("global post")),
    ]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.usefixtures("global_hooks")
@pytest.mark.parametrize("kind", [Muon, torch.optim.Muon])
def test_hooks_run_in_torchs_order_with_torchs_arguments(
    kind: type[torch.optim.Optimizer], log: list[str]
) -> None:
    optimizer = kind(parameters())  # type: ignore[call-arg]

    def pre(me: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert me is optimizer
        log.append(f"pre {len(args)} {sorted(kwargs)} {torch.is_grad_enabled()}")

    def post(me: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert me is optimizer
        log.append(f"post {len(args)} {sorted(kwargs)} {torch.is_grad_enabled()}")

    optimizer.register_step_pre_hook(pre)
    optimizer.register_step_post_hook(post)
    optimizer.step()
    optimizer.step(lambda: 1.0)
    optimizer.step(closure=lambda: 1.0)
    assert log == [
        *("global pre", "pre 1 [] True", "post 1 [] True", "global post"),
        *("global pre", "pre 2 [] True", "post 2 [] True", "global post"),
        *("global pre", "pre 1 ['closure'] True", "post 1 ['closure'] True", "global post"),
    ]


@pytest.mark.parametrize("kind", [Muon, torch.optim.Muon])
def test_a_pre_hook_may_replace_the_closure(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind(parameters())  # type: ignore[call-arg]
    optimizer.register_step_pre_hook(lambda me, args, kwargs: ((me, lambda: 7.0), {}))
    assert optimizer.step(lambda: 1.0) == 7.0
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda me, args, kwargs: seen.append(args[1]()))
    optimizer.step()
    assert seen == [7.0]


def test_a_pre_hook_that_returns_something_else_is_refused() -> None:
    optimizer = Muon(parameters())
    optimizer.register_step_pre_hook(lambda *_: lambda: 7.0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="must return None or"):
        optimizer.step()


def test_a_wrong_argument_of_step_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="step"):
        Muon(parameters()).step(lambda: 1.0, 2)  # type: ignore[call-overload]


def test_the_profiler_sees_the_step_under_torchs_name() -> None:
    optimizer = Muon(parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert [e.name for e in profile.events() or [] if e.name.startswith("Optimizer.step")] == [
        "Optimizer.step#Muon.step"
    ]


def test_an_overflow_skips_the_step() -> None:
    params = parameters()
    before = [param.detach().clone() for param in params]
    optimizer = Muon(params)
    optimizer.found_inf, optimizer.grad_scale = torch.ones(1), torch.tensor(8.0)  # type: ignore[attr-defined]
    assert optimizer.step(lambda: 5.0) == 5.0
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert not optimizer.state


def test_a_step_that_raises_takes_the_scale_away() -> None:
    """GradScaler would leave it, and the next step would unscale by the wrong value."""
    optimizer = Muon(parameters())
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(1), torch.tensor(8.0)  # type: ignore[attr-defined]

    def closure() -> float:
        raise KeyError("batch")

    with pytest.raises(KeyError, match="batch"):
        optimizer.step(closure)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")

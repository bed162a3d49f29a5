"""The maths of Muon against torch's own, and against what it promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from adapters._newton_schulz import adjust_lr, nesterov_direction, newton_schulz
from adapters._schedules import DEFAULT_COEFFICIENTS, Form, Schedule

SHAPES = [(8, 8), (5, 12), (12, 5), (1, 7), (7, 1), (1, 1), (64, 33), (128, 96)]


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_torchs(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = matrix(*shape).to(dtype)
    expected = _zeropower_via_newtonschulz(x.clone(), DEFAULT_COEFFICIENTS, 5, 1e-7)
    actual = newton_schulz(x)
    assert torch.equal(actual, expected)
    assert actual.stride() == expected.stride()


def test_the_bits_are_torchs_for_a_transposed_matrix() -> None:
    x = matrix(40, 24).T
    expected = _zeropower_via_newtonschulz(x, DEFAULT_COEFFICIENTS, 5, 1e-7)
    assert torch.equal(newton_schulz(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_argument_is_not_written(dtype: torch.dtype) -> None:
    x = matrix(6, 4).to(dtype)
    before = x.clone()
    newton_schulz(x)
    assert torch.equal(x, before)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(newton_schulz(torch.zeros(3, 5)), torch.zeros(3, 5, dtype=torch.bfloat16))


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (48, 16)], ids=str)
def test_singular_values_end_near_one(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(newton_schulz(matrix(*shape)).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_other_coefficients_and_steps_are_used() -> None:
    x = matrix(4, 6)
    cubic = (1.5, -0.5, 0.0)
    expected = _zeropower_via_newtonschulz(x, cubic, 2, 1e-7)
    assert torch.equal(newton_schulz(x, Schedule((cubic, cubic))), expected)


def test_the_direction_is_torchs_average_and_look_ahead() -> None:
    grad, buffer = matrix(4, 6, seed=1), matrix(4, 6, seed=2)
    average = buffer.clone().lerp_(grad, 1 - 0.9)
    ahead = nesterov_direction(grad, buffer, momentum=0.9, nesterov=True)
    assert torch.equal(ahead, grad.lerp(average, 0.9))
    assert torch.equal(nesterov_direction(grad, buffer, momentum=0.9, nesterov=False), average)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_direction_writes_neither_gradient_nor_momentum(nesterov: bool) -> None:
    grad, buffer = matrix(4, 6, seed=1), matrix(4, 6, seed=2)
    result = nesterov_direction(grad, buffer, momentum=0.9, nesterov=nesterov)
    result.zero_()
    assert torch.equal(grad, matrix(4, 6, seed=1))
    assert torch.equal(buffer, matrix(4, 6, seed=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_direction_of_a_slice_is_the_slice_of_the_direction(dtype: torch.dtype) -> None:
    """Exact mode rests on this: shards of odd lengths end inside a vector register."""
    grad, buffer = matrix(37, 41, seed=1).to(dtype), matrix(37, 41, seed=2).to(dtype)
    whole = nesterov_direction(grad, buffer, momentum=0.95, nesterov=True)
    for first, last in [(0, 1), (1, 18), (18, 37)]:
        rows = slice(first, last)
        part = nesterov_direction(
            grad[rows].clone(), buffer[rows].clone(), momentum=0.95, nesterov=True
        )
        assert torch.equal(part, whole[rows])
        cols = (grad[:, rows].clone(), buffer[:, rows].clone())
        part = nesterov_direction(*cols, momentum=0.95, nesterov=True)
        assert torch.equal(part, whole[:, rows])


@pytest.mark.parametrize("name", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(4, 16), (16, 4), (8, 8)], ids=str)
def test_the_learning_rate_is_torchs(name: str | None, shape: tuple[int, int]) -> None:
    assert adjust_lr(0.3, name, shape) == _adjust_lr(0.3, name, torch.Size(shape))
    as_tensor = adjust_lr(torch.tensor(0.3), name, shape)
    assert float(as_tensor) == float(_adjust_lr(torch.tensor(0.3), name, torch.Size(shape)))  # type: ignore[arg-type]


def test_a_tall_matrix_learns_faster() -> None:
    assert adjust_lr(1.0, "original", (16, 4)) == 2.0
    assert adjust_lr(1.0, "original", (4, 16)) == 1.0
    assert adjust_lr(1.0, "match_rms_adamw", (4, 25)) == pytest.approx(1.0)


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (12, 4)], ids=str)
def test_it_can_be_traced_as_one_graph(form: Form, shape: tuple[int, int]) -> None:
    schedule = Schedule((DEFAULT_COEFFICIENTS,) * 5, form=form)
    compiled: Any = torch.compile(newton_schulz, fullgraph=True, backend="eager")
    assert torch.equal(compiled(matrix(*shape), schedule), newton_schulz(matrix(*shape), schedule))

"""The gram form of Newton-Schulz: the polynomial of the standard form, with fewer products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import GefenMuon, Hybrid, Muon
from adapters._newton_schulz import (
    DEFAULT_SCHEDULE,
    SINGLE,
    newton_schulz,
    schedule_of,
    take_steps,
)
from adapters._schedules import SCHEDULES, Schedule, stretches

GRAM = replace(DEFAULT_SCHEDULE, form="gram")
EVERY = {"default": DEFAULT_SCHEDULE, **SCHEDULES}
# Of the norm. Either form is off by rounding, the standard one by 0.5 to 2.7 % (polar5 the most).
APART = {"default": 0.05, "polar5": 0.1}


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- the maths ----


@pytest.mark.parametrize("name", EVERY)
def test_in_float64_both_forms_are_one_polynomial(name: str) -> None:
    x = matrix(12, 40).double()
    x /= x.norm()
    schedule, shape = EVERY[name], (12, 40)
    expected = take_steps(x, stretches(schedule, shape), SINGLE)
    actual = take_steps(x, stretches(replace(schedule, form="gram"), shape), SINGLE)
    assert torch.allclose(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(64, 128), (300, 100), (32, 256)], ids=str)
def test_in_bfloat16_the_forms_differ_by_rounding(shape: tuple[int, int], name: str) -> None:
    x = matrix(*shape)
    standard = newton_schulz(x, EVERY[name]).float()
    gram = newton_schulz(x, replace(EVERY[name], form="gram")).float()
    assert not torch.equal(gram, standard)
    assert (gram - standard).norm() < APART.get(name, 0.02) * standard.norm()


@pytest.mark.parametrize("shape", [(12, 12), (12, 23), (23, 12)], ids=str)
def test_what_is_nearly_square_has_the_bits_of_the_standard_form(shape: tuple[int, int]) -> None:
    x = matrix(*shape)
    assert torch.equal(newton_schulz(x, GRAM), newton_schulz(x))


def test_twice_as_long_as_wide_is_long_enough() -> None:
    x = matrix(12, 24)
    assert not torch.equal(newton_schulz(x, GRAM), newton_schulz(x))


def test_a_tall_matrix_is_a_wide_one_transposed() -> None:
    x = matrix(16, 48)
    assert torch.equal(newton_schulz(x.T, GRAM), newton_schulz(x, GRAM).T)


def test_steps_that_grow_too_much_are_taken_alone() -> None:
    x = matrix(8, 32)
    steep = Schedule(((5.0, -10.0, 6.0), (5.0, -10.0, 6.0)), form="gram")
    assert torch.equal(newton_schulz(x, steep), newton_schulz(x, Schedule(steep.steps)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_argument_is_not_written(dtype: torch.dtype) -> None:
    x = matrix(6, 24).to(dtype)
    before = x.clone()
    newton_schulz(x, GRAM).zero_()
    assert torch.equal(x, before)


SHAPES = [(3, 9), (9, 3), (1, 7), (7, 1), (1, 1), (0, 5), (5, 0), (0, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zeros_stay_zeros(shape: tuple[int, int]) -> None:
    found = newton_schulz(torch.zeros(shape), GRAM)
    assert torch.equal(found, torch.zeros(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize("shape", [(1, 7), (7, 1)], ids=str)
def test_one_row_keeps_its_direction(shape: tuple[int, int]) -> None:
    x = matrix(*shape)
    found = newton_schulz(x, GRAM).float()
    assert torch.allclose(found / found.norm(), x / x.norm(), atol=0.01)
    assert 0.6 < found.norm() < 1.3


def test_nan_comes_out_as_nan() -> None:
    x = matrix(4, 16)
    x[2, 3] = float("nan")
    assert newton_schulz(x, GRAM).isnan().all()


def test_no_step_leaves_the_normalised_matrix() -> None:
    x = matrix(4, 16)
    assert torch.equal(newton_schulz(x, Schedule((), form="gram")), newton_schulz(x, Schedule(())))


# ---- the option ----


def named(*shapes: tuple[int, ...]) -> list[tuple[str, nn.Parameter]]:
    return [(f"layers.{i}", nn.Parameter(matrix(*shape))) for i, shape in enumerate(shapes)]


MAKE: dict[str, Callable[..., Any]] = {
    "Muon": Muon,
    "GefenMuon": GefenMuon,
    "Hybrid": Hybrid,
    "Hybrid, dense": lambda params, **options: Hybrid(params, muon="dense", **options),
}


@pytest.mark.parametrize("name", MAKE)
def test_it_stands_in_the_groups_only_if_asked_for(name: str) -> None:
    params = named((8, 32), (4,)) if name.startswith("Hybrid") else named((8, 32))
    make = MAKE[name]
    for options in ({}, {"ns_form": "standard"}):
        assert all("ns_form" not in group for group in make(params, **options).param_groups)
    groups = make(params, ns_form="gram").param_groups
    assert [group.get("ns_form") for group in groups] == ["gram", None][: len(groups)]


@pytest.mark.parametrize("name", MAKE)
def test_it_is_kept_by_a_state_dict(name: str) -> None:
    optimizer = MAKE[name](named((8, 32)), ns_form="gram")
    fresh = MAKE[name](named((8, 32)))
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups[0]["ns_form"] == "gram"


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("form", ["fast", "Gram", None, True], ids=str)
def test_a_form_that_there_is_not_is_refused(name: str, form: object) -> None:
    with pytest.raises(ValueError, match=rf"ns_form: .*'standard' or 'gram', got {form!r}"):
        MAKE[name](named((8, 32)), ns_form=form)


def test_a_misspelt_option_is_refused() -> None:
    optimizer = Muon(named((8, 32)))
    group = {"params": [("a", nn.Parameter(torch.eye(2)))], "ns_forms": "gram"}
    with pytest.raises(ValueError, match=r"did you mean ns_form\?"):
        optimizer.add_param_group(group)


def test_a_group_changed_to_a_form_that_there_is_not_is_refused_in_the_step() -> None:
    params = named((8, 32))
    optimizer = Muon(params)
    before = params[0][1].detach().clone()
    params[0][1].grad = matrix(8, 32, seed=1)
    optimizer.param_groups[0]["ns_form"] = "fast"
    with pytest.raises(ValueError, match=r"ns_form must be one of .*'gram'.*'fast'"):
        optimizer.step()
    assert torch.equal(params[0][1], before)


@pytest.mark.parametrize("name", ["standard", *SCHEDULES])
def test_any_schedule_goes_with_it(name: str) -> None:
    group = {"ns_schedule": name, "ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5}
    assert schedule_of(group) == SCHEDULES.get(name, DEFAULT_SCHEDULE)
    assert schedule_of({**group, "ns_form": "gram"}) == replace(schedule_of(group), form="gram")
    steps = [(1.5, -0.5, 0.0)] * 3
    assert schedule_of({"ns_schedule": steps, "ns_form": "gram"}) == Schedule(
        tuple(steps), form="gram"
    )


def test_a_step_takes_the_form_that_its_group_asks_for() -> None:
    params = [param for _, param in named((8, 32), (8, 32))]
    twins = [param.detach().clone() for param in params]
    groups = [{"params": params[:1]}, {"params": params[1:], "ns_form": "gram"}]
    for param in params:
        param.grad = matrix(8, 32, seed=3)
    Muon(groups, lr=1.0, weight_decay=0.0, nesterov=False).step()
    direction = torch.zeros(8, 32).lerp(matrix(8, 32, seed=3), 0.05)
    for param, twin, schedule in zip(params, twins, (DEFAULT_SCHEDULE, GRAM), strict=True):
        assert torch.equal(param, twin - newton_schulz(direction, schedule))

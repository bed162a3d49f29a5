"""How close each Newton-Schulz schedule comes to the orthogonal factor that an SVD gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adapters import Muon
from adapters._newton_schulz import DEFAULT_SCHEDULE, newton_schulz
from adapters._owners import flops
from adapters._schedules import FORMS, SCHEDULES, Form, Schedule, multiplications, stretches

# Least and largest singular value, and cosine to the orthogonal factor, for a power-law spectrum.
QUALITY = {
    "default": (DEFAULT_SCHEDULE, 0.65, 1.25, 0.98),
    "you5": (SCHEDULES["you5"], 0.9, 1.2, 0.997),
    "polar5": (SCHEDULES["polar5"], 0.8, 1.2, 0.994),
    "deepseek10": (SCHEDULES["deepseek10"], 0.98, 1.02, 0.999),
    "tuned4": (SCHEDULES["tuned4"], 0.4, 1.1, 0.95),
    "tuned3": (SCHEDULES["tuned3"], 0.15, 1.2, 0.84),
}


def power_law(rows: int, cols: int, power: float = 1.0) -> tuple[Tensor, Tensor]:
    """Singular values that fall as 1 / k**power, and the orthogonal factor, by a float64 SVD."""
    return with_values(rows, cols, counted(min(rows, cols)) ** -power)


def with_values(rows: int, cols: int, values: Tensor, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix that has these singular values, and its orthogonal factor, by a float64 SVD."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    u, _, v = torch.linalg.svd(noise, full_matrices=False)
    return (u * values) @ v, u @ v


def counted(number: int) -> Tensor:
    return torch.arange(1, number + 1, dtype=torch.float64)


def in_two(number: int, large: float, small: float) -> Tensor:
    """128 singular values, some large and the rest small."""
    return torch.where(counted(128) <= number, large, small).double()


# In bfloat16 a Gram matrix cannot tell a singular value that is 100 times smaller than another from
# zero. On each of these some schedule leaves its band if it takes more steps from one Gram matrix
# than it does, such as the first four of the default.
STEEP = {
    "1/k^2": counted(128) ** -2,
    "1/k^3": counted(128) ** -3,
    "one large": in_two(1, 1.0, 1e-2),
    "one very large": in_two(1, 1.0, 1e-3),
    "a few large": in_two(8, 1.0, 3e-2),
    "exponential": torch.exp(-counted(128) / 16),
}


def test_every_schedule_is_tried() -> None:
    assert set(QUALITY) == {"default", *SCHEDULES}


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (96, 96), (100, 200)], ids=str)
@pytest.mark.parametrize("name", QUALITY)
@pytest.mark.parametrize("form", FORMS)
def test_singular_values_come_as_close_to_one_as_stated(
    form: Form, name: str, shape: tuple[int, int]
) -> None:
    schedule, least, largest, cosine = QUALITY[name]
    matrix, factor = power_law(*shape)
    found = newton_schulz(matrix.float(), replace(schedule, form=form)).double()
    values = torch.linalg.svdvals(found)
    assert least < values.min()
    assert values.max() < largest
    assert torch.cosine_similarity(found.flatten(), factor.flatten(), dim=0) > cosine


@pytest.mark.parametrize("name", QUALITY)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("values", STEEP)
def test_no_singular_value_leaves_the_band_when_they_fall_steeply(
    values: str, form: Form, name: str
) -> None:
    """Where the gram form diverges in bfloat16 if it takes the wrong steps at once."""
    schedule, _, largest, _ = QUALITY[name]
    for seed in range(3):
        matrix, _ = with_values(128, 256, STEEP[values], seed=seed)
        found = newton_schulz(matrix.float(), replace(schedule, form=form)).double()
        assert torch.linalg.svdvals(found).max() < largest


LEGS = {
    "default": (2, 2, 1),
    "you5": (2, 2, 1),
    "polar5": (1, 2, 2),
    "deepseek10": (2, 2, 2, 2, 2),
    "tuned4": (2, 2),
    "tuned3": (2, 1),
}
# Multiplications in units of m^3: of m x m, then of m x 4m in the standard and the gram form.
WORK = {
    "default": (15, 45, 35),
    "you5": (15, 45, 35),
    "polar5": (15, 45, 35),
    "deepseek10": (30, 90, 65),
    "tuned4": (12, 36, 26),
    "tuned3": (9, 27, 22),
}


@pytest.mark.parametrize("name", QUALITY)
def test_the_gram_form_takes_two_steps_at_once_where_they_grow_little(name: str) -> None:
    schedule = replace(QUALITY[name][0], form="gram")
    for shape in ((64, 128), (300, 100)):
        found = stretches(schedule, shape)
        assert tuple(map(len, found)) == LEGS[name]
        assert tuple(step for stretch in found for step in stretch) == schedule.steps


@pytest.mark.parametrize("name", QUALITY)
def test_the_form_decides_how_much_is_multiplied(name: str) -> None:
    standard = QUALITY[name][0]
    gram = replace(standard, form="gram")
    square, wide_standard, wide_gram = (8**3 * work for work in WORK[name])
    assert multiplications(standard, (8, 8)) == multiplications(gram, (8, 8)) == square
    assert multiplications(standard, (8, 32)) == multiplications(standard, (32, 8)) == wide_standard
    assert multiplications(gram, (8, 32)) == multiplications(gram, (32, 8)) == wide_gram


def test_a_step_of_the_standard_form_is_what_owners_are_chosen_by() -> None:
    one_step = Schedule(DEFAULT_SCHEDULE.steps[:1])
    for shape in ((3, 5), (5, 3), (4, 4), (1, 9)):
        assert multiplications(one_step, shape) == flops(shape)


def test_the_norm_is_divided_out_with_room_for_rounding() -> None:
    matrix = torch.eye(4)
    steps = ((1.0, 0.0, 0.0),)
    plain, roomy = newton_schulz(matrix, Schedule(steps)), newton_schulz(matrix, Schedule(steps, 2))
    assert torch.equal(plain, 2 * roomy)


@pytest.mark.parametrize("name", [*SCHEDULES, "standard"])
def test_muon_takes_a_schedule_by_name(name: str) -> None:
    param = torch.nn.Parameter(torch.eye(6, 4))
    param.grad = power_law(6, 4)[0].float()
    Muon([param], lr=1.0, weight_decay=0.0, ns_schedule=name).step()
    schedule = SCHEDULES.get(name, DEFAULT_SCHEDULE)
    direction = torch.lerp(param.grad, param.grad * 0.05, 0.95)
    update = newton_schulz(direction, schedule) * (6 / 4) ** 0.5
    assert torch.allclose(param.detach(), torch.eye(6, 4) - update.float(), atol=0.02)


def test_a_list_of_coefficients_is_a_schedule() -> None:
    schedule = [(1.5, -0.5, 0.0)] * 3
    groups = Muon([torch.nn.Parameter(torch.eye(3))], ns_schedule=schedule).param_groups
    assert groups[0]["ns_schedule"] == schedule


def test_an_unknown_schedule_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'you5', 'polar5'.*got 'fast'"):
        Muon([torch.nn.Parameter(torch.eye(3))], ns_schedule="fast")

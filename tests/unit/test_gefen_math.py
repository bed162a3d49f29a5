"""Gefen's updates against reference values, and on shards against the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters._blocks import Grid, whole_grid
from adapters._codebook import Codebook, histogram, learn_levels, make_codebook
from adapters._gefen_math import (
    apply_,
    average,
    block_maxima,
    block_scale,
    block_square_sums,
    block_update,
    direction,
    exact_sqrt,
    factored_scale,
    factored_update,
    from_rows,
    new_momentum,
    quantize,
    square_sums,
    to_rows,
)
from adapters._newton_schulz import (
    SCHEDULES,
    adjust_lr,
    count_agreeing,
    mask_opposed,
    newton_schulz,
    normalize_rows,
)
from adapters._period import find_period
from tests.unit.test_codebook import floats, generator, golden
from tests.unit.test_period import BOOK, Shards, randn, shards

INPUTS = golden("inputs")["params"]
NUM_STEPS = 5
STANDARD = ((3.4445, -4.7750, 2.0315),) * 5


def gradient(name: str, step: int) -> Tensor:
    return floats(INPUTS[name]["grads"][step - 1], INPUTS[name]["shape"])


@dataclass
class Replay:
    """One parameter with its state, stepped by the functions under test."""

    name: str
    book: Codebook
    grid: Grid
    param: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)

    def momentum(self, grad: Tensor, beta: float) -> None:
        indices = self.state.get("m_codebook", torch.zeros(grad.shape, dtype=torch.uint8))
        magnitudes = self.state.get("m_magnitude", torch.zeros(self.grid.num_blocks))
        rows = new_momentum(indices, magnitudes, grad, book=self.book, grid=self.grid, beta=beta)
        maxima = block_maxima(rows, self.grid)
        self.state["m_magnitude"] = maxima
        self.state["m_codebook"] = quantize(rows, maxima, book=self.book, grid=self.grid)

    def averaged(self, key: str, new: Tensor, beta: float) -> Tensor:
        self.state[key] = average(self.state.get(key, torch.zeros_like(new)), new, beta=beta)
        return self.state[key]

    def gefen(self, step: int, options: dict[str, Any]) -> None:
        grad = gradient(self.name, step)
        beta1, beta2 = options.get("betas", (0.9, 0.999))
        bias = {
            "bias1": 1 - beta1**step,
            "bias2": 1 - beta2**step,
            "eps": options.get("eps", 1e-8),
        }
        self.momentum(grad, beta1)
        stored = self.state["m_codebook"], self.state["m_magnitude"]
        where: dict[str, Any] = {"book": self.book, "grid": self.grid, "lr": options["lr"]}
        if options.get("factored_v_2d", True) and grad.ndim == 2:
            sums = square_sums(grad)
            v_row = self.averaged("v_row", sums.by_row / grad.size(1), beta2)
            v_col = self.averaged("v_col", sums.by_col / grad.size(0), beta2)
            scale = factored_scale(v_row, v_col, row_mean=v_row.mean(), **bias)
            update = factored_update(*stored, scale, **where)
        else:
            means = block_square_sums(grad, self.grid) / self.grid.period
            vmean = self.averaged("vmean", means, beta2)
            update = block_update(*stored, block_scale(vmean, **bias), **where)
        apply_(self.param, update, decay=1 - options["lr"] * options.get("weight_decay", 0.0))

    def muon(self, step: int, options: dict[str, Any]) -> None:
        grad = gradient(self.name, step)
        momentum = options.get("momentum", 0.95)
        self.momentum(grad, momentum)
        matrix = direction(
            self.state["m_codebook"],
            self.state["m_magnitude"],
            grad,
            book=self.book,
            grid=self.grid,
            momentum=momentum,
            nesterov=options.get("nesterov", True),
        )
        update = newton_schulz(matrix, SCHEDULES.get(options.get("ns_schedule"), STANDARD))
        if options.get("normuon", False):
            old = self.state.get("normuon_v", torch.zeros(grad.size(0), 1))
            update, self.state["normuon_v"] = normalize_rows(
                update, old, beta=0.95, bias=1 - 0.95**step, eps=1e-8
            )
        if options.get("cautious", False):
            update = masked(update, grad)
        lr = options["lr"]
        self.param.mul_(1 - lr * options.get("weight_decay", 0.1))
        rate = float(adjust_lr(lr, options.get("adjust_lr_fn"), grad.shape))
        self.param.add_(update, alpha=-rate)


def masked(update: Tensor, grad: Tensor) -> Tensor:
    num_agreeing = count_agreeing(update, grad)
    return mask_opposed(update, grad, num_agreeing=num_agreeing, numel=grad.numel())


@cache
def learned(names: tuple[str, ...], one_for_1d: bool = False) -> tuple[Codebook, dict[str, Grid]]:
    """The codebook and the grids that the first gradients give."""
    grids = {}
    counts = []
    for name in names:
        grad = gradient(name, 1)
        is_one = grad.numel() == 1 or (one_for_1d and grad.ndim == 1)
        grids[name] = whole_grid(grad.numel(), 1 if is_one else find_period(grad))
        rows = to_rows(grad, grids[name])
        counts.append(histogram(rows, block_maxima(rows, grids[name])[:, None]))
    levels = learn_levels(torch.stack(counts).sum(0))
    assert levels is not None
    return make_codebook(levels), grids


def replays(names: Sequence[str], one_for_1d: bool = False) -> list[Replay]:
    book, grids = learned(tuple(names), one_for_1d)
    params = {name: floats(INPUTS[name]["init"], INPUTS[name]["shape"]) for name in names}
    return [Replay(name, book, grids[name], params[name]) for name in names]


def stored(entry: dict[str, Any]) -> Tensor:
    if "hex" in entry:
        return floats(entry["hex"], entry["shape"])
    return torch.tensor(entry["ints"], dtype=torch.uint8).view(entry["shape"])


def assert_state(each: Replay, expected: dict[str, Any], *, inexact: Sequence[str] = ()) -> None:
    assert each.grid.period == expected["automatic_period"]
    for key, value in each.state.items():
        wanted = stored(expected[key])
        if key in inexact:
            torch.testing.assert_close(value, wanted, rtol=0.02, atol=0)
        else:
            assert torch.equal(value.view(wanted.shape), wanted), f"{each.name}: {key}"


def cases(name: str) -> list[Any]:
    found = golden(name)["cases"]
    return [pytest.param(found[case], id=f"{name}-{case}") for case in found]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("gefen_block") + cases("gefen_factored"))
def test_gefen_is_the_reference(case: dict[str, Any]) -> None:
    params = replays(case["param_order"])
    for step in range(1, NUM_STEPS + 1):
        for each in params:
            each.gefen(step, case["kwargs"])
        expected = case.get(f"after_{step}", {})
        for each in params if expected else ():
            assert torch.equal(each.book.levels, floats(expected["codebook"]["Gefen0"]))
            assert_state(each, expected["state"][each.name])
            wanted = floats(expected["params"][each.name], each.param.shape)
            if "v_row" in each.state:
                # Made with MKL's root, which rounds what is close to a tie in its own way.
                assert (each.param != wanted).sum() <= 2
                torch.testing.assert_close(each.param, wanted, rtol=2**-22, atol=2**-28)
            else:
                assert torch.equal(each.param, wanted), each.name


def assert_muon(each: Replay, expected: dict[str, Any], *, step: int, lr: float) -> None:
    assert_state(each, expected["state"][each.name], inexact=["normuon_v"])
    wanted = floats(expected["params"][each.name], each.param.shape)
    # Products of bfloat16 matrices differ between CPUs: two units in the last place an update.
    ratio = float(adjust_lr(lr, "match_rms_adamw", each.param.shape))
    atol = 2 * 2**-7 * max(lr, ratio) * step
    torch.testing.assert_close(each.param, wanted, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("muon_exact"))
def test_gefen_muon_is_the_reference(case: dict[str, Any]) -> None:
    params = replays(case["param_order"])
    for step in range(1, NUM_STEPS + 1):
        for each in params:
            each.muon(step, case["kwargs"])
            expected = case.get(f"after_{step}")
            if expected:
                assert_muon(each, expected, step=step, lr=case["kwargs"]["lr"])


HYBRID_MUON = {"ns_schedule": "tuned3", "adjust_lr_fn": "match_rms_adamw", "normuon": True}


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("hybrid"))
def test_both_halves_of_the_hybrid_are_the_reference(case: dict[str, Any]) -> None:
    options = case["kwargs"]
    decay = options.get("weight_decay", 0.0)
    lr, backup_lr = options["lr"], options.get("backup_lr", options["lr"])
    muon = {**HYBRID_MUON, "lr": lr, "weight_decay": options.get("muon_weight_decay", decay)}
    backup: list[Replay] = []
    if options.get("backup_optimizer") != "adamw":
        backup = replays(case["split"]["backup"], options.get("backup_1d_period_one", False))
    matrices = replays(case["split"]["muon"])
    for step in range(1, NUM_STEPS + 1):
        for each in matrices:
            each.muon(step, muon)
        for each in backup:
            exempt = any(part in each.name for part in options.get("no_decay_substrings", ()))
            own = 0.0 if exempt else options.get("backup_weight_decay", decay)
            each.gefen(step, {"lr": backup_lr, "weight_decay": own, "factored_v_2d": False})
        expected = case.get(f"after_{step}", {})
        for each in matrices if expected else ():
            assert_muon(each, expected, step=step, lr=lr)
        for each in backup if expected else ():
            assert_state(each, expected["state"][each.name])
            assert torch.equal(each.param.flatten(), floats(expected["params"][each.name]))


def test_masking_is_the_reference() -> None:
    case = golden("math")["cautious"]
    update = floats(case["update_bf16"], case["shape"]).bfloat16()
    found = masked(update, floats(case["grad"], case["shape"]))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.float(), floats(case["out_bf16"], case["shape"]))


def test_rows_of_a_whole_tensor_are_its_memory() -> None:
    values = randn(14, 24, seed=0)
    rows = to_rows(values, whole_grid(336, 48))
    assert rows.data_ptr() == values.data_ptr()
    assert from_rows(rows, whole_grid(336, 48)).data_ptr() == values.data_ptr()


def test_tensors_of_one_period_can_be_stepped_as_one() -> None:
    grads = [randn(14, 24, seed=seed) for seed in (1, 2, 3)]
    each = [Shards([whole_grid(336, 48)], [torch.arange(336)]) for _ in grads]
    joined = Shards([whole_grid(3 * 336, 48)], [torch.arange(3 * 336)])
    separate = [one.step(grad, 1) for one, grad in zip(each, grads, strict=True)]
    assert torch.equal(joined.step(torch.stack(grads), 1), torch.cat(separate))


def test_rectangles_add_up_to_the_sums_of_the_matrix() -> None:
    grad = randn(14, 24, seed=0)
    whole = square_sums(grad)
    parts = [square_sums(grad[:5]), square_sums(grad[5:])]
    assert torch.equal(torch.cat([each.by_row for each in parts]), whole.by_row)
    torch.testing.assert_close(parts[0].by_col + parts[1].by_col, whole.by_col)


def test_the_factored_scale_of_rows_is_part_of_the_whole() -> None:
    sums = square_sums(randn(14, 24, seed=0))
    options: dict[str, Any] = {"row_mean": sums.by_row.mean(), "bias1": 0.1, "bias2": 0.2}
    whole = factored_scale(sums.by_row, sums.by_col, **options, eps=1e-8)
    part = factored_scale(sums.by_row[3:7], sums.by_col, **options, eps=1e-8)
    assert torch.equal(part, whole[3:7])


def test_factored_moments_of_rank_one_are_exact() -> None:
    squares = torch.outer(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 9.0, 25.0]))
    row, col = squares.mean(1), squares.mean(0)
    scale = factored_scale(row, col, row_mean=row.mean(), bias1=1, bias2=1, eps=1e-30)
    torch.testing.assert_close(scale, squares.rsqrt())


def test_a_matrix_without_gradient_has_a_finite_scale() -> None:
    sums = square_sums(torch.zeros(2, 3))
    mean = sums.by_row.mean()
    scale = factored_scale(sums.by_row, sums.by_col, row_mean=mean, bias1=1, bias2=1, eps=1e-8)
    assert torch.equal(scale, torch.tensor(1e-8).reciprocal().expand(2, 3))


def test_a_root_is_rounded_correctly() -> None:
    values = torch.cat([randn(500, seed=0).abs(), randn(200, seed=1).abs() * 1e-38])
    roots = exact_sqrt(values)
    up, down = (torch.nextafter(roots, roots.new_tensor(end)) for end in (torch.inf, 0.0))
    for value, root, above, below in zip(
        *(map(Fraction, each.tolist()) for each in (values, roots, up, down)), strict=True
    ):
        assert ((root + below) / 2) ** 2 <= value <= ((root + above) / 2) ** 2


def test_the_root_of_a_large_or_strided_tensor_is_that_of_its_elements() -> None:
    values = randn(600, 601, seed=0).square().T
    assert torch.equal(exact_sqrt(values), values.double().sqrt().float())


def test_a_block_without_momentum_is_left_alone() -> None:
    grad = randn(14, 24, seed=0)
    grad[3] = 0
    update = shards("two ranks", 24).step(grad, 1).view(14, 24)
    assert not update[3].any()
    assert update[2].any()


def test_no_argument_is_written() -> None:
    grid = whole_grid(336, 48)
    indices = torch.randint(0, 256, (336,), dtype=torch.uint8, generator=generator(0))
    arguments = [indices, randn(7, seed=1).abs(), randn(14, 24, seed=2), randn(7, seed=3).abs()]
    before = [each.clone() for each in arguments]
    magnitudes, grad, scale = arguments[1:]
    where: dict[str, Any] = {"book": BOOK, "grid": grid}
    rows = new_momentum(indices, magnitudes, grad, beta=0.9, **where)
    quantize(rows, block_maxima(rows, grid), **where)
    block_update(indices, magnitudes, scale, lr=0.1, **where)
    direction(indices, magnitudes, grad, momentum=0.9, nesterov=True, **where).zero_()
    average(scale, magnitudes, beta=0.9)
    block_scale(scale, bias1=1, bias2=1, eps=1e-8)
    assert all(map(torch.equal, arguments, before))


def test_a_half_precision_gradient_is_averaged_in_float32() -> None:
    grad = randn(14, 24, seed=0).bfloat16()
    short, full = shards("two ranks", 24), shards("two ranks", 24)
    assert torch.equal(short.step(grad, 1), full.step(grad.float(), 1))


def test_a_half_precision_parameter_is_rounded_once() -> None:
    param, update = randn(9, 8, seed=0).bfloat16(), randn(72, seed=1)
    expected = (param.float() - update.view(9, 8)).bfloat16()
    apply_(param, update, decay=1.0)
    assert torch.equal(param, expected)


def test_decay_comes_before_the_update() -> None:
    param = torch.tensor([8.0, -8.0])
    apply_(param, torch.tensor([1.0, 1.0]), decay=torch.tensor(0.5))
    assert param.tolist() == [3.0, -5.0]


def test_normalised_rows_keep_the_norm_of_the_whole() -> None:
    update = (randn(14, 24, seed=0) * randn(14, 1, seed=1).exp()).bfloat16()
    new, moment = normalize_rows(update, torch.zeros(14, 1), beta=0.95, bias=0.05, eps=1e-8)
    torch.testing.assert_close(new.float().norm(), update.float().norm(), rtol=0.01, atol=0)
    norms = new.float().norm(dim=1)
    assert norms.max() < 1.02 * norms.min()
    torch.testing.assert_close(moment, 0.05 * update.float().square().mean(1, keepdim=True))


def test_an_update_that_only_opposes_is_masked_whole() -> None:
    update = randn(4, 6, seed=0).bfloat16()
    assert not masked(update, -update.float()).any()

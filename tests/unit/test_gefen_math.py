"""Gefen's updates, piece by piece; the optimizers' tests compare them with reference values."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from adapters._blocks import whole_grid
from adapters._gefen_math import (
    apply_,
    average,
    block_maxima,
    block_scale,
    block_update,
    direction,
    exact_sqrt,
    factored_scale,
    from_rows,
    new_momentum,
    quantize,
    square_sums,
    to_rows,
)
from adapters._newton_schulz import (
    count_agreeing,
    mask_opposed,
    normalize_rows,
)
from tests.unit.test_codebook import floats, generator, golden
from tests.unit.test_period import BOOK, Shards, randn, shards


def masked(update: Tensor, grad: Tensor) -> Tensor:
    num_agreeing = count_agreeing(update, grad)
    return mask_opposed(update, grad, num_agreeing=num_agreeing, numel=grad.numel())


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

"""How long blocks are and what is stored for them, whoever holds which part of the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters._blocks import Grid, Part, cut_blocks, make_grid, pieces, whole_grid
from adapters._codebook import make_codebook
from adapters._gefen_math import (
    average,
    block_maxima,
    block_scale,
    block_square_sums,
    block_update,
    cut_values,
    from_rows,
    new_momentum,
    quantize,
    set_cut_values_,
    to_rows,
)
from adapters._period import (
    PeriodRules,
    Search,
    add_sums_,
    candidates,
    choose_exponent,
    choose_period,
    fallback_period,
    find_period,
    largest_square,
    period_of,
    plan_search,
    search_errors,
)
from tests.unit.test_codebook import LEVELS, floats, generator, golden

PERIODS = golden("period")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed))


def rows(shape: Sequence[int], sizes: Sequence[int]) -> list[Part]:
    """The parts of ranks that hold so many rows each."""
    row = math.prod(shape[1:])
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [Part(start * row, size * row) for start, size in zip(starts, sizes, strict=True)]


def rectangles(
    shape: Sequence[int], row_sizes: Sequence[int], col_sizes: Sequence[int]
) -> list[Part]:
    """The parts of ranks that hold rectangles of a matrix."""
    row_starts = [sum(row_sizes[:i]) for i in range(len(row_sizes))]
    col_starts = [sum(col_sizes[:i]) for i in range(len(col_sizes))]
    return [
        Part(row * shape[1] + col, num_cols, num_rows, shape[1])
        for row, num_rows in zip(row_starts, row_sizes, strict=True)
        for col, num_cols in zip(col_starts, col_sizes, strict=True)
    ]


def positions(part: Part) -> Tensor:
    """Where the elements of a part lie in the whole tensor."""
    return (part.run_starts()[:, None] + torch.arange(part.run_length)).flatten()


def summed(grad: Tensor, parts: Sequence[Part]) -> tuple[Search, Tensor, int]:
    """What each rank computes from its own part, added up as a collective would."""
    locals_ = [grad.flatten()[positions(part)] for part in parts]
    largest = max(float(largest_square(each)) for each in locals_)
    exponent = choose_exponent(largest, grad.numel())
    search = plan_search(grad.shape, parts)
    total = torch.zeros(search.num_sums, dtype=torch.int64)
    for part, grad_local in zip(parts, locals_, strict=True):
        sums = torch.zeros_like(total)
        add_sums_(sums, search, grad_local, part, exponent)
        total += sums
    return search, total, exponent


def errors_of(grad: Tensor, parts: Sequence[Part]) -> tuple[float, ...]:
    return search_errors(*summed(grad, parts))


def gradients(shape: Sequence[int]) -> dict[str, Tensor]:
    """Structured and unstructured, balanced and not."""
    by_row = randn(shape[0], *[1] * (len(shape) - 1), seed=1)
    normal = randn(*shape)
    return {
        "normal": normal,
        "rows": normal * by_row.exp(),
        "constant rows": normal.sign() * by_row,
        "heavy tails": (3 * normal).exp(),
        "tiny": normal * 1e-6,
        "ones": torch.ones(*shape),
    }


@pytest.mark.parametrize("case", PERIODS["cases"], ids=lambda case: case["label"])
def test_the_period_is_the_reference(case: dict[str, Any]) -> None:
    grad = floats(case["grad"], case["shape"])
    assert list(candidates(grad.numel())) == case["divisors"]
    assert find_period(grad) == case["period"]


@pytest.mark.parametrize("case", PERIODS["cases"], ids=lambda case: case["label"])
def test_the_errors_are_the_reference_but_for_rounding(case: dict[str, Any]) -> None:
    grad = floats(case["grad"], case["shape"])
    expected = [float.fromhex(each) for each in case["errors"]]
    assert errors_of(grad, [Part(0, grad.numel())]) == pytest.approx(expected, rel=1e-12)


def test_the_fallback_is_the_reference() -> None:
    cases = PERIODS["fallback_numel_shape_period"]
    assert [fallback_period(shape) for _, shape, _ in cases] == [period for *_, period in cases]


def by_variance(grad: Tensor) -> int:
    """The rule itself, in float64."""
    squares = grad.float().square().flatten().double()
    blocks = (squares.view(-1, length) for length in candidates(grad.numel()))
    errors = [float(each.var(1, correction=0).mean().sqrt()) for each in blocks]
    return choose_period(errors, grad.shape)


@pytest.mark.parametrize("shape", [(360,), (12, 40), (7, 11), (30, 64), (6, 5, 4)], ids=str)
@pytest.mark.parametrize("kind", gradients((1,)))
def test_the_period_is_the_rule(kind: str, shape: tuple[int, ...]) -> None:
    grad = gradients(shape)[kind]
    assert find_period(grad) == by_variance(grad)


SHAPE = (14, 24)
NUMEL = 14 * 24
SPLITS = {
    "two ranks": rows(SHAPE, [7, 7]),
    "uneven rows": rows(SHAPE, [4, 4, 4, 2]),
    "an empty rank": rows(SHAPE, [5, 5, 4, 0]),
    "a row each": rows(SHAPE, [1] * 14),
    "columns": rectangles(SHAPE, [14], [12, 12]),
    "uneven columns": rectangles(SHAPE, [14], [7, 7, 7, 3]),
    "rectangles": rectangles(SHAPE, [5, 5, 4], [13, 11]),
    "elements": [Part(a, b - a) for a, b in pairwise([0, 1, 5, 6, 100, 101, 265, 335, 336])],
}


@pytest.mark.parametrize("kind", gradients((1,)))
@pytest.mark.parametrize("split", SPLITS)
def test_every_split_gives_the_same_bits(split: str, kind: str) -> None:
    grad = gradients(SHAPE)[kind]
    expected = errors_of(grad, [Part(0, NUMEL)])
    assert errors_of(grad, SPLITS[split]) == expected


def test_every_border_gives_the_same_bits() -> None:
    grad = gradients((36,))["heavy tails"]
    expected = errors_of(grad, [Part(0, 36)])
    for border in range(37):
        assert errors_of(grad, [Part(0, border), Part(border, 36 - border)]) == expected


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_gives_the_same_period(split: str) -> None:
    grad = gradients(SHAPE)["rows"]
    assert period_of(*summed(grad, SPLITS[split])) == find_period(grad)


def test_chunks_of_one_rank_are_parts_too() -> None:
    grad = gradients(SHAPE)["normal"]
    search, sums, exponent = summed(grad, [Part(0, NUMEL)])
    parts = [Part(start, min(100, NUMEL - start)) for start in range(0, NUMEL, 100)]
    in_chunks = plan_search(grad.shape, parts)
    found = torch.zeros(in_chunks.num_sums, dtype=torch.int64)
    for part in parts:
        add_sums_(found, in_chunks, grad.flatten()[positions(part)], part, exponent)
    assert search_errors(in_chunks, found, exponent) == search_errors(search, sums, exponent)


@pytest.mark.slow
def test_the_largest_sums_do_not_overflow() -> None:
    # 2^20 equal elements of 40 bits each, and more blocks than are summed at once.
    ones = torch.ones(2**20)
    assert set(errors_of(ones, [Part(0, 2**20)])) == {0.0}


def test_a_transposed_gradient_is_read_in_the_order_of_its_shape() -> None:
    grad = gradients(SHAPE)["rows"]
    assert find_period(grad.T.contiguous().T) == find_period(grad)


def test_half_precision_is_searched_as_float32() -> None:
    grad = gradients(SHAPE)["rows"].bfloat16()
    assert find_period(grad) == find_period(grad.float())


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e20])
def test_a_gradient_whose_squares_are_not_finite_has_no_period(value: float) -> None:
    with pytest.raises(ValueError, match="finite gradient"):
        find_period(torch.tensor([0.0, value, 1.0, 1.0]))


def test_blocks_of_equal_elements_have_no_error() -> None:
    grad = randn(10).repeat_interleave(8)
    errors = dict(zip(candidates(80), errors_of(grad, [Part(0, 80)]), strict=True))
    assert [errors[length] for length in (1, 2, 4, 8)] == [0.0] * 4
    assert errors[16] > 0


def test_the_smaller_of_equal_falls_wins() -> None:
    lengths = candidates(64)  # 1, 2, 4, 8, 16, 32
    assert choose_period([0.0, 2.0, 2.0, 1.0, 1.0, 0.0], (64,)) == 8
    assert lengths[3] == 8


def test_a_period_below_eight_is_left_to_the_fallback() -> None:
    assert choose_period([0.0, 2.0, 1.0, 1.5, 1.5, 1.5], (64,)) == 64


def test_a_rise_below_one_in_10_to_the_12_beats_the_length_one() -> None:
    assert choose_period([0.0, 1.0, 2.0, 2 + 5e-13, 3.0, 4.0], (64,)) == 8


@pytest.mark.parametrize("numel", [2, 2**22, 2**22 + 1, 2**33])
def test_the_sum_of_all_squares_fits_63_bits(numel: int) -> None:
    assert numel * 2 ** choose_exponent(1.0, numel) < 2**63


def test_divisors_are_found_on_both_sides_of_the_root() -> None:
    assert candidates(36) == (1, 2, 3, 4, 6, 9, 12, 18)
    assert candidates(13) == (1,)


@pytest.mark.parametrize(
    ("rules", "name", "shape", "forced"),
    [
        (PeriodRules(), "layers.0.bias", (9,), False),
        (PeriodRules(), "scale", (1,), True),
        (PeriodRules(), "scale", (), True),
        (PeriodRules(one_for_1d=True), "layers.0.bias", (9,), True),
        (PeriodRules(one_for_1d=True), "layers.0.weight", (9, 9), False),
        (PeriodRules(one_for_2d=True), "layers.0.weight", (9, 9), True),
        (PeriodRules(one_for_names=("norm", "bias")), "Layers.0.Norm.weight", (9, 9), True),
        (PeriodRules(one_for_names=("norm", "bias")), "layers.0.weight", (9, 9), False),
    ],
)
def test_rules_exempt_from_the_search(
    rules: PeriodRules, name: str, shape: tuple[int, ...], forced: bool
) -> None:
    assert rules.forces_one(name, shape) is forced


def test_pieces_of_one_run() -> None:
    begins, blocks = pieces(Part(3, 9), 5)  # elements 3 .. 11
    assert begins.tolist() == [0, 2, 7, 9]
    assert blocks.tolist() == [0, 1, 2]


def test_pieces_of_columns() -> None:
    # Columns 1 .. 3 of three rows of 4: elements 1 2 3, 5 6 7, 9 10 11.
    begins, blocks = pieces(Part(1, 3, num_runs=3, distance=4), 6)
    assert begins.tolist() == [0, 3, 4, 6, 9]
    assert blocks.tolist() == [0, 0, 1, 1]


def test_only_blocks_across_a_border_are_cut() -> None:
    parts = [Part(0, 10), Part(10, 0), Part(10, 14), Part(24, 6)]
    assert cut_blocks(parts, 5).tolist() == [4]
    assert cut_blocks(parts, 15).tolist() == [0, 1]
    assert cut_blocks(parts, 30).tolist() == [0]


def test_a_grid_of_the_whole_is_a_view() -> None:
    grid = whole_grid(24, 6)
    assert (grid.num_rows, grid.width, grid.num_cut, grid.row_blocks) == (4, 6, 0, None)


def test_a_grid_pads_the_ends_of_a_shard() -> None:
    parts = [Part(0, 10), Part(10, 14), Part(24, 6)]
    grid = make_grid(parts[1], parts, 6)  # elements 10 .. 23 in the blocks 1, 2, 3
    assert (grid.num_blocks, grid.num_rows, grid.width) == (3, 3, 6)
    assert grid.place == slice(4, 18)
    assert (grid.num_cut, grid.cut_here.tolist(), grid.cut_places.tolist()) == (1, [0], [0])


def test_a_grid_within_one_block_needs_no_padding() -> None:
    parts = [Part(0, 10), Part(10, 14), Part(24, 6)]
    grid = make_grid(parts[1], parts, 30)
    assert (grid.num_rows, grid.width, grid.place) == (1, 14, slice(0, 14))


def test_a_grid_joins_the_rows_of_one_block() -> None:
    parts = rectangles((4, 6), [4], [4, 2])
    grid = make_grid(parts[0], parts, 12)  # two rows a block
    assert (grid.num_blocks, grid.num_rows, grid.width, grid.place) == (2, 4, 4, slice(0, 16))
    assert grid.row_blocks is not None
    assert grid.row_blocks.tolist() == [0, 0, 1, 1]


def test_a_period_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="got 7 for 24 elements"):
        whole_grid(24, 7)


LENGTHS = [8, 12, 24, 48, 56, 84, 168, 336]  # with and without cut blocks
BOOK = make_codebook(LEVELS["normal"])


@dataclass
class Shards:
    """The parts of one tensor on all ranks, stepped with exchanges as collectives do them."""

    grids: list[Grid]
    places: list[Tensor]  # of each part's elements in the whole tensor

    def __post_init__(self) -> None:
        self.indices = [torch.zeros(len(each), dtype=torch.uint8) for each in self.places]
        self.magnitudes = [torch.zeros(each.num_blocks) for each in self.grids]
        self.vmean = [torch.zeros(each.num_blocks) for each in self.grids]

    def reduced(self, values: list[Tensor], *, largest: bool) -> list[Tensor]:
        shares = torch.stack([cut_values(*each) for each in zip(values, self.grids, strict=True)])
        everywhere = shares.amax(0) if largest else shares.sum(0)
        for each, grid in zip(values, self.grids, strict=True):
            set_cut_values_(each, everywhere, grid)
        return values

    def step(self, grad: Tensor, step: int) -> Tensor:
        """Return the updates of all ranks, in their places in the whole tensor."""
        ranks = range(len(self.grids))
        grads = [grad.flatten()[place] for place in self.places]
        where: list[dict[str, Any]] = [{"book": BOOK, "grid": each} for each in self.grids]
        rows = [
            new_momentum(self.indices[i], self.magnitudes[i], grads[i], beta=0.9, **where[i])
            for i in ranks
        ]
        maxima = [block_maxima(rows[i], self.grids[i]) for i in ranks]
        self.magnitudes = self.reduced(maxima, largest=True)
        self.indices = [quantize(rows[i], self.magnitudes[i], **where[i]) for i in ranks]
        sums = [block_square_sums(grads[i], self.grids[i]) for i in ranks]
        sums = self.reduced(sums, largest=False)
        whole = torch.full((grad.numel(),), torch.nan)
        for i in ranks:
            self.vmean[i] = average(self.vmean[i], sums[i] / self.grids[i].period, beta=0.999)
            bias = {"bias1": 1 - 0.9**step, "bias2": 1 - 0.999**step}
            scale = block_scale(self.vmean[i], **bias, eps=1e-8)
            update = block_update(self.indices[i], self.magnitudes[i], scale, lr=0.01, **where[i])
            whole[self.places[i]] = update
        return whole

    def all_indices(self) -> Tensor:
        whole = torch.zeros(sum(map(len, self.places)), dtype=torch.uint8)
        for place, indices in zip(self.places, self.indices, strict=True):
            whole[place] = indices
        return whole


def shards(split: str, period: int) -> Shards:
    parts = [part for part in SPLITS[split] if part.numel]
    grids = [make_grid(part, SPLITS[split], period) for part in parts]
    return Shards(grids, [positions(part) for part in parts])


@pytest.mark.parametrize("period", LENGTHS)
@pytest.mark.parametrize("split", SPLITS)
def test_shards_hold_the_indices_of_the_whole(split: str, period: int) -> None:
    sharded = shards(split, period)
    whole = Shards([whole_grid(NUMEL, period)], [torch.arange(NUMEL)])
    for step in range(1, 4):
        grad = randn(*SHAPE, seed=step) * randn(14, 1, seed=9).exp()
        updates, expected = sharded.step(grad, step), whole.step(grad, step)
        assert torch.equal(sharded.all_indices(), whole.all_indices())
        # Only the order in which squares are added differs.
        torch.testing.assert_close(updates, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("period", LENGTHS)
@pytest.mark.parametrize("split", SPLITS)
def test_rows_give_back_the_elements(split: str, period: int) -> None:
    for grid, place in zip(shards(split, period).grids, shards(split, period).places, strict=True):
        assert torch.equal(from_rows(to_rows(place, grid), grid), place)

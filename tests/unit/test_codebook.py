"""Learning the levels, and finding the nearest of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters._codebook import (
    NUM_BINS,
    bin_centers,
    check_levels,
    dequantize,
    histogram,
    is_degenerate,
    learn_levels,
    make_codebook,
    nearest,
    reindex,
    solve,
)

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "golden"


def golden(name: str) -> dict[str, Any]:
    """Reference values, made with gefen-x 0.5.0 on a CPU."""
    found: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))
    return found


def floats(numbers: Sequence[str], shape: Sequence[int] = (-1,)) -> Tensor:
    return torch.tensor([float.fromhex(each) for each in numbers]).view(*shape)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def in_blocks(values: Tensor, period: int) -> Tensor:
    rows = values.view(-1, period)
    return histogram(rows, rows.abs().amax(1, keepdim=True))


def counted(bins: Sequence[int], counts: Sequence[int]) -> Tensor:
    found = torch.zeros(NUM_BINS, dtype=torch.int64)
    found[list(bins)] = torch.tensor(counts)
    return found


CODEBOOKS = golden("codebook")


@pytest.mark.parametrize("case", CODEBOOKS["cases"], ids=lambda case: case["label"])
def test_the_histogram_is_the_reference(case: dict[str, Any]) -> None:
    found = [in_blocks(floats(each["flat"]), each["period"]) for each in case["inputs"]]
    assert torch.equal(
        torch.stack(found).sum(0), counted(case["active_bins"], case["active_counts"])
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CODEBOOKS["cases"], ids=lambda case: case["label"])
def test_the_levels_are_the_reference(case: dict[str, Any]) -> None:
    levels = learn_levels(counted(case["active_bins"], case["active_counts"]))
    assert levels is not None
    assert torch.equal(levels, floats(case["codebook"]))


@pytest.mark.slow
def test_the_solver_alone_is_the_reference() -> None:
    case = CODEBOOKS["solver_only"]
    weights = torch.tensor(case["counts"]).float()
    levels = solve(bin_centers()[case["bins"]], weights, num_levels=case["num_codebooks"])
    assert torch.equal(levels, floats(case["codebook"]))


def test_the_bin_centres_are_the_reference() -> None:
    for index, center in CODEBOOKS["bin_center_check"].items():
        assert float(bin_centers()[int(index)]) == float.fromhex(center)


def every_start(centers: Tensor, weights: Tensor, *, num_levels: int) -> Tensor:
    """The same partition, but each end tries every start: the plain dynamic program."""
    x, w = centers.double(), weights.double()
    zero = x.new_zeros(1)
    sums = [torch.cat([zero, each.cumsum(0)]) for each in (w, w * x, w * x * x)]
    weight, first, second = (each[:, None] - each[None] for each in sums)
    cost = second - first * first / weight
    cost.masked_fill_(weight <= 0, torch.inf)
    best = sums[2] + 2 * sums[1] + sums[0]
    best[0] = torch.inf
    starts = []
    for _ in range(num_levels - 2):
        least = (best + cost).min(1)
        starts.append((best + cost).argmin(1))
        best = least.values
    end = int((best + second[-1] - 2 * first[-1] + weight[-1])[:-1].argmin())
    levels = [-1.0, 1.0]
    for start in reversed(starts):
        begin = int(start[end])
        levels.append(float(first[end, begin] / weight[end, begin]))
        end = begin
    return torch.tensor(levels).sort().values


SIZES = [each for each in product([2, 3, 17, 90, 300], [2, 3, 16]) if each[0] >= each[1]]


@pytest.mark.parametrize("most", [2, 5, 10**6])  # the fewer weights there are, the more ties
@pytest.mark.parametrize(("num_points", "num_levels"), SIZES)
def test_the_solver_finds_what_trying_all_finds(
    most: int, num_points: int, num_levels: int
) -> None:
    for seed in range(3):
        chosen = torch.randperm(NUM_BINS, generator=generator(seed))[:num_points].sort().values
        weights = torch.randint(1, most, (num_points,), generator=generator(seed)).float()
        centers = bin_centers()[chosen]
        levels = solve(centers, weights, num_levels=num_levels)
        assert torch.equal(levels, every_start(centers, weights, num_levels=num_levels))


def cost_of(centers: Tensor, weights: Tensor, borders: Sequence[int]) -> float:
    edges = [0, *borders, len(centers)]
    total = 0.0
    for i, (begin, end) in enumerate(pairwise(edges)):
        x, w = centers[begin:end].double(), weights[begin:end].double()
        level = {0: -1.0, len(edges) - 2: 1.0}.get(i, float((w * x).sum() / w.sum()))
        total += float((w * (x - level) ** 2).sum())
    return total


def test_no_partition_costs_less() -> None:
    centers = bin_centers()[[3, 600, 1100, 1500, 2047, 2048, 2900, 3300, 4000]]
    weights = torch.tensor([4.0, 1, 7, 2, 9, 3, 1, 5, 2])
    levels = solve(centers, weights, num_levels=4)
    cuts = combinations(range(1, 9), 3)
    least = min(cuts, key=lambda borders: cost_of(centers, weights, borders))
    inner = [float((weights * centers)[a:b].sum() / weights[a:b].sum()) for a, b in pairwise(least)]
    torch.testing.assert_close(levels, torch.tensor([-1.0, *inner, 1.0]))


@pytest.mark.slow
@pytest.mark.parametrize("num_bins", [1, 2, 255, 256, 257, 1000])
def test_learned_levels_are_a_codebook(num_bins: int) -> None:
    counts = torch.zeros(NUM_BINS, dtype=torch.int64)
    counts[torch.randperm(NUM_BINS, generator=generator(0))[:num_bins]] = 3
    levels = learn_levels(counts)
    assert levels is not None
    check_levels(levels)


@pytest.mark.slow
def test_a_full_histogram_gives_a_codebook_that_one_comparison_searches() -> None:
    counts = torch.randint(1, 2**40, (NUM_BINS,), generator=generator(0))
    levels = learn_levels(counts)
    assert levels is not None
    assert make_codebook(levels).max_in_cell == 1


def test_nothing_gives_no_levels() -> None:
    assert learn_levels(torch.zeros(NUM_BINS, dtype=torch.int64)) is None


def test_histograms_of_parts_add_up() -> None:
    rows = torch.randn(12, 10, generator=generator(0))
    maxima = rows.abs().amax(1, keepdim=True)
    parts = histogram(rows[:, :3], maxima) + histogram(rows[:, 3:], maxima)
    assert torch.equal(parts, histogram(rows, maxima))


def test_a_block_of_zeros_falls_in_the_bin_of_zero() -> None:
    assert torch.equal(in_blocks(torch.zeros(7), 7), counted([NUM_BINS // 2], [7]))


def test_only_zeros_are_degenerate() -> None:
    assert is_degenerate(in_blocks(torch.zeros(8), 4))
    assert is_degenerate(torch.zeros(NUM_BINS, dtype=torch.int64))
    assert not is_degenerate(in_blocks(torch.tensor([0.0, 0, 0, 0, 0, 0, 0, -1e-30]), 4))


def by_distance(values: Tensor, levels: Tensor) -> Tensor:
    """The rule itself: the nearer neighbour of a binary search, the lower one in a tie."""
    last = len(levels) - 1
    found = torch.searchsorted(levels, values)
    low, high = (found - 1).clamp(0, last), found.clamp(0, last)
    is_low = (values - levels[low]).abs() <= (values - levels[high]).abs()
    return low.where(is_low, high).to(torch.uint8)


def ends_fixed(levels: Tensor) -> Tensor:
    levels = levels.clamp(-1, 1).sort().values
    levels[0], levels[-1] = -1, 1
    return levels


def learned() -> Tensor:
    levels = learn_levels(torch.randint(0, 99, (NUM_BINS,), generator=generator(1)))
    assert levels is not None
    return levels


POWERS = torch.cat([0.5 ** torch.arange(126), torch.tensor([1e-40, 1e-45])])
LEVELS = {
    "learned": learned(),
    "reference": floats(golden("quantize")["codebook"]),
    "even": torch.linspace(-1, 1, 256),
    "normal": ends_fixed(torch.randn(256, generator=generator(2)) / 4),
    "two": ends_fixed(torch.full((256,), -1.0)),
    "three": ends_fixed(torch.full((256,), 1 / 3)),
    "zeros of both signs": ends_fixed(torch.zeros(256) * torch.tensor([-1.0, 1.0]).repeat(128)),
    "powers down to denormals": ends_fixed(torch.cat([POWERS, -POWERS])),
    "consecutive numbers": ends_fixed(0.5 + torch.arange(256) * 2.0**-24),
}


@pytest.mark.parametrize("name", LEVELS)
def test_nearest_is_the_rule(name: str) -> None:
    levels = LEVELS[name]
    book = make_codebook(levels)
    middles = ((levels[1:].double() + levels[:-1].double()) / 2).float()
    special = torch.tensor([2.0, -2.0, 1e30, -1e30, torch.inf, -torch.inf, 1e-45, -1e-45, 0, -0.0])
    around = torch.cat([levels, middles, book.thresholds[:-1], special])
    up, down = (torch.nextafter(around, around.new_tensor(end)) for end in (9e9, -9e9))
    anywhere = 2.2 * torch.rand(20_000, generator=generator(3)) - 1.1
    values = torch.cat([around, up, down, anywhere])
    assert torch.equal(nearest(values, book), by_distance(values, levels))


@pytest.mark.parametrize(
    ("levels", "values", "indices"),
    [
        ("codebook", "values", "indices"),
        ("duplicate_codebook", "dup_values", "dup_indices"),
    ],
)
def test_nearest_is_the_reference(levels: str, values: str, indices: str) -> None:
    case = golden("quantize")
    book = make_codebook(floats(case[levels]))
    assert nearest(floats(case[values]), book).tolist() == case[indices]


def test_a_nan_gets_some_index() -> None:
    assert nearest(torch.tensor([torch.nan]), make_codebook(LEVELS["learned"])).dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_are_compared_as_float32(dtype: torch.dtype) -> None:
    book = make_codebook(LEVELS["learned"])
    values = torch.randn(5, 6, generator=generator(0)).to(dtype)
    before = values.clone()
    assert torch.equal(nearest(values, book), nearest(values.float(), book))
    assert torch.equal(values, before)


def test_each_level_is_nearest_to_itself() -> None:
    book = make_codebook(LEVELS["learned"])
    indices = torch.arange(256, dtype=torch.uint8).view(2, 128)
    assert torch.equal(nearest(dequantize(indices, book), book), indices)


def test_an_empty_tensor_has_no_indices() -> None:
    book = make_codebook(LEVELS["learned"])
    assert nearest(torch.empty(0, 4), book).shape == (0, 4)
    assert dequantize(torch.empty(0, 4, dtype=torch.uint8), book).shape == (0, 4)


def test_reindexing_rounds_the_old_levels() -> None:
    old, new = make_codebook(LEVELS["normal"]), make_codebook(LEVELS["even"])
    indices = torch.randint(0, 256, (4, 9), dtype=torch.uint8, generator=generator(0))
    assert torch.equal(reindex(indices, old=old, new=new), nearest(dequantize(indices, old), new))


@pytest.mark.parametrize(
    ("levels", "error", "message"),
    [
        (torch.linspace(-1, 1, 256, dtype=torch.float64), TypeError, "float32"),
        (torch.linspace(-1, 1, 255), ValueError, r"shape \(256,\)"),
        (
            torch.linspace(-1, 1, 256).index_fill(0, torch.tensor(9), torch.nan),
            ValueError,
            "finite",
        ),
        (torch.linspace(-1, 1, 256).index_fill(0, torch.tensor(9), 0.5), ValueError, "ascend"),
        (torch.linspace(-1, 0.9, 256), ValueError, "from -1 to 1"),
    ],
    ids=["dtype", "shape", "nan", "order", "ends"],
)
def test_what_is_no_codebook_is_refused(
    levels: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_codebook(levels)

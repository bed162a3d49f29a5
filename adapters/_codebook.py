"""The 256 levels that a momentum is rounded to: how they are learned, how values find theirs.

Maths only: tensors in, tensors out. It knows neither ranks nor optimizers.

Values lie in [-1, 1]: each element has been divided by the largest of its block.

[Note: thresholds instead of distances]
    "The nearer of two neighbouring levels, the lower one in a tie" is, for float32 arithmetic,
    one question: is the value above some number between them? Both distances are rounded
    monotonically, so there is a largest float32 for which the lower level wins. It is found once
    for each pair, and the level of a value is then the number of thresholds below it. A table
    over 8192 equal cells holds how many lie below a value's cell; the few within the cell are
    compared one by one. A learned codebook has at most two of them in a cell, because its levels
    are means of bins twice as wide as a cell. The result equals the binary search over levels,
    in about a twentieth of its time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

NUM_LEVELS = 256  # one byte
NUM_BINS = 16 * NUM_LEVELS
_BINS_PER_UNIT = NUM_BINS // 2  # the histogram covers [-1, 1]
_CELLS_PER_UNIT = 2 * _BINS_PER_UNIT
ZERO_BIN = NUM_BINS // 2  # where an exact zero falls
# The solver looks at every 512th end first. Ratios of 2 and of 16 take a third longer.
_STRIDES = (512, 64, 8, 1)

_Sums: TypeAlias = tuple[Tensor, ...]  # of weight, weight * center, weight * center**2


@dataclass(frozen=True, slots=True, eq=False)
class Codebook:
    """The levels, with the tables that find the nearest one. Made by :func:`make_codebook`."""

    levels: Tensor  # (256,) float32, ascending, from -1 to 1
    thresholds: Tensor  # (T + 1,) float32, ascending and distinct, then infinity
    level_above: Tensor  # (T + 1,) uint8: the level of a value above this many thresholds
    num_below: Tensor  # (8193,) int32: thresholds in the cells below each cell
    max_in_cell: int  # thresholds in the fullest cell

    def to(self, device: torch.device) -> Codebook:
        """Return the same codebook on ``device``."""
        return Codebook(
            levels=self.levels.to(device),
            thresholds=self.thresholds.to(device),
            level_above=self.level_above.to(device),
            num_below=self.num_below.to(device),
            max_in_cell=self.max_in_cell,
        )


def make_codebook(levels: Tensor) -> Codebook:
    """Return the codebook of these levels, on the device that they are on.

    Args:
        levels: See :func:`check_levels`. Copied.

    Raises:
        TypeError: ``levels`` is not float32.
        ValueError: ``levels`` is no codebook.
    """
    check_levels(levels)
    on_cpu = levels.detach().cpu().clone()
    thresholds, counts = torch.unique_consecutive(_thresholds(on_cpu), return_counts=True)
    cells = _cell(thresholds)
    in_cell = torch.bincount(cells, minlength=2 * _CELLS_PER_UNIT + 1)
    book = Codebook(
        levels=on_cpu,
        # Nothing lies above infinity, so a comparison too many changes nothing.
        thresholds=torch.cat([thresholds, thresholds.new_tensor([math.inf])]),
        # Equal levels have equal thresholds, and a value above them is above all of them.
        level_above=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.uint8),
        num_below=(in_cell.cumsum(0) - in_cell).int(),
        max_in_cell=int(in_cell.max()),
    )
    return book.to(levels.device)


def check_levels(levels: Tensor) -> None:
    """Raise unless ``levels`` can be a codebook. Equal neighbours are allowed.

    Args:
        levels: Shape (256,), float32, finite, non-decreasing, from exactly -1 to exactly 1.

    Raises:
        TypeError: ``levels`` is not float32.
        ValueError: The shape or the values are others.
    """
    if levels.dtype != torch.float32:
        raise TypeError(f"a codebook is torch.float32; got {levels.dtype}")
    if levels.shape != (NUM_LEVELS,):
        raise ValueError(f"a codebook has shape ({NUM_LEVELS},); got {levels.shape=}")
    values = levels.tolist()
    if not all(map(math.isfinite, values)):
        raise ValueError("a codebook is finite; got a level that is not")
    if values != sorted(values):
        raise ValueError("the levels of a codebook ascend; got one that is below its predecessor")
    if (values[0], values[-1]) != (-1.0, 1.0):
        raise ValueError(f"a codebook goes from -1 to 1; got {values[0]!r} to {values[-1]!r}")


def nearest(values: Tensor, book: Codebook) -> Tensor:
    """Return the index of the level that is nearest to each value.

    A tie goes to the lower level, and a value beyond the last level to that level. Where several
    levels are equal, a value above them gets the last one's index and any other the first's. A
    NaN gets some valid index.

    See [Note: thresholds instead of distances].

    Args:
        values: Any shape and float dtype; compared as float32. Read, not written.
        book: The codebook, on the same device.

    Returns:
        The shape of ``values``, uint8.

    Source:
        Rule for ties: Benedek, Koren, Fried, Gefen: Optimized Stochastic Optimizer,
        https://arxiv.org/abs/2606.13894. The table is our own.
    """
    flat = values.flatten().float()
    passed = book.num_below.index_select(0, _cell(flat))
    for _ in range(book.max_in_cell):
        passed += flat > book.thresholds.index_select(0, passed)
    return book.level_above.index_select(0, passed).view(values.shape)


def dequantize(indices: Tensor, book: Codebook) -> Tensor:
    """Return the level of each index.

    Args:
        indices: Any shape, uint8.
        book: The codebook, on the same device.

    Returns:
        A new tensor with the shape of ``indices``, float32, values in [-1, 1].
    """
    # A uint8 tensor would be a mask. index_select is four times as fast as levels[indices].
    return book.levels.index_select(0, indices.flatten().int()).view(indices.shape)


def reindex(indices: Tensor, *, old: Codebook, new: Codebook) -> Tensor:
    """Return, for each index into ``old``, the index of the nearest level in ``new``.

    Args:
        indices: Any shape, uint8.
        old: The codebook of ``indices``.
        new: The codebook of the result.

    Returns:
        A new tensor with the shape of ``indices``, uint8.

    Source:
        Gefen-X's periodic refresh, which leaves the magnitudes of the blocks as they are.
    """
    return nearest(old.levels, new).index_select(0, indices.flatten().int()).view(indices.shape)


def histogram(rows: Tensor, maxima: Tensor) -> Tensor:
    """Count the elements, each divided by the largest magnitude of its block, in 4096 bins.

    Counts of parts add up to the count of the whole: sum over parameters and shards, each
    logical element once. A block that lies on two ranks needs its maximum from both.

    Args:
        rows: Shape (rows, width), any float dtype, finite: blocks, or the parts of blocks that
            this rank holds. Read, not written.
        maxima: Shape (rows, 1), float32: the largest magnitude in the whole block of each row.

    Returns:
        Shape (4096,), int64.

    Source:
        Benedek, Koren, Fried, https://arxiv.org/abs/2606.13894.
    """
    scaled = rows.float() / divisors(maxima)
    bins = scaled.add_(1).mul_(_BINS_PER_UNIT).int().clamp_(0, NUM_BINS - 1)
    return torch.bincount(bins.flatten(), minlength=NUM_BINS)


def divisors(maxima: Tensor) -> Tensor:
    """Return what to divide blocks by: their maxima, or 1 where all elements are zeros."""
    return torch.where(maxima > 0, maxima, 1)


def is_degenerate(counts: Tensor) -> bool:
    """Whether a histogram holds nothing to learn from: every element was zero, or there was none.

    Args:
        counts: Shape (4096,), the sum of :func:`histogram` over all parts.
    """
    # The largest of a block that is not all zeros falls in the first or the last bin.
    return int(counts.sum()) == int(counts[ZERO_BIN])


def learn_levels(counts: Tensor) -> Tensor | None:
    """Return the levels that cost the least squared error over a histogram.

    Equal histograms give equal levels, bit for bit: it runs on the CPU in float64, with
    operations that IEEE 754 rounds in one way only. Takes about half a second on one core.

    Args:
        counts: Shape (4096,), int64, the sum of :func:`histogram` over all parts; on any device.

    Returns:
        Shape (256,), float32, on the CPU, as :func:`check_levels` wants it. With fewer than 256
        bins in use these are their centres, padded with the last one. None without any element.

    Source:
        Benedek, Koren, Fried, https://arxiv.org/abs/2606.13894: the exact partition, with the
        first and the last level fixed. Padding: their implementation.
    """
    counts = counts.cpu()
    active = counts.nonzero().flatten()
    num_active = len(active)
    if num_active == 0:
        return None
    centers = bin_centers()[active]
    if num_active >= NUM_LEVELS:
        return solve(centers, counts[active].float(), num_levels=NUM_LEVELS)
    levels = centers[-1].repeat(NUM_LEVELS)
    levels[:num_active] = centers
    levels[0], levels[-1] = -1, 1
    return levels.sort().values


def bin_centers() -> Tensor:
    """Return the centres of the histogram's bins: shape (4096,), float32, exact."""
    return (2 * torch.arange(NUM_BINS, device="cpu") + 1 - NUM_BINS) / NUM_BINS


def solve(centers: Tensor, weights: Tensor, *, num_levels: int) -> Tensor:
    """Return the levels of the cheapest cut of weighted points into ``num_levels`` segments.

    The segments are consecutive and none is empty. The first has level -1, the last 1, each other
    its weighted mean; the cost is the weighted sum of squared distances. This is the optimum, not
    the local one that Lloyd's iteration ends in. Of cuts that cost the same it is the one whose
    last segment starts first, and so on backwards.

    Args:
        centers: Shape (points,), float32, ascending, in [-1, 1], on the CPU. At least
            ``num_levels`` points.
        weights: Shape (points,), float32, positive, on the CPU.
        num_levels: At least 2.

    Returns:
        Shape (num_levels,), float32, ascending.

    Source:
        Benedek, Koren, Fried, https://arxiv.org/abs/2606.13894, states the problem. That the best
        start never moves back as the end moves on, which divide and conquer needs, is shown in
        Wu, Optimal Quantization by Matrix Searching, J. Algorithms 12 (1991).
    """
    sums = _prefix_sums(centers.tolist(), weights.tolist())
    num_points = len(centers)
    every = torch.arange(num_points + 1, device="cpu")
    # costs[e]: the least cost of the first e points with the segments so far; infinite where
    # there are too few points for them, or too few left for those to come.
    costs = _cost_to(-1.0, _segments(sums, every[:1], every))
    costs[0] = math.inf
    starts = []
    for num_segments in range(2, num_levels):
        ends = range(num_segments, num_points - (num_levels - num_segments) + 1)
        costs, start = _add_segment(costs, sums, ends=ends)
        starts.append(start)
    costs = costs[:-1] + _cost_to(1.0, _segments(sums, every[:-1], every[-1:]))
    end = int(costs.argmin())
    levels = [-1.0, 1.0]
    for start in reversed(starts):
        begin = int(start[end])
        weight, first, _ = (float(each[end] - each[begin]) for each in sums)
        levels.append(first / weight)
        end = begin
    return torch.tensor(levels, dtype=torch.float32, device="cpu").sort().values


def _prefix_sums(centers: list[float], weights: list[float]) -> _Sums:
    """Sums over the first points, each of shape (points + 1,), float64."""
    points = list(zip(weights, centers, strict=True))
    terms = (weights, [w * x for w, x in points], [w * x * x for w, x in points])
    # From left to right by definition, where torch.cumsum may sum in another order.
    return tuple(
        torch.tensor([0.0, *accumulate(each)], dtype=torch.float64, device="cpu") for each in terms
    )


def _segments(sums: _Sums, begin: Tensor, end: Tensor) -> _Sums:
    """The sums over segments (begin, end]."""
    # index_select is several times as fast as indexing with brackets.
    return tuple(each.index_select(0, end) - each.index_select(0, begin) for each in sums)


def _cost_to(level: float, segments: _Sums) -> Tensor:
    """The cost of segments at a given level."""
    weight, first, second = segments
    return second - 2 * level * first + level * level * weight


def _add_segment(costs: Tensor, sums: _Sums, *, ends: range) -> tuple[Tensor, Tensor]:
    """Return the costs with one segment more, and where that segment starts, for each end.

    Divide and conquer, breadth first, so that torch sees few and long vectors: the starts for
    some ends are known, and those for the ends between them are searched between their starts.
    """
    added = torch.full_like(costs, math.inf)
    # Beyond the last end there is no neighbour, and so no bound but the end itself.
    start = torch.full((len(costs) + _STRIDES[0],), len(costs), device="cpu")
    for coarser, stride in pairwise((0, *_STRIDES)):
        end = torch.arange(ends.start, ends.stop, stride, device="cpu")
        if coarser:
            step = (end - ends.start) % coarser
            end, step = end[step != 0], step[step != 0]
            low, high = start[end - step], start[end - step + coarser]
        else:
            low, high = torch.full_like(end, ends.start - 1), end
        if len(end):
            high = high.minimum(end - 1)
            start[end], added[end] = _cheapest_starts(costs, sums, end=end, low=low, high=high)
    return added, start


def _cheapest_starts(
    costs: Tensor,
    sums: _Sums,
    *,
    end: Tensor,
    low: Tensor,  # the first start to try for each end
    high: Tensor,  # the last one
) -> tuple[Tensor, Tensor]:
    """Return the first start of least cost for each end, and that cost."""
    width = high - low + 1
    offset = width.cumsum(0) - width
    which = torch.arange(len(end), device="cpu").repeat_interleave(width)
    begin = (low - offset).index_select(0, which).add_(torch.arange(len(which), device="cpu"))
    weight, first, second = _segments(sums, begin, end.index_select(0, which))
    cost = costs.index_select(0, begin) + (second - first * first / weight)
    least = torch.segment_reduce(cost, "min", lengths=width)
    hits = (cost == least.index_select(0, which)).nonzero().flatten()
    return begin[hits[torch.searchsorted(hits, offset)]], least


def _thresholds(levels: Tensor) -> Tensor:
    """For each pair of neighbours, the largest float32 that is rounded to the lower one."""
    low, high = levels[:-1], levels[1:]
    # Bisection over all float32 numbers in between: as integers they are consecutive.
    below, above = _ordinal(low), _ordinal(high)
    for _ in range(32):
        middle = (below + above) // 2
        value = _from_ordinal(middle)
        is_low = value - low <= high - value
        below, above = middle.where(is_low, below), above.where(is_low, middle)
    return _from_ordinal(below)


def _ordinal(values: Tensor) -> Tensor:
    """Number the float32 values so that the next larger one has the next number; int64."""
    bits = values.view(torch.int32).long()
    return bits.where(bits >= 0, -0x8000_0000 - bits)


def _from_ordinal(numbers: Tensor) -> Tensor:
    bits = numbers.where(numbers >= 0, -0x8000_0000 - numbers)
    return bits.int().view(torch.float32)


def _cell(values: Tensor) -> Tensor:
    """The cell of each float32 value, int32. Never decreases as the value grows."""
    # What a NaN becomes as an integer depends on the machine, but is never above the last cell.
    return values.clamp(-1, 1).add_(1).mul_(_CELLS_PER_UNIT).int().clamp_min_(0)

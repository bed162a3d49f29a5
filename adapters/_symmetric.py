"""Half of a product that is symmetric, and the other half copied, where that gives the same bits.

Newton-Schulz multiplies a matrix by its own transpose, and the result by itself. What libraries
offer for the first writes no bfloat16 on CPUs. So the product is made in strips of columns, each
only from the diagonal down, and what is below the diagonal is copied to its mirror image. On one
core of an AMD EPYC (avx512_bf16), with the other as busy, Newton-Schulz takes 0.96 of the time for
512 x 512, 0.92 for 512 x 2048, 0.82 for 1024 x 4096, 0.76 for 2048 x 2048.

Whether a part of a product has the bits that the whole has there is up to what computes it, and a
trial tells: of one product of each shape, a quarter of a million sums or more, none may differ. (A
last strip may be thin, so that few of these are its own.) Both have the same bits if they sum the
same products in the same order, and then the numbers play no part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

MIN_ROWS = 512  # smaller products take longer in parts; measured, as all of these
STRIP_COLS = 192  # of 128 to 256, never far behind the best
MAX_THREADS = 2  # with more, parts may be too small to share out: not measured


def gram(x: Tensor) -> Tensor:
    """Return XX', shape (rows, rows), of a matrix of shape (rows, columns)."""
    return _mirrored(lambda rows, cols: x[rows] @ x[cols].mT, x.new_empty(x.size(0), x.size(0)))


def add_product(x: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float) -> Tensor:
    """Return ``beta x + alpha left @ right``; all are (rows, rows), the result is symmetric."""

    def part(rows: slice, cols: slice) -> Tensor:
        return torch.addmm(x[rows, cols], left[rows], right[:, cols], beta=beta, alpha=alpha)

    return _mirrored(part, torch.empty_like(x))


def pays(x: Tensor) -> bool:
    """Whether products that start from this matrix are faster in halves, with the same bits.

    Args:
        x: Shape (rows, columns), no more rows than columns.
    """
    # A compiler would trace the trial as well; what it compiles has the same bits without.
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.size(0) < MIN_ROWS:
        return False
    num_threads = torch.get_num_threads()
    if num_threads > MAX_THREADS:
        return False
    # A transposed view is contiguous after the first step, so it takes both layouts.
    layouts = {True, x.is_contiguous()}
    return all(_gives_same_bits(tuple(x.shape), x.dtype, each, num_threads) for each in layouts)


def _mirrored(part: Callable[[slice, slice], Tensor], out: Tensor) -> Tensor:
    """Fill a symmetric matrix from strips of columns, each from the diagonal down."""
    end = out.size(0)
    for start in range(0, end, STRIP_COLS):
        here, after = slice(start, start + STRIP_COLS), slice(start + STRIP_COLS, end)
        strip = part(slice(start, end), here)
        out[start:, here] = strip
        out[here, after] = strip[STRIP_COLS:].mT.contiguous()  # which is faster in two copies
    return out


@cache
def _gives_same_bits(
    shape: tuple[int, ...], dtype: torch.dtype, is_contiguous: bool, num_threads: int
) -> bool:
    """Try it once for each shape and layout. Threads are part of the question."""
    del num_threads
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, device="cpu").to(dtype)
    x /= x.norm()
    if not is_contiguous:  # of a tall matrix, its transposed view
        x = x.T.contiguous().T
    whole = x @ x.mT
    if not torch.equal(gram(x), whole):
        return False
    added = torch.addmm(whole, whole, whole, beta=-4.775, alpha=2.0315)
    return torch.equal(add_product(whole, whole, whole, beta=-4.775, alpha=2.0315), added)

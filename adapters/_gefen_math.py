"""Gefen's update: a momentum of one byte an element, a second moment of one number a block.

Maths only: tensors in, tensors out. Nothing here writes an argument unless its name ends in ``_``,
so a step can be computed whole before anything is committed. Everything is float32, whatever the
dtype of the gradient.

[Note: rows]
    A momentum is stored as a level for each element and a magnitude for each block. A
    :class:`Grid` lays the elements that a rank holds out as rows, each a block or what the rank
    holds of it. For a whole tensor that is a view. Where a border between ranks cuts blocks, the
    short rows are padded with zeros, which change neither a maximum nor a sum, and the values of
    those blocks pass through a vector that all ranks reduce: see [Note: cut blocks]. Maxima are
    exact, so indices and magnitudes do not depend on how many ranks there are. Sums of squares
    are not: there the last bits do.

One step of a block-wise parameter, in this order::

    rows = new_momentum(indices, magnitudes, grad, book=book, grid=grid, beta=beta1)
    magnitudes = block_maxima(rows, grid)  # max over ranks, where cut
    indices = quantize(rows, magnitudes, book=book, grid=grid)
    sums = block_square_sums(grad, grid)  # sum over ranks, where cut
    vmean = average(vmean, sums / grid.period, beta=beta2)
    scale = block_scale(vmean, ...)
    update = block_update(indices, magnitudes, scale, ...)
    apply_(param, update, decay=1 - lr * weight_decay)

Source of the update rules: Benedek, Koren, Fried, Gefen: Optimized Stochastic Optimizer,
https://arxiv.org/abs/2606.13894. The factored second moment and what belongs to GefenMuon are
Gefen-X's; the docstrings say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from adapters._blocks import Grid
from adapters._codebook import (
    ZERO_BIN,
    Codebook,
    dequantize,
    divisors,
    histogram,
    nearest,
)

TINY = torch.finfo(torch.float32).tiny
_AT_ONCE = 2**18  # elements that are float64 at a time
_SQUARES_AT_ONCE = 2**20  # as in Gefen-X: it decides the last bits of column sums


def to_rows(values: Tensor, grid: Grid) -> Tensor:
    """Return the elements of a rank as rows: shape (rows, width); a view if nothing is cut."""
    flat = values.flatten()
    size = grid.num_rows * grid.width
    if len(flat) != size:
        padded = flat.new_zeros(size)
        padded[_places(grid)] = flat
        flat = padded
    return flat.view(grid.num_rows, grid.width)


def from_rows(rows: Tensor, grid: Grid) -> Tensor:
    """Return the elements of rows without padding, flat; a view if nothing is cut."""
    return rows.flatten()[_places(grid)]


def _places(grid: Grid) -> slice | Tensor:
    """Where the elements are in flattened rows; as a mask it is made when it is used."""
    if isinstance(grid.place, slice):
        return grid.place
    columns = torch.arange(grid.width, device=grid.place.device)
    mask: Tensor = (columns < grid.place).flatten()
    return mask


def block_histogram(grad: Tensor, magnitudes: Tensor, grid: Grid) -> Tensor:
    """Return the histogram of the elements here, each divided by the largest of its whole block.

    Args:
        grad: This rank's part, any float dtype.
        magnitudes: Shape (blocks,), float32: :func:`block_maxima`, cut blocks reduced.
        grid: Where the elements lie in blocks.

    Returns:
        Shape (4096,), int64; see :func:`adapters._codebook.histogram`.
    """
    rows = to_rows(grad, grid)
    counts = histogram(rows, _per_row(magnitudes, grid))
    counts[ZERO_BIN] -= rows.numel() - grad.numel()  # padding
    return counts


def cut_values(values: Tensor, grid: Grid) -> Tensor:
    """Return this rank's share of the values of all cut blocks, for ranks to reduce.

    Args:
        values: Shape (blocks,), non-negative, one value for each block that has elements here.
        grid: Where the elements lie in blocks.

    Returns:
        Shape (grid.num_cut,), zeros for blocks of other ranks.
    """
    return values.new_zeros(grid.num_cut).index_copy_(
        0, grid.cut_places, values.index_select(0, grid.cut_here)
    )


def set_cut_values_(values: Tensor, reduced: Tensor, grid: Grid) -> None:
    """Replace the values of cut blocks by what the ranks reduced; see :func:`cut_values`."""
    values.index_copy_(0, grid.cut_here, reduced.index_select(0, grid.cut_places))


def block_maxima(rows: Tensor, grid: Grid) -> Tensor:
    """Return the largest magnitude in each block, as far as it lies here: shape (blocks,)."""
    maxima = rows.abs().amax(1)
    if grid.row_blocks is None:
        return maxima
    return maxima.new_zeros(grid.num_blocks).scatter_reduce_(0, grid.row_blocks, maxima, "amax")


def block_square_sums(grad: Tensor, grid: Grid) -> Tensor:
    """Return the sum of squares in each block, as far as it lies here: shape (blocks,), float32."""
    sums = to_rows(grad.float().square(), grid).sum(1)
    if grid.row_blocks is None:
        return sums
    return sums.new_zeros(grid.num_blocks).index_add_(0, grid.row_blocks, sums)


def new_momentum(
    indices: Tensor,
    magnitudes: Tensor,
    grad: Tensor,
    *,
    book: Codebook,
    grid: Grid,
    beta: float,
) -> Tensor:
    """Return the momentum after this gradient, not yet rounded to levels.

    Args:
        indices: uint8, the elements of this rank in row-major order, any shape.
        magnitudes: Shape (blocks,) or (blocks, 1), float32.
        grad: The elements of ``indices``, any shape and float dtype.
        book: The codebook of ``indices``.
        grid: Where the elements lie in blocks.
        beta: The share of the old momentum that is kept, dimensionless.

    Returns:
        Shape (rows, width), float32, new memory.
    """
    rows = momentum_values(indices, magnitudes, book=book, grid=grid)
    return rows.lerp_(to_rows(grad.float(), grid), 1 - beta)


def quantize(rows: Tensor, magnitudes: Tensor, *, book: Codebook, grid: Grid) -> Tensor:
    """Return the index of each element, given the magnitudes of whole blocks.

    Args:
        rows: Shape (rows, width), float32.
        magnitudes: Shape (blocks,), float32: :func:`block_maxima`, cut blocks reduced.
        book: The codebook.
        grid: Where the elements lie in blocks.

    Returns:
        Shape (elements,), uint8.
    """
    return from_rows(nearest(rows / divisors(_per_row(magnitudes, grid)), book), grid)


def momentum_values(indices: Tensor, magnitudes: Tensor, *, book: Codebook, grid: Grid) -> Tensor:
    """Return the rounded momentum: shape (rows, width), float32, new memory."""
    return to_rows(dequantize(indices, book), grid).mul_(_per_row(magnitudes, grid))


def _per_row(values: Tensor, grid: Grid) -> Tensor:
    """The value of each row's block: shape (rows, 1)."""
    flat = values.flatten()
    return (flat if grid.row_blocks is None else flat[grid.row_blocks])[:, None]


def average(old: Tensor, new: Tensor, *, beta: float) -> Tensor:
    """Return ``beta * old + (1 - beta) * new``, in the shape and dtype of ``old``."""
    return old.mul(beta).add_(new, alpha=1 - beta)


def exact_sqrt(values: Tensor) -> Tensor:
    """Return the roots of float32 values, rounded correctly: shape and device of ``values``.

    On CPUs torch asks MKL, whose float32 root misses the last bit for a fifth of all numbers, and
    not for the same ones on CPUs of different makers. Ranks and reference values would not agree.
    The root of a float32 number is never so close to the middle of two others that a float64
    root, even with an error in its last bit, is rounded to the wrong one. CUDA rounds correctly.
    """
    if values.device.type != "cpu":
        return values.sqrt()
    roots = torch.empty_like(values, memory_format=torch.contiguous_format)
    targets = torch.split(roots.view(-1), _AT_ONCE)
    for target, some in zip(targets, torch.split(values.flatten(), _AT_ONCE), strict=True):
        target.copy_(some.double().sqrt_())
    return roots


def block_scale(second_moment: Tensor, *, bias1: float, bias2: float, eps: float) -> Tensor:
    """Return what the momentum of each block is multiplied by, learning rate aside.

    Args:
        second_moment: Shape (blocks,) or (blocks, 1), float32.
        bias1: ``1 - beta1**step``, of the momentum.
        bias2: ``1 - beta2**step``, of the second moment, which may count steps of its own.
        eps: Added to the root after its correction.

    Returns:
        The shape of ``second_moment``, float32.
    """
    root = exact_sqrt(second_moment).div_(math.sqrt(bias2)).add_(eps)
    return root.reciprocal_().mul_(1 / bias1)


def block_update(
    indices: Tensor,
    magnitudes: Tensor,
    scale: Tensor,
    *,
    book: Codebook,
    grid: Grid,
    lr: float | Tensor,
) -> Tensor:
    """Return what to subtract from the parameter, made of the momentum as it is stored.

    Args:
        indices: The new ones, see :func:`quantize`.
        magnitudes: The new ones, of whole blocks.
        scale: See :func:`block_scale`.
        book: The codebook.
        grid: Where the elements lie in blocks.
        lr: Learning rate, dimensionless; a number or a tensor of one element.

    Returns:
        Shape (elements,), float32.
    """
    rows = momentum_values(indices, magnitudes, book=book, grid=grid)
    return from_rows(rows.mul_(_per_row(scale, grid)).mul_(lr), grid)


@dataclass(frozen=True, slots=True, eq=False)
class SquareSums:
    """Sums of squared gradients over part of a matrix; those of all parts add up."""

    by_row: Tensor  # (rows here,) float32
    by_col: Tensor  # (columns here,) float32


def square_sums(grad: Tensor) -> SquareSums:
    """Return the row and column sums of a squared gradient, or of a rectangle of it.

    Ranks that hold different rows add up ``by_col``, ranks that hold different columns
    ``by_row``.

    Args:
        grad: Shape (rows, columns), any float dtype.
    """
    rows_at_once = max(1, _SQUARES_AT_ONCE // max(1, grad.size(1)))
    by_row, by_col = [], grad.new_zeros(grad.size(1), dtype=torch.float32)
    for some in torch.split(grad, rows_at_once):
        squares = some.float().square()
        by_row.append(squares.sum(1))
        by_col += squares.sum(0)
    return SquareSums(torch.cat(by_row), by_col)


def factored_scale(
    v_row: Tensor,
    v_col: Tensor,
    *,
    row_mean: Tensor,
    bias1: float,
    bias2: float,
    eps: float,
) -> Tensor:
    """Return what each element of the momentum is multiplied by, learning rate aside.

    The second moment of an element is that of its row times that of its column, relative to the
    mean of all: exact if the squared gradient has rank one.

    Args:
        v_row: Shape (rows here,), float32: averages of row means.
        v_col: Shape (columns here,), float32: averages of column means.
        row_mean: Shape (), float32: the mean of ``v_row`` over all rows of the matrix.
        bias1: ``1 - beta1**step``, of the momentum.
        bias2: ``1 - beta2**step``, of the second moment, which may count steps of its own.
        eps: Added to the root after its correction.

    Returns:
        Shape (rows here, columns here), float32.

    Source:
        Gefen-X 0.5; the factors are Adafactor's, Shazeer and Stern,
        https://arxiv.org/abs/1804.04235.
    """
    second_moment = torch.outer(v_row, v_col).div_(row_mean.clamp(min=TINY))
    root = exact_sqrt(second_moment.div_(bias2)).add_(eps)
    return root.reciprocal_().mul_(1 / bias1)


def factored_update(
    indices: Tensor,
    magnitudes: Tensor,
    scale: Tensor,
    *,
    book: Codebook,
    grid: Grid,
    lr: float | Tensor,
) -> Tensor:
    """Return what to subtract from the parameter, in the shape of ``scale``.

    Args:
        indices: The new ones, see :func:`quantize`.
        magnitudes: The new ones, of whole blocks.
        scale: See :func:`factored_scale`.
        book: The codebook.
        grid: Where the elements lie in blocks.
        lr: Learning rate, dimensionless; a number or a tensor of one element.
    """
    rows = momentum_values(indices, magnitudes, book=book, grid=grid)
    return from_rows(rows, grid).view(scale.shape).mul_(scale).mul_(lr)


def apply_(param: Tensor, update: Tensor, *, decay: float | Tensor) -> None:
    """Write one parameter: decay it, then subtract the update with a single rounding.

    Args:
        param: This rank's part, any float dtype.
        update: As many elements, float32.
        decay: ``1 - lr * weight_decay``.
    """
    if isinstance(decay, Tensor) or decay != 1:
        param.mul_(decay)
    param.sub_(update.view(param.shape))


def direction(
    indices: Tensor,
    magnitudes: Tensor,
    grad: Tensor,
    *,
    book: Codebook,
    grid: Grid,
    momentum: float,
    nesterov: bool,
) -> Tensor:
    """Return the matrix that GefenMuon orthogonalises, made of the momentum as it is stored.

    Args:
        indices: The new ones, see :func:`quantize`.
        magnitudes: The new ones, of whole blocks.
        grad: This rank's part, any float dtype.
        book: The codebook.
        grid: Where the elements lie in blocks.
        momentum: The share of the old momentum that is kept, dimensionless.
        nesterov: Whether to look one step ahead.

    Returns:
        The shape of ``grad``, float32.

    Source:
        Gefen-X's GefenMuon.
    """
    rows = momentum_values(indices, magnitudes, book=book, grid=grid)
    stored = from_rows(rows, grid).view(grad.shape)
    return average(stored, grad.float(), beta=momentum) if nesterov else stored

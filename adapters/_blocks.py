"""Where the blocks of a tensor lie on a rank that holds a part of it.

Maths only. All elements are counted along the whole tensor, flattened in row-major order.

[Note: cut blocks]
    A block that lies on several ranks is cut. Who holds what is known everywhere, so all ranks
    count the same cut blocks in the same order, and give each a place in a vector that is added
    up across ranks (for the search) or of which the maximum is taken (for magnitudes). All other
    blocks are settled where they lie. For a row-sharded tensor there is at most one cut block of
    each length at each border between two ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a tensor, in memory in this order: equally long runs at equal distances.

    A whole tensor and a shard of rows are one run, a shard of columns is a run for each row.
    """

    start: int  # first element, counted in the whole tensor
    run_length: int
    num_runs: int = 1
    distance: int = 0  # from the start of a run to that of the next

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.num_runs * self.run_length

    def run_starts(self) -> Tensor:
        """Where the runs start in the whole tensor: shape (num_runs,), int64."""
        return self.start + self.distance * torch.arange(self.num_runs, device="cpu")


def pieces(part: Part, length: int) -> tuple[Tensor, Tensor]:
    """Return how blocks of this length fall into a part, in memory order.

    Returns:
        Where each piece of a block begins, counted in the part, and last the part's end: shape
        (pieces + 1,), int64. The block of each piece: shape (pieces,), int64. Runs that share a
        block make several pieces of it.
    """
    end = torch.tensor([part.numel], device="cpu")
    if not part.numel:
        return end, end[:0]
    if part.num_runs == 1:
        last = part.start + part.run_length - 1
        blocks = torch.arange(part.start // length, last // length + 1, device="cpu")
        begins = (blocks * length).sub_(part.start).clamp_(min=0)
        return torch.cat([begins, end]), blocks
    starts = part.run_starts()
    first = starts // length
    count = (starts + (part.run_length - 1)) // length - first + 1
    run = torch.arange(part.num_runs, device="cpu").repeat_interleave(count)
    blocks = (first - (count.cumsum(0) - count))[run] + torch.arange(len(run), device="cpu")
    begins = (blocks * length - starts[run]).clamp_(min=0) + run * part.run_length
    return torch.cat([begins, end]), blocks


def cut_blocks(parts: Iterable[Part], length: int) -> Tensor:
    """Return the blocks of [Note: cut blocks], ascending, int64; the same on all ranks.

    Args:
        parts: All parts of the tensor, each element in one of them.
        length: Of a block, elements.
    """
    starts = [part.run_starts() for part in parts if part.numel]
    borders = torch.cat(starts) if starts else torch.empty(0, dtype=torch.int64, device="cpu")
    cut: Tensor = torch.unique(borders[borders % length != 0] // length)
    return cut


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Where the elements that one rank holds lie in blocks; see [Note: rows]."""

    period: int  # elements of a whole block
    num_blocks: int  # that have elements here
    num_rows: int
    width: int  # elements of a row, padding included
    # Where the elements are in the flattened rows; or how many each row begins with: (rows, 1).
    place: slice | Tensor
    row_blocks: Tensor | None  # (rows,) int64: the block of each row; None if row i is block i
    cut_here: Tensor  # (n,) int64: which of the blocks here are cut
    cut_places: Tensor  # (n,) int64: their places in the vector that ranks reduce
    num_cut: int  # length of that vector, the same on all ranks


def blocks_here(part: Part, length: int) -> Tensor:
    """Return which blocks have elements in a part, ascending, int64."""
    found: Tensor = torch.unique(pieces(part, length)[1])
    return found


def make_grid(
    part: Part, parts: Sequence[Part], period: int, *, device: torch.device | None = None
) -> Grid:
    """Return where one part of a tensor lies in its blocks.

    Args:
        part: What this rank holds; it may be nothing.
        parts: What all ranks hold, each element in one of them: replicas count once.
        period: Elements of a block.
        device: That of the tensors to come.

    Raises:
        ValueError: The period does not divide the tensor.
    """
    numel = sum(each.numel for each in parts)
    if numel % period:
        raise ValueError(f"a period divides its tensor; got {period} for {numel} elements")
    begins, every_block = pieces(part, period)
    sizes = begins.diff()
    width, num_rows = int(sizes.max()) if len(sizes) else 1, len(sizes)
    blocks, row_blocks = torch.unique(every_block, return_inverse=True)
    cut = cut_blocks(parts, period)
    cut_here = torch.isin(blocks, cut).nonzero().flatten()
    return Grid(
        period=period,
        num_blocks=len(blocks),
        num_rows=num_rows,
        width=width,
        place=_place(part, sizes, width, device),
        row_blocks=None if len(blocks) == num_rows else row_blocks.to(device),
        cut_here=cut_here.to(device),
        cut_places=torch.searchsorted(cut, blocks[cut_here]).to(device),
        num_cut=len(cut),
    )


def whole_grid(numel: int, period: int) -> Grid:
    """Return the grid of a tensor that no rank shares, for any device; see :func:`make_grid`."""
    whole = Part(0, numel)
    return make_grid(whole, [whole], period)


def _place(part: Part, sizes: Tensor, width: int, device: torch.device | None) -> slice | Tensor:
    if not len(sizes):
        return slice(0, 0)
    if part.num_runs == 1 or bool((sizes == width).all()):
        # Only the first and the last row can be short: one is padded before, the other behind.
        start = width - int(sizes[0])
        return slice(start, start + part.numel)
    return sizes[:, None].to(device)

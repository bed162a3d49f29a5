"""Which part of each matrix each rank holds, and how the parts travel together.

Pure: plain integers in, frozen records out; it must not import torch.distributed. Nothing here
asks a peer, because every size follows from the shape, the mesh and the placements.

[Note: one slot for all ranks]
    A bucket carries several matrices in one buffer. On every rank a matrix has the same slot:
    same offset, same length, long enough for the largest shard of that matrix; a rank with a
    smaller shard leaves the rest of the slot unused. After the gather the buffer is
    (rank, slots), and where the shard of rank r lies in it needs no further exchange. torch cuts
    a dimension into pieces of equal length and leaves what is missing to the last ranks, so the
    first rank holds the largest shard of every matrix and slots cost no more than padding each
    rank's whole message would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral
from typing import Protocol, TypeAlias, TypeVar

Ranks: TypeAlias = tuple[int, ...]
Shape: TypeAlias = tuple[int, int]
Span: TypeAlias = tuple[int, int]  # start, length


class HasShape(Protocol):
    """A whole matrix, whatever else is known of it."""

    @property
    def shape(self) -> Shape:
        """Rows and columns."""


HasShapeT = TypeVar("HasShapeT", bound=HasShape)

BYTES_PER_ELEMENT = 2  # bfloat16, the type in which a matrix travels

# Matrices of one shape that are computed together.
MAX_STACKABLE_NUMEL = 2**16  # of each: on CPUs larger ones are faster one by one
MAX_STACKED_NUMEL = 2**22  # of all, which bounds the memory of a batch
# Of whole matrices that a rank puts together at a time, as bfloat16. On CPUs less is better: the
# smaller a round, the more of an exchange hides behind the work on others.
BUCKET_BYTES, BUCKET_BYTES_ON_CPUS = 16 * 2**20, 2 * 2**20


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """One mesh axis that cuts matrices: ``dim`` into ``num_ranks`` pieces.

    ``split_factor`` above 1 is torch's strided shard: this axis stands left of others in the
    mesh, yet cuts the pieces that those others, ``split_factor`` in all, have left.
    """

    dim: int
    num_ranks: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """The ranks that hold different shards of a matrix, and the cuts that made the shards."""

    ranks: Ranks  # global, ascending
    cuts: tuple[Cut, ...]  # in mesh order
    places: Ranks = ()  # the same ranks by their shards: a mesh may list them in another order
    device_type: str = "cpu"  # of the mesh, so where matrices are put together

    def bucket_bytes(self, wanted: int | None) -> int:
        """Return the limit that was asked for, or what is good on this device."""
        if wanted is not None:
            return wanted
        return BUCKET_BYTES_ON_CPUS if self.device_type == "cpu" else BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The part of a matrix that one rank holds; rows and columns without gaps."""

    first_row: int
    first_col: int
    num_rows: int
    num_cols: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.num_rows * self.num_cols


@dataclass(frozen=True, slots=True)
class Matrix:
    """One sharded parameter of the optimizer, as far as its exchange is concerned."""

    position: int  # in the optimizer's full list of parameters
    shape: Shape  # of the whole matrix
    layout: Layout
    index: int  # this rank's shard, counted with the last cut varying fastest


@dataclass(frozen=True, slots=True)
class Block:
    """Shards of consecutive ranks that one strided copy moves into the whole matrix.

    Shard number i starts at element ``start + i * step`` of the row-major matrix.
    """

    first_index: int  # counted as Matrix.index
    num_shards: int
    start: int
    step: int
    num_rows: int  # of each shard
    num_cols: int


@dataclass(frozen=True, slots=True)
class Slot:
    """One matrix in a bucket."""

    position: int
    shape: Shape
    offset: int  # elements, the same on every rank
    own: Rectangle
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Matrices of one layout that are gathered together, with one collective for each cut."""

    layout: Layout
    slots: tuple[Slot, ...]
    numel: int  # elements that one rank sends

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the buffer that every rank holds after the gather."""
        return self.numel * len(self.layout.ranks) * BYTES_PER_ELEMENT


def piece(start: int, length: int, *, num_pieces: int, index: int) -> tuple[int, int]:
    """Return (start, length) of one piece of an interval, cut as torch.chunk cuts.

    All pieces have the length of the first, until nothing is left: the last piece with elements
    may be shorter, and pieces after it are empty.
    """
    longest = -(-length // num_pieces)
    offset = min(index * longest, length)
    return start + offset, min(longest, length - offset)


def cutting_order(cuts: Sequence[Cut]) -> tuple[int, ...]:
    """Return the indices of ``cuts`` with the outermost cut of each dimension first.

    Plain cuts apply from left to right. A strided one applies after the cuts to its right whose
    sizes multiply to its split factor: FSDP over tensor parallelism writes the FSDP axis on the
    left, but cuts the rows which tensor parallelism has left on this rank.

    Raises:
        NotImplementedError: The split factor matches no cuts to the right, so the shards have
            gaps and are not rectangles.
    """
    order: list[int] = []
    for index in reversed(range(len(cuts))):
        cut, place = cuts[index], 0
        pieces = 1
        while pieces < cut.split_factor and place < len(order):
            outer = cuts[order[place]]
            pieces *= outer.num_ranks if outer.dim == cut.dim else 1
            place += 1
        if pieces != cut.split_factor:
            raise NotImplementedError(
                f"a strided shard with split factor {cut.split_factor} on dim {cut.dim} does not "
                f"match the axes to its right, so its shards are not rectangles: {tuple(cuts)}"
            )
        order.insert(place, index)
    return tuple(order)


@lru_cache(maxsize=4096)
def boxes(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[tuple[Span, ...], ...]:
    """Return what every rank holds of a tensor, for each dim; the last cut varies fastest.

    This is where the shards really lie. For strided shards whose rows do not divide, torch's own
    ``compute_local_shape_and_global_offset`` describes some of FSDP's shards otherwise (7 rows
    on a 3 x 2 mesh, for example); there this function follows FSDP.

    Raises:
        NotImplementedError: See :func:`cutting_order`.
    """
    order = cutting_order(cuts)
    sizes = [cut.num_ranks for cut in cuts]
    found = []
    for flat in range(math.prod(sizes)):
        spans = [(0, length) for length in shape]
        for i in order:
            index = flat // math.prod(sizes[i + 1 :]) % sizes[i]
            start, length = spans[cuts[i].dim]
            spans[cuts[i].dim] = piece(start, length, num_pieces=sizes[i], index=index)
        found.append(tuple(spans))
    return tuple(found)


@lru_cache(maxsize=4096)
def rectangles(shape: Shape, cuts: tuple[Cut, ...]) -> tuple[Rectangle, ...]:
    """Return the rectangle of every rank; see :func:`boxes`."""
    return tuple(
        Rectangle(row, col, num_rows, num_cols)
        for (row, num_rows), (col, num_cols) in boxes(shape, cuts)
    )


def blocks(parts: Sequence[Rectangle], *, num_cols: int) -> tuple[Block, ...]:
    """Return the copies that assemble a matrix of ``num_cols`` columns from its parts.

    Neighbours of equal shape and equal distance share one copy: an even row or column cut needs
    a single copy on any number of ranks, an uneven one a second.
    """
    found: list[Block] = []
    for index, part in enumerate(parts):
        if not part.numel:
            continue
        start = part.first_row * num_cols + part.first_col
        block = Block(index, 1, start, 0, part.num_rows, part.num_cols)
        longer = _joined(found[-1], block) if found else None
        if longer is not None:
            found[-1] = longer
        else:
            found.append(block)
    return tuple(found)


def _joined(before: Block, shard: Block) -> Block | None:
    """One block for both, or None if ``shard`` does not continue ``before``."""
    step = before.step if before.num_shards > 1 else shard.start - before.start
    continues = (
        before.first_index + before.num_shards == shard.first_index
        and before.num_rows == shard.num_rows
        and before.num_cols == shard.num_cols
        and shard.start == before.start + before.num_shards * step
        and step > 0  # torch has no negative strides
    )
    return replace(before, num_shards=before.num_shards + 1, step=step) if continues else None


def plan_buckets(
    matrices: Iterable[Matrix], *, bucket_bytes: int | None = None
) -> tuple[Bucket, ...]:
    """Return the buckets of one step, in the order in which every rank gathers them.

    Buckets of one layout follow the optimizer's list of parameters. Buckets of different layouts
    are ordered by the ranks they involve: ranks that share only some of their layouts agree on
    that order without knowing each other's lists, and so never wait for each other in a circle.

    Args:
        matrices: The sharded parameters that have a gradient.
        bucket_bytes: Upper limit for the whole matrices of one bucket, in bytes as bfloat16.
            A larger matrix travels alone. Must be equal on all ranks. None for
            :meth:`Layout.bucket_bytes`.

    Raises:
        NotImplementedError: See :func:`cutting_order`.
    """
    by_layout: dict[Layout, list[Matrix]] = {}
    for matrix in sorted(matrices, key=lambda each: each.position):
        by_layout.setdefault(matrix.layout, []).append(matrix)
    return tuple(
        _bucket(layout, part)
        for layout in sorted(by_layout)
        for part in split_by_bytes(by_layout[layout], layout.bucket_bytes(bucket_bytes))
    )


def check_bucket_bytes(value: int | None) -> int | None:
    """Return ``value`` if it can be a limit.

    Raises:
        ValueError: It is neither None nor a positive number of bytes.
    """
    if value is None:
        return None
    if isinstance(value, Integral) and not isinstance(value, bool) and value > 0:
        return int(value)  # numpy's for one is no int
    raise ValueError(f"bucket_bytes must be a positive number of bytes, or None, but is: {value!r}")


def split_by_bytes(items: Sequence[HasShapeT], limit: int) -> list[list[HasShapeT]]:
    """Return runs of up to ``limit`` bytes as bfloat16; a matrix larger than that is alone."""
    parts: list[list[HasShapeT]] = []
    room = 0
    for item in items:
        size = math.prod(item.shape) * BYTES_PER_ELEMENT
        if not parts or size > room:
            parts.append([])
            room = limit
        parts[-1].append(item)
        room -= size
    return parts


def _bucket(layout: Layout, matrices: Sequence[Matrix]) -> Bucket:
    slots: list[Slot] = []
    offset = 0
    for matrix in matrices:
        parts = rectangles(matrix.shape, layout.cuts)
        slots.append(
            Slot(
                position=matrix.position,
                shape=matrix.shape,
                offset=offset,
                own=parts[matrix.index],
                blocks=blocks(parts, num_cols=matrix.shape[1]),
            )
        )
        # See [Note: one slot for all ranks].
        offset += max(part.numel for part in parts)
    return Bucket(layout=layout, slots=tuple(slots), numel=offset)

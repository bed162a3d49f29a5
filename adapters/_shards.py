"""Which elements of a parameter this rank holds, read from torch once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from adapters._blocks import Part
from adapters._plan import Cut, Rectangle, Span, boxes
from adapters._reshard import Reduction, exchange_device, gather_groups, layout_of

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """A parameter as all ranks see it, and this rank's part of it.

    [Note: copies]
        On a mesh with a replicating axis several ranks hold the same part. Their gradients are
        equal by the meaning of the placement, so whatever is counted over the whole tensor is
        counted by the first of them, and the others contribute zeros.
    """

    shape: tuple[int, ...]  # of the whole parameter
    parts: tuple[Part, ...]  # of all ranks, each element in one of them
    index: int  # this rank's place in it
    box: tuple[Span, ...]  # what this rank holds, for each dim
    is_cut: tuple[bool, ...]  # for each dim
    is_first_copy: bool = True
    order: tuple[Any, ...] = ()  # the ranks that hold different parts
    groups: tuple[dist.ProcessGroup, ...] = ()  # between those
    mesh_ranks: tuple[int, ...] = ()  # copies too
    mesh_groups: tuple[dist.ProcessGroup, ...] = ()
    device: torch.device = _CPU  # where the groups communicate

    @property
    def own(self) -> Part:
        """The elements that this rank holds."""
        return self.parts[self.index]

    @property
    def rectangle(self) -> Rectangle:
        """The rows and columns that this rank holds of a matrix."""
        (row, num_rows), (col, num_cols) = self.box
        return Rectangle(row, col, num_rows, num_cols)

    def between_parts(self, numel: int, dtype: torch.dtype = torch.float32) -> Reduction:
        """A vector to combine over the ranks that hold different parts."""
        return Reduction(self.order, self.groups, self.device, numel, dtype)

    def over_mesh(self, vector: Tensor) -> tuple[Reduction, Tensor]:
        """A vector to combine over all ranks of the mesh; zeros from copies but the first."""
        part = Reduction(
            (self.mesh_ranks,), self.mesh_groups, self.device, vector.numel(), vector.dtype
        )
        return part, vector if self.is_first_copy else torch.zeros_like(vector)


def read_shards(param: Tensor, *, name: str, alone: bool = False) -> Shards:
    """Return where the elements of a parameter lie.

    Args:
        param: A parameter of any number of dimensions.
        name: What error texts call it.
        alone: Take this rank's part for a tensor of its own.

    Raises:
        NotImplementedError: The placements are not supported.
        ValueError: The parameter lives on a mesh without this rank.

    Collectives:
        None.
    """
    if alone or not isinstance(param, DTensor):
        shape = tuple((param.to_local() if isinstance(param, DTensor) else param).shape)
        return Shards(shape, *_whole(shape))
    shape = tuple(param.shape)
    layout, index = layout_of(param, name=name)
    mesh = param.device_mesh
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    copies = [axis for axis in axes if param.placements[axis].is_replicate()]
    try:
        parts = _parts(shape, layout.cuts)
    except NotImplementedError as error:
        raise NotImplementedError(f"{name} with placements {param.placements}: {error}") from None
    return Shards(
        shape,
        parts,
        index,
        boxes(shape, layout.cuts)[index],
        tuple(any(cut.dim == dim for cut in layout.cuts) for dim in range(len(shape))),
        is_first_copy=all(mesh.get_local_rank(axis) == 0 for axis in copies),
        order=(layout.ranks, layout.places, layout.cuts),
        groups=gather_groups(param),
        mesh_ranks=tuple(sorted(mesh.mesh.flatten().tolist())),
        mesh_groups=tuple(mesh.get_group(axis) for axis in axes),
        device=exchange_device(param),
    )


def _whole(
    shape: Sequence[int],
) -> tuple[tuple[Part, ...], int, tuple[Span, ...], tuple[bool, ...]]:
    box = tuple((0, length) for length in shape)
    return (Part(0, math.prod(shape)),), 0, box, (False,) * len(shape)


@lru_cache(maxsize=4096)
def _parts(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[Part, ...]:
    """Return the elements of every rank as runs.

    Raises:
        NotImplementedError: Two dims beyond the first are cut, or a dim between: the elements
            of a rank are then no runs at equal distances.
    """
    cut_dims = sorted({cut.dim for cut in cuts} - {0})
    if len(cut_dims) > 1:
        raise NotImplementedError(
            f"at most the first and one other dimension can be cut; got cuts of {cut_dims}"
        )
    # Seen as a matrix whose columns begin with the dimension that is cut beside the first.
    split = cut_dims[0] if cut_dims else 1
    num_cols = math.prod(shape[split:])
    per_row, per_col = math.prod(shape[1:split]), math.prod(shape[split + 1 :])
    found = []
    for box in boxes(shape, cuts):
        row, num_rows = (box[0][0] * per_row, box[0][1] * per_row) if shape else (0, 1)
        col, length = (0, num_cols)
        if split < len(shape):
            col, length = box[split][0] * per_col, box[split][1] * per_col
        if length == num_cols:
            found.append(Part(row * num_cols, num_rows * num_cols))
        else:
            found.append(Part(row * num_cols + col, length, num_rows, num_cols))
    return tuple(found)

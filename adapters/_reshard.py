"""Shards <-> whole matrices: the only file of adapters that communicates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from adapters._plan import Bucket, Cut, Layout, Matrix, Shape, Slot, rectangles

# torch 2.13 renamed it and warns at each call of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def describe(param: Tensor, *, position: int, name: str) -> Matrix | None:
    """Return what the plan must know of a parameter, or None if this rank holds all of it.

    Args:
        param: A parameter of two dimensions.
        position: Its place in the optimizer's full list of parameters.
        name: What error texts call it.

    Raises:
        NotImplementedError: The placements cannot be described as rectangles.
        ValueError: The parameter lives on a mesh without this rank.
    """
    if not isinstance(param, DTensor):
        return None
    axes = sharded_axes(param, name=name)
    if not axes:
        return None
    shape = _shape(param)
    mesh = param.device_mesh
    cuts = tuple(_cut(param.placements[axis], mesh.size(axis)) for axis in axes)
    index = 0
    for axis in axes:
        # Not the mesh coordinate: where a mesh lists its ranks out of order the two differ, and
        # torch places shards by the rank in the group.
        index = index * mesh.size(axis) + mesh.get_local_rank(axis)
    try:
        own = rectangles(shape, cuts)[index]
    except NotImplementedError as error:
        raise NotImplementedError(f"{name} with placements {param.placements}: {error}") from None
    local_shape = tuple(param.to_local().shape)
    if local_shape != (own.num_rows, own.num_cols):
        raise NotImplementedError(
            f"{name}: this rank holds a shard of shape {local_shape}, but shape {shape} with "
            f"placements {param.placements} gives it {(own.num_rows, own.num_cols)}. "
            "Only the uneven shards that torch itself makes are supported."
        )
    return Matrix(position, shape, Layout(_ranks(param, axes), cuts), index)


def sharded_axes(param: DTensor, *, name: str = "a parameter") -> tuple[int, ...]:
    """Return the mesh axes that cut this parameter, from left to right.

    Raises:
        NotImplementedError: A placement is neither a replica nor a shard of rows or columns.
        ValueError: The parameter lives on a mesh without this rank.
    """
    mesh = param.device_mesh
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{name} lives on {mesh}, to which rank {dist.get_rank()} does not belong. "
            "Give each rank the parameters of its own meshes only."
        )
    axes = []
    for axis, placement in enumerate(param.placements):
        if isinstance(placement, Replicate) or mesh.size(axis) == 1:
            continue
        if not isinstance(placement, (Shard, _StridedShard)) or placement.dim not in (0, 1):
            raise NotImplementedError(
                f"{name}: placement {placement!r} on mesh axis {axis} is not supported; expected "
                f"Replicate(), Shard(0) or Shard(1), got {param.placements}. "
                "Redistribute the parameter first."
            )
        axes.append(axis)
    return tuple(axes)


def gather_groups(param: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the group of each sharded mesh axis, in mesh order: the mesh's own objects."""
    return tuple(param.device_mesh.get_group(axis) for axis in sharded_axes(param))


def exchange_device(param: DTensor) -> torch.device:
    """Return where matrices are gathered and computed: offloaded shards visit the mesh's device."""
    device, mesh_type = param.to_local().device, param.device_mesh.device_type
    return device if device.type == mesh_type else torch.device(mesh_type)


def gather(
    bucket: Bucket,
    shards: Iterable[Tensor],  # one for each slot, this rank's, any float dtype
    *,
    groups: Sequence[dist.ProcessGroup],  # one for each cut
    device: torch.device,
) -> Tensor:
    """Return what all ranks packed for ``bucket``, as bfloat16.

    The cast loses nothing that Newton-Schulz would keep: it starts with the same one.

    Args:
        bucket: The plan; equal on all ranks but for ``Slot.own``.
        shards: In the order of ``bucket.slots``. Each is consumed before the next is asked for,
            so a generator never holds two.
        groups: One for each of ``bucket.layout.cuts``.
        device: Where the group communicates; shards are copied there.

    Returns:
        Shape (ranks, bucket.numel), bfloat16; the rank of the last cut varies fastest.

    Collectives:
        One all_gather for each cut, innermost first: ``bucket.numel`` bfloat16 on the last group,
        then as many times more as that group has ranks on the next. All ranks of the layout must
        call, with the same bucket.
    """
    # Zeros, so that what a rank leaves of a slot is no stray memory on the wire.
    packed = torch.zeros(bucket.numel, dtype=torch.bfloat16, device=device)
    for slot, shard in zip(bucket.slots, shards, strict=True):
        packed[slot.offset : slot.offset + shard.numel()].view(shard.shape).copy_(shard)
    for group in reversed(groups):
        gathered = packed.new_empty(group.size() * packed.numel())
        _all_gather(gathered, packed, group=group)
        packed = gathered
    return packed.view(-1, bucket.numel)


def assemble(
    slot: Slot,
    gathered: Tensor,  # (ranks, numel), from gather
) -> Tensor:
    """Return one whole matrix: (rows, cols), bfloat16, contiguous, with memory of its own.

    Contiguous is not for speed: the strides of its operands decide the bits of a product, and an
    unsharded run has these.

    Collectives:
        None.
    """
    cols = slot.shape[1]
    whole = gathered.new_empty(slot.shape)
    for block in slot.blocks:
        size = (block.num_rows, block.num_cols)
        ranks = slice(block.first_index, block.first_index + block.num_shards)
        source = gathered[ranks, slot.offset : slot.offset + math.prod(size)]
        target = whole.as_strided(
            (block.num_shards, *size), (block.step, cols, 1), storage_offset=block.start
        )
        target.copy_(source.view(block.num_shards, *size))
    return whole


def own_part(slot: Slot, whole: Tensor, *, device: torch.device) -> Tensor:
    """Return this rank's shard of a whole matrix, copied so that the matrix can be freed.

    Args:
        slot: The matrix in its bucket.
        whole: Shape ``slot.shape``.
        device: Where the parameter's shard is.

    Collectives:
        None.
    """
    own = slot.own
    rows = slice(own.first_row, own.first_row + own.num_rows)
    cols = slice(own.first_col, own.first_col + own.num_cols)
    return whole[rows, cols].to(device, copy=True)


def _cut(placement: Placement, num_ranks: int) -> Cut:
    if isinstance(placement, _StridedShard):
        return Cut(placement.dim, num_ranks, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Cut(placement.dim, num_ranks)
    raise AssertionError(f"{placement} is not a shard")


def _shape(param: DTensor) -> Shape:
    rows, cols = param.shape
    return rows, cols


def _ranks(param: DTensor, axes: Sequence[int]) -> tuple[int, ...]:
    """The global ranks that differ from this one only along ``axes``."""
    coordinate = param.device_mesh.get_coordinate()
    if coordinate is None:
        raise AssertionError("sharded_axes has refused a mesh without this rank")
    inside = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))
    return tuple(sorted(param.device_mesh.mesh[inside].flatten().tolist()))

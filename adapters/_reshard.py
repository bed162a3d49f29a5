"""Shards <-> whole matrices; with :mod:`adapters._transports` all of adapters that communicates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from adapters._data_phase import DataPhase
from adapters._owners import Crew
from adapters._plan import Bucket, Cut, Layout, Matrix, Slot, boxes
from adapters._transports import all_gather

_OPS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


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
    layout, index = layout_of(param, name=name)
    if not layout.cuts:
        return None
    rows, cols = param.shape
    return Matrix(position, (rows, cols), layout, index)


def crew_of(param: DTensor, *, position: int, name: str) -> tuple[Matrix, Crew]:
    """Return what the plan must know of a matrix that an owner computes.

    Args:
        param: A parameter of two dimensions on a mesh of several ranks, cut or copied.
        position: Its place in the optimizer's full list of parameters.
        name: What error texts call it.

    Raises:
        NotImplementedError: The placements cannot be described as rectangles.
        ValueError: The parameter lives on a mesh without this rank.
    """
    layout, index = layout_of(param, name=name)
    mesh = param.device_mesh
    copying = [axis for axis, each in enumerate(param.placements) if each.is_replicate()]
    cutting = [axis for axis in range(mesh.ndim) if axis not in copying]
    num_copies, copy = 1, 0
    for axis in copying:
        num_copies *= mesh.size(axis)
        copy = copy * mesh.size(axis) + mesh.get_local_rank(axis)
    places = tuple(mesh.mesh.permute(*copying, *cutting).flatten().tolist())
    rows, cols = param.shape
    matrix = Matrix(position, (rows, cols), layout, index)
    return matrix, Crew(tuple(sorted(places)), places, layout, num_copies, copy)


def layout_of(param: DTensor, *, name: str) -> tuple[Layout, int]:
    """Return the ranks that hold different shards of a parameter, its cuts, and this one's index.

    Args:
        param: A parameter of any number of dimensions.
        name: What error texts call it.

    Returns:
        The layout, without cuts if this rank holds all of it, and this rank's place among its
        shards, counted with the last cut varying fastest.

    Raises:
        NotImplementedError: The placements cannot be described as boxes.
        ValueError: The parameter lives on a mesh without this rank.
    """
    axes = sharded_axes(param, name=name)
    mesh = param.device_mesh
    cuts = tuple(_cut(param.placements[axis], mesh.size(axis)) for axis in axes)
    index = 0
    for axis in axes:
        # Not the mesh coordinate: where a mesh lists its ranks out of order the two differ, and
        # torch places shards by the rank in the group.
        index = index * mesh.size(axis) + mesh.get_local_rank(axis)
    shape = tuple(param.shape)
    try:
        own = tuple(length for _, length in boxes(shape, cuts)[index])
    except NotImplementedError as error:
        raise NotImplementedError(f"{name} with placements {param.placements}: {error}") from None
    local_shape = tuple(param.to_local().shape)
    if local_shape != own:
        raise NotImplementedError(
            f"{name}: this rank holds a shard of shape {local_shape}, but shape {shape} with "
            f"placements {param.placements} gives it {own}. "
            "Only the uneven shards that torch itself makes are supported."
        )
    places = _places(param, axes)
    return Layout(tuple(sorted(places)), cuts, places, mesh.device_type), index


def sharded_axes(param: DTensor, *, name: str = "a parameter") -> tuple[int, ...]:
    """Return the mesh axes that cut this parameter, from left to right.

    Raises:
        NotImplementedError: A placement is neither a replica nor a shard of a dimension.
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
        if not (isinstance(placement, (Shard, _StridedShard)) and 0 <= placement.dim < param.ndim):
            dims = " or ".join(f"Shard({dim})" for dim in range(param.ndim))
            raise NotImplementedError(
                f"{name}: placement {placement!r} on mesh axis {axis} is not supported; expected "
                f"Replicate() or {dims}, got {param.placements}. "
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


def memory_of(bucket: Bucket) -> int:
    """Return how many elements :func:`gather` keeps a bucket in."""
    total = numel = bucket.numel + 1
    for cut in reversed(bucket.layout.cuts):
        numel *= cut.num_ranks
        total += numel
    return total


def gather(
    bucket: Bucket,
    shards: Callable[[], Iterable[Tensor]],
    *,
    groups: Sequence[dist.ProcessGroup],  # one for each cut
    memory: Tensor,
    phase: DataPhase,
) -> Tensor:
    """Return what all ranks packed for ``bucket``, as bfloat16.

    The cast loses nothing that Newton-Schulz would keep: it starts with the same one.

    Args:
        bucket: The plan; equal on all ranks but for ``Slot.own``.
        shards: Makes this rank's, any float dtype, one for each of ``bucket.slots`` and in their
            order. Each is consumed before the next is asked for, so a generator never holds two.
        groups: One for each of ``bucket.layout.cuts``.
        memory: Shape (memory_of(bucket),), bfloat16, where the groups communicate.
        phase: Takes the errors of ``shards``; peers then get zeros and hear of it.

    Returns:
        Shape (ranks, bucket.numel), a view of ``memory``; the rank of the last cut varies fastest.

    Collectives:
        One all_gather for each cut, innermost first: ``bucket.numel + 1`` bfloat16 on the last
        group, then as many times more as that group has ranks on the next. All ranks of the layout
        must call, with the same bucket.
    """
    packed, memory = memory[: bucket.numel + 1], memory[bucket.numel + 1 :]
    # Zeros, so that what a rank leaves of a slot is no stray memory on the wire.
    packed.zero_()
    phase.attempt(lambda: _pack(bucket, shards(), packed))
    if phase.failed:
        packed.zero_()
    packed[-1] = phase.word(packed.device)
    for group in reversed(groups):
        gathered = memory[: group.size() * packed.numel()]
        memory = memory[gathered.numel() :]
        all_gather(gathered, packed, group=group)
        packed = gathered
    by_rank = packed.view(-1, bucket.numel + 1)
    phase.hear(by_rank[:, -1], ranks=bucket.layout.ranks)
    return by_rank[:, :-1]


def _pack(bucket: Bucket, shards: Iterable[Tensor], packed: Tensor) -> None:
    for slot, shard in zip(bucket.slots, shards, strict=True):
        packed[slot.offset : slot.offset + shard.numel()].view(shard.shape).copy_(shard)


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


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """A vector that several ranks combine element by element: what must be known of it."""

    # The ranks, and what else tells their batches apart: equal on those ranks alone.
    order: tuple[Any, ...]
    groups: tuple[dist.ProcessGroup, ...]  # one after the other; none if nobody else takes part
    device: torch.device  # where the groups communicate
    numel: int  # equal on those ranks, as is the dtype
    dtype: torch.dtype


def reduce_together(
    parts: Sequence[Reduction],
    vectors: Sequence[Tensor],
    op: Literal["max", "sum"],
    phase: DataPhase | None = None,
) -> list[Tensor]:
    """Return each vector as the ranks combined it, on the device it came from.

    Vectors of the same order, dtype and device travel as one. Batches are reduced in ascending
    order, so that ranks which share only some of them never wait for each other in a circle.

    Args:
        parts: The ranks of each must list theirs in the same sequence.
        vectors: Shape (part.numel,) for each; not written. None if ``phase`` has failed.
        op: ``"max"`` or ``"sum"``.
        phase: Whether this rank has failed; then peers get zeros and hear of it. None if all
            ranks have agreed that none has.

    Returns:
        One for each vector; nothing of use if a rank failed.

    Collectives:
        One all_reduce for each batch and each of its groups, of all its elements and, with a
        ``phase``, one more. All ranks of the groups must call.
    """
    found = list(vectors)
    batches: dict[tuple[Any, ...], list[int]] = {}
    for i, part in enumerate(parts):
        if part.groups and part.numel:
            key = (*part.order, str(part.dtype), str(part.device))
            batches.setdefault(key, []).append(i)
    for key in sorted(batches):
        members = batches[key]
        first, numel = parts[members[0]], sum(parts[i].numel for i in members)
        # A vector is short: who has no memory for it is beyond help, and peers wait in vain.
        together = torch.zeros(numel + (phase is not None), dtype=first.dtype, device=first.device)
        fill = partial(_fill, together[:numel], vectors, members)
        if phase is None:
            fill()
        else:
            phase.attempt(fill)
            together[numel] = phase.word(first.device)
        for group in first.groups:
            dist.all_reduce(together, op=_OPS[op], group=group)
        if phase is not None:
            phase.hear(together[numel], ranks=first.order[0])
        hand_out = partial(_hand_out, together[:numel], vectors, members, found)
        if phase is None:
            hand_out()
        else:
            phase.attempt(hand_out)
    return found


def _hand_out(
    together: Tensor, vectors: Sequence[Tensor], members: Sequence[int], found: list[Tensor]
) -> None:
    sizes = [vectors[i].numel() for i in members]
    for i, vector in zip(members, torch.split(together, sizes), strict=True):
        found[i] = vector.to(vectors[i].device)


def _fill(together: Tensor, vectors: Sequence[Tensor], members: Sequence[int]) -> None:
    torch.cat([vectors[i].to(together.device) for i in members], out=together)


def _cut(placement: Placement, num_ranks: int) -> Cut:
    if isinstance(placement, _StridedShard):
        return Cut(placement.dim, num_ranks, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Cut(placement.dim, num_ranks)
    raise AssertionError(f"{placement} is not a shard")


def _places(param: DTensor, axes: Sequence[int]) -> tuple[int, ...]:
    """The global ranks that differ from this one only along ``axes``, in mesh order."""
    coordinate = param.device_mesh.get_coordinate()
    if coordinate is None:
        raise AssertionError("sharded_axes has refused a mesh without this rank")
    inside = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))
    return tuple(param.device_mesh.mesh[inside].flatten().tolist())

"""Each matrix computed by every rank that holds a part: gathered, Newton-Schulz, own part kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from adapters._batches import in_batches, stacked
from adapters._by_owners import Orthogonalize
from adapters._data_phase import DataPhase
from adapters._plan import Bucket, Slot
from adapters._reshard import (
    assemble,
    exchange_device,
    gather,
    gather_groups,
    memory_of,
    own_part,
)


class BucketLines:
    """A bucket and what its exchange needs: read once, and good for every step of its plan."""

    def __init__(self, bucket: Bucket, param: Tensor) -> None:
        """Read it from one of the parameters."""
        if not isinstance(param, DTensor):
            raise AssertionError("a bucket holds sharded parameters")
        self.bucket = bucket
        self.device = exchange_device(param)
        self.groups: tuple[dist.ProcessGroup, ...] = gather_groups(param)


def memory_of_buckets(exchanges: Iterable[BucketLines]) -> dict[torch.device, int]:
    """Return how many bfloat16 elements the exchanges of a step need on each device.

    That is what a rank packs of a bucket and what it gets with each cut, at last all of it.
    """
    found: dict[torch.device, int] = {}
    for each in exchanges:
        found[each.device] = max(found.get(each.device, 0), memory_of(each.bucket))
    return found


def compute_by_all(
    exchanges: Sequence[BucketLines],
    pending: Mapping[int, Any],
    orthogonalize: Orthogonalize,
    memory: Mapping[torch.device, Tensor],
    phase: DataPhase,
) -> None:
    """Set the update of each pending matrix; nothing is written.

    Args:
        exchanges: Of the buckets, in the order in which all ranks take them.
        pending: Position -> what a step will do to a matrix with a gradient; nothing if ``phase``
            has failed.
        orthogonalize: Newton-Schulz of matrices of one kind, or of a single one.
        memory: Of :func:`memory_of_buckets`; free again when this returns.
        phase: Takes errors, and is told of those elsewhere.

    Collectives:
        For each bucket one all_gather for each cut of its layout.
    """
    for each in exchanges:
        gathered = gather(
            each.bucket,
            partial(_directions, each.bucket, pending),
            groups=each.groups,
            memory=memory[each.device],
            phase=phase,
        )
        phase.attempt(partial(_compute, each.bucket, pending, gathered, orthogonalize))


def _directions(bucket: Bucket, pending: Mapping[int, Any]) -> Iterable[Tensor]:
    return (pending[slot.position].direction() for slot in bucket.slots)


def _compute(
    bucket: Bucket, pending: Mapping[int, Any], gathered: Tensor, orthogonalize: Orthogonalize
) -> None:
    # A rank without elements of a matrix computes nothing of it.
    pairs = [(slot, pending[slot.position]) for slot in bucket.slots if slot.own.numel]
    for batch in in_batches([work.kind for _, work in pairs]):
        _compute_batch([pairs[i] for i in batch], gathered, orthogonalize)


def _compute_batch(
    pairs: Sequence[tuple[Slot, Any]], gathered: Tensor, orthogonalize: Orthogonalize
) -> None:
    # A function of its own, so that nothing of a batch is alive when the next is computed.
    slots, works = zip(*pairs, strict=True)
    updates = orthogonalize(works, stacked([assemble(slot, gathered) for slot in slots]))
    for slot, work, update in zip(slots, works, updates, strict=True):
        whole, work.row_moment = work.finish(update, work.state.get("normuon_v"))
        work.update = own_part(slot, whole, device=work.grad.device)

"""Shards to the owners of their matrices, and updates back: each travels once.

With :mod:`adapters._reshard`, all of adapters that communicates.

[Note: a failure travels along]
    A rank that fails while it packs or computes still takes part in every exchange of the step:
    its parcels hold zeros, and the last element of each says that it failed. Owners pass on what
    they heard. So after the last exchange every rank of a crew knows, and none has written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from adapters._owners import Hop, Parcel, Round, Size, Task, hops
from adapters._plan import Rectangle
from adapters._reshard import exchange_device, gather_groups

_all_to_all = dist.all_to_all_single


class Courier:
    """This rank's part in the exchanges of one round; used once, in the order of its methods."""

    def __init__(self, round_: Round, number: int, param: DTensor) -> None:
        """Plan the exchanges and make their buffers; communicates nothing.

        Args:
            round_: The matrices that travel.
            number: This rank's, among those that hold different shards.
            param: One of the parameters: its mesh's groups carry the exchanges.
        """
        self._round, self._number, self._copy = round_, number, round_.crew.copy
        self._num_parts = round_.crew.num_parts
        self._groups, self._copies = gather_groups(param), _copy_groups(param)
        self._hops = hops([cut.num_ranks for cut in round_.crew.layout.cuts], number)
        #: The matrices that this rank computes.
        self.owned = round_.owned_by(self._copy, number)
        self.device = exchange_device(param)
        # Zeros, so that what is left unpacked is no stray memory on the wire.
        self._parcels = self._zeros(self._total(round_.size_to_owners(self._copy)))
        self._results = self._zeros(self._total(round_.size_from_owners(self._copy)))
        copies = range(round_.crew.num_copies)
        self._returned = self._zeros(sum(map(self._length_of_copy, copies)))
        #: Whether a rank failed, as far as this one has heard: shape (), on the device.
        self.heard = torch.zeros((), dtype=torch.bool, device=self.device)

    # ---- to the owners ----

    def gathered(self) -> list[Task]:
        """Return the matrices whose shards this copy of the ranks sends to owners."""
        return [task for task in self._round.tasks if task.copy == self._copy]

    def pack(self, task: Task, shard: Tensor, rows: Tensor | None) -> None:
        """Put this rank's shard of one matrix, and the moments of its rows, in their place.

        Args:
            task: One of :meth:`gathered`.
            shard: This rank's, any float dtype; Newton-Schulz starts with the cast made here.
            rows: Shape (rows here,), float32, where they travel along.
        """
        start = 0
        for owner in range(self._num_parts):
            for each in self._round.owned_by(self._copy, owner):
                length = each.to_owner(self._number)
                if each is task:
                    _write(self._parcels[start : start + length], shard, rows)
                start += length
            start += 1

    def to_owners(self, *, failed: bool) -> None:
        """Exchange the parcels.

        Collectives:
            One all_to_all for each cut of the layout, the last first, of bfloat16: in the first
            this rank's shards of all gathered matrices, and one element a rank.
        """
        size = self._round.size_to_owners(self._copy)
        self._parcels = self._exchange(self._parcels, size, failed=failed)

    def assemble(self, task: Task) -> tuple[Tensor, Tensor | None]:
        """Return one whole matrix, (rows, cols) bfloat16, and the moments of its rows, float32.

        The matrix is contiguous: the strides of its operands decide the bits of a product, and an
        unsharded run has these.
        """
        whole = self._parcels.new_empty(task.shape)
        rows = torch.zeros(task.shape[0], device=self.device) if task.with_rows else None
        start = 0
        for source in range(self._num_parts):
            for each in self.owned:
                length = each.to_owner(source)
                if each is task:
                    part = each.parts[source]
                    shard, moments = _read(self._parcels[start : start + length], part)
                    _part_of(whole, part).copy_(shard)
                    if rows is not None and moments is not None:
                        rows[part.first_row : part.first_row + part.num_rows] = moments
                start += length
            start += 1
        return whole, rows

    # ---- and back ----

    def pack_result(self, task: Task, whole: Tensor, rows: Tensor | None) -> None:
        """Put the parts of one update, and the moments of its rows, in their places."""
        start = 0
        for destination in range(self._num_parts):
            for each in self.owned:
                length = each.from_owner(destination)
                if each is task:
                    part = each.parts[destination]
                    own = slice(part.first_row, part.first_row + part.num_rows)
                    target = self._results[start : start + length]
                    _write(target, _part_of(whole, part), None if rows is None else rows[own])
                start += length
            start += 1

    def views(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return position -> where this rank's part of each update will be, and its rows' moments.

        Made before the updates come, so that nothing can fail between the last exchange and the
        writing. The moments are bfloat16 halves of float32; see :func:`joined`.
        """
        found = {}
        start = 0
        for copy in range(self._round.crew.num_copies):
            for owner in range(self._num_parts):
                for task in self._round.owned_by(copy, owner):
                    part, length = task.parts[self._number], task.from_owner(self._number)
                    some = self._returned[start : start + length]
                    shard = some[: part.numel].view(part.num_rows, part.num_cols)
                    found[task.position] = shard, some[part.numel :]
                    start += length
                start += 1
        return found

    def from_owners(self, *, failed: bool) -> None:
        """Exchange the results, and share them among copies of the ranks.

        Collectives:
            One all_to_all for each cut of the layout, of bfloat16; then, for each axis with
            copies, one all_to_all of what this rank holds to each of its copies.
        """
        size = self._round.size_from_owners(self._copy)
        received = self._exchange(self._results, size, failed=failed)
        self._returned.copy_(self._shared(received) if self._copies else received)

    # ---- one exchange ----

    def _exchange(self, buffer: Tensor, size: Size, *, failed: bool) -> Tensor:
        others = range(self._num_parts)
        if failed:
            buffer.zero_()
        buffer[self._ends(size(self._number, d) for d in others)] = (self.heard | failed).to(
            buffer.dtype
        )
        held: Sequence[Parcel] = [(self._number, d) for d in others]
        for hop in self._hops:
            buffer = _hop(buffer, held, hop, size, self._groups[hop.axis])
            held = hop.after
        self.heard = self.heard | buffer[self._ends(size(s, self._number) for s in others)].any()
        return buffer

    def _shared(self, mine: Tensor) -> Tensor:
        """Give every copy of the ranks what this one has, and take theirs."""
        held, run = mine, 1
        num_copies = self._round.crew.num_copies
        lengths = [self._length_of_copy(copy) for copy in range(num_copies)]
        # Along the last axis first; then whole runs of copies along the one before.
        for group, place in reversed(self._copies):
            num_peers = dist.get_world_size(group)
            first = self._copy // (run * num_peers) * (run * num_peers)
            starts = [first + peer * run for peer in range(num_peers)]
            receive = [sum(lengths[start : start + run]) for start in starts]
            received = held.new_empty(sum(receive))
            send = [receive[place]] * num_peers
            _all_to_all(received, held.repeat(num_peers), receive, send, group=group)
            held, run = received, run * num_peers
        # Each copy's own owners have said how they fared.
        ends = self._ends(
            1 + sum(task.from_owner(self._number) for task in self._round.owned_by(copy, owner))
            for copy in range(num_copies)
            for owner in range(self._num_parts)
        )
        self.heard = self.heard | held[ends].any()
        return held

    def _total(self, size: Size) -> int:
        return sum(size(self._number, d) for d in range(self._num_parts))

    def _length_of_copy(self, copy: int) -> int:
        """Elements that this rank gets back from the owners of one copy of the ranks."""
        size = self._round.size_from_owners(copy)
        return sum(size(owner, self._number) for owner in range(self._num_parts))

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=torch.bfloat16, device=self.device)

    def _ends(self, sizes: Iterator[int]) -> Tensor:
        """Where the last element of each parcel lies."""
        return (torch.tensor(list(sizes)).cumsum(0) - 1).to(self.device)


def joined(halves: Tensor) -> Tensor:
    """Return the float32 numbers whose bits travelled as bfloat16: half as many elements."""
    return halves.clone().view(torch.float32)  # a view alone would need an even place


def _write(target: Tensor, shard: Tensor, rows: Tensor | None) -> None:
    target[: shard.numel()].view(shard.shape).copy_(shard)
    if rows is not None and len(target) > shard.numel():
        target[shard.numel() :].copy_(rows.contiguous().view(torch.bfloat16))


def _read(source: Tensor, part: Rectangle) -> tuple[Tensor, Tensor | None]:
    shard = source[: part.numel].view(part.num_rows, part.num_cols)
    rest = source[part.numel :]
    return shard, joined(rest) if len(rest) else None


def _part_of(whole: Tensor, part: Rectangle) -> Tensor:
    rows = slice(part.first_row, part.first_row + part.num_rows)
    return whole[rows, part.first_col : part.first_col + part.num_cols]


def _hop(
    buffer: Tensor, held: Sequence[Parcel], hop: Hop, size: Size, group: dist.ProcessGroup
) -> Tensor:
    outgoing = [parcel for some in hop.sent for parcel in some]
    incoming = [parcel for some in hop.received for parcel in some]
    send = [sum(size(*parcel) for parcel in some) for some in hop.sent]
    receive = [sum(size(*parcel) for parcel in some) for some in hop.received]
    received = buffer.new_empty(sum(receive))
    _all_to_all(received, _reordered(buffer, held, outgoing, size), receive, send, group=group)
    return _reordered(received, incoming, hop.after, size)


def _reordered(
    buffer: Tensor, before: Sequence[Parcel], after: Sequence[Parcel], size: Size
) -> Tensor:
    if list(before) == list(after):
        return buffer
    pieces = dict(zip(before, torch.split(buffer, [size(*p) for p in before]), strict=True))
    return torch.cat([pieces[parcel] for parcel in after])


def _copy_groups(param: DTensor) -> list[tuple[dist.ProcessGroup, int]]:
    """The groups of copies, and this rank's place in each, in mesh order."""
    mesh = param.device_mesh
    return [
        (mesh.get_group(axis), mesh.get_local_rank(axis))
        for axis in range(mesh.ndim)
        if mesh.size(axis) > 1 and param.placements[axis].is_replicate()
    ]

"""Shards to the owners of their matrices, and updates back: each travels once.

With :mod:`adapters._reshard`, all of adapters that communicates.

[Note: a failure travels along]
    A rank that fails while it packs or computes still takes part in every exchange of the step:
    its parcels hold zeros, and the last element of each says that it failed. Owners pass on what
    they heard. So after the last exchange every rank of a crew knows, and none has written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from adapters._owners import Hop, Piece, Round, Route, Sorting, Task, Way
from adapters._plan import Rectangle
from adapters._reshard import exchange_device, gather_groups

_all_to_all = dist.all_to_all_single


class Courier:
    """This rank's part in the exchanges of one round; used once, in the order of its methods."""

    def __init__(self, round_: Round, route: Route, param: DTensor) -> None:
        """Make the buffers; communicates nothing.

        Args:
            round_: The matrices that travel.
            route: This rank's part in it.
            param: One of the parameters: its mesh's groups carry the exchanges.
        """
        self.route = route
        self._copy = round_.crew.copy
        self._groups, self._copies = gather_groups(param), _copy_groups(param)
        self.device = exchange_device(param)
        # Zeros, so that what is left unpacked is no stray memory on the wire.
        self._parcels = self._zeros(sum(route.there.sizes_before))
        self._results = self._zeros(sum(route.back.sizes_before))
        self._returned = self._zeros(sum(chain.from_iterable(route.sizes_by_copy)))
        #: Whether a rank failed, as far as this one has heard: shape (), on the device.
        self.heard = torch.zeros((), dtype=torch.bool, device=self.device)

    # ---- to the owners ----

    def pack(self, piece: Piece, shard: Tensor, rows: Tensor | None) -> None:
        """Put this rank's shard of one matrix, and the moments of its rows, in their place.

        Args:
            piece: One of the route's ``gathered``.
            shard: This rank's, any float dtype; Newton-Schulz starts with the cast made here.
            rows: Shape (rows here + 1,), float32, where they travel along: the last is their age.
        """
        _write(self._parcels, piece, shard, rows)

    def to_owners(self, *, failed: bool) -> None:
        """Exchange the parcels.

        Collectives:
            One all_to_all for each cut of the layout, the last first, of bfloat16: in the first
            this rank's shards of all gathered matrices, and one element a rank.
        """
        self._parcels = self._exchange(self._parcels, self.route.there, failed=failed)

    def assemble(
        self, task: Task, pieces: Sequence[Piece]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return one whole matrix, bfloat16, the moments of its rows, float32, and their age.

        Shapes (rows, cols), (rows,) and ().

        The matrix is contiguous: the strides of its operands decide the bits of a product, and an
        unsharded run has these.
        """
        whole = self._parcels.new_empty(task.shape)
        rows = torch.zeros(task.shape[0], device=self.device) if task.with_rows else None
        age = None
        for piece in pieces:
            part = piece.part
            shard = self._parcels[piece.elements]
            _part_of(whole, part).copy_(shard.view(part.num_rows, part.num_cols))
            if rows is not None and piece.length > part.numel:
                own = slice(part.first_row, part.first_row + part.num_rows)
                moments = joined(self._parcels[piece.rows])
                rows[own], age = moments[:-1], moments[-1]
        return whole, rows, age

    # ---- and back ----

    def pack_result(self, pieces: Sequence[Piece], whole: Tensor, rows: Tensor | None) -> None:
        """Put the parts of one update, and the moments of its rows, in their places."""
        for piece in pieces:
            own = slice(piece.part.first_row, piece.part.first_row + piece.part.num_rows)
            part = _part_of(whole, piece.part)
            _write(self._results, piece, part, None if rows is None else rows[own])

    def views(self) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Return position -> where this rank's part of each update will be, and its rows' moments.

        Made before the updates come, so that nothing can fail between the last exchange and the
        writing. The moments are bfloat16 halves of float32; see :func:`joined`.
        """
        found = {}
        for task, piece in self.route.returned:
            shard = self._returned[piece.elements].view(piece.part.num_rows, piece.part.num_cols)
            found[task.position] = shard, self._returned[piece.rows]
        return found

    def from_owners(self, *, failed: bool) -> None:
        """Exchange the results, and share them among copies of the ranks.

        Collectives:
            One all_to_all for each cut of the layout, of bfloat16; then, for each axis with
            copies, one all_to_all of what this rank holds to each of its copies.
        """
        del self._parcels  # each has been computed
        received = self._exchange(self._results, self.route.back, failed=failed)
        self._returned.copy_(self._shared(received) if self._copies else received)

    # ---- one exchange ----

    def _exchange(self, buffer: Tensor, way: Way, *, failed: bool) -> Tensor:
        if failed:
            buffer.zero_()
        ends = self._ends(way.sizes_before)
        buffer[ends] = (self.heard | failed).to(buffer.dtype)
        for hop in way.hops:
            buffer = _hop(buffer, hop, self._groups[hop.axis])
        self.heard = self.heard | buffer[self._ends(way.sizes_after)].any()
        return buffer

    def _shared(self, mine: Tensor) -> Tensor:
        """Give every copy of the ranks what this one has, and take theirs."""
        held, run = mine, 1
        lengths = [sum(sizes) for sizes in self.route.sizes_by_copy]
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
        # The owners of each copy have said how they fared.
        ends = self._ends(tuple(chain.from_iterable(self.route.sizes_by_copy)))
        self.heard = self.heard | held[ends].any()
        return held

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=torch.bfloat16, device=self.device)

    def _ends(self, sizes: Sequence[int]) -> Tensor:
        """Where the last element of each parcel lies."""
        return torch.tensor([end - 1 for end in accumulate(sizes)], device=self.device)


def joined(halves: Tensor) -> Tensor:
    """Return the float32 numbers whose bits travelled as bfloat16: half as many elements."""
    return halves.clone().view(torch.float32)  # a view alone would need an even place


def _write(buffer: Tensor, piece: Piece, shard: Tensor, rows: Tensor | None) -> None:
    buffer[piece.elements].view(shard.shape).copy_(shard)
    if rows is not None and piece.length > piece.part.numel:
        buffer[piece.rows].copy_(rows.contiguous().view(torch.bfloat16))


def _part_of(whole: Tensor, part: Rectangle) -> Tensor:
    rows = slice(part.first_row, part.first_row + part.num_rows)
    return whole[rows, part.first_col : part.first_col + part.num_cols]


def _hop(buffer: Tensor, hop: Hop, group: dist.ProcessGroup) -> Tensor:
    received = buffer.new_empty(sum(hop.received))
    sent = _sorted(buffer, hop.sorted_before)
    _all_to_all(received, sent, list(hop.received), list(hop.sent), group=group)
    return _sorted(received, hop.sorted_after)


def _sorted(buffer: Tensor, sorting: Sorting | None) -> Tensor:
    if sorting is None:
        return buffer
    sizes, order = sorting
    parcels = torch.split(buffer, list(sizes))
    return torch.cat([parcels[place] for place in order])


def _copy_groups(param: DTensor) -> list[tuple[dist.ProcessGroup, int]]:
    """The groups of copies, and this rank's place in each, in mesh order."""
    mesh = param.device_mesh
    return [
        (mesh.get_group(axis), mesh.get_local_rank(axis))
        for axis in range(mesh.ndim)
        if mesh.size(axis) > 1 and param.placements[axis].is_replicate()
    ]

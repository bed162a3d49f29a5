"""Shards to the owners of their matrices, and updates back: each travels once.

A rank that fails meanwhile takes part to the end; see [Note: a failure travels along] in
:mod:`adapters._data_phase`. Each parcel has a last element that says whether its sender has failed
or has heard of a failure, and owners pass on what they heard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from adapters._data_phase import DataPhase
from adapters._owners import Round, Task
from adapters._parcels import Leg, Piece, Route, Sorting, Way
from adapters._plan import Rectangle
from adapters._reshard import exchange_device, gather_groups
from adapters._transports import CARRIES, Transport, Wait, scratch_numel


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """What the exchanges of one round need: read once, and good for every step of its plan."""

    round: Round
    route: Route
    device: torch.device  # where the exchanges are made
    transport: Transport
    groups: tuple[dist.ProcessGroup, ...]  # one for each cut
    copies: tuple[tuple[dist.ProcessGroup, Leg], ...]  # in the order in which they are shared
    # Where the last elements of parcels lie: packed, at owners, packed again, and back.
    ends: tuple[Tensor, ...]
    halves: tuple[int, int]  # elements of the two buffers between which parcels move
    in_place: bool  # results take the places of the shards that they are made of
    scratch: int  # elements

    @property
    def numel(self) -> int:
        """Elements of memory that a courier needs."""
        return sum(self.halves) + self.scratch

    @property
    def num_returned(self) -> int:
        """Elements that come back to this rank."""
        return sum(chain.from_iterable(self.route.sizes_by_copy))


def make_lines(round_: Round, route: Route, param: DTensor, transport: Transport) -> Lines:
    """Return what the exchanges of a round need; communicates nothing.

    Args:
        round_: The matrices that travel.
        route: This rank's part in it.
        param: One of the parameters: its mesh's groups carry the exchanges.
        transport: How.
    """
    copies = tuple(_legs_between_copies(round_.crew.copy, route, _copy_groups(param)))
    legs = [*(hop.leg for way in (route.there, route.back) for hop in way.hops)]
    legs += [leg for _, leg in copies]
    device = exchange_device(param)
    in_place = not any(task.with_rows for task in round_.tasks)  # or parcels are longer there
    halves = sum(route.there.sizes_before), sum(route.there.sizes_after)
    if not in_place or copies or len(route.there.hops) > 1:
        buffers = [route.there.sizes_before, route.back.sizes_before]
        buffers += [sizes for leg in legs for sizes in (leg.sent, leg.received)]
        halves = (max(map(sum, buffers)),) * 2
    parcels = (
        route.there.sizes_before,
        route.there.sizes_after,
        route.back.sizes_before,
        tuple(chain.from_iterable(route.sizes_by_copy)),
    )
    return Lines(
        round_,
        route,
        device,
        transport,
        gather_groups(param),
        copies,
        tuple(_ends(sizes, device) for sizes in parcels),
        halves,
        in_place,
        max((scratch_numel(transport, leg) for leg in legs), default=0),
    )


class Courier:
    """This rank's part in the exchanges of one round; used once, in the order of its methods."""

    def __init__(self, lines: Lines, memory: Tensor, returned: Tensor, phase: DataPhase) -> None:
        """Take the memory; allocates and communicates nothing.

        Args:
            lines: Of the round.
            memory: Shape (lines.numel,), bfloat16: until :meth:`back_from_owners` has returned.
            returned: Shape (lines.num_returned,), bfloat16: where updates will be.
            phase: Tells whether this rank has failed, and is told whether others have.
        """
        self.route = lines.route
        self._lines, self._phase = lines, phase
        # Parcels are in one of two buffers, and go into the other.
        first, second = lines.halves
        self._halves = memory[:first], memory[first : first + second]
        self._half = 1
        self._scratch = memory[first + second : lines.numel]
        self._parcels = self._other_half(sum(self.route.there.sizes_before))
        self._results = self._returned = returned
        self._journey: Iterator[None] = iter(())

    # ---- to the owners ----

    def pack(self, piece: Piece, shards: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Put this rank's shards of a task's matrices, and the moments of their rows, in place.

        Args:
            piece: One of the route's ``gathered``.
            shards: This rank's, any float dtype; Newton-Schulz starts with the cast made here.
            rows: For each shape (rows here + 1,), float32: the last is their age. Empty where they
                do not travel along.
        """
        _write(self._parcels, piece, shards, rows)

    def to_owners(self) -> None:
        """Send the parcels; :meth:`at_owners` waits for them.

        Collectives:
            One exchange for each cut of the layout, the last first, of bfloat16: in the first
            this rank's shards of all gathered matrices, and one element a rank. All but the first
            are made by :meth:`at_owners`.
        """
        self._say(self._parcels, 0)
        self._journey = self._travel(self._parcels, self.route.there, ())
        next(self._journey, None)

    def at_owners(self) -> None:
        """Wait for the parcels that others have sent here."""
        for _ in self._journey:
            pass
        self._hear(self._parcels, 1)
        if self._lines.in_place:
            self._results = self._parcels
        else:
            self._results = self._other_half(sum(self.route.back.sizes_before))

    def assemble(
        self, task: Task, pieces: Sequence[Piece]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return whole matrices, bfloat16, the moments of their rows, float32, and their age.

        Shapes (matrices, rows, cols), (matrices, rows) and (matrices,).

        They are contiguous: the strides of its operands decide the bits of a product, and an
        unsharded run has these.
        """
        number = len(task.positions)
        whole = self._parcels.new_empty(number, *task.shape)
        rows = whole.new_zeros(whole.shape[:2], dtype=torch.float32) if task.with_rows else None
        age = None
        for piece in pieces:
            part = piece.part
            _part_of(whole, part).copy_(self._parcels[piece.elements].view(piece.shape))
            if rows is not None and piece.has_rows:
                moments = joined(self._parcels[piece.rows]).view(number, -1)
                rows[:, part.first_row : part.first_row + part.num_rows] = moments[:, :-1]
                age = moments[:, -1]
        return whole, rows, age

    # ---- and back ----

    def pack_result(
        self, pieces: Sequence[Piece], wholes: Tensor | Sequence[Tensor], rows: Sequence[Tensor]
    ) -> None:
        """Put the parts of a task's updates, and the moments of their rows, in their places.

        Args:
            pieces: Where each rank's part of them goes.
            wholes: For each matrix shape (rows, cols), or all of them in one tensor.
            rows: For each matrix shape (rows,), float32. Empty where they do not travel along.
        """
        for piece in pieces:
            own = slice(piece.part.first_row, piece.part.first_row + piece.part.num_rows)
            parts: Tensor | list[Tensor]
            if isinstance(wholes, Tensor):
                parts = _part_of(wholes, piece.part)
            else:
                parts = [_part_of(whole, piece.part) for whole in wholes]
            _write(self._results, piece, parts, [each[own] for each in rows])

    def views(self) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Return position -> where this rank's part of each update will be, and its rows' moments.

        Made before the updates come, so that nothing can fail between the last exchange and the
        writing. The moments are bfloat16 halves of float32; see :func:`joined`.
        """
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for task, piece in self.route.returned:
            shards = self._returned[piece.elements].view(piece.shape).unbind()
            rows = self._returned[piece.rows].view(piece.count, -1).unbind()
            found.update(zip(task.positions, zip(shards, rows, strict=True), strict=True))
        return found

    def from_owners(self) -> None:
        """Send the results; :meth:`back_from_owners` waits for them.

        Collectives:
            One exchange for each cut of the layout, of bfloat16; then, for each axis with copies,
            one of what this rank holds to each of its copies. All but the first are made by
            :meth:`back_from_owners`; where nothing is cut, all are made here.
        """
        self._say(self._results, 2)
        self._journey = self._travel(self._results, self.route.back, self._lines.copies)
        next(self._journey, None)

    def back_from_owners(self) -> None:
        """Wait for the updates; then they are where :meth:`views` said."""
        for _ in self._journey:
            pass
        self._hear(self._returned, 3)

    # ---- the exchanges ----

    def _say(self, parcels: Tensor, which: int) -> None:
        if self._phase.failed:
            parcels.zero_()
        parcels[self._lines.ends[which]] = self._phase.word(parcels.device).to(parcels.dtype)

    def _hear(self, parcels: Tensor, which: int) -> None:
        ranks = self._lines.round.crew.ranks
        self._phase.hear(parcels[self._lines.ends[which]], ranks=ranks)

    def _travel(
        self, parcels: Tensor, way: Way, copies: Sequence[tuple[dist.ProcessGroup, Leg]]
    ) -> Iterator[None]:
        """Bring parcels where they go; yield while the first exchange is under way."""
        goes_back = way is self.route.back
        for i, hop in enumerate(way.hops):
            is_last = goes_back and i == len(way.hops) - 1 and not copies
            parcels = self._sorted(parcels, hop.sorted_before)
            sorted_after = hop.sorted_after
            received, wait = self._start(
                parcels, hop.leg, self._lines.groups[hop.axis], is_last and sorted_after is None
            )
            if not i:
                yield
            wait()
            parcels = self._sorted(received, sorted_after, is_last)
        for i, (group, leg) in enumerate(copies):
            # Along the last axis first; then whole runs of copies along the one before.
            sent = self._other_half(sum(leg.sent))
            sent.view(len(leg.sent), -1).copy_(parcels)
            parcels, wait = self._start(sent, leg, group, i == len(copies) - 1)
            wait()
        self._parcels = parcels

    def _start(
        self, sent: Tensor, leg: Leg, group: dist.ProcessGroup, is_last: bool
    ) -> tuple[Tensor, Wait]:
        received = self._returned if is_last else self._other_half(sum(leg.received))
        carry = CARRIES[self._lines.transport]
        return received, carry(received, sent, leg, group, self._scratch)

    def _sorted(self, parcels: Tensor, sorting: Sorting | None, is_last: bool = False) -> Tensor:
        if sorting is None:
            return parcels
        sizes, order = sorting
        each = torch.split(parcels, list(sizes))
        found = self._returned if is_last else self._other_half(parcels.numel())
        return torch.cat([each[place] for place in order], out=found)

    def _other_half(self, numel: int) -> Tensor:
        self._half = 1 - self._half
        return self._halves[self._half][:numel]


def joined(halves: Tensor) -> Tensor:
    """Return the float32 numbers whose bits travelled as bfloat16: half as many elements."""
    return halves.clone().view(torch.float32)  # a view alone would need an even place


def _write(
    buffer: Tensor, piece: Piece, parts: Tensor | Sequence[Tensor], rows: Sequence[Tensor]
) -> None:
    place = buffer[piece.elements].view(piece.shape)
    if isinstance(parts, Tensor):
        place.copy_(parts)
    else:
        torch._foreach_copy_(place.unbind(), list(parts))
    if piece.has_rows:
        halves = torch.stack(list(rows)).view(torch.bfloat16)
        buffer[piece.rows].view(halves.shape).copy_(halves)


def _part_of(whole: Tensor, part: Rectangle) -> Tensor:
    """Of one matrix or a stack of them."""
    rows = whole.narrow(-2, part.first_row, part.num_rows)
    is_wide = part.num_cols == whole.size(-1)  # most are, and one view is cheaper than two
    return rows if is_wide else rows.narrow(-1, part.first_col, part.num_cols)


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Where the last element of each parcel lies."""
    return torch.tensor([end - 1 for end in accumulate(sizes)], dtype=torch.int64, device=device)


def _legs_between_copies(
    copy: int, route: Route, groups: Sequence[tuple[dist.ProcessGroup, int]]
) -> Iterator[tuple[dist.ProcessGroup, Leg]]:
    """Yield what copies of this rank give each other, along the last axis first.

    Args:
        copy: Of the ranks, that this one belongs to.
        route: This rank's.
        groups: Of copies, in mesh order, and this rank's place in each.
    """
    lengths, run = [sum(sizes) for sizes in route.sizes_by_copy], 1
    for group, place in reversed(groups):
        num_peers = dist.get_world_size(group)
        first = copy // (run * num_peers) * (run * num_peers)
        held = [sum(lengths[first + peer * run :][:run]) for peer in range(num_peers)]
        starts = tuple(place * length for length in held)
        yield group, Leg((held[place],) * num_peers, tuple(held), starts, num_peers * max(held))
        run *= num_peers


def _copy_groups(param: DTensor) -> list[tuple[dist.ProcessGroup, int]]:
    """The groups of copies, and this rank's place in each, in mesh order."""
    mesh = param.device_mesh
    return [
        (mesh.get_group(axis), mesh.get_local_rank(axis))
        for axis in range(mesh.ndim)
        if mesh.size(axis) > 1 and param.placements[axis].is_replicate()
    ]

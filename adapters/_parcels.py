"""What one rank sends and gets in a round, where it lies in its buffers, and which way it goes.

Pure: plain integers in, frozen records out; it must not import torch.distributed. Every rank
derives its own part from the same rounds.

[Note: how parcels travel]
    Rank s has a parcel for each rank d: its shards of the matrices that d owns. Where one axis
    cuts the matrices, all parcels travel in one exchange. Where several do, they travel axis by
    axis, the last first: along an axis each goes to the peer that has its destination's place on
    it. Before and after each exchange the parcels in the buffer are sorted by destination, then by
    source. Ranks are numbered as shards are, with the last cut varying fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from adapters._owners import Round, Task
from adapters._plan import Rectangle

Parcel: TypeAlias = tuple[int, int]  # source, destination
Size: TypeAlias = Callable[[int, int], int]  # elements of a parcel


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one part of each matrix of a task lies: first all elements, then all rows' moments."""

    start: int
    length: int
    part: Rectangle
    count: int = 1  # matrices

    @property
    def elements(self) -> slice:
        """The elements of the parts, one matrix after the other."""
        return slice(self.start, self.start + self.count * self.part.numel)

    @property
    def rows(self) -> slice:
        """The moments of their rows, if they travel along."""
        return slice(self.elements.stop, self.start + self.length)

    @property
    def has_rows(self) -> bool:
        """Whether they do."""
        return self.length > self.count * self.part.numel

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the elements."""
        return (self.count, self.part.num_rows, self.part.num_cols)


@dataclass(frozen=True, slots=True)
class Way:
    """One direction: the parcels that a rank holds at first and at last, and the hops between."""

    sizes_before: tuple[int, ...]  # of the parcels, each with a last element for how it went
    sizes_after: tuple[int, ...]
    hops: tuple[Hop, ...]


Owned: TypeAlias = tuple[Task, tuple[Piece, ...], tuple[Piece, ...]]  # its parts: got, sent back


@dataclass(frozen=True, slots=True)
class Route:
    """Everything one rank needs to take part in a round, worked out once."""

    gathered: tuple[tuple[Task, Piece], ...]  # what it sends to owners of its copy
    owned: tuple[Owned, ...]
    returned: tuple[tuple[Task, Piece], ...]  # what it gets back, from all copies
    there: Way
    back: Way
    sizes_by_copy: tuple[tuple[int, ...], ...]  # of what comes back: for each copy, each owner


def plan_route(round_: Round, number: int, *, for_gather: bool = False) -> Route:
    """Return one rank's part in a round.

    Args:
        round_: What travels.
        number: This rank's place among the parts.
        for_gather: Whether to say where things lie in the buffers of peers: see :class:`Leg`.
    """
    crew = round_.crew
    everybody = range(crew.num_parts)
    by_copy = [round_.owned_by(copy) for copy in range(crew.num_copies)]
    mine = by_copy[crew.copy]

    def to_owner(s: int, d: int) -> int:
        return 1 + sum(task.to_owner(s) for task in mine[d])

    def from_owner(s: int, d: int) -> int:
        return 1 + sum(task.from_owner(d) for task in mine[s])

    gathered = _pieces([(tasks, number) for tasks in mine], Task.to_owner)
    got = _pieces([(mine[number], source) for source in everybody], Task.to_owner)
    sent = _pieces([(mine[number], target) for target in everybody], Task.from_owner)
    returned = _pieces([(tasks, number) for copy in by_copy for tasks in copy], Task.from_owner)
    owned = tuple(
        (
            task,
            tuple(piece for each, piece in got if each is task),
            tuple(piece for each, piece in sent if each is task),
        )
        for task in mine[number]
    )
    sizes = [cut.num_ranks for cut in crew.layout.cuts]
    return Route(
        gathered,
        owned,
        returned,
        _way(sizes, number, to_owner, for_gather=for_gather),
        _way(sizes, number, from_owner, for_gather=for_gather),
        tuple(
            tuple(1 + sum(task.from_owner(number) for task in tasks) for tasks in copy)
            for copy in by_copy
        ),
    )


def _pieces(
    parcels: Iterable[tuple[tuple[Task, ...], int]], length_of: Callable[[Task, int], int]
) -> tuple[tuple[Task, Piece], ...]:
    """Return where the parts of matrices lie: parcels of tasks, each for the part of one rank."""
    found = []
    start = 0
    for tasks, number in parcels:
        for task in tasks:
            length = length_of(task, number)
            found.append((task, Piece(start, length, task.parts[number], len(task.positions))))
            start += length
        start += 1
    return tuple(found)


# ---- the way of parcels ----


@dataclass(frozen=True, slots=True)
class Leg:
    """How much the ranks of one group send each other, as one of them sees it."""

    sent: tuple[int, ...]  # elements to each peer
    received: tuple[int, ...]  # elements from each peer
    # Only where all see everything: where in each peer's buffer lies what it sends to this rank,
    # and the length of the longest.
    starts: tuple[int, ...] = ()
    longest: int = 0


@dataclass(frozen=True, slots=True)
class Hop:
    """One exchange along one axis, as one rank sees it."""

    axis: int
    leg: Leg
    # (sizes, order) of parcels to put into another order before and after; None if they are in it.
    sorted_before: Sorting | None
    sorted_after: Sorting | None


Sorting: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def _way(sizes: Sequence[int], here: int, size: Size, *, for_gather: bool) -> Way:
    """Return the exchanges that bring all parcels to their destinations.

    Args:
        sizes: Ranks along each axis that cuts.
        here: This rank's number.
        size: Elements of a parcel.
        for_gather: See :func:`plan_route`.
    """
    own = _place(here, sizes)
    held = _held(own, sizes, len(sizes) - 1)
    first = held
    found = []
    for axis in reversed(range(len(sizes))):
        sent = _by_target(held, axis, sizes)
        peers = [[*own[:axis], peer, *own[axis + 1 :]] for peer in range(sizes[axis])]
        received = [_held(peer, sizes, axis, target=own[axis]) for peer in peers]
        after = _held(own, sizes, axis - 1)
        starts, longest = [], 0
        for peer in peers if for_gather else ():
            theirs = [
                _numel(each, size) for each in _by_target(_held(peer, sizes, axis), axis, sizes)
            ]
            starts.append(sum(theirs[: own[axis]]))
            longest = max(longest, sum(theirs))
        found.append(
            Hop(
                axis,
                Leg(
                    tuple(_numel(each, size) for each in sent),
                    tuple(_numel(each, size) for each in received),
                    tuple(starts),
                    longest,
                ),
                _sorting(held, [p for some in sent for p in some], size),
                _sorting([p for some in received for p in some], after, size),
            )
        )
        held = after
    return Way(
        tuple(size(*parcel) for parcel in first),
        tuple(size(*parcel) for parcel in held),
        tuple(found),
    )


def _by_target(held: Iterable[Parcel], axis: int, sizes: Sequence[int]) -> list[list[Parcel]]:
    """Return parcels by where they go along an axis."""
    found: list[list[Parcel]] = [[] for _ in range(sizes[axis])]
    for parcel in held:
        found[_place(parcel[1], sizes)[axis]].append(parcel)
    return found


def _numel(parcels: Iterable[Parcel], size: Size) -> int:
    return sum(size(*parcel) for parcel in parcels)


def _sorting(before: Sequence[Parcel], after: Sequence[Parcel], size: Size) -> Sorting | None:
    if list(before) == list(after):
        return None
    place = {parcel: i for i, parcel in enumerate(before)}
    return tuple(size(*parcel) for parcel in before), tuple(place[parcel] for parcel in after)


def _held(
    own: Sequence[int], sizes: Sequence[int], axis: int, *, target: int | None = None
) -> tuple[Parcel, ...]:
    """The parcels that a rank holds before the exchange along ``axis``, sorted.

    With ``target`` only those that go to this place on the axis.
    """
    free_sources: list[Iterable[int]] = [
        range(n) if i > axis else (own[i],) for i, n in enumerate(sizes)
    ]
    free_targets: list[Iterable[int]] = [
        (own[i],) if i > axis else range(n) for i, n in enumerate(sizes)
    ]
    if target is not None:
        free_targets[axis] = (target,)
    sources = [_number(place, sizes) for place in product(*free_sources)]
    targets = [_number(place, sizes) for place in product(*free_targets)]
    return tuple((s, d) for d in sorted(targets) for s in sorted(sources))


def _place(number: int, sizes: Sequence[int]) -> list[int]:
    place = []
    for size in reversed(sizes):
        number, at = divmod(number, size)
        place.append(at)
    return place[::-1]


def _number(place: Iterable[int], sizes: Sequence[int]) -> int:
    number = 0
    for at, size in zip(place, sizes, strict=True):
        number = number * size + at
    return number

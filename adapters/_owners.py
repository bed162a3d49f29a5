"""Who computes which matrix when each is computed once, and in which order its shards travel.

Pure: plain integers in, frozen records out; it must not import torch.distributed. Every rank
derives the same plan from shapes, meshes and placements, and nothing here asks a peer.

[Note: who owns a matrix]
    Owners are chosen over all parameters, those without a gradient too, so that they do not
    depend on which gradients there are. The largest first, by the work of Newton-Schulz, to the
    rank that has least. On a mesh with copies of each shard, every copy is a candidate: one copy
    of the ranks gathers a matrix, and the others get its update from their peers.

[Note: how parcels travel]
    Rank s has a parcel for each rank d: its shards of the matrices that d owns. Where one axis
    cuts the matrices, all parcels travel in one exchange. Where several do, they travel axis by
    axis, the last first: along an axis each goes to the peer that has its destination's place on
    it. Before and after each exchange the parcels in the buffer are sorted by destination, then by
    source. Ranks are numbered as shards are, with the last cut varying fastest.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from adapters._plan import Layout, Matrix, Ranks, Rectangle, Shape, rectangles, split_by_bytes

Parcel: TypeAlias = tuple[int, int]  # source, destination
Size: TypeAlias = Callable[[int, int], int]  # elements of a parcel

ROWS_AS_ELEMENTS = 2  # a float32 in bfloat16 elements


@dataclass(frozen=True, slots=True)
class Crew:
    """The ranks that divide some matrices among themselves."""

    ranks: Ranks  # global, ascending: all that hold shards, copies included
    places: Ranks  # the same, by copy and then by part: who holds what
    layout: Layout  # of this rank's copy; its ranks differ from copy to copy, its cuts do not
    num_copies: int
    copy: int  # this rank's

    @property
    def order(self) -> tuple[object, ...]:
        """Equal on all ranks of the crew; sorts crews alike everywhere."""
        return (self.ranks, self.places, self.layout.cuts)

    @property
    def num_parts(self) -> int:
        """Ranks that hold different shards of a matrix."""
        return math.prod(cut.num_ranks for cut in self.layout.cuts)


@dataclass(frozen=True, slots=True)
class Task:
    """One matrix, and who computes it."""

    position: int  # in the optimizer's full list of parameters
    shape: Shape
    parts: tuple[Rectangle, ...]  # by number of the rank in its copy
    copy: int  # the copy of the ranks that gathers it
    owner: int  # number of the rank in that copy
    with_rows: bool = False  # a float32 for each row travels along

    def to_owner(self, source: int) -> int:
        """Elements that a rank sends to the owner."""
        part = self.parts[source]
        sends_rows = self.with_rows and part.numel and not part.first_col
        # One more says how old they are: an owner may hold no part, and so not know.
        return part.numel + ROWS_AS_ELEMENTS * (part.num_rows + 1 if sends_rows else 0)

    def from_owner(self, destination: int) -> int:
        """Elements that the owner sends back."""
        part = self.parts[destination]
        rows = part.num_rows if self.with_rows and part.numel else 0
        return part.numel + ROWS_AS_ELEMENTS * rows


@dataclass(frozen=True, slots=True)
class Round:
    """Matrices of one crew that travel together."""

    crew: Crew
    tasks: tuple[Task, ...]  # by position

    def owned_by(self, copy: int) -> tuple[tuple[Task, ...], ...]:
        """Return what each rank of one copy computes, in the order in which it travels."""
        found: list[list[Task]] = [[] for _ in range(self.crew.num_parts)]
        for task in self.tasks:
            if task.copy == copy:
                found[task.owner].append(task)
        return tuple(map(tuple, found))


def flops(shape: Shape) -> int:
    """Return the work of one Newton-Schulz iteration, in multiplications: two products of each."""
    small, large = sorted(shape)
    return 2 * small * small * large + small**3


def assign(shapes: Sequence[tuple[int, Shape]], num_owners: int) -> dict[int, int]:
    """Return position -> owner, the largest matrix first to the owner with least to do.

    Args:
        shapes: (position, shape) of all matrices of a crew.
        num_owners: Ranks to divide them among.
    """
    loads = [(0, 0, owner) for owner in range(num_owners)]
    found = {}
    for position, shape in sorted(
        shapes, key=lambda each: (-flops(each[1]), -math.prod(each[1]), each[0])
    ):
        work, numel, owner = heapq.heappop(loads)
        found[position] = owner
        heapq.heappush(loads, (work + flops(shape), numel + math.prod(shape), owner))
    return found


def plan_rounds(
    every: Iterable[tuple[Matrix, Crew]],
    active: Iterable[int],
    *,
    bucket_bytes: int,
    with_rows: frozenset[int] = frozenset(),
) -> tuple[Round, ...]:
    """Return the rounds of one step, in the order in which every rank takes them.

    Args:
        every: All sharded matrices of the optimizer.
        active: Positions of those with a gradient.
        bucket_bytes: Upper limit for the whole matrices of one round, in bytes as bfloat16. A
            larger one travels alone.
        with_rows: Positions of those whose rows have a moment that travels along.
    """
    by_crew: dict[tuple[object, ...], tuple[Crew, list[Matrix]]] = {}
    for matrix, crew in every:
        by_crew.setdefault(crew.order, (crew, []))[1].append(matrix)
    wanted = set(active)
    rounds = []
    for order in sorted(by_crew):
        crew, matrices = by_crew[order]
        shapes = [(each.position, each.shape) for each in matrices]
        owners = assign(shapes, crew.num_copies * crew.num_parts)
        tasks = [
            _task(each, crew, owners[each.position], each.position in with_rows)
            for each in sorted(matrices, key=lambda each: each.position)
            if each.position in wanted
        ]
        rounds += [Round(crew, tuple(part)) for part in split_by_bytes(tasks, bucket_bytes)]
    return tuple(rounds)


def _task(matrix: Matrix, crew: Crew, slot: int, with_rows: bool) -> Task:
    copy, owner = divmod(slot, crew.num_parts)
    parts = rectangles(matrix.shape, crew.layout.cuts)
    return Task(matrix.position, matrix.shape, parts, copy, owner, with_rows)


# ---- one rank's part in a round ----


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one part of a matrix lies in a buffer: first its elements, then its rows' moments."""

    start: int
    length: int
    part: Rectangle

    @property
    def elements(self) -> slice:
        """The elements of the part."""
        return slice(self.start, self.start + self.part.numel)

    @property
    def rows(self) -> slice:
        """The moments of its rows, if they travel along."""
        return slice(self.start + self.part.numel, self.start + self.length)


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
            found.append((task, Piece(start, length, task.parts[number])))
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

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

from adapters._plan import BYTES_PER_ELEMENT, Layout, Matrix, Ranks, Rectangle, Shape, rectangles

Parcel: TypeAlias = tuple[int, int]  # source, destination
Size: TypeAlias = Callable[[int, int], int]  # elements of a parcel

ROWS_AS_ELEMENTS = 2  # a float32 in bfloat16 elements


@dataclass(frozen=True, slots=True)
class Crew:
    """The ranks that divide some matrices among themselves."""

    ranks: Ranks  # global, ascending: all that hold shards, copies included
    layout: Layout  # of this rank's copy; its ranks differ from copy to copy, its cuts do not
    num_copies: int
    copy: int  # this rank's

    @property
    def order(self) -> tuple[object, ...]:
        """Equal on all ranks of the crew; sorts crews alike everywhere."""
        return (self.ranks, self.layout.cuts, self.num_copies)

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
        rows = part.num_rows if self.with_rows and not part.first_col else 0
        return part.numel + ROWS_AS_ELEMENTS * rows

    def from_owner(self, destination: int) -> int:
        """Elements that the owner sends back."""
        part = self.parts[destination]
        return part.numel + ROWS_AS_ELEMENTS * part.num_rows * self.with_rows


@dataclass(frozen=True, slots=True)
class Round:
    """Matrices of one crew that travel together."""

    crew: Crew
    tasks: tuple[Task, ...]  # by position

    def owned_by(self, copy: int, owner: int) -> tuple[Task, ...]:
        """Return what one rank computes, in the order in which it travels."""
        return tuple(task for task in self.tasks if (task.copy, task.owner) == (copy, owner))

    def size_to_owners(self, copy: int) -> Size:
        """Return the size of each parcel on the way to owners: one element says how it went."""
        return lambda s, d: 1 + sum(task.to_owner(s) for task in self.owned_by(copy, d))

    def size_from_owners(self, copy: int) -> Size:
        """Return the size of each parcel on the way back."""
        return lambda s, d: 1 + sum(task.from_owner(d) for task in self.owned_by(copy, s))

    def returned_to(self, copy: int, number: int) -> int:
        """Elements that one rank gets back from all owners of its copy."""
        return sum(task.from_owner(number) for task in self.tasks if task.copy == copy)


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
        rounds += [Round(crew, part) for part in _split_by_bytes(tasks, bucket_bytes)]
    return tuple(rounds)


def _task(matrix: Matrix, crew: Crew, slot: int, with_rows: bool) -> Task:
    copy, owner = divmod(slot, crew.num_parts)
    parts = rectangles(matrix.shape, crew.layout.cuts)
    return Task(matrix.position, matrix.shape, parts, copy, owner, with_rows)


def _split_by_bytes(tasks: Sequence[Task], limit: int) -> list[tuple[Task, ...]]:
    parts: list[list[Task]] = []
    room = 0
    for task in tasks:
        size = math.prod(task.shape) * BYTES_PER_ELEMENT
        if not parts or size > room:
            parts.append([])
            room = limit
        parts[-1].append(task)
        room -= size
    return [tuple(part) for part in parts]


# ---- the way of parcels ----


@dataclass(frozen=True, slots=True)
class Hop:
    """One exchange along one axis, as one rank sees it."""

    axis: int
    sent: tuple[tuple[Parcel, ...], ...]  # to each peer, in order
    received: tuple[tuple[Parcel, ...], ...]  # from each peer, in order
    after: tuple[Parcel, ...]  # what the rank then holds, in order


def hops(sizes: Sequence[int], here: int) -> tuple[Hop, ...]:
    """Return the exchanges that bring all parcels to their destinations.

    Args:
        sizes: Ranks along each axis that cuts.
        here: This rank's number.
    """
    found = []
    for axis in reversed(range(len(sizes))):
        own = _place(here, sizes)
        sent, received = [], []
        for peer in range(sizes[axis]):
            other = [*own[:axis], peer, *own[axis + 1 :]]
            # Sources agree with their holder up to this axis, destinations beyond it.
            mine = _held(own, sizes, axis)
            its = _held(other, sizes, axis)
            sent.append(tuple(p for p in mine if _place(p[1], sizes)[axis] == peer))
            received.append(tuple(p for p in its if _place(p[1], sizes)[axis] == own[axis]))
        after = _held(own, sizes, axis - 1)
        found.append(Hop(axis, tuple(sent), tuple(received), after))
    return tuple(found)


def _held(own: Sequence[int], sizes: Sequence[int], axis: int) -> tuple[Parcel, ...]:
    """The parcels that a rank holds before the exchange along ``axis``, sorted."""
    free_sources = [range(n) if i > axis else (own[i],) for i, n in enumerate(sizes)]
    free_targets = [(own[i],) if i > axis else range(n) for i, n in enumerate(sizes)]
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

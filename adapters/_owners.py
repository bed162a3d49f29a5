"""Who computes which matrix when each is computed once, and in which order its shards travel.

Pure: plain integers in, frozen records out; it must not import torch.distributed. Every rank
derives the same plan from shapes, meshes and placements, and nothing here asks a peer.

[Note: who owns a matrix]
    Owners are chosen over all parameters, those without a gradient too, so that they do not
    depend on which gradients there are. The largest first, by the work of Newton-Schulz, to the
    rank that has least. On a mesh with copies of each shard, every copy is a candidate: one copy
    of the ranks gathers a matrix, and the others get its update from their peers.

[Note: rounds for all owners]
    A round lasts as long as its busiest owner takes. So each owner has a share of it, up to a limit
    in bytes, and takes its matrices in the order in which they were given out: then those of one
    round are about as large on all of them. With one limit for all, few of many ranks would have
    work at a time.

[Note: together]
    A step over many small matrices costs what its calls cost. So small matrices of one shape and
    one owner are one task: their parts lie side by side in each parcel, one copy takes those of a
    rank into the stack that is computed, and one takes them back.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from adapters._plan import (
    MAX_STACKABLE_NUMEL,
    MAX_STACKED_NUMEL,
    Layout,
    Matrix,
    Ranks,
    Rectangle,
    Shape,
    rectangles,
    split_by_bytes,
)

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
        return (self.ranks, self.places, self.layout.cuts, self.layout.device_type)

    @property
    def num_parts(self) -> int:
        """Ranks that hold different shards of a matrix."""
        return math.prod(cut.num_ranks for cut in self.layout.cuts)


@dataclass(frozen=True, slots=True)
class Task:
    """A matrix, or several small ones of a shape, and who computes them; see [Note: together]."""

    positions: tuple[int, ...]  # in the optimizer's full list of parameters, ascending
    shape: Shape
    parts: tuple[Rectangle, ...]  # by number of the rank in its copy
    copy: int  # the copy of the ranks that gathers them
    owner: int  # number of the rank in that copy
    with_rows: bool = False  # a float32 for each row travels along

    def to_owner(self, source: int) -> int:
        """Elements that a rank sends to the owner."""
        part = self.parts[source]
        sends_rows = self.with_rows and part.numel and not part.first_col
        # One more says how old they are: an owner may hold no part, and so not know.
        rows = part.num_rows + 1 if sends_rows else 0
        return len(self.positions) * (part.numel + ROWS_AS_ELEMENTS * rows)

    def from_owner(self, destination: int) -> int:
        """Elements that the owner sends back."""
        part = self.parts[destination]
        rows = part.num_rows if self.with_rows and part.numel else 0
        return len(self.positions) * (part.numel + ROWS_AS_ELEMENTS * rows)


@dataclass(frozen=True, slots=True)
class Round:
    """Matrices of one crew that travel together."""

    crew: Crew
    tasks: tuple[Task, ...]  # by first position

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


def largest_first(position: int, shape: Shape) -> tuple[int, int, int]:
    """What sorts matrices in the order in which they are given to owners."""
    return -flops(shape), -math.prod(shape), position


def assign(shapes: Sequence[tuple[int, Shape]], num_owners: int) -> dict[int, int]:
    """Return position -> owner, the largest matrix first to the owner with least to do.

    Args:
        shapes: (position, shape) of all matrices of a crew.
        num_owners: Ranks to divide them among.
    """
    loads = [(0, 0, owner) for owner in range(num_owners)]
    found = {}
    for position, shape in sorted(shapes, key=lambda each: largest_first(*each)):
        work, numel, owner = heapq.heappop(loads)
        found[position] = owner
        heapq.heappush(loads, (work + flops(shape), numel + math.prod(shape), owner))
    return found


def plan_rounds(
    every: Iterable[tuple[Matrix, Crew]],
    active: Iterable[int],
    *,
    bucket_bytes: int | None,
    with_rows: frozenset[int] = frozenset(),
) -> tuple[Round, ...]:
    """Return the rounds of one step, in the order in which every rank takes them.

    Args:
        every: All sharded matrices of the optimizer.
        active: Positions of those with a gradient.
        bucket_bytes: Upper limit for the matrices that one rank owns in a round, in bytes as
            bfloat16; a larger one is alone. None for :meth:`Layout.bucket_bytes`.
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
        limit = crew.layout.bucket_bytes(bucket_bytes)
        rounds += [Round(crew, together(part)) for part in _in_turns(tasks, limit)]
    return tuple(rounds)


def _in_turns(tasks: Iterable[Task], limit: int) -> Iterator[list[Task]]:
    """Yield what owners compute at the same time; see [Note: rounds for all owners]."""
    by_owner: dict[tuple[int, int], list[Task]] = {}
    for task in sorted(tasks, key=lambda each: largest_first(each.positions[0], each.shape)):
        by_owner.setdefault((task.copy, task.owner), []).append(task)
    runs = [split_by_bytes(owned, limit) for owned in by_owner.values()]
    for turn in zip_longest(*runs, fillvalue=[]):
        yield sorted(chain.from_iterable(turn), key=lambda each: each.positions)


def _task(matrix: Matrix, crew: Crew, slot: int, with_rows: bool) -> Task:
    copy, owner = divmod(slot, crew.num_parts)
    parts = rectangles(matrix.shape, crew.layout.cuts)
    return Task((matrix.position,), matrix.shape, parts, copy, owner, with_rows)


def together(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Join tasks of one matrix each; see [Note: together]."""
    found: list[Task] = []
    last: dict[tuple[object, ...], int] = {}  # where in ``found`` there may be room for more
    for task in tasks:
        numel = math.prod(task.shape)
        alike = (task.shape, task.copy, task.owner, task.with_rows)
        if alike in last and numel <= MAX_STACKABLE_NUMEL:
            before = found[last[alike]]
            positions = (*before.positions, *task.positions)
            if len(positions) * numel <= MAX_STACKED_NUMEL:
                found[last[alike]] = replace(before, positions=positions)
                continue
        last[alike] = len(found)
        found.append(task)
    return tuple(found)

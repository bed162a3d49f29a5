"""Crews of all kinds, and every rank of a round simulated with lists for buffers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from adapters._owners import Crew, Round, plan_rounds
from adapters._parcels import Hop, Route, Sorting, Way, plan_route
from adapters._plan import Cut, Layout, Matrix, Shape

MIB = 2**20


@dataclass(frozen=True)
class Place:
    """One rank of a crew: its copy, and its number in it."""

    cuts: tuple[Cut, ...]
    num_copies: int = 1
    copy: int = 0
    number: int = 0

    @property
    def num_parts(self) -> int:
        return math.prod(cut.num_ranks for cut in self.cuts)

    @property
    def numbers(self) -> range:
        return range(self.num_parts)

    @property
    def axes(self) -> range:
        return range(len(self.cuts))

    def matrix(self, position: int, shape: Shape) -> tuple[Matrix, Crew]:
        """Copies come one after the other, as where the first mesh axis copies."""
        ranks = tuple(range(self.num_copies * self.num_parts))
        own = ranks[self.copy * self.num_parts :][: self.num_parts]
        layout = Layout(own, self.cuts)
        crew = Crew(ranks, ranks, layout, self.num_copies, self.copy)
        return Matrix(position, shape, layout, self.number), crew

    def all(self) -> list[Place]:
        return [
            Place(self.cuts, self.num_copies, copy, number)
            for copy in range(self.num_copies)
            for number in range(self.num_parts)
        ]


# More ranks than rows, a single row, a single column; several of a shape, with rows and without.
SHAPES: tuple[Shape, ...] = (
    *((8, 8), (6, 16), (16, 6), (9, 5), (5, 9)),
    *((1, 4), (4, 1), (2, 4), (3, 3), (8, 8)),
    *((5, 7),) * 9,
)
WITH_ROWS = frozenset((1, 3, 5, 6, *range(10, 19)))
ROWS_ON_TWO = Place((Cut(0, 2),))


def rounds_of(
    place: Place,
    shapes: Sequence[Shape] = SHAPES,
    *,
    active: Iterable[int] | None = None,
    bucket_bytes: int = MIB,
    with_rows: frozenset[int] = WITH_ROWS,
) -> tuple[Round, ...]:
    every = [place.matrix(i, shape) for i, shape in enumerate(shapes)]
    chosen = range(len(shapes)) if active is None else active
    return plan_rounds(every, chosen, bucket_bytes=bucket_bytes, with_rows=with_rows)


def owners(rounds: Iterable[Round]) -> dict[int, tuple[int, int]]:
    return {
        position: (task.copy, task.owner)
        for each in rounds
        for task in each.tasks
        for position in task.positions
    }


CREWS = (
    Place(()),
    ROWS_ON_TWO,
    Place((Cut(0, 3),)),
    Place((Cut(0, 4),)),
    Place((Cut(1, 3),)),
    Place((Cut(0, 1), Cut(0, 2))),
    Place((Cut(0, 2), Cut(1, 2))),
    Place((Cut(1, 3), Cut(0, 2))),
    Place((Cut(0, 2), Cut(0, 3))),
    Place((Cut(0, 2, 2), Cut(0, 2))),
    Place((Cut(0, 3, 4), Cut(1, 2), Cut(0, 4))),
    Place((Cut(0, 2), Cut(1, 2), Cut(0, 3))),
    Place((), num_copies=3),
    Place((Cut(0, 2),), num_copies=2),
    Place((Cut(0, 3),), num_copies=4),
    Place((Cut(0, 2, 2), Cut(0, 2)), num_copies=2),
)


# ---- parcels ----

Element: TypeAlias = Any


class Wires:
    """All ranks of one round in this process, with lists for buffers."""

    def __init__(
        self,
        place: Place,
        *,
        shapes: Sequence[Shape] = SHAPES,
        bucket_bytes: int = MIB,
        with_rows: frozenset[int] = WITH_ROWS,
        which: int = 0,
    ) -> None:
        self.sizes = [cut.num_ranks for cut in place.cuts]
        self.places = place.all()
        rounds = [
            rounds_of(each, shapes, bucket_bytes=bucket_bytes, with_rows=with_rows)[which]
            for each in self.places
        ]
        pairs = zip(self.places, rounds, strict=True)
        self.tasks = rounds[0].tasks
        self.routes: dict[tuple[int, int], Route] = {
            (each.copy, each.number): plan_route(round_, each.number, for_gather=True)
            for each, round_ in pairs
        }
        self.sent_away = 0  # elements that left the rank which held them

    def place_on(self, number: int, axis: int) -> int:
        return number // math.prod(self.sizes[axis + 1 :]) % self.sizes[axis]

    def peers(self, number: int, axis: int) -> list[int]:
        step = math.prod(self.sizes[axis + 1 :])
        first = number - self.place_on(number, axis) * step
        return [first + step * place for place in range(self.sizes[axis])]

    def travel(self, ways: Sequence[Way], buffers: Sequence[list[Element]]) -> list[list[Element]]:
        """Make the exchanges of one copy."""
        held = list(buffers)
        hops = [[way.hops[i] for way in ways] for i in range(len(self.sizes))]
        for buffer, way in zip(held, ways, strict=True):
            assert len(buffer) == sum(way.sizes_before)
        for step in hops:
            held = self._hop(step, held)
        for buffer, way in zip(held, ways, strict=True):
            assert len(buffer) == sum(way.sizes_after)
        return held

    def _hop(self, hops: Sequence[Hop], held: Sequence[list[Element]]) -> list[list[Element]]:
        sent = []
        for hop, buffer in zip(hops, held, strict=True):
            assert sum(hop.leg.sent) == len(buffer)
            sent.append(reordered(buffer, hop.sorted_before))
        parcels = [split(each, hop.leg.sent) for each, hop in zip(sent, hops, strict=True)]
        found = []
        for number, hop in enumerate(hops):
            received: list[Element] = []
            own = self.place_on(number, hop.axis)
            for place, peer in enumerate(self.peers(number, hop.axis)):
                parcel = parcels[peer][own]
                assert len(parcel) == hop.leg.received[place]
                # Where all see everything, it lies here in what the peer shows.
                start = hop.leg.starts[place]
                assert sent[peer][start : start + len(parcel)] == parcel
                assert len(sent[peer]) <= hop.leg.longest
                received += parcel
                self.sent_away += len(parcel) * (peer != number)
            longest = max(len(sent[peer]) for peer in self.peers(number, hop.axis))
            assert hop.leg.longest == longest
            found.append(reordered(received, hop.sorted_after))
        return found


def split(buffer: list[Element], sizes: Sequence[int]) -> list[list[Element]]:
    starts = itertools.accumulate(sizes, initial=0)
    return [buffer[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def reordered(buffer: list[Element], sorting: Sorting | None) -> list[Element]:
    if sorting is None:
        return buffer
    sizes, order = sorting
    assert sorted(order) == list(range(len(sizes)))
    parcels = split(buffer, sizes)
    return [element for place in order for element in parcels[place]]

"""Parcels: every rank of a round simulated, with lists for buffers; and how much travels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import pytest

from adapters._owners import Task
from adapters._parcels import Parcel, Piece, Way
from adapters._plan import Cut, Shape, rectangles
from tests.unit.owner_cases import (
    CREWS,
    MIB,
    SHAPES,
    WITH_ROWS,
    Element,
    Place,
    Wires,
    owners,
    rounds_of,
)


def size_to_owner(task: Task, source: int) -> int:
    """Worked out here again: rows' moments and their age go with what holds the rows' starts."""
    part = task.parts[source]
    numel = part.num_rows * part.num_cols
    along = WITH_ROWS.issuperset(task.positions) and numel > 0 and part.first_col == 0
    return len(task.positions) * (numel + 2 * (part.num_rows + 1) * along)


def size_from_owner(task: Task, target: int) -> int:
    """All that have some of a row get its moment."""
    part = task.parts[target]
    rows = part.num_rows if WITH_ROWS.issuperset(task.positions) and part.num_cols else 0
    return len(task.positions) * (part.num_rows * part.num_cols + 2 * rows)


def sizes_of(wires: Wires, place: Place, copy: int) -> tuple[dict[Parcel, int], dict[Parcel, int]]:
    """The elements of each parcel of one copy, there and back."""
    owned = {d: [t for t in wires.tasks if (t.copy, t.owner) == (copy, d)] for d in place.numbers}
    pairs = list(itertools.product(place.numbers, repeat=2))
    there = {(s, d): 1 + sum(size_to_owner(task, s) for task in owned[d]) for s, d in pairs}
    back = {(s, d): 1 + sum(size_from_owner(task, d) for task in owned[s]) for s, d in pairs}
    return there, back


def parcels(sizes: Mapping[Parcel, int], pairs: Iterable[Parcel]) -> list[Element]:
    return [(*pair, i) for pair in pairs for i in range(sizes[pair])]


@pytest.mark.parametrize("place", CREWS, ids=str)
def test_every_parcel_arrives_in_order(place: Place) -> None:
    wires, numbers = Wires(place), place.numbers
    for copy in range(place.num_copies):
        routes = [wires.routes[copy, number] for number in numbers]
        there, back = sizes_of(wires, place, copy)
        for ways, sizes in (
            ([route.there for route in routes], there),
            ([route.back for route in routes], back),
        ):
            before = [parcels(sizes, ((s, d) for d in numbers)) for s in numbers]
            after = [parcels(sizes, ((s, d) for s in numbers)) for d in numbers]
            wires.sent_away = 0
            assert wires.travel(ways, before) == after
            # Passed on once for each axis along which source and destination differ.
            assert wires.sent_away == sum(
                length * sum(wires.place_on(s, a) != wires.place_on(d, a) for a in place.axes)
                for (s, d), length in sizes.items()
            )


def packed(task: Task, number: int, *, with_rows: bool, with_age: bool = False) -> list[Element]:
    """A rank's part of each matrix as its elements' places, then two halves for each row."""
    part = task.parts[number]
    rows = range(part.first_row, part.first_row + part.num_rows)
    cols = range(part.first_col, part.first_col + part.num_cols)
    found: list[Element] = list(itertools.product(task.positions, rows, cols))
    for position in task.positions if with_rows else ():
        found += itertools.product([position], [*rows, *["age"] * with_age], ("low", "high"))
    return found


def put(buffer: list[Element], piece: Piece, content: list[Element]) -> None:
    span = slice(piece.start, piece.start + piece.length)
    assert buffer[span] == [None] * len(content)  # not used twice
    buffer[span] = content
    assert (piece.elements.start, piece.rows.stop) == (span.start, span.stop)
    assert piece.elements.stop == piece.rows.start == piece.start + math.prod(piece.shape)
    assert piece.has_rows == (piece.rows.start < piece.rows.stop)


def taken(buffer: list[Element], piece: Piece) -> list[Element]:
    return buffer[piece.start : piece.start + piece.length]


def bring_to_owners(wires: Wires, place: Place, copy: int) -> None:
    """See that owners find in their buffers what they take for whole matrices."""
    routes = [wires.routes[copy, number] for number in place.numbers]
    buffers = []
    for number, route in enumerate(routes):
        buffer: list[Element] = [None] * sum(route.there.sizes_before)
        for task, piece in route.gathered:
            along = task.with_rows and piece.part.numel > 0 and not piece.part.first_col
            put(buffer, piece, packed(task, number, with_rows=along, with_age=True))
        buffers.append(buffer)
    arrived = wires.travel([route.there for route in routes], buffers)
    for route, buffer in zip(routes, arrived, strict=True):
        ends = [end - 1 for end in itertools.accumulate(route.there.sizes_after)]
        assert [i for i, element in enumerate(buffer) if element is None] == ends
        for task, pieces, _ in route.owned:
            found = [element for piece in pieces for element in taken(buffer, piece)]
            rows, cols = map(range, task.shape)
            expected: set[Element] = set(itertools.product(task.positions, rows, cols))
            if task.with_rows:
                expected |= set(itertools.product(task.positions, rows, ("low", "high")))
            ages = [element for element in found if element[1] == "age"]
            assert bool(ages) == task.with_rows
            assert len(found) - len(ages) == len(expected)
            assert set(found) - set(ages) == expected
            for source, piece in enumerate(pieces):
                assert piece.part == task.parts[source]


def bring_back(wires: Wires, place: Place, copy: int) -> list[list[Element]]:
    """Return what each rank of a copy holds when the owners' results are there."""
    routes = [wires.routes[copy, number] for number in place.numbers]
    buffers = []
    for route in routes:
        buffer: list[Element] = [None] * sum(route.back.sizes_before)
        for task, _, pieces in route.owned:
            for target, piece in enumerate(pieces):
                along = task.with_rows and piece.part.numel > 0
                put(buffer, piece, packed(task, target, with_rows=along))
        buffers.append(buffer)
    return wires.travel([route.back for route in routes], buffers)


@pytest.mark.parametrize("bucket_bytes", [200, MIB])
@pytest.mark.parametrize("place", CREWS, ids=str)
def test_owners_get_whole_matrices_and_holders_their_parts(place: Place, bucket_bytes: int) -> None:
    for which in range(len(rounds_of(place, bucket_bytes=bucket_bytes))):
        wires = Wires(place, bucket_bytes=bucket_bytes, which=which)
        for copy in range(place.num_copies):
            bring_to_owners(wires, place, copy)
        received = [bring_back(wires, place, copy) for copy in range(place.num_copies)]
        for (_, number), route in wires.routes.items():
            # Copies give each other what they have, in their order.
            buffer = [element for copy in received for element in copy[number]]
            assert [sum(sizes) for sizes in route.sizes_by_copy] == [
                len(copy[number]) for copy in received
            ]
            ends = itertools.accumulate(itertools.chain.from_iterable(route.sizes_by_copy))
            assert [i for i, e in enumerate(buffer) if e is None] == [end - 1 for end in ends]
            assert {task for task, _ in route.returned} == set(wires.tasks)
            assert len(route.returned) == len(wires.tasks)
            for task, piece in route.returned:
                along = task.with_rows and piece.part.numel > 0
                expected = packed(task, number, with_rows=along)
                assert taken(buffer, piece) == expected


# ---- how much travels ----


def sent_away(place: Place, shapes: Sequence[Shape]) -> int:
    """Elements that all ranks together give to other ranks, there and back, without flags."""
    wires = Wires(place, shapes=shapes, with_rows=frozenset())
    routes = [wires.routes[0, number] for number in place.numbers]
    for way in ("there", "back"):
        ways: list[Way] = [getattr(route, way) for route in routes]
        wires.travel(ways, [[0] * sum(each.sizes_before) for each in ways])
    num_pairs = place.num_parts * (place.num_parts - 1)
    return wires.sent_away - 2 * num_pairs


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_even_shards_travel_at_the_floor(num_ranks: int, dim: int) -> None:
    shapes = [(12, 24), (24, 12), (36, 12), (12, 12), (48, 24), (12, 60), (12, 12)]
    total = sum(map(math.prod, shapes))
    found = sent_away(Place((Cut(dim, num_ranks),)), shapes)
    # Each matrix's owner has 1/N of it, and gets and gives the rest.
    assert found * num_ranks == 2 * (num_ranks - 1) * total


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_uneven_shards_travel_but_for_those_of_the_owner(num_ranks: int) -> None:
    place = Place((Cut(0, num_ranks),))
    owner_of = owners(rounds_of(place))
    kept = 0
    for position, shape in enumerate(SHAPES):
        part = rectangles(shape, place.cuts)[owner_of[position][1]]
        kept += part.num_rows * part.num_cols
    assert sent_away(place, SHAPES) == 2 * (sum(map(math.prod, SHAPES)) - kept)

"""Owners and the way of parcels: plain data, and every rank of a round simulated with lists."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

import pytest

from adapters import _owners, _parcels, _plan
from adapters._owners import Crew, Round, Task, assign, flops, plan_rounds
from adapters._parcels import Parcel, Piece, Way
from adapters._plan import Cut, Layout, Matrix, Shape, rectangles
from tests.unit.owner_cases import (
    CREWS,
    MIB,
    ROWS_ON_TWO,
    SHAPES,
    WITH_ROWS,
    Element,
    Place,
    Wires,
    rounds_of,
)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, types, importlib.util as util\n"
        "sys.modules['adapters'] = types.ModuleType('adapters')\n"
        "for name, path in zip(('_plan', '_owners', '_parcels'), sys.argv[1:]):\n"
        "    name = 'adapters.' + name\n"
        "    spec = util.spec_from_file_location(name, path)\n"
        "    module = sys.modules[name] = util.module_from_spec(spec)\n"
        "    spec.loader.exec_module(module)\n"
        "assert 'torch' not in sys.modules\n"
    )
    paths = [str(module.__file__) for module in (_plan, _owners, _parcels)]
    subprocess.run([sys.executable, "-c", code, *paths], check=True)


# ---- who owns what ----


def test_the_work_is_that_of_the_smaller_side() -> None:
    assert flops((2, 3)) == flops((3, 2)) == 2 * 4 * 3 + 8
    assert flops((1, 100)) < flops((10, 10))


def test_the_largest_goes_first_to_the_owner_with_least_to_do() -> None:
    shapes = [(0, (2, 2)), (1, (8, 8)), (2, (4, 4)), (3, (2, 2)), (4, (2, 2))]
    # 1 alone outweighs all others.
    assert assign(shapes, 2) == {1: 0, 2: 1, 0: 1, 3: 1, 4: 1}
    assert list(assign(shapes, 2)) == [1, 2, 0, 3, 4]


def test_work_is_no_matter_of_size() -> None:
    shapes = [(0, (8, 8)), (1, (1, 40)), (2, (1, 40)), (3, (1, 40))]
    assert assign(shapes, 2) == {0: 0, 1: 1, 2: 1, 3: 1}


def test_equal_work_goes_to_the_owner_with_fewer_elements() -> None:
    # 2 * 1 * n + 1 for a row of n; of equal rows the first in the list comes first.
    assert assign([(7, (1, 4)), (3, (1, 4)), (5, (4, 1))], 3) == {3: 0, 5: 1, 7: 2}
    wide, square = (2, 23), (4, 4)
    assert flops(wide) == flops(square)
    assert assign([(0, square), (1, wide), (2, (1, 1))], 2) == {1: 0, 0: 1, 2: 1}


def random_shapes(seed: int) -> list[tuple[int, Shape]]:
    generator = random.Random(seed)
    sides = (1, 2, 3, 8, 31, 64, 100)
    count = generator.randint(1, 30)
    return [(2 * i, (generator.choice(sides), generator.choice(sides))) for i in range(count)]


@pytest.mark.parametrize("num_owners", [1, 2, 3, 4, 7, 16])
def test_every_matrix_has_one_owner_and_no_owner_has_too_much(num_owners: int) -> None:
    for seed in range(100):
        shapes = random_shapes(seed)
        found = assign(shapes, num_owners)
        assert sorted(found) == [position for position, _ in shapes]
        loads = [0] * num_owners
        for position, shape in shapes:
            loads[found[position]] += flops(shape)
        assert max(loads) <= sum(loads) / num_owners + max(flops(shape) for _, shape in shapes)
        # Nobody is idle while another has two.
        counts = [list(found.values()).count(owner) for owner in range(num_owners)]
        assert min(counts) > 0 or max(counts) == 1


def test_owners_do_not_depend_on_the_order_of_the_list() -> None:
    for seed in range(50):
        shapes = random_shapes(seed)
        found = assign(shapes, 3)
        shuffled = shapes[:]
        random.Random(seed).shuffle(shuffled)
        assert assign(shuffled, 3) == found


# ---- rounds ----


def positions(rounds: Iterable[Round]) -> list[list[int]]:
    return [sorted(p for task in each.tasks for p in task.positions) for each in rounds]


def owners(rounds: Iterable[Round]) -> dict[int, tuple[int, int]]:
    return {
        position: (task.copy, task.owner)
        for each in rounds
        for task in each.tasks
        for position in task.positions
    }


@pytest.mark.parametrize("place", CREWS, ids=str)
def test_all_ranks_make_the_same_plan(place: Place) -> None:
    for bucket_bytes in (1, 200, MIB):
        plans = [rounds_of(each, bucket_bytes=bucket_bytes) for each in place.all()]
        assert all([each.tasks for each in plan] == [r.tasks for r in plans[0]] for plan in plans)


def num_matrices(tasks: Iterable[Task]) -> int:
    return sum(len(task.positions) for task in tasks)


@pytest.mark.parametrize("place", CREWS, ids=str)
def test_each_matrix_is_computed_once_over_all_copies(place: Place) -> None:
    for round_ in rounds_of(place, bucket_bytes=300):
        owned = [
            task
            for copy in range(place.num_copies)
            for tasks in round_.owned_by(copy)
            for task in tasks
        ]
        assert set(owned) == set(round_.tasks)
        assert len(owned) == len(round_.tasks)
        assert len({p for task in owned for p in task.positions}) == num_matrices(owned)
    assert num_matrices(task for each in rounds_of(place) for task in each.tasks) == len(SHAPES)
    slots = set(owners(rounds_of(place)).values())
    assert len(slots) == min(len(SHAPES), place.num_copies * place.num_parts)


def test_each_owner_has_a_limit_in_bytes_in_each_round() -> None:
    shapes = ((4, 4), (4, 4), (8, 8), (4, 4), (4, 4), (4, 4))  # the third is all that rank 0 owns
    assert positions(rounds_of(ROWS_ON_TWO, shapes, bucket_bytes=64)) == [[0, 1, 2], [3, 4], [5]]
    assert positions(rounds_of(ROWS_ON_TWO, shapes, bucket_bytes=1)) == [[0, 2], [1], [3], [4], [5]]
    assert positions(rounds_of(ROWS_ON_TWO, shapes)) == [[0, 1, 2, 3, 4, 5]]


LAYERS = ((1024, 1024), (1024, 1024), (4096, 1024), (1024, 4096)) * 24


@pytest.mark.parametrize("num_ranks", [2, 8, 24])
def test_in_each_round_all_owners_have_about_as_much_to_do(num_ranks: int) -> None:
    rounds = rounds_of(Place((Cut(0, num_ranks),)), LAYERS, bucket_bytes=8 * MIB)
    assert len(rounds) > 1
    for round_ in rounds[:-1]:  # in the last are those that are left over
        work = [sum(flops(task.shape) for task in tasks) for tasks in round_.owned_by(0)]
        assert min(work) >= 0.6 * max(work) > 0


@pytest.mark.parametrize(("device_type", "num_rounds"), [("cpu", 8), ("cuda", 1)])
def test_without_a_limit_the_device_decides(device_type: str, num_rounds: int) -> None:
    layout = Layout((0, 1), (Cut(0, 2),), (0, 1), device_type)
    crew = Crew((0, 1), (0, 1), layout, 1, 0)
    every = [(Matrix(i, (1024, 1024), layout, 0), crew) for i in range(16)]
    assert len(plan_rounds(every, range(16), bucket_bytes=None)) == num_rounds


def test_crews_on_other_devices_do_not_mix() -> None:
    layouts = [Layout((0, 1), (Cut(0, 2),), (0, 1), device) for device in ("cpu", "cuda")]
    every = [
        (Matrix(i, (4, 4), layout, 0), Crew((0, 1), (0, 1), layout, 1, 0))
        for i, layout in enumerate(layouts * 2)
    ]
    assert positions(plan_rounds(every, range(4), bucket_bytes=MIB)) == [[0, 2], [1, 3]]


def test_rounds_do_not_depend_on_the_order_of_the_list() -> None:
    every = [ROWS_ON_TWO.matrix(i, shape) for i, shape in enumerate(SHAPES)]
    for bucket_bytes in (1, 200, MIB):
        plans = [
            plan_rounds(some, range(len(SHAPES)), bucket_bytes=bucket_bytes)
            for some in (every, every[::-1])
        ]
        assert plans[0] == plans[1]


def test_a_missing_gradient_changes_no_owner() -> None:
    for place in CREWS[1:]:
        everything = owners(rounds_of(place))
        for seed in range(10):
            active = random.Random(seed).sample(range(len(SHAPES)), seed)
            rounds = rounds_of(place, active=active, bucket_bytes=200)
            assert sorted(owners(rounds)) == sorted(active)
            assert owners(rounds).items() <= everything.items()


def test_without_gradients_there_are_no_rounds() -> None:
    assert rounds_of(ROWS_ON_TWO, active=[]) == ()
    assert plan_rounds([], [], bucket_bytes=MIB) == ()


def crew_of(ranks: tuple[int, ...], *cuts: Cut) -> Crew:
    return Crew(ranks, ranks, Layout(ranks, cuts or (Cut(0, len(ranks)),)), 1, 0)


def order_of(crews: Sequence[Crew]) -> list[tuple[int, ...]]:
    every = [(Matrix(i, (4, 4), crew.layout, 0), crew) for i, crew in enumerate(crews)]
    rounds = plan_rounds(every, range(len(crews)), bucket_bytes=MIB)
    return [each.crew.ranks for each in rounds]


def test_ranks_that_share_only_some_crews_order_those_alike() -> None:
    """Three ranks, three pairs: in the order of each rank's own list they would wait in a ring."""
    lists = {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}
    found = {rank: order_of([crew_of(pair) for pair in pairs]) for rank, pairs in lists.items()}
    assert found == {0: [(0, 1), (0, 2)], 1: [(0, 1), (1, 2)], 2: [(0, 2), (1, 2)]}
    assert order_of([crew_of((10, 11)), crew_of((2, 10))]) == [(2, 10), (10, 11)]


def test_crews_whose_ranks_are_numbered_otherwise_do_not_mix() -> None:
    cuts, ranks = (Cut(0, 2),), (0, 1, 2, 3)
    across = Crew(ranks, ranks, Layout((0, 1), cuts), 2, 0)
    along = Crew(ranks, (0, 2, 1, 3), Layout((0, 2), cuts), 2, 0)
    every = [(Matrix(i, (4, 4), c.layout, 0), c) for i, c in enumerate([along, across] * 2)]
    assert positions(plan_rounds(every, range(4), bucket_bytes=MIB)) == [[1, 3], [0, 2]]


def test_crews_of_the_same_ranks_do_not_mix() -> None:
    rows, cols = crew_of((0, 1)), crew_of((0, 1), Cut(1, 2))
    both = Crew((0, 1), (0, 1), Layout((0,), ()), 2, 0)
    assert order_of([rows, cols, both, rows]) == [(0, 1)] * 3
    every = [(Matrix(i, (4, 4), c.layout, 0), c) for i, c in enumerate([cols, rows, both, rows])]
    assert positions(plan_rounds(every, range(4), bucket_bytes=MIB)) == [[2], [1, 3], [0]]


# ---- parcels ----


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

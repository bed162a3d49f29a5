"""Who owns which matrix, and what travels in which round."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterable, Sequence

import pytest

from adapters import _owners, _parcels, _plan
from adapters._owners import Crew, Round, Task, assign, flops, plan_rounds
from adapters._plan import Cut, Layout, Matrix, Shape
from tests.unit.owner_cases import (
    CREWS,
    MIB,
    ROWS_ON_TWO,
    SHAPES,
    Place,
    owners,
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
    shapes = random.Random(num_ranks).sample(LAYERS, len(LAYERS))
    rounds = rounds_of(Place((Cut(0, num_ranks),)), shapes, bucket_bytes=8 * MIB)
    assert len(rounds) > 1
    for round_ in rounds:  # in the order in which parcels are packed and updates come back
        firsts = [task.positions[0] for task in round_.tasks]
        assert firsts == sorted(firsts)
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

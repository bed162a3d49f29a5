from itertools import combinations, permutations

import pytest

from consensus._records import Known, ranks_in, runs_of
from consensus.enclosure import Scope


def test_runs_hold_exactly_the_ranks_they_are_made_of() -> None:
    every = [ranks for size in range(8) for ranks in combinations(range(7), size)]
    assert [ranks_in(runs_of(ranks)) for ranks in every] == every
    assert len({runs_of(ranks) for ranks in every}) == len(every)


@pytest.mark.parametrize(
    ("ranks", "runs"),
    [
        ((5,), (5, 0, 5)),
        (tuple(range(4096)), (0, 1, 4095)),
        (tuple(range(3, 4096, 16)), (3, 16, 4083)),
        ((0, 1, 2, 3, 8, 9, 10, 11), (0, 1, 3, 8, 1, 11)),
    ],
)
def test_a_mesh_or_one_axis_of_it_is_one_run(ranks: tuple[int, ...], runs: tuple[int, ...]) -> None:
    assert runs_of(ranks) == runs


def test_a_scope_is_told_once_for_all_that_hold_it_alike() -> None:
    ranks = tuple(range(64))
    known = Known()
    for rank in ranks:
        scopes = [Scope((rank,), 1), Scope(ranks, 7 if rank != 5 else 8, "exact")]
        known.hear(Known.of(scopes, rank=rank, rounds={ranks: "3"}).told())
    whole = [told for told in known.told() if told[1] == (0, 1, 63)]
    assert whole == [
        [(0, 1, 4, 6, 1, 63), (0, 1, 63), "3", 1, 7, "exact", False],
        [(5, 0, 5), (0, 1, 63), "3", 1, 8, "exact", False],
    ]
    assert known.rounds == {(0, 1, 63): "3"}


def test_holders_are_told_in_order_whoever_was_heard_first() -> None:
    ranks = (8, 16, 24, 1024, 4095)
    known = Known()
    for rank in ranks[::-1]:
        known.hear(Known.of([Scope(ranks, 7)], rank=rank, rounds={}).told())
    assert [ranks_in(told[0]) for told in known.told()] == [ranks]


def test_scopes_that_differ_in_any_way_are_told_in_order_whoever_was_heard_first() -> None:
    ranks = (0, 1)
    ways = [Scope(ranks, 7, "exact"), Scope(ranks, 7, "approx"), Scope(ranks, 7, "approx", True)]
    told = []
    for order in permutations(enumerate(ways)):
        known = Known()
        for rank, scope in order:
            known.hear(Known.of([scope], rank=rank, rounds={}).told())
        told.append(known.told())
    assert [each for each in told if each != told[0]] == []

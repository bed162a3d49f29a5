from itertools import combinations, permutations

import pytest

from consensus.enclosure import (
    Plan,
    Scope,
    components,
    conflicting_modes,
    maximal,
    plan_of,
    rank_set,
    scope_id,
)
from consensus.vote import Ranks


def held(scopes: dict[Ranks, int]) -> dict[int, list[Scope]]:
    """Return what each rank declares when all members of a scope hold the same manifest."""
    ranks = sorted({rank for scope in scopes for rank in scope})
    return {r: [Scope(s, m) for s, m in scopes.items() if r in s] for r in ranks}


@pytest.mark.parametrize(
    ("scopes", "expected"),
    [
        ([], ()),
        ([(0, 1)], ((0, 1),)),
        ([(0, 1), (2, 3)], ((0, 1), (2, 3))),
        ([(0, 1), (1, 2)], ((0, 1, 2),)),
        ([(0, 1), (2, 3), (1, 2)], ((0, 1, 2, 3),)),
        ([(0, 1), (2, 3), (4, 5), (1, 4)], ((0, 1, 4, 5), (2, 3))),
        ([(0, 9), (9, 10), (2, 3)], ((0, 9, 10), (2, 3))),
        ([(0, 1), (0, 1)], ((0, 1),)),
    ],
)
def test_scopes_that_overlap_are_one_component(
    scopes: list[Ranks], expected: tuple[Ranks, ...]
) -> None:
    assert {components(order) for order in permutations(scopes)} == {expected}


def test_components_do_not_overlap_and_hold_every_rank() -> None:
    pairs = list(combinations(range(5), 2))
    for scopes in combinations(pairs, 3):
        found = components(scopes)
        ranks = [rank for component in found for rank in component]
        assert sorted(ranks) == sorted({rank for scope in scopes for rank in scope})


def test_only_scopes_that_no_other_encloses_are_maximal() -> None:
    assert maximal([(0, 1), (0, 1, 2), (2, 3), (0, 1, 2)]) == ((0, 1, 2), (2, 3))


def test_a_rank_set_is_sorted_without_repeats() -> None:
    assert rank_set([10, 9, 1, 9]) == (1, 9, 10)


def test_scopes_have_names_of_their_own() -> None:
    scopes = [s for n in range(1, 5) for s in combinations(range(12), n)]
    assert len({scope_id(scope) for scope in scopes}) == len(scopes)
    assert scope_id((1, 0)) != scope_id((10,))


# ---- plans ----


def test_one_scope_is_one_pair() -> None:
    assert plan_of(held({(0, 1, 2): 7})) == Plan((0, 1, 2))


def test_a_scope_that_not_all_hold_has_a_pair_of_its_own() -> None:
    plan = plan_of(held({(0, 1, 2): 7, (0, 1): 8}))
    assert plan.members == (0, 1, 2)
    assert plan.sets == ((0, 1),)
    assert dict(plan.slots) == {(0, 1): 1, (0, 1, 2): 0}


def test_a_chain_has_a_pair_for_each_link() -> None:
    plan = plan_of(held({(0, 1): 1, (1, 2): 2, (2, 3): 3}))
    assert plan.members == (0, 1, 2, 3)
    assert plan.sets == ((0, 1), (1, 2), (2, 3))


def test_siblings_with_equal_manifests_share_a_pair() -> None:
    scopes = {(0, 1): 5, (2, 3): 5, (1, 4, 5): 6, (2, 4): 9}
    plan = plan_of(held(scopes))
    assert plan.sets == ((0, 1, 2, 3), (1, 4, 5), (2, 4))
    assert dict(plan.slots)[(0, 1)] == dict(plan.slots)[(2, 3)] == 1


def test_siblings_that_cover_everyone_need_no_pair() -> None:
    rows_and_columns: dict[Ranks, int] = {(0, 1): 5, (2, 3): 5, (0, 2): 6, (1, 3): 6}
    assert plan_of(held(rows_and_columns)) == Plan((0, 1, 2, 3))


def test_a_scope_and_siblings_that_cover_it_share_a_pair() -> None:
    plan = plan_of(held({(0, 1): 5, (2, 3): 5, (0, 1, 2, 3): 6, (3, 4): 7}))
    assert plan.sets == ((0, 1, 2, 3), (3, 4))


def test_siblings_that_hold_different_things_share_no_pair() -> None:
    assert plan_of(held({(0, 1): 5, (2, 3): 6, (0, 1, 2, 3): 7})).sets == ((0, 1), (2, 3))


def test_overlapping_scopes_share_no_pair_even_with_equal_manifests() -> None:
    """Rank 1 would hold twice what the others hold once: no vote would ever look equal."""
    assert plan_of(held({(0, 1): 5, (1, 2): 5})).sets == ((0, 1), (1, 2))


def test_members_that_differ_about_a_scope_share_no_pair_with_its_siblings() -> None:
    records = held({(0, 1): 5, (2, 3): 5, (0, 1, 2, 3): 7})
    records[0] = [Scope((0, 1), 6), Scope((0, 1, 2, 3), 7)]
    assert plan_of(records).sets == ((0, 1), (2, 3))


def test_a_plan_does_not_depend_on_the_order_of_records_or_scopes() -> None:
    records = held({(0, 1): 5, (2, 3): 5, (1, 2): 6, (0, 3): 8})
    plans = {
        plan_of(
            {rank: list(reversed(records[rank])) if rank % 2 else records[rank] for rank in order}
        )
        for order in permutations(records)
    }
    assert len(plans) == 1


def test_plans_have_keys_of_their_own() -> None:
    plans = [
        Plan((0, 1)),
        Plan((0, 1, 2)),
        Plan((0, 1, 2), ((0, 1),)),
        Plan((0, 1, 2), ((1, 2),)),
        Plan((0, 1, 2), ((0, 1), (1, 2))),
    ]
    assert len({plan.key for plan in plans}) == len(plans)
    assert Plan((0, 1)).key == Plan((0, 1)).key


def test_a_ballot_knows_its_plan() -> None:
    plan = Plan((0, 1, 2), ((0, 1),), (((0, 1), 1), ((0, 1, 2), 0)))
    ballot = plan.ballot(rank=2, sequence=9)
    assert (ballot.members, ballot.rank, ballot.sequence) == ((0, 1, 2), 2, 9)
    assert (ballot.plan, ballot.sets, ballot.slots) == (plan.key, plan.sets, plan.slots)


# ---- modes ----


def test_ranks_that_use_a_scope_in_different_ways_are_named() -> None:
    records = {
        0: [Scope((0, 1, 2), 7, "exact")],
        1: [Scope((0, 1, 2), 7, "approx")],
        2: [Scope((0, 1, 2), 7, "exact")],
    }
    assert conflicting_modes(records) == {"exact": (0, 2), "approx": (1,)}


def test_modes_may_differ_between_scopes() -> None:
    records = {
        0: [Scope((0, 1), 7, "exact")],
        1: [Scope((0, 1), 7, "exact"), Scope((1, 2), 8, "approx")],
        2: [Scope((1, 2), 8, "approx")],
    }
    assert conflicting_modes(records) == {}

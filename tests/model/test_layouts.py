"""Every family of up to 4 scopes on up to 5 ranks: who plans together, and who learns of a failure.

[Note: what is enumerated, and what a relabelling may leave out]
A layout is a family of scopes. One that leaves a rank out is, in the order of its own ranks, a
layout on fewer ranks, so `layouts(n)` lists those that use all of n ranks: 1, 12, 507 and
15,236 for n = 2 to 5, which stand for the 17,901 families of up to 4 scopes on 5 ranks.

Planning depends on the order of ranks, since that is the order in which a rank visits its scopes.
So planning runs on every one of these layouts, and each component then votes once, with a failure
set that changes from layout to layout. A vote depends on labels only through the columns in which
ranks stand. So for 5 ranks *all* 32 failure sets run on one labelling of each layout: renaming its
ranks gives a case of another labelling, and all failure sets together are renamed into themselves.
For up to 4 ranks nothing is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, permutations
from math import comb

import pytest

from consensus._planning import Planned, plan
from consensus._protocol import AllReduceMax, Protocol, header_words
from consensus.enclosure import Plan, Scope, plan_of
from consensus.testing import simulate
from consensus.vote import Ranks, Vote
from tests.simulated import decide_all, fact, failed, failure, hold_vote, ranks_of

# Half a minute of plain computing, more where the cores are shared.
pytestmark = pytest.mark.timeout(300)

Family = tuple[Ranks, ...]

SLICES = 8  # of the layouts, so that no test takes long


def families(size: int, most: int = 4) -> Iterator[Family]:
    """Yield every set of up to ``most`` scopes of two ranks or more."""
    scopes = [s for n in range(2, size + 1) for s in combinations(range(size), n)]
    for count in range(1, most + 1):
        yield from combinations(scopes, count)


@cache
def layouts(size: int) -> tuple[Family, ...]:
    """Return the families that use all of ``size`` ranks."""
    return tuple(f for f in families(size) if len({r for s in f for r in s}) == size)


@cache
def up_to_names(size: int) -> tuple[Family, ...]:
    """Return one labelling of each layout, the first of those that differ by names alone."""
    seen: set[frozenset[Ranks]] = set()
    found = []
    for family in layouts(size):
        if frozenset(family) not in seen:
            found.append(family)
            for names in permutations(range(size)):
                renamed = (tuple(sorted(names[rank] for rank in scope)) for scope in family)
                seen.add(frozenset(renamed))
    return tuple(found)


def components_of(family: Family) -> list[Ranks]:
    """Return the tied ranks, by following scopes from rank to rank: not as the library does it."""
    left = {rank for scope in family for rank in scope}
    found = []
    while left:
        reached: set[int] = set()
        frontier = {min(left)}
        while frontier:
            reached |= frontier
            frontier = {r for s in family if reached & set(s) for r in s} - reached
        found.append(tuple(sorted(reached)))
        left -= reached
    return found


def held_by(rank: int, family: Family, manifests: Sequence[int]) -> list[Scope]:
    return [Scope(s, m) for s, m in zip(family, manifests, strict=True) if rank in s]


def plans_of(family: Family, manifests: Sequence[int]) -> dict[Ranks, Plan]:
    """Plan on a simulated store, each component for itself and all at once; return the plans."""
    components = components_of(family)
    everyone = tuple(rank for ranks in components for rank in ranks)
    found: dict[int, Plan] = {}
    for ranks in [*components, everyone] if len(components) > 1 else components:
        run = simulate(
            {r: plan(held_by(r, family, manifests), rank=r, rounds={}) for r in ranks}, store={}
        )
        assert run.errors == {}
        assert run.store == {}
        for rank, planned in run.results.items():
            assert planned == Planned(found.setdefault(rank, planned.plan))
    for ranks in components:
        assert {found[rank] for rank in ranks} == {found[ranks[0]]}
        assert found[ranks[0]].members == ranks
    return {ranks: found[ranks[0]] for ranks in components}


def healthy(rank: int, family: Family) -> Vote:
    """Return a vote with a fact for each scope, which differs from scope to scope by right."""
    return Vote("step", facts=tuple(fact("held", str(s), s) for s in family if rank in s))


def check_failures(plan: Plan, family: Family, failing: set[int]) -> None:
    """Hold one vote: everybody learns exactly who failed, in the promised messages."""
    votes = {r: failed(r) if r in failing else healthy(r, family) for r in plan.members}
    run = hold_vote(votes, plan)
    decision = run.results[plan.members[0]]
    assert all(run.results[rank] == decision for rank in plan.members)
    assert decision.failures == tuple(failure(rank) for rank in sorted(failing))
    assert decision.agreed is not bool(failing)
    assert decision.phases == decision.differences == ()
    pairs = 1 + len(plan.sets)
    sizes = [2 * pairs, len(plan.members) * header_words(len(plan.sets))]
    assert [words for _, words in run.collectives][:2] == (sizes if failing else sizes[:1])
    assert len(run.collectives) == decision.messages == (3 if failing else 1)


def failure_sets(members: Ranks) -> Iterator[set[int]]:
    for count in range(len(members) + 1):
        yield from map(set, combinations(members, count))


def test_the_layouts_are_all_families() -> None:
    assert [len(layouts(n)) for n in (2, 3, 4, 5)] == [1, 12, 507, 15236]
    assert sum(comb(5, n) * len(layouts(n)) for n in (2, 3, 4, 5)) == 17901
    assert sum(1 for _ in families(5)) == 17901
    assert [len(up_to_names(n)) for n in (2, 3, 4, 5)] == [1, 6, 47, 270]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLICES))
def test_each_component_derives_one_plan_and_votes_on_it(part: int) -> None:
    every = [family for size in (2, 3, 4, 5) for family in layouts(size)]
    for index in range(part, len(every), SLICES):
        family = every[index]
        for members, found in plans_of(family, ranks_of(len(family))).items():
            cast = index // SLICES  # so that each slice sees all failure sets
            check_failures(found, family, {r for i, r in enumerate(members) if cast >> i & 1})


@pytest.mark.slow
@pytest.mark.parametrize("part", range(SLICES))
def test_every_failure_set_reaches_the_whole_component(part: int) -> None:
    every = [*layouts(2), *layouts(3), *layouts(4), *up_to_names(5)]
    for family in every[part::SLICES]:
        for members in components_of(family):
            within = tuple(scope for scope in family if scope[0] in members)
            records = {r: held_by(r, within, ranks_of(len(within))) for r in members}
            for failing in failure_sets(members):
                check_failures(plan_of(records), within, failing)


def small_layouts() -> Iterator[tuple[Family, dict[Ranks, Plan]]]:
    """Yield layouts on up to 4 ranks with their plans: manifests all different, and all equal."""
    for family in [*layouts(2), *layouts(3), *up_to_names(4)]:
        for manifests in (ranks_of(len(family)), (7,) * len(family)):
            yield family, plans_of(family, manifests)


@pytest.mark.slow
def test_scopes_whose_members_hold_the_same_may_still_differ_from_each_other() -> None:
    for family, plans in small_layouts():
        for members, found in plans.items():
            votes = {rank: healthy(rank, family) for rank in members}
            assert decide_all(votes, found).agreed


@pytest.mark.slow
def test_equal_manifests_cost_one_message_in_every_layout() -> None:
    for family in [*layouts(2), *layouts(3), *layouts(4)]:
        for members, found in plans_of(family, (7,) * len(family)).items():
            votes = {
                rank: Vote("step", facts=tuple(fact("held", "x", s) for s in family if rank in s))
                for rank in members
            }
            assert decide_all(votes, found).messages == 1


@pytest.mark.slow
def test_a_difference_within_a_scope_names_the_ranks_of_that_scope_only() -> None:
    for family, plans in small_layouts():
        for scope in family:
            members = next(ranks for ranks in plans if scope[0] in ranks)
            for odd in scope:
                votes = {rank: healthy(rank, family) for rank in members}
                other = [
                    fact("held", "odd" if s == scope else str(s), s) for s in family if odd in s
                ]
                votes[odd] = Vote("step", facts=tuple(other))
                (found,) = decide_all(votes, plans[members]).differences
                rest = tuple(rank for rank in scope if rank != odd)
                assert found.name == "held"
                assert dict(found.values) == {str(scope): rest, "odd": (odd,)}


# ---- the naive alternative, so that the above is seen to protect from something ----


def passes(rank: int, family: Family, failing: set[int], count: int) -> Protocol[bool]:
    """Spread a failure flag by ``count`` passes over the scopes: one collective each, in order."""
    flag = int(rank in failing)
    for _ in range(count):
        for scope in family:
            if rank in scope:
                (flag,) = yield AllReduceMax(scope, (flag,))
    return bool(flag)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "uninformed"), [(1, 234), (2, 6), (3, 0)])
def test_passes_over_overlapping_scopes_leave_ranks_uninformed(count: int, uninformed: int) -> None:
    found = cases = 0
    for family in families(4, most=3):
        for failing in failure_sets(ranks_of(4)):
            cases += 1
            told = simulate({r: passes(r, family, failing, count) for r in range(4)}).results
            found += any(
                failing & set(members) and not all(told[rank] for rank in members)
                for members in components_of(family)
            )
    assert cases == 3696
    assert found == uninformed

"""Every way to hold a vote of a component, on every family of scopes and on random large ones.

The enclosing group has one collective a message; `sweep` and `passes` have one for each group of
their tour. Whatever carries it: all of a component conclude the same, nobody waits for ever, and
no collective has a member outside of the component.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import pytest

from consensus._planning import plan
from consensus._protocol import AllReduceMax, Protocol, decide
from consensus._tours import TOURS, Tour, passes, sweep
from consensus.enclosure import Plan, Scope, maximal
from consensus.errors import EnclosureError
from consensus.testing import simulate
from consensus.vote import Decision, Ranks
from tests.model.test_layouts import (
    Family,
    components_of,
    failure_sets,
    healthy,
    layouts,
    up_to_names,
)
from tests.simulated import failed, failure, ranks_of

pytestmark = pytest.mark.timeout(300)

STRATEGIES = ("enclosing", *TOURS)


def groups_that_carry(strategy: str, members: Ranks, scopes: Iterable[Ranks]) -> Tour:
    """Return the groups of each message, in order."""
    return (members,) if strategy == "enclosing" else TOURS[strategy](scopes)


def over(tour: Tour, rank: int, protocol: Protocol[Decision]) -> Protocol[Decision]:
    """Answer each message of a protocol by the groups of a tour, as the real link does."""
    try:
        wanted = next(protocol)
        while True:
            words = wanted.words
            for ranks in tour:
                if rank in ranks:
                    words = tuple((yield AllReduceMax(ranks, tuple(words))))
            wanted = protocol.send(words)
    except StopIteration as stop:
        decision: Decision = stop.value
        return decision


def plan_all(family: Family, *, carries: bool) -> dict[int, Plan]:
    """Plan on all ranks at once; each component leaves nothing in the store."""
    everyone = sorted({rank for scope in family for rank in scope})

    def held(rank: int) -> list[Scope]:
        return [Scope(s, i, carries=carries) for i, s in enumerate(family) if rank in s]

    run = simulate({r: plan(held(r), rank=r, rounds={}) for r in everyone}, store={})
    assert run.errors == run.store == {}
    return {rank: planned.plan for rank, planned in run.results.items()}


def check_votes(strategy: str, family: Family, failing: set[int]) -> None:
    """All components vote at once: each learns of its own failures, and of no others."""
    plans = plan_all(family, carries=strategy != "enclosing")
    programs = {}
    for rank, found in plans.items():
        vote = failed(rank) if rank in failing else healthy(rank, family)
        tour = groups_that_carry(strategy, found.members, found.groups)
        programs[rank] = over(tour, rank, decide(vote, found.ballot(rank=rank, sequence=0)))
    run = simulate(programs)
    assert run.errors == {}
    for members in components_of(family):
        expected = tuple(failure(rank) for rank in sorted(failing & set(members)))
        for rank in members:
            assert run.results[rank] == run.results[members[0]]
            assert run.results[rank].failures == expected
        tour = groups_that_carry(strategy, members, [s for s in family if set(s) <= set(members)])
        held = [group for group, _ in run.collectives if set(group) & set(members)]
        assert sorted(held) == sorted(tour * (3 if expected else 1))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", TOURS)
def test_every_failure_set_reaches_the_whole_component(strategy: str) -> None:
    """All of them on up to 4 ranks; on 5, each layout has every eighth."""
    for index, family in enumerate([*layouts(2), *layouts(3), *up_to_names(4), *up_to_names(5)]):
        every = list(failure_sets(tuple(sorted({r for s in family for r in s}))))
        for failing in every[index % 8 :: 8] if len(every) == 2**5 else every:
            check_votes(strategy, family, failing)


@pytest.mark.slow
@pytest.mark.parametrize("tour", TOURS.values(), ids=TOURS)
def test_a_tour_lets_every_rank_hear_of_every_other(tour: Callable[[Family], Tour]) -> None:
    """In any labelling, which decides on the order: all 15,756 layouts of up to 5 ranks."""
    for size in (2, 3, 4, 5):
        for family in layouts(size):
            for members in components_of(family):
                scopes = tuple(scope for scope in family if scope[0] in members)
                heard = {rank: {rank} for rank in members}
                for ranks in tour(scopes):
                    together = set().union(*(heard[rank] for rank in ranks))
                    heard.update(dict.fromkeys(ranks, together))
                assert all(each == set(members) for each in heard.values())
                assert set(tour(scopes)) <= set(maximal(scopes))
                assert tour(scopes) == tour(scopes[::-1])


def test_a_sweep_reduces_each_group_twice_at_most_and_one_of_them_once() -> None:
    for size in (2, 3, 4):
        for family in layouts(size):
            for members in components_of(family):
                scopes = maximal(scope for scope in family if scope[0] in members)
                assert len(sweep(scopes)) == 2 * len(scopes) - 1


def grid(num_rows: int, num_cols: int) -> Family:
    rows = [tuple(range(r * num_cols, (r + 1) * num_cols)) for r in range(num_rows)]
    return (*rows, *(tuple(range(c, num_rows * num_cols, num_cols)) for c in range(num_cols)))


def chain(length: int) -> Family:
    return tuple(pairwise(range(length + 1)))


def test_which_tour_is_shorter_depends_on_the_groups() -> None:
    assert (len(sweep(chain(5))), len(passes(chain(5)))) == (9, 15)
    assert (len(sweep(grid(8, 8))), len(passes(grid(8, 8)))) == (31, 17)
    assert sweep(grid(1, 4)[:1]) == passes(grid(1, 4)[:1]) == ((0, 1, 2, 3),)


@pytest.mark.parametrize("tour", TOURS.values(), ids=TOURS)
def test_groups_that_do_not_connect_their_ranks_are_refused(
    tour: Callable[[Sequence[Ranks]], Tour],
) -> None:
    for groups in ([], [(0, 1), (2, 3)]):
        with pytest.raises(EnclosureError, match="share ranks"):
            tour(groups)


# ---- large families ----


def relabelled(family: Iterable[Ranks], size: int, chance: random.Random) -> Family:
    names = chance.sample(range(size), size)
    return tuple(sorted({tuple(sorted(names[rank] for rank in scope)) for scope in family}))


def tree(size: int, chance: random.Random) -> Family:
    return tuple((chance.randrange(child), child) for child in range(1, size))


def two_pipelines(size: int, chance: random.Random) -> Family:
    """Stages of two pipelines, tied by an embedding that the first and the last of each share."""
    half = size // 2
    stages = [(start, start + 1) for start in range(0, 2 * (half // 2 * 2) - 1, 2)]
    return (*stages, (stages[0][0], stages[len(stages) // 2][0], stages[-1][-1]))


def experts(size: int, chance: random.Random) -> Family:
    """One mesh of all ranks, and experts on equal parts of it; some ranks hold no expert."""
    part = chance.choice((2, 3, 4))
    return (ranks_of(size), *(tuple(range(s, s + part)) for s in range(0, size - part, part)))


def scattered(size: int, chance: random.Random) -> Family:
    """Scopes of any ranks; some ranks have none, and there may be several components."""
    return tuple(
        tuple(sorted(chance.sample(range(size), chance.randint(2, max(2, size // 4)))))
        for _ in range(chance.randint(1, 8))
    )


FAMILIES: dict[str, Callable[[int, random.Random], Family]] = {
    "one mesh": lambda size, chance: (ranks_of(size),),
    "clique": lambda size, chance: tuple(
        (a, b) for a in range(min(size, 9)) for b in range(a + 1, min(size, 9))
    ),
    "chain": lambda size, chance: chain(size - 1),
    "ring": lambda size, chance: (*chain(size - 1), (0, size - 1)),
    "tree": tree,
    "star": lambda size, chance: tuple((0, rank) for rank in range(1, size)),
    "grid": lambda size, chance: grid(size // 4, 4),
    "grid and sub-meshes": lambda size, chance: (*grid(size // 4, 4), *experts(size, chance)[1:]),
    "two pipelines": two_pipelines,
    "disjoint pipelines": lambda size, chance: tuple((r, r + 1) for r in range(0, size - 1, 2)),
    "experts": experts,
    "scattered": scattered,
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_large_families_agree_within_their_components(kind: str, strategy: str) -> None:
    chance = random.Random(f"{kind}")
    for size in (8, 23, 64):
        family = relabelled(FAMILIES[kind](size, chance), size, chance)
        taken = sorted({rank for scope in family for rank in scope})
        check_votes(strategy, family, set())
        check_votes(strategy, family, set(chance.sample(taken, chance.randint(1, 3))))

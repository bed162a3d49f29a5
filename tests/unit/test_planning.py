import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from consensus._planning import Add, Await, Drop, Planned, Put, Verdict, plan, tally
from consensus.enclosure import Plan, Scope, conflicting_modes, plan_of
from consensus.testing import Deadlock, Simulation, simulate
from consensus.vote import Ranks
from tests.simulated import ranks_of

Records = Mapping[int, Sequence[Scope]]


def planning(records: Records, rounds: Mapping[Ranks, int] | None = None) -> Simulation:
    """Plan with these ranks on an empty store; nothing may be left in it."""
    run = simulate(
        {rank: plan(held, rank=rank, rounds=rounds or {}) for rank, held in records.items()}
    )
    assert run.errors == {}
    assert run.store == {}
    return run


def same_plan(records: Records) -> Planned:
    """Return what all ranks derive, equal on all of them."""
    results = list(planning(records).results.values())
    planned: Planned = results[0]
    assert all(other == planned for other in results)
    return planned


def counting(values: Mapping[int, int], key: str = "k") -> Simulation:
    members = tuple(values)
    programs = {r: tally(key, members, value, nonce=f"n{r}") for r, value in values.items()}
    return simulate(programs)


# ---- tally ----


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_tally_of_equal_values_says_so(size: int) -> None:
    run = counting(dict.fromkeys(range(size), 2**62 - 5))
    assert {verdict.same for verdict in run.results.values()} == {True}
    assert run.store == {}


@pytest.mark.parametrize("odd", range(4))
def test_a_tally_with_one_other_value_says_so_wherever_it_is(odd: int) -> None:
    run = counting({rank: 7 if rank == odd else 6 for rank in range(4)})
    assert {verdict.same for verdict in run.results.values()} == {False}
    assert run.store == {}


def test_everyone_gets_the_word_of_the_rank_that_came_last() -> None:
    run = counting({0: 1, 1: 1, 2: 1})
    assert set(run.results.values()) == {Verdict(True, "n2")}


def test_a_tally_costs_three_requests_a_rank() -> None:
    """An add, a wait, an add; one rank also sets the answer, and one clears up."""
    assert sorted(counting(dict.fromkeys(range(6), 1)).requests.values()) == [3, 3, 3, 3, 3, 5]


@pytest.mark.parametrize("odd", [0, 1])
def test_the_counter_holds_65536_ranks_in_an_int64(odd: int) -> None:
    members = ranks_of(65536)
    protocol = tally("k", members, 2**62 - 1)  # the hash of most digits
    wanted = next(protocol)
    assert isinstance(wanted, Add)
    total = len(members) * wanted.amount - odd  # one rank brought one less
    assert total < 2**63
    done = protocol.send(total)
    assert isinstance(done, Put)
    assert json.loads(done.value)[0] is not bool(odd)


def test_a_rank_that_does_not_come_to_a_tally_is_waited_for_by_name() -> None:
    with pytest.raises(Deadlock) as stuck:
        simulate({rank: tally("k", (0, 1, 2), 1) for rank in (0, 2)})
    assert set(stuck.value.waiting) == {0, 2}
    assert all(want == Await("k/done", (0, 1, 2)) for want in stuck.value.waiting.values())


def test_the_last_to_leave_clears_up() -> None:
    protocol = tally("k", (0, 1), 1)
    answers: list[Any] = [None, 2 * (1 << 46) + 2, None, b'[true, ""]', 2]
    asked = [protocol.send(answer) for answer in answers]
    assert asked[-1] == Drop(("k/sum", "k/done", "k/gone"))


# ---- the usual case ----


def test_one_scope_with_equal_manifests_reads_no_closure() -> None:
    run = planning({rank: [Scope((0, 1, 2), 7)] for rank in range(3)})
    assert set(run.results.values()) == {Planned(Plan((0, 1, 2)))}
    assert sorted(run.requests.values()) == [3, 3, 5]


def test_a_scope_that_all_members_of_a_larger_one_have_alike_reads_no_closure() -> None:
    everyone = (0, 1, 2, 3)
    rows = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    run = planning({r: [Scope(everyone, 7), Scope(rows[r], 8)] for r in everyone})
    assert set(run.results.values()) == {Planned(Plan(everyone))}
    assert max(run.requests.values()) == 5


# ---- closures ----


def test_a_chain_is_found_from_both_ends() -> None:
    planned = same_plan(
        {
            0: [Scope((0, 1), 1)],
            1: [Scope((0, 1), 1), Scope((1, 2), 2)],
            2: [Scope((1, 2), 2), Scope((2, 3), 3)],
            3: [Scope((2, 3), 3)],
        }
    )
    assert planned.plan.members == (0, 1, 2, 3)
    assert planned.plan.sets == ((0, 1), (1, 2), (2, 3))


def test_members_that_hold_different_manifests_still_plan_together() -> None:
    """What differs is said by the first vote, which can name it."""
    planned = same_plan({rank: [Scope((0, 1, 2), rank)] for rank in range(3)})
    assert planned == Planned(Plan((0, 1, 2)))


def test_modes_that_differ_are_a_conflict_known_to_all() -> None:
    records = {r: [Scope((0, 1, 2), 7, "approx" if r == 1 else "exact")] for r in range(3)}
    assert same_plan(records).conflict == (("approx", (1,)), ("exact", (0, 2)))


def test_a_conflict_is_known_to_ranks_that_do_not_share_the_scope() -> None:
    records = {
        0: [Scope((0, 1), 1, "exact")],
        1: [Scope((0, 1), 1, "exact"), Scope((1, 2), 2, "exact")],
        2: [Scope((1, 2), 2, "approx")],
    }
    assert same_plan(records).conflict == (("approx", (2,)), ("exact", (1,)))


def test_an_extra_scope_on_some_members_is_seen_by_the_others() -> None:
    """All of {0, 1, 2} hold the same on it, but ranks 0 and 1 meet in one more scope."""
    records = {
        0: [Scope((0, 1, 2), 7), Scope((0, 1), 8)],
        1: [Scope((0, 1, 2), 7), Scope((0, 1), 8)],
        2: [Scope((0, 1, 2), 7)],
    }
    assert same_plan(records).plan.sets == ((0, 1),)


def test_ranks_far_apart_visit_shared_scopes_in_one_order() -> None:
    """Each declares them in an order of its own."""
    scopes = [Scope((9, 10), 1), Scope((10, 100), 2), Scope((9, 100), 3)]
    records = {
        rank: [s for s in order if rank in s.ranks]
        for rank, order in (
            (9, scopes),
            (10, scopes[::-1]),
            (100, [scopes[2], scopes[0], scopes[1]]),
        )
    }
    assert same_plan(records).plan.members == (9, 10, 100)


def test_it_is_the_plan_and_the_conflict_of_all_records() -> None:
    """Whatever ranks hold, in whichever order each lists it, and whoever leads."""
    chance = random.Random(0)
    conflicts = 0
    for _ in range(100):
        every = [(0, rank) for rank in range(1, 6)]  # so that all are tied
        every += [tuple(sorted(chance.sample(range(6), 3))) for _ in range(chance.randrange(4))]
        names = chance.sample(range(20), 6)
        records: dict[int, list[Scope]] = {rank: [] for rank in names}
        for ranks in {tuple(sorted(names[rank] for rank in ranks)) for ranks in every}:
            for rank in ranks:
                mode = chance.choice(("exact", "exact", "exact", "approx"))
                scope = Scope(ranks, chance.randrange(2), mode, carries=chance.random() < 0.1)
                records[rank].insert(chance.randint(0, len(records[rank])), scope)
        planned = same_plan(records)
        assert planned.plan == plan_of(records)
        assert planned.conflict == tuple(sorted(conflicting_modes(records).items()))
        conflicts += bool(planned.conflict)
    assert 20 < conflicts < 100


# ---- what closures cost ----


def chain(links: int) -> dict[Ranks, int]:
    return {(rank, rank + 1): rank for rank in range(links)}


def tied_meshes(stages: int, columns: int) -> dict[Ranks, int]:
    """Return one mesh a stage, with parameters of its own, and groups that tie them across."""
    meshes = {tuple(range(s * columns, (s + 1) * columns)): 1 + s for s in range(stages)}
    return meshes | {tuple(range(c, stages * columns, columns)): 0 for c in range(columns)}


@pytest.mark.parametrize(
    ("scopes", "requests", "most"),
    [
        pytest.param(chain(5), 77, 14, id="chain of 5 groups"),
        pytest.param({(0, 1): 1, (1, 2): 2, (0, 2): 3}, 40, 15, id="ring of 3"),
        pytest.param(tied_meshes(2, 2), 53, 15, id="mesh of 2 x 2"),
        pytest.param(tied_meshes(4, 2), 97, 15, id="4 tied meshes on 8 ranks"),
        pytest.param(tied_meshes(4, 16), 657, 15, id="4 tied meshes on 64 ranks"),
        pytest.param(tied_meshes(4, 64), 2_577, 15, id="4 tied meshes on 256 ranks"),
    ],
)
def test_scopes_that_cross_cost_about_ten_requests_a_rank(
    scopes: dict[Ranks, int], requests: int, most: int
) -> None:
    ranks = sorted({rank for scope in scopes for rank in scope})
    run = planning({r: [Scope(s, m) for s, m in scopes.items() if r in s] for r in ranks})
    assert (sum(run.requests.values()), max(run.requests.values())) == (requests, most)


def test_a_chain_in_any_order_costs_in_proportion_to_its_length() -> None:
    """Many ranks lead the lowest scope that they know at first, and stop when they know better."""
    costs = []
    for links in (25, 50, 100):
        names = random.Random(0).sample(range(links + 1), links + 1)
        scopes = [tuple(sorted(names[i : i + 2])) for i in range(links)]
        held = {r: [Scope(s, i) for i, s in enumerate(scopes) if r in s] for r in names}
        costs.append(sum(planning(held).requests.values()))
    assert costs == [363, 711, 1430]


# ---- rounds ----


def test_plans_of_one_scope_do_not_mix_over_rounds() -> None:
    """Rank 0 is already at its second optimizer while rank 1 is at its first."""

    def two(rank: int, manifests: tuple[int, int]) -> Any:
        found = []
        for number, manifest in enumerate(manifests):
            rounds: dict[Ranks, int] = {(0, 1): number}
            found.append((yield from plan([Scope((0, 1), manifest)], rank=rank, rounds=rounds)))
        return found

    run = simulate({0: two(0, (5, 6)), 1: two(1, (5, 6))})
    assert run.results[0] == run.results[1] == [Planned(Plan((0, 1)))] * 2
    assert run.store == {}


def test_ranks_in_different_rounds_wait_for_each_other() -> None:
    with pytest.raises(Deadlock):
        simulate({r: plan([Scope((0, 1), 5)], rank=r, rounds={(0, 1): r}) for r in (0, 1)})


def test_scopes_of_one_component_may_be_in_different_rounds() -> None:
    rounds: dict[Ranks, int] = {(0, 1): 3, (1, 2): 0}
    records = {
        0: [Scope((0, 1), 1)],
        1: [Scope((0, 1), 1), Scope((1, 2), 2)],
        2: [Scope((1, 2), 2)],
    }
    results = planning(records, rounds).results
    assert {planned.plan.members for planned in results.values()} == {(0, 1, 2)}


# ---- late ranks ----


def test_a_late_rank_holds_up_its_whole_component_and_nobody_else() -> None:
    records = {
        0: [Scope((0, 1), 1)],
        1: [Scope((0, 1), 1), Scope((1, 2), 2)],
        5: [Scope((5, 6), 3)],
        6: [Scope((5, 6), 3)],
    }
    with pytest.raises(Deadlock) as stuck:
        simulate({rank: plan(held, rank=rank, rounds={}) for rank, held in records.items()})
    owners = {rank: want.owners for rank, want in stuck.value.waiting.items()}
    assert owners == {0: (1,), 1: (1, 2)}

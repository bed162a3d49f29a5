"""What an agreement and its planning cost as functions of the number of ranks, counted exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from consensus._hops import WAYS
from consensus._planning import Planned, plan
from consensus._protocol import INLINE_RANGES, decide, header_words
from consensus.enclosure import Plan, Scope, plan_of
from consensus.testing import Deadlock, Simulation, simulate
from consensus.testing._simulate import by_hops
from consensus.vote import Decision, Ranks, Vote
from tests.simulated import fact, failed, hold_vote, ranks_of

SIZES = (2, 3, 16, 100)

Scopes = Mapping[Ranks, int]  # scope -> manifest, equal on all of its members


def chain(links: int) -> Scopes:
    """Return scopes of two neighbours each, which all hold something else."""
    return {(rank, rank + 1): rank for rank in range(links)}


def grid(rows: int, columns: int) -> Scopes:
    """Return the rows and the columns of a mesh: rows hold one thing alike, columns another."""
    along = [tuple(row * columns + c for c in range(columns)) for row in range(rows)]
    across = [tuple(r * columns + column for r in range(rows)) for column in range(columns)]
    return dict.fromkeys(along, 1) | dict.fromkeys(across, 2)


def held(scopes: Scopes) -> dict[int, Sequence[Scope]]:
    ranks = sorted({rank for scope in scopes for rank in scope})
    return {r: [Scope(s, m) for s, m in scopes.items() if r in s] for r in ranks}


def planning(scopes: Scopes) -> Simulation:
    records = held(scopes)
    run = simulate({rank: plan(own, rank=rank, rounds={}) for rank, own in records.items()})
    assert run.errors == {}
    assert run.store == {}
    return run


def sizes(votes: Mapping[int, Vote], plan: Plan | None = None) -> list[int]:
    """Return the words of each message of one vote."""
    return [words for _, words in hold_vote(votes, plan).collectives]


# ---- votes ----


@pytest.mark.slow
@pytest.mark.parametrize("size", [*SIZES, 4096])
def test_a_healthy_vote_is_two_words_whatever_the_number_of_ranks(size: int) -> None:
    vote = Vote("step", facts=tuple(fact(f"x{i}", "1") for i in range(20)), ranges=(("r", 1),))
    assert sizes(dict.fromkeys(range(size), vote)) == [2]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_headers_are_23_words_a_rank(size: int) -> None:
    votes = {rank: Vote("step", ranges=(("r", rank),)) for rank in range(size)}
    assert sizes(votes) == [2, 23 * size]


@pytest.mark.slow
@pytest.mark.parametrize("count", [INLINE_RANGES + 1, INLINE_RANGES + 20])
def test_more_than_eight_ranges_cost_two_more_words_a_rank_each(count: int) -> None:
    third = [
        sizes(
            {r: Vote("step", ranges=tuple((f"r{i}", r) for i in range(count))) for r in range(n)}
        )[2]
        for n in (2, 3, 40)
    ]
    assert third == [third[0], third[0] + 2 * count, third[0] + 38 * 2 * count]


@pytest.mark.slow
def test_a_failure_costs_the_same_words_of_text_on_any_number_of_ranks() -> None:
    third = {sizes({r: failed(r) if r else Vote("step") for r in range(n)})[2] for n in SIZES}
    assert len(third) == 1


@pytest.mark.slow
def test_one_odd_rank_costs_the_same_words_of_text_on_any_number_of_ranks() -> None:
    third = {
        sizes({r: Vote("step", facts=(fact("x", f"{r == 0}"),)) for r in range(n)})[2]
        for n in SIZES
    }
    assert len(third) == 1


@pytest.mark.parametrize("links", [2, 3, 10])
def test_a_chain_costs_a_pair_of_words_a_link(links: int) -> None:
    scopes = chain(links)
    found = plan_of(held(scopes))
    healthy = {
        rank: Vote("step", facts=tuple(fact("x", f"{s.ranks}", s.ranks) for s in own))
        for rank, own in held(scopes).items()
    }
    assert sizes(healthy, found) == [2 * (1 + links)]
    failing = healthy | {0: failed(0)}
    assert sizes(failing, found)[:2] == [2 * (1 + links), (links + 1) * header_words(links)]
    assert header_words(links) == 23 + links


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 4), (8, 8)])
def test_rows_and_columns_of_a_mesh_cost_two_words(rows: int, columns: int) -> None:
    scopes = grid(rows, columns)
    found = plan_of(held(scopes))
    assert found.members == ranks_of(rows * columns)
    votes = {
        rank: Vote("step", facts=tuple(fact("x", f"{s.manifest}", s.ranks) for s in own))
        for rank, own in held(scopes).items()
    }
    assert sizes(votes, found) == [2]


# ---- votes as messages between ranks ----


def hopping(votes: Mapping[int, Vote], way: str | None = None) -> tuple[Simulation, Decision]:
    """Return the run of one vote by messages between ranks, and what all conclude."""
    found = Plan(tuple(sorted(votes)))
    run = simulate(
        {
            rank: by_hops(decide(vote, found.ballot(rank=rank, sequence=0)), rank, way)
            for rank, vote in votes.items()
        }
    )
    assert run.errors == {}
    assert run.collectives == []
    decision: Decision = run.results[min(votes)]
    assert list(run.results.values()) == [decision] * len(votes)
    return run, decision


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 5, 9, 12])
def test_a_failure_is_heard_by_all_whatever_the_way(way: str, size: int) -> None:
    votes = {10 * rank: Vote("step") for rank in range(size)}
    votes[10] = failed(10)
    _, decision = hopping(votes, way)
    assert decision == hold_vote(votes).results[10]
    assert [failure.rank for failure in decision.failures] == [10]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "depth", "messages"),
    [(2, 1, 2), (8, 1, 56), (9, 4, 36), (64, 6, 384), (100, 7, 700), (1024, 10, 10240)],
)
def test_a_healthy_vote_is_one_message_a_rank_in_each_of_log_n_rounds(
    size: int, depth: int, messages: int
) -> None:
    run, _ = hopping(dict.fromkeys(range(size), Vote("step")))
    assert set(run.depth.values()) == {depth}
    assert len(run.messages) == messages
    assert {words for _, _, words in run.messages} == {2}


@pytest.mark.slow
def test_the_three_messages_of_a_failure_are_three_times_as_deep() -> None:
    run, decision = hopping({rank: failed(rank) if rank == 3 else Vote("s") for rank in range(33)})
    assert decision.failed_ranks == (3,)
    assert set(run.depth.values()) == {3 * 6}
    assert len(run.messages) == 3 * 6 * 33


def test_a_rank_that_does_not_exchange_is_a_deadlock_that_names_it() -> None:
    ballots = {rank: Plan(ranks_of(9)).ballot(rank=rank, sequence=0) for rank in range(8)}
    with pytest.raises(Deadlock, match=r"rank 0 waits in an exchange, for messages of rank 8"):
        simulate({r: by_hops(decide(Vote("step"), at), r) for r, at in ballots.items()})


# ---- planning ----


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 64, 1024, 4096])
def test_planning_one_scope_is_three_requests_a_rank(size: int) -> None:
    """An add, a wait, an add. One rank also sets the verdict, and one clears up."""
    requests = planning({ranks_of(size): 7}).requests.values()
    assert max(requests) <= 5
    assert sum(requests) == 3 * size + 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 64, 1024])
def test_siblings_below_one_large_scope_cost_no_more(size: int) -> None:
    pairs: Scopes = {(rank, rank + 1): 8 for rank in range(0, size, 2)}
    run = planning({ranks_of(size): 7, **pairs})
    assert sum(run.requests.values()) == 3 * size + 2
    assert {planned.plan for planned in run.results.values()} == {Plan(ranks_of(size))}


@pytest.mark.slow
@pytest.mark.parametrize("links", [2, 3, 8, 40])
def test_planning_a_chain_takes_13_requests_a_link(links: int) -> None:
    """The lowest rank reads one union after the other; the others wait for the plan."""
    assert sum(planning(chain(links)).requests.values()) == 13 * links + 8 + (links - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 4), (4, 8), (16, 16)])
def test_planning_a_mesh_with_parameters_on_rows_and_columns(rows: int, columns: int) -> None:
    """Nine requests a rank, a few for each scope, and one to read the unions of all scopes."""
    ranks = rows * columns
    run = planning(grid(rows, columns))
    assert sum(run.requests.values()) == 9 * ranks + 4 * (rows + columns) + 1
    assert {planned.plan for planned in run.results.values()} == {Plan(ranks_of(ranks))}


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 64, 1024])
def test_planning_one_scope_with_unequal_manifests_is_eight_requests_a_rank(size: int) -> None:
    """An add, a wait; a record, the plan; an add, a wait, an add; and what it put is dropped."""
    records = {rank: [Scope(ranks_of(size), rank % 2)] for rank in range(size)}
    run = simulate({rank: plan(own, rank=rank, rounds={}) for rank, own in records.items()})
    assert sum(run.requests.values()) == 8 * size + 5
    assert run.results == dict.fromkeys(records, Planned(Plan(ranks_of(size))))

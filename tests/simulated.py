"""Hold one vote of simulated ranks, and see that they all conclude the same."""

from __future__ import annotations

from collections.abc import Mapping

from consensus._protocol import decide
from consensus.enclosure import Plan
from consensus.errors import Failure
from consensus.testing import Simulation, simulate
from consensus.vote import Decision, Fact, Ranks, Vote


def hold_vote(votes: Mapping[int, Vote], plan: Plan | None = None) -> Simulation:
    """Return the run of one vote of these ranks; without a plan they are one group."""
    plan = Plan(tuple(sorted(votes))) if plan is None else plan
    run = simulate(
        {rank: decide(votes[rank], plan.ballot(rank=rank, sequence=0)) for rank in votes}
    )
    assert run.errors == {}
    return run


def decide_all(votes: Mapping[int, Vote], plan: Plan | None = None) -> Decision:
    """Return what these ranks conclude, equal on all of them."""
    run = hold_vote(votes, plan)
    decision: Decision = run.results[min(votes)]
    assert set(run.results) == set(votes)
    assert all(other == decision for other in run.results.values())
    assert len(run.collectives) == decision.messages
    return decision


def ranks_of(size: int) -> Ranks:
    return tuple(range(size))


def failure(rank: int, text: str = "boom", kind: type[Exception] = ValueError) -> Failure:
    return Failure(rank, kind.__name__, text, "", (f"builtins.{kind.__name__}",), "step")


def failed(rank: int, text: str = "boom", phase: str = "step") -> Vote:
    return Vote(phase, (failure(rank, text),))


def fact(name: str, value: str, scope: Ranks = ()) -> Fact:
    """Return a fact whose key and text are ``value``."""
    return Fact(name, value.encode(), lambda: {"": value}, scope)

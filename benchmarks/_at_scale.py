"""What votes and their planning take on more ranks than can be run here: counted, then timed.

Messages, words, rounds and requests are facts: the library's own generators are run for every
rank, and where that is too many, the stated formulas, which are held against those runs. Times
follow from them by a stated model of latency and bandwidth. All ranks come at once, and links and
switches are shared by nobody: what a model like this says is how times grow, not what they are.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks._common import Record
from consensus._hops import DIRECT_RANKS, WAYS, Cost, Model, cheapest, reduction
from consensus._planning import plan, tally
from consensus.enclosure import Plan, Scope, plan_of
from consensus.testing import simulate
from consensus.vote import Ranks

HEAD_BYTES, WORD_BYTES = 16, 8
REQUESTS_A_SECOND = 30_000  # that the one server of a TCPStore answers
STAGES = 4


class Place(NamedTuple):
    """Where ranks are."""

    num_ranks: int
    model: Model
    says: str


PLACES = {
    "one host": Place(
        8, Model(latency=5e-6, overhead=4e-6, per_word=2e-9), "5 us away, 4 GB/s, a core each"
    ),
    "one rack": Place(
        256, Model(latency=15e-6, overhead=4e-6, per_word=8e-9), "15 us away, 1 GB/s a connection"
    ),
    "a cluster": Place(
        65536, Model(latency=30e-6, overhead=4e-6, per_word=8e-9), "30 us away, 1 GB/s a connection"
    ),
}


def ways_by_size(
    sizes: Sequence[int], num_words: int, model: Model
) -> dict[str, dict[int, Record]]:
    """Return what each way takes for a message of so many words, by number of ranks."""
    found: dict[str, dict[int, Record]] = {name: {} for name in (*WAYS, "store")}
    for size in sizes:
        for name, way in WAYS.items():
            if size <= way.most_ranks:
                cost = way.cost(size, num_words)
                found[name][size] = _record(cost, model.seconds(cost))
        requests = size * (2 * size + 2)  # own words, two to read those of each, and clearing up
        found["store"][size] = {"requests": requests, "seconds": requests / REQUESTS_A_SECOND}
    return found


def simulated_vote(num_ranks: int, num_words: int) -> Record:
    """Run the chosen schedule for every rank; return what took place, and that it is right."""
    name = cheapest(num_ranks, num_words, sums=False)
    way = WAYS[name]
    gc.disable()  # a million small objects, none of them garbage
    try:
        run = simulate(
            {
                rank: reduction(
                    list(way.schedule(rank, num_ranks, num_words)), [rank] * num_words, max
                )
                for rank in range(num_ranks)
            }
        )
    finally:
        gc.enable()
    cost = way.cost(num_ranks, num_words)
    seen = (max(run.depth.values()), len(run.messages), sum(words for *_, words in run.messages))
    if run.results != dict.fromkeys(range(num_ranks), [num_ranks - 1] * num_words):
        raise AssertionError(f"{name} is wrong on {num_ranks} ranks")
    if seen != cost[:3]:
        raise AssertionError(f"{name} on {num_ranks} ranks took {seen}, not {cost[:3]}")
    return {"way": name, "ranks": num_ranks, "rounds": seen[0], "messages": seen[1]}


def layouts(num_ranks: int) -> dict[str, Record]:
    """Return, for each layout, who votes together, in how many words, and how that is planned."""
    rows, columns = STAGES, num_ranks // STAGES
    alone = {"members": num_ranks, "words": 2, "planning": _requests_of_one_scope(num_ranks)}
    stage = {"members": columns, "words": 2, "planning": rows * _requests_of_one_scope(columns)}
    small = plan_of(_held(_pipeline(rows, 2)))
    tied = {
        "members": num_ranks,
        "words": 2 * (1 + len(small.sets)),
        "planning": _requests_of_a_grid(rows, columns),
    }
    return {
        "one mesh: 1-D, or HSDP": alone,
        f"pipeline of {rows} meshes": stage,
        f"pipeline of {rows} meshes, tied across": tied,
    }


def cost_of_layout(layout: Record, place: Place) -> Record:
    """Return what one healthy vote and all before it take in one component and in the store."""
    members, words = layout["members"], layout["words"]
    groups = place.num_ranks // members
    name = cheapest(members, words, sums=False)
    cost = WAYS[name].cost(members, words)
    connecting = groups * _requests_to_connect(members)
    requests = layout["planning"] + connecting
    return {
        "groups": groups,
        "ranks a group": members,
        "way": name,
        "words": words,
        "rounds": cost.rounds,
        "messages": groups * cost.messages,
        "bytes": groups * (cost.messages * HEAD_BYTES + cost.words * WORD_BYTES),
        "vote, seconds": place.model.seconds(cost),
        "store requests": requests,
        "store requests a rank": requests / place.num_ranks,
        "most keys at once": place.num_ranks + 3 * groups,
        "construction, seconds": requests / REQUESTS_A_SECOND + 4 * place.model.latency,
    }


def check_formulas() -> Record:
    """Hold the formulas of planning against runs of the real protocols; return what was run."""
    for size in (8, 64, 1024):
        ranks = tuple(range(size))
        _expect(_requests_of_planning({ranks: 7}), _requests_of_one_scope(size), size)
    for columns in (2, 6):
        requests = _requests_of_planning(_pipeline(STAGES, columns))
        _expect(requests, _requests_of_a_grid(STAGES, columns), STAGES * columns)
    size = PLACES["a cluster"].num_ranks
    members = tuple(range(size))
    run = simulate({rank: tally("key", members, 5) for rank in members})
    _expect(sum(run.requests.values()), _requests_of_a_tally(size), size)
    return {"planning": "1 scope of 8, 64, 1024 ranks; 16 and 48 on a grid", "tally": size}


def _record(cost: Cost, seconds: float) -> Record:
    sent = cost.messages * HEAD_BYTES + cost.words * WORD_BYTES
    return {**cost._asdict(), "bytes": sent, "seconds": seconds}


def _requests_of_a_tally(members: int) -> int:
    return 3 * members + 2


_requests_of_one_scope = _requests_of_a_tally


def _requests_of_a_grid(rows: int, columns: int) -> int:
    """Two scopes a rank: every rank reads a record of every other."""
    ranks = rows * columns
    return ranks * (ranks + 11) + 2 * (rows + columns + 1)


def _requests_to_connect(members: int) -> int:
    """Two tallies, and addresses: one is set and dropped by each, and others are awaited and read.

    gloo's groups of few ranks set one, and await and read one of every member, by itself.
    """
    addresses = members * (1 + 2 * members) if members <= DIRECT_RANKS else 4 * members - 2
    return 2 * _requests_of_a_tally(members) + addresses


def _requests_of_planning(scopes: Mapping[Ranks, int]) -> int:
    held = _held(scopes)
    run = simulate({rank: plan(own, rank=rank, rounds={}) for rank, own in held.items()})
    if run.errors or not all(isinstance(p.plan, Plan) for p in run.results.values()):
        raise AssertionError(f"planning failed: {run.errors}")
    return sum(run.requests.values())


def _pipeline(rows: int, columns: int) -> dict[Ranks, int]:
    """Return one mesh a stage, which hold different parameters, and groups across the stages."""
    stages = {tuple(r * columns + c for c in range(columns)): 1 + r for r in range(rows)}
    across = {tuple(r * columns + c for r in range(rows)): 0 for c in range(columns)}
    return {**stages, **across}


def _held(scopes: Mapping[Ranks, int]) -> dict[int, list[Scope]]:
    ranks = sorted({rank for scope in scopes for rank in scope})
    return {r: [Scope(s, m) for s, m in scopes.items() if r in s] for r in ranks}


def _expect(counted: int, stated: int, num_ranks: int) -> None:
    if counted != stated:
        raise AssertionError(f"{num_ranks} ranks made {counted} requests, not {stated}")

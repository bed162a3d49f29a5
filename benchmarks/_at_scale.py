"""What votes and their planning take on more ranks than can be run here: counted, then timed.

Messages, words, rounds and requests are facts: the library's own generators are run for every
rank, and where that is too many, the stated formulas, which are held against those runs. Times
follow from them by a stated model of latency and bandwidth. All ranks come at once, and links and
switches are shared by nobody: what a model like this says is how times grow, not what they are.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks._common import Record
from consensus._hops import DIRECT_RANKS, WAYS, Cost, Model, cheapest, reduction
from consensus._planning import Await, Put, packed, plan, tally
from consensus._records import Known, runs_of
from consensus.enclosure import Plan, Scope, plan_of
from consensus.testing import simulate
from consensus.vote import Ranks

HEAD_BYTES, WORD_BYTES = 16, 8
REQUESTS_A_SECOND = 30_000  # that the one server of a TCPStore answers
STORE_BYTES_A_SECOND = 1e9  # that it takes and gives
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
    one_scope = {"words": 2, "keys": 3, "plan bytes": 0}
    alone = {**one_scope, "members": num_ranks, "planning": _requests_of_one_scope(num_ranks)}
    stage = {
        **one_scope,
        "members": columns,
        "planning": rows * _requests_of_one_scope(columns),
    }
    small = plan_of(_held(_pipeline(rows, 2)))
    tied = {
        "members": num_ranks,
        "words": 2 * (1 + len(small.sets)),
        "planning": _requests_of_a_grid(rows, columns),
        "keys": _keys_of_a_grid(rows, columns),
        "plan bytes": _bytes_of_plans(_pipeline(rows, columns), num_ranks),
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
        "most keys at once": max(place.num_ranks + 3 * groups, groups * layout["keys"]),
        "plan bytes": layout["plan bytes"],
        "construction, seconds": requests / REQUESTS_A_SECOND
        + layout["plan bytes"] / STORE_BYTES_A_SECOND
        + 4 * place.model.latency,
    }


def check_formulas() -> Record:
    """Hold the formulas of planning against runs of the real protocols; return what was run."""
    for size in (8, 64, 1024):
        run = _run_planning({tuple(range(size)): 7})
        _expect(run, _Planning(_requests_of_one_scope(size), 3, 0), size)
    for columns in (2, 6, 64):
        scopes, size = _pipeline(STAGES, columns), STAGES * columns
        run = _run_planning(scopes)
        stated = _Planning(
            _requests_of_a_grid(STAGES, columns),
            _keys_of_a_grid(STAGES, columns),
            _bytes_of_plans(scopes, size),
        )
        _expect(run, stated, size)
    size = PLACES["a cluster"].num_ranks
    members = tuple(range(size))
    run = simulate({rank: tally("key", members, 5) for rank in members})
    _expect(sum(run.requests.values()), _requests_of_a_tally(size), size)
    return {"planning": "1 scope of 8, 64, 1024 ranks; 8, 24, 256 on a grid", "tally": size}


def _record(cost: Cost, seconds: float) -> Record:
    sent = cost.messages * HEAD_BYTES + cost.words * WORD_BYTES
    return {**cost._asdict(), "bytes": sent, "seconds": seconds}


def _requests_of_a_tally(members: int) -> int:
    return 3 * members + 2


_requests_of_one_scope = _requests_of_a_tally


def _requests_of_a_grid(rows: int, columns: int) -> int:
    """Two scopes a rank.

    Each rank adds to two counts, puts a record in two scopes but those it leads, awaits the plan,
    meets all in a tally, and drops what it put. A scope takes a verdict, which its leader awaits, a
    union and the plan. All but one of the leaders lead one scope. The lowest rank, which leads two,
    reads all unions at once.
    """
    ranks, scopes = rows * columns, rows + columns
    leaders = scopes - 1
    members = 2 * ranks + (2 * ranks - scopes) + (ranks - 1) + _requests_of_a_tally(ranks) + ranks
    return members + 4 * scopes + leaders + 1


def _keys_of_a_grid(rows: int, columns: int) -> int:
    """All records, of each scope a sum, a verdict, a union and the plan, and the last tally."""
    scopes = rows + columns
    return 2 * rows * columns - scopes + 4 * scopes + 3


def _bytes_of_plans(scopes: Mapping[Ranks, int], num_ranks: int) -> int:
    """Return the bytes of the plan, which all but one read, and leaders put and are answered."""
    known = Known()
    for ranks, manifest in scopes.items():
        place = 0 if manifest else 1  # each rank has its stage first
        known.hear([[runs_of(ranks), runs_of(ranks), "0", place, manifest, "", False]])
    return len(packed(known)) * (num_ranks - 1 + 2 * len(scopes))


def _requests_to_connect(members: int) -> int:
    """Two tallies, and addresses: one is set and dropped by each, and others are awaited and read.

    gloo's groups of few ranks set one, and await and read one of every member, by itself.
    """
    addresses = members * (1 + 2 * members) if members <= DIRECT_RANKS else 4 * members - 2
    return 2 * _requests_of_a_tally(members) + addresses


class _Planning(NamedTuple):
    """What planning took in one run."""

    requests: int
    keys: int  # at the same time
    plan_bytes: int  # put, answered and read


def _run_planning(scopes: Mapping[Ranks, int]) -> _Planning:
    store: dict[str, Any] = {}
    keys = moved = 0

    def counted(protocol: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        nonlocal keys, moved
        answer = None
        while True:
            try:
                wanted = protocol.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = yield wanted
            keys = max(keys, len(store))
            if isinstance(wanted, Await | Put) and wanted.key.endswith("/plan"):
                moved += len(answer) * (1 + isinstance(wanted, Put))

    programs = {r: counted(plan(own, rank=r, rounds={})) for r, own in _held(scopes).items()}
    run = simulate(programs, store=store)
    if run.errors or not all(isinstance(p.plan, Plan) for p in run.results.values()):
        raise AssertionError(f"planning failed: {run.errors}")
    return _Planning(sum(run.requests.values()), keys, moved)


def _pipeline(rows: int, columns: int) -> dict[Ranks, int]:
    """Return one mesh a stage, which hold different parameters, and groups across the stages."""
    stages = {tuple(r * columns + c for c in range(columns)): 1 + r for r in range(rows)}
    across = {tuple(r * columns + c for r in range(rows)): 0 for c in range(columns)}
    return {**stages, **across}


def _held(scopes: Mapping[Ranks, int]) -> dict[int, list[Scope]]:
    ranks = sorted({rank for scope in scopes for rank in scope})
    return {r: [Scope(s, m) for s, m in scopes.items() if r in s] for r in ranks}


def _expect(counted: object, stated: object, num_ranks: int) -> None:
    if counted != stated:
        raise AssertionError(f"{num_ranks} ranks took {counted}, not {stated}")

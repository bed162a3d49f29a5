"""All ranks of a protocol in one process: finds a deadlock at once and says who waits for whom.

Each rank is a generator that yields what it wants. A collective starts when all of its members
have asked for it, a store request as soon as it can be answered. Ranks are sequential and meet
only in blocking requests, so the outcome does not depend on the schedule: one run a case is
enough. Asynchronous handles and timeouts are outside of this model.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from consensus._planning import Add, Await, Drop, Put
from consensus._protocol import AllReduceMax
from consensus._text import join_ranks


class Deadlock(AssertionError):
    """Ranks wait for each other, or for a rank that has finished.

    Attributes:
        waiting: Rank -> what it wants.
    """

    def __init__(self, waiting: Mapping[int, Any]) -> None:
        """Compose the message."""
        self.waiting = dict(waiting)
        lines = [f"  rank {rank} waits in {_describe(want)}" for rank, want in waiting.items()]
        super().__init__("deadlock:\n" + "\n".join(lines))


@dataclass(slots=True)
class Simulation:
    """What came of a run.

    Attributes:
        results: Rank -> what its generator returned.
        errors: Rank -> what its generator raised.
        collectives: Every collective that took place: (group, words), in order.
        requests: Store requests of each rank.
        store: What was left in the store.
    """

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    collectives: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    requests: dict[int, int] = field(default_factory=dict)
    store: dict[str, Any] = field(default_factory=dict)


def simulate(
    programs: Mapping[int, Generator[Any, Any, Any]], *, store: dict[str, Any] | None = None
) -> Simulation:
    """Run one generator a rank to the end.

    Args:
        programs: Rank -> a protocol, such as ``decide(vote, ballot)`` or ``plan(scopes, ...)``,
            or any generator that delegates to them.
        store: The key-value store they share; kept between runs if passed in.

    Raises:
        Deadlock: Nobody can go on; names the members.
        AssertionError: Members of a group asked for different collectives at once.
    """
    run = Simulation(store={} if store is None else store, requests=dict.fromkeys(programs, 0))
    live = dict(programs)
    wanted: dict[int, Any] = {}
    for rank in sorted(live):
        _advance(run, live, wanted, rank, None)
    while wanted:
        if not (_answer_store(run, live, wanted) or _run_collective(run, live, wanted)):
            raise Deadlock(wanted)
    return run


def _advance(
    run: Simulation,
    live: dict[int, Generator[Any, Any, Any]],
    wanted: dict[int, Any],
    rank: int,
    answer: Any,
) -> None:
    wanted.pop(rank, None)
    try:
        wanted[rank] = live[rank].send(answer)
    except StopIteration as stop:
        run.results[rank] = stop.value
    except Exception as error:  # a rank's own failure is an outcome
        run.errors[rank] = error


def _answer_store(
    run: Simulation, live: dict[int, Generator[Any, Any, Any]], wanted: dict[int, Any]
) -> bool:
    """Answer every store request that can be; return whether there was one."""
    answered = False
    for rank, want in sorted(wanted.items()):
        if isinstance(want, AllReduceMax) or (
            isinstance(want, Await) and want.key not in run.store
        ):
            continue
        run.requests[rank] += 1
        answer: Any = None
        if isinstance(want, Add):
            answer = run.store[want.key] = run.store.get(want.key, 0) + want.amount
        elif isinstance(want, Put):
            run.store.setdefault(want.key, want.value)
        elif isinstance(want, Await):
            answer = run.store[want.key]
        elif isinstance(want, Drop):
            for key in want.keys:
                run.store.pop(key, None)
        else:
            raise AssertionError(f"rank {rank} yielded {want!r}, which nobody can answer")
        _advance(run, live, wanted, rank, answer)
        answered = True
    return answered


def _run_collective(
    run: Simulation, live: dict[int, Generator[Any, Any, Any]], wanted: dict[int, Any]
) -> bool:
    """Run one collective whose members have all arrived; return whether there was one."""
    for want in list(wanted.values()):
        members = want.group if isinstance(want, AllReduceMax) else ()
        asked = [
            other
            for other in map(wanted.get, members)
            if isinstance(other, AllReduceMax) and other.group == members
        ]
        if not members or len(asked) < len(members):
            continue
        lengths = {len(other.words) for other in asked}
        if len(lengths) > 1:
            raise AssertionError(
                f"{join_ranks(members)} meet with different lengths {sorted(lengths)}: a real "
                "backend would return wrong numbers without an error"
            )
        run.collectives.append((members, lengths.pop()))
        reduced = tuple(max(column) for column in zip(*(o.words for o in asked), strict=True))
        for rank in members:
            _advance(run, live, wanted, rank, reduced)
        return True
    return False


def _describe(want: Any) -> str:
    if isinstance(want, AllReduceMax):
        return f"a collective of {join_ranks(want.group)} ({len(want.words)} words)"
    return repr(want)

"""All ranks of a protocol in one process: finds a deadlock at once and says who waits for whom.

Each rank is a generator that yields what it wants. A collective starts when all of its members
have asked for it, a store request as soon as it can be answered, and an exchange of messages ends
when the peers have sent theirs; sending waits for nobody. Ranks are sequential and meet
only in blocking requests, so the outcome does not depend on the schedule: one run a case is
enough. Asynchronous handles and timeouts are outside of this model.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from consensus._hops import WAYS, Exchange, Reducing, cheapest, reduction
from consensus._planning import Add, Await, AwaitAll, Drop, Put
from consensus._protocol import AllReduceMax
from consensus._text import join_ranks

T = TypeVar("T")


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
        messages: Every message of an exchange: (sender, receiver, words), in order.
        depth: Rank -> how many messages followed each other until it had its last answer.
        requests: Store requests of each rank.
        store: What was left in the store.
    """

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    collectives: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    messages: list[tuple[int, int, int]] = field(default_factory=list)
    depth: dict[int, int] = field(default_factory=dict)
    requests: dict[int, int] = field(default_factory=dict)
    store: dict[str, Any] = field(default_factory=dict)


class _Sent(NamedTuple):
    words: Sequence[int]
    depth: int


def simulate(
    programs: Mapping[int, Generator[Any, Any, Any]],
    *,
    store: dict[str, Any] | None = None,
    on_standstill: Callable[[Mapping[int, Any]], Mapping[int, Exception]] = lambda wanted: {},
) -> Simulation:
    """Run one generator a rank to the end.

    Args:
        programs: Rank -> a protocol, such as ``decide(vote, ballot)`` or ``plan(scopes, ...)``,
            or any generator that delegates to them.
        store: The key-value store they share; kept between runs if passed in.
        on_standstill: Asked when nobody can go on, with what each rank wants: rank -> an exception
            to raise in its wait. What a deadline would do on real ranks.

    Raises:
        Deadlock: Nobody can go on; names the members.
        AssertionError: Members of a group asked for different collectives at once.
    """
    ranks = _Ranks(programs, {} if store is None else store)
    while ranks.wanted:
        if not (ranks.answer_store() or ranks.deliver() or ranks.run_collective()):
            given_up = on_standstill(dict(ranks.wanted))
            if not given_up:
                raise Deadlock(ranks.wanted)
            for rank, error in given_up.items():
                ranks.raise_in(rank, error)
    return ranks.run


def by_hops(
    protocol: Generator[Any, Any, T], rank: int, way: str | None = None
) -> Generator[Any, Any, T]:
    """Return ``protocol`` with messages between ranks instead of its collectives.

    Args:
        protocol: As for :func:`simulate`.
        rank: The rank that it is for.
        way: A key of ``consensus._hops.WAYS``; None is what a link would choose.
    """
    answer: Any = None
    while True:
        try:
            wanted = protocol.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if not isinstance(wanted, AllReduceMax):
            answer = yield wanted
            continue
        group, size = wanted.group, len(wanted.words)
        schedule = WAYS[way or cheapest(len(group), size, sums=False)].schedule
        hops = list(schedule(group.index(rank), len(group), size))
        answer = yield from _between(group, reduction(hops, wanted.words, max))


def _between(group: Sequence[int], reducing: Reducing) -> Generator[Exchange, Any, list[int]]:
    """Return the reduction with global ranks for the indices of the members."""
    answer: Any = None
    while True:
        try:
            sends, receives = reducing.send(answer)
        except StopIteration as stop:
            result: list[int] = stop.value
            return result
        answer = yield Exchange(
            tuple((group[peer], words) for peer, words in sends),
            tuple((group[peer], count) for peer, count in receives),
        )


class _Ranks:
    """The ranks of a run: what each wants, and what is under way between them."""

    def __init__(self, programs: Mapping[int, Generator[Any, Any, Any]], store: dict[str, Any]):
        self.run = Simulation(store=store)
        self.run.requests, self.run.depth = dict.fromkeys(programs, 0), dict.fromkeys(programs, 0)
        self.wanted: dict[int, Any] = {}
        self._live = dict(programs)
        self._under_way: defaultdict[tuple[int, int], deque[_Sent]] = defaultdict(deque)
        for rank in sorted(programs):
            self._advance(rank, None)

    def raise_in(self, rank: int, error: Exception) -> None:
        """Let the wait of a rank end with an error."""
        self._go_on(rank, lambda: self._live[rank].throw(error))

    def _advance(self, rank: int, answer: Any) -> None:
        self._go_on(rank, lambda: self._live[rank].send(answer))

    def _go_on(self, rank: int, resume: Callable[[], Any]) -> None:
        self.wanted.pop(rank, None)
        try:
            want = self.wanted[rank] = resume()
        except StopIteration as stop:
            self.run.results[rank] = stop.value
        except Exception as error:  # a rank's own failure is an outcome
            self.run.errors[rank] = error
        else:
            for peer, words in want.sends if isinstance(want, Exchange) else ():
                self.run.messages.append((rank, peer, len(words)))
                self._under_way[rank, peer].append(_Sent(words, self.run.depth[rank] + 1))

    def answer_store(self) -> bool:
        """Answer every store request that can be; return whether there was one."""
        answered, store = False, self.run.store
        for rank, want in sorted(self.wanted.items()):
            if isinstance(want, AllReduceMax | Exchange) or (
                isinstance(want, Await | AwaitAll)
                and not all(key in store for key in _awaited(want))
            ):
                continue
            self.run.requests[rank] += 1
            answer: Any = None
            if isinstance(want, Add):
                answer = store[want.key] = store.get(want.key, 0) + want.amount
            elif isinstance(want, Put):
                answer = store.setdefault(want.key, want.value)
            elif isinstance(want, Await):
                answer = store[want.key]
            elif isinstance(want, AwaitAll):
                answer = [store[key] for key in want.keys]
            elif isinstance(want, Drop):
                for key in want.keys:
                    store.pop(key, None)
            else:
                raise AssertionError(f"rank {rank} yielded {want!r}, which nobody can answer")
            self._advance(rank, answer)
            answered = True
        return answered

    def deliver(self) -> bool:
        """End every exchange whose messages are under way; return whether there was one."""
        delivered = False
        for rank, want in sorted(self.wanted.items()):
            if not isinstance(want, Exchange):
                continue
            pairs = [(peer, rank) for peer, _ in want.receives]
            if not all(self._under_way.get(pair) for pair in pairs):
                continue
            came = [self._under_way[pair].popleft() for pair in pairs]
            for sent, (peer, count) in zip(came, want.receives, strict=True):
                if len(sent.words) != count:
                    raise AssertionError(
                        f"rank {rank} wants {count} words of rank {peer}, which sent "
                        f"{len(sent.words)}"
                    )
            self.run.depth[rank] = max((self.run.depth[rank], *(sent.depth for sent in came)))
            self._advance(rank, [sent.words for sent in came])
            delivered = True
        return delivered

    def run_collective(self) -> bool:
        """Run one collective whose members have all arrived; return whether there was one."""
        for want in list(self.wanted.values()):
            members = want.group if isinstance(want, AllReduceMax) else ()
            asked = [
                other
                for other in map(self.wanted.get, members)
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
            self.run.collectives.append((members, lengths.pop()))
            reduced = tuple(max(column) for column in zip(*(o.words for o in asked), strict=True))
            for rank in members:
                self._advance(rank, reduced)
            return True
        return False


def _awaited(want: Await | AwaitAll) -> tuple[str, ...]:
    return want.keys if isinstance(want, AwaitAll) else (want.key,)


def _describe(want: Any) -> str:
    if isinstance(want, AllReduceMax):
        return f"a collective of {join_ranks(want.group)} ({len(want.words)} words)"
    if isinstance(want, Exchange):
        return f"an exchange, for messages of {join_ranks([peer for peer, _ in want.receives])}"
    return repr(want)

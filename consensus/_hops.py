"""Who sends which words to whom, to reduce them over ranks: plain data. Pure; no torch.

A schedule says what one rank sends and receives, round by round. The generator `reduction` turns
it into exchanges of words, which a link carries over connections, a simulator between ranks in
one process, and a unit test by hand. Ranks are numbered 0 to N - 1 here; any N will do.

[Note: four schedules]
- direct: each to all, and each reduces by itself. One round of N - 1 messages a rank.
- dissemination: in round k rank r sends what it has to r + 2**k and hears from r - 2**k. After
  ceil(log2 N) rounds it has heard of all; of some twice, where N is no power of two. So it can
  find a maximum, but no sum.
- tree: up a binomial tree to rank 0, and down again: 2 floor(log2 N) messages follow each other.
  There are 2 (N - 1) in all, and nothing is counted twice.
- ring: each of N pieces goes round twice, once to be reduced and once to be told. It moves the
  fewest words a rank, over 2 (N - 1) rounds.

All but the first pass along connections between ranks that are a power of two apart, which are
2 log2 N for each rank.

[Note: which schedule, and why]
Rounds follow each other. Each costs a latency and, for every message that a rank sends in it, the
work of both ends and the time of its words. By this model, with the numbers of TCP in a cluster,
a vote is direct on up to 8 ranks (where connections to all end) and dissemination beyond; a sum
goes up and down the tree; what is very long for the number of ranks goes round the ring. The
numbers are fixed, not measured when a group is made: a few samples on a host that starts a job
say little, and all ranks must choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, TypeAlias

DIRECT_RANKS = 8  # more would each hold connections to, and send to, too many others


class Part(NamedTuple):
    """Words ``start`` to ``stop`` of a message, sent to ``peer`` or received from it."""

    peer: int
    start: int
    stop: int


class Hop(NamedTuple):
    """What one rank does in one round: it sends what it has, then takes in what it receives."""

    sends: tuple[Part, ...] = ()
    receives: tuple[Part, ...] = ()
    reduces: bool = True  # else what comes replaces what the rank has: it is the result


class Cost(NamedTuple):
    """What a schedule takes; all but the last two are facts about all ranks together."""

    rounds: int  # how many messages follow each other, at most
    messages: int
    words: int
    fan: int  # messages that a rank sends in one round, at most
    longest: int  # words of the longest message


Schedule: TypeAlias = Callable[[int, int, int], Iterator[Hop]]  # (rank, num_ranks, num_words)


def direct(rank: int, num_ranks: int, num_words: int) -> Iterator[Hop]:
    """Send to all, hear from all."""
    to_all = tuple(Part((rank + i) % num_ranks, 0, num_words) for i in range(1, num_ranks))
    yield Hop(to_all, to_all)


def dissemination(rank: int, num_ranks: int, num_words: int) -> Iterator[Hop]:
    """Send to who is 1, 2, 4... ahead; right for a reduction that may count a rank twice."""
    for distance in powers_of_two(num_ranks):
        ahead, behind = (rank + distance) % num_ranks, (rank - distance) % num_ranks
        yield Hop((Part(ahead, 0, num_words),), (Part(behind, 0, num_words),))


def tree(rank: int, num_ranks: int, num_words: int) -> Iterator[Hop]:
    """Reduce up a binomial tree to rank 0, and send the result down."""

    def hop(distance: int, *, up: bool) -> Hop:
        peer = rank ^ distance
        if rank % distance or peer >= num_ranks:
            return Hop()
        part = (Part(peer, 0, num_words),)
        sends = (peer < rank) == up
        return Hop(part, (), up) if sends else Hop((), part, up)

    distances = powers_of_two(num_ranks)
    yield from (hop(distance, up=True) for distance in distances)
    yield from (hop(distance, up=False) for distance in reversed(distances))


def ring(rank: int, num_ranks: int, num_words: int) -> Iterator[Hop]:
    """Pass pieces to the next rank: reduce each on its way round, then tell it to all."""

    def part(peer: int, piece: int) -> tuple[Part, ...]:
        piece %= num_ranks
        start, stop = (num_words * i // num_ranks for i in (piece, piece + 1))
        return (Part(peer % num_ranks, start, stop),) if start < stop else ()

    for i in range(num_ranks - 1):
        yield Hop(part(rank + 1, rank - i), part(rank - 1, rank - i - 1))
    for i in range(num_ranks - 1):
        yield Hop(part(rank + 1, rank - i + 1), part(rank - 1, rank - i), reduces=False)


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4... below ``limit``: ceil(log2(limit)) of them."""
    return [1 << k for k in range((limit - 1).bit_length())]


def peers(rank: int, num_ranks: int) -> list[int]:
    """Return whom ``rank`` must be connected with, for every schedule that may be chosen."""
    if num_ranks <= DIRECT_RANKS:
        return [peer for peer in range(num_ranks) if peer != rank]
    apart = powers_of_two(num_ranks)
    return sorted({(rank + step) % num_ranks for d in apart for step in (d, -d)})


class Way(NamedTuple):
    """A schedule, what it costs, and what it can do."""

    schedule: Schedule
    cost: Callable[[int, int], Cost]  # of (num_ranks, num_words)
    sums: bool = True  # whether each rank counts once
    most_ranks: float = float("inf")


def _cost_of_direct(n: int, words: int) -> Cost:
    return Cost(1, n * (n - 1), n * (n - 1) * words, n - 1, words)


def _cost_of_dissemination(n: int, words: int) -> Cost:
    rounds = len(powers_of_two(n))
    return Cost(rounds, n * rounds, n * rounds * words, 1, words)


def _cost_of_tree(n: int, words: int) -> Cost:
    # A way up is as long as its rank has bits that are 1: some rank below n has all but one.
    return Cost(2 * (n.bit_length() - 1), 2 * (n - 1), 2 * (n - 1) * words, 1, words)


def _cost_of_ring(n: int, words: int) -> Cost:
    return Cost(2 * (n - 1), 2 * (n - 1) * min(n, words), 2 * (n - 1) * words, 1, -(-words // n))


WAYS = {
    "direct": Way(direct, _cost_of_direct, most_ranks=DIRECT_RANKS),
    "dissemination": Way(dissemination, _cost_of_dissemination, sums=False),
    "tree": Way(tree, _cost_of_tree),
    "ring": Way(ring, _cost_of_ring),
}


class Model(NamedTuple):
    """How long things take, in seconds; see [Note: which schedule, and why]."""

    latency: float  # from one host to another
    overhead: float  # of one end, for each message
    per_word: float

    def seconds(self, cost: Cost) -> float:
        """Return how long a reduction takes when all ranks come at once."""
        a_message = 2 * self.overhead + cost.longest * self.per_word
        return cost.rounds * (self.latency + cost.fan * a_message)


CLUSTER = Model(latency=20e-6, overhead=4e-6, per_word=8e-9)  # TCP, 1 GB/s a connection


def cheapest(num_ranks: int, num_words: int, *, sums: bool, model: Model = CLUSTER) -> str:
    """Return the name of the way that takes least time by ``model``; equal on all ranks."""
    able = {
        name: model.seconds(way.cost(num_ranks, num_words))
        for name, way in WAYS.items()
        if num_ranks <= way.most_ranks and (way.sums or not sums)
    }
    return min(able, key=able.__getitem__)


def kinds_of_link(backend: str) -> tuple[str, ...]:
    """Return which private groups are tried in turn before votes go over the store."""
    return ("gloo",) if backend == "gloo" else ("tcp", "gloo")


class Exchange(NamedTuple):
    """Wanted: the words of some peers, while others get ours; answered in the order of receives."""

    sends: tuple[tuple[int, Sequence[int]], ...]  # (peer, words)
    receives: tuple[tuple[int, int], ...]  # (peer, how many words)


Reducing: TypeAlias = Generator[Exchange, Sequence[Sequence[int]], list[int]]


def reduction(hops: Sequence[Hop], words: Sequence[int], of: Callable[[int, int], int]) -> Reducing:
    """Reduce ``words`` over the ranks whose schedules these ``hops`` belong to."""
    have = list(words)
    for hop in hops:
        heard = yield Exchange(
            tuple((peer, have[start:stop]) for peer, start, stop in hop.sends),
            tuple((peer, stop - start) for peer, start, stop in hop.receives),
        )
        for (_, start, stop), said in zip(hop.receives, heard, strict=True):
            have[start:stop] = map(of, have[start:stop], said) if hop.reduces else said
    return have

"""Every schedule, for any number of ranks: the right words on every rank, and its cost exactly."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest

from consensus import _hops
from consensus._hops import CLUSTER, DIRECT_RANKS, WAYS, Cost, Hop, Model, cheapest
from consensus.testing import simulate

SIZES = range(2, 65)


def hops_of(way: str, num_ranks: int, num_words: int) -> list[list[Hop]]:
    return [list(WAYS[way].schedule(rank, num_ranks, num_words)) for rank in range(num_ranks)]


def words_of(rank: int, num_words: int) -> list[int]:
    """Words whose maximum, and whose sum, shows a rank that was left out or counted twice."""
    return [(-1) ** i * 3**i * (rank + 1) % (2**40 + i) - 2**20 for i in range(num_words)]


def cost_of(way: str, num_ranks: int, num_words: int, of: Callable[[int, int], int] = max) -> Cost:
    """Reduce on simulated ranks; return what it took, after it ended right on every rank."""
    hops = hops_of(way, num_ranks, num_words)
    brought = [words_of(rank, num_words) for rank in range(num_ranks)]
    run = simulate(
        {r: _hops.reduction(own, brought[r], of) for r, own in enumerate(hops)}  # ranks as indices
    )
    expected = [max(column) if of is max else sum(column) for column in zip(*brought, strict=True)]
    assert run.errors == {}
    assert run.results == dict.fromkeys(range(num_ranks), expected)
    return Cost(
        rounds=max(run.depth.values()),
        messages=len(run.messages),
        words=sum(words for _, _, words in run.messages),
        fan=max(len(hop.sends) for own in hops for hop in own),
        longest=max(words for _, _, words in run.messages),
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_maximum_is_right_on_every_rank_and_costs_what_is_stated(way: str) -> None:
    for num_ranks in SIZES:
        assert cost_of(way, num_ranks, 2) == WAYS[way].cost(num_ranks, 2), num_ranks


@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if way.sums])
def test_a_sum_counts_every_rank_once(way: str) -> None:
    for num_ranks in SIZES:
        assert cost_of(way, num_ranks, 1, operator.add) == WAYS[way].cost(num_ranks, 1), num_ranks


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", [2, 3, 8, 13])
def test_long_messages(way: str, num_ranks: int) -> None:
    for num_words in (num_ranks - 1, num_ranks, num_ranks + 1, 5 * num_ranks + 3):
        assert cost_of(way, num_ranks, num_words) == WAYS[way].cost(num_ranks, num_words)


def test_dissemination_counts_some_ranks_twice() -> None:
    """Else it could sum."""
    with pytest.raises(AssertionError):
        cost_of("dissemination", 6, 2, operator.add)


@pytest.mark.parametrize(
    ("num_ranks", "way", "cost"),
    [
        (2, "direct", Cost(1, 2, 4, 1, 2)),
        (8, "direct", Cost(1, 56, 112, 7, 2)),
        (8, "dissemination", Cost(3, 24, 48, 1, 2)),
        (9, "dissemination", Cost(4, 36, 72, 1, 2)),
        (64, "dissemination", Cost(6, 384, 768, 1, 2)),
        (64, "tree", Cost(12, 126, 252, 1, 2)),
        (64, "ring", Cost(126, 252, 252, 1, 1)),
        (65536, "dissemination", Cost(16, 1048576, 2097152, 1, 2)),
        (65536, "tree", Cost(32, 131070, 262140, 1, 2)),
    ],
)
def test_costs_of_a_healthy_vote(num_ranks: int, way: str, cost: Cost) -> None:
    assert WAYS[way].cost(num_ranks, 2) == cost


def test_everyone_is_connected_with_whom_a_chosen_schedule_has_it_speak_to() -> None:
    for num_ranks in (*range(2, 20), 31, 32, 33, 64):
        peers = [set(_hops.peers(rank, num_ranks)) for rank in range(num_ranks)]
        for rank, own in enumerate(peers):
            assert rank not in own
            assert all(rank in peers[peer] for peer in own)
            assert len(own) <= max(DIRECT_RANKS - 1, 2 * (num_ranks - 1).bit_length())
        for way in WAYS:
            if num_ranks > WAYS[way].most_ranks:
                continue
            for rank, hops in enumerate(hops_of(way, num_ranks, 70)):
                spoken = {part.peer for hop in hops for part in (*hop.sends, *hop.receives)}
                assert spoken <= peers[rank]


@pytest.mark.parametrize(
    ("num_ranks", "num_words", "maximum", "total"),
    [
        (2, 2, "direct", "direct"),
        (8, 2, "direct", "direct"),
        (9, 2, "dissemination", "tree"),
        (9, 23 * 9, "dissemination", "tree"),  # the headers of a vote
        (16, 4096, "dissemination", "tree"),
        (16, 2**20, "ring", "ring"),
        (1024, 23 * 1024, "dissemination", "tree"),
        (65536, 2, "dissemination", "tree"),
        (65536, 23 * 65536, "dissemination", "tree"),
    ],
)
def test_the_way_follows_from_ranks_and_words(
    num_ranks: int, num_words: int, maximum: str, total: str
) -> None:
    assert cheapest(num_ranks, num_words, sums=False) == maximum
    assert cheapest(num_ranks, num_words, sums=True) == total


def test_the_model_adds_up_rounds_messages_and_words() -> None:
    model = Model(latency=100.0, overhead=10.0, per_word=1.0)
    assert model.seconds(Cost(rounds=3, messages=99, words=99, fan=2, longest=5)) == 3 * 150.0


def test_the_chosen_way_takes_least_time_of_those_that_are_able() -> None:
    for num_ranks in (4, 20, 500):
        for num_words in (2, 10**4, 10**7):
            for sums in (False, True):
                chosen = WAYS[cheapest(num_ranks, num_words, sums=sums)]
                assert chosen.sums or not sums
                assert num_ranks <= chosen.most_ranks
                times = [
                    CLUSTER.seconds(way.cost(num_ranks, num_words))
                    for way in WAYS.values()
                    if (way.sums or not sums) and num_ranks <= way.most_ranks
                ]
                assert CLUSTER.seconds(chosen.cost(num_ranks, num_words)) == min(times)

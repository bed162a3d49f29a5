import math
import pickle
from dataclasses import replace
from itertools import product

import pytest

from consensus._protocol import INLINE_RANGES
from consensus._wire import ALL
from consensus.errors import Failure
from consensus.vote import Ballot, Decision, Difference, Fact, Number, RangeOf, Vote, opening
from tests.simulated import decide_all, fact, failed, hold_vote

NAN, INF = math.nan, math.inf

# Ascending; each differs from its neighbours by as little as there is, or in kind.
LADDER: tuple[Number, ...] = (
    -INF,
    -(2**63),
    -(2**63) + 1,
    -1,
    -5e-324,
    0,
    5e-324,
    0.1,
    1,
    1.0000000000000002,
    2.0**53,
    2**53 + 1,
    2**63 - 1,
    2.0**63,
    INF,
)


def ends(*values: Number) -> tuple[Number, Number]:
    """Return minimum and maximum of one control, one value a rank."""
    decision = decide_all({r: Vote("step", ranges=(("x", v),)) for r, v in enumerate(values)})
    assert decision.agreed
    return decision.ranges[0].minimum, decision.ranges[0].maximum


# ---- ranges ----


def test_minimum_and_maximum_of_two_ranks_are_exact() -> None:
    for (i, low), (j, high) in product(enumerate(LADDER), repeat=2):
        expected = (LADDER[min(i, j)], LADDER[max(i, j)])
        assert ends(low, high) == expected


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_nan_on_any_rank_is_the_maximum(size: int) -> None:
    for at in range(size):
        values: list[Number] = [float(rank) for rank in range(size)]
        values[at] = NAN
        low, high = ends(*values)
        assert math.isnan(high)
        assert low == (1.0 if at == 0 else 0.0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_infinity_on_any_rank_is_an_end(size: int) -> None:
    for at, infinity in product(range(size), (INF, -INF)):
        values: list[Number] = [float(rank) for rank in range(size)]
        values[at] = infinity
        assert ends(*values)[infinity > 0] == infinity


def test_a_nan_everywhere_is_unanimous() -> None:
    decision = decide_all({rank: Vote("step", ranges=(("x", -NAN),)) for rank in range(3)})
    assert decision.messages == 1
    assert decision.unanimous("x")


@pytest.mark.parametrize(
    "values",
    [(0.0, -0.0), (1, 1.0, True), (0, False, -0.0), (2**53, 2.0**53), (-(2**63), -(2.0**63))],
)
def test_equal_values_are_unanimous_whatever_their_type(values: tuple[Number, ...]) -> None:
    decision = decide_all({r: Vote("step", ranges=(("x", v),)) for r, v in enumerate(values)})
    assert decision.messages == 1
    assert decision.unanimous("x")


def test_ranges_that_differ_take_a_second_message_and_are_no_failure() -> None:
    decision = decide_all({r: Vote("step", ranges=(("x", r), ("y", 5))) for r in range(3)})
    assert decision == Decision(2, ranges=(RangeOf("x", 0, 2), RangeOf("y", 5, 5)))
    assert not decision.unanimous("x")
    assert decision.unanimous("y")


@pytest.mark.parametrize("count", [INLINE_RANGES, INLINE_RANGES + 1, 40])
def test_any_number_of_ranges_is_exact(count: int) -> None:
    """Eight fit the second message; the third carries more, and takes as many words a rank."""
    values = [[(-1) ** i * (rank * 2**40 + i) for i in range(count)] for rank in range(3)]
    votes = {
        rank: Vote("step", ranges=tuple((f"v{i}", value) for i, value in enumerate(held)))
        for rank, held in enumerate(values)
    }
    decision = decide_all(votes)
    assert decision.messages == (2 if count <= INLINE_RANGES else 3)
    assert [(r.minimum, r.maximum) for r in decision.ranges] == [
        (min(column), max(column)) for column in zip(*values, strict=True)
    ]


def test_many_ranges_on_more_ranks_than_voices_are_still_exact() -> None:
    ranges = {rank: tuple((f"v{i}", rank + i) for i in range(9)) for rank in range(70)}
    decision = decide_all({rank: Vote("step", ranges=held) for rank, held in ranges.items()})
    assert decision.agreed
    assert decision.ranges == tuple(RangeOf(f"v{i}", i, 69 + i) for i in range(9))


@pytest.mark.parametrize("count", [1, INLINE_RANGES + 1])
def test_ranges_are_exact_when_facts_differ_by_right(count: int) -> None:
    """Ranks 0 and 1 speak with one voice: the values of both must count."""
    votes = {
        rank: Vote(
            "step",
            facts=(fact("held", f"{rank // 2}", (0, 1) if rank < 2 else (2, 3)),),
            ranges=tuple((f"v{i}", float((3, 9, 4, 5)[rank])) for i in range(count)),
        )
        for rank in range(4)
    }
    decision = decide_all(votes)
    assert decision.agreed
    assert decision.ranges == tuple(RangeOf(f"v{i}", 3.0, 9.0) for i in range(count))


def test_ranges_under_other_names_are_a_difference() -> None:
    votes = {0: Vote("step", ranges=(("x", 1),)), 1: Vote("step", ranges=(("y", 1),))}
    decision = decide_all(votes)
    assert decision.ranges == ()
    assert decision.differences == (
        Difference("names of ranges", (("['x']", (0,)), ("['y']", (1,)))),
    )


@pytest.mark.parametrize("count", [1, 9])
def test_unequally_many_ranges_are_a_difference(count: int) -> None:
    some = tuple((f"v{i}", i) for i in range(count))
    votes = {0: Vote("step", ranges=some), 1: Vote("step", ranges=(*some, ("more", 1)))}
    assert [found.name for found in decide_all(votes).differences] == ["names of ranges"]


def test_a_failing_rank_leaves_no_ranges() -> None:
    votes = {0: failed(0), 1: Vote("step", ranges=(("x", 1),))}
    assert decide_all(votes).ranges == ()


def test_many_ranges_of_one_rank_do_not_disturb_a_failure_elsewhere() -> None:
    many = Vote("step", ranges=tuple((f"v{i}", i) for i in range(20)))
    votes = {0: failed(0), **dict.fromkeys(range(1, 40), many)}
    assert decide_all(votes).failed_ranks == (0,)
    assert hold_vote(votes).collectives[2][1] < 100  # the numbers alone would be 1600 words


def test_words_of_ranges_do_not_grow_with_their_names() -> None:
    votes = {rank: Vote("step", ranges=(("x" * 10000, rank),)) for rank in range(2)}
    assert hold_vote(votes).collectives == [((0, 1), 2), ((0, 1), 2 * 23)]


# ---- records ----


def test_ranges_are_equal_by_value_also_in_another_process() -> None:
    found = RangeOf("x", 1, NAN)
    assert pickle.loads(pickle.dumps(found)) == found
    assert hash(found) == hash(RangeOf("x", 1.0, -NAN))
    assert found == RangeOf("x", True, NAN)
    assert found != RangeOf("x", 1, INF)
    assert found != RangeOf("y", 1, NAN)
    assert found != "x"


@pytest.mark.parametrize(
    ("low", "high", "unanimous"),
    [(1, 1.0, True), (NAN, NAN, True), (-0.0, 0, True), (2**53, 2**53 + 1, False), (1, NAN, False)],
)
def test_a_range_is_unanimous_by_value(low: Number, high: Number, unanimous: bool) -> None:
    assert RangeOf("x", low, high).unanimous is unanimous


def test_only_a_decision_without_objections_is_agreed() -> None:
    failure = Failure(3, "E", "", "")
    assert Decision(1).agreed
    assert Decision(2, ranges=(RangeOf("x", 1, 2),)).agreed
    assert not Decision(3, failures=(failure,)).agreed
    assert not Decision(3, phases=((0, "a"),)).agreed
    assert not Decision(3, differences=(Difference("x", ()),)).agreed
    assert Decision(3, failures=(failure,)).failed_ranks == (3,)
    assert Decision(3, failures=(failure,)).failed
    assert not Decision(1).failed


def test_an_unknown_control_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="speed"):
        Decision(1).unanimous("speed")


# ---- the opening ----

BALLOT = Ballot((0, 1, 2), 0, plan=5, sequence=1)


def test_everything_that_must_be_equal_is_in_the_opening() -> None:
    vote = Vote("step", facts=(fact("x", "1"),), ranges=(("r", 1),))
    others = [
        opening(replace(vote, phase="load"), BALLOT),
        opening(replace(vote, facts=(fact("y", "1"),)), BALLOT),
        opening(replace(vote, facts=(fact("x", "2"),)), BALLOT),
        opening(replace(vote, facts=()), BALLOT),
        opening(replace(vote, ranges=(("s", 1),)), BALLOT),
        opening(replace(vote, ranges=(("r", 2),)), BALLOT),
        opening(vote, replace(BALLOT, plan=6)),
        opening(vote, replace(BALLOT, sequence=2)),
    ]
    digests = [words[0] for words in (opening(vote, BALLOT), *others)]
    assert len(set(digests)) == len(digests)
    assert all(digest is not None and 0 < digest < ALL for digest in digests)


def test_an_opening_does_not_depend_on_the_rank() -> None:
    vote = Vote("step", facts=(fact("x", "1"),))
    assert opening(vote, BALLOT) == opening(vote, replace(BALLOT, rank=2))


def test_facts_of_a_scope_touch_the_pair_of_that_scope_only() -> None:
    slots = (((0, 1), 1), ((0, 2), 2), ((0, 1, 2), 0))
    ballot = replace(BALLOT, sets=((0, 1), (0, 2)), slots=slots)
    plain = opening(Vote("step"), ballot)
    held = opening(Vote("step", facts=(fact("x", "1", (0, 2)),)), ballot)
    assert [a == b for a, b in zip(plain, held, strict=True)] == [True, True, False]


def test_a_rank_has_no_digest_for_the_pairs_of_others() -> None:
    ballot = replace(BALLOT, rank=1, sets=((0, 1), (0, 2)))
    assert [digest is None for digest in opening(Vote("step"), ballot)] == [False, False, True]
    assert [ballot.takes_part(slot) for slot in range(3)] == [True, True, False]


def test_an_unknown_scope_is_compared_by_everyone() -> None:
    ballot = replace(BALLOT, sets=((0, 1),), slots=(((0, 1), 1),))
    assert ballot.slot(()) == 0
    assert ballot.slot((0, 1, 2)) == 0
    assert ballot.slot((0, 1)) == 1


def test_details_of_a_fact_are_not_part_of_the_opening() -> None:
    shown = Vote("step", facts=(Fact("x", b"1", lambda: {"": "one"}, advice="a"),))
    assert opening(shown, BALLOT) == opening(Vote("step", facts=(Fact("x", b"1", dict),)), BALLOT)

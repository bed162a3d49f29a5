from collections.abc import Mapping
from dataclasses import replace

import pytest

from consensus._protocol import (
    BODY_LIMIT,
    MAX_VOICES,
    AllReduceMax,
    decide,
    header_words,
)
from consensus.enclosure import Plan, Scope, plan_of
from consensus.errors import Failure
from consensus.testing import simulate
from consensus.vote import Difference, Fact, Ranks, Vote
from tests.simulated import decide_all, fact, failed, failure, hold_vote, ranks_of


def third_message(votes: Mapping[int, Vote]) -> int:
    """Return the words of the third message."""
    return hold_vote(votes).collectives[2][1]


def never_asked() -> Mapping[str, str]:
    raise AssertionError("details were read")


# ---- healthy ----


def test_a_healthy_vote_is_one_message_of_two_words() -> None:
    run = hold_vote({rank: Vote("step", facts=(fact("x", "1"),)) for rank in range(3)})
    assert run.collectives == [((0, 1, 2), 2)]
    assert all(decision.agreed for decision in run.results.values())


def test_details_and_positions_are_not_read_on_the_healthy_path() -> None:
    def positions() -> tuple[tuple[Ranks, int], ...]:
        raise AssertionError("positions were read")

    vote = Vote("step", facts=(Fact("x", b"1", never_asked),), positions=positions)
    assert decide_all({0: vote, 1: vote}).messages == 1


def test_a_lone_rank_agrees_with_itself() -> None:
    assert decide_all({5: Vote("step")}).agreed


def test_ranks_need_not_be_adjacent_nor_start_at_zero() -> None:
    assert decide_all({3: Vote("step"), 7: failed(7), 12: Vote("step")}).failed_ranks == (7,)


def test_the_opening_has_as_many_words_in_every_phase() -> None:
    plan = Plan((0, 1, 2), ((0, 1),), (((0, 1), 1), ((0, 1, 2), 0)))
    votes = [
        Vote("a"),
        failed(0),
        Vote("b", facts=(fact("x", "1", (0, 1)), fact("y", "2"))),
        Vote("c", ranges=tuple((f"v{i}", i) for i in range(20))),
    ]
    asked = [next(decide(vote, plan.ballot(rank=0, sequence=i))) for i, vote in enumerate(votes)]
    assert {(want.group, len(want.words)) for want in asked} == {((0, 1, 2), 4)}


def test_a_rank_contributes_zeros_to_pairs_of_others() -> None:
    plan = Plan((0, 1, 2), ((0, 1),))
    asked = next(decide(Vote("step"), plan.ballot(rank=2, sequence=0)))
    assert asked.words[2:] == (0, 0)
    assert next(decide(failed(2), plan.ballot(rank=2, sequence=0))).words[2:] == (0, 0)


# ---- failures ----


def test_a_failure_names_its_ranks() -> None:
    decision = decide_all({0: failed(0, "first"), 1: Vote("step"), 2: failed(2, "last")})
    assert decision.failures == (failure(0, "first"), failure(2, "last"))
    assert decision.messages == 3
    assert not decision.fatal


def test_one_fatal_failure_makes_the_decision_fatal() -> None:
    assert decide_all({0: failed(0), 1: replace(failed(1), fatal=True)}).fatal


def test_a_failure_arrives_whole() -> None:
    sent = Failure(1, "torch.OutOfMemoryError", "π\n\x00 out", "File …", ("a.B", "c.D"), "closure")
    assert decide_all({0: Vote("step"), 1: Vote("step", (sent,))}).failures == (sent,)


def test_a_forwarded_failure_is_listed_where_it_happened() -> None:
    votes = {0: failed(0), 1: Vote("step", (failure(0),)), 2: Vote("step")}
    assert decide_all(votes).failures == (failure(0),)


def test_the_third_message_does_not_grow_with_ranks_that_say_the_same() -> None:
    sizes = {
        third_message({r: failed(r) if r < n // 2 else Vote("step") for r in range(n)})
        for n in (4, 8, 32)
    }
    assert len(sizes) == 1


def test_healthy_ranks_with_different_facts_say_only_once_where_they_are() -> None:
    sizes = {
        third_message(
            {0: failed(0)} | {r: Vote("step", facts=(fact("x", f"{r:03}"),)) for r in range(1, n)}
        )
        for n in (4, 8, 32)
    }
    assert len(sizes) == 1


def test_more_causes_than_fit_still_name_every_rank() -> None:
    decision = decide_all({r: failed(r, f"cause {r}") for r in range(MAX_VOICES + 3)})
    assert decision.failed_ranks == ranks_of(MAX_VOICES + 3)
    unreported = [f.rank for f in decision.failures if f.type_name == "unreported"]
    assert unreported == [64, 65, 66]


def test_the_worst_failures_are_heard_first_when_not_all_fit() -> None:
    votes = {r: failed(r, f"cause {r}") for r in range(MAX_VOICES + 3)}
    votes[66] = replace(votes[66], fatal=True)
    assert decide_all(votes).failures[66].message == "cause 66"


def test_a_body_over_the_limit_loses_tracebacks_before_causes() -> None:
    large = tuple(
        Failure(rank, "E", "m" * 4096, "t" * 8192, ("builtins.E",)) for rank in range(MAX_VOICES)
    )
    votes = {rank: Vote("step", large) for rank in range(2)}
    heard = decide_all(votes).failures
    assert third_message(votes) * 7 < 2 * BODY_LIMIT + 100  # rank 0 speaks for itself, rank 1 too
    assert [f.rank for f in heard] == list(range(MAX_VOICES))
    assert all(f.message.startswith("mmm") and f.traceback == "" for f in heard)


def test_causes_that_escape_badly_are_cut_to_the_limit() -> None:
    names = tuple("\x00" * 256 for _ in range(20))
    large = tuple(Failure(r, "E", "\x00" * 4096, "", names) for r in range(MAX_VOICES))
    votes = {0: Vote("step", large), 1: Vote("step")}
    assert third_message(votes) * 7 < BODY_LIMIT + 1000
    assert decide_all(votes).failed_ranks[0] == 0


# ---- phases ----


def test_ranks_in_different_phases_are_told_where_each_is() -> None:
    decision = decide_all({0: Vote("load"), 1: Vote("step"), 2: Vote("load")})
    assert decision.phases == ((0, "load"), (1, "step"), (2, "load"))
    assert not decision.failures
    assert not decision.differences


def test_the_same_phase_at_different_agreements_is_a_mismatch_too() -> None:
    plan = Plan((0, 1))
    run = simulate({r: decide(Vote("step"), plan.ballot(rank=r, sequence=r + 4)) for r in (0, 1)})
    assert run.results[0] == run.results[1]
    assert run.results[0].phases == ((0, "step (agreement 4)"), (1, "step (agreement 5)"))


def test_a_failure_outranks_a_phase_mismatch_and_lists_the_phases() -> None:
    decision = decide_all({0: failed(0, phase="load"), 1: Vote("step"), 2: failed(2, phase="x")})
    assert decision.failed_ranks == (0, 2)
    assert decision.phases == ((0, "load"), (1, "step"), (2, "x"))


def test_a_phase_mismatch_outranks_a_difference() -> None:
    votes = {0: Vote("a", facts=(fact("x", "1"),)), 1: Vote("b", facts=(fact("x", "2"),))}
    assert decide_all(votes).phases == ((0, "a"), (1, "b"))
    assert decide_all(votes).differences == ()


def test_two_long_phases_with_the_same_beginning_are_told_apart() -> None:
    phases = dict(decide_all({0: Vote("p" * 1000 + "a"), 1: Vote("p" * 1000 + "b")}).phases)
    assert phases[0] != phases[1]
    assert all(phase.startswith("ppp") and len(phase) < 300 for phase in phases.values())


def test_every_rank_is_placed_among_more_ranks_than_voices() -> None:
    votes = {r: Vote("odd" if r == 69 else "step", facts=(fact("x", f"{r}"),)) for r in range(70)}
    assert decide_all(votes).phases == (*((r, "step") for r in range(69)), (69, "odd"))


# ---- facts ----


def test_a_difference_names_item_values_and_ranks() -> None:
    def vote(lr: str) -> Vote:
        return Vote(
            "step",
            facts=(Fact("options", lr.encode(), lambda: {"lr": lr, "wd": "0"}, advice="fix"),),
        )

    votes = {rank: vote(lr) for rank, lr in enumerate(("0.1", "0.2", "0.1"))}
    expected = Difference("options: lr", (("0.1", (0, 2)), ("0.2", (1,))), "fix")
    assert decide_all(votes).differences == (expected,)


def test_a_fact_that_only_some_ranks_hold_is_absent_on_the_others() -> None:
    votes = {0: Vote("step"), 1: Vote("step", facts=(fact("x", "1"),))}
    assert decide_all(votes).differences == (Difference("x", (("absent", (0,)), ("1", (1,)))),)


def test_equal_texts_do_not_hide_unequal_keys() -> None:
    votes = {rank: Vote("step", facts=(Fact("x", b"%d" % rank, dict),)) for rank in range(2)}
    (found,) = decide_all(votes).differences
    assert found.values == (("digest 30", (0,)), ("digest 31", (1,)))


def test_long_keys_are_compared_whole_and_sent_short() -> None:
    keys = [b"k" * 999 + b"a", b"k" * 999 + b"b"]
    votes = {rank: Vote("step", facts=(Fact("x", key, dict),)) for rank, key in enumerate(keys)}
    assert len(decide_all(votes).differences) == 1
    assert third_message(votes) < 100


def test_a_name_brought_twice_is_compared_twice() -> None:
    held = [("1", "2"), ("3", "2")]
    votes = {
        rank: Vote("step", facts=tuple(fact("x", value) for value in pair))
        for rank, pair in enumerate(held)
    }
    assert decide_all(votes).differences == (Difference("x", (("1", (0,)), ("3", (1,)))),)


def test_facts_in_another_order_are_the_same_facts() -> None:
    both = (fact("x", "1"), fact("y", "2"))
    assert decide_all({0: Vote("step", facts=both), 1: Vote("step", facts=both[::-1])}).agreed


def test_details_too_large_to_send_leave_the_decision_as_it_is() -> None:
    def vote(rank: int) -> Vote:
        items = {f"parameter {i}": f"{rank}" + "x" * 500 for i in range(1000)}
        return Vote("step", facts=(Fact("x", b"%d" % rank, lambda: items),))

    votes = {rank: vote(rank) for rank in range(2)}
    assert third_message(votes) * 7 < 2 * BODY_LIMIT
    assert decide_all(votes).differences[0].name == "x"


@pytest.mark.slow
def test_every_difference_is_found_among_more_kinds_of_ranks_than_explain_themselves() -> None:
    def vote(rank: int) -> Vote:
        return Vote("step", facts=(Fact("x", b"%d" % rank, lambda: {"": f"{rank}" + "x" * 500}),))

    votes = {rank: vote(rank) for rank in range(MAX_VOICES + 6)}
    (found,) = decide_all(votes).differences
    assert [ranks for _, ranks in found.values] == [(rank,) for rank in range(70)]
    assert third_message(votes) * 7 < 70 * 150


# ---- facts of scopes ----

PAIRS = tuple((rank, rank + 1) for rank in range(0, 140, 2))


def siblings(count: int) -> tuple[Plan, dict[int, Ranks]]:
    """Return the plan of ``count`` pairs of ranks that hold the same, tied by one large scope."""
    everyone = ranks_of(2 * count)
    scope_of: dict[int, Ranks] = {rank: PAIRS[rank // 2] for rank in everyone}
    records = {r: [Scope(everyone, 1), Scope(scope_of[r], 2)] for r in everyone}
    return plan_of(records), scope_of


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 70])
def test_siblings_may_differ_from_each_other(count: int) -> None:
    plan, scope_of = siblings(count)
    for odd in (0, count - 1):
        held = {rank: "odd" if scope_of[rank] == PAIRS[odd] else "even" for rank in scope_of}
        votes = {r: Vote("step", facts=(fact("g", held[r], s),)) for r, s in scope_of.items()}
        assert decide_all(votes, plan).agreed


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 70])
def test_a_difference_within_a_sibling_is_found_where_it_is(count: int) -> None:
    plan, scope_of = siblings(count)
    votes = {r: Vote("step", facts=(fact("g", f"{r == 1}", s),)) for r, s in scope_of.items()}
    (found,) = decide_all(votes, plan).differences
    assert sorted(ranks for _, ranks in found.values) == [(0,), (1,)]


def test_a_large_scope_travels_in_few_words() -> None:
    votes = {r: Vote("step", facts=(fact("x", f"{r == 0}", ranks_of(128)),)) for r in range(128)}
    assert third_message(votes) < 100


# ---- the plan, and how far the data plane has come ----


def test_ranks_with_different_plans_disagree() -> None:
    plans = [Plan((0, 1, 2), ((0, 1),)), Plan((0, 1, 2), ((1, 2),))]
    run = simulate(
        {r: decide(Vote("step"), plans[r // 2].ballot(rank=r, sequence=0)) for r in range(3)}
    )
    (found,) = run.results[0].differences
    assert run.results[0] == run.results[1] == run.results[2]
    assert [ranks for _, ranks in found.values] == [(0, 1), (2,)]


def at_position(rank: int, reached: tuple[tuple[Ranks, int], ...]) -> Vote:
    return replace(failed(rank), positions=lambda: reached)


def test_positions_are_compared_within_each_set_of_the_plan() -> None:
    plan = Plan((0, 1, 2), ((0, 1),), (((0, 1), 1), ((0, 1, 2), 0)))

    def apart(*reached: int) -> tuple[Ranks, ...]:
        own = [(((0, 1), at),) if rank < 2 else () for rank, at in enumerate(reached)]
        votes = {rank: at_position(rank, own[rank]) for rank in range(3)}
        return decide_all(votes, plan).apart

    assert apart(4, 4, 9) == ()
    assert apart(4, 5, 9) == ((0, 1),)


def test_a_rank_whose_data_plane_is_behind_is_seen() -> None:
    votes = {rank: at_position(rank, (((0, 1), rank),)) for rank in range(2)}
    assert decide_all(votes).apart == ((0, 1),)


# ---- what travels ----


def test_any_text_travels() -> None:
    text = '\ud800 π \x00 \U0001f600 " \\ \n'
    votes = {
        0: Vote(text, facts=(fact(text, "1"),), ranges=((text, 1),)),
        1: Vote(text, facts=(fact(text, "2"),), ranges=((text, 1),)),
    }
    assert decide_all(votes).differences[0].name == text
    assert dict(decide_all({0: Vote(text), 1: Vote("x")}).phases)[0].startswith("\\ud800 π \x00")


def test_a_row_has_the_width_that_is_promised() -> None:
    assert header_words(0) == 23
    assert header_words(3) == 26
    run = hold_vote({0: failed(0), 1: Vote("step")}, Plan((0, 1), ((0,), (1,))))
    assert run.collectives[1] == ((0, 1), 2 * 25)


def test_a_protocol_can_be_fed_by_hand() -> None:
    protocol = decide(Vote("step"), Plan((0, 1)).ballot(rank=0, sequence=0))
    asked = next(protocol)
    assert isinstance(asked, AllReduceMax)
    with pytest.raises(StopIteration) as stop:
        protocol.send(asked.words)
    assert stop.value.value.agreed

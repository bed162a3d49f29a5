"""Blocks inside of blocks: whatever ranks do in them, all ranks of the group end alike.

A rank's program is a generator that opens blocks as `fail_together` does: enter, run the body,
leave, vote unless the error passes. Every combination of the behaviours below runs on 2 and 3
ranks, and `expected` says in a few lines what must come of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import pytest

from consensus._nesting import Nesting
from consensus._protocol import AllReduceMax, Protocol, decide
from consensus._verdict import error_of
from consensus.agree import failures_of
from consensus.enclosure import Plan
from consensus.errors import ConsensusError, Failure, GroupFailure, PhaseMismatch
from consensus.testing import Deadlock, simulate
from consensus.vote import Ranks, Vote
from tests.simulated import ranks_of

Body: TypeAlias = Callable[[], Protocol[None]]
Failures: TypeAlias = tuple[Failure, ...]


class Seat:
    """One rank's place in one group."""

    def __init__(self, members: Ranks) -> None:
        self.plan = Plan(members)
        self.sequence = 0
        self.closed = False

    @property
    def members(self) -> Ranks:
        return self.plan.members


class Elsewhere(Exception):
    """A rank that this one waits for is at the end of a block around it."""


class Rank:
    """One rank: its open blocks, and how it votes."""

    def __init__(self, rank: int, seats: Sequence[Seat] = ()) -> None:
        self.rank = rank
        self.nesting = Nesting()
        self.seats = [seat for seat in seats if rank in seat.members]
        self.waits_in: tuple[Seat, int, Failures] | None = None  # in which vote, with what

    def is_stranded_by(self, others: Sequence[Rank]) -> bool:
        """Return whether this rank would leave its wait, as `Whereabouts.look_around` does."""
        if self.waits_in is None:
            return False
        seat, number, _ = self.waits_in
        return any(
            other.waits_in is not None
            and other.rank in seat.members
            and other.waits_in[0].members == block.members != seat.members
            and other.waits_in[1] == block.sequence
            and all(o.sequence <= number for o in other.seats if o.members == seat.members)
            for block in self.nesting.around()
            for other in others
            if other is not self
        )

    def hold(self, seat: Seat, phase: str, error: BaseException | None = None) -> Protocol[None]:
        """Hold one agreement, as `consensus.agree.hold` does."""
        self.nesting.refuse(seat)
        fatal = error is not None and not isinstance(error, Exception)
        failures = failures_of(error, self.rank, phase) if error is not None else ()
        vote = Vote(phase, failures, fatal)
        if seat.closed:
            raise error or ConsensusError("the group is closed")
        ballot = seat.plan.ballot(rank=self.rank, sequence=seat.sequence)
        self.waits_in = (seat, seat.sequence, failures)
        seat.sequence += 1
        try:
            decided = error_of((yield from decide(vote, ballot)), vote)
        except Elsewhere:
            seat.closed = True
            decided = ConsensusError("others are at the end of a block around this one")
        self.waits_in = None
        if isinstance(decided, GroupFailure):
            for inner in self.seats:  # which all members make anew
                if inner is not seat and set(inner.members) <= set(seat.members):
                    inner.closed, inner.sequence = False, 0
        if isinstance(decided, GroupFailure) and decided.fatal:
            seat.closed = True
        if error is not None and fatal:
            raise error
        if decided is not None:
            self.nesting.decide(seat, decided)
            raise decided from error

    def block(self, seat: Seat, phase: str, body: Body) -> Protocol[None]:
        """Run ``body`` in a block, as `consensus.fail_together` does."""
        opened = self.nesting.enter(seat)
        error: BaseException | None = None
        try:
            yield from body()
        except BaseException as raised:
            error = raised
        self.nesting.leave(opened)
        if not opened.passes(error):
            yield from self.hold(seat, phase, error)
        elif error is not None:
            raise error


class Stop(BaseException):
    """Stands for KeyboardInterrupt, which would end the test itself."""


@dataclass(frozen=True, slots=True)
class Does:
    """What one rank does in blocks inside of blocks; the default is to go through all of them."""

    fails: str = ""  # in which block, before anything else there; "end of outer": after it
    skips: str = ""  # never enters this block
    swallows: str = ""  # catches what this block raises
    then: str = ""  # after that: "again" enters it again, "raise" raises something else
    stops: bool = False  # fails by an interruption, which is no Exception


TWO_BLOCKS = (
    Does(),
    Does(fails="outer"),
    Does(fails="inner"),
    Does(fails="end of outer"),
    Does(skips="inner"),
    Does(swallows="inner"),
    Does(swallows="inner", then="again"),
    Does(swallows="inner", then="raise"),
    Does(fails="inner", swallows="inner"),
    Does(fails="inner", swallows="inner", then="again"),
    Does(fails="inner", swallows="inner", then="raise"),
    Does(fails="outer", stops=True),
    Does(fails="inner", stops=True),
)
THREE_BLOCKS = (
    Does(),
    Does(fails="outer"),
    Does(fails="middle"),
    Does(fails="inner"),
    Does(fails="end of middle"),
    Does(fails="end of outer"),
    Does(skips="inner"),
    Does(skips="middle"),
    Does(swallows="inner"),
    Does(swallows="middle", then="again"),
    Does(fails="inner", swallows="middle"),
)


def blocks(
    me: Rank, does: Does, nested: Sequence[tuple[str, Seat]], *, communicate: bool = False
) -> Protocol[None]:
    """Run one rank through nested blocks, outermost first."""
    (name, seat), *within = nested

    def fail_at(place: str) -> None:
        if does.fails == place:
            raise Stop if does.stops else ValueError(f"{place}, rank {me.rank}")

    def body() -> Protocol[None]:
        fail_at(name)
        if communicate:  # a collective of the data plane, which nobody may enter alone
            yield AllReduceMax(seat.plan.members, (0,))
        if within and does.skips != within[0][0] and me.rank in within[0][1].plan.members:
            try:
                yield from blocks(me, does, within)
            except ConsensusError:
                if does.swallows != within[0][0]:
                    raise
                if does.then == "again":
                    yield from blocks(me, Does(), within, communicate=True)
                if does.then == "raise":
                    raise ValueError("another error") from None
        fail_at(f"end of {name}")

    yield from me.block(seat, name, body)


def ends(
    behaviours: Sequence[Does], names: Sequence[str], groups: Sequence[Ranks] = ()
) -> list[BaseException | None]:
    """Return what leaves each rank's outermost block; without groups all are in one."""

    every: list[Rank] = []

    def program(rank: int, does: Does) -> Protocol[BaseException | None]:
        whole = Seat(ranks_of(len(behaviours)))
        seats = [Seat(group) for group in groups] or [whole] * len(names)
        every.append(Rank(rank, seats))
        try:
            yield from blocks(every[-1], does, list(zip(names, seats, strict=True)))
        except (Exception, Stop) as error:
            return error
        return None

    def on_standstill(wanted: Mapping[int, object]) -> dict[int, Exception]:
        waiting = [each for each in every if each.rank in wanted]
        return {each.rank: Elsewhere() for each in waiting if each.is_stranded_by(waiting)}

    run = simulate(
        {rank: program(rank, does) for rank, does in enumerate(behaviours)},
        on_standstill=on_standstill,
    )
    return [run.results[rank] for rank in range(len(behaviours))]


def votes_of(does: Does, names: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the votes a rank would cast if no other failed: in which block, and failed or not."""
    name, *within = names
    if does.fails == name:
        return [(name, True)]
    cast = votes_of(does, within) if within and does.skips != within[0] else []
    if any(failed for _, failed in cast):
        return cast
    return [*cast, (name, does.fails == f"end of {name}")]


def expected(
    behaviours: Sequence[Does], names: Sequence[str]
) -> tuple[type[ConsensusError] | None, Ranks]:
    """Return what leaves the outermost block on every rank, and the ranks that it names.

    The n-th votes of all ranks meet, in whichever blocks they are cast. The first meeting that
    does not go well decides, whoever swallows what, and a failure outranks a phase mismatch.
    """
    cast = [votes_of(does, names) for does in behaviours]
    for votes in zip(*cast, strict=False):  # equally many, or two of them differ
        failing = tuple(rank for rank, (_, failed) in enumerate(votes) if failed)
        if failing:
            return GroupFailure, failing
        if len({block for block, _ in votes}) > 1:
            return PhaseMismatch, ()
    return None, ()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("names", "every"),
    [(("outer", "inner"), TWO_BLOCKS), (("outer", "middle", "inner"), THREE_BLOCKS)],
    ids=["two blocks", "three blocks"],
)
def test_all_ranks_of_a_group_end_alike_whatever_each_does(
    names: Sequence[str], every: Sequence[Does], size: int
) -> None:
    for behaviours in product(every, repeat=size):
        kind, failing = expected(behaviours, names)
        for does, error in zip(behaviours, ends(behaviours, names), strict=True):
            assert type(error) is (Stop if does.stops else kind or type(None))
            if isinstance(error, GroupFailure):
                assert tuple(failure.rank for failure in error.failures) == failing
                assert error.fatal is any(other.stops for other in behaviours)


def test_a_failure_outranks_a_phase_mismatch_and_both_phases_are_told() -> None:
    first, second = ends([Does(fails="outer"), Does()], ["outer", "inner"])
    assert isinstance(first, GroupFailure)
    assert isinstance(second, GroupFailure)
    assert first.phases == second.phases == {0: "outer", 1: "inner"}
    assert "outer, rank 0" in str(second)


def test_ranks_in_two_phases_are_both_told_where_each_is() -> None:
    for error in ends([Does(skips="inner"), Does()], ["outer", "inner"]):
        assert isinstance(error, PhaseMismatch)
        assert error.phases == {0: "outer", 1: "inner"}


def test_a_swallowed_failure_keeps_its_cause() -> None:
    both = ends([Does(fails="inner", swallows="inner"), Does()], ["outer", "inner"])
    assert [type(error.__cause__) for error in both if error] == [ValueError, type(None)]


# ---- blocks on different groups ----

EVERYONE, SOME = (0, 1, 2), (0, 1)


def test_a_failure_of_a_smaller_group_reaches_the_larger_one_around_it() -> None:
    for error in ends([Does(fails="inner"), Does(), Does()], ["outer", "inner"], [EVERYONE, SOME]):
        assert isinstance(error, GroupFailure)
        assert [failure.rank for failure in error.failures] == [0]
        assert error.failures[0].message == "inner, rank 0"


def meets_data_alone(one: Does, other: Does) -> bool:
    """Return whether ``one`` swallows an error of the inner block and enters it again, alone.

    Then it waits in the block's data collective, which has no vote that it could leave.
    """
    first, others = (votes_of(does, ["outer", "inner"])[0] for does in (one, other))
    hears_an_error = first[0] == "inner" and (first[1] or others != ("inner", False))
    return hears_an_error and one.then == "again" and other.then != "again"


@pytest.mark.slow
def test_ranks_of_a_smaller_group_inside_a_larger_one_end_as_all_do() -> None:
    """But where a rank is alone in a data collective, which has no vote that it could leave."""
    alone = 0
    for behaviours in product(TWO_BLOCKS, TWO_BLOCKS, (Does(), Does(fails="outer"))):
        first, second, _ = behaviours
        if meets_data_alone(first, second) or meets_data_alone(second, first):
            alone += 1
            with pytest.raises(Deadlock):
                ends(behaviours, ["outer", "inner"], [EVERYONE, SOME])
            continue
        found = ends(behaviours, ["outer", "inner"], [EVERYONE, SOME])
        assert len({error is None for error in found}) == 1, behaviours
    assert alone == 72  # of 338


@pytest.mark.parametrize("does", [Does(fails="outer"), Does(skips="inner"), Does(then="again")])
def test_without_a_look_around_they_would_wait_for_ever(
    does: Does, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rank, "is_stranded_by", lambda self, others: False)
    behaviours = [does, Does(), Does()]
    if does.then:  # nothing is wrong here
        assert ends(behaviours, ["outer", "inner"], [EVERYONE, SOME]) == [None] * 3
        return
    with pytest.raises(Deadlock):
        ends(behaviours, ["outer", "inner"], [EVERYONE, SOME])

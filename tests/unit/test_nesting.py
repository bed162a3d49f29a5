from contextlib import suppress
from types import TracebackType
from typing import Literal

import pytest

from consensus._nesting import Nesting
from consensus.errors import ConsensusError


class Block:
    """A block as the library's own: leaves, then votes unless the error passes."""

    def __init__(
        self, nesting: Nesting, group: object, decides: ConsensusError | None = None
    ) -> None:
        self.nesting, self.group, self.decides = nesting, group, decides
        self.voted = False

    def __enter__(self) -> "Block":
        self.opened = self.nesting.enter(self.group)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        self.nesting.leave(self.opened)
        if self.opened.passes(error):
            return False
        self.voted = True
        if self.decides is not None:
            self.nesting.decide(self.group, self.decides)
            raise self.decides from error
        return False


GROUP, OTHER = object(), object()


def swallow(nesting: Nesting, decided: ConsensusError, own: Exception | None = None) -> None:
    """Run a block that ends in ``decided``, because ``own`` was raised in it; catch it."""
    with suppress(ConsensusError), Block(nesting, GROUP, decided):
        if own is not None:
            raise own


def test_a_block_votes_when_nothing_was_decided_inside() -> None:
    nesting = Nesting()
    with Block(nesting, GROUP) as outer, Block(nesting, GROUP) as inner:
        pass
    assert outer.voted
    assert inner.voted


def test_a_decided_error_passes_the_blocks_around_without_a_vote() -> None:
    nesting, decided = Nesting(), ConsensusError("decided")
    outer, middle = Block(nesting, GROUP), Block(nesting, GROUP)
    with pytest.raises(ConsensusError) as caught, outer, middle, Block(nesting, GROUP, decided):
        pass
    assert caught.value is decided
    assert not outer.voted
    assert not middle.voted


def test_a_block_of_another_group_votes_on_a_decided_error() -> None:
    nesting, decided = Nesting(), ConsensusError("decided")
    outer = Block(nesting, OTHER)
    with pytest.raises(ConsensusError), outer, Block(nesting, GROUP, decided):
        pass
    assert outer.voted


def test_a_block_outside_a_block_of_another_group_passes_it_too() -> None:
    nesting, decided = Nesting(), ConsensusError("decided")
    outer, between = Block(nesting, GROUP), Block(nesting, OTHER)
    with pytest.raises(ConsensusError), outer, between, Block(nesting, GROUP, decided):
        pass
    assert not outer.voted
    assert between.voted


def test_a_swallowed_error_is_raised_at_the_end_of_the_block_with_its_cause() -> None:
    nesting, decided, own = Nesting(), ConsensusError("decided"), ValueError("own")
    with pytest.raises(ConsensusError) as caught, Block(nesting, GROUP):
        swallow(nesting, decided, own)
    assert caught.value is decided
    assert caught.value.__cause__ is own


def test_another_error_after_a_decided_one_is_its_context() -> None:
    nesting, decided, own = Nesting(), ConsensusError("decided"), ValueError("own")
    later = KeyError("later")

    def fail_twice() -> None:
        swallow(nesting, decided, own)
        raise later

    with pytest.raises(ConsensusError) as caught, Block(nesting, GROUP):
        fail_twice()
    assert caught.value is decided
    assert caught.value.__cause__ is own
    assert caught.value.__context__ is later


def test_an_interruption_after_a_decided_error_leaves_as_it_is() -> None:
    nesting = Nesting()
    outer = Block(nesting, GROUP)

    def interrupted() -> None:
        swallow(nesting, ConsensusError("decided"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), outer:
        interrupted()
    assert not outer.voted


def test_no_further_block_opens_after_a_swallowed_error() -> None:
    """Its peers may have left: nobody would meet this rank in the block's vote."""
    nesting, decided = Nesting(), ConsensusError("decided")
    entered = []

    def go_on() -> None:
        swallow(nesting, decided)
        with Block(nesting, GROUP) as again:
            entered.append(again)

    with pytest.raises(ConsensusError) as caught, Block(nesting, GROUP):
        go_on()
    assert caught.value is decided
    assert not entered


def test_blocks_of_other_groups_still_open_after_a_swallowed_error() -> None:
    nesting = Nesting()
    other = Block(nesting, OTHER)

    def go_on() -> None:
        swallow(nesting, ConsensusError("decided"))
        nesting.refuse(OTHER)
        with other:
            pass

    with pytest.raises(ConsensusError, match="decided"), Block(nesting, GROUP):
        go_on()
    assert other.voted


def test_a_block_that_has_ended_refuses_nothing_any_more() -> None:
    nesting = Nesting()
    with pytest.raises(ConsensusError), Block(nesting, GROUP, ConsensusError("decided")):
        pass
    nesting.refuse(GROUP)
    with Block(nesting, GROUP) as after:
        pass
    assert after.voted


def test_leaving_a_block_leaves_those_that_were_left_open_inside() -> None:
    nesting = Nesting()
    outer = nesting.enter(GROUP)
    forgotten = nesting.enter(GROUP)
    nesting.leave(outer)
    nesting.decide(GROUP, ConsensusError("decided"))
    assert forgotten.decided is None
    nesting.leave(forgotten)
    nesting.refuse(GROUP)


def test_groups_are_told_apart_by_identity() -> None:
    nesting = Nesting()
    first, equal = [1], [1]
    opened = nesting.enter(first)  # type: ignore[arg-type]
    nesting.decide(equal, ConsensusError("decided"))  # type: ignore[arg-type]
    assert opened.decided is None

"""What becomes of errors between a step's agreement and its writes, as one rank sees it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import consensus
from adapters._captured import InGraph
from adapters._data_phase import DataPhase

CPU = torch.device("cpu")
ALL = (0, 1, 2)


class Agreements:
    """Stands for `consensus.fail_together`: notes each, and lets errors through."""

    def __init__(self, failed_elsewhere: Exception | None = None) -> None:
        self.phases: list[str] = []
        self.failed_elsewhere = failed_elsewhere

    @contextmanager
    def __call__(self, phase: str, owner: object) -> Iterator[None]:
        self.phases.append(phase)
        yield
        if self.failed_elsewhere:
            raise self.failed_elsewhere


@pytest.fixture
def agreements(monkeypatch: pytest.MonkeyPatch) -> Agreements:
    made = Agreements()
    monkeypatch.setattr(consensus, "fail_together", made)
    return made


class Owner:
    """Whose step it is."""


def fail(text: str = "no memory left") -> None:
    raise MemoryError(text)


def word(phase: DataPhase) -> bool:
    return bool(phase.word(CPU))


@pytest.mark.parametrize("members", [(), (3,)])
def test_who_has_no_peers_raises_at_once(members: tuple[int, ...]) -> None:
    phase = DataPhase(members)
    assert phase.attempt(lambda: 5) == 5
    with pytest.raises(MemoryError):
        phase.attempt(fail)
    assert not phase.failed


def test_an_error_waits_and_nothing_is_attempted_after_it(agreements: Agreements) -> None:
    phase = DataPhase(ALL)
    assert phase.attempt(lambda: 5) == 5
    assert not word(phase)
    phase.attempt(fail)
    assert phase.failed
    assert word(phase)
    assert phase.attempt(lambda: 5) is None
    with pytest.raises(MemoryError, match="no memory left"):
        phase.settle(Owner(), commit_vote=False)
    assert agreements.phases == []  # nobody else knows, so nobody else would come


def test_a_healthy_step_agrees_only_if_asked_to(agreements: Agreements) -> None:
    for vote in (False, True):
        phase = DataPhase(ALL)
        phase.hear(torch.zeros(3), ranks=ALL)
        phase.settle(Owner(), commit_vote=vote)
        assert agreements.phases == ["Owner.step: update"] * vote


def test_what_is_said_where_all_take_part_is_agreed_on(agreements: Agreements) -> None:
    agreements.failed_elsewhere = OSError("rank 2 had no memory")
    phase = DataPhase(ALL)
    phase.hear(torch.tensor([0.0, 0.0, 1.0], dtype=torch.bfloat16), ranks=ALL)
    assert word(phase)  # and is passed on
    phase.hear(torch.zeros(3), ranks=ALL)
    assert word(phase)
    assert not phase.failed
    with pytest.raises(OSError, match="rank 2"):
        phase.settle(Owner(), commit_vote=False)


def test_what_is_heard_among_some_is_raised_without_an_agreement(agreements: Agreements) -> None:
    phase = DataPhase(ALL)
    phase.hear(torch.tensor([0, 1]), ranks=(0, 1))
    assert word(phase)
    with pytest.raises(RuntimeError, match="set commit_vote = True"):
        phase.settle(Owner(), commit_vote=False)
    assert agreements.phases == []


def test_with_a_commit_vote_all_learn_of_it(agreements: Agreements) -> None:
    phase = DataPhase(ALL)
    phase.attempt(fail)
    with pytest.raises(MemoryError):
        phase.settle(Owner(), commit_vote=True)
    assert agreements.phases == ["Owner.step: update"]


def test_the_first_error_is_told(agreements: Agreements) -> None:
    phase = DataPhase(ALL)
    for text in ("first", "second"):
        phase.attempt(lambda text=text: fail(text))
    with pytest.raises(MemoryError, match="first"):
        phase.settle(Owner(), commit_vote=False)


def test_a_failure_that_nobody_brought_is_no_step(agreements: Agreements) -> None:
    phase = DataPhase(ALL)
    phase.hear(torch.ones(1), ranks=ALL)
    with pytest.raises(AssertionError, match="none brought an error"):
        phase.settle(Owner(), commit_vote=False)


def test_memory_is_kept_by_rule_and_device() -> None:
    phase = DataPhase(ALL)
    phase.reserve("one", {CPU: 5})
    phase.reserve("other", {})
    assert phase.memory("one")[CPU].shape == (5,)
    assert phase.memory("one")[CPU].dtype is torch.bfloat16
    assert not phase.memory("other")


def test_nothing_of_a_failed_step_outlives_its_error(agreements: Agreements) -> None:
    """Its traceback would hold the step, and the step its memory and its error."""
    phase = DataPhase(ALL)
    phase.reserve("one", {CPU: 5})
    memory = weakref.ref(phase.memory("one")[CPU])
    phase.attempt(fail)
    gc.disable()
    try:
        with pytest.raises(MemoryError):
            phase.settle(Owner(), commit_vote=False)
        assert memory() is None
    finally:
        gc.enable()


def test_in_a_capture_errors_are_raised_at_once() -> None:
    phase = DataPhase(ALL)
    phase.in_graph = InGraph(None, None)
    with pytest.raises(MemoryError):
        phase.attempt(fail)

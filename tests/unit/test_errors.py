import copy
import math
import pickle

import pytest

from consensus._verdict import error_of
from consensus.errors import (
    ConsensusError,
    Disagreement,
    EnclosureError,
    Failure,
    GroupFailure,
    LateRanks,
    PhaseMismatch,
)
from consensus.vote import Decision, Difference, Vote
from tests.simulated import failure

VALUE_ERROR = failure(1, "boom")
BROKEN = failure(0, "Read error: Connection reset by peer")

ERRORS = [
    ConsensusError("text"),
    EnclosureError("text"),
    GroupFailure(
        "step",
        (VALUE_ERROR,),
        recoverable=False,
        phases={0: "a", 1: "b"},
        late_ranks=(2,),
        advice="x",
    ),
    GroupFailure("step", (), fatal=True),
    Disagreement("step", "lr", {"0.1": (0,), "nan": (1,)}, more=("also",), advice="fix"),
    PhaseMismatch({0: "a", 1: "b"}),
    LateRanks("step", (1,), {1: "load"}, seconds=2.5, reason="timed out"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_and_copying(error: ConsensusError) -> None:
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert back.args == error.args
        assert back.__dict__.keys() == error.__dict__.keys()


def test_a_pickled_failure_answers_as_the_original() -> None:
    back = pickle.loads(pickle.dumps(GroupFailure("step", (VALUE_ERROR,), fatal=True)))
    assert back.failures == (VALUE_ERROR,)
    assert back.fatal
    assert not back.recoverable
    assert back.caused_by(ValueError)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_is_caught_as_a_runtime_error(error: ConsensusError) -> None:
    assert isinstance(error, ConsensusError)
    assert isinstance(error, RuntimeError)


# ---- GroupFailure ----


def test_a_group_failure_says_who_failed_and_why() -> None:
    error = GroupFailure("step", (failure(1, "boom"), failure(4, "bang", KeyError)))
    assert str(error).splitlines() == [
        "step failed on ranks 1, 4, so every rank of the group stops",
        "  rank 1: ValueError: boom",
        "  rank 4: KeyError: bang",
    ]


def test_ranks_with_the_same_cause_share_a_line() -> None:
    error = GroupFailure(
        "step", (*(failure(rank, "boom") for rank in range(8)), failure(9, "bang"))
    )
    assert str(error).splitlines()[1:] == [
        "  ranks 0-7: ValueError: boom",
        "  rank 9: ValueError: bang",
    ]


def test_the_original_text_stands_in_args() -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB\r\n\n  second line\x0c"
    assert text in GroupFailure("step", (failure(0, text),)).args[0]


def test_a_message_of_the_transport_comes_after_the_causes() -> None:
    error = GroupFailure("step", (failure(0, "Connection closed by peer"), failure(1, "boom")))
    assert [line.strip() for line in str(error).splitlines()[1:]] == [
        "rank 1: ValueError: boom",
        "rank 0: ValueError: Connection closed by peer",
    ]


def test_each_rank_is_placed_when_phases_differ() -> None:
    error = GroupFailure("step", (failure(0),), phases={0: "load", 1: "step", 2: "step"})
    assert str(error).splitlines()[2:] == ["  rank 0 is in 'load'", "  ranks 1, 2 are in 'step'"]
    assert "is in" not in str(GroupFailure("step", (failure(0),), phases={0: "a", 1: "a"}))


def test_an_exception_without_a_message_is_its_type() -> None:
    assert failure(0, "", AssertionError).headline() == "AssertionError"


@pytest.mark.parametrize(
    ("error", "recoverable"),
    [
        (GroupFailure("step", (VALUE_ERROR,)), True),
        (GroupFailure("step", (VALUE_ERROR,), recoverable=False), False),
        (GroupFailure("step", (VALUE_ERROR,), fatal=True), False),
        (GroupFailure("step", (VALUE_ERROR,), late_ranks=(3,)), False),
    ],
)
def test_a_group_goes_on_only_if_all_ranks_are_there(
    error: GroupFailure, recoverable: bool
) -> None:
    assert error.recoverable is recoverable
    assert ("The group cannot go on" in str(error)) is not recoverable


def test_a_cause_is_recognised_by_its_class_and_its_bases_on_every_rank() -> None:
    names = ("builtins.FileNotFoundError", "builtins.OSError", "builtins.Exception")
    error = GroupFailure("step", (VALUE_ERROR, Failure(2, "FileNotFoundError", "", "", names)))
    assert error.caused_by(FileNotFoundError)
    assert error.caused_by(OSError)
    assert error.caused_by(ValueError)
    assert not error.caused_by(TypeError)


# ---- messages stay short ----


def many(kind: str) -> ConsensusError:
    """Return an error about 1000 ranks with as many different things to say as there can be."""
    phases = {rank: f"phase {rank}" for rank in range(1000)}
    if kind == "causes":
        failures = tuple(failure(rank, f"cause {rank}\nmore") for rank in range(1000))
        return GroupFailure("step", failures, phases=phases, late_ranks=(1, 3), recoverable=False)
    if kind == "one long cause":
        return GroupFailure("step", (failure(0, "\n".join("x" * 1000)),), phases=phases)
    if kind == "the same cause":
        return GroupFailure("step", tuple(failure(rank) for rank in range(1000)))
    if kind == "phases":
        return PhaseMismatch(phases)
    if kind == "late":
        return LateRanks("step", tuple(range(1000)), phases)
    values = tuple((f"value {rank}", (rank,)) for rank in range(1000))
    differences = tuple(Difference(f"x {i}", values, "advice") for i in range(1000))
    found = error_of(Decision(3, differences=differences), Vote("step"))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "kind", ["causes", "one long cause", "the same cause", "phases", "late", "values"]
)
def test_a_message_about_1000_ranks_can_be_read(kind: str) -> None:
    text = str(many(kind))
    assert len(text.splitlines()) <= 30
    assert len(text) < 10_000


def test_what_a_message_leaves_out_is_counted_and_kept() -> None:
    error = many("causes")
    assert isinstance(error, GroupFailure)
    assert "  and 984 more" in str(error).splitlines()
    assert len(error.failures) == 1000
    assert "; and 992 more. " in str(many("phases"))
    assert "value 7 on rank 7; and 992 more\n" in str(many("values"))
    assert "  and 992 more differences" in str(many("values")).splitlines()


def test_each_of_a_few_long_causes_gets_its_share() -> None:
    long = "\n".join(f"line {i}" for i in range(100))
    error = GroupFailure("step", (failure(0, f"first\n{long}"), failure(1, f"second\n{long}")))
    lines = str(error).splitlines()
    assert "  rank 0: ValueError: first" in lines
    assert "  rank 1: ValueError: second" in lines
    assert len(lines) == 17


# ---- Disagreement ----


def test_a_disagreement_says_what_differs_and_who_holds_what() -> None:
    error = Disagreement("step", "options: lr", {"0.1": (0, 2), "0.3": (1,)}, advice="Set one lr.")
    assert str(error) == (
        "step: ranks disagree about options: lr: 0.1 on ranks 0, 2; 0.3 on rank 1\n  Set one lr."
    )
    assert error.values == {"0.1": (0, 2), "0.3": (1,)}


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        (["0.1", "0.3"], 0.1, 0.3),
        (["9007199254740993", "9007199254740992"], 9007199254740992, 9007199254740993),
        (["-inf", "5"], -math.inf, 5),
        (["absent", "0.3"], None, None),
        (["'x'", "'y'"], None, None),
        (["9" * 30, "1"], None, None),
        ([], None, None),
    ],
)
def test_the_ends_of_numbers_are_exact(
    values: list[str], low: float | None, high: float | None
) -> None:
    error = Disagreement("step", "x", {value: (rank,) for rank, value in enumerate(values)})
    assert (error.minimum, error.maximum) == (low, high)


@pytest.mark.parametrize(
    "values", [["1.0", "nan", "2.0"], ["nan", "1.0", "2.0"], ["2.0", "1.0", "nan"]]
)
def test_a_nan_is_the_maximum_wherever_it_stands(values: list[str]) -> None:
    error = Disagreement("step", "x", {value: (rank,) for rank, value in enumerate(values)})
    assert error.minimum == 1.0
    assert error.maximum is not None
    assert math.isnan(error.maximum)


# ---- PhaseMismatch and LateRanks ----


def test_a_phase_mismatch_says_which_rank_is_where() -> None:
    error = PhaseMismatch({2: "step", 0: "load", 1: "step"})
    assert error.phases == {0: "load", 1: "step", 2: "step"}
    assert "rank 0 is in 'load'; ranks 1, 2 are in 'step'" in str(error)


def test_late_ranks_are_named_with_where_they_were_last_seen() -> None:
    error = LateRanks("step", (1, 2), {1: "load", 2: "load"}, seconds=3.21, reason="timed out")
    assert str(error).splitlines() == [
        "step: ranks 1, 2 did not come within 3.2 s",
        "  ranks 1, 2 last seen in 'load'",
        "  the transport said: timed out",
    ]


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ((1,), "step: rank 1 is gone, its connection broke"),
        ((1, 2), "step: ranks 1, 2 are gone, their connections broke"),
    ],
)
def test_ranks_whose_connection_broke_are_not_called_late(
    ranks: tuple[int, ...], says: str
) -> None:
    error = LateRanks("step", ranks, seconds=0.01, gone=ranks)
    assert str(error) == says
    assert error.gone == ranks


def test_ranks_that_are_kept_by_one_that_is_gone_are_not_called_gone() -> None:
    lines = ["rank 0 is gone, its connection broke", "ranks 2, 3 had not come by then"]
    late = LateRanks("step", (0, 2, 3), gone=(0,))
    assert str(late).splitlines() == [f"step: {lines[0]}", f"  {lines[1]}"]
    failed = GroupFailure("step", (VALUE_ERROR,), late_ranks=(0, 2, 3), gone=(0,))
    assert str(failed).splitlines()[2:4] == [f"  {line}" for line in lines]


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ((BROKEN,), "step: rank 2 is gone, its connection broke, so every rank of the group stops"),
        ((VALUE_ERROR, BROKEN), "step failed on ranks 0, 1, so every rank of the group stops"),
    ],
    ids=["only what came of it", "and a cause of its own"],
)
def test_a_death_comes_before_what_came_of_it(failures: tuple[Failure, ...], first: str) -> None:
    error = GroupFailure("step", failures, late_ranks=(2,), gone=(2,))
    assert str(error).splitlines()[0] == first
    assert str(error).count("rank 2 is gone, its connection broke") == 1


def test_late_ranks_nobody_can_name_are_said_to_be_so() -> None:
    assert "names nobody as missing" in str(LateRanks("step", (), seconds=1.0))


# ---- which error a decision becomes ----


def test_a_failure_outranks_a_phase_mismatch_which_outranks_a_difference() -> None:
    difference = Difference("x", (("1", (0,)), ("2", (1,))))
    both = Decision(3, phases=((0, "a"), (1, "b")), differences=(difference,))
    all_three = Decision(3, (VALUE_ERROR,), phases=both.phases, differences=both.differences)
    kinds = [type(error_of(decision, Vote("a"))) for decision in (all_three, both)]
    assert kinds == [GroupFailure, PhaseMismatch]
    only = error_of(Decision(3, differences=(difference,)), Vote("a"))
    assert isinstance(only, Disagreement)
    assert (only.name, only.minimum, only.maximum) == ("x", 1, 2)
    assert error_of(Decision(1), Vote("a")) is None


def test_a_decision_on_failures_carries_over_whole() -> None:
    decision = Decision(3, (VALUE_ERROR,), fatal=True, phases=((0, "a"), (1, "b")))
    error = error_of(decision, Vote("a"))
    assert isinstance(error, GroupFailure)
    assert (error.phase, error.failures, error.fatal) == ("a", (VALUE_ERROR,), True)
    assert error.phases == {0: "a", 1: "b"}


@pytest.mark.parametrize(
    ("apart", "said"),
    [
        ((), ""),
        (((0, 1),), "the data-plane groups of ranks 0, 1 are not at the same collective"),
        (((0, 1), (1, 2, 3)), "of ranks 0, 1 and of ranks 1-3 are not at the same collective"),
        (((0, 1),) * 9, "of ranks 0, 1 and of others are not at the same collective"),
    ],
)
def test_a_group_whose_data_plane_is_out_of_step_cannot_go_on(
    apart: tuple[tuple[int, ...], ...], said: str
) -> None:
    error = error_of(Decision(3, (VALUE_ERROR,), apart=apart), Vote("a"))
    assert isinstance(error, GroupFailure)
    assert error.recoverable is not bool(apart)
    assert said in str(error)


def test_a_rank_that_leaves_matters_more_than_where_the_data_plane_is() -> None:
    error = error_of(Decision(3, (VALUE_ERROR,), fatal=True, apart=((0, 1),)), Vote("a"))
    assert "a rank is leaving for good." in str(error)


def test_a_silent_store_is_explained_by_the_transport_alone() -> None:
    text = str(LateRanks("step", (), silent=True, reason="no file descriptor left"))
    assert "the job's store cannot be asked who is missing\n" in text
    assert text.endswith("no file descriptor left")
    assert "hosts it" not in text

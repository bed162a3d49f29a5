"""From a decision to the error that every rank raises."""

from __future__ import annotations

from consensus._absence import AgreementBroken
from consensus._text import join_ranks, tidy
from consensus.errors import (
    ConsensusError,
    Disagreement,
    Failure,
    GroupFailure,
    LateRanks,
    PhaseMismatch,
    who_holds,
)
from consensus.vote import Decision, Difference, Ranks, Vote

_CLOSED = "the control group is closed"
_LOST = "the agreement did not come about"
MAX_LINES = 8  # further differences listed in a message


def error_of(decision: Decision, vote: Vote) -> ConsensusError | None:
    """Return what every rank must raise, or None when all may proceed.

    A failure outranks a phase mismatch, which outranks a disagreement about values.
    """
    if decision.failures:
        return GroupFailure(
            vote.phase,
            decision.failures,
            recoverable=not decision.apart,
            fatal=decision.fatal,
            phases=dict(decision.phases),
            advice=_where_apart(decision.apart) if not decision.fatal else "",
        )
    if decision.phases:
        return PhaseMismatch(dict(decision.phases))
    if decision.differences:
        return _disagreement(vote.phase, decision.differences)
    return None


def raise_if_decided(decision: Decision, vote: Vote) -> None:
    """Raise what the group decided, if it decided to stop."""
    error = error_of(decision, vote)
    if error is not None:
        raise error


def raise_conflict(conflict: tuple[tuple[str, Ranks], ...]) -> None:
    """Raise what planning found, if ranks would use a mesh that they share in different ways."""
    if conflict:
        shown = {mode.strip("/") or "default": ranks for mode, ranks in conflict}
        raise Disagreement(
            "planning",
            "sharded_mode, control backend or process group",
            shown,
            advice="Ranks that share a mesh must build the optimizer with the same mode.",
        )


def late_ranks(phase: str, broken: AgreementBroken) -> LateRanks:
    """Return the error for an agreement that did not come about."""
    absent = broken.absence
    return LateRanks(
        phase,
        absent.late,
        absent.phases,
        seconds=absent.seconds,
        reason=absent.reason,
        gone=absent.gone,
        silent=absent.silent,
        stacks=absent.stacks,
    )


def broken_error(vote: Vote, own: tuple[Failure, ...], broken: AgreementBroken) -> ConsensusError:
    """Return the error for an agreement that did not come about, root causes first.

    A rank that failed must raise its own failure, not the transport's; a rank whose peer reported
    a failure before it gave up must raise that one.
    """
    absent = broken.absence
    failures = {failure.rank: failure for failure in (*absent.failures, *own)}
    if failures:
        return GroupFailure(
            vote.phase,
            tuple(failures[rank] for rank in sorted(failures)),
            recoverable=False,
            late_ranks=absent.late,
            gone=absent.gone,
            stacks=absent.stacks,
            advice=f"{_CLOSED if absent.closed else _LOST} ({tidy(absent.reason)}).",
        )
    if absent.closed:
        return ConsensusError(f"{vote.phase}: {_CLOSED} ({tidy(absent.reason)}); start again")
    return late_ranks(vote.phase, broken)


def _where_apart(apart: tuple[Ranks, ...]) -> str:
    whose = " and of ".join(map(join_ranks, apart[:MAX_LINES]))
    more = " and of others" if len(apart) > MAX_LINES else ""
    return (
        f"the data-plane groups of {whose}{more} are not at the same collective on each of these "
        "ranks; restart from a checkpoint."
    )


def _disagreement(phase: str, differences: tuple[Difference, ...]) -> Disagreement:
    first, *others = differences
    more = [f"also {other.name}: {who_holds(other.values)}" for other in others[: MAX_LINES - 1]]
    if len(others) >= MAX_LINES:
        more.append(f"and {len(others) - MAX_LINES + 1} more differences")
    return Disagreement(
        phase, first.name, dict(first.values), more=tuple(more), advice=first.advice
    )

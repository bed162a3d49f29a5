"""Where a caller enters: any_failed, agree_range, agree_same, fail_together.

All are the same protocol: one vote, one decision, the same outcome on every rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from consensus import _capture, _seams
from consensus._absence import AgreementBroken
from consensus._compile import untraced
from consensus._nesting import nesting
from consensus._sources import Source
from consensus._text import bounded, message_of, short_name, traceback_of, type_names
from consensus._verdict import broken_error, error_of
from consensus._wire import number_key
from consensus.errors import Failure, GroupFailure
from consensus.groups import ControlGroup, control_device, control_group
from consensus.vote import Decision, Fact, Number, RangeOf, Ranks, Vote

FAILED_WAIT_S = 30.0  # how long a rank that failed waits for its peers before it raises alone
FATAL_WAIT_S = 2.0  # the same for KeyboardInterrupt, SystemExit and their like


@dataclass(frozen=True, slots=True)
class ControlRange:
    """Lowest and highest value of each control over the group, in the order they were given."""

    minimum: tuple[Number, ...]
    maximum: tuple[Number, ...]
    disagreeing: tuple[str, ...]  # names of the controls that are not equal on all ranks
    names: tuple[str, ...] = ()  # of all controls

    @property
    def unanimous(self) -> bool:
        """Whether every control is equal on all ranks; NaN equals NaN, 1 equals 1.0."""
        return not self.disagreeing


@untraced
def any_failed(
    failed: bool | Tensor,
    group: Source = None,
    *,
    device: torch.device | str | None = None,
    timeout: float | None = None,
) -> bool:
    """Return whether ``failed`` is true on any member, the same on every member.

    Args:
        failed: This rank's flag; a one-element tensor is read.
        group: A ControlGroup, process group, mesh, optimizer or None for all ranks.
        device: Checked against what the group can carry; control tensors live where
            :func:`control_device` says.
        timeout: Hard deadline in seconds; None is the group's own.

    Returns:
        ``failed`` unchanged when not distributed or alone.

    Raises:
        GroupFailure: On every member, when an argument of one cannot be used.
        PhaseMismatch: A member is in another agreement.
        LateRanks: A member did not come.

    Collectives:
        One message of 2 int64, reduced by maximum, when all flags are equal; a second when they
        are not. Every member must call.
    """
    with reading("any_failed", group, device, timeout) as control:
        ranges: list[tuple[str, Number]] = [("failed", bool(failed))]
    return bool(_agree_ranges("any_failed", ranges, control, timeout)[0].maximum)


@untraced
def agree_range(
    values: Iterable[Number | Tensor],
    group: Source = None,
    *,
    names: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    timeout: float | None = None,
) -> ControlRange:
    """Return minimum and maximum of each value over the group, exactly.

    NaN on any rank is that control's maximum; -0.0 equals 0.0; ints up to int64 and floats
    compare by value. Values that differ are no failure.

    Args:
        values: Ints that fit int64, floats, bools, one-element tensors; equally many everywhere.
        group: As in :func:`any_failed`.
        names: One a value, for messages and :attr:`ControlRange.disagreeing`.
        device: As in :func:`any_failed`.
        timeout: Hard deadline in seconds; None is the group's own.

    Raises:
        GroupFailure: On every member, when an argument of one cannot be used: an int outside
            int64, a tensor of another size, an unequal number of names.
        ValueError: The same, unwrapped, when not distributed or alone.
        PhaseMismatch: A member is in another agreement.
        LateRanks: A member did not come.

    Collectives:
        One message of 2 int64, reduced by maximum, when all are equal; a second of 23 int64 a rank
        when not; a third when there are more than 8 values. Every member must call.
    """
    with reading("agree_range", group, device, timeout) as control:
        listed = _named(values, names)
    phase = f"agree_range({', '.join(name for name, _ in listed)})"
    found = _agree_ranges(phase, listed, control, timeout)
    return ControlRange(
        minimum=tuple(item.minimum for item in found),
        maximum=tuple(item.maximum for item in found),
        disagreeing=tuple(item.name for item in found if not item.unanimous),
        names=tuple(item.name for item in found),
    )


@untraced
def agree_same(
    value: Any,
    group: Source = None,
    *,
    name: str = "value",
    device: torch.device | str | None = None,
    timeout: float | None = None,
) -> None:
    """Raise :class:`Disagreement` on every member unless all bring an equal ``value``.

    Args:
        value: bytes, an int digest, or anything that JSON can hold.
        group: As in :func:`any_failed`.
        name: What it is, for the message.
        device: As in :func:`any_failed`.
        timeout: Hard deadline in seconds; None is the group's own.

    Raises:
        Disagreement: Two members bring different values; the message says who holds what.
        GroupFailure: On every member, when JSON cannot hold the ``value`` of one.
        TypeError: The same, unwrapped, when not distributed or alone.
        PhaseMismatch: A member is in another agreement.
        LateRanks: A member did not come.

    Collectives:
        One message of 2 int64, reduced by maximum, when all are equal; two more when not. Every
        member must call.
    """
    phase = f"agree_same({name})"
    with reading(phase, group, device, timeout) as control:
        fact = same_fact(name, value)
    if not control.is_local:
        hold(control, Vote(phase, facts=(fact,)), timeout=timeout)


class fail_together:
    """A block that ends in one agreement: if it raised on any rank, every rank raises.

    Collectives:
        On leaving: one message of 2 int64, reduced by maximum, when no rank failed; two more when
        one did. The first block on a group also plans (see :meth:`ControlGroup.prepare`). Every
        member must enter.

    Raises:
        GroupFailure: On every member; the original exception is the ``__cause__`` where it was
            raised. KeyboardInterrupt and the like are told to the peers, then raised as they are.
        LateRanks: A member did not come. A rank that failed waits at most 30 seconds (2 after a
            KeyboardInterrupt) for the others, then raises its own failure and names them.
        RuntimeError: On entering inside the capture of a CUDA graph, as in all functions here; the
            block may be around the capture.
    """

    def __init__(self, phase: str, group: Source = None, *, timeout: float | None = None) -> None:
        """Name the block, the same on every rank, and who must agree on how it ended."""
        self.phase = phase
        self._source = group
        self._timeout = timeout
        self._facts: list[Fact] = []

    def same(self, name: str, value: Any, *, ranks: Ranks = ()) -> None:
        """Bring a value that must be equal on all members when the block ends without an error.

        Args:
            name: What it is, for the message.
            value: As for :func:`agree_same`.
            ranks: Compare it among these only; see :meth:`preflight.same`.
        """
        self._facts.append(same_fact(name, value, ranks))

    @untraced
    def __enter__(self) -> fail_together:
        """Plan the group if that has not been done; every member does."""
        self._group = _group_to_agree_in(self.phase, self._source).prepare(self._timeout)
        self._open = nesting().enter(self._group.channel)
        return self

    @untraced
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        """Vote on how the block ended."""
        nesting().leave(self._open)
        if self._group.is_local or self._open.passes(error):
            return False
        vote = Vote(self.phase, facts=tuple(self._facts) if error is None else ())
        hold(self._group, vote, error=error, timeout=self._timeout)
        return False


# ---- one agreement ----


def hold(
    group: ControlGroup,
    vote: Vote,
    *,
    error: BaseException | None = None,
    timeout: float | None = None,
) -> Decision:
    """Hold one agreement and raise what the group decides; ``error`` is this rank's own failure."""
    if not _seams.agreement:
        ranges = tuple(RangeOf(n, value, value) for n, value in vote.ranges)
        return Decision(0, ranges=ranges, sums=vote.counts)
    nesting().refuse(group.channel)
    fatal = error is not None and not isinstance(error, Exception)
    if error is not None:
        failures = failures_of(error, torch.distributed.get_rank(), vote.phase)
        vote = Vote(vote.phase, failures, fatal, vote.facts, vote.ranges)
        patience = FATAL_WAIT_S if fatal else FAILED_WAIT_S
        timeout = min(patience, group.hard_deadline if timeout is None else timeout)
    try:
        decision = group.vote(vote, timeout=timeout)
        decided = error_of(decision, vote)
    except AgreementBroken as broken:
        decision, decided = None, broken_error(vote, vote.failures, broken)
    if isinstance(decided, GroupFailure) and group.channel is not None:
        group.channel.wounded = True
        if decision is not None:
            group.renew_inside()
        if decided.fatal:
            group.close("a rank left for good")
    if fatal:
        assert error is not None
        raise error
    if decided is not None:
        nesting().decide(group.channel, decided)
        raise decided from error
    assert decision is not None
    return decision


def failures_of(error: BaseException, rank: int, phase: str) -> tuple[Failure, ...]:
    """Return what this rank reports: its exception, or the root causes a nested group found."""
    if isinstance(error, GroupFailure) and error.failures:
        return error.failures
    return (
        Failure(
            rank,
            short_name(type(error)),
            message_of(error),
            traceback_of(error),
            type_names(error),
            phase,
        ),
    )


def same_fact(name: str, value: Any, scope: Ranks = ()) -> Fact:
    """Return a fact that holds ``value``, to be equal on all members, or on those of a scope."""
    if isinstance(value, bytes):
        key = b"bytes " + value
        shown = f"{len(value)} bytes, {hashlib.sha256(value).hexdigest()[:12]}"
    else:
        text = json.dumps(value, sort_keys=True)
        key, shown = b"json " + text.encode(), bounded(text, 200)
    if len(key) > 32:
        key = hashlib.blake2b(key, digest_size=32).digest()
    return Fact(name, key, lambda: {"": shown}, scope)


def scalar(value: Number | Tensor) -> Number:
    """Return a number that can be sent; a tensor is read, which waits for its device.

    Raises:
        ValueError: A tensor of more than one element, or an int outside of int64.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"expected a one-element tensor; got {value.shape=}")
        value = value.item()
    number_key(value)
    return value


def _named(
    values: Iterable[Number | Tensor], names: Sequence[str] | None
) -> list[tuple[str, Number]]:
    numbers = [scalar(value) for value in values]
    labels = list(names) if names is not None else [f"value {i}" for i in range(len(numbers))]
    if len(labels) != len(numbers):
        raise ValueError(f"expected one name a value; got {len(labels)} for {len(numbers)} values")
    return list(zip(labels, numbers, strict=True))


def _agree_ranges(
    phase: str, ranges: list[tuple[str, Number]], control: ControlGroup, timeout: float | None
) -> tuple[RangeOf, ...]:
    if control.is_local:
        return tuple(RangeOf(name, value, value) for name, value in ranges)
    return hold(control, Vote(phase, ranges=tuple(ranges)), timeout=timeout).ranges


@contextmanager
def reading(
    phase: str, source: Source, device: torch.device | str | None, timeout: float | None
) -> Iterator[ControlGroup]:
    """Hand out the group to read arguments for: one that is unusable is told to its members."""
    group = _group_to_agree_in(phase, source).prepare(timeout)
    try:
        if device is not None and not group.is_local:
            control_device(source, hint=device)
        yield group
    except Exception as error:
        if not group.is_local:
            hold(group, Vote(phase), error=error, timeout=timeout)
        raise


def _group_to_agree_in(phase: str, source: Source) -> ControlGroup:
    group = control_group(source)
    group.is_kept = isinstance(source, ControlGroup | Optimizer)
    if _capture.is_capturing() and not group.is_local:
        raise RuntimeError(
            f"{phase}: an agreement cannot be part of a CUDA graph: it would be held once, in the "
            "capture, and in no replay. Hold it outside of the capture."
        )
    return group

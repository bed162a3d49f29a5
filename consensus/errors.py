"""What a caller can meet: one family of errors, the same class on every rank of a decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consensus._text import join_ranks, qualified_name, ranks_are, says_transport, tidy
from consensus._wire import number_key

# A message stays readable whatever the number of ranks; the attributes hold everything.
MAX_CAUSES = 16  # lines
MAX_PHASES = 8
MAX_VALUES = 8
MAX_STACK_LINES = 40


@dataclass(frozen=True, slots=True)
class Failure:
    """What one rank reported: its exception as text, since any exception must survive the trip."""

    rank: int  # global
    type_name: str  # "ValueError", "torch.OutOfMemoryError"
    message: str  # str(exception), bounded
    traceback: str  # formatted, bounded; empty when the exception has none
    type_names: tuple[str, ...] = ()  # qualified names along the MRO, for caused_by
    phase: str = ""  # where this rank was

    def headline(self) -> str:
        """Return "ValueError: boom", or the type alone when there is no message."""
        text = tidy(self.message) if says_transport(self.message) else self.message
        return f"{self.type_name}: {text}" if text else self.type_name


class ConsensusError(RuntimeError):
    """Base of every error this library raises about a group of ranks."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by state: the keyword arguments of the subclasses are not in ``args``."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[ConsensusError], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class GroupFailure(ConsensusError):
    """At least one rank failed in a phase, so every rank of the group raises this.

    On a failing rank the original exception is ``__cause__``. The text of the original errors
    is part of ``args[0]``, so a caller that matches on the message still finds it.

    Attributes:
        phase: The phase this rank was in.
        failures: One :class:`Failure` a failing rank, ordered by rank.
        recoverable: False when the ranks' data-plane groups are not in the same position, when a
            rank is gone or late, or when the failure was fatal: training must not go on.
        fatal: A rank is leaving for good (KeyboardInterrupt, SystemExit, ...).
        phases: Where every rank was, when not all were in the same phase.
        late_ranks: Ranks that had not come when the agreement was given up, or are gone.
        gone: As in :class:`LateRanks`, of ``late_ranks``.
        stacks: As in :class:`LateRanks`.
    """

    def __init__(
        self,
        phase: str,
        failures: tuple[Failure, ...],
        *,
        recoverable: bool = True,
        fatal: bool = False,
        phases: Mapping[int, str] | None = None,
        late_ranks: tuple[int, ...] = (),
        gone: tuple[int, ...] = (),
        stacks: Mapping[int, str] | None = None,
        advice: str = "",
    ) -> None:
        """Compose the message; every argument is kept as an attribute."""
        self.phase = phase
        self.failures = failures
        self.recoverable = recoverable and not fatal and not late_ranks
        self.fatal = fatal
        self.phases = dict(phases or {})
        self.late_ranks = late_ranks
        self.gone = gone
        self.stacks = dict(stacks or {})
        super().__init__(self._compose(advice))

    def caused_by(self, kind: type[BaseException]) -> bool:
        """Return whether any rank failed with ``kind`` or a subclass; equal on all ranks."""
        name = qualified_name(kind)
        return any(name in failure.type_names for failure in self.failures)

    def _compose(self, advice: str) -> str:
        ranks = tuple(failure.rank for failure in self.failures)
        absent = _absent(self.late_ranks, self.gone)
        what = f"{self.phase} failed on {join_ranks(ranks)}"
        if self.gone and all(says_transport(failure.message) for failure in self.failures):
            what = f"{self.phase}: {absent.pop(0)}"  # and the failures are what came of that
        lines = [f"{what}, so every rank of the group stops"]
        causes = _by_headline(self.failures).items()
        lines += _fit([f"  {join_ranks(same)}: {text}" for text, same in causes], MAX_CAUSES)
        if len(set(self.phases.values())) > 1:
            lines += _fit([f"  {where}" for where in _where(self.phases)], MAX_PHASES)
        lines += [f"  {each}" for each in absent]
        lines += stack_lines(self.stacks, MAX_STACK_LINES)
        if not self.recoverable:
            lines.append("  The group cannot go on: " + (advice or _why_not(self)))
        return "\n".join(lines)


def _why_not(error: GroupFailure) -> str:
    if error.fatal:
        return "a rank is leaving for good."
    if error.late_ranks:
        return "the ranks are not in the same place; restart from a checkpoint."
    return (
        "the data-plane groups are not at the same collective on all ranks; "
        "restart from a checkpoint."
    )


class Disagreement(ConsensusError):
    """Ranks that must hold equal values do not; raised on every rank, nothing was written.

    Attributes:
        phase: The phase in which it was found.
        name: What differs ("options: group 0 lr", "gradients: layers.3.weight").
        values: The value as text -> the ranks that hold it.
        minimum: Smallest of the values when they are numbers, else None.
        maximum: Largest of the values when they are numbers, else None.
    """

    def __init__(
        self,
        phase: str,
        name: str,
        values: Mapping[str, tuple[int, ...]],
        *,
        more: tuple[str, ...] = (),
        advice: str = "",
    ) -> None:
        """Compose the message from the first difference and the lines of further ones."""
        self.phase = phase
        self.name = name
        self.values = dict(values)
        self.minimum, self.maximum = _ends(self.values)
        shown = who_holds(tuple(self.values.items()))
        lines = [f"{phase}: ranks disagree about {name}: {shown}", *(f"  {line}" for line in more)]
        super().__init__("\n".join([*lines, *([f"  {advice}"] if advice else [])]))


class PhaseMismatch(ConsensusError):
    """Ranks met in one agreement while they were in different phases of the program.

    Attributes:
        phases: Rank -> the phase it was in, for every rank of the group.
    """

    def __init__(self, phases: Mapping[int, str]) -> None:
        """Compose the message, ranks grouped by phase."""
        self.phases = dict(phases)
        where = "; ".join(map(str.strip, _fit(_where(phases), MAX_PHASES)))
        super().__init__(
            f"ranks met in different phases: {where}. "
            "Every rank must reach the same agreements in the same order."
        )


class LateRanks(ConsensusError):
    """Ranks did not come to an agreement before its deadline, or are gone.

    Attributes:
        phase: The phase in which this rank waited.
        ranks: Ranks that had not come when the agreement was given up, or are gone; none if the
            job's store cannot be asked.
        phases: Rank -> the phase it last posted; a rank that never had to wait has posted none.
        seconds: How long this rank waited.
        gone: Those of ``ranks`` whose connection broke, as it does when a process ends; none when
            a deadline passed. The others may wait where a rank that is gone keeps them.
        stacks: Rank -> where its Python threads were when this rank asked, or why it did not say;
            of the first few of ``ranks``, if this rank called :func:`watch`. The message holds the
            beginning.
    """

    def __init__(
        self,
        phase: str,
        ranks: tuple[int, ...],
        phases: Mapping[int, str] | None = None,
        *,
        seconds: float = 0.0,
        reason: str = "",
        gone: tuple[int, ...] = (),
        silent: bool = False,
        stacks: Mapping[int, str] | None = None,
    ) -> None:
        """Compose the message; ``reason`` is the transport's own text, if it gave one.

        With ``silent`` the job's store could not be asked who is missing.
        """
        self.phase = phase
        self.ranks = ranks
        self.phases = dict(phases or {})
        self.seconds = seconds
        self.gone = gone
        self.stacks = dict(stacks or {})
        if gone:
            first, *more = _absent(ranks, gone)
            lines = [f"{phase}: {first}", *(f"  {each}" for each in more)]
        elif ranks:
            lines = [f"{phase}: {join_ranks(ranks)} did not come within {seconds:.1f} s"]
        elif silent:
            lines = [
                f"{phase}: the agreement broke after {seconds:.1f} s, and the job's store cannot "
                "be asked who is missing"
            ]
        else:
            lines = [
                f"{phase}: the agreement broke after {seconds:.1f} s, and the store names nobody "
                "as missing: this rank may have come when the others had given up"
            ]
        seen = _invert(self.phases).items()
        lines += _fit([f"  {join_ranks(who)} last seen in {at!r}" for at, who in seen], MAX_PHASES)
        lines += stack_lines(self.stacks, MAX_STACK_LINES)
        if reason:
            lines.append(f"  the transport said: {tidy(reason)}")
        super().__init__("\n".join(lines))


class EnclosureError(ConsensusError):
    """No control group can enclose the ranks that are about to meet in collectives."""


def _absent(late: tuple[int, ...], gone: tuple[int, ...]) -> list[str]:
    """Say which ranks are gone, and which of the others had not come; ``late`` holds both."""
    texts = []
    if gone:
        whose = "its connection" if len(gone) == 1 else "their connections"
        texts.append(f"{join_ranks(gone)} {ranks_are(gone)} gone, {whose} broke")
    if others := tuple(rank for rank in late if rank not in gone):
        before = "by then" if gone else "to this agreement"
        texts.append(f"{join_ranks(others)} had not come {before}")
    return texts


def _by_headline(failures: tuple[Failure, ...]) -> dict[str, tuple[int, ...]]:
    """Collapse equal errors: what was said -> the ranks that said it; consequences come last."""
    said: dict[str, tuple[int, ...]] = {}
    for failure in sorted(failures, key=lambda each: says_transport(each.message)):
        text = failure.headline()
        said[text] = (*said.get(text, ()), failure.rank)
    return said


def _invert(phases: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    where: dict[str, tuple[int, ...]] = {}
    for rank, phase in sorted(phases.items()):
        where[phase] = (*where.get(phase, ()), rank)
    return where


def _where(phases: Mapping[int, str]) -> list[str]:
    return [
        f"{join_ranks(ranks)} {ranks_are(ranks)} in {phase!r}"
        for phase, ranks in _invert(phases).items()
    ]


def stack_lines(stacks: Mapping[int, str], limit: int) -> list[str]:
    """Return up to ``limit`` lines that say where ranks are, those at the same place together."""
    texts = [f"  {join_ranks(who)}: {text}" for text, who in _invert(stacks).items()]
    return _fit([text.replace("\n", "\n    ") for text in texts], limit)


def who_holds(values: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    """Return "0.1 on rank 0; 0.2 on ranks 1-3", the first few of many."""
    texts = [f"{value} on {join_ranks(who)}" for value, who in values]
    return "; ".join(map(str.strip, _fit(texts, MAX_VALUES)))


def _fit(texts: Sequence[str], limit: int) -> list[str]:
    """Return at most ``limit`` lines of ``texts``, a fair share of each, and what is left out."""
    shown = texts[:limit]
    lines: list[str] = []
    for text in shown:
        own = text.split("\n")
        share = max(1, limit // len(shown))
        lines += own if len(own) <= share else [*own[: share - 1], f"{own[share - 1]} ..."]
    return lines if len(shown) == len(texts) else [*lines, f"  and {len(texts) - limit} more"]


def _ends(
    values: Mapping[str, tuple[int, ...]],
) -> tuple[int | float | None, int | float | None]:
    try:
        numbers = [_number(value) for value in values]
        return min(numbers, key=number_key), max(numbers, key=number_key)
    except ValueError:  # not all of them are numbers that can be told apart, or there is none
        return None, None


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)

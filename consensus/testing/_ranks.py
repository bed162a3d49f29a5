"""What comes back from ranks that ran: results, their errors as plain data, a readable report."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast, overload

T_co = TypeVar("T_co", covariant=True)

_OUTPUT_LINES = 20  # of a failed rank, in a report
_CHAIN_LIMIT = 8  # causes kept of one error; a chain can be a cycle


class RankError(AssertionError):
    """At least one rank raised, hung or died; the text says for each rank what it did."""


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """One exception as plain data, since not every exception survives the way to another process.

    Attributes:
        type_name: "ValueError".
        qualified_name: "builtins.ValueError".
        type_names: Qualified names of the type and its bases, the type itself first.
        message: ``str(exception)``, or a remark when that raised.
        traceback: The formatted traceback, with its causes.
        exception: The exception itself, or None when it could not be pickled or rebuilt. One that
            came from another process has lost its traceback and its cause.
        cause: The record of its ``__cause__``, without the exception itself.
    """

    type_name: str
    qualified_name: str
    type_names: tuple[str, ...]
    message: str
    traceback: str
    exception: BaseException | None = None
    cause: ErrorRecord | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorRecord:
        """Return the record of ``error`` and its causes, without the exception objects."""
        return _record(error, _CHAIN_LIMIT)

    def is_a(self, kind: type[BaseException]) -> bool:
        """Return whether the exception was a ``kind`` or of a subclass, by qualified name."""
        return _qualified_name(kind) in self.type_names


@dataclass(frozen=True, slots=True)
class RankResult(Generic[T_co]):
    """What one rank did.

    Attributes:
        rank: Its global rank.
        value: What the function returned; its ``repr`` when that could not be pickled; None when
            it did not return.
        error: What it raised, or None.
        exitcode: As ``multiprocessing``: negative for the signal that ended it. None for a rank
            that did not end by itself, and for a thread.
        hung: It had not ended at the deadline.
        stack: Of a hung rank: where each of its threads was, or why that is not known. Else empty.
        output: What the process wrote to stdout and stderr, and remarks of this kit. A thread's
            output is not captured.
        seconds: From the start of the run until this rank ended, or the deadline.
        returned: The function came to its end. Apart from ``value``, which may rightly be None.
    """

    rank: int
    value: T_co | None
    error: ErrorRecord | None
    exitcode: int | None
    hung: bool
    stack: str
    output: str
    seconds: float
    returned: bool

    @property
    def failed(self) -> bool:
        """Whether the rank raised, hung, died, or ended in any way without returning."""
        return self.hung or not self.returned or self.exitcode not in (None, 0)


@dataclass(frozen=True, slots=True)
class Ranks(Sequence[RankResult[T_co]]):
    """The results of all ranks of one run, in rank order."""

    results: tuple[RankResult[T_co], ...]

    @overload
    def __getitem__(self, index: int) -> RankResult[T_co]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RankResult[T_co], ...]: ...
    def __getitem__(self, index: int | slice) -> RankResult[T_co] | tuple[RankResult[T_co], ...]:
        return self.results[index]

    def __len__(self) -> int:
        return len(self.results)

    def values(self) -> tuple[T_co, ...]:
        """Return what each rank returned.

        Raises:
            RankError: A rank raised, hung or died.
        """
        if any(result.failed for result in self.results):
            raise RankError(self.report())
        return tuple(cast("T_co", result.value) for result in self.results)

    def errors(self) -> tuple[ErrorRecord | None, ...]:
        """Return what each rank raised; None for a rank that raised nothing."""
        return tuple(result.error for result in self.results)

    @property
    def hung(self) -> tuple[int, ...]:
        """The ranks that had not ended at the deadline."""
        return tuple(result.rank for result in self.results if result.hung)

    def report(self) -> str:
        """Return what every rank did, the failed ones in detail."""
        failed = [result.rank for result in self.results if result.failed]
        head = f"{len(failed)} of {len(self.results)} ranks failed: {failed}"
        return "\n".join([head, *map(describe, self.results)])


def describe(result: RankResult[object], output_lines: int = _OUTPUT_LINES) -> str:
    """Return what one rank did; when it failed, its traceback or stack and its last output."""
    head = f"--- rank {result.rank} {_ending(result)} ({result.seconds:.2f} s)"
    if not result.failed:
        return head
    details = [result.error.traceback] if result.error is not None else []
    if result.hung:
        details.append(result.stack)
    lines = result.output.splitlines()
    if lines and output_lines:
        details.append("\n".join(["last output:", *lines[-output_lines:]]))
    return "\n".join([head, *(_indented(text) for text in details)])


def _ending(result: RankResult[object]) -> str:
    if result.hung:
        return "hung"
    if result.error is not None:
        return f"raised {result.error.qualified_name}: {result.error.message}"
    if not result.failed:
        return "returned"
    after = "returned, then " if result.returned else ""
    if result.exitcode is None:
        return f"{after}was stopped"
    if result.exitcode < 0:
        return f"{after}was killed by {_signal_name(-result.exitcode)}"
    return f"{after}ended with exit code {result.exitcode}" + ("" if after else ", no result")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _record(error: BaseException, depth: int) -> ErrorRecord:
    cause = error.__cause__
    kind = type(error)
    return ErrorRecord(
        type_name=kind.__name__,
        qualified_name=_qualified_name(kind),
        type_names=tuple(_qualified_name(base) for base in kind.__mro__),
        message=_message(error),
        traceback="".join(traceback.format_exception(error)),
        cause=None if cause is None or depth == 0 else _record(cause, depth - 1),
    )


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # a broken __str__ must not hide the failure
        return f"<str() of this exception raised {type(broken).__name__}>"

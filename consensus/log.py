"""The agreement log: what this process agreed on lately, as records and as a trace.

    for agreement in consensus.log.records():
        print(agreement.phase, agreement.decision, agreement.duration_ns)

    consensus.log.dump(f"agreements.{rank}.json")  # on each rank, as it ends or fails
    consensus.log.merge(["agreements.0.json", ...], "agreements.json")  # anywhere, later

Traces are Chrome's JSON; open one in Perfetto or chrome://tracing. While a torch profiler runs,
each agreement is also a range in the profiler's own trace, named by its phase.

[Note: what lines up with what]
Starts are Unix time in nanoseconds, as in the profiler's traces and in the flight recorder. An
agreement is known by its channel and sequence number, equal on all of its ranks. ``data_plane``
holds, for each group that moves data in its scope, the number of its last collective when the
agreement began: the ``collective_seq_id`` of the flight recorder.

Planning and the making of a control group are logged too; planning under the first scope of each
rank, so its name may differ between them. Both go over the store, which ranks leave at different
moments, so no clock is set by them.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from torch.autograd import profiler
from torch.profiler import record_function

from consensus import _trace
from consensus._absence import AgreementBroken, Meeting
from consensus._trace import Agreement, Clock
from consensus._waiting import logger
from consensus.errors import EnclosureError
from consensus.vote import Decision, Vote

__all__ = ["Agreement", "Clock", "clear", "dump", "merge", "records"]

MAX_RECORDS = 4096  # the last ones are kept; some 500 bytes each

# Of the process, not of a process group: it is read when that is gone. Ranks that are threads share
# it, and each record names its rank.
_records: deque[Agreement] = deque(maxlen=MAX_RECORDS)


def records() -> tuple[Agreement, ...]:
    """Return the agreements that this process held or waited for, the last 4096, oldest first."""
    return tuple(_records)


def clear() -> None:
    """Forget all records."""
    _records.clear()


def dump(path: str | os.PathLike[str]) -> None:
    """Write the records as a Chrome trace, one track a rank.

    Args:
        path: The file, replaced if it exists; name it by rank.

    Collectives:
        None: a rank may call it alone, also after a failure.
    """
    Path(path).write_text(json.dumps(_trace.trace_of(records())))


def merge(
    paths: Iterable[str | os.PathLike[str]], path: str | os.PathLike[str]
) -> tuple[Clock, ...]:
    """Write one trace from those that several ranks dumped, with their clocks corrected.

    All ranks leave an agreement at about the same moment, when the last one has come. So each
    file's clock is moved by one constant, the median difference of the ends of the agreements that
    it shares with the first file, or with one that is corrected already. That is as good as one
    message takes, some 100 us, and does not see clocks that drift apart while they are logged.

    Args:
        paths: Files that :func:`dump` wrote; the first one's clock is kept.
        path: The file to write.

    Returns:
        How each file's clock was moved, in the order of ``paths``.

    Raises:
        ValueError: One of the files holds no trace of this library.
    """
    names = [os.fspath(each) for each in paths]
    merged, clocks = _trace.merged([_read(name) for name in names])
    for name, clock in zip(names, clocks, strict=True):
        if clock.agreements == 0 and name != names[0]:
            logger.warning("%s shares no agreement with the others: its clock is kept", name)
    Path(path).write_text(json.dumps(merged))
    return clocks


def _read(name: str) -> Sequence[Agreement]:
    try:
        return _trace.agreements_in(json.loads(Path(name).read_text()))
    except (ValueError, KeyError, TypeError) as error:  # JSON's errors are ValueErrors
        raise ValueError(
            f"expected a trace that consensus.log.dump wrote; {name} is none: {error!r}"
        ) from None


class recording:
    """A block around one agreement: a record in the log, a range of the profiler if one runs.

    Attributes:
        decision: To be set when the agreement has come about; of a vote only.
        members: How many ranks agree.
    """

    __slots__ = (
        "_begun",
        "_data_plane",
        "_meeting",
        "_phase",
        "_range",
        "_rank",
        "_vote",
        "decision",
        "disagreed",
        "members",
    )

    def __init__(
        self,
        rank: int,
        phase: str,
        meeting: Meeting,
        vote: Vote | None = None,
        data_plane: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """Note that ``rank`` comes to this meeting, with a vote if it is one on a channel."""
        self._rank, self._phase, self._meeting = rank, phase, meeting
        self._vote, self._data_plane = vote, data_plane
        self.decision: Decision | None = None
        self.disagreed = False  # where no decision says so
        self.members = len(meeting.members)
        self._range: record_function | None = None

    def __enter__(self) -> recording:
        """Begin a range, which takes 5 us and so is left out where nobody would see it."""
        if profiler._is_profiler_enabled:
            self._range = record_function(self._phase)
            self._range.__enter__()  # type: ignore[no-untyped-call]
        self._begun = (time.time_ns(), time.monotonic_ns())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Note how it ended; an error goes on as it is."""
        start, begun = self._begun
        vote, decision = self._vote, self.decision
        _records.append(
            Agreement(
                self._rank,
                self._phase,
                self._meeting.name,
                self._meeting.number,
                None if vote is None else _step_of(vote),
                start,
                time.monotonic_ns() - begun,
                None if decision is None else decision.messages + bool(decision.sums),
                _outcome(error, self.disagreed) if decision is None else _word(decision),
                self.members,
                self._data_plane,
            )
        )
        if self._range is not None:
            self._range.__exit__(kind, error, trace)


def _step_of(vote: Vote) -> int | None:
    for fact in vote.facts:
        if fact.name == "step" and fact.key.isdigit():
            return int(fact.key)
    return None


def _word(decision: Decision) -> str:
    """Return what was decided, in one word; in the order in which one outranks the other."""
    if decision.failures:
        return "fatal" if decision.fatal else "failed"
    return "mismatch" if decision.phases else "disagreed" if decision.differences else "agreed"


def _outcome(error: BaseException | None, disagreed: bool) -> str:
    """Return what came of it, in one word, where no decision says so."""
    if isinstance(error, AgreementBroken):
        return "gone" if error.absence.gone else "late"
    if isinstance(error, EnclosureError):
        return "refused"
    if error is not None:
        return "interrupted"
    return "disagreed" if disagreed else "agreed"

"""Agreements as a Chrome trace and back, and the clocks of several ranks set to one. Pure.

See [Note: what lines up with what] in `log`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple, TypeAlias

BASE = "baseTimeNanoseconds"  # torch's profiler calls it so: times of events count from here

Trace: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, int]  # channel and sequence number: the same agreement on all ranks


class Agreement(NamedTuple):
    """One agreement as one rank saw it.

    Attributes:
        rank: The global rank.
        phase: Where this rank was.
        channel: Name of the control group, or of what is planned; not used twice with one number.
        sequence: Number of the agreement on its channel; equal on all ranks.
        step: Of the optimizer, in a step that came to its vote without an error; else None.
        start_ns: When this rank came, in Unix time.
        duration_ns: Until it left, waiting for others included.
        messages: How many it took; None when it did not come about, and for planning and the making
            of a control group.
        decision: "agreed" (to go on, or to skip), "failed", "fatal", "mismatch" (of phases),
            "disagreed"; or what ended it: "late" (ranks had not come when a deadline passed, or
            when a connection broke and nobody knows whose), "gone" (a rank's connection broke),
            "refused" (no such group can be made), "interrupted".
        members: How many ranks vote.
        data_plane: (group name, number of its last collective) on coming, for each group that
            moves data among the ranks of this vote and is known to the control group.
    """

    rank: int
    phase: str
    channel: str
    sequence: int
    step: int | None
    start_ns: int
    duration_ns: int
    messages: int | None
    decision: str
    members: int
    data_plane: tuple[tuple[str, int], ...] = ()


class Clock(NamedTuple):
    """How the clock of one trace was moved.

    Attributes:
        ranks: Whose agreements it holds.
        offset_ns: What was added to its times.
        agreements: How many this is the median of; 0 for the trace that the others are set to,
            and for one that shares none with them.
        spread_ns: Half of these agreements are within this of the median.
    """

    ranks: tuple[int, ...]
    offset_ns: int
    agreements: int
    spread_ns: int


def trace_of(agreements: Sequence[Agreement]) -> Trace:
    """Return a Chrome trace with one track a rank; an empty one of no agreements."""
    base = min((each.start_ns for each in agreements), default=0)
    events: list[Trace] = []
    for rank in sorted({each.rank for each in agreements}):
        track = {"ph": "M", "pid": rank, "tid": 0}
        events += (
            {**track, "name": "process_name", "args": {"name": f"rank {rank}"}},
            {**track, "name": "process_sort_index", "args": {"sort_index": rank}},
            {**track, "name": "thread_name", "args": {"name": "agreements"}},
        )
    events += (_event(each, base) for each in agreements)
    return {"traceEvents": events, BASE: base, "displayTimeUnit": "ms"}


def agreements_in(trace: Trace) -> tuple[Agreement, ...]:
    """Return what :func:`trace_of` was made from."""
    base = int(trace[BASE])
    return tuple(_agreement(event, base) for event in trace["traceEvents"] if event["ph"] == "X")


def _event(each: Agreement, base: int) -> Trace:
    shown = each._asdict()
    start, duration = shown.pop("start_ns"), shown.pop("duration_ns")
    return {
        "name": shown.pop("phase"),
        "cat": "agreement",
        "ph": "X",
        "pid": shown.pop("rank"),
        "tid": 0,
        "ts": (start - base) / 1000,
        "dur": duration / 1000,
        "args": {**shown, "data_plane": dict(each.data_plane)},
    }


def _agreement(event: Trace, base: int) -> Agreement:
    said = dict(event["args"])
    return Agreement(
        rank=event["pid"],
        phase=event["name"],
        start_ns=base + round(event["ts"] * 1000),
        duration_ns=round(event["dur"] * 1000),
        data_plane=tuple(said.pop("data_plane").items()),
        **said,
    )


def merged(traces: Sequence[Sequence[Agreement]]) -> tuple[Trace, tuple[Clock, ...]]:
    """Return one trace of all these, each on a clock of its own, and how these were moved."""
    clocks = clocks_of(traces)
    moved = (
        each._replace(start_ns=each.start_ns + clock.offset_ns)
        for trace, clock in zip(traces, clocks, strict=True)
        for each in trace
    )
    one = trace_of(sorted(moved, key=lambda each: each.start_ns))
    one["metadata"] = {"clocks": [clock._asdict() for clock in clocks]}
    return one, clocks


def clocks_of(traces: Sequence[Sequence[Agreement]]) -> tuple[Clock, ...]:
    """Return how to move the clock of each trace, so that agreements end at once on all ranks.

    The first one stays. The others follow in rounds: whoever shares agreements with those that are
    set is set by the median of what the ends differ by.
    """
    ends = [_ends(trace) for trace in traces]
    found: dict[int, Clock] = {}
    known: dict[Key, int] = {}  # agreement -> its end on a clock that is set
    waiting = list(range(len(traces)))
    while waiting:
        shared = {index: ends[index].keys() & known.keys() for index in waiting}
        for index in [index for index in waiting if shared[index]] or waiting[:1]:
            differences = [known[key] - ends[index][key] for key in shared[index]]
            offset = round(median(differences)) if differences else 0
            spread = round(median([abs(each - offset) for each in differences] or [0]))
            ranks = tuple(sorted({each.rank for each in traces[index]}))
            found[index] = Clock(ranks, offset, len(differences), spread)
            for key, end in ends[index].items():
                known.setdefault(key, end + offset)
            waiting.remove(index)
    return tuple(found[index] for index in range(len(traces)))


def _ends(trace: Sequence[Agreement]) -> dict[Key, int]:
    """Return when votes ended; what broke, planning and making groups, ranks leave one by one."""
    return {
        (each.channel, each.sequence): each.start_ns + each.duration_ns
        for each in trace
        if each.messages is not None
    }

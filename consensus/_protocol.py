"""The agreement as a generator: it yields the collective it wants and is sent what came back.

Pure; no torch. One generator runs on real groups, in a simulator that holds all ranks in one
process, or fed by hand in a unit test. Ranks are sequential and meet only in these collectives,
so the outcome does not depend on the schedule and one simulated run a case is enough.

[Note: three messages at most]
1. The opening: one pair of words a rank set (see `_wire`). All equal and nobody failed: done.
2. Headers: a row of fixed length for every rank, whatever its phase. Rows are concatenated by
   MAX over zeros. They say who failed, who is in which phase, which ranks say the very same
   thing, and hold the first few ranges. Only ranges differ: done.
3. Bodies: the lowest rank of each set of like-minded ranks speaks for all of them, so the size
   does not grow with the number of ranks that agree. Every rank then compares by itself.
   Ranges that do not fit a header travel in the same message, a row for every rank.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from consensus import _wire
from consensus._text import bounded
from consensus.errors import Failure
from consensus.vote import (
    Ballot,
    Decision,
    Difference,
    Number,
    RangeOf,
    Ranks,
    Vote,
    opening,
)

T = TypeVar("T")

INLINE_RANGES = 8  # controls that fit the second message; more take a third
MAX_VOICES = 64  # bodies with details in a third message
BODY_LIMIT = 256 * 1024  # bytes of one body
BRIEF = 512  # bytes of a failure's texts, when they are too many to send whole

OK, FAILED, FATAL = 1, 2, 3  # 0 would be a rank that sent nothing


class AllReduceMax(NamedTuple):
    """Wanted: the elementwise maximum of ``words`` over ``group``, equally many on each rank."""

    group: Ranks
    words: tuple[int, ...]


Protocol: TypeAlias = Generator[AllReduceMax, Sequence[int], T]


@dataclass(frozen=True, slots=True)
class _Header:
    """One rank's row of the second message."""

    status: int
    voice: int  # ranks with equal voices say the same
    phase: int
    short: int  # bytes of a body that holds what decides
    full: int  # bytes of a body that explains it too
    num_ranges: int
    positions: tuple[int, ...]  # one a pair; 0 outside
    ranges: tuple[int, ...]  # INLINE_RANGES numbers

    def words(self) -> tuple[int, ...]:
        head = (self.status, self.voice, self.phase, self.short, self.full, self.num_ranges)
        return (*head, *self.positions, *self.ranges)


Headers: TypeAlias = Mapping[int, _Header]  # in the order of the members
Body: TypeAlias = dict[str, Any]
Heard: TypeAlias = Sequence[tuple[Ranks, Body]]  # what was said, with the ranks that say it


def header_words(num_sets: int) -> int:
    """Return the words of one rank's row; fixed by the plan, so equal in every phase."""
    return 6 + 1 + num_sets + INLINE_RANGES * _wire.NUMBER_WORDS


_ALL_EQUAL = Decision(messages=1)


def decide(vote: Vote, ballot: Ballot) -> Protocol[Decision]:
    """Turn the votes of ``ballot.members`` into one decision, in one to three messages."""
    words: list[int] = []
    for value in opening(vote, ballot):
        absent = value is None
        words += (0, 0) if absent else _wire.FAILED if vote.failures else _wire.pair(value or 0)
    reduced = yield AllReduceMax(ballot.members, tuple(words))
    if _wire.pairs_agree(reduced):
        if not vote.ranges:
            return _ALL_EQUAL
        ranges = tuple(RangeOf(name, value, value) for name, value in vote.ranges)
        return Decision(messages=1, ranges=ranges)
    return (yield from _settle(vote, ballot))


def _settle(vote: Vote, ballot: Ballot) -> Protocol[Decision]:
    short, full = _bodies(vote, ballot)
    headers = yield from _exchange_headers(_header(vote, ballot, short, full), ballot)
    only_ranges = len({(row.status, row.voice) for row in headers.values()}) == 1
    if only_ranges and not vote.failures and len(vote.ranges) <= INLINE_RANGES:
        inline = [row.ranges for row in headers.values()]
        return Decision(messages=2, ranges=_ranges([name for name, _ in vote.ranges], inline))
    heard, numbers = yield from _exchange_bodies(short, full, vote, ballot, headers)
    return _conclude(heard, numbers, headers, ballot)


def _header(vote: Vote, ballot: Ballot, short: bytes, full: bytes) -> _Header:
    status = OK if not vote.failures else FATAL if vote.fatal else FAILED
    reached = vote.positions()
    positions = [
        _wire.digest([b"%d" % at for scope, at in reached if ballot.slot(scope) == slot])
        if ballot.takes_part(slot)
        else 0
        for slot in range(1 + len(ballot.sets))
    ]
    return _Header(
        status,
        voice=_wire.digest([full if vote.failures else short]),
        phase=_wire.digest([_wire.utf8(vote.phase), ballot.sequence.to_bytes(8, "little")]),
        short=len(short),
        full=len(full),
        num_ranges=len(vote.ranges),
        positions=tuple(positions),
        ranges=tuple(_numbers(vote.ranges[:INLINE_RANGES], INLINE_RANGES)),
    )


def _numbers(ranges: Sequence[tuple[str, Number]], count: int) -> list[int]:
    words = [word for _, value in ranges for word in _wire.number_words(value)]
    return words + [0] * (count * _wire.NUMBER_WORDS - len(words))


def _exchange_headers(own: _Header, ballot: Ballot) -> Protocol[Headers]:
    num_sets = len(ballot.sets)
    width = header_words(num_sets)
    words = [0] * (width * len(ballot.members))
    start = ballot.members.index(ballot.rank) * width
    words[start : start + width] = own.words()
    reduced = yield AllReduceMax(ballot.members, tuple(words))
    headers = {}
    for index, rank in enumerate(ballot.members):
        row = reduced[index * width : (index + 1) * width]
        cut = 7 + num_sets
        status, voice, phase, short, full, num_ranges = row[:6]
        positions, ranges = tuple(row[6:cut]), tuple(row[cut:])
        headers[rank] = _Header(status, voice, phase, short, full, num_ranges, positions, ranges)
    return headers


def _stopped(headers: Headers) -> bool:
    """Return whether the group cannot go on, whatever the facts are."""
    return (
        any(row.status != OK for row in headers.values())
        or len({row.phase for row in headers.values()}) > 1
    )


def _voices(headers: Headers) -> list[tuple[Ranks, int]]:
    """Return the ranks that say the same, with the bytes of it; the lowest of them speaks.

    When the group cannot go on, only failures and phases count, and at most MAX_VOICES are heard,
    failing ranks first. Else everybody is heard, since facts may differ by right and only a
    comparison tells: but if there are many voices, without the details.
    """
    stopped = _stopped(headers)
    alike: dict[tuple[int, int], list[int]] = {}
    for rank, row in headers.items():
        says = row.phase if stopped and row.status == OK else row.voice
        alike.setdefault((-row.status, says), []).append(rank)
    order = sorted(alike.items(), key=lambda item: (item[0][0], item[1]))
    explain = not stopped and len(order) <= MAX_VOICES
    return [
        (tuple(ranks), row.full if explain or row.status != OK else row.short)
        for ranks, row in ((ranks, headers[ranks[0]]) for _, ranks in order)
    ][: MAX_VOICES if stopped else None]


def _exchange_bodies(
    short: bytes, full: bytes, vote: Vote, ballot: Ballot, headers: Headers
) -> Protocol[tuple[Heard, Sequence[Sequence[int]]]]:
    """Return what was said, and each rank's numbers."""
    words: list[int] = []
    voices = _voices(headers)
    for ranks, length in voices:
        own = (full if length == len(full) else short) if ranks[0] == ballot.rank else bytes(length)
        words += _wire.pack_bytes(own)
    numbers: list[Sequence[int]] = [row.ranges for row in headers.values()]
    most = max(row.num_ranges for row in headers.values())
    rows = most > INLINE_RANGES and not _stopped(headers)
    start, width = len(words), most * _wire.NUMBER_WORDS
    if rows:
        for rank in ballot.members:
            words += _numbers(vote.ranges if rank == ballot.rank else (), most)
    reduced = yield AllReduceMax(ballot.members, tuple(words))
    heard, at = [], 0
    for ranks, length in voices:
        segment = reduced[at : at + _wire.words_for(length)]
        heard.append((ranks, json.loads(_wire.unpack_bytes(segment, length))))
        at += len(segment)
    if rows:
        numbers = [reduced[i : i + width] for i in range(start, len(reduced), width)]
    return heard, numbers


def _conclude(
    heard: Heard, numbers: Sequence[Sequence[int]], headers: Headers, ballot: Ballot
) -> Decision:
    """Decide from what was said; a pure function of data that every rank holds alike."""
    failing = [rank for rank, row in headers.items() if row.status != OK]
    mixed = len({row.phase for row in headers.values()}) > 1
    phases = _phases(heard) if mixed else ()
    if failing:
        return Decision(
            messages=3,
            failures=_failures(heard, failing),
            fatal=any(row.status == FATAL for row in headers.values()),
            phases=phases,
            apart=_apart(headers, ballot),
        )
    if mixed:
        return Decision(messages=3, phases=phases)
    names = heard[0][1]["ranges"]
    alike = all(body["ranges"] == names for _, body in heard)
    return Decision(
        messages=3,
        differences=_differences(heard),
        ranges=_ranges(names, numbers) if alike else (),
    )


def _phases(heard: Heard) -> tuple[tuple[int, str], ...]:
    """Return each rank's phase; the agreement's number is added where names alone are equal."""
    alike = len({body["phase"] for _, body in heard}) == 1
    return tuple(
        sorted(
            (rank, f"{body['phase']} (agreement {body['sequence']})" if alike else body["phase"])
            for ranks, body in heard
            for rank in ranks
        )
    )


def _apart(headers: Headers, ballot: Ballot) -> tuple[Ranks, ...]:
    return tuple(
        ranks
        for slot, ranks in enumerate((ballot.members, *ballot.sets))
        if len({headers[rank].positions[slot] for rank in ranks}) > 1
    )


# ---- bodies: bounded JSON, so that nothing a peer sends is executed ----


_SPEAKER = -1  # stands for the rank that says it, so that equal failures have equal bodies


def _bodies(vote: Vote, ballot: Ballot) -> tuple[bytes, bytes]:
    """Return what decides, and the same with what explains it."""
    phase = bounded(vote.phase, 256)
    if phase != vote.phase:  # two long phases must not look the same
        phase += f" [{_wire.digest([_wire.utf8(vote.phase)]):x}]"
    body: Body = {"phase": phase, "sequence": ballot.sequence, "plan": ballot.plan}
    if vote.failures:
        return b"", _failure_body(body, vote, ballot)
    body["ranges"] = [name for name, _ in vote.ranges]
    rows: list[list[Any]] = [
        [_wire.pack_ranks(fact.scope), fact.name, _shown(fact.key), fact.advice]
        for fact in vote.facts
    ]
    body["facts"] = rows
    short = json.dumps(body).encode()
    for fact, row in zip(vote.facts, rows, strict=True):
        row.append({str(name): bounded(text, 512) for name, text in fact.items().items()})
    full = json.dumps(body).encode()
    return short, full if len(full) <= BODY_LIMIT else short


def _shown(key: bytes) -> str:
    return key.hex() if len(key) <= 32 else f"{_wire.digest([key]):016x}"


def _failure_body(body: Body, vote: Vote, ballot: Ballot) -> bytes:
    """Return the failures as far as they fit: tracebacks go first, then the higher ranks."""

    def say(failures: Sequence[Failure]) -> bytes:
        rows = [
            [
                _SPEAKER if f.rank == ballot.rank else f.rank,
                *(f.type_name, f.message, f.traceback, list(f.type_names), f.phase),
            ]
            for f in failures
        ]
        return json.dumps({**body, "failures": rows}).encode()

    kept = vote.failures[:MAX_VOICES]
    if len(say(kept)) > BODY_LIMIT:
        kept = tuple(map(_shortened, kept))
    while len(said := say(kept)) > BODY_LIMIT and len(kept) > 1:
        kept = kept[: len(kept) // 2]
    return said


def _shortened(failure: Failure) -> Failure:
    message, phase = bounded(failure.message, BRIEF), bounded(failure.phase, BRIEF)
    return replace(failure, message=message, phase=phase, traceback="")


def _failures(heard: Heard, failing: Sequence[int]) -> tuple[Failure, ...]:
    """Return what each failing rank reported; like-minded ranks share one body.

    A rank that failed because a nested group had decided to fail forwards that group's failures,
    so root causes are listed under the ranks where they happened.
    """
    said = {rank: body for ranks, body in heard for rank in ranks}
    found: dict[int, Failure] = {}
    for rank in failing:
        if rank not in said:
            found.setdefault(rank, Failure(rank, "unreported", "too many causes", ""))
            continue
        for where, kind, message, trace, names, phase in said[rank]["failures"]:
            at = rank if where == _SPEAKER else where
            found.setdefault(at, Failure(at, kind, message, trace, tuple(names), phase))
    return tuple(found[rank] for rank in sorted(found))


def _ranges(names: Sequence[str], numbers: Sequence[Sequence[int]]) -> tuple[RangeOf, ...]:
    size = _wire.NUMBER_WORDS
    found = []
    for i, name in enumerate(names):
        values = [_wire.word_number(row[i * size : (i + 1) * size]) for row in numbers]
        key = _wire.number_key
        found.append(RangeOf(name, min(values, key=key), max(values, key=key)))
    return tuple(found)


def _differences(heard: Heard) -> tuple[Difference, ...]:
    """Compare each fact among the ranks of its scope, and only among them.

    The opening may compare more ranks than must agree (sibling meshes share a pair), so a
    mismatch there can turn out to be none: facts may differ across meshes by right.
    """
    found = _unlike("control group's plan", [(r, f"{body['plan']:016x}") for r, body in heard])
    found += _unlike("names of ranges", [(r, repr(body["ranges"])) for r, body in heard])
    facts: dict[tuple[str, str, int], list[_Said]] = {}
    for ranks, body in heard:
        times: Counter[tuple[str, str]] = Counter()  # a name may be brought more than once
        for runs, name, key, advice, *items in body["facts"]:
            where = json.dumps(runs), name
            said = _Said(ranks, key, advice, items[0] if items else {})
            facts.setdefault((*where, times[where]), []).append(said)
            times[where] += 1
    everyone = [rank for ranks, _ in heard for rank in ranks]
    for (runs, name, _), said_by in facts.items():
        scope = _wire.unpack_ranks(json.loads(runs)) or everyone
        silent = set(scope).difference(*(said.ranks for said in said_by))
        if silent or len({said.key for said in said_by}) > 1:
            found += _explain(name, said_by, tuple(sorted(silent)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Said:
    """What some ranks hold as one fact."""

    ranks: Ranks
    key: str
    advice: str
    items: Mapping[str, str]


def _explain(name: str, said_by: Sequence[_Said], silent: Ranks) -> list[Difference]:
    advice = said_by[0].advice
    absent = [(silent, "absent")] if silent else []
    found = []
    for item in dict.fromkeys(item for said in said_by for item in said.items):
        texts = [(said.ranks, said.items.get(item, "absent")) for said in said_by]
        found += _unlike(f"{name}: {item}" if item else name, texts + absent, advice)
    if not found:  # details were too large to send, or equal texts hide different values
        texts = [(said.ranks, f"digest {said.key}") for said in said_by]
        found = _unlike(name, texts + absent, advice)
    return found


def _unlike(name: str, texts: Sequence[tuple[Ranks, str]], advice: str = "") -> list[Difference]:
    """Return a difference unless all texts are equal; values in the order of their first rank."""
    values: dict[str, Ranks] = {}
    for ranks, text in sorted(texts):
        values[text] = tuple(sorted((*values.get(text, ()), *ranks)))
    return [Difference(name, tuple(values.items()), advice)] if len(values) > 1 else []

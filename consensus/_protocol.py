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
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

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
    facts_digest,
    opening,
)

T = TypeVar("T")

INLINE_RANGES = 8  # controls that fit the second message; more take a third
MAX_VOICES = 64  # bodies in a third message
BODY_LIMIT = 256 * 1024  # bytes of one body

OK, FAILED, FATAL = 1, 2, 3  # 0 would be a rank that sent nothing


@dataclass(frozen=True, slots=True)
class AllReduceMax:
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
    brief: int  # bytes of a body that says only where this rank is
    full: int  # bytes of its whole body
    num_ranges: int
    positions: tuple[int, ...]  # one a pair; 0 outside
    ranges: tuple[int, ...]  # INLINE_RANGES numbers

    def words(self) -> tuple[int, ...]:
        head = (self.status, self.voice, self.phase, self.brief, self.full, self.num_ranges)
        return (*head, *self.positions, *self.ranges)


def header_words(num_sets: int) -> int:
    """Return the words of one rank's row; fixed by the plan, so equal in every phase."""
    return 6 + 1 + num_sets + INLINE_RANGES * _wire.NUMBER_WORDS


def decide(vote: Vote, ballot: Ballot) -> Protocol[Decision]:
    """Turn the votes of ``ballot.members`` into one decision, in one to three messages."""
    words: list[int] = []
    for value in opening(vote, ballot):
        absent = value is None
        words += (0, 0) if absent else _wire.FAILED if vote.failures else _wire.pair(value or 0)
    reduced = yield AllReduceMax(ballot.members, tuple(words))
    if _wire.pairs_agree(reduced):
        ranges = tuple(RangeOf(name, value, value) for name, value in vote.ranges)
        return Decision(messages=1, ranges=ranges)
    return (yield from _settle(vote, ballot))


def _settle(vote: Vote, ballot: Ballot) -> Protocol[Decision]:
    brief, full = _brief(vote, ballot), _full(vote, ballot)
    headers = yield from _exchange_headers(_header(vote, ballot, brief, full), ballot)
    only_ranges = len({(row.status, row.voice) for row in headers.values()}) == 1
    if only_ranges and not vote.failures and len(vote.ranges) <= INLINE_RANGES:
        return Decision(messages=2, ranges=_ranges(vote, headers))

    failed = any(row.status != OK for row in headers.values())
    speak_fully = not failed and len({row.phase for row in headers.values()}) == 1
    speakers = _speakers(headers, speak_fully)
    bodies = yield from _exchange_bodies(
        speakers, full if vote.failures or speak_fully else brief, ballot
    )
    spoken = {row.voice: bodies[rank] for rank, row in headers.items() if rank in bodies}
    heard = {rank: spoken[row.voice] for rank, row in headers.items() if row.voice in spoken}
    return _conclude(heard, headers, ballot)


def _header(vote: Vote, ballot: Ballot, brief: bytes, full: bytes) -> _Header:
    status = OK if not vote.failures else FATAL if vote.fatal else FAILED
    phase = _wire.digest([vote.phase.encode(), ballot.sequence.to_bytes(8, "little")])
    # With more ranges than fit inline, their values are part of the body, so of the voice too.
    said = full if vote.failures or len(vote.ranges) > INLINE_RANGES else b""
    parts = (status, phase, facts_digest(vote.facts))
    names = (name.encode() for name, _ in vote.ranges)
    voice = _wire.digest([*(part.to_bytes(8, "little") for part in parts), said, *names])
    reached = vote.positions()
    positions = [
        _wire.digest([b"%d" % at for scope, at in reached if ballot.slot(scope) == slot])
        if ballot.takes_part(slot)
        else 0
        for slot in range(1 + len(ballot.sets))
    ]
    numbers = [w for _, value in vote.ranges[:INLINE_RANGES] for w in _wire.number_words(value)]
    padding = [0] * (INLINE_RANGES * _wire.NUMBER_WORDS - len(numbers))
    return _Header(
        status, voice, phase, len(brief), len(full), len(vote.ranges), tuple(positions),
        (*numbers, *padding),
    )  # fmt: skip


def _exchange_headers(own: _Header, ballot: Ballot) -> Protocol[dict[int, _Header]]:
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
        status, voice, phase, brief, full, num_ranges = row[:6]
        positions, ranges = tuple(row[6:cut]), tuple(row[cut:])
        headers[rank] = _Header(status, voice, phase, brief, full, num_ranges, positions, ranges)
    return headers


def _speakers(headers: Mapping[int, _Header], speak_fully: bool) -> dict[int, int]:
    """Return rank -> bytes of its body: the lowest rank of each voice, failing ranks first."""
    lowest: dict[int, int] = {}
    for rank, row in headers.items():
        lowest.setdefault(row.voice, rank)
    order = sorted(lowest.values(), key=lambda rank: (-headers[rank].status, rank))
    return {
        rank: headers[rank].full
        if speak_fully or headers[rank].status != OK
        else headers[rank].brief
        for rank in order[:MAX_VOICES]
    }


def _exchange_bodies(
    speakers: Mapping[int, int], body: bytes, ballot: Ballot
) -> Protocol[dict[int, dict[str, Any]]]:
    total = sum(_wire.words_for(length) for length in speakers.values())
    words = [0] * total
    at = 0
    for rank, length in speakers.items():
        if rank == ballot.rank:
            words[at : at + _wire.words_for(length)] = _wire.pack_bytes(body)
        at += _wire.words_for(length)
    reduced = yield AllReduceMax(ballot.members, tuple(words))
    bodies, at = {}, 0
    for rank, length in speakers.items():
        segment = reduced[at : at + _wire.words_for(length)]
        bodies[rank] = json.loads(_wire.unpack_bytes(segment, length))
        at += len(segment)
    return bodies


def _conclude(
    heard: Mapping[int, dict[str, Any]], headers: Mapping[int, _Header], ballot: Ballot
) -> Decision:
    """Decide from what was said; a pure function of data that every rank holds alike."""
    failing = {rank for rank, row in headers.items() if row.status != OK}
    mixed = len({row.phase for row in headers.values()}) > 1
    phases = _phases(heard)
    if failing:
        return Decision(
            messages=3,
            failures=_failures(heard, failing),
            fatal=any(row.status == FATAL for row in headers.values()),
            phases=phases if mixed else (),
            same_position=_same_position(headers, ballot),
        )
    if mixed:
        return Decision(messages=3, phases=phases)
    differences = _differences(heard)
    if not differences and len(heard) < len(headers):
        unheard = tuple(rank for rank in headers if rank not in heard)
        differences = (Difference("votes", ((f"more than {MAX_VOICES} kinds", unheard),)),)
    return Decision(messages=3, differences=differences, ranges=_body_ranges(heard))


def _phases(heard: Mapping[int, dict[str, Any]]) -> tuple[tuple[int, str], ...]:
    """Return each rank's phase; the agreement's number is added where names alone are equal."""
    alike = len({body["phase"] for body in heard.values()}) == 1
    return tuple(
        (rank, f"{body['phase']} (agreement {body['sequence']})" if alike else body["phase"])
        for rank, body in sorted(heard.items())
    )


def _same_position(headers: Mapping[int, _Header], ballot: Ballot) -> bool:
    sets = (ballot.members, *ballot.sets)
    return all(
        len({headers[rank].positions[slot] for rank in ranks}) == 1
        for slot, ranks in enumerate(sets)
    )


# ---- bodies: bounded JSON, so that nothing a peer sends is executed ----


_SPEAKER = -1  # stands for the rank that says it, so that equal failures have equal bodies


def _where(vote: Vote, ballot: Ballot) -> dict[str, Any]:
    return {"phase": bounded(vote.phase, 256), "sequence": ballot.sequence}


def _brief(vote: Vote, ballot: Ballot) -> bytes:
    return json.dumps(_where(vote, ballot)).encode()


def _full(vote: Vote, ballot: Ballot) -> bytes:
    body = _where(vote, ballot)
    if vote.failures:
        body["failures"] = [
            [
                _SPEAKER if f.rank == ballot.rank else f.rank,
                *(f.type_name, f.message, f.traceback, list(f.type_names), f.phase),
            ]
            for f in vote.failures[:MAX_VOICES]
        ]
        return json.dumps(body).encode()
    body["ranges"] = [[name, *_wire.number_words(value)] for name, value in vote.ranges]
    rows: list[list[Any]] = [
        [list(f.scope), f.name, f.key.hex() if len(f.key) <= 32 else _hashed(f.key), f.advice]
        for f in vote.facts
    ]
    for fact, row in zip(vote.facts, rows, strict=True):
        row.append({str(name): bounded(text, 512) for name, text in fact.items().items()})
    body["facts"] = rows
    data = json.dumps(body).encode()
    if len(data) > BODY_LIMIT:  # keys still decide; only the details are dropped
        body["facts"] = [[*row[:4], {}] for row in rows]
        data = json.dumps(body).encode()
    return data


def _hashed(key: bytes) -> str:
    return f"{_wire.digest([key]):016x}"


def _failures(heard: Mapping[int, dict[str, Any]], failing: set[int]) -> tuple[Failure, ...]:
    """Return what each failing rank reported; like-minded ranks share one body.

    A rank that failed because a nested group had decided to fail forwards that group's failures,
    so root causes are listed under the ranks where they happened.
    """
    found: dict[int, Failure] = {}
    for rank in sorted(failing):
        if rank not in heard:
            found.setdefault(rank, Failure(rank, "unreported", "too many causes", ""))
            continue
        for where, kind, message, trace, names, phase in heard[rank]["failures"]:
            at = rank if where == _SPEAKER else where
            found.setdefault(at, Failure(at, kind, message, trace, tuple(names), phase))
    return tuple(found[rank] for rank in sorted(found))


def _ranges(vote: Vote, headers: Mapping[int, _Header]) -> tuple[RangeOf, ...]:
    rows = [row.ranges for row in headers.values()]
    size = _wire.NUMBER_WORDS
    return tuple(
        _range(name, [_wire.word_number(row[i * size : (i + 1) * size]) for row in rows])
        for i, (name, _) in enumerate(vote.ranges)
    )


def _body_ranges(heard: Mapping[int, dict[str, Any]]) -> tuple[RangeOf, ...]:
    bodies = list(heard.values())
    return tuple(
        _range(name, [_wire.word_number(body["ranges"][i][1:]) for body in bodies])
        for i, (name, *_) in enumerate(bodies[0]["ranges"])
    )


def _range(name: str, values: Sequence[Number]) -> RangeOf:
    return RangeOf(name, min(values, key=_wire.number_key), max(values, key=_wire.number_key))


def _differences(heard: Mapping[int, dict[str, Any]]) -> tuple[Difference, ...]:
    """Compare each fact among the ranks of its scope, and only among them.

    The opening may compare more ranks than must agree (sibling meshes share a pair), so a
    mismatch there can turn out to be none: facts may differ across meshes by right.
    """
    facts: dict[tuple[Ranks, str], dict[int, tuple[str, str, dict[str, str]]]] = {}
    for rank, body in heard.items():
        for scope, name, key, advice, items in body["facts"]:
            facts.setdefault((tuple(scope), name), {})[rank] = (key, advice, items)
    found: list[Difference] = []
    for (scope, name), by_rank in facts.items():
        expected = {rank for rank in heard if not scope or rank in scope}
        if len({key for key, _, _ in by_rank.values()}) > 1 or set(by_rank) != expected:
            found += _explain(name, {rank: by_rank.get(rank) for rank in sorted(expected)})
    return tuple(found)


def _explain(
    name: str, by_rank: Mapping[int, tuple[str, str, dict[str, str]] | None]
) -> list[Difference]:
    advice = next(said[1] for said in by_rank.values() if said is not None)
    details = {rank: said[2] if said is not None else {} for rank, said in by_rank.items()}
    listed = list(dict.fromkeys(item for items in details.values() for item in items))
    found = []
    for item in listed:
        values: dict[str, Ranks] = {}
        for rank, items in details.items():
            text = items.get(item, "absent")
            values[text] = (*values.get(text, ()), rank)
        if len(values) > 1:
            what = f"{name}: {item}" if item else name
            found.append(Difference(what, tuple(values.items()), advice))
    if not found:  # details were too large to send, or equal texts hide different values
        keys: dict[str, Ranks] = {}
        for rank, said in by_rank.items():
            text = f"digest {said[0]}" if said is not None else "absent"
            keys[text] = (*keys.get(text, ()), rank)
        found.append(Difference(name, tuple(keys.items()), advice))
    return found

"""How ranks find out whom they are tied to: a handshake over the store. Pure; no torch.

A rank knows its own scopes but not its peers'. Holding the handshake over the job's store needs
no group, has an end, and can name who is missing.

[Note: the usual case costs three requests a rank]
Usually all members of a mesh hold that one scope and equal manifests. Each adds a hash of what it
holds to one counter; whoever completes the count knows whether all hashes were equal and says so
under a key that all others wait for: an add, (one set), a wait. An add more, and all is cleared up.

[Note: one rank searches for all]
Otherwise the first rank of each scope leads it. Every member puts a record of what it holds, the
leader awaits those of its scopes and puts their union. Records name further scopes, and so their
leaders. A rank looks at the lowest scope that it has heard of. If another rank leads that, it waits
for the plan there; if it leads it itself, it reads the unions of all leaders it has heard of, and
looks again. So a component's lowest rank reads a union of every other leader and then knows all; it
puts the plan under the scopes it leads, where others wait, who do the same. That makes some ten
requests a rank however large the scopes are, and one for each leader on the lowest rank. Records
and unions are put
before anything else is awaited, and who waits for a plan waits for a lower rank, so nobody waits in
a circle.

[Note: all plan, or none does]
All ranks meet once more when they have the plan; a rank that gives up before keeps them from it,
and must tell them. While it is needed for the plan, a word under the keys of its own scopes is
passed on by whoever waits there. When the plan is made, without it perhaps having come here, all
are on their way to a meeting whose name this rank does not know. But those that lead the scopes it
has heard of will: it leaves word where they put the plan, or finds the plan there.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from consensus._records import Known, Runs, ranks_in
from consensus._wire import digest
from consensus.enclosure import Plan, Scope, maximal, rank_set, scope_id
from consensus.vote import Ranks

T = TypeVar("T")

_COUNT_SHIFT = 46  # 16 bits of ranks times a 30-bit hash fit below the count
_HASH_BITS = 30
_ZLIB = b"x"  # what compressed data begin with, and JSON does not


@dataclass(frozen=True, slots=True)
class Add:
    """Wanted: add ``amount`` to the counter ``key``; answered with the new value."""

    key: str
    amount: int


@dataclass(frozen=True, slots=True)
class Put:
    """Wanted: set ``key`` unless somebody has set it before; answered with what it holds now."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Wanted: forget ``keys``; answered with None."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Await:
    """Wanted: the value of ``key`` once it is set, which ``owners`` will do together."""

    key: str
    owners: Ranks


@dataclass(frozen=True, slots=True)
class AwaitAll:
    """Wanted: the values of ``keys``, in order, once all are set, which ``owners`` will do."""

    keys: tuple[str, ...]
    owners: Ranks


class GaveUp(Exception):
    """A member gave up. Thrown into a protocol that has waited too long; raised by it on all."""


StoreRequest: TypeAlias = Add | Put | Await | AwaitAll | Drop
StoreAnswer: TypeAlias = int | bytes | list[bytes] | None
StoreProtocol: TypeAlias = Generator[StoreRequest, StoreAnswer, T]


@dataclass(frozen=True, slots=True)
class Planned:
    """The outcome of planning: the plan, and the modes of ranks that would use a scope unlike."""

    plan: Plan
    conflict: tuple[tuple[str, Ranks], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a tally found, and the random word of the rank that completed it."""

    same: bool
    nonce: str


def tally(key: str, members: Ranks, value: int, *, nonce: str = "") -> StoreProtocol[Verdict]:
    """Agree whether all ``members`` brought an equal ``value``; each must call with this key.

    An add, a wait and an add a rank; the last of them also sets the answer, or clears up.

    Raises:
        GaveUp: A member did, before all had come; those that come later are told too.
    """
    verdict = yield from _verdict(key, members, value, nonce)
    yield from _last_clears_up(key, members)
    return verdict


def _verdict(key: str, members: Ranks, value: int, nonce: str = "") -> StoreProtocol[Verdict]:
    try:
        yield from _count(key, members, value, nonce)
        said = yield Await(f"{key}/done", members)
    except GaveUp as gave_up:  # unless the last member has come at the last moment
        said = yield Put(f"{key}/done", _given_up(gave_up))
    return Verdict(*_heard(said))


def count_key(key: str) -> str:
    """Return the counter of a tally, which is there once a member has come."""
    return f"{key}/sum"


def _count(key: str, members: Ranks, value: int, nonce: str = "") -> StoreProtocol[None]:
    short = value % 2**_HASH_BITS
    total = yield Add(count_key(key), (1 << _COUNT_SHIFT) + short)
    assert isinstance(total, int)
    if total >> _COUNT_SHIFT == len(members):
        same = total % (1 << _COUNT_SHIFT) == len(members) * short
        yield Put(f"{key}/done", json.dumps([same, nonce]).encode())


def _given_up(why: GaveUp) -> bytes:
    return json.dumps({"given up": str(why)}).encode()


def _heard(data: StoreAnswer) -> Any:
    """Return what a key holds; raises what a member left there that gave up."""
    assert isinstance(data, bytes)
    said = json.loads(zlib.decompress(data) if data.startswith(_ZLIB) else data)
    if isinstance(said, dict):
        raise GaveUp(said["given up"])
    return said


def _claim(key: str, value: bytes) -> StoreProtocol[None]:
    """Set a key, unless somebody has left there that it gave up."""
    holds = yield Put(key, value)
    if holds != value:
        _heard(holds)


def _last_clears_up(key: str, members: Ranks) -> StoreProtocol[None]:
    gone = yield Add(f"{key}/gone", 1)
    if gone == len(members):  # everyone has read what there was to read
        yield Drop((count_key(key), f"{key}/done", f"{key}/gone"))


def plan_name(ranks: Ranks) -> str:
    """Return under which name the ranks of a scope plan, each time in a round of its own."""
    return f"plan/{scope_id(ranks)}"


def plan(
    scopes: Sequence[Scope], *, rank: int, rounds: Mapping[Ranks, int | str]
) -> StoreProtocol[Planned]:
    """Agree with every rank this one is tied to on who votes together.

    Args:
        scopes: Every scope of this rank; at least one, each containing ``rank``.
        rank: This rank, global.
        rounds: Scope -> which time this is, the same on its ranks and never again. They meet
            under (scope, round), so plans of different optimizers do not mix.

    Returns:
        The plan, equal on all its members.

    Raises:
        GaveUp: A rank did, before all had come.
    """
    own = maximal(scope.ranks for scope in scopes)
    held = digest([b"%d" % len(own), *sorted(_manifest_bytes(scope) for scope in scopes)])
    numbers = {ranks: f"{rounds.get(ranks, 0)}" for ranks in own}
    keys = {ranks: f"{plan_name(ranks)}/{number}" for ranks, number in numbers.items()}
    known = Known.of(scopes, rank=rank, rounds=numbers)
    try:
        if len(own) == 1:
            verdict = yield from _verdict(keys[own[0]], own[0], held)
            # Of a mesh with several axes a rank knows only its own of the groups that carry votes.
            if verdict.same and not any(scope.carries for scope in scopes):
                yield from _last_clears_up(keys[own[0]], own[0])
                return Planned(Plan(own[0]))
        else:  # it is clear that they differ, but not to members who hold one of these alone
            for ranks, key in keys.items():
                yield from _count(key, ranks, held)
        everything = yield from _search(known, keys, rank=rank)
    except GaveUp as gave_up:
        yield from _leave_word(_given_up(gave_up), known, keys, rank=rank)
        raise
    return (yield from _conclude(everything, known, keys, rank=rank))


# ---- the search: see [Note: one rank searches for all] ----


def _search(known: Known, own: Mapping[Ranks, str], *, rank: int) -> StoreProtocol[bytes]:
    """Return what all ranks of the component hold, packed; then ``known`` has it too."""
    record = packed(known)
    for key in _keys_of_records(rank, own):
        yield Put(key, record)
    led = {ranks: key for ranks, key in own.items() if ranks[0] == rank}
    if led:
        yield from _gather(known, led)
    read = {rank}
    while True:
        lowest = min(known.rounds)
        if lowest[0] != rank:
            everything = yield Await(f"{_key(lowest, known)}/plan", lowest[:1])
            known.hear(_heard(everything))
            assert isinstance(everything, bytes)
            return everything
        ahead = {runs[0]: runs for runs in known.rounds if runs[0] not in read}
        if not ahead:
            return packed(known)
        unions = tuple(f"{_key(runs, known)}/union" for runs in ahead.values())
        yield from _hear_all(unions, rank_set(ahead), known)
        read.update(ahead)


def _gather(known: Known, led: Mapping[Ranks, str]) -> StoreProtocol[None]:
    """Hear of all members of the scopes that this rank leads, and put what they hold."""
    for ranks, key in led.items():  # one key, where a member that gives up leaves word for all
        _heard((yield Await(f"{key}/done", ranks)))
    records = tuple(f"{key}/{peer}" for ranks, key in led.items() for peer in ranks[1:])
    if records:
        peers = rank_set(peer for ranks in led for peer in ranks[1:])
        yield from _hear_all(records, peers, known)
    union = packed(known)
    for key in led.values():
        yield from _claim(f"{key}/union", union)


def _conclude(
    everything: bytes, known: Known, own: Mapping[Ranks, str], *, rank: int
) -> StoreProtocol[Planned]:
    """Pass the plan on, meet all of its members, and clear up."""
    led = [key for ranks, key in own.items() if ranks[0] == rank]
    found, conflict = known.outcome()
    met = _where_all_meet(known)
    try:
        for key in led:
            yield from _claim(f"{key}/plan", everything)
        yield from tally(met, found.members, found.key)
    except GaveUp as gave_up:
        for key in (f"{met}/done", *(f"{key}/plan" for key in led)):
            yield Put(key, _given_up(gave_up))
        raise
    parts = ("sum", "done", "union", "plan")  # which all have read now
    leaders = [f"{key}/{part}" for key in led for part in parts]
    yield Drop((*_keys_of_records(rank, own), *leaders))
    return Planned(found, tuple(sorted(conflict.items())))


def _leave_word(
    why: bytes, known: Known, own: Mapping[Ranks, str], *, rank: int
) -> StoreProtocol[None]:
    """Tell everybody who may wait for this rank; see [Note: all plan, or none does]."""
    for key in own.values():
        for part in ("done", f"{rank}", "union"):
            yield Put(f"{key}/{part}", why)
    for runs in tuple(known.rounds):
        holds = yield Put(f"{_key(runs, known)}/plan", why)
        with suppress(GaveUp):
            known.hear(_heard(holds))
    yield Put(f"{_where_all_meet(known)}/done", why)


def _hear_all(keys: tuple[str, ...], owners: Ranks, known: Known) -> StoreProtocol[None]:
    came = yield AwaitAll(keys, owners)
    assert isinstance(came, list)
    for each in came:
        known.hear(_heard(each))


def _key(runs: Runs, known: Known) -> str:
    return f"{plan_name(ranks_in(runs))}/{known.rounds[runs]}"


def _where_all_meet(known: Known) -> str:
    return f"{_key(min(known.rounds), known)}/met"  # the same wherever all of it is known


def _keys_of_records(rank: int, own: Mapping[Ranks, str]) -> list[str]:
    """Return where a rank puts its record, for those that lead its scopes."""
    return [f"{key}/{rank}" for ranks, key in own.items() if ranks[0] != rank]


def packed(known: Known) -> bytes:
    """Return what is told of ``known``, as it stands in the store."""
    return zlib.compress(json.dumps(known.told(), separators=(",", ":")).encode())


def _manifest_bytes(scope: Scope) -> bytes:
    return b"%d %s" % (scope.manifest, scope.mode.encode())

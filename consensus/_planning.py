"""How ranks find out whom they are tied to: a handshake over the store. Pure; no torch.

A rank knows its own scopes but not its peers'. Holding the handshake over the job's store needs
no group, has an end, and can name who is missing.

[Note: the usual case costs three requests a rank]
Usually all members of a mesh hold that one scope and equal manifests. Each adds a hash of what it
holds to one counter; whoever completes the count knows whether all hashes were equal and says so
under a key that all others wait for: an add, (one set), a wait. Only when they differ does every
member post a record, and each reads records until no new scope turns up.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from consensus._wire import digest
from consensus.enclosure import Plan, Scope, conflicting_modes, maximal, plan_of, scope_id
from consensus.vote import Ranks

T = TypeVar("T")

_COUNT_SHIFT = 46  # 16 bits of ranks times a 30-bit hash fit below the count
_HASH_BITS = 30


@dataclass(frozen=True, slots=True)
class Add:
    """Wanted: add ``amount`` to the counter ``key``; answered with the new value."""

    key: str
    amount: int


@dataclass(frozen=True, slots=True)
class Put:
    """Wanted: set ``key`` unless somebody has set it before; answered with None."""

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


class GaveUp(Exception):
    """A member gave up. Thrown into a protocol that has waited too long; raised by it on all."""


StoreRequest: TypeAlias = Add | Put | Await | Drop
StoreProtocol: TypeAlias = Generator[StoreRequest, "int | bytes | None", T]


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
    short = value % 2**_HASH_BITS
    total = yield Add(f"{key}/sum", (1 << _COUNT_SHIFT) + short)
    assert isinstance(total, int)
    if total >> _COUNT_SHIFT == len(members):
        same = total % (1 << _COUNT_SHIFT) == len(members) * short
        yield Put(f"{key}/done", json.dumps([same, nonce]).encode())
    try:
        said = yield Await(f"{key}/done", members)
    except GaveUp as gave_up:  # unless the last member has come at the last moment
        yield Put(f"{key}/done", _given_up(gave_up))
        said = yield Await(f"{key}/done", members)
    verdict = Verdict(*_heard(said))
    yield from _last_clears_up(key, members, (f"{key}/sum", f"{key}/done"))
    return verdict


def _given_up(why: GaveUp) -> bytes:
    return json.dumps({"given up": str(why)}).encode()


def _heard(data: int | bytes | None) -> Any:
    """Return what a key holds; raises what a member left there that gave up."""
    assert isinstance(data, bytes)
    said = json.loads(data)
    if isinstance(said, dict) and "given up" in said:
        raise GaveUp(said["given up"])
    return said


def _last_clears_up(key: str, members: Ranks, keys: tuple[str, ...]) -> StoreProtocol[None]:
    gone = yield Add(f"{key}/gone", 1)
    if gone == len(members):  # everyone has read what there was to read
        yield Drop((*keys, f"{key}/gone"))


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
    keys = {ranks: f"{plan_name(ranks)}/{rounds.get(ranks, 0)}" for ranks in own}
    try:
        uniform = True
        for ranks in own:  # sorted, so the order is the same wherever scopes are shared
            verdict = yield from tally(keys[ranks], ranks, held)
            uniform = uniform and verdict.same
        # Of a mesh with several axes this rank knows only its own of the groups that carry votes.
        knows_groups = not any(scope.carries for scope in scopes)
        if uniform and len(own) == 1 and knows_groups:
            return Planned(Plan(own[0]))
        return (yield from _read_closure(scopes, rank=rank, keys=dict(keys)))
    except GaveUp as gave_up:
        for key in keys.values():  # peers may wait for this rank in any of them
            yield Put(f"{key}/done", _given_up(gave_up))
            yield Put(f"{key}/{rank}", _given_up(gave_up))
        raise


def _read_closure(
    scopes: Sequence[Scope], *, rank: int, keys: dict[Ranks, str]
) -> StoreProtocol[Planned]:
    """Post what this rank holds, then read what its peers hold until no new scope turns up."""
    record = json.dumps(
        {
            "scopes": [[list(s.ranks), s.manifest, s.mode, s.carries] for s in scopes],
            "keys": [[list(ranks), key] for ranks, key in sorted(keys.items())],
        }
    ).encode()
    posted = tuple(f"{key}/{rank}" for key in keys.values())
    for key in posted:
        yield Put(key, record)
    records = {rank: tuple(scopes)}
    pending = sorted(keys)
    while pending:
        ranks = pending.pop(0)
        for peer in ranks:
            if peer in records:
                continue
            data = yield Await(f"{keys[ranks]}/{peer}", (peer,))
            said = _heard(data)
            records[peer] = tuple(Scope(tuple(r), *rest) for r, *rest in said["scopes"])
            for listed, key in said["keys"]:
                if tuple(listed) not in keys:
                    keys[tuple(listed)] = key
                    pending.append(tuple(listed))
    found = plan_of(records)
    met = f"plan/{digest(key.encode() for _, key in sorted(keys.items())):016x}"
    yield from tally(met, found.members, found.key)  # all have read, so the records may go
    yield Drop(posted)
    return Planned(found, tuple(sorted(conflicting_modes(records).items())))


def _manifest_bytes(scope: Scope) -> bytes:
    return b"%d %s" % (scope.manifest, scope.mode.encode())

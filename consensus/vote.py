"""What a rank brings to an agreement and what all ranks conclude. Pure data; no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from consensus._wire import digest, number_bytes, number_key, utf8
from consensus.errors import Failure

Ranks: TypeAlias = tuple[int, ...]  # sorted global ranks
Number: TypeAlias = int | float


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that must be equal on every rank of ``scope``.

    Only ``key`` is hashed on the healthy path; ``items`` is called after a mismatch, to say
    what differs. An empty scope means every rank of the agreement.
    """

    name: str
    key: bytes
    items: Callable[[], Mapping[str, str]]
    scope: Ranks = ()
    advice: str = ""  # what the user should do when ranks disagree


# The next two are not frozen: that takes ten times as long to make, and each vote makes both.
@dataclass(slots=True)
class Vote:
    """What one rank brings: where it is, whether it failed, and what should be equal."""

    phase: str
    failures: tuple[Failure, ...] = ()  # this rank's own, or those a nested group decided on
    fatal: bool = False
    facts: tuple[Fact, ...] = ()
    ranges: tuple[tuple[str, Number], ...] = ()  # may differ by right
    # How far the data plane of each scope has come; called after a mismatch only.
    positions: Callable[[], tuple[tuple[Ranks, int], ...]] = tuple
    # Added up over the members once they have agreed, in a message of its own; a fact must say
    # that they are equally many.
    counts: tuple[int, ...] = ()


@dataclass(slots=True)
class Ballot:
    """Where a vote is cast: the members, this rank, and which pair of words holds which scope.

    Pair 0 is compared by all members. Further pairs belong to rank sets that hold different
    parameters by right; a rank outside of one contributes zeros to it.
    """

    members: Ranks
    rank: int  # global
    plan: int  # digest of the plan that made this group
    sequence: int  # agreements this group has held before
    sets: tuple[Ranks, ...] = ()  # pair i + 1 belongs to sets[i]
    slots: tuple[tuple[Ranks, int], ...] = ()  # scope of a fact -> its pair; others use pair 0

    def slot(self, scope: Ranks) -> int:
        """Return the pair that compares the facts of ``scope``."""
        return next((slot for known, slot in self.slots if known == scope), 0)

    def takes_part(self, slot: int) -> bool:
        """Return whether this rank contributes to pair ``slot``."""
        return slot == 0 or self.rank in self.sets[slot - 1]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing on which ranks differ: its name, and each value with the ranks that hold it."""

    name: str
    values: tuple[tuple[str, Ranks], ...]
    advice: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class RangeOf:
    """Lowest and highest of one control over the group; equal by value, so NaN equals NaN."""

    name: str
    minimum: Number
    maximum: Number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeOf) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, tuple[int, int], tuple[int, int]]:
        return self.name, number_key(self.minimum), number_key(self.maximum)

    @property
    def unanimous(self) -> bool:
        """Whether all ranks hold the same value; NaN equals NaN, 1 equals 1.0."""
        return number_key(self.minimum) == number_key(self.maximum)


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks conclude; equal on every rank of the agreement."""

    messages: int  # collectives it took
    failures: tuple[Failure, ...] = ()
    fatal: bool = False
    phases: tuple[tuple[int, str], ...] = ()  # every rank's phase, when they are not all equal
    differences: tuple[Difference, ...] = ()
    ranges: tuple[RangeOf, ...] = ()
    apart: tuple[Ranks, ...] = ()  # whose data plane has not come equally far on all of them
    sums: tuple[int, ...] = ()  # of the counts, when all agreed

    @property
    def failed(self) -> bool:
        """Whether any rank failed."""
        return bool(self.failures)

    @property
    def failed_ranks(self) -> Ranks:
        """Ranks that failed, ordered."""
        return tuple(failure.rank for failure in self.failures)

    @property
    def agreed(self) -> bool:
        """Whether every rank may proceed."""
        return not (self.failures or self.phases or self.differences)

    def unanimous(self, name: str) -> bool:
        """Return whether the control ``name`` is equal on all ranks."""
        return {found.name: found.unanimous for found in self.ranges}[name]


def opening(vote: Vote, ballot: Ballot) -> list[int | None]:
    """Return one digest a pair: None for a pair this rank is outside of."""
    where = b"consensus/1, plan %d, agreement %d" % (ballot.plan, ballot.sequence)
    parts = [[where, utf8(vote.phase)]]
    for _ in ballot.sets:
        parts.append([])
    for fact in vote.facts:
        parts[ballot.slot(fact.scope) if ballot.slots else 0] += (utf8(fact.name), fact.key)
    for name, value in vote.ranges:
        parts[0] += (utf8(name), number_bytes(value))
    digests: list[int | None] = [digest(parts[0])]
    for slot in range(1, len(parts)):
        digests.append(digest(parts[slot]) if ballot.takes_part(slot) else None)
    return digests

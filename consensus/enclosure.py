"""Which ranks' fates are tied, and which group encloses them. Pure; no torch.

A *scope* is a set of ranks that will meet in collectives after a phase. Overlapping scopes tie
their ranks together: with {0,1} and {1,2}, a failure on rank 2 keeps rank 1 from entering the
collective that rank 0 already waits in. So a failure must reach the whole *component*, and one
pass over the scopes does not do that.

[Note: one enclosing group a component]
Every component votes in one group that holds all of its ranks. No order of groups to get wrong,
no number of passes that depends on the layout, one message. The group is the control plane: it
is private and apart from the groups that move data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from consensus._wire import digest
from consensus.vote import Ballot, Ranks


@dataclass(frozen=True, slots=True)
class Scope:
    """One scope as one rank sees it."""

    ranks: Ranks
    manifest: int  # digest of what this rank holds on it and believes its peers hold alike
    mode: str = ""  # how this rank will use it; ranks that share a scope must use it alike
    carries: bool = False  # a process group of these ranks is there, and may carry votes


@dataclass(frozen=True, slots=True)
class Plan:
    """Who votes together and which rank sets are compared apart; equal on all members."""

    members: Ranks
    sets: tuple[Ranks, ...] = ()  # proper subsets of members with facts of their own
    slots: tuple[tuple[Ranks, int], ...] = ()  # scope -> pair of words; 0 is everyone's
    groups: tuple[Ranks, ...] = ()  # that carry votes, where no group may enclose the members
    key: int = field(init=False)  # a digest of the plan; part of every vote

    def __post_init__(self) -> None:
        parts = [_rank_bytes(self.members), *(_rank_bytes(ranks) for ranks in self.sets)]
        if self.groups:
            parts += [b"over", *(_rank_bytes(ranks) for ranks in self.groups)]
        key = digest(parts)
        object.__setattr__(self, "key", key)  # once: its cost grows with the number of ranks

    def ballot(self, *, rank: int, sequence: int) -> Ballot:
        """Return where ``rank`` casts its vote number ``sequence``."""
        return Ballot(self.members, rank, self.key, sequence, self.sets, self.slots)


def rank_set(ranks: Iterable[int]) -> Ranks:
    """Return ``ranks`` as a sorted tuple without repeats, the identity of a scope."""
    return tuple(sorted(set(ranks)))


def scope_id(ranks: Ranks) -> str:
    """Return a short stable name for a set of ranks; never a string that sorts "10" below "9"."""
    return f"{digest([_rank_bytes(ranks)]):016x}"


def maximal(scopes: Iterable[Ranks]) -> tuple[Ranks, ...]:
    """Return the scopes that no other encloses: they alone decide the component."""
    distinct = sorted(set(scopes))
    return tuple(s for s in distinct if not any(set(s) < set(other) for other in distinct))


def components(scopes: Iterable[Ranks]) -> tuple[Ranks, ...]:
    """Return the unions of scopes that overlap, directly or through others; ordered."""
    found: list[set[int]] = []
    for scope in scopes:
        touching = [known for known in found if known & set(scope)]
        found = [known for known in found if known not in touching]
        found.append(set(scope).union(*touching))
    return tuple(sorted(rank_set(ranks) for ranks in found))


def plan_of(records: Mapping[int, Sequence[Scope]]) -> Plan:
    """Return the plan of one component from the scopes that each of its ranks declared.

    Disjoint scopes on which all members hold the same manifest, such as the sibling sub-meshes of
    a TP x FSDP layout, share one pair of words: N / tp of them cost one. (A mismatch is resolved
    scope by scope afterwards, so sharing never raises a false alarm.) A shared set that covers
    all members needs no pair of its own. Overlapping scopes share none: a rank in both would hold
    twice what its peers hold once, and every vote would look like a mismatch.
    """
    members = rank_set(rank for scopes in records.values() for s in scopes for rank in s.ranks)
    kinds: dict[Ranks, set[int]] = {}
    for scopes in records.values():
        for scope in scopes:
            kinds.setdefault(scope.ranks, set()).add(scope.manifest)
    alike: dict[frozenset[int], list[Ranks]] = {}
    for ranks, manifests in kinds.items():
        alike.setdefault(frozenset(manifests), []).append(ranks)
    set_of: dict[Ranks, Ranks] = {}
    for siblings in alike.values():
        union = rank_set(rank for ranks in siblings for rank in ranks)
        disjoint = len(union) == sum(len(ranks) for ranks in siblings)
        set_of.update({ranks: union if disjoint else ranks for ranks in siblings})
    sets = sorted(set(set_of.values()) - {members})
    slots = [
        (ranks, 0 if shared == members else 1 + sets.index(shared))
        for ranks, shared in sorted(set_of.items())
    ]
    carrying = {s.ranks for scopes in records.values() for s in scopes if s.carries}
    return Plan(members, tuple(sets), tuple(slots) if sets else (), tuple(sorted(carrying)))


def conflicting_modes(records: Mapping[int, Sequence[Scope]]) -> dict[str, Ranks]:
    """Return mode -> ranks when ranks that share a scope would use it in different ways."""
    by_scope: dict[Ranks, dict[str, Ranks]] = {}
    for rank, scopes in sorted(records.items()):
        for scope in scopes:
            modes = by_scope.setdefault(scope.ranks, {})
            modes[scope.mode] = (*modes.get(scope.mode, ()), rank)
    return next((modes for modes in by_scope.values() if len(modes) > 1), {})


def _rank_bytes(ranks: Ranks) -> bytes:
    return struct.pack(f"<{len(ranks)}I", *ranks)

"""What the ranks of a component have told of the scopes they hold, and its plan. Pure; no torch.

Ranks are kept as runs of equal steps, and a scope once for all that hold it alike, so what is told
of a mesh grows with the number of its groups, not with that of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from consensus.enclosure import Plan, Scope, conflicting_modes, plan_of
from consensus.vote import Ranks

Runs: TypeAlias = tuple[int, ...]  # first, step and last of one run of ranks, then of the next


class Held(NamedTuple):
    """A scope as those ranks hold it that hold it alike."""

    runs: Runs
    round: str | None  # which time it is planned with; None where a larger scope encloses it
    place: int  # among the scopes of one rank
    manifest: int
    mode: str
    carries: bool


@dataclass(slots=True)
class Known:
    """What one rank has heard so far."""

    holders: dict[Held, set[int]] = field(default_factory=dict)
    rounds: dict[Runs, str] = field(default_factory=dict)  # of each scope that is planned with

    @classmethod
    def of(cls, scopes: Sequence[Scope], *, rank: int, rounds: Mapping[Ranks, str]) -> Known:
        """Return what ``rank`` knows by itself; ``rounds`` are of those scopes none encloses."""
        known = cls()
        for place, scope in enumerate(scopes):
            of = (place, scope.manifest, scope.mode, scope.carries)
            known._add(Held(runs_of(scope.ranks), rounds.get(scope.ranks), *of), {rank})
        return known

    def told(self) -> list[list[Any]]:
        """Return all of it as plain lists, in the same order whoever was heard first."""
        told = [[runs_of(sorted(holders)), *held] for held, holders in self.holders.items()]
        return sorted(told, key=repr)

    def hear(self, told: Sequence[Sequence[Any]]) -> None:
        """Add what another rank has told."""
        for holders, runs, *of in told:
            self._add(Held(tuple(runs), *of), set(ranks_in(holders)))

    def _add(self, held: Held, holders: set[int]) -> None:
        self.holders.setdefault(held, set()).update(holders)
        if held.round is not None:
            self.rounds[held.runs] = held.round

    def outcome(self) -> tuple[Plan, dict[str, Ranks]]:
        """Return what :func:`plan_of` and :func:`conflicting_modes` say of the records.

        Both take every scope of every rank, and look at each of its ranks; so they get less, with
        the same outcome. Who holds a scope does not matter to the first, which gets each way of
        holding one once. The second reports scopes held in two modes, and gets only those.
        """
        ranks = {runs: ranks_in(runs) for runs in {held.runs for held in self.holders}}
        modes: dict[Runs, set[str]] = {}
        for held in self.holders:
            modes.setdefault(held.runs, set()).add(held.mode)
        every: list[Scope] = []
        torn: dict[int, list[Scope]] = {}
        for held in sorted(self.holders, key=lambda held: held.place):
            scope = Scope(ranks[held.runs], held.manifest, held.mode, held.carries)
            every.append(scope)
            for rank in self.holders[held] if len(modes[held.runs]) > 1 else ():
                torn.setdefault(rank, []).append(scope)
        return plan_of({0: every}), conflicting_modes(torn)


def runs_of(ranks: Iterable[int]) -> Runs:
    """Return ordered ranks as runs of equal steps: those of a mesh, or of one axis, are few."""
    runs: list[tuple[int, int, int]] = []
    for rank in ranks:
        first, step, last = runs[-1] if runs else (rank, 0, rank)
        if runs and step in (0, rank - last):  # 0: one rank so far, the next may be anywhere
            runs[-1] = (first, rank - last, rank)
        else:
            runs.append((rank, 0, rank))
    return tuple(number for run in runs for number in run)


def ranks_in(runs: Sequence[int]) -> Ranks:
    """Return the ranks of what :func:`runs_of` returned, in order."""
    starts = range(0, len(runs), 3)
    return tuple(r for i in starts for r in range(runs[i], runs[i + 2] + 1, runs[i + 1] or 1))

"""GefenMuon's rule: Muon whose momentum is stored as Gefen's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import consensus
from adapters._data_phase import DataPhase
from adapters._gefen_math import direction
from adapters._momenta import Counted, Momenta, Moving
from adapters._muon_rule import MuonRule
from adapters._muon_step import Pending
from adapters._period import PeriodRules
from adapters._rules import Member, Owner, Write, gradient_of
from adapters.options import MuonVariantOptions, ShardedMode


@dataclass(slots=True)
class QuantizedPending(Pending):
    """What a step will do to one matrix, whose momentum is quantised."""

    moving: Moving | None = None

    def direction(self) -> Tensor:
        """This rank's part of the matrix to orthogonalise, in memory of its own."""
        group, moving = self.member.group, self.moving
        assert moving is not None
        return direction(
            moving.indices,
            moving.magnitudes,
            self.grad,
            book=moving.book,
            grid=moving.grid,
            momentum=group["momentum"],
            nesterov=group["nesterov"],
        )

    @staticmethod
    def directions(pending: Sequence[Pending]) -> Sequence[Tensor]:
        """The directions of several matrices."""
        return [each.direction() for each in pending]

    @staticmethod
    def commit_momenta(pending: Sequence[Any]) -> None:
        """Write the momenta."""
        for each in pending:
            each.moving.commit(each.states)
            state = each.states[each.member.param]
            state["step"] = state.get("step", 0) + 1


class GefenMuonRule(MuonRule):
    """Muon for matrices whose momenta are stored as one byte an element, on the rank of each."""

    pending = QuantizedPending
    momenta: Momenta

    def __init__(self, sharded_mode: ShardedMode, *, refresh_every: int, **kwargs: Any) -> None:
        """Make the rule; see :class:`MuonRule` and :class:`Momenta`."""
        super().__init__(sharded_mode, options=MuonVariantOptions, **kwargs)
        self.momenta = Momenta(
            PeriodRules(), refresh_every=refresh_every, alone=sharded_mode == "approx"
        )

    def read(self, members: Sequence[Member]) -> None:
        """Read where the shards and the elements of each matrix lie."""
        super().read(members)
        self.momenta.read(members)

    def check_state(self, owner: Owner, member: Member) -> None:
        """Do nothing: what is loaded has been checked."""

    def vote(self, owner: Owner, members: Sequence[Member], vote: consensus.preflight) -> None:
        """Bring the size of a bucket and what the momenta are made of."""
        super().vote(owner, members, vote)
        self.momenta.vote(owner, members, vote, self.label)

    def _momentum_buffer(self, owner: Owner, member: Member) -> None:
        """None: the momentum is not dense."""

    def _gradient(self, member: Member, inv_scale: float | None) -> Tensor:
        return gradient_of(member, inv_scale, widen=True)

    def compute(
        self,
        owner: Owner,
        members: Sequence[Member],
        inv_scale: float | None,
        phase: DataPhase,
    ) -> Sequence[Write]:
        """Return the updates of all matrices.

        Collectives:
            For each layout with blocks that lie on several ranks an all_reduce of their maxima,
            and those of :class:`MuonRule`.
        """
        members = [each for each in members if self.momenta.has_elements(each.param)]
        return [*super().compute(owner, members, inv_scale, phase), Counted(self.momenta)]

    def advance(
        self, owner: Owner, members: Sequence[Member], pending: Sequence[Any], phase: DataPhase
    ) -> None:
        """Add the gradients to the momenta."""

        def start() -> None:
            for each in pending:
                each.moving = self.momenta.start(owner, each.member, each.grad)

        phase.attempt(start)
        moving = [each.moving for each in pending]
        self.momenta.advance(owner, members, moving, lambda member: member.group["momentum"], phase)

"""torch's AdamW as a rule, so that it can be one half of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from adapters._data_phase import DataPhase
from adapters._rules import (
    Member,
    Owner,
    Rule,
    Write,
    check_state,
    gradient_of,
    group_id,
    local,
    were_written,
)
from adapters.options import AdamWOptions

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A step of all parameters of one group: torch's own, which computes as it writes."""

    members: list[Member]
    grads: list[Tensor]  # this rank's parts, unscaled
    moments: list[dict[str, Tensor]]  # as they stand in the state, or zeros
    options: dict[str, Any]  # as torch's function wants them
    states: Any  # of the optimizer

    def commit(self) -> None:
        """Let torch write parameters and state."""
        for member, moments in zip(self.members, self.moments, strict=True):
            self.states[member.param].update(moments)
        adamw(
            [local(member.param) for member in self.members],
            self.grads,
            [local(each["exp_avg"]) for each in self.moments],
            [local(each["exp_avg_sq"]) for each in self.moments],
            [],
            [each["step"] for each in self.moments],
            has_complex=any(member.param.is_complex() for member in self.members),
            amsgrad=False,
            maximize=False,
            **self.options,
        )
        were_written(member.param for member in self.members)


class AdamWRule(Rule):
    """AdamW for parameters of any shape. Elementwise, so shards need no communication."""

    options = AdamWOptions

    def check_parameter(self, member: Member) -> None:
        """Refuse nothing that torch takes."""

    def check_state(self, owner: Owner, member: Member) -> None:
        """Raise if a moment is missing, or does not lie as its parameter does."""
        state = owner.state.get(member.param, {})
        missing = {*_MOMENTS, "step"} - state.keys()
        if state and missing:
            raise ValueError(
                f"the state of {member.name} has no {' and no '.join(sorted(missing))}; load what "
                "an AdamW's state_dict() returned"
            )
        for name in _MOMENTS:
            check_state(member.name, member.param, state.get(name))

    def compute(
        self,
        owner: Owner,
        members: Sequence[Member],
        inv_scale: float | None,
        phase: DataPhase,
    ) -> Sequence[Write]:
        """Return the steps of all groups; nothing is computed before they are written."""
        by_group: dict[int, list[Member]] = {}
        for member in members:
            by_group.setdefault(group_id(member.group), []).append(member)
        steps = phase.attempt(
            lambda: [
                _Pending(
                    some,
                    [gradient_of(member, inv_scale) for member in some],
                    [_moments(owner, member) for member in some],
                    _options(some[0].group),
                    owner.state,
                )
                for some in by_group.values()
            ]
        )
        return steps or ()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    names = ("lr", "weight_decay", "eps")
    return {"beta1": beta1, "beta2": beta2, **{name: group[name] for name in names}}


def _moments(owner: Owner, member: Member) -> dict[str, Tensor]:
    state = owner.state.get(member.param)
    if state:
        return {name: state[name] for name in (*_MOMENTS, "step")}
    zeros = {
        name: torch.zeros_like(member.param, memory_format=torch.preserve_format)
        for name in _MOMENTS
    }
    return {**zeros, "step": torch.tensor(0.0, device="cpu")}

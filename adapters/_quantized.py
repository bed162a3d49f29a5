"""What optimizers with quantised momenta have in common: when they learn, and with whom."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch

import consensus
from adapters._base import VotingOptimizer
from adapters._data_phase import DataPhase
from adapters._learning import learn, lesson_of
from adapters._momenta import Momenta
from adapters._period import PeriodRules
from adapters._routing import lowered

_TO_LEARN = "something to learn, and to step"
FirstGradient = Literal["raise", "defer"]


class QuantizedOptimizer(VotingOptimizer):
    """An optimizer some of whose rules have a codebook."""

    #: A process group or mesh whose ranks share the codebook, beside those of the parameters.
    codebook_scope: consensus.Source = "auto"
    # Counters of steps are Python's, and each new value would be traced again.
    traceable = False
    #: What a step does whose gradients hold nothing to learn from.
    first_gradient: FirstGradient = "raise"

    def agreement_scopes(self) -> tuple[Any, ...]:
        """Return whom this optimizer meets beside the ranks of its parameters' meshes."""
        return () if isinstance(self.codebook_scope, str) else (self.codebook_scope,)

    def _spans_ranks(self) -> bool:
        scopes = self.agreement_scopes()
        return super()._spans_ranks() or consensus.control_group(scopes).world_size > 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _check(self, vote: consensus.preflight) -> DataPhase:
        phase: DataPhase = super()._check(vote)
        vote.same("first_gradient", self.first_gradient)
        to_learn = any(
            momenta.to_learn_from(self, members) for momenta, members, _ in self._learners()
        )
        # May differ by right: a parameter may be new to the ranks of one mesh only. But whether
        # there is a lesson, and whether it is for nothing, concerns all that take part in it.
        # (A learning rate is read only here: it may be on a device.)
        moves = to_learn and any(float(group["lr"]) for group in self.param_groups)
        vote.range(_TO_LEARN, to_learn + moves)
        return phase

    def _learners(self) -> list[tuple[Momenta, Any, str]]:
        by_rule = self._known.by_rule
        return [(rule.momenta, members, rule.label) for rule, members in by_rule if rule.momenta]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare(self, vote: consensus.preflight) -> bool:
        """Learn what has to be learned before the update.

        Collectives:
            None in most steps. In the first, when the codebook is refreshed, and when a parameter
            has its first gradient: those of :func:`learn`.
        """
        to_learn = self.agreed[_TO_LEARN]
        if not to_learn:
            return True
        # What torch's checkpointing does to see the state of an optimizer that has none.
        asks_nothing = to_learn == 1
        defers = self.first_gradient == "defer"
        with torch.no_grad():
            lessons = learn(
                lambda: [
                    lesson_of(momenta, self, members, vote.inv_scale, label)
                    for momenta, members, label in self._learners()
                ],
                self,
                votes=self.casts_votes,
                defer_unusable=defers,
                defer_zeros=defers or asks_nothing,
            )
            for lesson in lessons:
                lesson.commit()
        return bool(lessons)


def check_first_gradient(value: str) -> FirstGradient:
    """Return ``value`` if it is one of the choices.

    Raises:
        ValueError: It is not.
    """
    for known in get_args(FirstGradient):
        if value == known:
            return known  # type: ignore[no-any-return]
    raise ValueError(f'first_gradient must be "raise" or "defer", but is: {value!r}')


def check_refresh(value: int) -> int:
    """Return ``value`` if it can be a number of steps.

    Raises:
        ValueError: It is negative, or no int.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            f"codebook_refresh_every must be a number of steps, or 0 for never, but is: {value!r}"
        )
    return value


def period_rules(one_for_1d: bool, one_for_2d: bool, substrings: Iterable[str]) -> PeriodRules:
    """Return the rules of these options.

    Raises:
        TypeError: The substrings are one string, or hold something else than strings.
        ValueError: One of them is empty, so that every name contains it.
    """
    return PeriodRules(one_for_1d, one_for_2d, lowered(substrings, "period_one_substrings"))

"""What optimizers with quantised momenta have in common: when they learn, and with whom."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch

import consensus
from adapters._base import VotingOptimizer
from adapters._checkpoint import pack, stage
from adapters._learning import learn, lesson_of
from adapters._momenta import Momenta
from adapters._period import PeriodRules

FirstGradient = Literal["raise", "defer"]


class QuantizedOptimizer(VotingOptimizer):
    """An optimizer some of whose rules have a codebook."""

    #: A process group or mesh whose ranks share the codebook, beside those of the parameters.
    codebook_scope: consensus.Source = "auto"
    #: What a step does whose gradients hold nothing to learn from.
    first_gradient: FirstGradient = "raise"

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """Set up rules and groups; a subclass has set the attributes they need before."""
        super().__init__(params, defaults)
        self._install()

    def agreement_scopes(self) -> tuple[Any, ...]:
        """Return whom this optimizer meets beside the ranks of its parameters' meshes."""
        return () if isinstance(self.codebook_scope, str) else (self.codebook_scope,)

    def _spans_ranks(self) -> bool:
        scopes = self.agreement_scopes()
        return super()._spans_ranks() or consensus.control_group(scopes).world_size > 1

    def _check(self, vote: consensus.preflight) -> None:
        super()._check(vote)
        vote.same("first_gradient", self.first_gradient)
        to_learn = any(
            momenta.to_learn_from(self, members) for momenta, members, _ in self._learners()
        )
        # May differ by right: a parameter may be new to the ranks of one mesh only. But whether
        # there is a lesson, and whether it is for nothing, concerns all that take part in it.
        # (A learning rate is read only here: it may be on a device.)
        moves = to_learn and any(float(group["lr"]) for group in self.param_groups)
        vote.range("something to learn, and to step", to_learn + moves)

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
        to_learn = vote.ranges.maximum[0]
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

    # ---- state dicts ----

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict: all ranks do, or none does and all raise the same error.

        It may be this optimizer's own, on the same ranks and meshes; one of whole tensors, which
        each rank cuts as its parameters are; or one that Gefen-X 0.5 saved. Parameters are
        matched by their place; names, where both have them, are compared. Options come from the
        state dict, as in torch.

        Args:
            state_dict: As :meth:`state_dict` returns it. Not written.

        Raises:
            ValueError: It does not belong to this optimizer, or is damaged. In a GroupFailure
                when several ranks agree. Nothing was written.
            consensus.Disagreement: Ranks were given checkpoints of different steps.

        Collectives:
            One agreement, if parameters are sharded. All ranks must call.
        """
        state_dict = dict(state_dict)
        with self._together(f"{type(self).__name__}.load_state_dict") as together:
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = pre_hook(self, state_dict) or state_dict
            staged = stage(self, state_dict)
            if together is not None:
                together.same("codebooks and steps", staged.common())
                for ranks, text in staged.by_mesh().items():
                    together.same("loaded state", text, ranks=ranks)
        self.__setstate__({"state": staged.state, "param_groups": staged.groups})
        for rule, record in zip(self._rules, staged.records, strict=True):
            if rule.momenta is not None and record is not None:
                rule.momenta.set_record(record.model_dump())
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._install()

    def _install(self) -> None:
        """Complete state dicts before any hook of the user sees them."""
        if not any(hook is pack for hook in self._optimizer_state_dict_post_hooks.values()):
            self.register_state_dict_post_hook(pack, prepend=True)

    def _together(self, phase: str) -> AbstractContextManager[consensus.fail_together | None]:
        if not self.casts_votes:
            return nullcontext()
        return consensus.fail_together(phase, self)


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
        TypeError: The substrings are one string.
    """
    if isinstance(substrings, str):
        raise TypeError(f"period_one_substrings must be a list of strings, but is: {substrings!r}")
    return PeriodRules(one_for_1d, one_for_2d, tuple(part.lower() for part in substrings))

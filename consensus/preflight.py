"""The step protocol: everything that can go wrong before an update, in one agreement.

    def step(self, closure=None):
        with consensus.preflight(self) as vote:
            loss = vote.closure(closure)
        if vote.skip:                     # an overflow, agreed by all ranks
            return loss
        self._update(vote.inv_scale)      # gradients times this, if a scaler set one
        return loss

In order, on each rank: (1) entering reads the optimizer's parameters if they have changed since
the last step and plans if that has not been done; (2) the block runs the closure and whatever else
can fail locally; (3) leaving checks parameters, gradients and AMP controls, all without writing;
(4) one vote; (5) every rank proceeds, every rank skips, or every rank raises.

Inside the capture of a CUDA graph nothing can be agreed, since nothing may be read on the host. The
step is held to what was agreed in the last one outside of the capture; see :class:`preflight`.
"""

from __future__ import annotations

import math
import struct
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import gt
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from consensus import _capture, _seams
from consensus._compile import untraced
from consensus._manifest import option_text
from consensus._nesting import nesting
from consensus.agree import ControlRange, hold, same_fact, scalar
from consensus.enclosure import rank_set
from consensus.errors import ConsensusError
from consensus.groups import control_group
from consensus.vote import Fact, Number, RangeOf, Ranks, Vote

T = TypeVar("T")

_AMP_ADVICE = (
    "Use consensus.GradScaler: torch's checks only the mesh of the first gradient of each device "
    "and dtype."
)


class preflight:
    """One agreement before an optimizer's update; see the module's example.

    Attributes:
        skip: After the block: an overflow was agreed, nobody may update.
        inv_scale: After the block: multiply gradients by this; None when no scale is set.
        ranges: After the block: the agreed ends of the controls given to :meth:`range`.
        capturing: Inside and after the block: the step is captured into a CUDA graph.
        found_inf: After a captured block with AMP: not zero if gradients of any rank overflow, in
            each replay anew; float32, one element, on the device of what GradScaler set. ``skip``
            stays False: write ``torch.where(found_inf > 0, old, new)``, state included.
        inv_scale_tensor: After a captured block: what ``inv_scale`` is otherwise, on the device.

    Under capture entering neither reads, plans nor votes, and errors of the block come as they are,
    on this rank only: peers cannot be told, and the capture is lost. Leaving checks as always, then
    compares this rank's facts with those of the last agreed step. All but counters (facts given to
    :meth:`progress`) must be the same, and so must controls given to :meth:`range`, whose agreed
    ends are taken over. Replay the graph through :class:`CapturedStep`. Not run on a GPU yet.

    Raises:
        GroupFailure: On every rank, when the block or a check failed on any.
        Disagreement: On every rank, when ranks that share a mesh differ in parameters (names,
            shapes, dtypes, placements, order), options, presence of gradients, AMP controls,
            step count, or a fact given to :meth:`same`.
        PhaseMismatch: On every rank, when one is in another agreement.
        LateRanks: A rank did not come.
        ValueError: Unwrapped, when nothing is distributed and a check fails.
        RuntimeError: Under capture, on this rank: no step was agreed before, or something is not
            as it was agreed in the last one.
        NotImplementedError: Under capture, when ``found_inf`` would have to be agreed over several
            meshes.

    Collectives:
        One message of 2 int64, reduced by maximum, on a healthy step of one mesh; up to two more
        after a mismatch. None when the optimizer holds no parameter that is sharded over several
        ranks, or has ``casts_votes = False``. Every rank of every mesh must call. Under capture no
        message, but where ``found_inf`` is set one all_reduce(MAX) of its one element for each axis
        of the mesh, on the mesh's own groups, which becomes part of the graph.
    """

    capturing = False
    found_inf: Tensor | None = None
    inv_scale_tensor: Tensor | None = None
    _moving: frozenset[str] = frozenset({"step"})  # names of facts that go on with each step

    def __init__(self, optimizer: Optimizer) -> None:
        """Prepare for one step of ``optimizer``; communicates nothing."""
        self._optimizer = optimizer
        self._phase = f"{type(optimizer).__name__}.step"
        self._facts: list[Fact] = []
        self._ranges: list[tuple[str, Number]] = []
        self.skip = False
        self.inv_scale: float | None = None
        self.ranges = ControlRange((), (), ())
        self._present = b""

    @untraced
    def __enter__(self) -> preflight:
        """Read parameters if they changed, plan if needed."""
        if _capture.is_capturing():
            self._expect_warm_up()
        self._group = control_group(self._optimizer)
        if self.capturing:
            return self._begin()
        try:
            self._group.refresh()
        except ConsensusError:  # decided by the group
            raise
        except Exception as error:  # this rank cannot read its own parameters any more
            if self._group.channel is not None:
                hold(self._group, Vote(self._phase), error=error)
            raise
        self._votes = not self._group.is_local and getattr(self._optimizer, "casts_votes", True)
        if self._votes:
            self._group.connect()
        else:
            self._group.plan()  # finds ranks that want to use a shared mesh in another way
        return self._begin()

    def _begin(self) -> preflight:
        self._user_code = _has_hooks(self._optimizer)
        self._open = nesting().enter(self._group.channel)
        return self

    def _expect_warm_up(self) -> None:
        """Go on in a capture, if there is an agreement to stand on."""
        if self._optimizer not in _past:
            raise RuntimeError(
                f"{self._phase}: expected an agreed step of this optimizer before its capture in a "
                f"CUDA graph, in which ranks cannot agree; there was none. {_capture.WARM_UP}"
            )
        self.capturing = True
        group = control_group(self._optimizer)
        changed = group.what_changed()
        if changed:
            raise RuntimeError(
                f"{self._phase}: {changed} since the last agreed step, and ranks cannot agree "
                f"inside the capture of a CUDA graph. {_capture.WARM_UP}"
            )
        self._votes = not group.is_local and getattr(self._optimizer, "casts_votes", True)

    def closure(self, function: Callable[[], T] | None) -> T | None:
        """Return what ``function`` returns, run with gradients enabled; None without one."""
        _seams.reach(f"{self._phase}: closure")
        if function is None:
            return None
        self._user_code = True
        with torch.enable_grad():
            return function()

    def range(self, name: str, value: Number | Tensor) -> None:
        """Bring a control that may differ; its ends are in :attr:`ranges` after the block."""
        self._ranges.append((name, scalar(value)))

    def same(self, name: str, value: Any, *, ranks: Ranks = ()) -> None:
        """Bring a value that must be equal on all ranks: bytes or anything JSON can hold.

        Args:
            name: What it is, for the message.
            value: As for :func:`agree_same`.
            ranks: Compare it among these only, this rank included: the ranks of one of the meshes
                that hold the optimizer's parameters. Any other set has no words of its own and is
                hashed into those of all members; where they do not all bring the same, the vote
                takes two messages more.

        Raises:
            ValueError: This rank is not one of ``ranks``.
        """
        scope = rank_set(ranks)
        if scope and self._votes and torch.distributed.get_rank() not in scope:
            raise ValueError(
                f"rank {torch.distributed.get_rank()} brings {name!r}, which is compared among "
                f"ranks {list(scope)} only"
            )
        self._facts.append(same_fact(name, value, scope))

    def progress(self, name: str, value: Any, *, ranks: Ranks = ()) -> None:
        """Bring a value as to :meth:`same` that goes on with each step, such as a counter.

        Ranks compare it all the same; a captured step need not bring what the last agreed one did.
        """
        self.same(name, value, ranks=ranks)
        if self.capturing:
            self._moving |= {name}

    @untraced
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        """Check, then vote."""
        nesting().leave(self._open)
        if self.capturing:
            if error is None and not self._open.passes(error):
                self._stand_on_last_step()
            return False
        if not self._votes:
            if error is None:
                _ = self._group.manifest  # raises when it could not be read
                self._read_amp()
                self.ranges = _control_range([RangeOf(n, v, v) for n, v in self._ranges])
                if self._optimizer not in _past:
                    _past[self._optimizer] = _Past()
            return False
        if self._open.passes(error):
            return False
        facts: tuple[Fact, ...] = ()
        if error is None:
            try:
                _seams.reach(f"{self._phase}: check")
                facts = self._check()
            except BaseException as found:  # told to the peers, then raised
                error = found
        vote = Vote(
            self._phase,
            facts=facts,
            ranges=tuple(self._ranges),
        )
        decision = hold(self._group, vote, error=error)
        self.ranges = _control_range(decision.ranges)
        self._remember(facts)
        return False

    def _stand_on_last_step(self) -> None:
        """Check, as before a vote; then compare with what ranks agreed on in the last step."""
        past = _past[self._optimizer]
        if self._votes:
            nesting().refuse(self._group.channel)
            changed = _capture.changed_facts(past.facts, self._check(), moving=self._moving)
            if tuple(self._ranges) != past.brought:
                changed.append(f"controls: were {list(past.brought)}, are {self._ranges}")
            if changed:
                raise RuntimeError(
                    f"{self._phase}: expected a captured step to bring what ranks agreed on in the "
                    f"last one; {'; '.join(changed)}. Make one more step outside of the capture "
                    "with what is to be captured."
                )
            self.ranges = past.ranges or self.ranges
            if self.found_inf is not None:
                self.found_inf = _capture.agree_in_graph(self.found_inf, self._group, self._phase)
        else:
            _ = self._group.manifest
            self._hand_out_amp()
            self.ranges = _control_range([RangeOf(n, v, v) for n, v in self._ranges])
        _capture.note_captured(self._optimizer)

    def _check(self) -> tuple[Fact, ...]:
        """Return this rank's facts; raises what this rank cannot go on with."""
        groups = self._optimizer.param_groups
        manifest = self._group.manifest
        if manifest is None:
            return (*self._facts, self._read_amp())
        if self._user_code and not manifest.is_current(groups):
            raise ValueError(
                f"parameters changed during the step: {manifest.what_changed(groups)}. A closure "
                "or hook must not replace parameters; do it between steps."
            )
        present = self._present = manifest.gradients()
        self._expect_some_gradient(present)
        done = _past.get(self._optimizer, _Past()).steps
        step = Fact("step", b"%d" % done, lambda: {"": str(done)})
        facts = (*self._group.identity, *manifest.facts(groups, present))
        return (*facts, step, self._read_amp(), *self._facts)

    def _expect_some_gradient(self, present: bytes) -> None:
        if not present or any(present):
            return
        channel = self._group.channel
        if channel is not None and channel.wounded:
            raise ValueError(
                "no parameter has a gradient, in the first step after a failure: after a backward "
                "pass that raised, FSDP2 leaves gradients None without an error, and training "
                "would stand still. Call consensus.recover(model, error) in the handler of the "
                "failure, or restart from a checkpoint."
            )
        warnings.warn(f"{self._phase}: no parameter has a gradient on any rank", stacklevel=5)

    def _remember(self, facts: tuple[Fact, ...]) -> None:
        """Note an agreed step; a failure before it is over once all usual gradients are back.

        One that is left from the backward pass that failed does not show that the next one ran.
        """
        past = _past.get(self._optimizer, _Past())
        present, channel = self._present, self._group.channel
        if channel is not None and channel.wounded:
            same = len(past.present) == len(present)
            channel.wounded = same and any(map(gt, past.present, present))
            present = past.present if channel.wounded else present
        _past[self._optimizer] = _Past(
            past.steps + 1, present, facts, tuple(self._ranges), self.ranges
        )

    def _read_amp(self) -> Fact:
        """Parse the controls a GradScaler sets; writes nothing.

        Reading them waits for the device once, as torch's own fused optimizers do.
        """
        if self.capturing:
            return self._hand_out_amp()
        found_inf = getattr(self._optimizer, "found_inf", None)
        grad_scale = getattr(self._optimizer, "grad_scale", None)
        overflow, scale = (
            None if value is None else float(scalar(value)) for value in (found_inf, grad_scale)
        )
        if overflow is not None and not (math.isfinite(overflow) and overflow >= 0):
            raise ValueError(f"expected found_inf to be finite and >= 0; got {overflow!r}")
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"expected grad_scale to be finite and > 0; got {scale!r}")
        self.skip = bool(overflow)
        if scale is not None:  # rounded to float32, as torch's GradScaler does
            self.inv_scale = float(struct.unpack("f", struct.pack("f", 1.0 / scale))[0])
        items = {
            "overflow (found_inf)": "absent" if overflow is None else str(bool(overflow)),
            "grad_scale": "absent" if scale is None else option_text(scale),
        }
        return Fact("AMP", ";".join(items.values()).encode(), lambda: items, advice=_AMP_ADVICE)

    def _hand_out_amp(self) -> Fact:
        """Leave the controls on the device: a captured step reads nothing."""
        items: dict[str, str] = {}
        for name, shown in (("found_inf", "overflow (found_inf)"), ("grad_scale", "grad_scale")):
            value = getattr(self._optimizer, name, None)
            if value is not None and not (isinstance(value, Tensor) and value.numel() == 1):
                raise ValueError(
                    f"expected {name} to be a one-element tensor under capture; got {value!r}"
                )
            items[shown] = _capture.ABSENT if value is None else "present"
        self.found_inf = getattr(self._optimizer, "found_inf", None)
        scale: Tensor | None = getattr(self._optimizer, "grad_scale", None)
        if scale is not None:  # rounded to float32, as torch's GradScaler does
            self.inv_scale_tensor = scale.double().reciprocal().float()
        return Fact("AMP", ";".join(items.values()).encode(), lambda: items, advice=_AMP_ADVICE)


@dataclass(frozen=True, slots=True)
class _Past:
    """What the agreed steps of an optimizer leave behind."""

    steps: int = 0
    present: bytes = b""  # gradients of the last one
    facts: tuple[Fact, ...] = ()  # of the last one; none where nobody else took part
    brought: tuple[tuple[str, Number], ...] = ()  # ranges of this rank
    ranges: ControlRange | None = None  # as agreed


_past: weakref.WeakKeyDictionary[Optimizer, _Past] = weakref.WeakKeyDictionary()


def _has_hooks(optimizer: Optimizer) -> bool:
    return bool(_global_optimizer_pre_hooks or optimizer._optimizer_step_pre_hooks)


def _control_range(found: Any) -> ControlRange:
    return ControlRange(
        tuple(item.minimum for item in found),
        tuple(item.maximum for item in found),
        tuple(item.name for item in found if not item.unanimous),
        tuple(item.name for item in found),
    )

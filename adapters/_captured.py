"""Steps that are captured in a CUDA graph: what they need, and what stays on the device.

See [Note: a graph holds what the host decided] in :mod:`consensus._capture`. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import consensus

if TYPE_CHECKING:
    from adapters._rules import Member, Owner, Rule


@dataclass(frozen=True, slots=True)
class InGraph:
    """What a captured step must not read on the host."""

    overflow: Tensor | None  # shape (), bool: where it is true, nothing may change
    inv_scale: Tensor | None  # shape (), float32: what to multiply gradients by

    @classmethod
    def of(cls, vote: consensus.preflight) -> InGraph:
        """Take over what a captured agreement hands out."""
        found_inf, inv_scale = vote.found_inf, vote.inv_scale_tensor
        return cls(
            None if found_inf is None else found_inf.reshape(()) > 0,
            None if inv_scale is None else inv_scale.reshape(()),
        )

    def unscaled(self, grad: Tensor) -> Tensor:
        """Return a gradient, unscaled; a copy only where it is scaled."""
        if self.inv_scale is None:
            return grad
        return (widened(grad) * self.inv_scale).to(grad.dtype)

    def write_(self, old: Tensor, new: Tensor) -> None:
        """Write ``new`` over ``old``, unless gradients overflow."""
        old.copy_(new if self.overflow is None else new.where(~self.overflow, old))


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 or wider: on a GPU a narrow one rounds a factor in a tensor."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def expect_capturable(owner: Any, by_rule: Iterable[tuple[Rule, Sequence[Member]]]) -> None:
    """Raise unless a step of these rules can be captured. In the capture, before it computes.

    Raises:
        RuntimeError: Something must be learned, or made, or asked for, before the capture.
        NotImplementedError: These steps cannot be captured.
    """
    known = [(rule, members) for rule, members in by_rule if members]
    kind = type(owner).__name__
    for rule, _ in known:
        if rule.momenta is not None and rule.momenta.codebook is None:
            raise RuntimeError(
                f"{kind}: {rule.label}expected a codebook before the capture of a step in a CUDA "
                "graph, inside of which none can be learned; there is none yet. Make steps outside "
                "of the capture until a gradient has been something else than zero."
            )
    if owner.commit_vote:
        raise NotImplementedError(
            f"{kind}: commit_vote = True asks for an agreement before each update is written, "
            "which a CUDA graph cannot hold. Set it to False before the capture."
        )
    for rule, members in known:
        rule.check_capture(owner, [each for each in members if each.param.grad is not None])


def refusal(owner: Owner, label: str, why: str) -> NotImplementedError:
    """Return the error for steps that cannot be captured."""
    return NotImplementedError(
        f"{type(owner).__name__}: {label}a step cannot be captured in a CUDA graph {why}. Capture "
        "forward and backward passes, and make the step outside of the graph."
    )

"""What an optimizer does to some of its parameters: check, compute, and only then write.

An optimizer here holds one rule, or several that each own some of its parameter groups. The
optimizer agrees once for all of them (see :mod:`adapters._base`), and no rule writes before every
rule has computed: a step is made by all, or by none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from pydantic import BaseModel
from torch import Tensor
from torch.distributed.tensor import DTensor

import consensus
from adapters._captured import refusal
from adapters._data_phase import DataPhase
from adapters._plan import Ranks
from adapters._transports import Transport

if TYPE_CHECKING:
    from adapters._momenta import Momenta


class Member(NamedTuple):
    """One parameter of an optimizer."""

    position: int  # in the optimizer's full list of parameters
    name: str
    param: Tensor
    group: dict[str, Any]


class Write(Protocol):
    """What a step will do to some parameters, computed but not yet written."""

    def commit(self) -> None:
        """Write it, with operations that their operands cannot fail."""


class Owner(Protocol):
    """What a rule may ask of the optimizer that it belongs to."""

    state: Any
    bucket_bytes: int | None
    transport: Transport


class Rule(ABC):
    """How the parameters of some groups are updated.

    In a step: ``check_capture`` in a capture, ``check_state``, ``vote``, ``plan`` and
    ``needs_commit_vote`` inside the agreement; then ``compute``.
    """

    #: What these options may be.
    options: type[BaseModel]
    #: Whether its steps meet other ranks. If not, it only takes part in planning.
    meets_ranks: bool = True
    #: What its momenta are made of, where they are quantised.
    momenta: Momenta | None = None

    def __init__(
        self, label: str = "", owns: Callable[[Mapping[str, Any]], bool] = lambda group: True
    ) -> None:
        """Make the rule of the groups for which ``owns`` is true.

        Args:
            label: Precedes its facts in error texts, where an optimizer has several rules.
            owns: Whether a parameter group is this rule's.
        """
        self.label = label
        self.owns = owns

    @abstractmethod
    def check_parameter(self, member: Member) -> None:
        """Raise if this rule cannot update the parameter. At construction; no collectives."""

    def read(self, members: Sequence[Member]) -> None:
        """Read from the parameters what is needed in each step. Only when they are others."""
        del members

    def check_state(self, owner: Owner, member: Member) -> None:
        """Raise if the state of a parameter is not usable. Only when it may be another."""
        del owner, member

    def vote(self, owner: Owner, members: Sequence[Member], vote: consensus.preflight) -> None:
        """Bring facts that must be equal on all ranks. In each step; no collectives."""
        del owner, members, vote

    def needs_commit_vote(self, ranks: Ranks, members: Sequence[Member]) -> bool:
        """Whether some of these ranks might not hear of a failure of which all are to hear."""
        del ranks, members
        return False

    def check_capture(self, owner: Owner, members: Sequence[Member]) -> None:
        """Raise unless a step can be captured in a CUDA graph. Before anything is computed.

        Args:
            owner: The optimizer.
            members: The parameters of this rule that have a gradient.

        Raises:
            RuntimeError: Something must be done before the capture.
            NotImplementedError: It cannot.
        """
        raise refusal(owner, self.label, "yet: what it does is decided on the host")

    def plan(self, owner: Owner, members: Sequence[Member]) -> Mapping[torch.device, int]:
        """Plan the exchanges of a step. In each step, after ``vote``; no collectives.

        Returns:
            How many bfloat16 elements of memory they need on each device. It is taken before ranks
            agree, so that none goes on to exchanges for which another has no room.
        """
        del owner, members
        return {}

    @abstractmethod
    def compute(
        self,
        owner: Owner,
        members: Sequence[Member],
        inv_scale: float | None,
        phase: DataPhase,
    ) -> Sequence[Write]:
        """Return what to write. Runs without gradient tracking, after all ranks agreed.

        Whatever can fail here is attempted by ``phase``, and exchanges are made all the same: see
        [Note: a failure travels along] in :mod:`adapters._data_phase`.

        Args:
            owner: The optimizer; nothing of it is written.
            members: The parameters of this rule that have a gradient.
            inv_scale: What to multiply gradients by, or None. ``p.grad`` itself is not written.
            phase: Takes errors, and holds the memory that was planned.

        Returns:
            What to write; it is not used if any rank failed.
        """


def gradient_of(member: Member, inv_scale: float | None, *, widen: bool = False) -> Tensor:
    """Return this rank's part of a gradient, unscaled; a copy only where it is scaled.

    Args:
        member: A parameter with a gradient.
        inv_scale: What to multiply it by, or None.
        widen: Multiply in float32: in float16 a small gradient would vanish.
    """
    if member.param.grad is None:
        raise AssertionError("only parameters with a gradient are updated")
    grad = local(member.param.grad)
    if inv_scale is None:
        return grad
    return (grad.float() if widen else grad) * inv_scale


def scalar_lr(group: Mapping[str, Any]) -> float | Tensor:
    """Return the learning rate as a number, or as a tensor without dimensions."""
    lr: float | Tensor = group["lr"]
    return lr.squeeze() if isinstance(lr, Tensor) else lr


def group_id(group: Mapping[str, Any]) -> int:
    """Return what tells parameter groups apart; torch 2.9 traces no id of the dict itself."""
    return id(group["params"][0])


def were_written(params: Iterable[Tensor]) -> None:
    """Tell autograd that parameters were written through their local parts."""
    # Autograd watches the DTensor, which does not see what happens to its shard.
    sharded = [param for param in params if isinstance(param, DTensor)]
    torch.autograd.graph.increment_version(sharded)


def spans_ranks(param: Tensor) -> bool:
    """Return whether a parameter is spread or copied over a mesh of more than one rank."""
    return isinstance(param, DTensor) and param.device_mesh.size() > 1


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: the tensor itself unless it is a DTensor.

    Call it without gradient tracking: then the result shares memory with the argument.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_gradient(name: str, param: Tensor) -> None:
    """Raise if the gradient cannot be used as this rank's part of the parameter's gradient.

    Raises:
        RuntimeError: The gradient is sparse.
        ValueError: It is placed in another way than the parameter.
    """
    grad = param.grad
    if grad is None:
        return
    if grad.layout is not torch.strided:
        raise RuntimeError(f"sparse gradients are not supported; {name} has one: {grad.layout}")
    if not _same_placement(grad, param):
        raise ValueError(
            f"the gradient of {name} is {_placement(grad)}, the parameter is {_placement(param)}. "
            "Redistribute the gradient before the step."
        )


def check_state(name: str, param: Tensor, value: Tensor | None) -> None:
    """Raise if a state tensor, such as one from a checkpoint, does not lie as its parameter does.

    Raises:
        ValueError: It is placed in another way, or has another shape.
    """
    if value is None or (_same_placement(value, param) and value.shape == param.shape):
        return
    raise ValueError(
        f"the state of {name} has shape {tuple(value.shape)} and is {_placement(value)}; expected "
        f"shape {tuple(param.shape)}, {_placement(param)}. Load a checkpoint through "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which cuts it as the "
        "parameters are cut."
    )


def _same_placement(tensor: Tensor, param: Tensor) -> bool:
    if not isinstance(param, DTensor):
        return not isinstance(tensor, DTensor)
    if not isinstance(tensor, DTensor) or tensor.device_mesh != param.device_mesh:
        return False
    # On an axis of one rank every placement means the same.
    mesh = param.device_mesh
    pairs = zip(tensor.placements, param.placements, strict=True)
    return all(mine == its or mesh.size(axis) == 1 for axis, (mine, its) in enumerate(pairs))


def _placement(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return f"placed as {tensor.placements} on {tensor.device_mesh}"
    return "a plain tensor"

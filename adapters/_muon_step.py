"""What a step of Muon will do to its matrices: computed by the rule, then written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adapters._batches import Kind, newton_schulz_stacked
from adapters._captured import InGraph, widened
from adapters._exchange import joined
from adapters._newton_schulz import (
    ROW_BETA,
    ROW_EPS,
    nesterov_direction,
    newton_schulz,
    normalize_rows,
    schedule_of,
)
from adapters._rules import Member, group_id, local, were_written


@dataclass(slots=True)
class Pending:
    """What a step will do to one matrix, computed but not yet written."""

    member: Member
    states: Any  # of the optimizer; written by commit only
    grad: Tensor  # this rank's part, unscaled
    decay: float | Tensor  # factor for the weights
    alpha: float | Tensor  # factor for the update; a tensor in a CUDA graph only
    row_key: str  # of the moment of rows in the state
    kind: Kind | None  # of matrices that are computed together; None for one by one
    momentum_buffer: Tensor | None = None  # where it is dense: as it stands, or zeros
    update: Tensor | None = None  # this rank's part, bfloat16; None where that is empty
    # Where rows are normalised: (rows, 1), of the whole matrix; or, where an owner computes, of
    # this rank's rows.
    row_moment: Tensor | None = None

    def direction(self) -> Tensor:
        """This rank's part of the matrix to orthogonalise, in memory of its own."""
        group = self.member.group
        return nesterov_direction(
            self.grad,
            local(self._buffer()),
            momentum=group["momentum"],
            nesterov=group["nesterov"],
        )

    @staticmethod
    def directions(pending: Sequence[Pending]) -> Sequence[Tensor]:
        """The directions of several matrices, with few calls where that gives the same bits."""
        group = pending[0].member.group
        grads = [each.grad for each in pending]
        alike = all(each.member.group is group for each in pending)
        if not alike or any(grad.dtype is not torch.float32 for grad in grads):
            return [each.direction() for each in pending]
        momentum, buffers = group["momentum"], [local(each._buffer()) for each in pending]
        found = torch._foreach_lerp(buffers, grads, 1 - momentum)
        return torch._foreach_lerp(grads, found, momentum) if group["nesterov"] else found

    def finish(
        self, update: Tensor, moment: Tensor | None, age: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Normalise the rows of an orthogonal matrix, if asked for; the arguments are not written.

        Args:
            update: The whole matrix, orthogonalised.
            moment: Of all its rows, (rows, 1); None where rows are not normalised, or at first.
            age: How many steps it has seen, where this rank may not know: shape ().

        Returns:
            The update, bfloat16, and the new moment of its rows.
        """
        if not self.normalizes_rows:
            return update, None
        if moment is None:
            moment = update.new_zeros(update.size(0), 1, dtype=torch.float32)
        moment = moment.to(update.device)  # a checkpoint may have brought it to that of the shard
        group = self.member.group
        step = self.state.get("normuon_step")
        if step is None:  # read from the device only if this rank does not know
            step = 0 if age is None else int(age)
        step += 1
        # A group may ask for it where the optimizer does not, and so has no defaults for it.
        beta, eps = group.get("normuon_beta2", ROW_BETA), group.get("normuon_eps", ROW_EPS)
        return normalize_rows(update, moment, beta=beta, bias=1 - beta**step, eps=eps)

    @property
    def state(self) -> Mapping[str, Any]:
        """What is stored of the parameter; read only."""
        found: Mapping[str, Any] = self.states.get(self.member.param, {})
        return found

    @property
    def normalizes_rows(self) -> bool:
        """Whether the rows of the update are normalised."""
        return bool(self.member.group.get("normuon", False))

    def commit_rows(self) -> None:
        """Write the moment of the rows, where they are normalised."""
        if self.row_moment is not None:
            state = self.states[self.member.param]
            is_whole = self.row_key == "normuon_v"
            state[self.row_key] = self.row_moment if is_whole else joined(self.row_moment)[:, None]
            state["normuon_step"] = state.get("normuon_step", 0) + 1

    @staticmethod
    def commit_momenta(pending: Sequence[Pending]) -> None:
        """Write the momenta."""
        by_weight: dict[float, list[Pending]] = {}
        for each in pending:
            each.states[each.member.param]["momentum_buffer"] = each._buffer()
            by_weight.setdefault(1 - each.member.group["momentum"], []).append(each)
        for weight, some in by_weight.items():
            # Again, in place: the same bits that direction() saw, which nobody kept until now.
            buffers = [local(each._buffer()) for each in some]
            grads = [each.grad for each in some]
            if torch.compiler.is_compiling():  # torch 2.9 traces the other with other bits
                for buffer, grad in zip(buffers, grads, strict=True):
                    buffer.lerp_(grad, weight)
            else:
                torch._foreach_lerp_(buffers, grads, weight)

    def _buffer(self) -> Tensor:
        """The momentum as it stands in the state, or zeros that are not there yet."""
        if self.momentum_buffer is None:
            raise AssertionError("a dense momentum is there before it is used")
        return self.momentum_buffer


@dataclass(frozen=True, slots=True)
class Step:
    """What a step will do to all matrices of a rule: few calls, however many matrices."""

    pending: Sequence[Pending]

    def commit(self) -> None:
        """Write them and their state, with operations that their operands cannot fail."""
        if self.pending:
            self.pending[0].commit_momenta(self.pending)
        by_rate: dict[tuple[Any, ...], list[Pending]] = {}
        for each in self.pending:
            each.commit_rows()
            by_rate.setdefault((each.decay, each.alpha, each.member.param.dtype), []).append(each)
        for (decay, alpha, dtype), some in by_rate.items():
            params = [local(each.member.param) for each in some]
            pairs = [(p, e.update) for p, e in zip(params, some, strict=True)]
            moved = [(p, u) for p, u in pairs if u is not None]
            if dtype is torch.float32:
                torch._foreach_mul_(params, decay)
                if moved:
                    torch._foreach_add_([p for p, _ in moved], [u for _, u in moved], alpha=alpha)
                continue
            # Of narrower ones torch may round the factors too when it takes many at once.
            for param in params:
                param.mul_(decay)
            for param, update in moved:
                param.add_(update, alpha=alpha)
        were_written(each.member.param for each in self.pending)


@dataclass(frozen=True, slots=True)
class MaskedStep:
    """As :class:`Step`, in a CUDA graph: nothing is read, and an overflow leaves all as it was."""

    pending: Sequence[Pending]
    in_graph: InGraph

    def commit(self) -> None:
        """Write matrices and momenta where no gradient overflows."""
        for each in self.pending:
            buffer, param = local(each._buffer()), local(each.member.param)
            weight = 1 - each.member.group["momentum"]
            self.in_graph.write_(buffer, torch.lerp(buffer, each.grad, weight))
            update, alpha = each.update, each.alpha
            if isinstance(alpha, Tensor):
                moved = widened(param) * each.decay
                if update is not None:
                    moved.add_(widened(update) * alpha)
            else:
                moved = param * each.decay
                if update is not None:
                    moved.add_(update, alpha=alpha)
            self.in_graph.write_(param, moved)
        were_written(each.member.param for each in self.pending)


def kind_of(member: Member) -> Kind:
    """Return what a matrix must have in common with others to be computed together."""
    rows, cols = member.param.shape
    return Kind((rows, cols), schedule_of(member.group), member.group["eps"])


def orthogonalize(
    works: Sequence[Pending],
    matrices: Tensor,  # (number, rows, cols)
) -> Tensor | list[Tensor]:
    """Newton-Schulz of whole matrices: of one kind, or a single one. They are not written."""
    if len(works) > 1:
        kind = works[0].kind
        one_of_each_group = {group_id(each.member.group): each.member for each in works}
        # Options may have changed since kinds were read.
        if kind and all(kind_of(member) == kind for member in one_of_each_group.values()):
            return newton_schulz_stacked(matrices, kind)
    options = [each.member.group for each in works]
    return [
        newton_schulz(matrix, schedule_of(group), eps=group["eps"])
        for matrix, group in zip(matrices, options, strict=True)
    ]

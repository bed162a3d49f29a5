"""Gefen's rule: AdamW with a quantised momentum and a second moment of few numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import consensus
from adapters._data_phase import DataPhase
from adapters._gefen_math import (
    SquareSums,
    apply_,
    average,
    block_scale,
    block_square_sums,
    block_update,
    cut_values,
    factored_scale,
    factored_update,
    set_cut_values_,
    square_sums,
)
from adapters._momenta import Counted, Momenta, Moving, age
from adapters._period import PeriodRules
from adapters._reshard import Reduction, reduce_together
from adapters._rules import Member, Owner, Rule, Write, gradient_of, local, scalar_lr, were_written
from adapters._shards import Shards, read_shards
from adapters.options import GefenOptions


@dataclass(slots=True, eq=False)
class _Pending:
    """What a step will do to one parameter, computed but not yet written."""

    moving: Moving
    states: Any  # of the optimizer; written by commit only
    update: Tensor | None = None  # this rank's part, float32, the learning rate included

    @property
    def member(self) -> Member:
        return self.moving.member

    @property
    def group(self) -> dict[str, Any]:
        return self.moving.member.group

    @property
    def state(self) -> dict[str, Any]:
        """What is stored of the parameter; read only."""
        found: dict[str, Any] = self.states.get(self.member.param, {})
        return found

    def bias1(self) -> float:
        beta: float = self.group["betas"][0]
        step: int = self.state.get("step", 0) + 1
        return 1 - math.pow(beta, step)

    def commit(self) -> None:
        """Write the parameter and its moments, with operations that their operands cannot fail."""
        group = self.group
        if self.update is None:
            raise AssertionError("a step computes before it writes")
        decay = 1 - scalar_lr(group) * group["weight_decay"]
        apply_(local(self.member.param), self.update, decay=decay)
        were_written([self.member.param])
        self.moving.commit(self.states)
        state = self.states[self.member.param]
        state["step"] = state.get("step", 0) + 1


@dataclass(slots=True, eq=False)
class _Block(_Pending):
    """With one second moment for each block."""

    sums: Tensor | None = None  # (blocks here,) of squares, over whole blocks
    vmean: Tensor | None = None

    def measure(self) -> Tensor:
        """Sum squares; return the sums that other ranks must complete."""
        self.sums = block_square_sums(self.moving.grad, self.moving.grid)
        return cut_values(self.sums, self.moving.grid)

    def compute(self, completed: Tensor) -> None:
        """Compute the update."""
        moving, group, grid = self.moving, self.group, self.moving.grid
        assert self.sums is not None
        set_cut_values_(self.sums, completed, grid)
        beta = group["betas"][1]
        old = self.state.get("vmean")
        old = torch.zeros_like(self.sums) if old is None else old
        self.vmean = average(old, self.sums / grid.period, beta=beta)
        scale = block_scale(
            self.vmean,
            bias1=self.bias1(),
            bias2=1 - beta ** (age(self.state, "vmean", "vmean_step") + 1),
            eps=group["eps"],
        )
        self.update = block_update(
            moving.indices,
            moving.magnitudes,
            scale,
            book=moving.book,
            grid=grid,
            lr=scalar_lr(group),
        )

    def commit(self) -> None:
        """Write the second moment too."""
        state = self.states[self.member.param]
        state["vmean_step"] = age(state, "vmean", "vmean_step") + 1
        state["vmean"] = self.vmean
        _Pending.commit(self)


@dataclass(slots=True, eq=False)
class _Factored(_Pending):
    """With one second moment for each row and one for each column of a matrix.

    [Note: rows and columns of shards]
        Where only rows are cut, a rank keeps the moments of its own rows and of all columns, and
        column sums are added up across ranks. Where columns are cut, so are row sums. The scale
        wants the mean over all rows; over all columns it is the same but for rounding, since
        both are the average of all squares, and that one every rank has.
    """

    sums: SquareSums | None = None
    v_row: Tensor | None = None  # (rows here,)
    v_col: Tensor | None = None  # (columns,), all of the matrix

    def measure(self) -> Tensor:
        """Sum squares; return the sums that other ranks must complete."""
        shards = self.moving.shards
        cols = shards.shape[1]
        self.sums = sums = square_sums(self.moving.grad)
        if not shards.groups:
            return sums.by_col
        own = shards.rectangle
        vector = sums.by_col.new_zeros(num_factored_sums(shards))
        vector[own.first_col : own.first_col + own.num_cols] = sums.by_col
        if shards.is_cut[1]:
            vector[cols + own.first_row : cols + own.first_row + own.num_rows] = sums.by_row
        return vector

    def compute(self, completed: Tensor) -> None:
        """Compute the update."""
        moving, group, shards = self.moving, self.group, self.moving.shards
        rows, cols = shards.shape
        own = shards.rectangle
        assert self.sums is not None
        by_row = self.sums.by_row
        if shards.is_cut[1]:
            by_row = completed[cols + own.first_row : cols + own.first_row + own.num_rows]
        beta = group["betas"][1]
        self.v_row = average(self._old("v_row", by_row), by_row / cols, beta=beta)
        by_col = completed[:cols]
        self.v_col = average(self._old("v_col", by_col), by_col / rows, beta=beta)
        scale = factored_scale(
            self.v_row,
            self.v_col[own.first_col : own.first_col + own.num_cols],
            row_mean=(self.v_col if shards.groups else self.v_row).mean(),
            bias1=self.bias1(),
            bias2=1 - beta ** (age(self.state, "v_row", "factored_step") + 1),
            eps=group["eps"],
        )
        self.update = factored_update(
            moving.indices,
            moving.magnitudes,
            scale,
            book=moving.book,
            grid=moving.grid,
            lr=scalar_lr(group),
        )

    def _old(self, key: str, like: Tensor) -> Tensor:
        found: Tensor | None = self.state.get(key)
        return torch.zeros_like(like) if found is None else found

    def commit(self) -> None:
        """Write the second moment too."""
        state = self.states[self.member.param]
        state["factored_step"] = age(state, "v_row", "factored_step") + 1
        state["v_row"], state["v_col"] = self.v_row, self.v_col
        _Pending.commit(self)


def num_factored_sums(shards: Shards) -> int:
    """Return how many sums of squares the ranks of a factored matrix complete."""
    rows, cols = shards.shape
    return cols + (rows if shards.is_cut[1] else 0)


class GefenRule(Rule):
    """Gefen for parameters of any shape: plain tensors, or DTensors that stay cut."""

    options = GefenOptions
    momenta: Momenta

    def __init__(self, periods: PeriodRules, *, refresh_every: int, **kwargs: Any) -> None:
        """Make the rule; see :class:`Momenta`, and :class:`Rule` for the keyword arguments."""
        super().__init__(**kwargs)
        self.momenta = Momenta(periods, refresh_every=refresh_every)

    def check_parameter(self, member: Member) -> None:
        """Raise unless the parameter is real and its placement is supported."""
        if not member.param.is_floating_point():
            raise ValueError(
                f"Gefen supports real floating-point parameters; {member.name} is "
                f"{member.param.dtype}"
            )
        read_shards(member.param, name=member.name)

    def read(self, members: Sequence[Member]) -> None:
        """Read where the elements of each parameter lie."""
        self.momenta.read(members)

    def vote(self, owner: Owner, members: Sequence[Member], vote: consensus.preflight) -> None:
        """Bring what the momenta are made of."""
        self.momenta.vote(owner, members, vote, self.label)

    def compute(
        self,
        owner: Owner,
        members: Sequence[Member],
        inv_scale: float | None,
        phase: DataPhase,
    ) -> Sequence[Write]:
        """Return the updates of all parameters.

        Collectives:
            For each layout, and each of its cuts, up to two all_reduces of float32: MAX over the
            blocks that lie on several ranks; SUM over those blocks, and the columns (and, where
            columns are cut, rows) of factored matrices; and one element more. None where there is
            nothing of the kind.
        """
        members = [each for each in members if self.momenta.has_elements(each.param)]
        pending: list[_Block | _Factored] = []
        sums: list[Tensor] = []
        phase.attempt(
            lambda: pending.extend(self._start(owner, inv_scale, each) for each in members)
        )
        self.momenta.advance(
            owner,
            members,
            [each.moving for each in pending],
            lambda member: member.group["betas"][0],
            phase,
        )
        phase.attempt(lambda: sums.extend(each.measure() for each in pending))
        parts = [self._shared_sums(owner, member) for member in members]
        completed = reduce_together(parts, sums, "sum", phase)

        def compute() -> None:
            for each, some in zip(pending, completed, strict=True):
                each.compute(some)

        phase.attempt(compute)
        return [*pending, Counted(self.momenta)]

    def _start(self, owner: Owner, inv_scale: float | None, member: Member) -> _Block | _Factored:
        grad = gradient_of(member, inv_scale, widen=True)
        moving = self.momenta.start(owner, member, grad)
        return (_Factored if _is_factored(member) else _Block)(moving, owner.state)

    def _shared_sums(self, owner: Owner, member: Member) -> Reduction:
        shards = self.momenta.shards(member.param)
        if _is_factored(member):
            return shards.between_parts(num_factored_sums(shards))
        return shards.between_parts(self.momenta.num_cut(owner, member))


def _is_factored(member: Member) -> bool:
    return member.param.ndim == 2 and bool(member.group["factored_v_2d"])

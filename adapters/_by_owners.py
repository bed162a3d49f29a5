"""Each matrix computed once: shards to its owner, Newton-Schulz there, the update's parts back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import consensus
from adapters._batches import Kind, in_batches
from adapters._exchange import Courier
from adapters._owners import Round, Route
from adapters._rules import Member, local


class Work(Protocol):
    """What a step will do to one matrix, as far as its owner and its holders are concerned."""

    member: Member
    update: Tensor | None
    row_moment: Tensor | None
    kind: Kind | None

    @property
    def state(self) -> Mapping[str, Any]:
        """What is stored of the parameter."""

    def direction(self) -> Tensor:
        """This rank's part of the matrix to orthogonalise."""

    def finish(
        self, update: Tensor, moment: Tensor | None, age: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The update of the whole matrix, and the new moment of its rows."""


Orthogonalize: TypeAlias = Callable[[Sequence[Any], Sequence[Tensor]], list[Tensor]]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def compute_by_owners(
    rounds: Sequence[tuple[Round, Route]],
    pending: Mapping[int, Any],
    owner: Any,
    orthogonalize: Orthogonalize,
    *,
    commit_vote: bool,
) -> None:
    """Set the update of each pending matrix; nothing is written.

    See [Note: a failure travels along]: a rank that fails takes part to the end, and then all
    raise.

    Args:
        rounds: What travels together; equal on all ranks of each crew.
        pending: Position -> :class:`Work`, of the matrices with a gradient.
        owner: The optimizer, in whose control group ranks agree.
        orthogonalize: Newton-Schulz of matrices of one kind, or of a single one.
        commit_vote: Whether to agree before anything is written: needed where a rank that is tied
            to others takes no part in some of the exchanges, and so hears nothing in them.

    Raises:
        consensus.GroupFailure: A rank failed while it packed or computed.

    Collectives:
        Each round: one all_to_all of bfloat16 for each cut to the owners, and one back; with
        copies of shards, one more for each axis that copies. An agreement on a failure, or if
        ``commit_vote``.
    """
    errors: list[BaseException] = []
    heard = [_take_part(*each, pending, orthogonalize, errors) for each in rounds]
    failed = bool(heard) and bool(torch.stack(heard).any())
    if not (failed or commit_vote):
        return
    phase = f"{type(owner).__name__}.step: updates by owners"
    with consensus.fail_together(phase, owner) if commit_vote or failed else nullcontext():
        if errors:
            raise errors[0]
    if failed:
        raise AssertionError("a rank failed, but none brought an error")


def _take_part(
    round_: Round,
    route: Route,
    pending: Mapping[int, Any],
    orthogonalize: Orthogonalize,
    errors: list[BaseException],
) -> Tensor:
    """Take part in one round, also after an error; return whether any rank had one, shape ()."""
    first = pending[round_.tasks[0].position].member.param
    if not isinstance(first, DTensor):
        raise AssertionError("what travels is sharded")
    courier = Courier(round_, route, first)
    _attempt(errors, partial(_pack, courier, pending))
    courier.to_owners(failed=bool(errors))
    _attempt(errors, partial(_compute, courier, pending, orthogonalize))
    courier.from_owners(failed=bool(errors))
    return courier.heard


def _attempt(errors: list[BaseException], work: Any) -> None:
    """Do some work unless some has failed; an error waits until peers have been told."""
    if errors:
        return
    try:
        work()
    except BaseException as error:  # raised by the caller, when all know
        errors.append(error)


def _pack(courier: Courier, pending: Mapping[int, Work]) -> None:
    for task, piece in courier.route.gathered:
        work = pending[task.position]
        courier.pack(piece, work.direction(), _own_rows(work) if task.with_rows else None)


def _own_rows(work: Work) -> Tensor:
    """The moments of the rows that lie here, flat, and last how many steps they have seen."""
    part = local(work.member.param)
    known = work.state.get("normuon_rows")
    flat = torch.zeros(part.size(0), device=part.device) if known is None else known.flatten()
    return torch.cat([flat, flat.new_tensor([work.state.get("normuon_step", 0)])])


def _compute(courier: Courier, pending: Mapping[int, Work], orthogonalize: Orthogonalize) -> None:
    # First, where a rank can still tell that it failed: see Courier.views.
    for position, (update, rows) in courier.views().items():
        work = pending[position]
        work.update, work.row_moment = update, rows if len(rows) else None
    owned = courier.route.owned
    for batch in in_batches([pending[task.position].kind for task, _, _ in owned]):
        some = [owned[i] for i in batch]
        works = [pending[task.position] for task, _, _ in some]
        assembled = [courier.assemble(task, got) for task, got, _ in some]
        updates = orthogonalize(works, [whole for whole, _, _ in assembled])
        for (_, _, sent), work, (_, moment, age), update in zip(
            some, works, assembled, updates, strict=True
        ):
            finished, new = work.finish(update, None if moment is None else moment[:, None], age)
            courier.pack_result(sent, finished, None if new is None else new[:, 0])

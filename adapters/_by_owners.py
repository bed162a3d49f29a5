"""Each matrix computed once: shards to its owner, Newton-Schulz there, the update's parts back.

[Note: rounds in a pipeline]
    While one round is computed the parcels of the next travel to their owners, and the updates of
    the one before travel back. So three rounds have memory at a time. On CPUs the cores that
    multiply also carry, but in an exchange by itself they wait for each other: on 2 ranks with a
    core each a step takes 0.9 of the time. Between rounds of different crews there is none of
    that: ranks of both would start exchanges of a group that the crews share in different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from adapters._batches import Kind, in_batches
from adapters._data_phase import DataPhase
from adapters._exchange import Courier, Lines
from adapters._parcels import Owned
from adapters._rules import Member, local

AHEAD = 1  # rounds that are sent before one is computed; see [Note: rounds in a pipeline]


class Work(Protocol):
    """What a step will do to one matrix, as far as its owner and its holders are concerned."""

    member: Member
    update: Tensor | None
    row_moment: Tensor | None
    kind: Kind | None

    @property
    def state(self) -> Mapping[str, Any]:
        """What is stored of the parameter."""

    @staticmethod
    def directions(pending: Sequence[Any]) -> Sequence[Tensor]:
        """This rank's parts of the matrices to orthogonalise."""

    def finish(
        self, update: Tensor, moment: Tensor | None, age: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The update of the whole matrix, and the new moment of its rows."""


Orthogonalize: TypeAlias = Callable[[Sequence[Any], Tensor], Tensor | list[Tensor]]


def memory_of_rounds(lines: Iterable[Lines]) -> dict[torch.device, int]:
    """Return how many bfloat16 elements the exchanges of a step need on each device.

    That is 2 bytes for each element of this rank's shards, where updates come back; and, for as
    many rounds as are under way at once, the matrices that this rank owns, which are at most
    ``bucket_bytes`` or one matrix, and its shards of what all own, which are about as much on a
    rank with its even share of them. Where several axes cut, or axes copy, twice the larger.
    """
    found: dict[torch.device, int] = {}
    for device, some in _by_device(lines).items():
        found[device] = sum(each.num_returned for each in some) + sum(_slots(some))
    return found


def _slots(lines: Sequence[Lines]) -> list[int]:
    """Elements of the memory that rounds use in turn: of each slot, what the longest needs."""
    num_slots = min(1 + 2 * AHEAD, len(lines))
    return [max(each.numel for each in lines[first::num_slots]) for first in range(num_slots)]


def compute_by_owners(
    lines: Sequence[Lines],
    pending: Mapping[int, Any],
    orthogonalize: Orthogonalize,
    memory: Mapping[torch.device, Tensor],
    phase: DataPhase,
) -> None:
    """Set the update of each pending matrix; nothing is written.

    Args:
        lines: Of the rounds, in the order in which all ranks of each crew take them.
        pending: Position -> :class:`Work`, of the matrices with a gradient; nothing if ``phase``
            has failed.
        orthogonalize: Newton-Schulz of matrices of one kind, or of a single one.
        memory: Of :func:`memory_of_rounds`. Updates are views of it.
        phase: Takes errors, and is told of those elsewhere.

    Collectives:
        Each round: one exchange of bfloat16 for each cut to the owners, and one back; with
        copies of shards, one more for each axis that copies. All ranks of its crew must call.
    """
    couriers = _couriers(lines, memory, phase)
    for _, crew in groupby(lines, key=lambda each: each.round.crew.order):
        _take_rounds([couriers[each] for each in crew], pending, orthogonalize, phase)


def _couriers(
    lines: Iterable[Lines], memory: Mapping[torch.device, Tensor], phase: DataPhase
) -> dict[Lines, Courier]:
    """Divide the memory: where updates come back, then a slot for each round under way at once."""
    found = {}
    for device, some in _by_device(lines).items():
        sizes = [each.num_returned for each in some]
        returned = torch.split(memory[device][: sum(sizes)], sizes)
        slots = torch.split(memory[device][sum(sizes) :], _slots(some))
        for i, each in enumerate(some):
            found[each] = Courier(each, slots[i % len(slots)], returned[i], phase)
    return found


def _take_rounds(
    couriers: Sequence[Courier],
    pending: Mapping[int, Any],
    orthogonalize: Orthogonalize,
    phase: DataPhase,
) -> None:
    """Take part in the rounds of one crew, also after an error."""
    num_sent = 0
    for number, courier in enumerate(couriers):
        for following in couriers[num_sent : number + AHEAD + 1]:
            phase.attempt(partial(_pack, following, pending))
            following.to_owners()
            num_sent += 1
        courier.at_owners()
        phase.attempt(partial(_compute, courier, pending, orthogonalize))
        courier.from_owners()
        if number >= AHEAD:
            couriers[number - AHEAD].back_from_owners()
    for courier in couriers[len(couriers) - AHEAD :]:
        courier.back_from_owners()


def _pack(courier: Courier, pending: Mapping[int, Work]) -> None:
    for task, piece in courier.route.gathered:
        works = [pending[position] for position in task.positions]
        rows = [_own_rows(work) for work in works] if task.with_rows else []
        courier.pack(piece, type(works[0]).directions(works), rows)


def _own_rows(work: Work) -> Tensor:
    """The moments of the rows that lie here, flat, and last how many steps they have seen."""
    part = local(work.member.param)
    known = work.state.get("normuon_rows")
    flat = torch.zeros(part.size(0), device=part.device) if known is None else known.flatten()
    return torch.cat([flat, flat.new_full((1,), work.state.get("normuon_step", 0))])


def _compute(courier: Courier, pending: Mapping[int, Work], orthogonalize: Orthogonalize) -> None:
    # First, where a rank can still tell that it failed: see Courier.views.
    for position, (update, rows) in courier.views().items():
        work = pending[position]
        work.update, work.row_moment = update, rows if len(rows) else None
    for owned in courier.route.owned:
        _compute_task(owned, courier, pending, orthogonalize)


def _compute_task(
    owned: Owned, courier: Courier, pending: Mapping[int, Work], orthogonalize: Orthogonalize
) -> None:
    # A function of its own, so that nothing of a task is alive when the next is computed.
    task, got, sent = owned
    works = [pending[position] for position in task.positions]
    wholes, moments, ages = courier.assemble(task, got)
    updates = _orthogonalized(works, wholes, orthogonalize)
    if moments is None or ages is None:
        courier.pack_result(sent, updates, [])
        return
    finished = [
        work.finish(update, moment[:, None], age)
        for work, update, moment, age in zip(works, updates, moments, ages, strict=True)
    ]
    rows = [new[:, 0] for _, new in finished if new is not None]
    courier.pack_result(sent, [update for update, _ in finished], rows)


def _orthogonalized(
    works: Sequence[Work], wholes: Tensor, orthogonalize: Orthogonalize
) -> Tensor | Sequence[Tensor]:
    batches = in_batches([work.kind for work in works])
    if len(batches) == 1:
        return orthogonalize(works, wholes)
    found: dict[int, Tensor] = {}  # of other options, or whose bits would be others
    for batch in batches:
        updates = orthogonalize([works[i] for i in batch], wholes[batch])
        found.update(zip(batch, updates, strict=True))
    return [found[i] for i in range(len(works))]


def _by_device(lines: Iterable[Lines]) -> dict[torch.device, list[Lines]]:
    found: dict[torch.device, list[Lines]] = {}
    for each in lines:
        found.setdefault(each.device, []).append(each)
    return found

"""How parcels get from one rank of a group to another: the usual way, and two for where it fails.

``"all_to_all"`` moves what has to move, in one collective. On some clusters it is unreliable, or
needs a connection between any two ranks that cannot be had. ``"p2p"`` sends each parcel by itself.
``"gather"`` shows all parcels to all ranks, which costs as many times the bytes as there are ranks
and works wherever all_gather does. All ranks must take the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from adapters._parcels import Leg

Transport: TypeAlias = Literal["all_to_all", "p2p", "gather"]
Wait: TypeAlias = Callable[[], object]

# torch 2.13 renamed it and warns at each call of the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Carry(Protocol):
    """Start one exchange."""

    def __call__(
        self, received: Tensor, sent: Tensor, leg: Leg, group: dist.ProcessGroup, scratch: Tensor
    ) -> Wait:
        """Return what waits for its end; until then its tensors belong to it.

        Args:
            received: Shape (sum of ``leg.received``,); written.
            sent: Shape (sum of ``leg.sent``,), parcels by peer.
            leg: How long the parcels are.
            group: All of its ranks must call.
            scratch: Shape (scratch_numel(...),), for what the transport keeps meanwhile.
        """


def check_transport(value: str) -> Transport:
    """Return ``value`` if it is one of the choices.

    Raises:
        ValueError: It is not.
    """
    for known in get_args(Transport):
        if value == known:
            return known  # type: ignore[no-any-return]
    choices = " or ".join(f'"{known}"' for known in get_args(Transport))
    raise ValueError(f"transport must be {choices}, but is: {value!r}")


def scratch_numel(transport: Transport, leg: Leg) -> int:
    """Return how many elements of scratch a transport needs."""
    return (1 + len(leg.sent)) * leg.longest if transport == "gather" else 0


def _all_to_all(
    received: Tensor, sent: Tensor, leg: Leg, group: dist.ProcessGroup, scratch: Tensor
) -> Wait:
    """One all_to_all of uneven parcels."""
    work = dist.all_to_all_single(
        received, sent, list(leg.received), list(leg.sent), group=group, async_op=True
    )
    return work.wait  # type: ignore[no-any-return]


def _point_to_point(
    received: Tensor, sent: Tensor, leg: Leg, group: dist.ProcessGroup, scratch: Tensor
) -> Wait:
    """A send to each peer and a receive from each, started together."""
    operations = []
    parcels = zip(
        torch.split(sent, list(leg.sent)), torch.split(received, list(leg.received)), strict=True
    )
    for peer, (out, into) in enumerate(parcels):
        if peer == group.rank():
            into.copy_(out)
            continue
        operations.append(dist.P2POp(dist.isend, out, group=group, group_peer=peer))
        operations.append(dist.P2POp(dist.irecv, into, group=group, group_peer=peer))
    works = dist.batch_isend_irecv(operations)

    def wait() -> None:
        for work in works:
            work.wait()

    return wait


def _gather(
    received: Tensor, sent: Tensor, leg: Leg, group: dist.ProcessGroup, scratch: Tensor
) -> Wait:
    """One all_gather of everything that any rank sends, each as long as the longest."""
    padded, everything = scratch[: leg.longest], scratch[leg.longest :]
    padded.zero_()  # or stray memory would travel
    padded[: sent.numel()].copy_(sent)
    everything = everything[: leg.longest * len(leg.sent)]
    work = all_gather(everything, padded, group=group, async_op=True)

    def wait() -> None:
        work.wait()
        for into, held, start in zip(
            torch.split(received, list(leg.received)),
            torch.split(everything, leg.longest),
            leg.starts,
            strict=True,
        ):
            into.copy_(held[start : start + into.numel()])

    return wait


CARRIES: dict[Transport, Carry] = {
    "all_to_all": _all_to_all,
    "p2p": _point_to_point,
    "gather": _gather,
}

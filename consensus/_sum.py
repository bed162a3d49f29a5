"""agree_sum: counts added up over a group, once its members agree on how many there are."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from consensus._compile import untraced
from consensus._sources import Source
from consensus.agree import hold, reading
from consensus.vote import Fact, Vote

INT64_MAX = 2**63 - 1


@untraced
def agree_sum(
    counts: Iterable[int] | Tensor,
    group: Source = None,
    *,
    name: str = "counts",
    timeout: float | None = None,
) -> tuple[int, ...]:
    """Return the sum of each count over the group, exactly, the same on every member.

    Args:
        counts: Integers, equally many on every member, or a tensor of shape (n,) and dtype int64,
            which is read. Each may be as large as int64 divided by the number of members, so that
            no sum can overflow.
        group: As in :func:`any_failed`.
        name: What they are, for messages.
        timeout: Hard deadline in seconds of each of the two messages; None is the group's own.

    Returns:
        ``counts`` unchanged when not distributed or alone.

    Raises:
        Disagreement: On every member, when they bring unequally many.
        GroupFailure: On every member, when the counts of one cannot be used: something that is no
            integer, one that is too large, a tensor of another dtype or shape.
        TypeError, ValueError: The same, unwrapped, when not distributed or alone.
        PhaseMismatch: A member is in another agreement.
        LateRanks: A member did not come.

    Collectives:
        One message of 2 int64, reduced by maximum, then one of n int64, reduced by sum; no second
        one when n is 0, and two more instead of it when members disagree or fail. Every member
        must call.
    """
    phase = f"agree_sum({name})"
    with reading(phase, group, None, timeout) as control:
        listed = _integers(counts, name)
        _refuse_large(listed, name, control.world_size)
    if control.is_local:
        return listed
    length = len(listed)
    fact = Fact(f"length of {name}", b"%d" % length, lambda: {"": str(length)})
    return hold(control, Vote(phase, facts=(fact,), counts=listed), timeout=timeout).sums


def _integers(counts: Iterable[int] | Tensor, name: str) -> tuple[int, ...]:
    if isinstance(counts, Tensor):
        if counts.dtype != torch.int64:
            raise TypeError(f"expected {name} of dtype torch.int64; got {counts.dtype=}")
        if counts.ndim != 1:
            raise ValueError(f"expected {name} of one dimension; got {counts.shape=}")
        counts = counts.tolist()
    return tuple(_integer(count, name, position) for position, count in enumerate(counts))


def _integer(count: Any, name: str, position: int) -> int:
    try:
        return operator.index(count)
    except TypeError:
        raise TypeError(f"expected {name} to be integers; got {count!r} at {position}") from None


def _refuse_large(counts: tuple[int, ...], name: str, world_size: int) -> None:
    """Raise if equally large counts on all ranks could add up to more than int64 holds."""
    limit = INT64_MAX // world_size
    for position, count in enumerate(counts):
        if abs(count) > limit:
            raise ValueError(
                f"expected {name} of at most {limit} in size, so that the sum over {world_size} "
                f"ranks fits int64; got {count} at {position}"
            )

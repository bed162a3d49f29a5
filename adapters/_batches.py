"""Newton-Schulz of several matrices at once, where that gives the bits of one at a time.

Small matrices leave a processor idle between products, so those of one shape are stacked: on CPUs
several times as fast for 64 x 64, no gain from 512 x 512. Whether a stacked product has the bits
of a single one is up to what computes it. Products of up to 16^3 multiplications torch does itself,
in one way for single matrices and in another for stacks; they differ in a few of a thousand
matrices, too few for a trial to tell. Larger ones of both kinds go to the same library. So only
matrices whose products are all large are stacked, and only where a trial has shown equal bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from adapters._newton_schulz import STACKED, newton_schulz, take_steps
from adapters._plan import MAX_STACKABLE_NUMEL, MAX_STACKED_NUMEL
from adapters._schedules import Schedule, stretches

MIN_SIDE = 32  # of a matrix: the smallest product is that of its Gram matrix with itself


@dataclass(frozen=True, slots=True)
class Kind:
    """What matrices must have in common to be stacked."""

    shape: tuple[int, int]
    schedule: Schedule
    eps: float


def stackable(kinds: Iterable[Kind], device: torch.device) -> frozenset[Kind]:
    """Return the kinds whose matrices may be stacked: there are several, and the bits are right.

    Args:
        kinds: One for each matrix.
        device: Where they are computed. Only CPUs are tried.
    """
    listed = [
        kind
        for kind in kinds
        if min(kind.shape) >= MIN_SIDE and kind.shape[0] * kind.shape[1] <= MAX_STACKABLE_NUMEL
    ]
    if device.type != "cpu":
        return frozenset()
    several = {kind for kind in listed if listed.count(kind) > 1}
    return frozenset(kind for kind in several if _gives_same_bits(kind, torch.get_num_threads()))


def in_batches(kinds: Sequence[Kind | None]) -> list[list[int]]:
    """Return which matrices to compute together: those of a kind, and the rest one by one."""
    batches: list[list[int]] = []
    open_batches: dict[Kind, list[int]] = {}
    for i, kind in enumerate(kinds):
        if kind is None:
            batches.append([i])
            continue
        batch = open_batches.get(kind)
        numel = kind.shape[0] * kind.shape[1]
        if batch is None or (len(batch) + 1) * numel > MAX_STACKED_NUMEL:
            batch = open_batches[kind] = []
            batches.append(batch)
        batch.append(i)
    return batches


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Return matrices of one shape as one tensor; a single one is not copied."""
    return matrices[0][None] if len(matrices) == 1 else torch.stack(list(matrices))


def newton_schulz_stacked(
    matrices: Tensor,  # (number, rows, cols)
    kind: Kind,
) -> Tensor:
    """Return what :func:`newton_schulz` returns for each matrix; they are not written."""
    is_tall = kind.shape[0] > kind.shape[1]
    x = matrices.bfloat16()
    if is_tall:
        x = x.mT
    norms = torch.stack(torch._foreach_norm(x.unbind()))[:, None, None]
    if kind.schedule.safety != 1:
        norms = norms * kind.schedule.safety
    x = (x / norms.clamp(min=kind.eps)).contiguous()
    x = take_steps(x, stretches(kind.schedule, kind.shape), STACKED)
    return x.mT if is_tall else x


@cache
def _gives_same_bits(kind: Kind, num_threads: int) -> bool:
    """Try it, with matrices of different sizes of numbers. Threads are part of the question."""
    del num_threads
    generator = torch.Generator().manual_seed(0)
    numbers = partial(torch.randn, kind.shape, generator=generator, device="cpu")
    trial = [numbers() * 10.0 ** (i % 3) for i in range(8)]
    single = [newton_schulz(matrix, kind.schedule, eps=kind.eps) for matrix in trial]
    return all(
        torch.equal(together, alone)
        for number in (2, len(trial))
        for together, alone in zip(
            newton_schulz_stacked(torch.stack(trial[:number]), kind), single, strict=False
        )
    )

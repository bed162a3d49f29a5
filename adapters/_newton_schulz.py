"""Muon's maths: tensors in, tensors out. It knows neither shards nor groups nor optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from adapters import _symmetric
from adapters._gefen_math import TINY, average, exact_sqrt
from adapters._schedules import (
    DEFAULT_COEFFICIENTS,
    DEFAULT_STEPS,
    SCHEDULES,
    Coefficients,
    Form,
    Schedule,
    Stretch,
    stretches,
)

DEFAULT_EPS = 1e-7
ROW_BETA, ROW_EPS = 0.95, 1e-8  # of normuon
DEFAULT_SCHEDULE = Schedule((DEFAULT_COEFFICIENTS,) * DEFAULT_STEPS)

AddProduct: TypeAlias = Callable[..., Tensor]  # called as torch.addmm is


class Products(NamedTuple):
    """How the matrices of a step are multiplied. All ways give the same bits."""

    gram: Callable[[Tensor], Tensor]  # X -> XX'
    add: AddProduct
    add_symmetric: AddProduct  # where both factors and what is added are one symmetric matrix


def _gram(x: Tensor) -> Tensor:
    return x @ x.mT


SINGLE = Products(_gram, torch.addmm, torch.addmm)
STACKED = Products(_gram, torch.baddbmm, torch.baddbmm)
IN_HALVES = Products(_symmetric.gram, torch.addmm, _symmetric.add_product)


def nesterov_direction(
    grad: Tensor,  # (rows, cols), or any slice of it
    momentum_buffer: Tensor,  # the shape of grad
    *,
    momentum: float,
    nesterov: bool,
) -> Tensor:
    """Return the matrix that Muon orthogonalises, without touching gradient or momentum.

    Both lines are elementwise, so a shard of the result is the result of the shards.

    Args:
        grad: The gradient, or any slice of it. Read, not written.
        momentum_buffer: The momentum before this step, same slice and dtype. Read, not written.
        momentum: The share of the old momentum that is kept, dimensionless.
        nesterov: Whether to look one step ahead.

    Returns:
        A new tensor with the shape and dtype of ``grad``.

    Source:
        torch.optim.Muon: an exponential average, not the sum that its formula shows.
    """
    new_buffer = torch.lerp(momentum_buffer, grad, 1 - momentum)
    return torch.lerp(grad, new_buffer, momentum) if nesterov else new_buffer


def newton_schulz(
    matrix: Tensor,  # (rows, cols)
    schedule: Schedule = DEFAULT_SCHEDULE,
    *,
    eps: float = DEFAULT_EPS,
) -> Tensor:
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1.

    Cheaper than an SVD, and matrix products only. It does not converge to 1: with the default
    schedule the values end between about 0.7 and 1.2, and those that start below 1e-3 of the norm
    stay small.

    The operations, their order and the strides of every operand are those of torch.optim.Muon,
    because all three decide the last bit. One thing differs: torch divides in place, so a
    bfloat16 momentum buffer given to it is normalised as well. Here the argument is left alone.
    The gram form is the same polynomial with fewer products, and other bits.

    Args:
        matrix: Shape (rows, cols), any real float dtype. Read, not written.
        schedule: For each step (a, b, c) of ``a X + b (XX')X + c (XX')^2 X``, dimensionless; and
            the form, which matters where one side is at least twice the other.
        eps: The least norm to divide by, so that a matrix of zeros stays one.

    Returns:
        The shape of ``matrix``, bfloat16. A tall matrix comes back as a transposed view.

    Source:
        Jordan 2024, https://kellerjordan.github.io/posts/muon/ ; torch.optim._muon, torch 2.13.
        The gram form: Zhang, Amsel, Chen, Dao 2026,
        https://dao-lab.ai/blog/2026/gram-newton-schulz ; where it starts anew is our own, see
        [Note: the gram form] in ``_schedules``.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16()
    if is_tall:
        x = x.T  # the product XX' is then the smaller one
    norm = x.norm() if schedule.safety == 1 else x.norm() * schedule.safety
    products = IN_HALVES if _symmetric.pays(x) else SINGLE
    x = take_steps(x / norm.clamp(min=eps), stretches(schedule, (x.size(0), x.size(1))), products)
    return x.T if is_tall else x


def take_steps(
    x: Tensor,  # (..., rows, cols), no more rows than columns
    stretches: Iterable[Stretch],
    products: Products,
) -> Tensor:
    """Return a normalised matrix, or a stack of them, after all steps; it is not written.

    Args:
        x: Its singular values are at most about 1.
        stretches: The steps to take one by one, and those to take two at once.
        products: How to multiply.
    """
    for stretch in stretches:
        x = (_one_step if len(stretch) == 1 else _two_steps)(x, stretch, products)
    return x


def _one_step(x: Tensor, stretch: Stretch, products: Products) -> Tensor:
    ((a, b, c),) = stretch
    gram = products.gram(x)
    gram_update = products.add_symmetric(gram, gram, gram, beta=b, alpha=c)
    return products.add(x, gram_update, x, beta=a)


def _two_steps(x: Tensor, stretch: Stretch, products: Products) -> Tensor:
    """Both polynomials from one Gram matrix; see [Note: the gram form] in ``_schedules``."""
    (a, b, c), (next_a, next_b, next_c) = stretch
    gram = products.gram(x)
    update = products.add_symmetric(gram, gram, gram, beta=b, alpha=c)  # the first P, less a I
    # What follows is symmetric but for rounding, so it is multiplied in full.
    halfway = products.add(gram, gram, update, beta=a)  # R P
    gram = products.add(halfway, update, halfway, beta=a)  # P R P
    polynomial = update  # which nobody needs any more as it was
    polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
    update = products.add(gram, gram, gram, beta=next_b, alpha=next_c)
    return products.add(polynomial, polynomial, update, beta=next_a) @ x


def schedule_of(group: Mapping[str, Any]) -> Schedule:
    """Return the Newton-Schulz schedule that a parameter group asks for, its form included.

    Raises:
        ValueError: The group was changed to a form that there is not.
    """
    wanted: str | Sequence[Coefficients] | None = group.get("ns_schedule")
    form: Form = group.get("ns_form", "standard")
    if wanted is None or wanted == "standard":
        a, b, c = group["ns_coefficients"]
        num_steps: int = group["ns_steps"]
        return Schedule(((a, b, c),) * num_steps, form=form)
    if isinstance(wanted, str):
        return replace(SCHEDULES[wanted], form=form)
    return Schedule(tuple((a, b, c) for a, b, c in wanted), form=form)


def adjust_lr(lr: float | Tensor, adjust_lr_fn: str | None, shape: Sequence[int]) -> float | Tensor:
    """Return the learning rate for one matrix, scaled by its shape.

    Args:
        lr: The group's learning rate, dimensionless; a number or a tensor of one element.
        adjust_lr_fn: ``"original"`` (or None) scales by ``sqrt(max(1, rows / cols))``,
            ``"match_rms_adamw"`` by ``0.2 * sqrt(max(rows, cols))``.
        shape: (rows, cols) of the whole matrix, never of a shard.

    Returns:
        The type of ``lr``.

    Source:
        Jordan 2024 ("original"); Liu et al. 2025, https://arxiv.org/abs/2502.16982
        ("match_rms_adamw").
    """
    rows, cols = shape
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, cols)))
    return lr * math.sqrt(max(1, rows / cols))


def normalize_rows(
    update: Tensor, second_moment: Tensor, *, beta: float, bias: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Return an orthogonalised update with rows of equal weight over time, and their new moment.

    Rows are divided by a running root mean square of theirs; then the whole is scaled so that it
    keeps its Frobenius norm.

    Args:
        update: Shape (rows, columns), the whole matrix, bfloat16.
        second_moment: Shape (rows, 1), float32.
        beta: The share of the old second moment that is kept, dimensionless.
        bias: ``1 - beta**step``, this step included.
        eps: Added to the root after its correction.

    Returns:
        The new update, bfloat16, and the new second moment, float32.

    Source:
        NorMuon, Li et al. 2025, https://arxiv.org/abs/2510.05491, as in Gefen-X.
    """
    norms = torch.linalg.vector_norm(update, dim=1, keepdim=True, dtype=torch.float32)
    moment = average(second_moment, norms.square().div_(update.size(1)), beta=beta)
    root = exact_sqrt(moment.div(bias)).add_(eps)
    before, after = norms.norm(), norms.div(root).norm()
    return update * (before / after.clamp(min=TINY) / root).to(update.dtype), moment


def count_agreeing(update: Tensor, grad: Tensor) -> Tensor:
    """Return how many elements of the update point the way of the gradient: shape (), int64."""
    return (update * grad > 0).sum()


def mask_opposed(update: Tensor, grad: Tensor, *, num_agreeing: Tensor, numel: int) -> Tensor:
    """Return the update without elements that point against the gradient, the rest scaled up.

    Args:
        update: Any shape, bfloat16; the whole tensor or a part of it.
        grad: The shape of ``update``.
        num_agreeing: :func:`count_agreeing` of the whole tensor, shape ().
        numel: Elements of the whole tensor.

    Returns:
        The shape and dtype of ``update``; its elements sum to about what they did.

    Source:
        Cautious Optimizers, Liang et al. 2024, https://arxiv.org/abs/2411.16085, as in Gefen-X.
    """
    agrees = update * grad > 0
    scale = numel / num_agreeing.clamp(min=1)
    return update * agrees * scale.to(update.dtype)

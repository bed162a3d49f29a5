"""How long the blocks of a tensor are, and where they lie on a rank that holds a part of it.

Maths only: tensors in, tensors out. What ranks must exchange is returned as a vector for the
caller to reduce. All elements are counted along the whole tensor, flattened in row-major order.

[Note: integers have no order]
    The score of a block length sums over the whole tensor, and floating-point sums depend on
    their order, so on the number of ranks. Here each squared gradient is first written as an
    integer: a multiple of 2^-exponent, chosen from the largest of all, with 40 bits (fewer above
    2^22 elements, so that the sum of all fits 63). Sums of integers, and of the squares of
    integers, are exact. So every split of the tensor, every number of threads and every device
    gives the same scores to the last bit. The rounding costs about 1e-12 of the largest square.

    One pass of prefix sums serves all lengths, since the sum of a block is the difference of two
    of them. With T(d) the sum over blocks of length d of (sum of the block)^2, the mean over
    blocks of their variance is (T(1) - T(d) / d) / numel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from adapters._blocks import Part, cut_blocks, pieces

MIN_PERIOD = 8  # shorter blocks would cost more in magnitudes than they are worth
MAX_FLAT_PERIOD = 2048
_FIRST_SCORE = 1e-12  # of the length 1, which has no predecessor
_VALUE_BITS = 40
_LIMB_BITS = 21  # so that many products of two limbs add up within 63 bits
_LIMB_MASK = 2**_LIMB_BITS - 1
_NUM_LIMBS = 6  # 126 bits: the square of a sum of 63
_BLOCKS_AT_ONCE = 2**16  # what is computed from them stays in the processor's cache


@dataclass(frozen=True, slots=True)
class PeriodRules:
    """Which parameters get one magnitude for each element, without a search."""

    one_for_1d: bool = False
    one_for_2d: bool = False
    one_for_names: tuple[str, ...] = ()  # lower case; parts of names

    def forces_one(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the parameter of this name and whole shape is exempt from the search.

        Source:
            Gefen-X's ``force_1d_period_one``, ``force_2d_period_one``, ``period_one_substrings``.
        """
        return (
            math.prod(shape) == 1
            or (self.one_for_1d and len(shape) == 1)
            or (self.one_for_2d and len(shape) == 2)
            or any(part in name.lower() for part in self.one_for_names)
        )


def candidates(numel: int) -> tuple[int, ...]:
    """Return the block lengths to try: the divisors of ``numel`` but itself, ascending."""
    small = [d for d in range(1, math.isqrt(numel) + 1) if numel % d == 0]
    return tuple(sorted({*small, *(numel // d for d in small)} - {numel}))


def choose_period(errors: Sequence[float], shape: Sequence[int]) -> int:
    """Return the block length of a tensor, given how unequal blocks of each length are.

    It is the length at which the error falls most against the next smaller divisor; among equals
    the smallest. Gradients without structure have no such length, and neither have lengths below
    8: there :func:`fallback_period` decides.

    Args:
        errors: For each of :func:`candidates`, the root of the mean variance within a block, in
            units of the squared gradient.
        shape: Of the whole tensor.

    Source:
        Gefen-X 0.5, which differs here from Benedek, Koren, Fried,
        https://arxiv.org/abs/2606.13894.
    """
    lengths = candidates(math.prod(shape))
    scores = [_FIRST_SCORE, *(after - before for before, after in pairwise(errors))]
    _, period = min(zip(scores, lengths, strict=True))
    return period if period >= MIN_PERIOD else fallback_period(shape)


def fallback_period(shape: Sequence[int]) -> int:
    """Return the block length of a tensor of this shape whose gradient suggests none.

    The longer of the last dimension (for two and more dimensions) and the largest divisor up to
    2048; 1 if both are below 8. A vector of up to 2048 elements is one block.

    Source:
        Gefen-X 0.5.
    """
    numel = math.prod(shape)
    divisors = [d for d in (*candidates(numel), numel) if d <= MAX_FLAT_PERIOD]
    longest = max(divisors, default=1)
    if len(shape) >= 2:
        longest = max(longest, shape[-1])
    return longest if longest >= MIN_PERIOD else 1


@dataclass(frozen=True, slots=True)
class Search:
    """What all ranks know before they search the period of one tensor."""

    shape: tuple[int, ...]
    lengths: tuple[int, ...]
    cut: tuple[Tensor, ...]  # for each length: its cut blocks

    @property
    def num_sums(self) -> int:
        """Length of the vector that ranks add up."""
        return _NUM_LIMBS * len(self.lengths) + sum(map(len, self.cut))


def plan_search(shape: Sequence[int], parts: Sequence[Part]) -> Search:
    """Return the plan for one tensor; no rank needs to hear of another's gradient for it.

    Args:
        shape: Of the whole tensor.
        parts: Which elements the ranks hold, each element in one part: replicas count once. A
            rank may hold several, so a part too large for :func:`add_sums_` can be split.
    """
    lengths = candidates(math.prod(shape))
    cut = tuple(cut_blocks(parts, length) for length in lengths)
    return Search(tuple(shape), lengths, cut)


def largest_square(grad_local: Tensor) -> Tensor:
    """Return the largest squared element, shape (), float32; 0 for an empty tensor.

    Infinite or NaN if the gradient is not finite, or above 1.8e19.
    """
    if not grad_local.numel():
        return grad_local.new_zeros((), dtype=torch.float32)
    return grad_local.float().square().amax()


def choose_exponent(largest: float, numel: int) -> int:
    """Return the exponent of [Note: integers have no order].

    Args:
        largest: The maximum of :func:`largest_square` over all parts.
        numel: Elements of the whole tensor.

    Raises:
        ValueError: ``largest`` is not finite.
    """
    if not math.isfinite(largest):
        raise ValueError(f"a period needs a finite gradient; got {largest=} of its squares")
    bits = min(_VALUE_BITS, 62 - numel.bit_length())
    return bits - math.frexp(largest)[1]


def add_sums_(sums: Tensor, search: Search, grad_local: Tensor, part: Part, exponent: int) -> None:
    """Add one part of the gradient to the sums that decide the period.

    Needs about 24 bytes of memory for each element of the part while it runs.

    Args:
        sums: Shape (search.num_sums,), int64, on the device of the gradient. Zeros at first; the
            sum over all parts, on all ranks, goes to :func:`period_of`.
        search: The plan.
        grad_local: The elements of ``part`` in row-major order, any shape and float dtype.
        part: Where they lie in the tensor.
        exponent: See :func:`choose_exponent`; the same for all parts.
    """
    if not part.numel:
        return
    device = grad_local.device
    squares = grad_local.flatten().float().square()
    values = squares.double().mul_(2.0**exponent).round_().long()
    totals = torch.cat([values.new_zeros(1), values.cumsum(0)])
    sizes = [_NUM_LIMBS * len(search.lengths), *map(len, search.cut)]
    limbs, *at_cut = torch.split(sums, sizes)
    found: list[Tensor] = []
    owners: list[int] = []
    for i, (length, cut) in enumerate(zip(search.lengths, search.cut, strict=True)):
        block_sums = values
        if length > 1:
            begins, blocks = pieces(part, length)
            block_sums = totals.index_select(0, begins.to(device)).diff()
            if len(cut):
                place = torch.searchsorted(cut, blocks).clamp_(max=len(cut) - 1)
                which = (cut[place] == blocks).nonzero().flatten()
                place, which = place[which].to(device), which.to(device)
                at_cut[i].index_add_(0, place, block_sums[which])
                block_sums[which] = 0
        for some in torch.split(block_sums, _BLOCKS_AT_ONCE):
            found.append(_square_sum(some))
            owners.append(i)
    owner = torch.tensor(owners, device=device)
    limbs.view(-1, _NUM_LIMBS).index_add_(0, owner, _carried(torch.stack(found)))


def period_of(search: Search, sums: Tensor, exponent: int) -> int:
    """Return the block length, given :func:`add_sums_` added up over all parts on all ranks."""
    return choose_period(search_errors(search, sums, exponent), search.shape)


def search_errors(search: Search, sums: Tensor, exponent: int) -> tuple[float, ...]:
    """Return how unequal blocks of each length are, as :func:`choose_period` wants it."""
    numel = math.prod(search.shape)
    numbers = sums.tolist()
    cut_sums = iter(numbers[_NUM_LIMBS * len(search.lengths) :])
    found: list[float] = []
    of_elements = 0
    for i, (length, cut) in enumerate(zip(search.lengths, search.cut, strict=True)):
        limbs = numbers[_NUM_LIMBS * i : _NUM_LIMBS * (i + 1)]
        of_blocks = sum(limb << (_LIMB_BITS * place) for place, limb in enumerate(limbs))
        of_blocks += sum(next(cut_sums) ** 2 for _ in range(len(cut)))
        of_elements = of_elements or of_blocks  # the first length is 1
        # Integers to the end: only the division and the root round, and each in one way.
        variance = (length * of_elements - of_blocks) / (length * numel)
        found.append(math.ldexp(math.sqrt(variance), -exponent))
    return tuple(found)


def find_period(grad: Tensor) -> int:
    """Return the block length of a tensor from its whole gradient.

    Args:
        grad: The first gradient, of the parameter's shape, any float dtype. Read, not written.

    Raises:
        ValueError: The gradient is not finite, or above 1.8e19.
    """
    whole = Part(0, grad.numel())
    search = plan_search(grad.shape, [whole])
    exponent = choose_exponent(float(largest_square(grad)), grad.numel())
    sums = torch.zeros(search.num_sums, dtype=torch.int64, device=grad.device)
    add_sums_(sums, search, grad, whole, exponent)
    return period_of(search, sums, exponent)


def _square_sum(values: Tensor) -> Tensor:
    """The sum of the squares of up to 2^19 numbers from 0 to 2^63, as digits to base 2^21."""
    low = values & _LIMB_MASK
    middle = (values >> _LIMB_BITS) & _LIMB_MASK
    high = values >> (2 * _LIMB_BITS)
    digits = (
        (low * low).sum(),
        2 * (low * middle).sum(),
        (middle * middle).sum() + 2 * (low * high).sum(),
        2 * (middle * high).sum(),
        (high * high).sum(),
    )
    return torch.stack([*digits, torch.zeros_like(digits[0])])


def _carried(numbers: Tensor) -> Tensor:
    """The same numbers, shape (numbers, 6), with all digits but the last below 2^21."""
    digits = list(numbers.unbind(1))
    for low, high in pairwise(range(_NUM_LIMBS)):
        digits[high] = digits[high] + (digits[low] >> _LIMB_BITS)
        digits[low] = digits[low] & _LIMB_MASK
    return torch.stack(digits, dim=1)

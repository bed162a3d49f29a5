"""Coefficients for the steps of Newton-Schulz, by name, and how the steps are taken. Pure data.

Each step maps X to ``a X + b (XX')X + c (XX')^2 X``, so it takes each singular value s to
``a s + b s^3 + c s^5``. How close to 1 they end when they fell as 1 / k is stated, and held against
an SVD in float64, in ``tests/unit/test_schedules.py``.

[Note: the gram form]
    A step multiplies X, m x n, by an m x m polynomial P of its Gram matrix R = XX'. P and R
    commute, so the Gram matrix of PX is P R P = P^2 R, and the next polynomial can be computed
    from that without a look at X. The gram form takes two steps this way and then applies the
    product of their polynomials: X is multiplied twice for two steps, not four times, and m x m
    matrices are multiplied five times, not twice. It starts anew from X after each pair.

    Why not all steps from one Gram matrix, which would be the cheapest. Rounding gives R
    eigenvalues a little below zero, and each step multiplies them by a^2; and the error of P grows
    with its largest entry, about the product of the a's. The authors start anew once, after step
    2, in float16, which rounds eight times as finely as the bfloat16 here. In bfloat16 three steps
    in a row ended at singular values of 1.33 where the standard form ends at 1.20 (the default,
    256 x 1024, falling as 1 / k), and ``deepseek10`` ended at NaN. Two did as well as the standard
    form wherever the product of their a's was below 20. Those of ``polar5`` begin with 33:
    singular values that fell as 1 / k^2 ended at up to 220. So its first step is taken alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Coefficients: TypeAlias = tuple[float, float, float]
Stretch: TypeAlias = tuple[Coefficients, ...]  # steps that are applied to a matrix at once: 1 or 2
Form: TypeAlias = Literal["standard", "gram"]

FORMS: tuple[Form, ...] = get_args(Form)
# Of the longer side to the shorter. A pair saves 2 m^2 n multiplications and costs 3 m^3 more, so
# it pays from 1.5; square ones, and what is nearly so, are better off in the standard form.
MIN_ASPECT = 2
MAX_GROWTH = 20.0  # of small singular values in a stretch of two steps; measured, see the note

# Jordan 2024: the slope at zero is as large as five steps allow.
DEFAULT_COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
DEFAULT_STEPS = 5


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one Newton-Schulz iteration."""

    steps: tuple[Coefficients, ...]
    # What the norm is multiplied by before dividing by it: room for the rounding of bfloat16,
    # which some coefficients need because they diverge above 1.
    safety: float = 1.0
    form: Form = "standard"

    def __post_init__(self) -> None:
        if self.form not in FORMS:  # a parameter group may have been changed by anyone
            raise ValueError(f"ns_form must be one of {FORMS}, but is: {self.form!r}")


def stretches(schedule: Schedule, shape: tuple[int, int]) -> tuple[Stretch, ...]:
    """Return the steps in groups, after each of which the matrix itself is multiplied.

    Args:
        schedule: Its form decides, see [Note: the gram form].
        shape: Of the matrix, wide or tall. One that is not at least twice as long as wide is
            computed in the standard form, whatever was asked for.

    Returns:
        Legs of one step; in the gram form of two, where these do not grow too much, and of one.
    """
    steps = schedule.steps
    if schedule.form == "standard" or max(shape) < MIN_ASPECT * min(shape):
        return tuple((step,) for step in steps)
    found: list[Stretch] = []
    while steps:
        is_pair = len(steps) > 1 and abs(steps[0][0] * steps[1][0]) <= MAX_GROWTH
        size = 2 if is_pair else 1
        found.append(steps[:size])
        steps = steps[size:]
    return tuple(found)


def multiplications(schedule: Schedule, shape: tuple[int, int]) -> int:
    """Return how many numbers Newton-Schulz of one matrix multiplies, form and shape considered.

    A stretch starts with the Gram matrix and ends by multiplying the matrix, m^2 n each. Between
    lie products of m x m matrices: one for a step alone, five for two steps.
    """
    m, n = min(shape), max(shape)
    small = {1: 1, 2: 5}
    return sum(2 * m * m * n + small[len(stretch)] * m**3 for stretch in stretches(schedule, shape))


SCHEDULES: dict[str, Schedule] = {
    # You 2025, https://leloykun.github.io/ponder/muon-opt-coeffs/ : the cost of the default,
    # singular values closer to 1.
    "you5": Schedule(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    # Amsel et al. 2025, Polar Express, https://arxiv.org/abs/2505.16932 : optimal for a known
    # lower end of the singular values. Numbers as in modded-nanogpt and dion.
    "polar5": Schedule(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        safety=1.02,
    ),
    # As DeepSeek-V4 uses it, by Emerging-Optimizers of NVIDIA: the default for a start, then two
    # steps that converge to 1. Twice the cost.
    "deepseek10": Schedule((DEFAULT_COEFFICIENTS,) * 8 + ((2.0, -1.5, 0.5),) * 2),
    # Gefen-X 0.5: fewer steps, further from 1.
    "tuned4": Schedule(
        (
            (5.4261, -15.5285, 11.2657),
            (3.0766, -4.9701, 2.1297),
            (3.0008, -6.4486, 4.3696),
            (2.8386, -4.1421, 2.5758),
        )
    ),
    "tuned3": Schedule(
        (
            (5.0067, -14.4125, 10.6001),
            (3.7534, -6.8083, 3.3840),
            (3.2080, -4.3501, 2.0330),
        )
    ),
}

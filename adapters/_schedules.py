"""Coefficients for the steps of Newton-Schulz, by name. Pure data.

Each step maps X to ``a X + b (XX')X + c (XX')^2 X``, so it takes each singular value s to
``a s + b s^3 + c s^5``. How close to 1 they end when they fell as 1 / k is stated, and held against
an SVD in float64, in ``tests/unit/test_schedules.py``. For m x n, m <= n, a step is
``2 m^2 n + m^3`` multiplications.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Coefficients: TypeAlias = tuple[float, float, float]

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

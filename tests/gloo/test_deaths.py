"""Ranks that die or stop amid a step: all others end with an error, and nothing is written.

A sample of `benchmarks/failures.py`, which runs and judges: only what no other test here has.
"""

from __future__ import annotations

import pytest

from benchmarks._failures import Kind, Mode, Moment, Row
from benchmarks.failures import outcomes
from tests.gloo._cases import LIVENESS_S

pytestmark = pytest.mark.slow

# In one run, two ranks each: the first of them goes wrong, or the second, in turn.
RUNS: dict[Kind, tuple[tuple[Moment, Mode], ...]] = {
    "SIGKILL": (
        ("planning", "exact"),
        ("connecting", "exact"),
        ("exchange", "distributed"),
        ("text", "exact"),
    ),
    "SIGSTOP": (
        ("closure", "exact"),
        ("update", "exact"),
        ("exchange", "distributed"),
        ("text", "exact"),
    ),
}


@pytest.mark.parametrize("kind", RUNS)
def test_others_raise_in_time_and_say_who_it_was_and_nobody_writes(kind: Kind) -> None:
    rows = [
        Row(kind, moment, mode, (2 * i, 2 * i + 1), victim=2 * i + i % 2)
        for i, (moment, mode) in enumerate(RUNS[kind])
    ]
    assert [outcome.problems for outcome in outcomes(rows, grace=LIVENESS_S)] == [()] * len(rows)

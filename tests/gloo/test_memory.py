"""What one step adds in memory stays within what the documentation promises."""

from __future__ import annotations

import pytest

from benchmarks.memory import bound, peak_of_step
from consensus.testing import run_ranks

pytestmark = pytest.mark.slow

SHAPES = ((96, 64),) * 6 + ((64, 128),) * 2


@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_a_step_adds_a_bucket_the_updates_and_the_largest_batch(mode: str) -> None:
    bucket_bytes = 2**15
    peaks = run_ranks(peak_of_step, 2, SHAPES, mode, bucket_bytes).values()
    assert max(peaks) <= bound(SHAPES, 2, bucket_bytes, mode)

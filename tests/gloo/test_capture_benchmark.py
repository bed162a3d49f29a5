"""The parts of the script for a GPU compute what they say, on a CPU with small matrices."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import cuda as gpu
from tests.gloo._cases import on_ranks

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def parts(rank: int) -> dict[str, object]:
    del rank
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1,))
    return {
        "tests": {"exit code": 0, "end": "2 passed"},
        "stacked bits": gpu.stacked_bits(CPU, [(32, 64)], count=2),
        "step": gpu.step_beside_torch(CPU, 2, (8, 16), rounds=2, mesh=mesh),
        "newton-schulz": gpu.newton_schulz_times(
            CPU, [(8, 16)], compiled_at=None, rounds=2, end=time.monotonic() + 60
        ),
    }


def test_the_parts_compute_and_the_report_names_them() -> None:
    (found,) = on_ranks(parts, 1)
    assert found["step"]["equal bits"] == 2
    assert found["stacked bits"]["32 x 64"]["equal"] == 2
    assert len(found["newton-schulz"]["8 x 16"]) == 12
    text = gpu.report(found)
    for part in ("2 passed", "| 32 x 64 | 2 of 2 | 0 |", "2 of 8 x 16", "you5, gram"):
        assert part in text


def test_what_there_is_no_time_for_is_said_to_be_left_out() -> None:
    found = gpu.newton_schulz_times(CPU, [(8, 16)], compiled_at=None, rounds=1, end=0.0)
    assert found == {"8 x 16": "left out: no time"}

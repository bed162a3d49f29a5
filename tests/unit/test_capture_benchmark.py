"""The script that shows what a GPU can show ends well without one, also when it is run as one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cuda as gpu


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so there is much to show")
def test_without_a_gpu_it_says_so_and_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(gpu.__file__).resolve()), "--write"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stdout == "There is no CUDA device here, so there is nothing to show.\n"
    assert ended.returncode == 0

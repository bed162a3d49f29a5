"""Settings that must hold before torch is loaded, and what a marker means."""

import os

# Ranks share the cores of one machine: with a thread pool each they slow each other down, and the
# thread count changes the bits of a matrix product. Ranks started by a test inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

# The marker `ranks`: where the project is installed, pytest has loaded it already.
pytest_plugins = ["step_consensus_pytest"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None:
        return
    import torch  # not at the top: most tests that need no torch start faster without it

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

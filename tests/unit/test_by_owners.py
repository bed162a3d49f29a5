"""Memory that rounds use in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from adapters._by_owners import _slots


@dataclass(frozen=True)
class Needs:
    """What is asked of the lines of a round."""

    numel: int


@pytest.mark.parametrize(
    ("needed", "slots"),
    [
        ([7], [7]),
        ([7, 5], [7, 5]),
        ([7, 5, 6], [7, 5, 6]),
        ([7, 5, 6, 2], [7, 5, 6]),
        ([1, 5, 6, 9, 2, 2, 3, 8], [9, 8, 6]),  # the fourth comes when the first has ended
    ],
)
def test_a_slot_is_as_long_as_its_longest_round(needed: list[int], slots: list[int]) -> None:
    lines: Any = [Needs(numel) for numel in needed]
    assert _slots(lines) == slots

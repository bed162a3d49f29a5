"""Hundreds of agreements in a row that go wrong in every way: equal outcomes, and nothing left."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from benchmarks.soak import FAULTS, WORLD, Soaked, differences, leaks, soak, step
from tests.gloo._cases import on_ranks

pytestmark = pytest.mark.slow

VOTES = 500
GROWTH = 4_000_000  # bytes: a tenth of that is what it takes


@cache
def soaked() -> tuple[Soaked, ...]:
    return on_ranks(soak, WORLD, VOTES, 1)


def left(*, keys: bool) -> list[str]:
    every = [leak for found in soaked() for leak in leaks(found, resident=GROWTH)]
    return [leak for leak in every if leak.startswith("keys") == keys]


def test_ranks_conclude_alike_whatever_happens() -> None:
    assert list(differences(soaked())) == []
    for found in soaked():
        assert len(found.met) == VOTES
        happened = Counter(met.fault for met in found.met)
        assert set(happened) == {fault.__name__ for fault in (*FAULTS, step)}
        kinds = {met.kind for met in found.met}
        assert kinds == {"agreed", "GroupFailure", "Disagreement", "PhaseMismatch"}


def test_no_thread_no_descriptor_and_no_memory_is_left_behind() -> None:
    assert left(keys=False) == []


def test_no_key_is_left_in_the_store() -> None:
    assert left(keys=True) == []

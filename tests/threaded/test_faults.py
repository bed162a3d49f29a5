"""Faults on one rank: what it does instead, and that nothing of it stays behind."""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from consensus import _seams
from consensus.testing import faults, inject, run_threads


@dataclass
class Log:
    """Remembers what it was called with, as a rank's collectives would."""

    seen: list[int] = field(default_factory=list)

    def add(self, number: int) -> float:
        self.seen.append(number)
        return float(number)

    @staticmethod
    def double(number: int) -> int:
        return 2 * number


def three_calls(rank: int, fault: Any, options: dict[str, int]) -> tuple[list[int], list[Any]]:
    """What was done and what came back, of three calls of a method of a class."""
    log = Log()
    returned: list[Any] = []
    with inject((Log, "add"), rank=1, fault=fault, **options):
        for number in range(3):
            try:
                returned.append(log.add(number))
            except ValueError as error:
                returned.append(str(error))
    return log.seen, returned


HEALTHY = ([0, 1, 2], [0.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("fault", "options", "expected"),
    [
        (ValueError("boom"), {}, ([1, 2], ["boom", 1.0, 2.0])),
        (ValueError("boom"), {"nth": 2, "times": 2}, ([0], [0.0, "boom", "boom"])),
        (faults.ExtraCall(), {"nth": 2}, ([0, 1, 1, 2], [0.0, 1.0, 2.0])),
        (faults.MissingCall(), {"nth": 2}, ([0, 2], [0.0, None, 2.0])),
        (faults.MissingCall(7.0), {"nth": 2, "times": 9}, ([0], [0.0, 7.0, 7.0])),
        (faults.LateCall(), {"nth": 1}, ([1, 0, 2], [None, 1.0, 2.0])),
        (faults.LateCall(), {"nth": 1, "times": 2}, ([2, 0, 1], [None, None, 2.0])),
        (faults.LateCall(), {"nth": 3}, ([0, 1], [0.0, 1.0, None])),
        (faults.Stall(0.0), {}, HEALTHY),
    ],
)
def test_one_rank_meets_the_fault_and_the_other_passes(
    fault: Any, options: dict[str, int], expected: Any
) -> None:
    ranks = run_threads(three_calls, 2, fault, options)
    assert ranks.values() == (HEALTHY, expected)
    assert Log().add(3) == 3.0


def test_a_result_becomes_nan() -> None:
    def loss_of(rank: int) -> tuple[bool, bool, bool]:
        weight = nn.Parameter(torch.ones(3))
        model = nn.Linear(3, 1)
        with inject((model, "forward"), rank=1, fault=faults.NanResult()):
            (model(weight) + 0.0).sum().backward()
        assert weight.grad is not None
        with inject((math, "sqrt"), rank=1, fault=faults.NanResult()):
            root = math.sqrt(4.0)
        return bool(weight.grad.isnan().all()), math.isnan(root), "forward" in vars(model)

    assert run_threads(loss_of, 2).values() == ((False, False, False), (True, True, False))


def test_a_gradient_becomes_nan() -> None:
    def step(rank: int) -> list[list[bool]]:
        weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        for weight in weights:
            weight.grad = torch.ones(2)
        optimizer = torch.optim.SGD(weights, lr=0.1)
        with inject((optimizer, "step"), rank=1, fault=faults.NanGradient(weights[1], element=1)):
            optimizer.step()
        return [weight.isnan().tolist() for weight in weights]

    healthy, poisoned = run_threads(step, 2).values()
    assert healthy == [[False, False], [False, False]]
    assert poisoned == [[False, False], [False, True]]


def test_a_gradient_that_is_not_there_cannot_become_nan() -> None:
    def step(rank: int) -> None:
        weight = nn.Parameter(torch.ones(2))
        with inject((Log, "add"), rank=0, fault=faults.NanGradient(weight)):
            Log().add(1)

    (error,) = run_threads(step, 1).errors()
    assert error is not None
    assert "expected this rank to hold element 0 of the gradient; it holds no gra" in error.message


def test_places_of_a_step_are_met_by_visits_and_by_rank() -> None:
    def visits(rank: int) -> list[str]:
        met = []
        first = inject("Muon.step: closure", rank=0, fault=lambda: met.append("first"), nth=2)
        both = inject("Muon.step: check", rank=1, fault=lambda: met.append("check"), times=2)
        with first, both:
            for _ in range(3):
                _seams.reach("Muon.step: closure")
                _seams.reach("Muon.step: check")
                dist.barrier()
        return met

    assert run_threads(visits, 2).values() == (["first"], ["check", "check"])
    assert _seams.fault is None


def test_faults_of_several_ranks_on_one_function_end_in_any_order() -> None:
    original, left = Log.add, threading.Event()

    def work(rank: int) -> list[int]:
        log = Log()
        with ExitStack() as stack:
            for faulty, fault in enumerate((faults.ExtraCall(), faults.MissingCall())):
                stack.enter_context(inject((Log, "add"), rank=faulty, fault=fault))
            dist.barrier()
            log.add(rank)
            if rank == 1:  # put there last, or first: it is the last to go
                left.wait(30)
        left.set()
        return log.seen

    assert run_threads(work, 2).values() == ([0, 0], [])
    assert Log.add is original


def test_nested_faults_are_met_from_the_inside_out() -> None:
    def work(rank: int) -> list[int]:
        log = Log()
        with inject((log, "add"), rank=0, fault=faults.ExtraCall(), times=9):
            with inject((log, "add"), rank=0, fault=faults.ExtraCall()):
                log.add(1)
            log.add(2)
        return log.seen

    assert run_threads(work, 1).values() == ([1, 1, 1, 1, 2, 2],)


def test_static_methods_and_functions_of_modules_can_fail() -> None:
    def work(rank: int) -> tuple[int, int, bool]:
        with inject((Log, "double"), rank=0, fault=faults.MissingCall(1)):
            first, second = Log.double(4), Log().double(4)
        with inject((dist, "all_reduce"), rank=0, fault=faults.MissingCall()):
            ones = torch.ones(1)
            dist.all_reduce(ones)
        return first, second, dist.all_reduce is all_reduce

    all_reduce = dist.all_reduce
    assert run_threads(work, 1).values() == ((1, 8, True),)


def test_a_rank_that_stalls_is_reported_and_ends_with_its_run() -> None:
    def work(rank: int) -> None:
        with inject((dist, "barrier"), rank=1, fault=faults.Stall()):
            dist.barrier()

    ranks = run_threads(work, 2, timeout=0.5)
    assert ranks.hung == (0, 1)
    assert "in meet" in ranks[1].stack
    assert run_threads(lambda rank: rank, 2).values() == (0, 1)  # nobody was left behind


# ---- what is refused ----


def refusal(rank: int, point: Any, fault: Any, options: dict[str, int]) -> str:
    try:
        with inject(point, **{"rank": 1, **options}, fault=fault):
            pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("point", "fault", "options", "says"),
    [
        ((Log, "add"), faults.Kill(), {}, "ValueError: inject: Kill ends the process, and these"),
        ((Log, "add"), faults.Exit(3), {}, "ValueError: inject: Exit ends the process, and these"),
        ("X.step: check", faults.LateCall(), {}, "ValueError: inject: LateCall changes a call, an"),
        ((Log, "ad"), ValueError(), {}, "AttributeError: type object 'Log' has no attribute 'ad'"),
        ((Log, "add"), ValueError(), {"rank": 2}, "ValueError: inject: there are 2 ranks; got "),
        ((Log, "add"), ValueError(), {"nth": 0}, "ValueError: inject: visits are counted from 1"),
        ((Log, "add"), ValueError, {}, "TypeError: expected a fault of consensus.testing.faults, "),
        ((Log, "add"), "boom", {}, "TypeError: expected a fault of consensus.testing.faults, an "),
    ],
)
def test_what_makes_no_sense_is_refused_on_every_rank(
    point: Any, fault: Any, options: dict[str, int], says: str
) -> None:
    first, second = run_threads(refusal, 2, point, fault, options).values()
    assert first == second
    assert first.startswith(says)


@pytest.mark.parametrize(
    ("point", "name"), [("Moun.step: closure", "'Moun.step: closure'"), ((Log, "add"), "Log.add")]
)
def test_a_fault_that_nobody_met_is_an_error(point: Any, name: str) -> None:
    first, second = run_threads(refusal, 2, point, ValueError(), {"nth": 2}).values()
    assert first == ""
    assert second.startswith(f"AssertionError: inject: rank 1 came to {name} 0 times, and the ")


def test_an_error_on_the_way_is_not_hidden_by_a_fault_that_nobody_met() -> None:
    def work(rank: int) -> None:
        with inject((Log, "add"), rank=0, fault=ValueError()):
            raise KeyError("on the way")

    (error,) = run_threads(work, 1).errors()
    assert error is not None
    assert error.is_a(KeyError)


def test_without_a_group_there_is_no_rank_to_fail() -> None:
    block = inject((Log, "add"), rank=0, fault=ValueError())
    with pytest.raises(RuntimeError, match="needs the default process group"), block:
        pass

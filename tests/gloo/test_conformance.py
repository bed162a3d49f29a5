"""The laws find what an optimizer does not keep, whatever it does, and pass the ones that agree."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn

import consensus
from adapters import Gefen, GefenMuon, Hybrid, Muon
from consensus import _seams
from consensus.testing import LAWS, Conformance, Law, _conformance, conformance, run_ranks
from tests.gloo.conformance_cases import (
    GuardedAdamW,
    Scaled,
    SkipsAlone,
    SkipsAShard,
    SkipsTogether,
    VotingAdamW,
)

pytestmark = pytest.mark.slow

Named = list[tuple[str, nn.Parameter]]

# Long enough for any step here on a busy machine; a law that hangs takes as long.
DEADLINE_S, STRANDED_S = 30.0, 3.0


def laws(*names: str) -> Sequence[Law]:
    found = [law for law in LAWS if law.name in names]
    assert len(found) == len(names)
    return found


def of(report: Conformance, law: str) -> Sequence[str]:
    (found,) = [verdict.problems for verdict in report.verdicts if verdict.law == law]
    return found


# ---- optimizers that agree ----


def hybrid(named: Named) -> Hybrid:
    return Hybrid(named[:2], named[2:], lr=0.02, backup="adamw")


AGREEING: tuple[Callable[[Named], torch.optim.Optimizer], ...] = (
    Muon,
    partial(Muon, sharded_mode="distributed"),
    Gefen,
    GefenMuon,
    hybrid,
    GuardedAdamW,
)


@pytest.mark.parametrize("make", AGREEING, ids=["exact", "by owners", "", "", "", ""])
def test_an_optimizer_that_agrees_keeps_all_laws(make: Any) -> None:
    report = conformance(make, timeout=DEADLINE_S)
    report.assert_kept()
    assert len(report.kept) == len(LAWS) == 12
    failing = [verdict.note for verdict in report.verdicts if "closure" in verdict.law]
    assert all("GroupFailure" in note and "failed on rank 1" in note for note in failing)
    # Overflows: seen by one rank, an error; by all, a step that nobody makes.
    overflows = [verdict.note for verdict in report.verdicts if "overflow" in verdict.law]
    assert "False on rank 0; True on rank 1" in overflows[0]
    assert overflows[1] == "all ranks skipped the step"


def test_empty_shards_on_more_ranks_keep_the_laws_too() -> None:
    some = laws("healthy steps", "a closure raises on one rank")
    report = conformance(Muon, world_size=3, laws=some, timeout=DEADLINE_S)
    report.assert_kept()
    assert report.verdicts[0].note == "8 tensors, bit for bit"


# ---- optimizers that do not ----


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many laws were left at each start of ranks."""
    left: list[int] = []

    def counted(*args: Any, **options: Any) -> Any:
        left.append(next(len(each) for each in args if isinstance(each, list | tuple)))
        return run_ranks(*args, **options)

    monkeypatch.setattr(_conformance, "run_ranks", counted)
    return left


def test_what_adamw_on_dtensors_does_not_keep_is_told_with_what_was_seen(
    starts: list[int],
) -> None:
    report = conformance(torch.optim.AdamW, timeout=DEADLINE_S)
    assert starts == [12]
    assert report.kept == (
        "healthy steps",
        "a step under a gradient scaler",
        "plain parameters on one rank",
        "a gradient is NaN on one rank",
        "all ranks see an overflow",
        "parameters are in another order on one rank",
    )
    head, *lines = str(report).splitlines()
    assert head == "AdamW on 2 ranks keeps 6 of 12 laws (deadline of a step: 30 s)"
    assert lines[:2] == [
        "  kept    healthy steps: 16 tensors, bit for bit",
        "  kept    a step under a gradient scaler: 16 tensors, bit for bit",
    ]
    assert of(report, "a closure raises on one rank") == (
        "rank 0 returned",
        "rank 1 raised OneRankOnly: of rank 1 alone",
        "rank 0 wrote: parameter[up] changed at 12 of 12 elements, and 15 more",
    )
    assert of(report, "the learning rate differs on one rank")[0] == "ranks 0, 1 returned"
    report.assert_kept(except_for=report.broken)
    for known in ((), report.broken[1:], (*report.broken, "healthy steps")):
        with pytest.raises(AssertionError, match="AdamW on 2 ranks keeps 6 of 12 laws"):
            report.assert_kept(except_for=known)
    with pytest.raises(ValueError, match=r"no such law was tried: \['gravity'\]"):
        report.assert_kept(except_for=["gravity"])


def test_a_step_with_gradients_that_are_still_scaled_is_found() -> None:
    some = laws("a step under a gradient scaler")
    seen = of(conformance(Scaled, laws=some, timeout=DEADLINE_S), some[0].name)
    assert any("rank 0 has" in each and "off by up to" in each for each in seen)
    assert conformance(GuardedAdamW, laws=some, timeout=DEADLINE_S).verdicts[0].kept


def test_the_lines_of_the_readme_keep_all_laws_but_that_of_a_scaler_of_torch() -> None:
    report = conformance(VotingAdamW, timeout=STRANDED_S)
    assert report.broken == ("one rank sees an overflow",)


def test_ranks_without_a_row_have_no_say_in_whether_all_skipped() -> None:
    some, rows = laws("a gradient is NaN on one rank"), {"up": (2, 4), "gate": (2, 4)}
    (verdict,) = conformance(
        SkipsTogether, world_size=3, laws=some, shapes=rows, timeout=DEADLINE_S
    ).verdicts
    assert (verdict.problems, verdict.note) == ((), "all ranks skipped the step")


def test_a_rank_that_alone_leaves_out_a_nan_is_found() -> None:
    some = laws("a gradient is NaN on one rank")
    found = {
        make: of(conformance(make, laws=some, timeout=DEADLINE_S), some[0].name)
        for make in (SkipsAlone, SkipsAShard)
    }
    assert found == {
        SkipsAlone: ("rank 0 stepped", "rank 1 wrote nothing"),
        SkipsAShard: ("rank 0 stepped", "rank 1 did not write up"),
    }


def test_a_step_that_hangs_ends_at_the_deadline_and_says_where_it_was(starts: list[int]) -> None:
    first = "a closure raises in the first step"
    some = laws("plain parameters on one rank", first, "a gradient is NaN on one rank")
    report = conformance(torch.optim.Muon, laws=some, timeout=STRANDED_S)
    hung, raised = of(report, first)
    assert hung.startswith("rank 0 did not come back within 3 s, at: torch/")
    assert ", from torch/optim/_muon.py:" in hung
    assert raised == "rank 1 raised OneRankOnly: of rank 1 alone"
    assert [verdict.law for verdict in report.verdicts] == [law.name for law in some]
    assert starts == [3, 1]  # new ranks only after the law that hung


def without_the_agreement(named: Named) -> Muon:
    _seams.agreement = False  # in this rank's process, until it ends
    return Muon(named, lr=0.02)


def test_muon_without_its_agreement_breaks_the_laws() -> None:
    expected = {
        "a closure raises on one rank": "rank 0 did not come back",
        "a gradient is missing on one rank": "rank 1 was killed by SIGABRT",
        "the learning rate differs on one rank": "ranks 0, 1 returned",
        "parameters are in another order on one rank": "rank 0 has parameter up off by",
    }
    report = conformance(without_the_agreement, laws=laws(*expected), timeout=STRANDED_S)
    assert report.broken == tuple(expected)
    for law, seen in expected.items():
        assert any(problem.startswith(seen) for problem in of(report, law)), report


def test_all_that_was_written_is_counted_though_only_some_is_named() -> None:
    law = "a closure raises in the first step"
    shapes = {f"layer {number}": (4, 2) for number in range(6)}  # 5 differences each
    report = conformance(torch.optim.AdamW, laws=laws(law), shapes=shapes, timeout=DEADLINE_S)
    (wrote,) = [line for line in of(report, law) if " wrote: " in line]
    assert wrote == "rank 0 wrote: parameter[layer 0] changed at 4 of 4 elements, and 29 more"


pending: list[Any] = []  # outlives the step


class Dangling(torch.optim.AdamW):
    """Rank 0 leaves a collective behind, in which the next one of rank 1 would end up."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None and dist.get_rank() == 0:
            pending.append(dist.all_reduce(torch.ones(1), async_op=True))
        elif closure is None and "mesh" in self.defaults:
            total = torch.full((1,), 5.0)
            dist.all_reduce(total)
            assert total.item() == 10.0
        return super().step(closure)


def dangling(named: Named) -> Dangling:
    optimizer = Dangling(named)
    if hasattr(named[0][1], "device_mesh"):  # not the twin
        optimizer.defaults["mesh"] = True
    return optimizer


def test_a_law_that_leaves_ranks_apart_does_not_disturb_the_next(starts: list[int]) -> None:
    some = laws("a closure raises in the first step", "a gradient is NaN on one rank")
    report = conformance(dangling, laws=some, timeout=DEADLINE_S)
    assert report.kept == ("a gradient is NaN on one rank",), report
    assert starts == [2, 1]


class HalfAgreeing(GuardedAdamW):
    """Writes before it agrees."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].data.add_(1.0)
        return super().step(closure)


class Forgetful(GuardedAdamW):
    """Takes no step any more once one has failed."""

    failed = False

    def step(self, closure: Any = None) -> Any:
        if self.failed:
            return None
        try:
            return super().step(closure)
        except consensus.ConsensusError:
            self.failed = True
            raise


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (HalfAgreeing, "ranks 0, 1 wrote: parameter[up] changed at 12 of 12 elements"),
        (Forgetful, "rank 0 has parameter up off by up to 0.00"),
    ],
)
def test_a_failure_must_leave_nothing_behind(make: Any, seen: str) -> None:
    law = "a closure raises on one rank"
    problems = of(conformance(make, laws=laws(law), timeout=DEADLINE_S), law)
    assert any(problem.startswith(seen) for problem in problems), problems


class Waiting(torch.optim.SGD):
    """Waits for the other rank before any step, for a short time."""

    def step(self, closure: Any = None) -> Any:
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        store.set(f"rank {rank} steps", "")
        store.wait([f"rank {1 - rank} steps"], timedelta(seconds=0.3))
        return super().step(closure)


class Wrapping(torch.optim.SGD):
    """Does not let an error of the closure out as it was."""

    def step(self, closure: Any = None) -> Any:
        try:
            return super().step(closure)
        except ValueError as error:
            raise RuntimeError("the closure failed") from error


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (Waiting, "rank 1 raised DistStoreError: wait timeout after 300ms"),
        (Wrapping, "rank 1 raised OneRankOnly in its closure, and out of the step came RuntimeEr"),
    ],
)
def test_plain_parameters_are_nobody_elses_business(make: Any, seen: str) -> None:
    some = laws("plain parameters on one rank")
    (verdict,) = conformance(make, laws=some, timeout=DEADLINE_S).verdicts
    assert len(verdict.problems) == 1
    assert verdict.problems[0].startswith(seen)


class Dying(torch.optim.SGD):
    """Kills its process in the first step of rank 1."""

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def refuse(named: Named) -> NoReturn:
    raise TypeError("no DTensors, please")


def leave(named: Named) -> NoReturn:
    os._exit(7)


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (Dying, ["rank 1 was killed by SIGKILL"]),
        (refuse, ["ranks 0, 1 raised TypeError: no DTensors, please"]),
        (leave, [f"rank {rank} ended with exit code 7, no result" for rank in (0, 1)]),
    ],
)
def test_an_optimizer_that_cannot_be_tried_is_reported(make: Any, seen: list[str]) -> None:
    some = laws("healthy steps", "a closure raises in the first step")
    # Peers see the end of a process at once: two such deadlines are more than a test may take.
    report = conformance(make, laws=some, timeout=100.0)
    assert of(report, "healthy steps") == tuple(seen)
    assert report.kept == ()


def make_nothing(named: Named) -> Any:
    torch.optim.SGD([param for _, param in named])


def make_a_class_on_rank_1(named: Named) -> Any:
    return torch.optim.SGD if dist.get_rank() == 1 else torch.optim.SGD(dict(named).values())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (make_nothing, r"on ranks 0, 1: expected make_optimizer to return .* got None"),
        (make_a_class_on_rank_1, r"on rank 1: .* got <class 'torch\.optim\.sgd\.SGD'>"),
    ],
)
def test_what_makes_no_optimizer_is_said_once(make: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said) as error:
        conformance(make, timeout=DEADLINE_S)
    assert len(str(error.value).splitlines()) == 1


class Skipping(torch.optim.AdamW):
    """Skips a step on all ranks when any of them sees an overflow, and agrees on nothing else."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:
        overflow = bool(getattr(self, "found_inf", 0.0))
        return None if consensus.any_failed(overflow) else super().step(closure)


def test_skipping_on_all_ranks_is_as_good_as_an_error() -> None:
    some = laws("one rank sees an overflow", "all ranks see an overflow")
    report = conformance(Skipping, laws=some, timeout=DEADLINE_S, name="mine")
    assert str(report).splitlines() == [
        "mine on 2 ranks keeps 2 of 2 laws (deadline of a step: 30 s)",
        "  kept    one rank sees an overflow: all ranks skipped the step",
        "  kept    all ranks see an overflow: all ranks skipped the step",
    ]


def test_arguments_are_checked() -> None:
    for shapes in ({"one": (4, 4)}, {"one": (4, 4), "two": (1, 4)}, {"one": (), "two": (4, 4)}):
        with pytest.raises(ValueError, match="needs two parameters or more"):
            conformance(Muon, shapes=shapes)
    with pytest.raises(ValueError, match="needs 2 ranks"):
        conformance(Muon, world_size=1)
    with pytest.raises(TypeError, match="at the top level of a module"):
        conformance(lambda named: Muon(named))

"""A whole training step under torch.compile: where it breaks, and when it compiles again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer

from adapters import Gefen, GefenMuon, Hybrid, Muon
from tests.gloo.step_cases import Contents, changes, contents

pytestmark = pytest.mark.slow

Named: TypeAlias = Iterable[tuple[str, nn.Parameter]]
Make: TypeAlias = Callable[[Named], Any]
Step: TypeAlias = Callable[[Tensor], Tensor]


def hybrid(named: Named, **options: Any) -> Hybrid:
    """The first matrix to Muon, the others to the backup."""
    first, *others = named
    return Hybrid([first], others, **options)


MAKE: dict[str, Make] = {
    "Muon": Muon,
    "Gefen": Gefen,
    "GefenMuon": GefenMuon,
    "Hybrid, Gefen": hybrid,
    "Hybrid, AdamW": lambda named: hybrid(named, muon="dense", backup="adamw"),
}
NUM_STEPS = 7
FAILING = 3  # state has been made, and what depends on it compiled


@dataclass(frozen=True)
class Seen:
    """What torch.compile did during one step, and how the step ended."""

    error: str
    breaks: int
    frames: int  # that it compiled, or tried to


@dataclass(frozen=True)
class Steps:
    """All steps with an optimizer, and what differs from the same steps without compiling."""

    seen: tuple[Seen, ...]
    differences: tuple[str, ...] = ()

    @property
    def breaks(self) -> int:
        """In all steps together: a place that breaks is counted when it is compiled."""
        return sum(each.breaks for each in self.seen)


@dataclass
class Training:
    """A model and perhaps an optimizer, which can be made to fail in a hook."""

    model: nn.Module
    optimizer: Any
    fails: bool = False

    def step(self, batch: Tensor) -> Tensor:
        """What is compiled."""
        for param in self.model.parameters():
            param.grad = None
        loss = self.model(batch).square().mean()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    def run(self, step: Step, *, is_at_fault: bool) -> tuple[Seen, ...]:
        """Make all steps; in one of them, the pre-hook raises on the ranks that are at fault."""
        if self.optimizer is not None:
            self.optimizer.register_step_pre_hook(self._may_fail)
        found = []
        for number in range(NUM_STEPS):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            self.fails = is_at_fault and number == FAILING
            counters.clear()
            found.append(_seen(partial(step, batch)))
        return tuple(found)

    def _may_fail(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.fails:
            raise ValueError("in a hook")


def _seen(call: Callable[[], object]) -> Seen:
    error = ""
    try:
        call()
    except Exception as found:
        error = type(found).__name__
    return Seen(error, sum(counters["graph_break"].values()), counters["frames"]["total"])


def train(
    make_model: Callable[[], nn.Module], make: Make | None, *, is_at_fault: bool = True
) -> Steps:
    """Train compiled; and once more without compiling, to compare what became of it."""
    torch._dynamo.reset()
    compiled, eager = (Training(make_model(), None) for _ in range(2))
    if make is None:
        return Steps(compiled.run(_compiled(compiled), is_at_fault=is_at_fault))
    for each in (compiled, eager):
        each.optimizer = make(each.model.named_parameters())
    seen = compiled.run(_compiled(compiled), is_at_fault=is_at_fault)
    eager.run(eager.step, is_at_fault=is_at_fault)
    found, expected = (_contents(each) for each in (compiled, eager))
    return Steps(seen, tuple(changes(found, expected)))


def _compiled(training: Training) -> Step:
    step: Step = torch.compile(training.step, backend="eager")
    return step


def _contents(training: Training) -> Contents:
    if isinstance(training.optimizer, (Muon, Gefen, GefenMuon, Hybrid)):
        return contents(training.optimizer)
    return {name: param.tolist() for name, param in training.model.named_parameters()}


def small_model() -> nn.Module:
    """Two matrices."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 6, bias=False))


@cache
def trained(name: str | None) -> Steps:
    return train(small_model, MAKE[name] if name else None)


@pytest.mark.parametrize("name", MAKE)
def test_an_optimizer_adds_no_more_than_one_graph_break(name: str) -> None:
    assert trained(name).breaks - trained(None).breaks <= 1


@pytest.mark.parametrize("name", MAKE)
def test_nothing_is_compiled_again_after_a_failure(name: str) -> None:
    seen = trained(name).seen
    assert [each.error for each in seen] == [
        "ValueError" * (i == FAILING) for i in range(NUM_STEPS)
    ]
    assert [each.frames for each in seen[FAILING - 1 :]] == [0] * (NUM_STEPS - FAILING + 1)


@pytest.mark.parametrize("name", MAKE)
def test_a_compiled_step_has_the_bits_of_one_that_is_not(name: str) -> None:
    assert trained(name).differences == ()

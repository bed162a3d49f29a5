"""The faults: each makes one rank do what goes wrong in real training, for one step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import consensus
from consensus.demo._model import hidden_matrices
from consensus.demo._worker import Worker

Strike: TypeAlias = Callable[[], None]  # notes the moment at which the fault happens
Arm: TypeAlias = Callable[[Worker, Strike], AbstractContextManager[None]]


class End(Enum):
    """What the ranks do after a fault."""

    GO_ON = "all raise, and training goes on"
    SKIP = "all skip the step, and training goes on"
    STOP = "all raise, and training cannot go on"
    GONE = "all but the one that is gone raise, and training cannot go on"


@dataclass(frozen=True, slots=True)
class Scene:
    """One step in which something goes wrong."""

    name: str
    what: str  # happens on "rank {guilty}"
    arm: Arm  # entered on the guilty rank
    end: End
    error: str = ""  # the class that every rank raises, where they all raise the same
    said: str = ""  # the guilty rank's own error, where it has one
    everywhere: Callable[[Worker], AbstractContextManager[None]] | None = None  # entered on all


@contextmanager
def _after_backward(worker: Worker, do: Callable[[], None]) -> Iterator[None]:
    worker.after_backward.append(do)
    try:
        yield
    finally:
        worker.after_backward.remove(do)


def _fail_in_closure(worker: Worker, strike: Strike) -> AbstractContextManager[None]:
    def fail() -> NoReturn:
        strike()
        raise ValueError("the labels of this batch are broken")

    return _after_backward(worker, fail)


def _lose_gradient(worker: Worker, strike: Strike) -> AbstractContextManager[None]:
    def lose() -> None:
        strike()
        _matrices(worker)[1].grad = None

    return _after_backward(worker, lose)


def _die(worker: Worker, strike: Strike) -> AbstractContextManager[None]:
    def die() -> None:
        strike()
        os.kill(os.getpid(), signal.SIGKILL)

    return _after_backward(worker, die)


@contextmanager
def _swap(worker: Worker, strike: Strike) -> Iterator[None]:
    """Hold the first two matrices, which have the same shape, in the other order."""
    first, second, *_ = _matrices(worker)
    group = next(g for g in worker.main.param_groups if any(p is first for p in g["params"]))
    places = [i for i, p in enumerate(group["params"]) if p is first or p is second]
    strike()
    _exchange(group, *places)
    try:
        yield
    finally:
        _exchange(group, *places)


def _exchange(group: dict[str, Any], i: int, j: int) -> None:
    for listed in (group["params"], group["param_names"]):
        listed[i], listed[j] = listed[j], listed[i]


def _fail_in(where: str) -> Arm:
    """Run out of memory in a layer's forward or backward pass: peers are in a collective there."""

    @contextmanager
    def arm(worker: Worker, strike: Strike) -> Iterator[None]:
        def fail(*_: object) -> NoReturn:
            strike()
            raise torch.OutOfMemoryError(f"tried to allocate 2.00 GiB in {where}")

        layer: Any = worker.model.get_submodule("blocks.1.up")
        register = {
            "forward": layer.register_forward_pre_hook,
            "backward": layer.register_full_backward_hook,
        }[where]
        handle = register(fail)
        try:
            yield
        finally:
            handle.remove()

    return arm


def _overflow(worker: Worker, strike: Strike) -> AbstractContextManager[None]:
    def spoil() -> None:
        strike()
        _shard(_matrices(worker)[0].grad).fill_(torch.inf)

    return _after_backward(worker, spoil)


def _checks_overflow(agree: Callable[[bool, Worker], bool]) -> Any:
    """Return what a loop with mixed precision does after backward; ``agree`` makes it one flag."""

    @contextmanager
    def everywhere(worker: Worker) -> Iterator[None]:
        def check() -> None:
            finite = all(bool(_shard(p.grad).isfinite().all()) for p in _matrices(worker))
            worker.overflow = agree(not finite, worker)
            worker.main.found_inf = torch.tensor(float(worker.overflow))  # type: ignore[attr-defined]

        try:
            with _after_backward(worker, check):
                yield
        finally:
            worker.overflow = False
            worker.main.__dict__.pop("found_inf", None)

    return everywhere


def _alone(found: bool, _: Worker) -> bool:
    return found


def _together(found: bool, worker: Worker) -> bool:
    return consensus.any_failed(found, worker.main)


def _matrices(worker: Worker) -> list[Tensor]:
    return [parameter for _, parameter in hidden_matrices(worker.model)]


def _shard(tensor: Tensor | None) -> Tensor:
    """Return this rank's part of a gradient."""
    if not isinstance(tensor, DTensor):
        raise AssertionError(f"expected a sharded gradient; got {type(tensor).__name__}")
    return tensor.to_local()


_MEMORY = "torch.OutOfMemoryError: tried to allocate 2.00 GiB in"

FAULTS: dict[str, tuple[Scene, ...]] = {
    "closure": (
        Scene(
            "closure",
            "{guilty} raises ValueError after its backward pass, before anybody has stepped",
            _fail_in_closure,
            End.GO_ON,
            error="GroupFailure",
            said="ValueError: the labels of this batch are broken",
        ),
    ),
    "overflow": (
        Scene(
            "overflow",
            "{guilty} finds an infinite gradient; every rank looks at its own shards only",
            _overflow,
            End.GO_ON,
            error="Disagreement",
            everywhere=_checks_overflow(_alone),
        ),
        Scene(
            "overflow, agreed",
            "{guilty} finds an infinite gradient; the ranks ask consensus.any_failed",
            _overflow,
            End.SKIP,
            everywhere=_checks_overflow(_together),
        ),
    ),
    "missing-grad": (
        Scene(
            "missing-grad",
            "{guilty} has no gradient for one of its matrices",
            _lose_gradient,
            End.GO_ON,
            error="Disagreement",
        ),
    ),
    "order": (
        Scene(
            "order",
            "{guilty} holds two matrices of the same shape in the other order",
            _swap,
            End.GO_ON,
            error="Disagreement",
        ),
    ),
    "forward": (
        Scene(
            "forward",
            "{guilty} runs out of memory in the forward pass; its peers wait for it inside FSDP",
            _fail_in("forward"),
            End.STOP,
            error="GroupFailure",
            said=f"{_MEMORY} forward",
        ),
    ),
    "backward": (
        Scene(
            "backward",
            "{guilty} runs out of memory in the backward pass; its peers wait for it inside FSDP",
            _fail_in("backward"),
            End.STOP,
            error="GroupFailure",
            said=f"{_MEMORY} backward",
        ),
    ),
    "kill": (
        Scene("kill", "{guilty} is killed (SIGKILL) after its backward pass", _die, End.GONE),
    ),
    "none": (),
}

"""A capture without a GPU: the host is told that it captures, and the step runs as always."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import consensus
from consensus import _capture

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}


class NothingIsRead(TorchDispatchMode):
    """Raises where the value of a tensor would be needed on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise AssertionError(f"{func} reads on the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def capture() -> Iterator[None]:
    """Tell the library that the current stream is captured."""
    with mock.patch.object(_capture, "is_capturing", return_value=True):
        yield


class FakeGraph:
    """Counts its replays, which do what was given."""

    def __init__(self, work: Callable[[], object] = lambda: None) -> None:
        self.replays = 0
        self._work = work

    def replay(self) -> None:
        self.replays += 1
        self._work()


class Voting(torch.optim.SGD):
    """SGD that votes, and keeps what its last agreement handed out."""

    width: object = 8
    steps = 0
    stop: float = 0.0

    def step(self, closure: Any = None) -> Any:
        with consensus.preflight(self) as vote:
            vote.same("width", self.width)
            vote.progress("steps", self.steps)
            vote.range("stop", self.stop)
            loss = vote.closure(closure)
        self.vote = vote
        self.steps += 1
        # Torch's SGD takes no AMP controls.
        if not (vote.skip or vote.capturing or hasattr(self, "found_inf")):
            super().step()
        return loss


def refused(kind: type[BaseException], call: Callable[[], object]) -> str:
    """Return the text of the error of exactly this kind that ``call`` must end in."""
    try:
        call()
    except BaseException as error:
        if type(error) is kind:
            return str(error)
        raise
    raise AssertionError(f"expected {kind.__name__}; got no error")

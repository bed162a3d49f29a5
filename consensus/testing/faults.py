"""What can go wrong on one rank: values for :func:`consensus.testing.inject`.

A fault is met where ``inject`` puts it: at a named place of a step, or at the n-th call of a
function or method. Those that are about a call (``NanResult``, ``ExtraCall``, ``MissingCall``,
``LateCall``) need one. To have several faults, nest several ``inject``.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from consensus.testing import _threads

__all__ = [
    "Call",
    "Exit",
    "ExtraCall",
    "Fault",
    "Kill",
    "LateCall",
    "MissingCall",
    "NanGradient",
    "NanResult",
    "Stall",
]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was about to be made when the fault was met; at a place, one that does nothing.

    Attributes:
        make: Makes it and returns what it returns; may be called any number of times.
        held_back: Calls to be made right after the next one that no fault touches.
    """

    make: Callable[[], Any]
    held_back: list[Callable[[], Any]]


class Fault:
    """What one rank does instead of ``call``; derive from it for a fault of your own.

    Attributes:
        of_a_call: It makes no sense at a place, where nothing is called.
        ends_the_process: It cannot be met by ranks that are threads of one process.
    """

    of_a_call: ClassVar[bool] = False
    ends_the_process: ClassVar[bool] = False

    def meet(self, call: Call) -> Any:
        """Return, or raise, what the caller gets for ``call``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Exit(Fault):
    """The process ends at once, without clean-up: ``os._exit(code)``. Not on threads."""

    code: int = 1
    ends_the_process = True

    def meet(self, call: Call) -> Any:
        """End this process."""
        os._exit(self.code)


@dataclass(frozen=True)
class Kill(Fault):
    """The process is killed, as by an out-of-memory killer: SIGKILL. Not on threads."""

    ends_the_process = True

    def meet(self, call: Call) -> Any:
        """Kill this process."""
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # the signal may take a moment; nothing runs after it


@dataclass(frozen=True)
class Stall(Fault):
    """The rank does nothing for ``seconds``, then goes on; None: until its run is over."""

    seconds: float | None = None

    def meet(self, call: Call) -> Any:
        """Wait, then make the call."""
        end = time.monotonic() + (math.inf if self.seconds is None else self.seconds)
        while (left := end - time.monotonic()) > 0:
            if _threads.is_over():  # a thread cannot be killed, so it ends by itself
                raise SystemExit("stalled until the run was over")
            time.sleep(min(left, _SLICE_SECONDS))
        return call.make()


@dataclass(frozen=True)
class NanGradient(Fault):
    """One element of this rank's part of ``param.grad`` becomes NaN before the call.

    Raises, when it is met:
        ValueError: There is no gradient, or this rank's shard of it is empty.
    """

    param: Tensor
    element: int = 0  # of the flattened shard

    def meet(self, call: Call) -> Any:
        """Write the NaN, then make the call."""
        grad = self.param.grad
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if local is None or local.numel() <= self.element:
            raise ValueError(
                f"NanGradient: expected this rank to hold element {self.element} of the gradient; "
                f"it holds {'no gradient' if local is None else f'a shard of {local.shape}'}. "
                "Choose another parameter or rank."
            )
        with torch.no_grad():
            local.view(-1)[self.element] = math.nan
        return call.make()


@dataclass(frozen=True)
class NanResult(Fault):
    """All numbers that the call returns become NaN, such as a loss; gradients of it do too.

    Raises, when it is met:
        TypeError: The call returns neither tensors nor floats.
    """

    of_a_call = True

    def meet(self, call: Call) -> Any:
        """Make the call and return NaN of the same kind."""
        return _to_nan(call.make())


@dataclass(frozen=True)
class ExtraCall(Fault):
    """The call is made twice: this rank is one collective ahead of its peers."""

    of_a_call = True

    def meet(self, call: Call) -> Any:
        """Make the call twice; return what the second one returns."""
        call.make()
        return call.make()


@dataclass(frozen=True)
class MissingCall(Fault):
    """The call is not made: this rank is one collective behind its peers."""

    result: Any = None  # what the caller gets
    of_a_call = True

    def meet(self, call: Call) -> Any:
        """Return without calling."""
        return self.result


@dataclass(frozen=True)
class LateCall(Fault):
    """The call is made after the next one of the same function: two calls change places.

    The caller gets ``result`` at once; a collective that works in place does its work late. If
    no other call follows inside of the block, it is never made.
    """

    result: Any = None
    of_a_call = True

    def meet(self, call: Call) -> Any:
        """Hold the call back."""
        call.held_back.append(call.make)
        return self.result


@dataclass(frozen=True)
class Raised(Fault):
    """The rank raises ``error``; ``inject`` makes it of an exception."""

    error: BaseException

    def meet(self, call: Call) -> Any:
        """Raise."""
        raise self.error


@dataclass(frozen=True)
class Done(Fault):
    """The rank runs ``function`` first; ``inject`` makes it of a function."""

    function: Callable[[], object]

    def meet(self, call: Call) -> Any:
        """Run the function, then make the call."""
        self.function()
        return call.make()


def as_fault(fault: Fault | BaseException | Callable[[], object]) -> Fault:
    """Return what a user gave as a fault.

    Raises:
        TypeError: It is none; a class was given instead of an instance, for example.
    """
    if isinstance(fault, Fault):
        return fault
    if isinstance(fault, BaseException):
        return Raised(fault)
    if callable(fault) and not isinstance(fault, type):
        return Done(fault)
    raise TypeError(
        "expected a fault of consensus.testing.faults, an exception or a function; got "
        f"{fault!r}. Of a class, give an instance."
    )


_SLICE_SECONDS = 0.02  # how long the end of a run may go unnoticed


def _to_nan(value: Any) -> Any:
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        return value * math.nan
    if isinstance(value, float):
        return math.nan
    if isinstance(value, list | tuple) and value:
        return type(value)(map(_to_nan, value))
    raise TypeError(f"NanResult: expected tensors or floats as the result; got {value!r}")

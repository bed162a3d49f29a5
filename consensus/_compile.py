"""Keep voting code out of torch.compile: a decision read on the host cannot be traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., object])


def untraced(function: F) -> F:
    """Return ``function`` as one that torch.compile calls but does not look into."""
    return cast(F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]

"""Hooks and arguments of ``step``, as torch has them.

[Note: hooks inside the agreement]
    torch runs step hooks around ``step``. A pre-hook that raises on one rank would then leave
    before the agreement and strand the others in it. So ``step`` here runs the hooks itself, the
    pre-hooks inside the agreement, and says ``step.hooked`` so that torch does not wrap it. What
    a hook receives and may return is as in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeAlias

from torch.optim import Optimizer, optimizer

Closure: TypeAlias = Callable[[], float]


def run_pre_hooks(
    owner: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run them; return the arguments that ``step`` goes on with, the optimizer first.

    Raises:
        RuntimeError: A hook returned something else than nothing or new arguments.
    """
    for hook in chain(
        optimizer._global_optimizer_pre_hooks.values(),
        owner._optimizer_step_pre_hooks.values(),
    ):
        result = hook(owner, args, kwargs)
        if result is None:
            continue
        if not (isinstance(result, tuple) and len(result) == 2):
            raise RuntimeError(
                f"a step pre-hook must return None or (new_args, new_kwargs), got {result!r}"
            )
        args, kwargs = result
    return args, kwargs


def run_post_hooks(owner: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run them, after a step that was made or skipped."""
    owner._optimizer_step_code()
    for hook in chain(
        owner._optimizer_step_post_hooks.values(),
        optimizer._global_optimizer_post_hooks.values(),
    ):
        hook(owner, args, kwargs)


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Bind the arguments of ``step`` as Python would, so that a wrong one raises as usual."""

    def step(self: Optimizer, closure: Closure | None = None) -> Closure | None:
        return closure

    return step(*args, **kwargs)

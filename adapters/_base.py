"""The step that the optimizers here have in common: hooks, closure, one agreement, then the update.

[Note: hooks inside the agreement]
    torch runs step hooks around ``step``. A pre-hook that raises on one rank would then leave
    before the agreement and strand the others in it. So ``step`` here runs the hooks itself, the
    pre-hooks inside the agreement, and says ``step.hooked`` so that torch does not wrap it. What
    a hook receives and may return is as in torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, optimizer

import consensus

Closure: TypeAlias = Callable[[], float]


class VotingOptimizer(Optimizer, ABC):
    """An optimizer whose ranks agree before any of them writes.

    A subclass says what one rank can check by itself and how the update is made; it never
    communicates in the first and writes nothing in the second until no peer needs it any more.
    """

    #: The group to agree in; None derives it from the meshes of the parameters.
    control_group: consensus.Source = None
    #: Whether this optimizer's steps meet other ranks. If not, it only takes part in planning.
    casts_votes: bool = True

    @abstractmethod
    def _check(self, vote: consensus.preflight) -> None:
        """Raise for anything this rank can see is wrong. Runs after the closure, inside the vote.

        Args:
            vote: Takes facts that must be equal on all ranks.

        Collectives:
            None.
        """

    @abstractmethod
    def _update(self, inv_scale: float | None) -> None:
        """Make the step. Runs without gradient tracking, after all ranks agreed to proceed.

        Args:
            inv_scale: What to multiply gradients by, or None. ``p.grad`` itself is not written.
        """

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Closure) -> float: ...

    def step(self, *args: Any, **kwargs: Any) -> float | None:
        """Make one step: all ranks do, or all skip it, or all raise.

        Args:
            *args: At most the closure: evaluates the model again and returns the loss. It runs
                with gradients enabled.
            **kwargs: The closure by its name, ``closure``.

        Returns:
            The loss, or None without a closure.

        Raises:
            consensus.GroupFailure: A hook, the closure or a check failed on some rank; nothing
                was written on any. Without sharded parameters errors come as they are.

        Collectives:
            One agreement on the control group, if parameters are sharded; then those of the
            update. All ranks that share a mesh must call.
        """
        try:
            # torch's profiler looks for this name.
            name = f"Optimizer.step#{self.__class__.__name__}.step"
            with torch.autograd.profiler.record_function(name):
                return self._agree_and_update((self, *args), kwargs)
        except BaseException:
            # torch's GradScaler leaves these behind when a step raises, and the next step would
            # be unscaled by the wrong value.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise

    # See [Note: hooks inside the agreement].
    step.hooked = True  # type: ignore[attr-defined]

    def _agree_and_update(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        with consensus.preflight(self) as vote:
            args, kwargs = self._run_pre_hooks(args, kwargs)
            loss: float | None = vote.closure(_closure_of(args, kwargs))
            self._check(vote)
        if not vote.skip:
            self._execute(vote.inv_scale)
        self._optimizer_step_code()
        for hook in chain(
            self._optimizer_step_post_hooks.values(),
            optimizer._global_optimizer_post_hooks.values(),
        ):
            hook(self, args, kwargs)
        return loss

    def _execute(self, inv_scale: float | None) -> None:
        # A frame of its own that names torch: torch.compile then traces the update as one graph.
        with torch.no_grad():
            self._update(inv_scale)

    def _run_pre_hooks(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in chain(
            optimizer._global_optimizer_pre_hooks.values(),
            self._optimizer_step_pre_hooks.values(),
        ):
            result = hook(self, args, kwargs)
            if result is None:
                continue
            if not (isinstance(result, tuple) and len(result) == 2):
                raise RuntimeError(
                    f"a step pre-hook must return None or (new_args, new_kwargs), got {result!r}"
                )
            args, kwargs = result
        return args, kwargs

    def _named_parameters(self) -> Iterator[tuple[int, str, Tensor, dict[str, Any]]]:
        """Yield (position, name, parameter, group) in the order of the parameter list."""
        position = 0
        for group in self.param_groups:
            names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                yield position, names[index] if names else f"parameter {position}", param, group
                position += 1


def spans_ranks(param: Tensor) -> bool:
    """Return whether a parameter is spread or copied over a mesh of more than one rank."""
    return isinstance(param, DTensor) and param.device_mesh.size() > 1


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: the tensor itself unless it is a DTensor.

    Call it without gradient tracking: then the result shares memory with the argument.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_gradient(name: str, param: Tensor) -> None:
    """Raise if the gradient cannot be used as this rank's part of the parameter's gradient.

    Raises:
        RuntimeError: The gradient is sparse.
        ValueError: It is placed in another way than the parameter.
    """
    grad = param.grad
    if grad is None:
        return
    if grad.layout is not torch.strided:
        raise RuntimeError(f"sparse gradients are not supported; {name} has one: {grad.layout}")
    if not _same_placement(grad, param):
        raise ValueError(
            f"the gradient of {name} is {_placement(grad)}, the parameter is {_placement(param)}. "
            "Redistribute the gradient before the step."
        )


def check_state(name: str, param: Tensor, value: Tensor | None) -> None:
    """Raise if a state tensor, such as one from a checkpoint, does not lie as its parameter does.

    Raises:
        ValueError: It is placed in another way, or has another shape.
    """
    if value is None or (_same_placement(value, param) and value.shape == param.shape):
        return
    raise ValueError(
        f"the state of {name} has shape {tuple(value.shape)} and is {_placement(value)}; expected "
        f"shape {tuple(param.shape)}, {_placement(param)}. Load a checkpoint through "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which cuts it as the "
        "parameters are cut."
    )


def _same_placement(tensor: Tensor, param: Tensor) -> bool:
    if not isinstance(param, DTensor):
        return not isinstance(tensor, DTensor)
    if not isinstance(tensor, DTensor) or tensor.device_mesh != param.device_mesh:
        return False
    # On an axis of one rank every placement means the same.
    mesh = param.device_mesh
    pairs = zip(tensor.placements, param.placements, strict=True)
    return all(mine == its or mesh.size(axis) == 1 for axis, (mine, its) in enumerate(pairs))


def _placement(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return f"placed as {tensor.placements} on {tensor.device_mesh}"
    return "a plain tensor"


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Bind the arguments of ``step`` as Python would, so that a wrong one raises as usual."""

    def step(self: Optimizer, closure: Closure | None = None) -> Closure | None:
        return closure

    return step(*args, **kwargs)

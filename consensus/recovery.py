"""After a failure in forward or backward: bring a model back to where a step can begin."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from consensus.errors import GroupFailure


def recover(model: nn.Module, error: GroupFailure) -> None:
    """Make ``model`` ready for the next step, or raise ``error`` where training cannot go on.

    Call it on every rank, in the handler of the error. It drops all gradients, also those that a
    backward pass under ``fully_shard`` had not reduced yet, and resets what FSDP2 noted of this
    pass. It restores nothing: parameters and optimizer state must be as before, so an optimizer
    that does not vote (torch's) must step behind the block that failed, not inside of it. Buffers
    that forward wrote and random numbers that it drew stay.

    [Note: what torch leaves behind]
    ``FSDPModule.reset_iter_state`` keeps the gradients of parameters that were unsharded when the
    backward pass ended; the next one would add to them, and the update would be wrong without an
    error (torch 2.13). They are out of reach of ``zero_grad`` too.

    Args:
        model: The whole model: plain, tensor parallel, or with ``fully_shard`` in any places.
        error: What the agreement around the step raised.

    Raises:
        GroupFailure: ``error``, when it is not recoverable.
        ValueError: ``model`` contains a ``DistributedDataParallel``, which is to be wrapped anew,
            or a ``FullyShardedDataParallel``, which cannot be reset.
        RuntimeError: This torch cannot reset FSDP2.

    Collectives:
        None. It waits for those of the failed pass, in which all ranks are.
    """
    if not error.recoverable:
        raise error
    for name, module in model.named_modules():
        _refuse_unless_known(name or "the model", module)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _reset(module)
    model.zero_grad(set_to_none=True)


def _refuse_unless_known(name: str, module: nn.Module) -> None:
    if isinstance(module, DistributedDataParallel):
        raise ValueError(
            f"expected a model without DistributedDataParallel; {name} is one, whose reducer does "
            "not forget a backward pass that failed. Recover its .module, delete the wrapper and "
            "wrap the module anew, on every rank."
        )
    if isinstance(module, FullyShardedDataParallel):
        raise ValueError(
            f"expected a model without FullyShardedDataParallel; {name} is one, which cannot be "
            "reset. Restart from a checkpoint."
        )


def _reset(module: Any) -> None:
    try:
        state = module._get_fsdp_state()
        if state._is_root:  # False: its root does it; None: no pass has begun
            module.reset_iter_state()
        params = [param for group in state._fsdp_param_groups for param in group.fsdp_params]
    except AttributeError as missing:
        raise RuntimeError(
            f"torch {torch.__version__} cannot reset FSDP2 after a failed pass (2.13 can): "
            f"{missing}. Build the model anew, or restart from a checkpoint."
        ) from missing
    for param in params:
        param.unsharded_accumulated_grad = None
        unsharded = getattr(param, "_unsharded_param", None)  # there once it has been gathered
        if unsharded is not None:
            unsharded.grad = None

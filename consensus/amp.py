"""A GradScaler whose ranks agree about an overflow before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from consensus import _capture
from consensus._compile import untraced
from consensus.agree import hold, same_fact
from consensus.groups import control_group
from consensus.vote import Vote


class GradScaler(torch.amp.GradScaler):
    """A drop-in for ``torch.amp.GradScaler`` for optimizers with sharded parameters.

    torch's own reduces an overflow over the mesh of the first gradient of each device and dtype
    only, in a collective hidden in an operator: with several meshes, or a gradient missing on one
    rank, ranks skip on their own or hang. This one looks at the local shards and votes once over
    every rank whose collectives are tied together. With a plain optimizer it is torch's.

    Inside the capture of a CUDA graph nothing is read on the host: overflow is agreed on the GPU,
    over the optimizer's mesh, in each replay anew. Not run on a GPU yet.

    Collectives:
        ``unscale_`` (and ``step``, when it was not called before) holds one agreement: one
        message of 2 int64, reduced by maximum, when all ranks find the same; a second when only
        some overflow. Every rank must call. Under capture no message, but one all_reduce(MAX) of
        one element for each axis of the mesh, which becomes part of the graph.

    Raises:
        Disagreement: On every rank, when loss scales differ between ranks.
        GroupFailure: On every rank, when a rank cannot unscale its gradients.
        NotImplementedError: Under capture, when several meshes tie the ranks together.
    """

    @untraced
    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        group = control_group(optimizer)
        capturing = _capture.is_capturing()
        if not capturing:  # in a capture nothing can be agreed; the step refuses what has changed
            group.refresh()
        if group.is_local:
            plain: dict[torch.device, Tensor] = super()._unscale_grads_(
                optimizer, inv_scale, found_inf, allow_fp16
            )
            return plain
        if capturing:
            flag = _unscale_in_stream(optimizer, inv_scale, found_inf, allow_fp16=allow_fp16)
            return {flag.device: _capture.agree_in_graph(flag, group, _phase(optimizer))}
        buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        problem: Exception | None = None
        overflow, scale = False, float(inv_scale)  # one wait for the device, as in torch
        try:
            buckets = _local_gradients(optimizer, allow_fp16=allow_fp16)
            overflow = _any_non_finite(buckets)
        except Exception as error:  # told to the peers
            problem = error
        vote = Vote(
            _phase(optimizer),
            facts=(same_fact("inverse loss scale", scale),),
            ranges=(("overflow", overflow),),
        )
        agreed = hold(group, vote, error=problem).ranges[0].maximum
        for (device, _), grads in buckets.items():
            torch._foreach_mul_(grads, inv_scale.to(device, non_blocking=True))
        return {found_inf.device: torch.full_like(found_inf, float(agreed))}


def _phase(optimizer: Optimizer) -> str:
    return f"GradScaler of {type(optimizer).__name__}"


def _unscale_in_stream(
    optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *, allow_fp16: bool
) -> Tensor:
    """Unscale this rank's gradients; return whether they overflow, unread, as ``found_inf`` is."""
    overflow = torch.zeros_like(found_inf)
    for (device, _), grads in _local_gradients(optimizer, allow_fp16=allow_fp16).items():
        flag = torch.zeros_like(found_inf, device=device)
        scale = inv_scale.to(device, non_blocking=True)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, scale)
        overflow = torch.maximum(overflow, flag.to(overflow.device, non_blocking=True))
    return overflow


def _local_gradients(
    optimizer: Optimizer, *, allow_fp16: bool
) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return this rank's gradient shards by device and dtype.

    Raises:
        ValueError: A float16 gradient, as in torch, or a sparse one.
    """
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            if grad.dtype is torch.float16 and not allow_fp16:
                raise ValueError("expected float32 or bfloat16 gradients to unscale; got float16")
            if grad.is_sparse:
                raise ValueError("sparse gradients of a sharded optimizer cannot be unscaled")
            buckets.setdefault((grad.device, grad.dtype), []).append(grad)
    return buckets


def _any_non_finite(buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]]) -> bool:
    """Return whether any value is infinite or NaN; writes nothing that changes a bit."""
    flags = []
    for (device, _), grads in buckets.items():
        flag, one = torch.zeros((), device=device), torch.ones((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, one)  # times one
        flags.append(flag)
    return any(bool(flag) for flag in flags)


__all__ = ["GradScaler"]

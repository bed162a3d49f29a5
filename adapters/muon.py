"""Muon for sharded parameters: the bits of one device, or each shard on its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

import consensus
from adapters._base import VotingOptimizer, check_gradient, check_state, local, spans_ranks
from adapters._newton_schulz import (
    DEFAULT_COEFFICIENTS,
    DEFAULT_EPS,
    DEFAULT_STEPS,
    adjust_lr,
    nesterov_direction,
    newton_schulz,
)
from adapters._plan import DEFAULT_BUCKET_BYTES, Bucket, Matrix, plan_buckets
from adapters._reshard import (
    assemble,
    describe,
    exchange_device,
    gather,
    gather_groups,
    own_part,
    sharded_axes,
)
from adapters.options import ShardedMode, check_options, check_sharded_mode


@dataclass(slots=True)
class _Pending:
    """What a step will do to one parameter, computed but not yet written."""

    param: Tensor
    group: dict[str, Any]
    grad: Tensor  # this rank's part, unscaled
    momentum_buffer: Tensor  # as it stands in the state, or zeros that are not there yet
    decay: float | Tensor  # factor for the weights
    alpha: float  # factor for the update
    update: Tensor | None = None  # this rank's part, bfloat16; None where that is empty

    def direction(self) -> Tensor:
        """This rank's part of the matrix to orthogonalise, in memory of its own."""
        return nesterov_direction(
            self.grad,
            local(self.momentum_buffer),
            momentum=self.group["momentum"],
            nesterov=self.group["nesterov"],
        )

    def orthogonalize(self, matrix: Tensor) -> Tensor:
        """Newton-Schulz with this parameter's options; ``matrix`` is not written."""
        return newton_schulz(
            matrix,
            self.group["ns_coefficients"],
            steps=self.group["ns_steps"],
            eps=self.group["eps"],
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """What is read from the parameters once, and again only when they are others."""

    params: tuple[Tensor, ...] = ()
    matrices: dict[int, Matrix] = field(default_factory=dict)  # position -> where its shards lie
    to_check: tuple[tuple[str, Tensor], ...] = ()  # their gradients are nobody else's business


@dataclass(frozen=True, slots=True)
class _Plan:
    made_for: tuple[tuple[int, ...], int] = ((), 0)  # positions, bytes of a bucket
    buckets: tuple[Bucket, ...] = ()


class Muon(VotingOptimizer):
    """Muon as in :class:`torch.optim.Muon`, also for parameters that are sharded DTensors.

    A drop-in for torch's class: the same arguments, defaults and order, the same options in the
    parameter groups, the same ``momentum_buffer``; state dicts load in both directions. Without
    sharded parameters it gives the same bits, and communicates nothing.

    ``sharded_mode="exact"``: on every rank each matrix is gathered whole, orthogonalised, and cut
    again. All ranks compute the same, which is redundant, and what they compute is what one
    device computes, bit for bit: for float32 parameters, with the same number of threads, the
    same torch build, and contiguous matrices. With bfloat16 parameters an element may differ in
    its last bit, since torch's CPU kernels round the tail of a tensor in another way and shards
    end elsewhere. Rows, columns, uneven and empty shards, HSDP, and FSDP over tensor parallelism
    are supported.

    ``sharded_mode="approx"``: each shard is orthogonalised as if it were a matrix of its own,
    without communication and without agreement. This is another algorithm: its result depends on
    how many ranks there are. Only the learning rate still follows the whole matrix's shape.

    One thing differs from torch on purpose. With bfloat16 gradients and ``nesterov=False`` torch
    orthogonalises the momentum buffer in place, and so normalises it at each step. Here the buffer
    stays the average of the gradients.

    A step writes nothing until all its collectives have returned and all updates are computed; an
    exception before that leaves parameters and state as they were on this rank. (One raised after
    the agreement, such as running out of memory between two collectives, reaches no peer: they
    wait for the timeout of their group.) It costs memory while the step runs: 2 bytes for each
    element of this rank's shards, and for one bucket at a time the gathered matrices with one
    matrix and its Newton-Schulz temporaries. When gradients are unscaled in the step, there is a
    copy of this rank's gradients as well. Between steps there is one momentum buffer, sharded like
    its parameter.

    Args:
        params: Parameters of two dimensions, groups of them, or named parameters. Give biases,
            embeddings and heads to another optimizer.
        lr: Learning rate, dimensionless; a number or a tensor of one element.
        weight_decay: Decoupled weight decay, in units of 1 / lr.
        momentum: The share of the old momentum that is kept, dimensionless.
        nesterov: Whether to use Nesterov momentum.
        ns_coefficients: (a, b, c) of the Newton-Schulz polynomial, dimensionless.
        eps: The least norm that Newton-Schulz divides by.
        ns_steps: Number of Newton-Schulz iterations, below 100.
        adjust_lr_fn: ``"original"`` (the same as None) or ``"match_rms_adamw"``.
        sharded_mode: ``"exact"`` or ``"approx"``; equal on all ranks.
        control_group: The group to agree in. None derives it from the parameters' meshes.

    Raises:
        ValueError: An option is out of range, or a parameter has not two dimensions.
        NotImplementedError: A placement or a mode is not supported.

    Collectives:
        None at construction. In ``step``, if parameters are sharded and the mode is exact: one
        agreement, then for each bucket of matrices one all_gather for each mesh axis that cuts
        them. A bucket holds up to ``bucket_bytes`` of whole matrices that have the same placement.

    Source:
        Jordan 2024, https://kellerjordan.github.io/posts/muon/ ; torch.optim.Muon, torch 2.13.
    """

    #: Upper limit for the whole matrices of one bucket, in bytes as bfloat16. Equal on all ranks.
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = DEFAULT_COEFFICIENTS,
        eps: float = DEFAULT_EPS,
        ns_steps: int = DEFAULT_STEPS,
        adjust_lr_fn: str | None = None,
        *,
        sharded_mode: ShardedMode = "exact",
        control_group: consensus.Source = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        check_options(defaults, "Muon")
        self.sharded_mode = check_sharded_mode(sharded_mode)
        self.control_group = control_group
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch; a group that is refused is not added.

        Raises:
            ValueError: An option is out of range, or a parameter has not two dimensions.
            NotImplementedError: A placement is not supported.

        Collectives:
            None.
        """
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            check_options(group, f"parameter group {len(self.param_groups) - 1}")
            for position, name, param, owner in self._named_parameters():
                if owner is group:
                    self._check_parameter(position, name, param)
        except Exception:
            self.param_groups.pop()
            raise
        self._forget()

    def _check_parameter(self, position: int, name: str, param: Tensor) -> None:
        if param.ndim != 2:
            raise ValueError(
                "Muon only supports 2D parameters whereas we found a parameter with size: "
                f"{param.size()} ({name}). Give it to another optimizer, such as AdamW."
            )
        if param.is_complex():
            raise ValueError(f"Muon does not support complex parameters; {name} is {param.dtype}")
        if self.sharded_mode == "exact":
            with torch.no_grad():
                describe(param, position=position, name=name)
        elif isinstance(param, DTensor):
            sharded_axes(param, name=name)

    def _forget(self) -> None:
        """Make the next step read the parameters, and the state, anew."""
        self._known = _Known()
        self._plan = _Plan()
        self._state_is_checked = False
        self.casts_votes = self.sharded_mode == "exact"
        # True makes GradScaler hand the overflow over to the step, so that ranks agree on it.
        # Elsewhere it stays False: trainers refuse to clip gradients where it is True.
        self._step_supports_amp_scaling = self.casts_votes and any(
            spans_ranks(param) for _, _, param, _ in self._named_parameters()
        )

    def _read_parameters(self) -> _Known:
        """Read them if they are not those of the last step: wrappers swap and shard them late."""
        params = tuple(param for group in self.param_groups for param in group["params"])
        if len(params) == len(self._known.params) and all(map(is_, params, self._known.params)):
            return self._known
        self._forget()
        named = tuple(self._named_parameters())
        matrices = {}
        if self.sharded_mode == "exact":
            for position, name, param, _ in named:
                matrix = describe(param, position=position, name=name)
                if matrix is not None:
                    matrices[position] = matrix
        # The agreement checks the gradients of parameters that ranks share.
        to_check = tuple(
            (name, param)
            for _, name, param, _ in named
            if not (self.casts_votes and spans_ranks(param))
        )
        self._known = _Known(params, matrices, to_check)
        return self._known

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _check(self, vote: consensus.preflight) -> None:
        with torch.no_grad():
            known = self._read_parameters()
        for name, param in known.to_check:
            check_gradient(name, param)
        if not self._state_is_checked:
            for _, name, param, _ in self._named_parameters():
                check_state(name, param, self.state.get(param, {}).get("momentum_buffer"))
            self._state_is_checked = True
        vote.same("bucket_bytes", self.bucket_bytes)

    def _update(self, inv_scale: float | None) -> None:
        pending = {
            position: self._prepare(param, group, inv_scale)
            for position, _, param, group in self._named_parameters()
            if param.grad is not None
        }
        buckets = self._buckets(pending)
        for bucket in buckets:
            self._compute_bucket(bucket, pending)
        gathered = {slot.position for bucket in buckets for slot in bucket.slots}
        for position, each in pending.items():
            if position not in gathered and each.grad.numel():
                each.update = each.orthogonalize(each.direction())
        for each in pending.values():
            self._commit(each)

    def _prepare(self, param: Tensor, group: dict[str, Any], inv_scale: float | None) -> _Pending:
        if param.grad is None:
            raise AssertionError("only parameters with a gradient are prepared")
        grad = local(param.grad)
        if inv_scale is not None:
            grad = grad * inv_scale
        buffer = self.state.get(param, {}).get("momentum_buffer")
        if buffer is None:
            buffer = torch.zeros_like(param.grad, memory_format=torch.preserve_format)
        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.squeeze()
        return _Pending(
            param=param,
            group=group,
            grad=grad,
            momentum_buffer=buffer,
            decay=1 - lr * group["weight_decay"],
            alpha=-float(adjust_lr(lr, group["adjust_lr_fn"], param.shape)),
        )

    def _buckets(self, active: Iterable[int]) -> tuple[Bucket, ...]:
        """The plan for the parameters at these positions, made anew when they are others."""
        matrices = self._known.matrices
        sharded = tuple(position for position in active if position in matrices)
        if self._plan.made_for != (sharded, self.bucket_bytes):
            wanted = [matrices[position] for position in sharded]
            buckets = plan_buckets(wanted, bucket_bytes=self.bucket_bytes)
            self._plan = _Plan((sharded, self.bucket_bytes), buckets)
        return self._plan.buckets

    def _compute_bucket(self, bucket: Bucket, pending: dict[int, _Pending]) -> None:
        """Gather the matrices of a bucket and keep this rank's parts of their updates.

        Collectives:
            One all_gather for each cut of the bucket's layout.
        """
        members = [pending[slot.position] for slot in bucket.slots]
        first = members[0].param
        if not isinstance(first, DTensor):
            raise AssertionError("a bucket holds sharded parameters")
        gathered = gather(
            bucket,
            (each.direction() for each in members),
            groups=gather_groups(first),
            device=exchange_device(first),
        )
        for slot, each in zip(bucket.slots, members, strict=True):
            if slot.own.numel:
                whole = each.orthogonalize(assemble(slot, gathered))
                each.update = own_part(slot, whole, device=each.grad.device)

    def _commit(self, each: _Pending) -> None:
        """Write one parameter and its momentum, with operations that their operands cannot fail."""
        # Again, in place: the same bits that direction() saw, which nobody had to keep until now.
        local(each.momentum_buffer).lerp_(each.grad, 1 - each.group["momentum"])
        self.state[each.param]["momentum_buffer"] = each.momentum_buffer
        param_local = local(each.param)
        param_local.mul_(each.decay)
        if each.update is not None:
            param_local.add_(each.update, alpha=each.alpha)
        if isinstance(each.param, DTensor):
            # Autograd watches the DTensor, which does not see what happens to its shard.
            torch.autograd.graph.increment_version(each.param)

    def __getstate__(self) -> dict[str, Any]:
        """Process groups do not pickle, so a copy derives its control group from its parameters."""
        return {**super().__getstate__(), "sharded_mode": self.sharded_mode}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

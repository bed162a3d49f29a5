"""A model in each wrapper of torch that moves data in forward and backward, and where it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from consensus import Source

Wrapper = Literal["fully_shard", "fully_shard one unit", "DDP", "TP", "fully_shard of TP"]
Place = Literal["start", "forward", "backward", "end of backward", "clip", "after"]


class _CallsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.call()
        return (*grads, None)


class Gate(nn.Module):
    """Hands on what it gets, and calls what it is told to on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.in_forward: Callable[[], None] = lambda: None
        self.in_backward: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.in_forward()
        passed: Tensor = _CallsInBackward.apply(x, lambda: self.in_backward())  # type: ignore[no-untyped-call]
        return passed


@dataclass
class Wrapped:
    """A model of four layers on a mesh, its optimizer, and two gates: at the input, and amid.

    The mesh has one axis; or two, for HSDP, and named "data" and "tensor" for FSDP of TP.
    """

    wrapper: Wrapper
    mesh: DeviceMesh
    module: nn.Sequential
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Tensor

    @classmethod
    def on(cls, mesh: DeviceMesh, wrapper: Wrapper) -> Wrapped:
        torch.manual_seed(0)
        module = nn.Sequential(
            Gate(), nn.Linear(8, 12), nn.Linear(12, 12), Gate(), nn.Linear(12, 12), nn.Linear(12, 6)
        )
        model = cls.wrap(module, wrapper, mesh)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        seed = 0 if wrapper == "TP" else coordinate[0]
        batch = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
        batch.requires_grad_()  # so that the gate at the input takes part in backward
        optimizer = torch.optim.AdamW(module.named_parameters(), lr=0.1)
        return cls(wrapper, mesh, module, model, optimizer, batch)

    @staticmethod
    def wrap(module: nn.Sequential, wrapper: Wrapper, mesh: DeviceMesh) -> nn.Module:
        if wrapper in ("TP", "fully_shard of TP"):
            columns, rows = ColwiseParallel(), RowwiseParallel()
            plan = {"1": columns, "2": rows, "4": columns, "5": rows}
            parallelize_module(module, mesh if wrapper == "TP" else mesh["tensor"], plan)
            mesh = mesh if wrapper == "TP" else mesh["data"]
        if wrapper in ("fully_shard", "fully_shard of TP"):
            for layer in (module[1], module[2], module[4], module[5]):
                fully_shard(layer, mesh=mesh)
        if wrapper.startswith("fully_shard"):
            # Gradients that wait to be reduced are then kept apart.
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
            fully_shard(module, mesh=mesh, mp_policy=policy)
        if wrapper != "DDP":
            return module
        # A bucket for each parameter, so that some have been reduced when backward fails.
        return DistributedDataParallel(module, process_group=mesh.get_group(), bucket_cap_mb=1e-6)

    @property
    def scope(self) -> Source:
        """Whom to agree with: parameters of DDP do not say who shares them."""
        return self.mesh.get_group() if self.wrapper == "DDP" else self.optimizer

    def gate(self, place: Place) -> Gate:
        gate = self.module[0 if place == "end of backward" else 3]
        assert isinstance(gate, Gate)
        return gate

    def backward(self, calls: dict[Place, Callable[[], None]]) -> float:
        """Make gradients and clip them, and call what is to be called at each place."""

        def call(place: Place) -> None:
            calls.get(place, lambda: None)()

        self.gate("forward").in_forward = lambda: call("forward")
        self.gate("backward").in_backward = lambda: call("backward")
        self.gate("end of backward").in_backward = lambda: call("end of backward")
        call("start")
        loss = self.model(self.batch).square().sum()
        loss.backward()
        call("clip")
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
        call("after")
        return float(loss.item())

    def accumulate(self) -> None:
        """Make gradients of a microbatch, which are reduced with those of the next one."""
        with self._unreduced():
            self.model(self.batch).square().sum().backward()

    @contextmanager
    def _unreduced(self) -> Iterator[None]:
        if isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                yield
        elif isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)
        else:
            yield

    def step(self) -> float:
        """Make a healthy step."""
        loss = self.backward({})
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def numbers(self) -> list[Tensor]:
        """Return parameters and optimizer state, this rank's part."""
        state = [
            value for each in self.optimizer.state.values() for _, value in sorted(each.items())
        ]
        return [_local(tensor).clone() for tensor in (*self.module.parameters(), *state)]


def _local(tensor: Tensor) -> Tensor:
    held = tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else held

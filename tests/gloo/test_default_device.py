"""Where torch makes new tensors by default is the caller's business: nothing of ours lies there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

import consensus
from adapters import Gefen, GefenMuon, Hybrid, Muon, _batches, _symmetric
from consensus.testing import run_ranks
from tests.threaded.muon_cases import local

# Computed together, tall, and multiplied by halves; and what is no matrix, where one may have it.
MATRICES: tuple[tuple[int, ...], ...] = ((32, 48), (32, 48), (32, 48), (12, 4), (520, 512))
OTHERS: tuple[tuple[int, ...], ...] = ((9,), (4, 3, 2))
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Muon, exact": Muon,
    "Muon, distributed": lambda named: Muon(named, sharded_mode="distributed"),
    "Gefen": Gefen,
    "GefenMuon": lambda named: GefenMuon(named, sharded_mode="distributed"),
    "Hybrid": Hybrid,
    "Hybrid with AdamW": lambda named: Hybrid(named, backup="adamw"),
}


def sharded(shapes: Sequence[tuple[int, ...]], seed: int, mesh: DeviceMesh) -> list[DTensor]:
    """Return tensors of which every other one is cut along its last dimension."""
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(shape, generator=generator) for shape in shapes]
    dims = [each.ndim - 1 if i % 2 else 0 for i, each in enumerate(whole)]
    pairs = zip(whole, dims, strict=True)
    return [distribute_tensor(each, mesh, [Shard(dim)]) for each, dim in pairs]


def trained(name: str, device: str) -> list[Tensor]:
    """Return this rank's shards after two steps, a checkpoint, and one more."""
    make, shapes = OPTIMIZERS[name], MATRICES if "Muon" in name else (*MATRICES, *OTHERS)
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    params = [nn.Parameter(each) for each in sharded(shapes, 0, mesh)]
    gradients = [sharded(shapes, seed, mesh) for seed in (1, 2, 3)]
    _symmetric._gives_same_bits.cache_clear()
    _batches._gives_same_bits.cache_clear()
    torch.set_default_device(device)
    try:
        optimizer = make((f"layers.{i}.weight", param) for i, param in enumerate(params))
        for step, grads in enumerate(gradients):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
    finally:
        torch.set_default_device(None)
    return [local(each).detach() for each in params]


def elsewhere(rank: int, name: str) -> bool:
    torch.set_num_threads(1)
    usual, found = trained(name, "cpu"), trained(name, "meta")
    return all(map(torch.equal, usual, found))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_do_not_care_where_new_tensors_are_made(name: str) -> None:
    assert run_ranks(elsewhere, 2, name, timeout=60.0).values() == (True, True)


def agreements(rank: int, backend: str) -> tuple[bool, tuple[int, ...]]:
    torch.set_default_device("meta")
    control = consensus.control_group(dist.group.WORLD, backend=backend)
    try:
        return consensus.any_failed(rank == 1, control), consensus.agree_sum([rank, 2], control)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("backend", ["auto", "gloo", "store", "inherit"])
def test_agreements_do_not_care_where_new_tensors_are_made(backend: str) -> None:
    assert run_ranks(agreements, 2, backend).values() == ((True, (1, 4)),) * 2

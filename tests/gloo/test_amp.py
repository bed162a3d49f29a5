"""The scaler agrees over every mesh before it, or the optimizer, writes anything."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import consensus
from adapters import Muon
from consensus.testing import run_ranks


def _sharded(mesh, placements, value: float = 1.0) -> nn.Parameter:
    local = torch.full((4, 4), value)
    param = nn.Parameter(DTensor.from_local(local, mesh, placements))
    param.grad = DTensor.from_local(torch.ones(4, 4), mesh, placements)
    return param


def _scaled(optimizer: torch.optim.Optimizer) -> consensus.GradScaler:
    scaler = consensus.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scaler.scale(torch.zeros(()))  # creates the scale tensor
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad.mul_(8.0)
    return scaler


def _overflow_in_one_shard(rank: int, kind: str) -> tuple[bool, float, bool]:
    """Return: found_inf on this rank, the new scale, did the parameter move."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # A replicated gradient first: torch's scaler would look at its mesh only.
    params = [_sharded(mesh, [Replicate()]), _sharded(mesh, [Shard(0)])]
    named = [(f"layer{i}", param) for i, param in enumerate(params)]
    optimizer = Muon(named) if kind == "muon" else torch.optim.SGD(named, lr=0.1)
    scaler = _scaled(optimizer)
    if rank == 1:
        params[1].grad.to_local()[0, 0] = float("inf")
    before = params[1].to_local().clone()
    scaler.step(optimizer)
    state = scaler._found_inf_per_device(optimizer)
    scaler.update()
    moved = not torch.equal(before, params[1].to_local())
    return bool(sum(float(v) for v in state.values())), scaler.get_scale(), moved


@pytest.mark.parametrize("kind", ["sgd", "muon"])
def test_an_overflow_in_one_shard_skips_every_rank_and_halves_every_scale(kind: str) -> None:
    assert run_ranks(_overflow_in_one_shard, 3, kind).values() == ((True, 4.0, False),) * 3


def _two_meshes(rank: int) -> tuple[float, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first, second = _sharded(mesh["dp"], [Shard(0)]), _sharded(mesh["tp"], [Shard(0)])
    optimizer = torch.optim.SGD([("a", first), ("b", second)], lr=0.1)
    scaler = _scaled(optimizer)
    if rank == 3:
        second.grad.to_local()[0, 0] = float("nan")
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), bool((first.to_local() != 1.0).any())


def test_an_overflow_on_one_of_two_meshes_reaches_ranks_outside_of_it() -> None:
    assert run_ranks(_two_meshes, 4).values() == ((4.0, False),) * 4


def _healthy(rank: int) -> tuple[float, float]:
    mesh = init_device_mesh("cpu", (2,))
    param = _sharded(mesh, [Shard(0)])
    optimizer = torch.optim.SGD([("a", param)], lr=0.5)
    scaler = _scaled(optimizer)
    scaler.unscale_(optimizer)
    seen = float(param.grad.to_local()[0, 0])
    scaler.step(optimizer)
    scaler.update()
    return seen, float(param.to_local().detach()[0, 0])


def test_a_healthy_step_unscales_and_updates() -> None:
    assert run_ranks(_healthy, 2).values() == ((1.0, 0.5),) * 2


def _scales_differ(rank: int) -> tuple[str, float]:
    mesh = init_device_mesh("cpu", (2,))
    param = _sharded(mesh, [Shard(0)])
    optimizer = torch.optim.SGD([("a", param)], lr=0.5)
    scaler = _scaled(optimizer)
    if rank == 1:
        scaler._scale.fill_(4.0)
    with pytest.raises(consensus.Disagreement) as caught:
        scaler.unscale_(optimizer)
    return str(caught.value), float(param.grad.to_local()[0, 0])


def test_scales_that_differ_raise_the_same_error_and_nothing_is_unscaled() -> None:
    (text, grad), other = run_ranks(_scales_differ, 2).values()
    assert other == (text, grad)
    assert grad == 8.0
    assert "0.125 on rank 0; 0.25 on rank 1" in text


def _no_gradient_on_one_rank(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    param = _sharded(mesh, [Shard(0)])
    optimizer = Muon([("a", param)])
    scaler = _scaled(optimizer)
    if rank == 0:
        param.grad = None
    with pytest.raises(consensus.Disagreement) as caught:
        scaler.step(optimizer)
    return str(caught.value)


def test_no_gradient_on_one_rank_is_an_error_on_all_instead_of_a_hang() -> None:
    first, second = run_ranks(_no_gradient_on_one_rank, 2).values()
    assert first == second
    assert "gradients: a: missing on rank 0; present on rank 1" in first

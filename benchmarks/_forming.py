"""What forming a vote costs one rank: reading parameters, gradients and options, and a digest."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import consensus
from consensus._manifest import Manifest, read_manifest
from consensus.enclosure import Plan
from consensus.testing import without_agreement
from consensus.vote import Vote, opening

WARM_UP = 20


def time_forming(
    rank: int, num_params: int, rounds: int, seed: int
) -> dict[str, dict[str, list[float]]]:
    """Return seconds of each part, by where gradients have their specs from; rank 0 measures.

    The optimizer is real, and it has planned with its peers; in what is timed nobody speaks.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(num_params)))
    fully_shard(model, mesh=mesh)
    model(torch.randn(4, 16)).sum().backward()
    optimizer = torch.optim.SGD(model.named_parameters())
    with consensus.preflight(optimizer):
        pass
    found = {}
    if rank == 0:
        found["FSDP2: gradients carry their parameter's spec"] = _time_parts(
            _parts(optimizer), rounds, seed, renew=lambda: None
        )
        found["gradients carry specs of their own, new in each step"] = _time_parts(
            _parts(optimizer), rounds, seed, renew=lambda: _renew_gradients(optimizer, mesh)
        )
    dist.barrier()
    return found


def _time_parts(
    parts: dict[str, Callable[[], object]], rounds: int, seed: int, *, renew: Callable[[], None]
) -> dict[str, list[float]]:
    order = random.Random(seed)
    names = list(parts)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(WARM_UP + rounds):
        order.shuffle(names)
        renew()
        for name in names:
            begin = time.perf_counter()
            parts[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: found[WARM_UP:] for name, found in seconds.items()}


def _parts(optimizer: Optimizer) -> dict[str, Callable[[], object]]:
    groups = optimizer.param_groups
    params: list[DTensor] = groups[0]["params"]
    manifest = consensus.control_group(optimizer).manifest
    assert isinstance(manifest, Manifest)
    present = manifest.gradients()
    vote = Vote("step", facts=manifest.facts(groups, present))
    ballot = Plan(tuple(range(dist.get_world_size()))).ballot(rank=0, sequence=1)
    scan = attrgetter("grad.shape", "grad.dtype", "grad.device", "grad.layout")

    def step(closure: Callable[[], None] | None) -> None:
        with without_agreement(), consensus.preflight(optimizer) as entered:
            entered.closure(closure)

    return {
        "preflight but for the vote": lambda: step(None),
        "preflight but for the vote, with a closure": lambda: step(lambda: None),
        "part: are parameters the planned ones": lambda: manifest.is_current(groups),
        "part: gradients": manifest.gradients,
        "part: facts": lambda: manifest.facts(groups, present),
        "part: digest": lambda: opening(vote, ballot),
        "beside it: [p.grad for p in params]": lambda: [param.grad for param in params],
        "beside it: shape, dtype, device, layout of p.grad": lambda: list(map(scan, params)),
        "once: reading the parameters": lambda: read_manifest(groups),
    }


def _renew_gradients(optimizer: Optimizer, mesh: DeviceMesh) -> None:
    """Give each parameter a gradient whose spec is equal to the parameter's, but another object."""
    for param in optimizer.param_groups[0]["params"]:
        param.grad = DTensor.from_local(
            param.grad.to_local(),
            mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )

"""How many messages a healthy step's agreement takes: one of two words, whatever the layout."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import consensus
from adapters import Muon
from consensus.testing import run_ranks
from tests.gloo._cases import LIVENESS_S, SHAPES, Recorder, Trained, on_ranks, small_model
from tests.threaded.muon_cases import random_matrices, shard

pytestmark = pytest.mark.slow


def amp_controls(trained: Trained, which: str) -> None:
    optimizer: Any = trained.optimizer
    if "found_inf" in which:
        optimizer.found_inf = torch.zeros(1)
    if "grad_scale" in which:
        optimizer.grad_scale = torch.tensor(1.0)


def words_of_steps(
    rank: int, shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[list[int], list[str]]:
    """A plain step, one for each kind of AMP control, and an overflow."""
    trained = Trained.on(shape=shape, placements=placements)
    recorder = Recorder.on(trained.optimizer)
    optimizer: Any = trained.optimizer
    for which in ("", "found_inf", "grad_scale", "found_inf and grad_scale"):
        amp_controls(trained, which)
        trained.healthy_step()
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)
    optimizer.found_inf = torch.ones(1)
    optimizer.step()
    return recorder.words, trained.differences()


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows on 2 ranks": ((2,), (Shard(0),)),
    "rows on 3 ranks": ((3,), (Shard(0),)),
    "copies": ((2,), (Replicate(),)),
    "an axis of one rank": ((1, 2), (Shard(0), Shard(0))),
    "HSDP": ((2, 2), (Replicate(), Shard(0))),
    "FSDP over TP": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_healthy_step_takes_one_message_of_two_words(layout: str) -> None:
    shape, placements = LAYOUTS[layout]
    size = torch.Size(shape).numel()
    assert on_ranks(words_of_steps, size, shape, placements) == (([2] * 5, []),) * size


def words_with_fsdp(rank: int, tensor_parallel: bool) -> list[int]:
    """Real backward passes; parameters as torch itself makes them on a mesh of two axes."""
    names = ("data", "tensor") if tensor_parallel else ("copies", "shards")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model = small_model()
    if tensor_parallel:
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"] if tensor_parallel else mesh)
    optimizer = Muon(model.named_parameters())
    recorder = Recorder.on(optimizer)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return recorder.words


@pytest.mark.parametrize("tensor_parallel", [False, True], ids=["HSDP", "FSDP over TP"])
def test_a_step_after_a_real_backward_takes_one_message(tensor_parallel: bool) -> None:
    assert on_ranks(words_with_fsdp, 4, tensor_parallel) == ([2, 2, 2],) * 4


def on_nested_meshes(rank: int) -> tuple[list[int], tuple[int, ...]]:
    """One matrix on the whole mesh, one on each of two sibling sub-meshes: one message of all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    params = []
    for weight, on in zip(random_matrices(SHAPES[:2], 1), (mesh, mesh["b"]), strict=True):
        param = nn.Parameter(shard(weight, on, [Shard(0)] * on.ndim))
        param.grad = shard(weight.cos(), on, [Shard(0)] * on.ndim)
        params.append(param)
    optimizer = Muon(zip("xy", params, strict=True))
    recorder = Recorder.on(optimizer)
    optimizer.step()
    optimizer.step()
    return recorder.words, consensus.control_group(optimizer).ranks


def test_sibling_meshes_inside_of_another_share_one_message() -> None:
    assert on_ranks(on_nested_meshes, 4) == (([2, 2], (0, 1, 2, 3)),) * 4


def stages(rank: int) -> tuple[list[int], tuple[int, ...]]:
    """Two pipeline stages hold different parameters by right and have nothing to agree on."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    shapes = (SHAPES, SHAPES[1:])[rank // 2]
    trained = Trained.on(meshes[rank // 2], shapes=shapes)
    recorder = Recorder.on(trained.optimizer)
    trained.healthy_step()
    trained.healthy_step()
    assert trained.differences() == []
    return recorder.words, consensus.control_group(trained.optimizer).ranks


def test_stages_that_share_no_rank_vote_apart() -> None:
    first, second = ([2, 2], (0, 1)), ([2, 2], (2, 3))
    assert on_ranks(stages, 4) == (first, first, second, second)


def overlapping_stages(rank: int) -> tuple[list[int], tuple[int, ...]]:
    """Different parameters on meshes {0,1} and {1,2}: all is well, so nobody may say otherwise."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    params = []
    for index, mesh in enumerate(meshes):
        if rank in (index, index + 1):
            weight = random_matrices([SHAPES[index]], index)[0]
            param = nn.Parameter(shard(weight, mesh, [Shard(0)]))
            param.grad = shard(weight.cos(), mesh, [Shard(0)])
            params.append((f"stage {index}", param))
    optimizer = Muon(params)
    recorder = Recorder.on(optimizer)
    optimizer.step()
    optimizer.step()
    return recorder.words, consensus.control_group(optimizer).ranks


def test_different_parameters_on_overlapping_meshes_are_no_disagreement() -> None:
    # One pair of words for all, and one for each of the two sets of ranks.
    assert on_ranks(overlapping_stages, 3) == (([6, 6], (0, 1, 2)),) * 3


def nothing_shared(rank: int, kind: str) -> tuple[bool, int, list[str]]:
    """Parameters that nobody shares: plain ones, DDP's, and shards on a mesh of one rank."""
    model = small_model()
    if kind == "DDP":
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp(torch.ones(2, 8)).sum().backward()
    elif kind == "a mesh of one rank":
        fully_shard(model, mesh=DeviceMesh("cpu", [rank]))
    if kind != "DDP":
        model(torch.ones(2, 8)).sum().backward()
    optimizer = Muon(model.named_parameters())
    before = position()
    optimizer.step()
    group = consensus.control_group(optimizer)
    ours = [thread.name for thread in threading.enumerate() if "consensus" in thread.name]
    return group.is_local and group.channel is None, position() - before, ours


def position() -> int:
    """How many collectives the default group has seen."""
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group())


@pytest.mark.parametrize("kind", ["plain", "DDP", "a mesh of one rank"])
def test_parameters_that_nobody_shares_take_no_message_no_group_and_no_thread(kind: str) -> None:
    assert on_ranks(nothing_shared, 2, kind) == ((True, 0, []),) * 2


def approx_steps(rank: int) -> tuple[bool, int]:
    trained = Trained.on(sharded_mode="approx")
    trained.give_gradients()
    before = position()
    trained.optimizer.step()
    trained.optimizer.step()
    return consensus.control_group(trained.optimizer).channel is None, position() - before


def test_the_approximate_mode_plans_but_makes_no_group_and_sends_no_message() -> None:
    assert on_ranks(approx_steps, 2) == ((True, 0),) * 2


def unwrapped(rank: int) -> str:
    model = small_model()
    model(torch.ones(2, 8)).sum().backward()
    optimizer = Muon(model.named_parameters())

    def closure() -> float:
        raise KeyError("as it is")

    try:
        optimizer.step(closure)
    except Exception as error:
        return f"{type(error).__name__} {error} {error.__cause__}"
    return "stepped"


@pytest.mark.parametrize(("world_size", "init"), [(1, False), (1, True), (2, True)])
def test_errors_of_unsharded_steps_come_unwrapped(world_size: int, init: bool) -> None:
    ranks = run_ranks(unwrapped, world_size, init=init, timeout=LIVENESS_S)
    assert ranks.values() == ("KeyError 'as it is' None",) * world_size


def built_on_one_rank(rank: int) -> int:
    """Rank 0 alone builds an optimizer, looks at it and throws it away."""
    trained = Trained.on()
    before = position()
    if rank == 0:
        other = Muon(trained.optimizer.param_groups)
        group = consensus.control_group(other)
        assert "Muon" in repr(other)
        assert (group.ranks, group.world_size, group.device.type) == ((0, 1), 2, "cpu")
        assert hasattr(other, "control_group")
        del other, group
    trained.healthy_step()
    assert trained.differences() == []
    return position() - before


def test_building_and_looking_at_an_optimizer_on_one_rank_sends_nothing() -> None:
    first, second = on_ranks(built_on_one_rank, 2)
    assert first == second

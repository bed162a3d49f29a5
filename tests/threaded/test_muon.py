"""Muon on sharded parameters against torch.optim.Muon on whole ones, ranks as threads.

The gloo tests run the same cases on processes, so that the fake is verified.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import consensus
from adapters import Gefen, GefenMuon, Hybrid, Muon
from adapters._newton_schulz import adjust_lr, newton_schulz
from adapters.options import ShardedMode
from consensus.testing._threads import run_threads
from tests.threaded.muon_cases import (
    CASES,
    FSDP_CASES,
    SHAPES,
    Case,
    FsdpCase,
    Twins,
    fully_sharded,
    local,
    named,
    names,
    random_matrices,
    shard,
    slice_of,
    torchs_muon,
    whole_of,
)


def exact_against_torch(rank: int, case: Case, options: dict[str, Any]) -> list[str]:
    """Three steps of both; every rank returns what differs, which should be nothing."""
    twins = Twins.of(case)
    ours, torchs = Muon(named(twins.sharded), **options), torchs_muon(twins.whole, **options)
    for step in range(3):
        twins.set_gradients(seed=100 + step)
        ours.step()
        torchs.step()
    return twins.differences(ours, torchs)


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_exact_is_bit_identical_to_one_device(case: Case) -> None:
    found = run_threads(exact_against_torch, case.world_size, case, {"lr": 0.02}).values()
    assert found == ([],) * case.world_size


OPTIONS: tuple[dict[str, Any], ...] = (
    {"lr": 0.02, "nesterov": False, "momentum": 0.8},
    {"lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"},
    {"lr": torch.tensor(0.02), "weight_decay": 0.3},
    {"lr": torch.tensor([0.02])},
    {"lr": 0.02, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_exact_is_bit_identical_whatever_the_options(options: dict[str, Any]) -> None:
    assert run_threads(exact_against_torch, 3, CASES[1], options).values() == ([], [], [])


def exact_with_small_buckets(rank: int, case: Case) -> list[str]:
    twins = Twins.of(case)
    ours, torchs = Muon(named(twins.sharded)), torchs_muon(twins.whole)
    ours.bucket_bytes = 200
    twins.set_gradients(seed=5)
    ours.step()
    torchs.step()
    return twins.differences(ours, torchs)


def test_the_size_of_a_bucket_changes_nothing() -> None:
    assert run_threads(exact_with_small_buckets, 4, CASES[2]).values() == ([],) * 4


def exact_with_missing_gradients(rank: int) -> list[str]:
    """Other gradients are missing at each step, and once all of them."""
    twins = Twins.of(CASES[1])
    ours, torchs = Muon(named(twins.sharded)), torchs_muon(twins.whole)
    everything = range(len(twins.whole))
    for step, skip in enumerate([(0, 3), (3,), everything, (9,), ()]):
        twins.set_gradients(seed=step, skip=tuple(skip))
        ours.step()
        torchs.step()
    return twins.differences(ours, torchs)


@pytest.mark.filterwarnings("ignore:Muon.step. no parameter has a gradient:UserWarning")
def test_a_parameter_without_a_gradient_is_left_alone_on_all_ranks() -> None:
    assert run_threads(exact_with_missing_gradients, 3).values() == ([],) * 3


def exact_on_several_meshes(rank: int) -> list[str]:
    """One optimizer, three groups, two meshes of the same ranks, and plain parameters between."""
    mesh = init_device_mesh("cpu", (2, 2))
    flat = init_device_mesh("cpu", (4,))
    placed = [
        (mesh, (Shard(0), Shard(1))),
        (flat, (Shard(0),)),
        (mesh, (Replicate(), Shard(0))),
        (flat, (Replicate(),)),
    ] * 3
    weights = random_matrices(SHAPES[:4] * 3, seed=1)
    grads = random_matrices(SHAPES[:4] * 3, seed=2)
    whole = [nn.Parameter(weight.clone()) for weight in weights]
    sharded = [nn.Parameter(shard(w, *where)) for w, where in zip(weights, placed, strict=True)]
    sharded[5] = nn.Parameter(weights[5].clone())
    for index, grad in enumerate(grads):
        whole[index].grad = grad.clone()
        sharded[index].grad = grad.clone() if index == 5 else shard(grad, *placed[index])

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        pairs = named(params)
        return [
            {"params": pairs[:5], "lr": 0.1},
            {"params": pairs[5:8], "weight_decay": 0.0},
            {"params": pairs[8:], "nesterov": False, "ns_steps": 2},
        ]

    Muon(groups(sharded)).step()
    torchs_muon(groups(whole)).step()
    return [
        f"weight {index}"
        for index, (expected, actual, where) in enumerate(zip(whole, sharded, placed, strict=True))
        if not torch.equal(
            actual if index == 5 else local(actual),
            expected if index == 5 else slice_of(expected.detach(), *where),
        )
    ]


def test_groups_meshes_and_plain_parameters_may_be_mixed() -> None:
    assert run_threads(exact_on_several_meshes, 4).values() == ([],) * 4


def exact_on_fsdp(rank: int, case: FsdpCase) -> list[str]:
    """Train a real model; whole matrices get the gradients that FSDP computed."""
    model = fully_sharded(case.mesh, case.rows, tensor_parallel=case.tensor_parallel)
    backward: Callable[[Tensor], None] = Tensor.backward
    params = list(model.parameters())
    whole = [nn.Parameter(whole_of(param)) for param in params]
    ours, torchs = Muon(model.named_parameters(), lr=0.02), torchs_muon(whole, lr=0.02)
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        backward(model(torch.randn(4, 8, generator=generator)).square().mean())
        for twin, param in zip(whole, params, strict=True):
            twin.grad = whole_of(param.grad)
        ours.step()
        torchs.step()
        ours.zero_grad()
    return [
        f"weight {index} of {tuple(twin.shape)}"
        for index, (twin, param) in enumerate(zip(whole, params, strict=True))
        if not torch.equal(whole_of(param), twin)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("case", FSDP_CASES, ids=names(FSDP_CASES))
def test_exact_is_bit_identical_on_fully_sharded_models(case: FsdpCase) -> None:
    world_size = math.prod(case.mesh)
    assert run_threads(exact_on_fsdp, world_size, case).values() == ([],) * world_size


def chunk_of(whole: Tensor, num_chunks: int, index: int) -> Tensor:
    chunks = whole.chunk(num_chunks)
    return chunks[index] if index < len(chunks) else whole[:0]


def exact_where_torch_misplaces_shards(rank: int) -> list[str]:
    """7 rows, FSDP on 3 ranks over TP on 2: the description that torch derives is wrong there."""
    params = list(fully_sharded((3, 2), 7, tensor_parallel=True).parameters())[:1]
    (weight,) = random_matrices([(7, 8)], seed=3)
    twin = nn.Parameter(weight.clone())
    ours, torchs = Muon(named(params)), torchs_muon([twin])

    def own(tensor: Tensor) -> Tensor:
        return chunk_of(chunk_of(tensor, 2, rank % 2), 3, rank // 2)

    (param,) = params
    assert isinstance(param, DTensor)
    local(param).copy_(own(weight))
    (twin.grad,) = random_matrices([(7, 8)], seed=4)
    param.grad = DTensor.from_local(
        own(twin.grad).clone(),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    ours.step()
    torchs.step()
    same = torch.equal(local(param), own(twin.detach()))
    return [] if same else [f"rows {rank % 2}, {rank // 2}"]


def test_exact_follows_where_fsdp_really_puts_uneven_rows() -> None:
    assert run_threads(exact_where_torch_misplaces_shards, 6).values() == ([],) * 6


def in_bfloat16(rank: int) -> list[tuple[float, float]]:
    """bfloat16 weights: how far they end from one device's, and the greatest weight."""
    mesh = init_device_mesh("cpu", (3,))
    found = []
    for weight, grad in zip(random_matrices(SHAPES, 1), random_matrices(SHAPES, 2), strict=True):
        twin = nn.Parameter(weight.bfloat16())
        twin.grad = grad.bfloat16()
        param = nn.Parameter(shard(weight.bfloat16(), mesh, [Shard(0)]))
        param.grad = shard(grad.bfloat16(), mesh, [Shard(0)])
        Muon([("layer", param)], lr=0.02).step()
        torchs_muon([twin], lr=0.02).step()
        part = slice_of(twin.detach(), mesh, [Shard(0)])
        if part.numel():
            difference = (local(param).float() - part.float()).abs()
            found.append((float(difference.max()), float(part.float().abs().max())))
    return found


def test_bfloat16_weights_differ_from_one_device_in_the_last_bit_at_most() -> None:
    """torch rounds the tail of a bfloat16 tensor in another way, and shards end elsewhere."""
    for found in run_threads(in_bfloat16, 3).values():
        for difference, greatest in found:
            assert difference <= 2**-7 * greatest


def approx_against_shards(rank: int, case: Case) -> list[str]:
    """Approx mode is Muon on each shard, with the learning rate of the whole matrix."""
    twins = Twins.of(case)
    before = [local(param).clone() for param in twins.sharded]
    twins.set_gradients(seed=6)
    Muon(named(twins.sharded), lr=0.1, nesterov=False, sharded_mode="approx").step()
    found = []
    for index, param in enumerate(twins.sharded):
        expected = before[index].mul_(1 - 0.1 * 0.1)
        if expected.numel():
            update = newton_schulz(torch.zeros_like(expected).lerp(local(param.grad), 0.05))
            expected.add_(update, alpha=-float(adjust_lr(0.1, None, param.shape)))
        if not torch.equal(local(param), expected):
            found.append(f"weight {index} of shape {tuple(param.shape)}")
    return found


@pytest.mark.parametrize("case", CASES[:5], ids=names(CASES[:5]))
def test_approx_orthogonalises_each_shard_on_its_own(case: Case) -> None:
    found = run_threads(approx_against_shards, case.world_size, case).values()
    assert found == ([],) * case.world_size


def refusals(rank: int) -> list[str]:
    """What construction says to placements it cannot work with."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.ones(4, 4)
    strided = _StridedShard(0, split_factor=2)
    partial = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
    odd = DTensor.from_local(
        whole[: 3 - 2 * rank],
        mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    tensors = [partial, shard(whole, mesh, [strided]), odd]
    return [refusal(("layer.weight", nn.Parameter(tensor))) for tensor in tensors]


def refusal(named: tuple[str, nn.Parameter]) -> str:
    try:
        Muon([named])
    except NotImplementedError as error:
        return str(error)
    return "accepted"


def test_placements_that_are_no_rectangles_are_refused_by_name() -> None:
    for partial, strided, odd in run_threads(refusals, 2).values():
        assert "layer.weight: placement Partial(sum) on mesh axis 0 is not supported" in partial
        assert "layer.weight with placements" in strided
        assert "split factor 2 on dim 0 does not match" in strided
        assert "layer.weight: this rank holds a shard of shape" in odd


def misplaced_gradients(rank: int, mode: ShardedMode) -> list[str]:
    """A square mesh, so that the shards have the right shape and only the placement is wrong."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.ones(4, 4)
    texts = []
    for placements in ([Replicate(), Shard(0)], [Shard(0), Partial()]):
        param = nn.Parameter(shard(whole, mesh, [Shard(0), Replicate()]))
        param.grad = shard(whole, mesh, placements)
        optimizer = Muon([("layer.weight", param)], sharded_mode=mode)
        try:
            optimizer.step()
        except (consensus.GroupFailure, ValueError) as error:
            texts.append(str(error))
        assert torch.equal(local(param), torch.ones(2, 4))
        assert not optimizer.state
    return texts


@pytest.mark.parametrize("mode", ["exact", "approx"])
def test_a_gradient_placed_otherwise_than_its_parameter_is_refused(mode: ShardedMode) -> None:
    for swapped, partial in run_threads(misplaced_gradients, 4, mode).values():
        assert "layer.weight" in swapped
        assert "placed" in swapped
        assert "(Replicate(), Shard(dim=0))" in swapped
        assert "layer.weight" in partial
        assert "(Shard(dim=0), Partial(sum))" in partial


WRITERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Muon": Muon,
    "Gefen": Gefen,
    "GefenMuon": GefenMuon,
    "Hybrid's AdamW": lambda named: Hybrid([], named, backup="adamw"),
}


def saved_weight(rank: int, kind: str) -> str:
    """Step between forward and backward: autograd must not go on with the new weights."""
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(shard(torch.ones(4, 4), mesh, [Shard(0)]))
    param.grad = shard(torch.ones(4, 4), mesh, [Shard(0)])
    loss = (param * param).sum()
    WRITERS[kind]([("layer", param)]).step()
    try:
        torch.autograd.backward(loss)
    except RuntimeError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("kind", WRITERS)
def test_autograd_sees_that_a_sharded_weight_was_written(kind: str) -> None:
    for text in run_threads(saved_weight, 2, kind).values():
        assert "modified by an inplace operation" in text


def step_supports_amp(rank: int) -> tuple[bool, ...]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("two", "one"))
    whole = torch.ones(4, 4)
    on_two = nn.Parameter(shard(whole, mesh["two"], [Shard(0)]))
    copied = nn.Parameter(shard(whole, mesh["two"], [Replicate()]))
    on_one = nn.Parameter(shard(whole, mesh["one"], [Shard(0)]))
    late = Muon([nn.Parameter(whole)])
    before = late._step_supports_amp_scaling
    late.add_param_group({"params": [on_two]})
    return (
        Muon([on_two])._step_supports_amp_scaling,
        Muon([copied])._step_supports_amp_scaling,
        Muon([on_one])._step_supports_amp_scaling,
        Muon([on_two], sharded_mode="approx")._step_supports_amp_scaling,
        before,
        late._step_supports_amp_scaling,
    )


def test_a_scaler_leaves_overflow_to_the_step_only_where_ranks_share_it() -> None:
    expected = (True, True, False, False, False, True)
    assert run_threads(step_supports_amp, 2).values() == (expected, expected)

"""Muon on real processes: the threaded cases again, exact counts, and what threads cannot show."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from adapters import Muon
from adapters._data_phase import DataPhase
from consensus.testing._processes import run_ranks
from tests.threaded.muon_cases import (
    CASES,
    FSDP_CASES,
    SHAPES,
    Case,
    Twins,
    local,
    named,
    shard,
    slice_of,
    torchs_muon,
)
from tests.threaded.test_muon import exact_against_torch, exact_on_fsdp

pytestmark = pytest.mark.slow


def every_case(rank: int, world_size: int) -> dict[str, list[str]]:
    """One start of processes for all cases of this size: the start is the dear part."""
    found = {
        case.name: exact_against_torch(rank, case, {"lr": 0.02})
        for case in CASES
        if case.world_size == world_size
    }
    for fsdp_case in FSDP_CASES:
        if math.prod(fsdp_case.mesh) == world_size:
            found[fsdp_case.name] = exact_on_fsdp(rank, fsdp_case)
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exact_is_bit_identical_to_one_device(world_size: int) -> None:
    for found in run_ranks(every_case, world_size, world_size).values():
        assert len(found) >= 2
        assert {name: differences for name, differences in found.items() if differences} == {}


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives by name, and the bytes that this rank gives to each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition("::")[2].strip("_")
            self.calls["gather" if "gather" in name else name] += 1
            sent = args[1] if isinstance(args[1], Tensor) else args[0][0]
            self.bytes.append(sent.numel() * sent.element_size())
        return func(*args, **(kwargs or {}))


def data_collectives(
    rank: int,
    mesh: tuple[int, ...],
    placements: tuple[Placement, ...],
    mode: Any,
    bucket_bytes: int,
) -> tuple[int, list[int]]:
    """Gathers and their bytes in the second step; the first one also plans."""
    twins = Twins.of(Case("", mesh, placements))
    optimizer = Muon(named(twins.sharded), sharded_mode=mode)
    optimizer.bucket_bytes = bucket_bytes
    for _ in range(2):
        twins.set_gradients(seed=1)
        with Collectives() as seen:
            optimizer.step()
    assert set(seen.calls) <= {"gather"}, seen.calls
    return seen.calls["gather"], seen.bytes


MIB = 2**20
LARGEST_SHARDS_OF_TWO = sum(-(-rows // 2) * cols for rows, cols in SHAPES)


@pytest.mark.parametrize(
    ("mesh", "placements", "mode", "bucket_bytes", "expected"),
    [
        pytest.param(
            (2,), (Shard(0),), "exact", MIB, (1, [LARGEST_SHARDS_OF_TWO * 2 + 2]), id="1-D: one"
        ),
        pytest.param(
            (2, 2),
            (Replicate(), Shard(0)),
            "exact",
            MIB,
            (1, [LARGEST_SHARDS_OF_TWO * 2 + 2]),
            id="HSDP: one",
        ),
        pytest.param((2,), (Replicate(),), "exact", MIB, (0, []), id="copies: none"),
        pytest.param((2,), (Shard(0),), "approx", MIB, (0, []), id="approx: none"),
    ],
)
def test_data_collectives_of_a_step_are_as_few_as_promised(
    mesh: tuple[int, ...],
    placements: tuple[Placement, ...],
    mode: str,
    bucket_bytes: int,
    expected: tuple[int, list[int]],
) -> None:
    world_size = math.prod(mesh)
    found = run_ranks(data_collectives, world_size, mesh, placements, mode, bucket_bytes).values()
    assert found == (expected,) * world_size


def test_two_cuts_are_two_gathers_for_each_bucket() -> None:
    args = ((2, 2), (Shard(0), Shard(1)), "exact")
    (one, sent), *_ = run_ranks(data_collectives, 4, *args, MIB).values()
    assert one == 2
    assert sent[1] == 2 * sent[0]
    # At most 100 elements in a bucket: 64, 96, 96, 45+45+4+4, 8+9+64.
    (several, _), *_ = run_ranks(data_collectives, 4, *args, 200).values()
    assert several == 2 * 5


def unsharded(rank: int) -> dict[str, int]:
    params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    for param in params:
        param.grad = torch.ones_like(param)
    with Collectives() as seen:
        Muon(params).step()
    return dict(seen.calls)


def test_plain_parameters_cause_no_collective_on_several_ranks() -> None:
    assert run_ranks(unsharded, 2).values() == ({}, {})


def outcome(step: Callable[[], object]) -> str:
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "stepped"


def unchanged(twins: Twins, before: list[Tensor], optimizer: Muon) -> bool:
    weights = all(map(torch.equal, map(local, twins.sharded), before))
    return weights and not optimizer.state


def hook_that_fails_on_one_rank(rank: int) -> tuple[str, bool, list[str]]:
    """A pre-hook and later a closure raise on rank 1; then training goes on."""
    twins = Twins.of(CASES[0])
    optimizer, reference = Muon(named(twins.sharded)), torchs_muon(twins.whole)
    before = [local(param).clone() for param in twins.sharded]
    twins.set_gradients(seed=1)

    def hook(*_: Any) -> None:
        if rank == 1:
            raise KeyError("no such batch")

    handle = optimizer.register_step_pre_hook(hook)
    text = outcome(optimizer.step)
    handle.remove()
    same = unchanged(twins, before, optimizer)
    optimizer.step()
    reference.step()
    return text, same, twins.differences(optimizer, reference)


def test_a_pre_hook_that_fails_on_one_rank_stops_all_and_training_goes_on() -> None:
    for text, same, differences in run_ranks(hook_that_fails_on_one_rank, 2).values():
        assert text.startswith("GroupFailure")
        assert "no such batch" in text
        assert same
        assert differences == []


def leave(self: Muon, inv_scale: float | None, phase: DataPhase) -> None:
    """Instead of the update, after the agreement on it: end as a killed process does."""
    os._exit(3)


def peer_that_dies_after_the_agreement(rank: int) -> tuple[str, bool]:
    twins = Twins.of(CASES[0])
    kind = type("Muon", (Muon,), {"_update": leave}) if rank == 1 else Muon
    optimizer = kind(named(twins.sharded))
    before = [local(param).clone() for param in twins.sharded]
    twins.set_gradients(seed=1)
    return outcome(optimizer.step), unchanged(twins, before, optimizer)


def test_a_gather_that_fails_leaves_everything_as_it_was() -> None:
    survivor, dead = run_ranks(peer_that_dies_after_the_agreement, 2)
    assert dead.exitcode == 3
    assert survivor.value is not None
    text, same = survivor.value
    assert text != "stepped"
    assert same


def with_buckets(rank: int, sizes: Sequence[Any]) -> str:
    twins = Twins.of(CASES[0])
    optimizer = Muon(named(twins.sharded))
    optimizer.bucket_bytes = sizes[rank]
    twins.set_gradients(seed=1)
    return outcome(optimizer.step)


@pytest.mark.parametrize("sizes", [(1000, 1001), (None, 2**21), (0, 0)], ids=str)
def test_ranks_whose_buckets_differ_or_hold_nothing_are_told(sizes: tuple[Any, ...]) -> None:
    for text in run_ranks(with_buckets, 2, sizes).values():
        assert text.startswith("GroupFailure" if 0 in sizes else "Disagreement")
        assert "bucket_bytes" in text


def with_a_scaler(rank: int) -> tuple[list[str], bool, float, bool]:
    """A real GradScaler; in the second step the gradient of rank 1 alone overflows."""
    twins = Twins.of(CASES[0])
    optimizer, reference = Muon(named(twins.sharded)), torchs_muon(twins.whole)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    assert float(scaler.scale(torch.ones(()))) == 1024.0
    twins.set_gradients(seed=1, scale=1024.0)
    scaler.step(optimizer)
    scaler.update()
    reference.step()
    differences = twins.differences(optimizer, reference)
    before = [local(param).clone() for param in twins.sharded]
    twins.set_gradients(seed=2)
    if rank == 1:
        local(twins.sharded[0].grad).fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    skipped = all(map(torch.equal, map(local, twins.sharded), before))
    return differences, skipped, scaler.get_scale(), hasattr(optimizer, "found_inf")


def test_a_grad_scaler_works_and_an_overflow_on_one_rank_skips_all() -> None:
    expected: tuple[list[str], bool, float, bool] = ([], True, 512.0, False)
    assert run_ranks(with_a_scaler, 2).values() == (expected, expected)


def resumed_from_one_device(rank: int) -> list[str]:
    """torch.optim.Muon trains whole; its checkpoint goes on sharded, and back again."""
    twins = Twins.of(CASES[0])
    model = nn.ParameterDict({f"p{i}": param for i, param in enumerate(twins.sharded)})
    whole = nn.ParameterDict({f"p{i}": param for i, param in enumerate(twins.whole)})
    reference = torchs_muon(whole.parameters(), lr=0.02, momentum=0.8)
    for seed in range(2):
        twins.set_gradients(seed)
        reference.step()
    ours = Muon(model.parameters())
    options = StateDictOptions(full_state_dict=True)
    checkpoint = get_optimizer_state_dict(whole, reference, options=options)
    for sharded, param in zip(twins.sharded, twins.whole, strict=True):
        local(sharded).copy_(local(shard(param.detach(), twins.mesh, twins.placements)))
        sharded.grad = None
    set_optimizer_state_dict(model, ours, checkpoint, options=options)
    twins.set_gradients(seed=5)
    ours.step()
    reference.step()
    found = twins.differences(ours, reference)
    saved = get_optimizer_state_dict(model, ours, options=options)
    for index, param in enumerate(twins.whole):
        state: Any = saved["state"]
        if rank == 0 and not torch.equal(
            state[f"p{index}"]["momentum_buffer"], reference.state[param]["momentum_buffer"]
        ):
            found.append(f"saved momentum {index}")
    return found


def test_a_checkpoint_of_torchs_muon_goes_on_sharded() -> None:
    assert run_ranks(resumed_from_one_device, 2).values() == ([], [])


def resumed_from_whole_tensors(rank: int) -> list[str]:
    twins = Twins.of(CASES[0])
    reference = torchs_muon(twins.whole)
    twins.set_gradients(seed=1)
    reference.step()
    optimizer = Muon(named(twins.sharded))
    optimizer.load_state_dict(reference.state_dict())
    for sharded, param in zip(twins.sharded, twins.whole, strict=True):
        local(sharded).copy_(local(shard(param.detach(), twins.mesh, twins.placements)))
    twins.set_gradients(seed=2)
    optimizer.step()
    reference.step()
    return twins.differences(optimizer, reference)


def test_a_state_dict_of_whole_tensors_is_cut_as_the_parameters_are() -> None:
    assert run_ranks(resumed_from_whole_tensors, 2).values() == ([], [])


def loads_two_checkpoints(rank: int) -> tuple[str, bool]:
    """Each rank is given momenta of another shape, or none at all; no rank loads any."""
    twins = Twins.of(CASES[0])
    optimizer = Muon(named(twins.sharded))
    twins.set_gradients(seed=1)
    optimizer.step()
    saved = optimizer.state_dict()
    if rank == 1:
        saved["state"][0] = {"momentum_buffer": torch.zeros(3, 3)}
    before = [local(state["momentum_buffer"]).clone() for state in optimizer.state.values()]
    text = outcome(lambda: optimizer.load_state_dict(saved))
    now = [local(state["momentum_buffer"]) for state in optimizer.state.values()]
    return text, all(map(torch.equal, before, now))


def test_a_checkpoint_that_one_rank_cannot_load_is_loaded_by_none() -> None:
    (first, kept), (second, also_kept) = run_ranks(loads_two_checkpoints, 2).values()
    assert first == second
    assert "rank 1: ValueError: the state of layer.0, momentum_buffer" in first
    assert kept
    assert also_kept


def compiled_step(rank: int) -> tuple[list[str], int]:
    twins = Twins.of(Case("", (2,), (Shard(0),), SHAPES[1:4]))
    ours, reference = Muon(named(twins.sharded)), torchs_muon(twins.whole)
    step: Any = ours.step
    for seed in range(3):
        twins.set_gradients(seed)
        step()
        reference.step()
        step = torch.compile(ours.step, backend="eager")  # once there is a state
    return twins.differences(ours, reference), counters["stats"]["unique_graphs"]


def test_a_compiled_step_is_left_alone_where_ranks_exchange() -> None:
    assert run_ranks(compiled_step, 2).values() == (([], 0), ([], 0))


def mesh_out_of_order(rank: int) -> bool:
    """torch places shards by the rank in the group, whatever order the mesh lists ranks in."""
    mesh = DeviceMesh("cpu", [1, 0])
    weight = torch.arange(24.0).view(4, 6)
    param = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    param.grad = distribute_tensor(weight.cos(), mesh, [Shard(0)])
    twin = nn.Parameter(weight.clone())
    twin.grad = weight.cos()
    Muon([("layer", param)]).step()
    torchs_muon([twin]).step()
    # Not whole_of(), which asks torch for offsets: those follow the order of the mesh.
    assert isinstance(param, DTensor)
    return torch.equal(param.full_tensor(), twin)


def test_a_mesh_may_list_its_ranks_in_any_order() -> None:
    assert run_ranks(mesh_out_of_order, 2).values() == (True, True)


def meshes_in_a_ring(rank: int) -> tuple[str, ...]:
    """Three ranks, a mesh for each pair of them; gathering in list order would deadlock."""
    meshes = {pair: DeviceMesh("cpu", list(pair)) for pair in [(0, 1), (1, 2), (0, 2)]}
    order = {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}[rank]
    weight = torch.arange(24.0).view(4, 6)
    params = [nn.Parameter(shard(weight, meshes[pair], [Shard(0)])) for pair in order]
    for param, pair in zip(params, order, strict=True):
        param.grad = shard(weight.cos(), meshes[pair], [Shard(0)])
    twin = nn.Parameter(weight.clone())
    twin.grad = weight.cos()
    torchs_muon([twin]).step()
    Muon((f"of ranks {pair}", param) for pair, param in zip(order, params, strict=True)).step()
    expected = [slice_of(twin.detach(), meshes[pair], [Shard(0)]) for pair in order]
    return tuple(
        "right" if torch.equal(local(param), part) else "wrong"
        for param, part in zip(params, expected, strict=True)
    )


def test_meshes_that_overlap_in_a_ring_do_not_wait_for_each_other() -> None:
    found = run_ranks(meshes_in_a_ring, 3, timeout=40.0).values()
    assert found == (("right", "right"),) * 3

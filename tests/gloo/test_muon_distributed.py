"""Muon by owners on real processes: the threaded cases again, and exactly what travels."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import consensus
from adapters import Hybrid, _exchange, _muon_rule
from adapters._parcels import Leg
from adapters._plan import Cut, rectangles
from consensus.testing._processes import run_ranks
from tests.gloo._cases import Recorder, on_ranks
from tests.gloo.test_muon_exact import Collectives
from tests.threaded.muon_cases import (
    FSDP_CASES,
    SHAPES,
    Case,
    Twins,
    local,
    named,
    random_matrices,
    shard,
    slice_of,
    torchs_muon,
)
from tests.threaded.test_muon_distributed import ALL, against_torch, by_owners, on_fsdp

pytestmark = pytest.mark.slow


def every_case(rank: int, world_size: int) -> dict[str, list[str]]:
    """One start of processes for all cases of this size: the start is the dear part."""
    found = {
        case.name: against_torch(rank, case, {"lr": 0.02})
        for case in ALL
        if case.world_size == world_size
    }
    for fsdp_case in FSDP_CASES:
        if math.prod(fsdp_case.mesh) == world_size:
            found[fsdp_case.name] = on_fsdp(rank, fsdp_case)
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_it_is_bit_identical_to_one_device(world_size: int) -> None:
    for found in run_ranks(every_case, world_size, world_size).values():
        assert len(found) >= 2
        assert {name: differences for name, differences in found.items() if differences} == {}


# ---- what travels ----


@dataclass
class Traffic:
    """What one rank gave to its exchanges."""

    given: list[int] = field(default_factory=list)  # bytes given to each exchange
    to_others: int = 0  # bytes that left this rank
    flags: int = 0  # of those, elements that say how a parcel went: one each


@contextmanager
def listening(rank: int) -> Iterator[Traffic]:
    """Note each exchange; torch's own account must come to the same number."""
    traffic, exchange = Traffic(), _exchange.CARRIES["all_to_all"]

    def exchanging(
        output: Tensor, given: Tensor, leg: Leg, group: Any, scratch: Tensor
    ) -> Callable[[], object]:
        send = leg.sent
        assert (sum(leg.received), sum(send)) == (len(output), len(given))
        assert given.dtype == torch.bfloat16
        own = dist.get_group_rank(group, rank)
        traffic.given.append(given.nbytes)
        traffic.to_others += (sum(send) - send[own]) * given.element_size()
        traffic.flags += len(send) - 1
        return exchange(output, given, leg, group, scratch)

    with pytest.MonkeyPatch.context() as patch, Collectives() as seen:
        patch.setitem(_exchange.CARRIES, "all_to_all", exchanging)
        yield traffic
    assert seen.bytes == traffic.given
    assert all("alltoall" in name.replace("_", "") for name in seen.calls), seen.calls


def traffic_of(
    rank: int,
    mesh: tuple[int, ...],
    placements: tuple[Placement, ...],
    shapes: tuple[tuple[int, int], ...],
    bucket_bytes: int,
) -> tuple[Traffic, list[int], list[int]]:
    """Exchanges and words of votes in the second step; the first one also plans."""
    twins = Twins.of(Case("", mesh, placements, shapes))
    optimizer = by_owners(named(twins.sharded))
    optimizer.bucket_bytes = bucket_bytes
    recorder = Recorder.on(optimizer)
    for _ in range(2):
        twins.set_gradients(seed=1)
        recorder.words.clear()
        with listening(rank) as traffic:
            optimizer.step()
    return traffic, list(recorder.words), list(recorder.sums)


MIB = 2**20
HSDP = (Replicate(), Shard(0))


@pytest.mark.parametrize(
    ("mesh", "placements", "bucket_bytes", "exchanges"),
    [
        pytest.param((2,), (Shard(0),), MIB, 2, id="rows: there and back"),
        # Owners have matrices of 64 45 9, 64 45 8 4 4, and 96 96 elements: at most 50 in a round.
        pytest.param((3,), (Shard(0),), 100, 2 * 3, id="rows, three rounds"),
        pytest.param((2, 2), (Shard(0), Shard(1)), MIB, 4, id="two cuts: twice"),
        pytest.param((2, 2), HSDP, MIB, 3, id="HSDP: and between copies"),
        pytest.param((2,), (Replicate(),), MIB, 1, id="copies: only that"),
        # 64 9, 64 8 4 4, 96 45, 96 45: one by one.
        pytest.param((2, 2), (Replicate(), Replicate()), 1, 2 * 4, id="copies on two axes"),
    ],
)
def test_a_step_has_one_message_of_two_words_and_so_many_exchanges(
    mesh: tuple[int, ...], placements: tuple[Placement, ...], bucket_bytes: int, exchanges: int
) -> None:
    args = (mesh, placements, SHAPES, bucket_bytes)
    for traffic, words, sums in on_ranks(traffic_of, math.prod(mesh), *args):
        assert (words, sums) == ([2], [])
        assert len(traffic.given) == exchanges


def mixed(num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Squares, wide and tall ones, uneven rows, and fewer rows than ranks."""
    regular = [(48, 24), (24, 96), (96, 24), (24, 24), (48, 48)] * num_ranks
    return (*regular, (num_ranks + 1, 7), (1, 40), (num_ranks - 1, 12), (31, 17))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_byte_travels_once_there_and_once_back(num_ranks: int) -> None:
    shapes = mixed(num_ranks)
    args = ((num_ranks,), (Shard(0),), shapes, MIB)
    found = [traffic for traffic, _, _ in on_ranks(traffic_of, num_ranks, *args)]
    total = sum(map(math.prod, shapes))
    floor = 4 * (num_ranks - 1) * total / num_ranks  # bytes, of all ranks together
    sent = sum(each.to_others for each in found)
    assert abs(sent / floor - 1) < 0.05
    assert [each.flags for each in found] == [2 * (num_ranks - 1)] * num_ranks


def test_even_shards_travel_at_the_floor_to_the_byte() -> None:
    shapes = ((12, 24), (24, 12), (36, 12), (12, 12), (48, 24))
    for num_ranks in (2, 3, 4):
        found = on_ranks(traffic_of, num_ranks, (num_ranks,), (Shard(0),), shapes, MIB)
        sent = sum(traffic.to_others - 2 * traffic.flags for traffic, _, _ in found)
        assert sent * num_ranks == 4 * (num_ranks - 1) * sum(map(math.prod, shapes))


def test_a_round_brings_this_ranks_shards_and_one_element_a_rank() -> None:
    for rank, (traffic, _, _) in enumerate(on_ranks(traffic_of, 3, (3,), (Shard(0),), SHAPES, MIB)):
        parts = [rectangles(shape, (Cut(0, 3),))[rank] for shape in SHAPES]
        assert traffic.given[0] == 2 * (sum(part.numel for part in parts) + 3)


# ---- who computes ----


def computed(
    rank: int, mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[tuple[int, ...]]:
    """The shapes of what this rank orthogonalises in one step."""
    seen: list[tuple[int, ...]] = []
    orthogonalize = _muon_rule.orthogonalize

    def counting(works: Any, matrices: Sequence[Tensor]) -> list[Tensor]:
        seen.extend(tuple(matrix.shape) for matrix in matrices)
        return orthogonalize(works, matrices)

    twins = Twins.of(Case("", mesh, placements))
    optimizer = by_owners(named(twins.sharded))
    twins.set_gradients(seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_muon_rule, "orthogonalize", counting)
        optimizer.step()
    return seen


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((2, 2), HSDP), ((2, 2), (Shard(0), Replicate())), ((4,), (Replicate(),)), ((3,), HSDP[1:])],
)
def test_each_matrix_is_computed_once_over_all_ranks(
    mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    found = on_ranks(computed, math.prod(mesh), mesh, placements)
    assert Counter(itertools.chain(*found)) == Counter(SHAPES)
    assert all(found)  # nobody is idle


# ---- meshes that overlap ----


def meshes_in_a_ring(rank: int) -> tuple[str, ...]:
    """Three ranks, a mesh for each pair of them; in list order they would wait in a circle."""
    meshes = {pair: DeviceMesh("cpu", list(pair)) for pair in [(0, 1), (1, 2), (0, 2)]}
    order = {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}[rank]
    return on_meshes_of(rank, [meshes[pair] for pair in order])


def on_meshes_of(rank: int, meshes: Sequence[DeviceMesh]) -> tuple[str, ...]:
    """One matrix on each of these meshes; what became of each after two steps."""
    (weight,) = random_matrices([(5, 6)], seed=1)
    params = [nn.Parameter(shard(weight, mesh, [Shard(0)])) for mesh in meshes]
    twin = nn.Parameter(weight.clone())
    torchs = torchs_muon([twin])
    ours = by_owners(zip([f"of {mesh.mesh.tolist()}" for mesh in meshes], params, strict=True))
    recorder = Recorder.on(ours)
    for seed in (2, 3):
        (twin.grad,) = random_matrices([(5, 6)], seed)
        for mesh, param in zip(meshes, params, strict=True):
            param.grad = shard(twin.grad, mesh, [Shard(0)])
        recorder.words.clear()
        ours.step()
        torchs.step()
    expected = [slice_of(twin.detach(), mesh, [Shard(0)]) for mesh in meshes]
    same = map(torch.equal, map(local, params), expected)
    votes = f"{len(recorder.words)} votes"
    return (*("right" if each else "wrong" for each in same), votes)


def test_meshes_in_a_ring_do_not_wait_for_each_other_and_agree_before_they_write() -> None:
    assert on_ranks(meshes_in_a_ring, 3) == (("right", "right", "2 votes"),) * 3


def a_pair_in_the_world(rank: int) -> tuple[str, ...]:
    world, pair = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [0, 1])
    return on_meshes_of(rank, [world, pair] if rank < 2 else [world])


def half_of_a_hybrid(rank: int, pair: list[int]) -> str:
    """Muon's half on two ranks, the backup's on all three."""
    on_two, world = DeviceMesh("cpu", pair), DeviceMesh("cpu", [0, 1, 2])
    muon = shard(torch.ones(4, 4), on_two, [Shard(0)]) if rank in pair else None
    backup = nn.Parameter(shard(torch.ones(4), world, [Shard(0)]))
    matrices = [] if muon is None else [("matrix", nn.Parameter(muon))]
    optimizer = Hybrid(
        matrices, [("vector", backup)], sharded_mode="distributed", muon="dense", backup="adamw"
    )
    for _ in range(2):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = param.detach().clone()
        optimizer.step()
    return f"{len(consensus.control_group(optimizer).ranks)} ranks"


def test_a_rank_that_is_in_only_one_crew_votes_with_those_in_two() -> None:
    outcomes = [each[:-1] for each in on_ranks(a_pair_in_the_world, 3)]
    assert outcomes == [("right", "right"), ("right", "right"), ("right",)]


def test_that_vote_is_one_message() -> None:
    assert [votes for *_, votes in on_ranks(a_pair_in_the_world, 3)] == ["2 votes"] * 3


@pytest.mark.parametrize("pair", [[0, 1], [1, 2]], ids=str)
def test_a_rank_without_matrices_votes_with_those_that_have_some(pair: list[int]) -> None:
    assert on_ranks(half_of_a_hybrid, 3, pair) == ("3 ranks",) * 3


# ---- checkpoints ----


def through_torchs_checkpoint(rank: int, mesh: tuple[int, ...], cut: int) -> list[str]:
    """torch.optim.Muon trains whole, its checkpoint goes on by owners, and back again."""
    placements = (Replicate(), Shard(cut))[-len(mesh) :]
    twins = Twins.of(Case("", mesh, placements))
    model = nn.ParameterDict({f"p{i}": param for i, param in enumerate(twins.sharded)})
    whole = nn.ParameterDict({f"p{i}": param for i, param in enumerate(twins.whole)})
    torchs = torchs_muon(whole.parameters(), lr=0.02, momentum=0.8)
    for seed in range(2):
        twins.set_gradients(seed)
        torchs.step()
    options = StateDictOptions(full_state_dict=True)
    checkpoint = get_optimizer_state_dict(whole, torchs, options=options)
    for sharded, param in zip(twins.sharded, twins.whole, strict=True):
        local(sharded).copy_(local(shard(param.detach(), twins.mesh, placements)))
        sharded.grad = None
    ours = by_owners(model.parameters())
    set_optimizer_state_dict(model, ours, checkpoint, options=options)
    twins.set_gradients(seed=5)
    ours.step()
    torchs.step()
    found = twins.differences(ours, torchs)
    saved: Any = get_optimizer_state_dict(model, ours, options=options)["state"]
    for index, param in enumerate(twins.whole) if rank == 0 else ():
        momentum = torchs.state[param]["momentum_buffer"]
        if not torch.equal(saved[f"p{index}"]["momentum_buffer"], momentum):
            found.append(f"saved momentum {index}")
    return found


@pytest.mark.parametrize(("mesh", "cut"), [((3,), 0), ((2,), 1), ((2, 2), 0)])
def test_checkpoints_of_torchs_muon_load_in_both_directions(
    mesh: tuple[int, ...], cut: int
) -> None:
    size = math.prod(mesh)
    assert on_ranks(through_torchs_checkpoint, size, mesh, cut) == ([],) * size

"""Ranks as threads; ``collectives`` and ``train`` also run on processes, in tests/gloo."""

import copy
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from consensus import any_failed
from consensus.testing._ranks import RankError
from consensus.testing._snapshot import assert_unchanged, snapshot
from consensus.testing._threads import run_threads


def votes(rank: int) -> Any:
    assert any_failed(rank == 1)
    return distributed_c10d._get_default_group()


def test_a_run_ends_helper_threads_and_connections_though_its_group_is_held() -> None:
    """Torch's caches hold the groups of DTensors as long as the process lives."""
    before = set(threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))
    groups = run_threads(votes, 3).values()
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    del groups


def collectives(rank: int) -> list[torch.Tensor]:
    """One of each collective, with small integers: equal on any correct backend."""
    size = dist.get_world_size()
    mine = torch.arange(3.0) + rank
    total, largest, sent = mine.clone(), mine.to(torch.int64), mine.clone()
    dist.all_reduce(total)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.broadcast(sent, src=size - 1)
    gathered = [torch.empty(3) for _ in range(size)]
    dist.all_gather(gathered, mine)
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.arange(float(size)) + 10 * rank)
    return [total, largest, sent, *gathered, swapped]


def train(rank: int, model: torch.nn.Module) -> list[torch.Tensor]:
    """Two steps of a sharded model; returns its whole parameters."""
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.arange(12.0).reshape(2, 6) / 12 + rank
    for _ in range(2):
        optimizer.zero_grad()
        sharded(inputs).square().mean().backward()
        optimizer.step()
    parameters = list(sharded.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    return [p.full_tensor().detach() for p in parameters if isinstance(p, DTensor)]


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    # Three rows on four ranks: the last shard is empty.
    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))


def test_collectives_meet() -> None:
    values = run_threads(collectives, 2).values()
    expected = [[1, 3, 5], [1, 2, 3], [1, 2, 3], [0, 1, 2], [1, 2, 3]]
    assert [tensor.tolist() for tensor in values[0]] == [*expected, [0, 10]]
    assert [tensor.tolist() for tensor in values[1]] == [*expected, [1, 11]]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fully_shard_trains(world_size: int) -> None:
    model = small_model()
    values = run_threads(train, world_size, model).values()
    for other in values[1:]:
        assert all(map(torch.equal, values[0], other))
    assert not torch.equal(values[0][0], model[0].weight)  # type: ignore[index]


def test_arguments_are_shared_and_results_are_in_rank_order() -> None:
    shared = object()
    ranks = run_threads(lambda rank, thing, *, word: (rank, thing, word), 3, shared, word="x")
    assert ranks.values() == ((0, shared, "x"), (1, shared, "x"), (2, shared, "x"))


def raise_on_rank_1(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        raise ValueError("boom")
    dist.barrier()


def test_an_error_releases_the_others_without_an_error_of_their_own() -> None:
    ranks = run_threads(raise_on_rank_1, 3)
    assert [error and error.message for error in ranks.errors()] == [None, "boom", None]
    assert ranks.hung == ()
    assert "another rank had failed" in ranks[0].output
    with pytest.raises(RankError, match=r"rank 1 raised builtins\.ValueError: boom"):
        ranks.values()


def raise_after_a_vote(rank: int) -> None:
    failed = torch.tensor([int(rank == 0)])
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    raise RuntimeError(f"rank {rank} saw {failed.item()}")


@pytest.mark.slow
def test_errors_of_all_ranks_are_kept_however_they_interleave() -> None:
    for _ in range(50):
        errors = run_threads(raise_after_a_vote, 4).errors()
        assert [error and error.message for error in errors] == [
            f"rank {rank} saw 1" for rank in range(4)
        ]


def leave_early(rank: int) -> None:
    dist.barrier()
    if rank != 0:
        dist.all_reduce(torch.ones(1))


def test_stranded_ranks_are_reported_with_stacks_before_the_deadline() -> None:
    ranks = run_threads(leave_early, 3, timeout=3600)
    assert ranks.hung == (1, 2)
    assert not ranks[0].failed
    assert "in leave_early" in ranks[1].stack
    assert "in all_reduce" in ranks[1].stack


def meet_in_different_groups(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2, 0])]
    dist.all_reduce(torch.ones(1), group=groups[rank])


def test_a_ring_of_groups_is_found_stranded() -> None:
    ranks = run_threads(meet_in_different_groups, 3, timeout=3600)
    assert ranks.hung == (0, 1, 2)


def wait_for(rank: int, event: threading.Event) -> None:
    if rank == 1:
        event.wait()


@pytest.mark.slow
def test_a_rank_that_hangs_elsewhere_is_left_behind_at_the_deadline() -> None:
    event = threading.Event()
    ranks = run_threads(wait_for, 2, event, timeout=0.5)
    assert ranks.hung == (1,)
    assert "in wait_for" in ranks[1].stack
    with pytest.raises(RuntimeError, match=r"1 rank.* of an earlier run_threads still run"):
        run_threads(collectives, 2)
    event.set()
    for thread in threading.enumerate():
        if thread.name == "rank1":
            thread.join()
    assert len(run_threads(collectives, 2).values()) == 2


def leave_by_exit(rank: int) -> None:
    raise SystemExit(rank)


def test_a_ranks_own_system_exit_is_an_error() -> None:
    errors = run_threads(leave_by_exit, 2).errors()
    assert [error and error.type_name for error in errors] == ["SystemExit", "SystemExit"]


def test_torch_is_as_before() -> None:
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_threads(raise_on_rank_1, 2)
        assert torch.get_num_threads() == 2
        assert not dist.is_initialized()
        assert not [thread for thread in threading.enumerate() if thread.name == "rank0"]
    finally:
        torch.set_num_threads(count)


@pytest.mark.parametrize(("world_size", "timeout"), [(0, 1.0), (1, 0.0)])
def test_arguments_are_checked(world_size: int, timeout: float) -> None:
    with pytest.raises(ValueError, match="needs 1 rank and some time"):
        run_threads(collectives, world_size, timeout=timeout)


def look_alone(rank: int) -> str:
    """Rank 0 alone looks at DTensors of all placements: a collective would strand it."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0)
    parameter = torch.nn.Parameter(DTensor.from_local(whole, mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    state = optimizer.state[parameter]
    state["replicated"] = DTensor.from_local(whole.clone(), mesh, [Replicate()], run_check=False)
    state["partial"] = DTensor.from_local(whole.clone(), mesh, [Partial()])
    if rank == 1:
        return ""
    before = snapshot(optimizer)
    assert_unchanged(optimizer, before)
    state["replicated"].to_local()[2] = -1
    state["partial"] = DTensor.from_local(whole.clone(), mesh, [Replicate()], run_check=False)
    with pytest.raises(AssertionError) as caught:
        assert_unchanged(optimizer, before)
    return str(caught.value)


def test_a_snapshot_of_dtensors_is_taken_by_one_rank_alone() -> None:
    lines = run_threads(look_alone, 2).values()[0].splitlines()
    assert lines[1] == "state[group0[0]].replicated changed at 1 of 6 elements"
    assert lines[2].startswith("state[group0[0]].partial changed its placements from (Partial(sum)")

"""What control groups leave behind, and what they outlive: the user's groups, keys, threads."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from adapters import Muon
from consensus import any_failed, control_group, groups
from consensus._session import current_session
from consensus.testing import assert_unchanged, run_ranks, snapshot
from tests.gloo._cases import (
    LIVENESS_S,
    Recorder,
    Trained,
    caught,
    form_group,
    needs_list_keys,
    on_ranks,
    tell,
    wait_for,
)
from tests.gloo.test_groups import failing, parameter

pytestmark = pytest.mark.slow


def torchs_groups(rank: int) -> tuple[int, tuple[float, ...]]:
    """Groups that the user makes before, after and beside ours."""
    before = distributed_c10d._world.group_count
    plans_on_some = Trained.on(DeviceMesh("cpu", [0, 1])) if rank < 2 else DeviceMesh("cpu", [0, 1])
    made_by_user = distributed_c10d._world.group_count
    if isinstance(plans_on_some, Trained):  # so ranks differ in how many groups of ours they have
        plans_on_some.healthy_step()
    any_failed(False)
    assert distributed_c10d._world.group_count == made_by_user
    sums = []
    for ranks in ([0, 1, 2], [0, 2]):
        group: Any = dist.new_group(ranks)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            value = torch.tensor([1.0])
            dist.all_reduce(value, group=group)
            sums.append(value.item())
    return made_by_user - before, tuple(sums)


def test_names_of_the_users_groups_are_left_alone() -> None:
    found = on_ranks(torchs_groups, 3)
    assert [sums for _, sums in found] == [(3.0, 2.0), (3.0,), (3.0, 2.0)]
    assert len({made for made, _ in found}) == 1


def keys_of_the_store() -> set[str]:
    store: Any = _get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return {key for key in store.list_keys() if "consensus" in key}


def consensus_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "consensus" in thread.name]


def new_keys(act: Callable[[], object]) -> list[str]:
    dist.barrier()
    before = keys_of_the_store()
    dist.barrier()
    act()
    dist.barrier()
    return sorted(keys_of_the_store() - before)


def keys_of_each_act(rank: int) -> list[list[str]]:
    trained = Trained.on()

    def over_the_store() -> None:
        for _ in range(3):
            any_failed(rank == 0, control_group(None, backend="store"))

    return [
        new_keys(lambda: control_group(trained.optimizer).prepare()),
        new_keys(trained.healthy_step),
        new_keys(lambda: any_failed(rank == 0)),
        new_keys(over_the_store),
    ]


def what_is_left(rank: int) -> tuple[list[list[str]], bool, list[str]]:
    """Keys after planning, after votes and after a failure; threads after the group is gone."""
    keys = keys_of_each_act(rank)
    had_threads = bool(consensus_threads())
    dist.destroy_process_group()
    for thread in consensus_threads():  # torch's caches hold the group; our threads look for that
        thread.join(LIVENESS_S)
    return keys, had_threads, [thread.name for thread in consensus_threads()]


@needs_list_keys
def test_votes_leave_no_keys_behind_and_the_end_no_threads() -> None:
    for (planned, stepped, failed, by_store), had_threads, threads in on_ranks(what_is_left, 2):
        assert planned == []
        assert stepped == []
        assert failed == []
        assert len(by_store) == 2  # the words of the last vote, one key a rank
        assert had_threads
        assert threads == []


def after_the_end(rank: int) -> tuple[list[str], str]:
    """The groups of a mesh outlive the default group, so an update would still go through."""
    trained = Trained.on()
    trained.healthy_step()
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    kept = control_group(mesh).prepare()
    trained.give_gradients()
    before = snapshot(trained.optimizer)
    dist.barrier()
    dist.destroy_process_group()
    acts: list[Callable[[], Any]] = [
        lambda: any_failed(rank == 1, kept),
        lambda: any_failed(rank == 1, mesh),
        *[trained.optimizer.step] * 2,  # each time
    ]
    errors = [str(caught(act)) for act in acts]
    return errors, str(caught(lambda: assert_unchanged(trained.optimizer, before)) or "")


def test_without_a_process_group_ranks_of_a_mesh_do_not_go_on_alone() -> None:
    for errors, changed in on_ranks(after_the_end, 2):
        assert [each for each in errors if "the default process group was destroyed" in each] == (
            errors
        )
        assert changed == ""


@dataclass(frozen=True)
class Leftovers:
    """What a rank holds, in numbers."""

    threads: int
    descriptors: int  # sockets too
    channels: int
    known: int  # optimizers that have a control group
    keys: int  # of the store, all ranks' together

    @classmethod
    def now(cls) -> Leftovers:
        gc.collect()
        dist.barrier()  # nobody is about to make or drop a key
        session = current_session()
        assert session is not None
        found = cls(
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            len(session._channels),
            len(groups._by_optimizer),
            # But not where ranks that had to wait have said they are: that depends on the load.
            sum("/at/" not in key for key in keys_of_the_store()),
        )
        dist.barrier()
        return found


OPTIMIZERS, ALIVE = 300, 8
PAIRS = ((0, 1), (1, 2), (0, 2))
# The meshes of an optimizer, in turn: mostly one of two ranks, since that is cheap.
TIED: tuple[tuple[tuple[int, ...], ...], ...] = (
    *((pair,) for pair in PAIRS * 2),
    ((0, 1, 2),),
    ((0, 1), (1, 2)),
)


def many_optimizers(rank: int) -> tuple[Leftovers, Leftovers, int]:
    """Ranks build and step in one order; each drops, and collects garbage, in one of its own."""
    meshes = {ranks: DeviceMesh("cpu", list(ranks)) for ranks in (*PAIRS, (0, 1, 2))}
    own_order, alive, made = random.Random(rank), list[Muon](), list[weakref.ref[Muon]]()
    early: Leftovers | None = None
    for number in range(OPTIMIZERS):
        if number == len(TIED):  # of each kind there has been one
            early = Leftovers.now()
        mine = [ranks for ranks in TIED[number % len(TIED)] if rank in ranks]
        if not mine:
            continue
        alive.append(Muon((f"of {ranks}", parameter(meshes[ranks])) for ranks in mine))
        made.append(weakref.ref(alive[-1]))
        alive[-1].step()
        if len(alive) == ALIVE:
            del alive[own_order.randrange(ALIVE)]
        if own_order.random() < 0.05:
            gc.collect()
    alive.clear()
    late = Leftovers.now()
    assert early is not None
    return early, late, sum(ref() is not None for ref in made)


@needs_list_keys
def test_hundreds_of_optimizers_leave_nothing_behind() -> None:
    for early, late, living in on_ranks(many_optimizers, 3):
        assert living == 0
        assert early.known > 0
        assert late == replace(early, known=0)


def two_jobs_in_turn(rank: int, folder: str) -> list[Any]:
    """Two process groups in one process, one after the other, and an optimizer in both."""
    found: list[Any] = []
    trained: Trained | None = None
    for number in range(2):
        form_group(rank, folder, number)
        if trained is not None:  # its mesh is gone with the first job
            found.append(any_failed(rank == 1, control_group(None)))
        trained = Trained.on()
        trained.healthy_step()
        found += [trained.differences(), any_failed(rank == 0), any_failed(False)]
        assert str(caught(lambda: failing(rank, control_group(None)))).startswith("evaluate failed")
        dist.destroy_process_group()
        found.append(any_failed(rank == 1))  # not distributed any more
    return found


def test_a_second_process_group_in_the_same_process_works(tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks = run_ranks(two_jobs_in_turn, 2, folder, init=False, timeout=LIVENESS_S)
    for rank, found in enumerate(ranks.values()):
        alone = rank == 1
        assert found == [[], True, False, alone, True, [], True, False, alone]


def made_before_the_group(rank: int, folder: str) -> tuple[tuple[int, ...], bool]:
    """A control group and an optimizer that are older than the process group."""
    group = control_group(None)
    assert (group.ranks, group.is_local, any_failed(True, group)) == ((0,), True, True)
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    return group.prepare().ranks, any_failed(rank == 1, group)


def test_a_control_group_made_before_the_process_group_follows_it(tmp_path: Path) -> None:
    ranks = run_ranks(made_before_the_group, 2, str(tmp_path), init=False, timeout=LIVENESS_S)
    assert ranks.values() == (((0, 1), True),) * 2


def equal_meshes(rank: int) -> str:
    """Two meshes of the same ranks with a group each; rank 1 has its matrices on the other one."""
    meshes = [DeviceMesh("cpu", [0, 1]) for _ in range(2)]
    if rank == 2:
        wait_for("done")
        return ""
    optimizer = Muon([("w", parameter(meshes[rank]))])
    text = str(caught(optimizer.step))
    tell("done")
    return text


def test_equal_meshes_with_distinct_groups_are_told_apart() -> None:
    first, second, _ = on_ranks(equal_meshes, 3)
    assert first == second
    assert "process group" in first
    assert "on rank 0" in first


def meshes_in_another_order(rank: int) -> list[list[str]]:
    """Several meshes, met in another order on each rank: votes must not depend on it."""
    pairs: Sequence[tuple[int, int]] = ((0, 1), (1, 2), (0, 2))
    made = {pair: DeviceMesh("cpu", list(pair)) for pair in pairs}
    mine = [pair for pair in pairs if rank in pair]
    order = mine if rank != 1 else mine[::-1]
    params = [(f"of {pair}", parameter(made[pair])) for pair in order]
    optimizer = Muon(params)
    recorder = Recorder.on(optimizer)
    texts = [str(caught(optimizer.step)) for _ in range(2)]
    if rank == 0:
        params[0][1].grad = None
    texts.append(str(caught(optimizer.step)))
    return [texts, [str(count) for count in recorder.words[:2]]]


def test_ranks_that_meet_meshes_in_another_order_agree() -> None:
    by_rank = on_ranks(meshes_in_another_order, 3)
    for texts, words in by_rank:
        assert texts[:2] == ["None", "None"]
        assert texts[2] == by_rank[0][0][2]
        assert "gradients: of (0, 1): missing on rank 0; present on rank 1" in texts[2]
        assert words == ["8", "8"]  # one pair for all, one for each of the three meshes

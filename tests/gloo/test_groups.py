"""Where control groups come from, what they are made of, and what they leave behind: nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import Shard

import consensus
from adapters import Muon
from consensus import _transport, any_failed, control_group, fail_together
from consensus.testing import run_ranks
from tests.gloo._cases import LIVENESS_S, Recorder, Trained, caught, on_ranks, tell, wait_for
from tests.threaded.test_muon import random_matrices, shard

pytestmark = pytest.mark.slow


def parameter(mesh: DeviceMesh) -> nn.Parameter:
    (weight,) = random_matrices([(6, 4)], seed=1)
    param = nn.Parameter(shard(weight, mesh, [Shard(0)] * mesh.ndim))
    param.grad = shard(weight.cos(), mesh, [Shard(0)] * mesh.ndim)
    return param


def every_source(rank: int) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Who votes for each kind of source, and whether one failure among them is seen."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    high = dist.new_group([1, 2, 3])
    param, plain = parameter(mesh["b"]), nn.Parameter(torch.ones(2, 2))
    sources: dict[str, Any] = {
        "nothing": None,
        "WORLD": dist.group.WORLD,
        "a mesh": mesh,
        "an axis of it": mesh["a"],
        "both axes": [mesh["a"], mesh["b"]],
        "a mesh and a part of it": [mesh, mesh["b"]],
        "a process group": pair,
        "a parameter": param,
        "parameters": [param, plain],
        "parameter groups": [{"params": [plain]}, {"params": [param]}],
        "an optimizer": Muon([("w", param)]),
        "an optimizer of another library": torch.optim.SGD([param, plain], lr=1.0),
        "an optimizer with a wider group": Muon([("w", param)], control_group=mesh),
        "a generator": (item for item in (param, mesh["a"])),
        "a control group": control_group(mesh["b"]),
        "a control group in a list": [control_group(mesh["b"]), mesh["a"]],
    }
    if rank > 0:
        sources["a group without rank 0"] = high
    found = {}
    for name, source in sources.items():
        group = control_group(source)
        last = max(group.ranks)  # before planning: what this rank can see by itself
        failed = any_failed(rank == last, group)
        found[name] = (group.ranks, failed and not any_failed(False, group))
    return found


def test_every_source_names_the_ranks_that_must_agree() -> None:
    by_rank = on_ranks(every_source, 4)
    everyone = (0, 1, 2, 3)
    pairs = [(0, 1), (0, 1), (2, 3), (2, 3)]
    columns = [(0, 2), (1, 3), (0, 2), (1, 3)]
    for rank, found in enumerate(by_rank):
        expected = {
            "nothing": everyone,
            "WORLD": everyone,
            "a mesh": everyone,
            "an axis of it": columns[rank],
            "both axes": everyone,
            "a mesh and a part of it": everyone,
            "a process group": pairs[rank],
            "a parameter": pairs[rank],
            "parameters": pairs[rank],
            "parameter groups": pairs[rank],
            "an optimizer": pairs[rank],
            "an optimizer of another library": pairs[rank],
            "an optimizer with a wider group": everyone,
            "a generator": everyone,
            "a control group": pairs[rank],
            "a control group in a list": everyone,
        }
        if rank > 0:
            expected["a group without rank 0"] = (1, 2, 3)
        assert {name: ranks for name, (ranks, _) in found.items()} == expected
        assert all(right for _, right in found.values()), found


def without_rank_0(rank: int) -> tuple[str, tuple[int, ...]]:
    """A group of ranks 1 and 2: messages must speak of global ranks."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return str(caught(lambda: any_failed(False, group))), ()

    def run() -> None:
        with fail_together("save", group):
            if rank == 2:
                raise OSError("disk full")

    error = caught(run)
    assert isinstance(error, consensus.GroupFailure)
    return str(error), tuple(failure.rank for failure in error.failures)


def test_a_group_without_rank_0_works_and_speaks_of_global_ranks() -> None:
    (outside, _), *members = on_ranks(without_rank_0, 3)
    assert "not a member" in outside
    for text, ranks in members:
        assert ranks == (2,)
        assert "save failed on rank 2" in text


def not_a_member(rank: int) -> list[str]:
    """Rank 2 names a mesh it is no part of, alone and through an optimizer."""
    mesh = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        return []
    errors = [
        caught(lambda: control_group(mesh)),
        caught(lambda: any_failed(False, [dist.group.WORLD, mesh])),
        caught(lambda: control_group(3)),
        caught(lambda: control_group(None, backend="mpi")),
    ]
    return [f"{type(error).__name__}: {error}" for error in errors]


def test_a_source_that_cannot_be_used_is_refused_in_words() -> None:
    *_, texts = on_ranks(not_a_member, 3)
    assert texts[0].startswith("EnclosureError: rank 2 is not a member of ranks [0, 1]")
    assert texts[1].startswith("EnclosureError: rank 2 is not a member")
    assert texts[2].startswith("TypeError: expected an optimizer, parameters")
    assert texts[3].startswith("ValueError: expected backend to be one of")


def each_backend(rank: int) -> dict[str, tuple[str, bool, str, float]]:
    found = {}
    for backend in ("auto", "gloo", "store", "inherit"):
        group = control_group(None, backend=backend, timeout=20.0)
        failed = any_failed(rank == 1, group)
        text = str(caught(lambda: failing(rank, group)))  # noqa: B023
        channel = group.channel
        assert channel is not None
        link = type(channel.link).__name__.replace("SmallGroup", "Group")
        found[backend] = (link, failed, text, group.hard_deadline)
    return found


def failing(rank: int, group: consensus.ControlGroup) -> None:
    with fail_together("evaluate", group):
        if rank == 1:
            raise ValueError("here")


def test_each_backend_holds_the_same_votes() -> None:
    by_rank = on_ranks(each_backend, 3)
    for found in by_rank:
        assert {name: link for name, (link, *_) in found.items()} == {
            "auto": "GroupLink",
            "gloo": "GroupLink",
            "store": "StoreLink",
            "inherit": "GroupLink",
        }
        for _, failed, text, deadline in found.values():
            assert failed
            assert text.startswith("evaluate failed on rank 1")
            assert deadline == 20.0


def optimizer_with_a_group(rank: int) -> tuple[str, float, list[int]]:
    """The group that a user gives an optimizer keeps its backend and its deadline."""
    group = control_group(dist.group.WORLD, backend="store", timeout=7.0)
    trained = Trained.on(control_group=group)
    recorder = Recorder.on(trained.optimizer)
    trained.healthy_step()
    found = control_group(trained.optimizer)
    return type(recorder.link).__name__, found.hard_deadline, recorder.words


def test_an_optimizer_votes_as_its_control_group_says() -> None:
    assert on_ranks(optimizer_with_a_group, 2) == (("StoreLink", 7.0, [2]),) * 2


def different_backends(rank: int) -> list[str]:
    group = control_group(None, backend="store" if rank == 0 else "gloo")
    texts = [str(caught(lambda: any_failed(False, group)))]
    trained = Trained.on(
        control_group=control_group(None, backend="store" if rank == 0 else "inherit")
    )
    trained.give_gradients()
    return [*texts, str(caught(trained.optimizer.step))]


def test_ranks_that_ask_for_different_backends_are_told() -> None:
    first, second = on_ranks(different_backends, 2)
    assert first == second
    assert "want different control groups" in first[0]
    assert "control backend" in first[1]


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def falls_back(rank: int, how: str) -> tuple[str, list[str], bool, list[str]]:
    """On rank 1, no gloo group can be made, or its first message does not arrive."""
    make = _transport.make_gloo

    def fails(*args: Any, **kwargs: Any) -> Any:
        if how == "cannot be made":
            raise RuntimeError("no route to host")
        link = make(*args, **kwargs)
        link.close()
        return link

    if rank == 1:
        _transport.make_gloo = fails  # type: ignore[assignment]
    messages = Messages()
    logging.getLogger("consensus").addHandler(messages)
    trained = Trained.on(shape=(3,))
    # The others look for rank 1 for half of that.
    channel = control_group(trained.optimizer).prepare(timeout=4.0).channel
    trained.healthy_step()
    assert channel is not None
    failed = any_failed(rank == 2)
    return type(channel.link).__name__, messages.texts, failed, trained.differences()


@pytest.mark.parametrize("how", ["cannot be made", "is deaf"])
def test_all_ranks_go_over_to_the_store_when_gloo_fails_on_one(how: str) -> None:
    by_rank = on_ranks(falls_back, 3, how)
    for rank, (link, texts, failed, differences) in enumerate(by_rank):
        assert link == "StoreLink"
        (text,) = texts  # one warning, although there are two users of the group
        assert "no gloo control group for ranks [0, 1, 2]" in text
        assert "GLOO_SOCKET_IFNAME" in text
        if rank == 1 and how == "cannot be made":
            assert "no route to host" in text
        assert failed
        assert differences == []


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
    for make in (
        lambda: dist.new_group([0, 1, 2]),
        lambda: dist.new_group([0, 2]),
    ):
        group = make()
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


def test_votes_leave_no_keys_behind_and_the_end_no_threads() -> None:
    for (planned, stepped, failed, by_store), had_threads, threads in on_ranks(what_is_left, 2):
        assert len(planned) == 2  # gloo's own: where each rank listens
        assert all("/gloo/" in key for key in planned)
        assert stepped == []
        assert failed == []
        assert len(by_store) == 2  # the words of the last vote, one key a rank
        assert had_threads
        assert threads == []


def two_jobs_in_turn(rank: int, folder: str) -> list[Any]:
    """Two process groups in one process, one after the other, and an optimizer in both."""
    found: list[Any] = []
    trained: Trained | None = None
    for number in range(2):
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/{number}", 2),
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=LIVENESS_S),
        )
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
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2
    )
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

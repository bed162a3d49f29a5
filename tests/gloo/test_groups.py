"""Where control groups come from, what they are made of, and what they leave behind: nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import consensus
from adapters import Muon
from consensus import _sockets, _transport, any_failed, control_group, fail_together
from tests.gloo._cases import Recorder, Trained, caught, on_ranks
from tests.threaded.muon_cases import random_matrices, shard

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


def shown_as(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (3,))
    groups = [control_group(mesh, backend="store"), control_group(nn.Parameter(torch.ones(1)))]
    found = [*map(repr, groups), repr(groups[0].prepare())]
    dist.destroy_process_group()
    return [*found, *map(repr, groups)]


def test_a_group_is_shown_with_its_ranks_and_its_backend() -> None:
    of_three = "<ControlGroup of ranks 0-2, backend 'store'>"
    for rank, found in enumerate(on_ranks(shown_as, 3)):
        alone = f"<ControlGroup of rank {rank}, backend 'auto'>"
        early = of_three.replace(">", ", not planned yet>")
        assert found == [early, alone, of_three, of_three, alone]
    assert repr(control_group()) == "<ControlGroup of rank 0, backend 'auto'>"


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
            "auto": "HopLink",
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
    """On rank 1, nothing can be connected, or the first message does not arrive."""
    make, connect = _transport.make_gloo, _sockets.connect

    def fails(*args: Any, **kwargs: Any) -> Any:
        if how == "cannot be made":
            raise RuntimeError("no route to host")
        link = make(*args, **kwargs)
        link.close()
        return link

    def fails_too(*args: Any, **kwargs: Any) -> Any:
        if how == "cannot be made":
            raise OSError("no route to host")
        link = connect(*args, **kwargs)
        link.close()
        return link

    if rank == 1:
        _transport.make_gloo, _sockets.connect = fails, fails_too
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
        first, text = texts  # one warning each, although there are two users of the group
        assert "no tcp control group for ranks [0, 1, 2]" in first
        assert "no gloo control group for ranks [0, 1, 2]" in text
        assert "GLOO_SOCKET_IFNAME" in text
        if rank == 1 and how == "cannot be made":
            assert "no route to host" in text
        assert failed
        assert differences == []


def names_groups_in_another_order(rank: int, backend: str) -> list[str]:
    """Votes go over the groups that a rank names, so ranks would wait in different ones."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 2:
        return []
    found = []
    for named in ([first, second], [second, first] if rank else [first, second], [first, first]):
        group = control_group(named, backend=backend, timeout=5.0)
        found.append(type(caught(lambda group=group: any_failed(False, group))).__name__)
    return found


@pytest.mark.parametrize("backend", ["inherit", "sweep"])
def test_ranks_that_name_groups_in_another_order_disagree(backend: str) -> None:
    *found, _ = on_ranks(names_groups_in_another_order, 3, backend)
    assert found == [["NoneType", "Disagreement", "NoneType"]] * 2

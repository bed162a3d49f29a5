"""Ranks that come late, die, or go another way: an error that names them, and no step on one's own.

Ranks are ordered by words in the job's store, never by time.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import Shard

import consensus
from adapters import Muon
from consensus import GroupFailure, LateRanks, any_failed, control_group, fail_together
from consensus.testing import assert_unchanged, run_ranks, snapshot
from tests.gloo._cases import (
    DATA_PLANE_S,
    LIVENESS_S,
    Trained,
    caught,
    cause_of,
    on_ranks,
    tell,
    wait_for,
)
from tests.threaded.muon_cases import random_matrices, shard

pytestmark = pytest.mark.slow

PATIENCE_S = 1.5


@dataclass(frozen=True)
class Late:
    error: BaseException | None
    changed: str
    again: BaseException | None


def one_comes_late(rank: int, backend: str, late: int) -> Late:
    """The others give up before one rank comes to the step; it must not step either."""
    group = control_group(None, timeout=PATIENCE_S, backend=backend)
    trained = Trained.on(shape=(torch.distributed.get_world_size(),), control_group=group)
    trained.healthy_step()
    trained.give_gradients()
    before = snapshot(trained.optimizer)
    others = [other for other in range(torch.distributed.get_world_size()) if other != late]
    if rank == late:
        for other in others:
            wait_for(f"{other} gave up")
    error = caught(trained.optimizer.step)
    tell(f"{rank} gave up")
    changed = caught(lambda: assert_unchanged(trained.optimizer, before))
    return Late(error, str(changed or ""), caught(trained.optimizer.step))


@pytest.mark.parametrize("backend", ["auto", "store", "inherit"])
@pytest.mark.parametrize(("world_size", "late"), [(2, 1), (3, 0)])
def test_a_late_rank_is_named_and_does_not_step_when_it_comes(
    backend: str, world_size: int, late: int
) -> None:
    by_rank = on_ranks(one_comes_late, world_size, backend, late)
    for rank, met in enumerate(by_rank):
        assert isinstance(met.error, LateRanks), met.error
        assert met.error.ranks == (() if rank == late else (late,))
        assert met.error.phase == "Muon.step"
        if rank == late:
            assert "may have come when the others had given up" in str(met.error)
        else:
            assert f"rank {late} did not come within" in str(met.error)
        assert met.changed == ""
        assert type(met.again) is consensus.ConsensusError  # at once: the group is closed
        assert "closed" in str(met.again)


def one_gives_up_early(rank: int, backend: str) -> BaseException | None:
    """Rank 0 gives up while rank 1 has patience left; only then does rank 2 come."""
    group = control_group(None, backend=backend).prepare()
    channel = group.channel
    assert channel is not None
    if rank == 2:
        wait_for(f"consensus/{channel.name}/at/1")
        wait_for("0 gave up")
    error = caught(lambda: any_failed(False, group, timeout=4.0 if rank == 0 else LIVENESS_S))
    tell(f"{rank} gave up")
    return error


@pytest.mark.parametrize("backend", ["auto", "gloo", "store"])
def test_nobody_proceeds_when_one_rank_has_given_up(backend: str) -> None:
    for error in on_ranks(one_gives_up_early, 3, backend):
        assert isinstance(error, LateRanks), error
        assert not error.gone  # rank 2 lives; what broke is what rank 0 closed


def data_plane_after_a_late_vote(rank: int) -> float:
    """A vote that did not come about leaves the groups that move data as they were."""
    group = control_group(None, timeout=PATIENCE_S).prepare()
    if rank == 1:
        wait_for("gave up")
    assert isinstance(caught(lambda: any_failed(False, group)), LateRanks)
    tell("gave up")
    value = torch.tensor([float(rank)])
    torch.distributed.all_reduce(value)
    return value.item()


def test_a_vote_that_did_not_come_about_leaves_the_data_plane_usable() -> None:
    assert on_ranks(data_plane_after_a_late_vote, 2) == (1.0, 1.0)


def late_for_planning(rank: int, chain: bool) -> tuple[BaseException | None, tuple[int, ...]]:
    """Rank 2 comes to plan when the others have given up; all of them then try once more."""
    scopes = ((0, 1), (1, 2)) if chain else ((0, 1, 2),)
    meshes = [DeviceMesh("cpu", list(ranks)) for ranks in scopes]
    own = [mesh for mesh, ranks in zip(meshes, scopes, strict=True) if rank in ranks]
    params = [nn.Parameter(shard(torch.ones(6, 4), mesh, [Shard(0)])) for mesh in own]
    optimizer = Muon((f"of {param.device_mesh.mesh.tolist()}", param) for param in params)  # type: ignore[attr-defined]
    group = control_group(optimizer)
    if rank == 2:
        wait_for("0 gave up")
        wait_for("1 gave up")
    error = caught(lambda: group.prepare(timeout=PATIENCE_S if rank < 2 else LIVENESS_S))
    tell(f"{rank} gave up")
    for other in range(3):
        wait_for(f"{other} gave up")
    return error, group.prepare(timeout=LIVENESS_S).ranks


@pytest.mark.parametrize("chain", [False, True], ids=["one mesh", "overlapping meshes"])
def test_ranks_that_gave_up_planning_can_try_again_together(chain: bool) -> None:
    by_rank = on_ranks(late_for_planning, 3, chain)
    for error, ranks in by_rank:
        assert isinstance(error, LateRanks)
        assert error.phase == "planning"
        assert ranks == (0, 1, 2)
    assert by_rank[1][0].ranks == (2,)
    assert "planning was given up" in str(by_rank[2][0])  # at once: its own patience is long


def fails_while_a_peer_is_busy(rank: int) -> tuple[BaseException | None, str | None]:
    """Rank 1 fails at once; rank 0 is busy for longer than rank 1 waits."""
    any_failed(False)
    if rank == 0:
        wait_for("1 gave up")

    def run() -> None:
        with fail_together("load", timeout=PATIENCE_S):
            if rank == 1:
                raise OSError("no such file")

    error = caught(run)
    tell(f"{rank} gave up")
    return error, cause_of(error)


def test_a_rank_that_failed_raises_its_own_error_and_its_late_peer_learns_of_it() -> None:
    (busy, no_cause), (failed, cause) = on_ranks(fails_while_a_peer_is_busy, 2)
    assert isinstance(failed, GroupFailure)
    assert cause == "OSError: no such file"
    assert failed.late_ranks == (0,)
    assert isinstance(busy, GroupFailure)  # not an error of the transport
    assert "rank 1: OSError: no such file" in str(busy)
    assert no_cause is None
    assert not busy.recoverable
    assert not failed.recoverable


def killed_while_others_wait(rank: int, backend: str) -> BaseException | None:
    """Rank 2 is killed once the others have posted that they wait."""
    group = control_group(None, timeout=PATIENCE_S if backend == "store" else None, backend=backend)
    any_failed(False, group)
    channel = group.channel
    assert channel is not None
    if rank == 2:
        for other in (0, 1, 3):
            wait_for(f"consensus/{channel.name}/at/{other}")
        os.kill(os.getpid(), signal.SIGKILL)
    return caught(lambda: any_failed(False, group))


@pytest.mark.parametrize("backend", ["auto", "store", "inherit"])
def test_survivors_of_a_killed_rank_are_told_who_it_was(backend: str) -> None:
    ranks = run_ranks(
        killed_while_others_wait, 4, backend, timeout=LIVENESS_S, group_timeout=DATA_PLANE_S
    )
    assert ranks.hung == ()
    assert ranks[2].exitcode == -signal.SIGKILL
    for rank in (0, 1, 3):
        error = ranks[rank].value
        assert isinstance(error, LateRanks), ranks.report()
        assert error.ranks == (2,)
        says = "did not come within" if backend == "store" else "is gone, its connection broke"
        assert f"rank 2 {says}" in str(error)


def killed_before_others_come(rank: int) -> tuple[BaseException | None, str]:
    trained = Trained.on(shape=(3,))
    trained.healthy_step()
    trained.give_gradients()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    before = snapshot(trained.optimizer)
    error = caught(trained.optimizer.step)
    return error, str(caught(lambda: assert_unchanged(trained.optimizer, before)) or "")


def test_a_step_without_a_killed_rank_does_not_take_place() -> None:
    ranks = run_ranks(killed_before_others_come, 3, timeout=LIVENESS_S, group_timeout=DATA_PLANE_S)
    for rank in (0, 2):
        value = ranks[rank].value
        assert value is not None, ranks.report()
        error, changed = value
        assert isinstance(error, LateRanks)
        assert error.ranks == (1,)
        assert changed == ""


def interrupted_while_it_waits(rank: int, backend: str) -> BaseException | None:
    """Ctrl-C on rank 0 while it waits for rank 2, which comes when rank 0's process is gone."""
    group = control_group(None, backend=backend)
    any_failed(False, group)
    channel, store = group.channel, _get_default_store()
    assert channel is not None
    if rank == 0:
        # A job in the background, such as CI's may be, starts its processes with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        store.set("pid", str(os.getpid()))
    if rank == 2:
        wait_for(f"consensus/{channel.name}/at/0")
        handle = os.pidfd_open(int(store.get("pid")))
        signal.pidfd_send_signal(handle, signal.SIGINT)
        assert select.select([handle], [], [], LIVENESS_S)[0]
    return caught(lambda: any_failed(False, group))


@pytest.mark.parametrize("backend", ["auto", "store"])
def test_a_rank_that_is_interrupted_while_it_waits_frees_its_peers(backend: str) -> None:
    first, *others = on_ranks(interrupted_while_it_waits, 3, backend)
    assert isinstance(first, KeyboardInterrupt)
    for error in others:
        assert isinstance(error, LateRanks)


def crossed(rank: int, named: bool, shapes: Sequence[tuple[int, int]]) -> list[Any]:
    """Two optimizers, one step in the same order on both ranks, one in crossed order."""
    mesh = init_device_mesh("cpu", (2,))
    params = [nn.Parameter(shard(w, mesh, [Shard(0)])) for w in random_matrices(shapes, 1)]
    optimizers = [
        Muon([(f"layer.{index}", param)] if named else [param])
        for index, param in enumerate(params)
    ]

    def step(order: Sequence[Muon]) -> list[str]:
        for param, gradient in zip(params, random_matrices(shapes, 2), strict=True):
            param.grad = shard(gradient, mesh, [Shard(0)])
        return [str(caught(optimizer.step)) for optimizer in order]

    healthy = step(optimizers)
    before = [snapshot(optimizer) for optimizer in optimizers]
    texts = step(optimizers if rank == 0 else optimizers[::-1])
    for optimizer, then in zip(optimizers, before, strict=True):
        assert_unchanged(optimizer, then)
    return [healthy, texts, step(optimizers)]


@pytest.mark.parametrize(
    ("named", "shapes", "says"),
    [
        pytest.param(True, ((6, 4), (5, 3)), "layer.0", id="other shapes"),
        pytest.param(True, ((6, 4), (6, 4)), "layer.0", id="one shape, named"),
        pytest.param(False, ((6, 4), (6, 4)), "optimizer", id="one shape, unnamed"),
    ],
)
def test_optimizers_stepped_in_crossed_order_are_an_error_not_a_mix(
    named: bool, shapes: Sequence[tuple[int, int]], says: str
) -> None:
    first, second = on_ranks(crossed, 2, named, shapes)
    assert first == second
    healthy, texts, after = first
    assert healthy == ["None", "None"]
    assert after == ["None", "None"]
    for text in texts:
        assert text.startswith("Muon.step: ranks disagree about")
        assert says in text

"""A step in a CUDA graph on several ranks: no message in the capture, one before each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import consensus
from tests.gloo._cases import Recorder, caught, on_ranks
from tests.threaded.muon_cases import shard
from tests.unit.capture_cases import FakeGraph, NothingIsRead, Voting, capture, refused

pytestmark = pytest.mark.slow

Change = Callable[[Voting], None]


def sharded(mesh: DeviceMesh, value: float = 1.0) -> nn.Parameter:
    axes = [Shard(0)] * mesh.ndim
    param = nn.Parameter(shard(torch.full((4, 4), value), mesh, axes))
    param.grad = shard(torch.ones(4, 4), mesh, axes)
    return param


def optimizer_on(mesh: DeviceMesh | None = None) -> Voting:
    mesh = mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return Voting([("up", sharded(mesh)), ("down", sharded(mesh))], lr=0.1, momentum=0.9)


# ---- the captured step ----


def words_of_a_capture(rank: int) -> tuple[list[int], list[int], float]:
    optimizer = optimizer_on()
    recorder = Recorder.on(optimizer)
    optimizer.stop = 2.0 + rank  # what ranks agreed on stands in the capture too
    optimizer.step()
    warm_up = list(recorder.words)
    with capture():
        optimizer.step()
    words = recorder.words[len(warm_up) :]
    optimizer.step()
    return words, recorder.words[len(warm_up) :], optimizer.vote.ranges.maximum[0]


def test_a_captured_step_sends_no_word_and_the_next_one_votes_again() -> None:
    for words, after, highest in on_ranks(words_of_a_capture, 2):
        assert words == []
        assert len(after) == 2  # they bring a range that differs
        assert highest == 3.0


def capture_at_once(rank: int) -> tuple[str, bool]:
    optimizer = optimizer_on()
    with capture():
        said = refused(RuntimeError, optimizer.step)
    return said, consensus.control_group(optimizer).channel is None


def test_without_a_warm_up_each_rank_is_refused_and_nothing_is_planned() -> None:
    for said, unplanned in on_ranks(capture_at_once, 2):
        assert "expected an agreed step of this optimizer before its capture" in said
        assert unplanned


def set_lr(optimizer: Voting) -> None:
    optimizer.param_groups[0]["lr"] = 0.3


def set_option(optimizer: Voting) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.5


def rebind(optimizer: Voting) -> None:
    params = optimizer.param_groups[0]["params"]
    params[1] = sharded(params[1].device_mesh)


def drop_gradient(optimizer: Voting) -> None:
    optimizer.param_groups[0]["params"][1].grad = None


def widen(optimizer: Voting) -> None:
    optimizer.width = 9


def stop(optimizer: Voting) -> None:
    optimizer.stop = 5.0


def set_amp(optimizer: Voting) -> None:
    optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]


BEFORE_THE_CAPTURE: dict[str, tuple[Change, str]] = {
    "lr": (set_lr, "options: lr of group 0 was 0.1, is 0.3"),
    "parameter": (rebind, "parameters changed (down is another tensor"),
    "gradient": (drop_gradient, "gradients: down was present, is missing"),
    "fact": (widen, "width: was 8, is 9"),
    "range": (stop, "controls: were [('stop', 0.0)], are [('stop', 5.0)]"),
    "amp": (set_amp, "AMP: overflow (found_inf) was absent, is present"),
}


def changed_before_capture(rank: int) -> dict[str, str]:
    """What each change on rank 1 meets there; the other rank captures, and both go on."""
    said = {}
    for name, (change, _) in BEFORE_THE_CAPTURE.items():
        optimizer = optimizer_on()
        optimizer.step()
        if rank == 1:
            change(optimizer)
        with capture():
            said[name] = str(caught(optimizer.step))
    return said


def test_what_was_not_agreed_on_cannot_be_captured() -> None:
    first, second = on_ranks(changed_before_capture, 2)
    assert set(first.values()) == {"None"}
    for name, (_, says) in BEFORE_THE_CAPTURE.items():
        assert says in second[name]


def counts_apart(rank: int) -> str:
    optimizer = optimizer_on()
    optimizer.steps = rank
    return refused(consensus.Disagreement, optimizer.step)


def test_progress_is_compared_among_ranks() -> None:
    first, second = on_ranks(counts_apart, 2)
    assert first == second
    assert "steps: 0 on rank 0; 1 on rank 1" in first


def agreements_in_a_capture(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    calls: list[Callable[[], object]] = [
        lambda: consensus.any_failed(False, mesh),
        lambda: consensus.agree_same(1, mesh),
        lambda: consensus.agree_range([1], mesh),
        lambda: consensus.agree_sum([1], mesh),
        consensus.fail_together("a block", mesh).__enter__,
    ]
    with capture():
        return [refused(RuntimeError, call) for call in calls]


def test_an_agreement_inside_of_a_capture_is_refused_since_no_replay_would_hold_it() -> None:
    for said in on_ranks(agreements_in_a_capture, 2):
        assert all("an agreement cannot be part of a CUDA graph" in text for text in said)


# ---- an overflow, on the device ----


def overflow_of(optimizer: Voting, value: float) -> tuple[bool, float, float]:
    optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
    optimizer.step()
    found_inf = optimizer.found_inf = torch.full((1,), value)  # type: ignore[attr-defined]
    with capture(), NothingIsRead():
        optimizer.step()
    assert optimizer.vote.found_inf is not None
    return optimizer.vote.skip, float(optimizer.vote.found_inf), float(found_inf)


def overflow_on_one_rank(rank: int, shape: tuple[int, ...]) -> tuple[bool, float, float]:
    return overflow_of(optimizer_on(init_device_mesh("cpu", shape)), float(rank == 1))


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_an_overflow_is_agreed_on_the_device_and_read_by_nobody(shape: tuple[int, ...]) -> None:
    by_rank = on_ranks(overflow_on_one_rank, torch.Size(shape).numel(), shape)
    assert {(skip, agreed) for skip, agreed, _ in by_rank} == {(False, 1.0)}
    assert [own for *_, own in by_rank][:2] == [0.0, 1.0]  # what GradScaler holds is not written


def overflow_over_two_meshes(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    optimizer = Voting([("a", sharded(mesh["dp"])), ("b", sharded(mesh["tp"]))], lr=0.1)
    return refused(NotImplementedError, lambda: overflow_of(optimizer, 0.0))


def test_an_overflow_over_several_meshes_is_refused() -> None:
    for said in on_ranks(overflow_over_two_meshes, 4):
        assert "ranks [0, 1, 2, 3], which several meshes tie together" in said


def scaled(rank: int) -> tuple[float, float, list[int]]:
    """Return what GradScaler found in a capture, a gradient after it, and the words it took."""
    mesh = init_device_mesh("cpu", (2,))
    param = sharded(mesh)
    optimizer = torch.optim.SGD([("a", param)], lr=0.5)
    scaler = consensus.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    recorder = Recorder.on(optimizer)
    assert param.grad is not None
    param.grad.mul_(8.0)
    if rank == 1:
        param.grad.to_local()[0, 0] = float("inf")  # type: ignore[attr-defined]
    with capture(), NothingIsRead():
        scaler.unscale_(optimizer)
    (found,) = scaler._found_inf_per_device(optimizer).values()
    return float(found), float(param.grad.to_local()[1, 1]), recorder.words  # type: ignore[attr-defined]


def test_a_captured_scaler_agrees_on_the_device_and_unscales() -> None:
    assert on_ranks(scaled, 2) == ((1.0, 1.0, []),) * 2


# ---- replays ----


def captured(optimizer: Voting) -> tuple[FakeGraph, consensus.CapturedStep]:
    optimizer.step()
    with capture():
        optimizer.step()
    graph = FakeGraph()
    return graph, consensus.CapturedStep(graph, optimizer)


def healthy_replays(rank: int) -> tuple[int, list[int]]:
    optimizer = optimizer_on()
    graph, step = captured(optimizer)
    recorder = Recorder.on(optimizer)
    for _ in range(3):
        step.replay()
    return graph.replays, recorder.words


def test_a_replay_takes_one_message_of_two_words() -> None:
    assert on_ranks(healthy_replays, 2) == ((3, [2, 2, 2]),) * 2


BEFORE_A_REPLAY: dict[str, tuple[Change, str]] = {
    "lr": (set_lr, "lr of group 0 was 0.1 when captured, is 0.3"),
    "option": (set_option, "weight_decay of group 0 was 0.0 when captured, is 0.5"),
    "parameter": (rebind, "down is another tensor than was captured"),
    "gradient": (drop_gradient, "gradient of down is no longer there"),
}


def changed_before_replay(rank: int) -> dict[str, tuple[str, int, str]]:
    """Each change on rank 1: what both meet, how often was replayed, and what another step does."""
    said = {}
    for name, (change, _) in BEFORE_A_REPLAY.items():
        optimizer = optimizer_on()
        graph, step = captured(optimizer)
        step.replay()
        if rank == 1:
            change(optimizer)
        text = refused(consensus.GroupFailure, step.replay)
        said[name] = text, graph.replays, refused(consensus.GroupFailure, step.replay)
    return said


def test_a_change_on_one_rank_stops_the_replay_on_all() -> None:
    first, second = on_ranks(changed_before_replay, 2)
    assert first == second
    for name, (_, says) in BEFORE_A_REPLAY.items():
        text, replays, again = first[name]
        assert text.startswith("CapturedStep.replay failed on rank 1")
        assert says in text
        assert replays == 1
        assert again == text


def changed_on_all(rank: int) -> tuple[str, int, int]:
    optimizer = optimizer_on()
    graph, step = captured(optimizer)
    set_lr(optimizer)
    said = refused(consensus.GroupFailure, step.replay)
    before = graph.replays
    optimizer.param_groups[0]["lr"] = 0.1
    step.replay()
    return said, before, graph.replays


def test_a_change_on_all_ranks_is_refused_too_and_can_be_undone() -> None:
    first, second = on_ranks(changed_on_all, 2)
    assert first == second
    assert "failed on ranks 0, 1" in first[0]
    assert first[1:] == (0, 1)


def another_number_of_replays(rank: int) -> tuple[str, int]:
    graph, step = captured(optimizer_on())
    step._num_replays = rank
    return refused(consensus.Disagreement, step.replay), graph.replays


def test_ranks_that_have_not_replayed_equally_often_are_told() -> None:
    first, second = on_ranks(another_number_of_replays, 2)
    assert first == second
    assert "replays made: 0 on rank 0; 1 on rank 1" in first[0]
    assert first[1] == 0


def fails_before_replay(rank: int) -> tuple[str, int, int]:
    optimizer = optimizer_on()
    graph, step = captured(optimizer)

    def train() -> None:
        with consensus.fail_together("train step", optimizer):
            if rank == 1:
                raise OSError("no more data")
            step.replay()

    said = refused(consensus.GroupFailure, train)
    before = graph.replays
    step.replay()
    return said, before, graph.replays


def test_a_rank_that_fails_before_a_replay_stops_it_on_all() -> None:
    first, second = on_ranks(fails_before_replay, 2)
    assert "rank 1: OSError: no more data" in first[0]
    assert "rank 1: OSError: no more data" in second[0]
    assert first[1:] == second[1:] == (0, 1)


def optimizers_of_two_meshes(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    optimizers: list[Any] = [optimizer_on(mesh["dp"]), optimizer_on(mesh["tp"])]
    for optimizer in optimizers:
        optimizer.step()
    return refused(
        consensus.EnclosureError, lambda: consensus.CapturedStep(FakeGraph(), optimizers)
    )


def test_optimizers_that_agree_in_different_groups_are_refused_in_one_graph() -> None:
    for said in on_ranks(optimizers_of_two_meshes, 4):
        assert "the optimizers of one graph agree in different groups" in said


def two_on_one_mesh(rank: int) -> tuple[str, list[int]]:
    mesh = init_device_mesh("cpu", (2,))
    optimizers = [optimizer_on(mesh), optimizer_on(mesh)]
    for optimizer in optimizers:
        optimizer.step()
    with capture():
        for optimizer in optimizers:
            optimizer.step()
    step = consensus.CapturedStep(FakeGraph(), optimizers)
    recorder = Recorder.on(optimizers[0])
    step.replay()
    words = list(recorder.words)
    if rank == 0:
        set_lr(optimizers[1])
    return refused(consensus.GroupFailure, step.replay), words


def test_two_optimizers_of_one_mesh_take_one_message() -> None:
    for said, words in on_ranks(two_on_one_mesh, 2):
        assert words == [2]
        assert "rank 0: RuntimeError" in said
        assert "Voting, number 1: lr of group 0" in said

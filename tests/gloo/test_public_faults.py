"""Faults that people met when they trained sharded models, each reduced to a few ranks.

What is not here is with its own kind: closures in test_hang_regressions and test_train_step,
missing gradients and options in test_preflight, order and names in test_planned_parameters,
NaN and mixed types in test_agree, overlapping meshes in test_overlapping, scalers in test_amp.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import ReduceLROnPlateau

import consensus
from adapters import Muon
from consensus import agree_range, any_failed, control_group
from consensus.testing import assert_unchanged, run_ranks, snapshot, without_agreement
from tests.gloo._cases import (
    DATA_PLANE_S,
    LIVENESS_S,
    Met,
    Recorder,
    Trained,
    caught,
    on_ranks,
    refused,
)
from tests.threaded.muon_cases import local

pytestmark = pytest.mark.slow

# More ranks than rows, single rows: the last shards are empty.
DEGENERATE = ((4, 4), (1, 4), (2, 4), (4, 1), (1, 1))


# ---- a loss that cannot be used ----


def loss_is_nan(rank: int, bad: int) -> Met:
    """A rank sees NaN and raises before backward; the others go on to the step."""
    trained = Trained.on(shape=(3,))
    trained.give_gradients()

    def closure() -> float:
        loss = math.nan if rank == bad else 1.0
        if not math.isfinite(loss):
            raise FloatingPointError("the loss is NaN")
        return loss

    return refused(trained, lambda: trained.optimizer.step(closure))


@pytest.mark.parametrize("bad", [0, 2])
def test_a_rank_whose_loss_is_nan_stops_all_by_name(bad: int) -> None:
    by_rank = on_ranks(loss_is_nan, 3, bad)
    for met in by_rank:
        assert f"rank {bad}: FloatingPointError: the loss is NaN" in met.text
        assert (met.changed, met.then) == ("", ())


def skip_when_any_loss_is_nan(rank: int) -> list[tuple[bool, list[int]]]:
    """The skip is decided from all losses, not from rank 0's."""
    recorder = Recorder.on(None)
    decided = []
    for bad in range(3):
        recorder.words.clear()
        found = agree_range([math.nan if rank == bad else 0.5 + rank])
        decided.append((math.isnan(found.maximum[0]), list(recorder.words)))
    return decided


def test_a_nan_on_any_rank_is_seen_by_all_when_they_decide_to_skip() -> None:
    by_rank = on_ranks(skip_when_any_loss_is_nan, 3)
    assert all(decided == by_rank[0] for decided in by_rank)
    assert [nan for nan, _ in by_rank[0]] == [True, True, True]


def closure_without_backward(rank: int) -> Met:
    """To skip a bad batch, a rank returns None without a backward."""
    trained = Trained.on()
    trained.healthy_step()
    trained.give_gradients()
    if rank == 1:
        for param in trained.twins.sharded:
            param.grad = None
    closure = partial(return_loss, None if rank == 1 else 1.0)
    return refused(trained, lambda: trained.optimizer.step(closure))  # type: ignore[arg-type]


def return_loss(loss: float | None) -> float | None:
    return loss


def test_a_rank_that_skips_its_batch_on_its_own_is_never_half_a_step() -> None:
    first, second = on_ranks(closure_without_backward, 2)
    assert first.text == second.text
    assert "gradients: layer.0: present on rank 0; missing on rank 1" in first.text
    assert (first.changed, second.changed) == ("", "")
    assert (first.then, second.then) == ((), ())


# ---- ranks without work ----


def ranks_without_rows(rank: int) -> tuple[list[str], list[int], Met]:
    """The last ranks own nothing of some matrices and must vote and gather all the same."""
    trained = Trained.on(shape=(4,), shapes=DEGENERATE, lr=0.02)
    recorder = Recorder.on(trained.optimizer)
    for _ in range(3):
        trained.healthy_step()
    words, differences = list(recorder.words), trained.differences()
    trained.give_gradients()

    def closure() -> float:
        if rank == 3:  # it owns no row of most matrices
            raise ValueError("no data left")
        return 1.0

    return differences, words, refused(trained, lambda: trained.optimizer.step(closure))


def test_ranks_without_rows_take_part_and_are_heard() -> None:
    for differences, words, met in on_ranks(ranks_without_rows, 4):
        assert differences == []
        assert words == [2, 2, 2]
        assert "rank 3: ValueError: no data left" in met.text
        assert (met.changed, met.then) == ("", ())


def state_of_every_parameter(rank: int) -> list[tuple[str, tuple[int, ...]]]:
    """After a step every rank can read the state of every parameter, and save it."""
    trained = Trained.on(shape=(3,), shapes=DEGENERATE)
    trained.healthy_step()
    optimizer = trained.optimizer
    saved = optimizer.state_dict()["state"]
    assert len(saved) == len(DEGENERATE)
    return [
        (key, tuple(value.shape))
        for param in trained.twins.sharded
        for key, value in optimizer.state[param].items()
    ]


def test_state_is_there_on_every_rank_whoever_owns_rows() -> None:
    expected = [("momentum_buffer", shape) for shape in DEGENERATE]
    assert on_ranks(state_of_every_parameter, 3) == (expected,) * 3


def uninitialized_memory(rank: int) -> list[str]:
    """torch fills what it does not initialise with NaN: padding must not get into a result."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    trained = Trained.on(shape=(3,), shapes=(*DEGENERATE, (7, 5)), lr=0.02)
    for _ in range(2):
        trained.healthy_step()
    return trained.differences()


def test_padding_and_receive_buffers_do_not_reach_a_result() -> None:
    assert on_ranks(uninitialized_memory, 3) == ([],) * 3


# ---- code that looks harmless and communicates, or does not ----


def looked_at_on_one_rank(rank: int) -> list[str]:
    trained = Trained.on()
    trained.healthy_step()
    if rank == 0:
        optimizer, group = trained.optimizer, control_group(trained.optimizer)
        text = f"{optimizer} {group} {group.ranks} {group.device} {optimizer.state}"
        assert "Muon" in text
        assert optimizer.state_dict()["param_groups"]
        assert not any(hasattr(group, name) for name in ("failed", "shape"))
    trained.healthy_step()
    return trained.differences()


def test_looking_at_state_on_one_rank_is_no_collective() -> None:
    assert on_ranks(looked_at_on_one_rank, 2) == ([], [])


def debug_norm_on_one_rank(rank: int) -> str:
    """Rank 0 gathers a whole tensor to log its norm; rank 1 goes on to the next step."""
    group = control_group(None, timeout=1.5)
    trained = Trained.on(control_group=group)
    trained.healthy_step()
    trained.give_gradients()
    if rank == 0:
        momentum = trained.optimizer.state[trained.twins.sharded[0]]["momentum_buffer"]
        return f"{caught(momentum.full_tensor)}"
    before = snapshot(trained.optimizer)
    error = caught(trained.optimizer.step)
    assert_unchanged(trained.optimizer, before)
    return f"{type(error).__name__}: {error}"


def test_a_collective_of_one_rank_alone_is_not_mistaken_for_a_vote() -> None:
    alone, stepping = on_ranks(debug_norm_on_one_rank, 2)
    assert "rank 0 did not come within" in stepping
    assert stepping.startswith("LateRanks: Muon.step")
    assert "Connection" in alone  # released by the end of its peer


def bookkeeping_on_one_rank(rank: int) -> list[bool]:
    """A rank that does not know a key brings a neutral vote instead of returning early."""
    known = {"a": True} if rank == 0 else {}
    return [any_failed(known.get(name, False)) for name in ("a", "b")]


def test_a_rank_with_nothing_to_say_says_so() -> None:
    assert on_ranks(bookkeeping_on_one_rank, 2) == ([True, False],) * 2


# ---- saving ----


def query_before_training(rank: int, query: bool) -> list[torch.Tensor]:
    model = nn.ParameterDict()
    trained = Trained.on(lr=0.02)
    for index, param in enumerate(trained.twins.sharded):
        model[f"p{index}"] = param
    if query:  # makes empty state, by a hidden step
        get_optimizer_state_dict(model, trained.optimizer)
    trained.healthy_step()
    trained.healthy_step()
    assert trained.differences() == []
    return [local(param) for param in trained.twins.sharded]


def test_asking_for_the_state_dict_first_changes_nothing() -> None:
    asked = on_ranks(query_before_training, 2, True)
    plain = on_ranks(query_before_training, 2, False)
    for with_query, without in zip(asked, plain, strict=True):
        assert all(map(torch.equal, with_query, without))


def query_on_one_rank(rank: int) -> tuple[str, str]:
    """Rank 1 alone asks, and so makes a hidden step; rank 0 makes its first real one."""
    trained = Trained.on(lr=0.02)
    model = nn.ParameterDict({"p": trained.twins.sharded[0]})
    if rank == 1:
        error = caught(lambda: get_optimizer_state_dict(model, trained.optimizer))
        return type(error).__name__, str(error)
    trained.give_gradients()
    before = snapshot(trained.optimizer)
    error = caught(trained.optimizer.step)
    assert_unchanged(trained.optimizer, before)
    return type(error).__name__, str(error)


def test_a_hidden_step_on_one_rank_does_not_pass_for_the_step_of_another() -> None:
    first, second = on_ranks(query_on_one_rank, 2)
    assert first == second
    kind, text = first
    assert kind == "Disagreement"
    assert "options: lr of group 0: 0.02 on rank 0; 0.0 on rank 1" in text


# ---- replicas and schedules ----


def plateau_on_one_rank(rank: int) -> list[str]:
    """A scheduler is fed each rank's own loss and lowers the learning rate on rank 0 alone."""
    trained = Trained.on(lr=0.02)
    scheduler = ReduceLROnPlateau(trained.optimizer, patience=0, factor=0.5)
    texts = []
    for loss in (1.0, 0.9, 2.0 if rank == 0 else 0.8):
        trained.give_gradients()
        trained.optimizer.step()
        scheduler.step(loss)
    trained.give_gradients()
    before = snapshot(trained.optimizer)
    error = caught(trained.optimizer.step)
    assert_unchanged(trained.optimizer, before)
    assert isinstance(error, consensus.Disagreement)
    texts.append(f"{error.name} {error.minimum} {error.maximum}")
    return texts


def test_a_schedule_that_goes_apart_is_found_at_the_next_step() -> None:
    expected = ["options: lr of group 0 0.01 0.02"]
    assert on_ranks(plateau_on_one_rank, 2) == (expected, expected)


def unequal_replicas(rank: int) -> tuple[str, float]:
    """A label says that copies are equal, and they are not; labels are trusted, as documented."""
    mesh = init_device_mesh("cpu", (2,))
    copy = torch.eye(3) * (rank + 1)
    param = nn.Parameter(DTensor.from_local(copy, mesh, [Replicate()], run_check=False))
    param.grad = DTensor.from_local(torch.ones(3, 3), mesh, [Replicate()], run_check=False)
    text = str(caught(Muon([("w", param)], lr=0.0, weight_decay=0.0).step))
    return text, local(param)[0, 0].item()


def test_placement_labels_are_trusted() -> None:
    assert on_ranks(unequal_replicas, 2) == (("None", 1.0), ("None", 2.0))


def barrier_without_guard(rank: int) -> str:
    """What a guard is for: rank 1 raises between two phases, and the rest go to the barrier."""

    def run() -> None:
        with consensus.fail_together("write shards"):
            if rank == 1:
                raise OSError("disk full")
        dist.barrier()

    with without_agreement():
        return f"{caught(run)}"


def test_without_a_guard_the_peers_see_an_error_of_the_transport() -> None:
    ranks = run_ranks(
        barrier_without_guard, 3, timeout=LIVENESS_S, group_timeout=DATA_PLANE_S
    ).values()
    assert ranks[1] == "disk full"
    for text in (ranks[0], ranks[2]):
        assert "Connection" in text
        assert "disk full" not in text

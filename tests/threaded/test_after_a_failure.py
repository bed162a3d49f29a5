"""What ranks can do after one of them failed where no peer could hear of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from adapters import Muon
from adapters.options import ShardedMode
from consensus.testing import assert_unchanged, snapshot
from consensus.testing._threads import run_threads
from tests.threaded.muon_cases import Case, Twins, named, torchs_muon

CASE = Case("rows", (2,), (Shard(0),), ((6, 4), (5, 3)))


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def goes_on_from_a_checkpoint(rank: int) -> tuple[list[str], list[str]]:
    """Rank 1 fails after the last exchange; then all go back to where they were, and go on."""
    twins = Twins.of(CASE)
    ours, reference = Muon(named(twins.sharded)), torchs_muon(twins.whole)
    twins.set_gradients(seed=1)
    ours.step()
    reference.step()
    saved = ours.state_dict()
    weights = [param.detach().clone() for param in twins.sharded]
    buffers = {k: v["momentum_buffer"].clone() for k, v in saved["state"].items()}
    twins.set_gradients(seed=2)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(ours, "_settle", fail)
        seen = [outcome(ours.step)]
    seen.append(outcome(ours.step))
    for key, buffer in buffers.items():
        saved["state"][key]["momentum_buffer"] = buffer
    with torch.no_grad():
        for param, weight in zip(twins.sharded, weights, strict=True):
            param.copy_(weight)
    seen.append(outcome(lambda: ours.load_state_dict(saved)))
    seen.append(outcome(ours.step))
    reference.step()
    return seen, twins.differences(ours, reference)


def fail(phase: object) -> None:
    raise MemoryError("no memory left")


def test_ranks_that_went_apart_go_on_from_a_checkpoint() -> None:
    (first, same), (second, also_same) = run_threads(goes_on_from_a_checkpoint, 2).values()
    assert first[0] == "done"
    assert second[0] == "MemoryError: no memory left"
    for seen in (first, second):
        assert seen[1].startswith("Disagreement: Muon.step: ranks disagree about updates made")
        assert seen[2:] == ["done", "done"]
    assert (same, also_same) == ([], [])


def fails_with_a_matrix_of_its_own(rank: int, mode: ShardedMode) -> tuple[str, bool]:
    twins = Twins.of(CASE)
    plain = nn.Parameter(torch.ones(4, 4))
    ours = Muon([*named(twins.sharded), ("plain", plain)], sharded_mode=mode)
    twins.set_gradients(seed=1)
    plain.grad = torch.ones(4, 4)
    before = snapshot(ours)
    if rank == 1:
        (rule,) = ours._rules
        rule._compute_alone = fail  # type: ignore[attr-defined]
    said = outcome(ours.step)
    assert_unchanged(ours, before)
    return said, bool((plain == 1).all())


@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_a_failure_with_a_matrix_of_its_own_is_heard_in_the_exchanges(mode: ShardedMode) -> None:
    for said, same in run_threads(fails_with_a_matrix_of_its_own, 2, mode).values():
        assert said.startswith("GroupFailure: Muon.step: update failed on rank 1")
        assert "MemoryError: no memory left" in said
        assert same

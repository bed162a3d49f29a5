"""Files of gefen-x 0.5, loaded by two ranks into sharded parameters."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from consensus import GroupFailure
from consensus.testing import assert_unchanged, snapshot
from tests.gloo._cases import caught, on_ranks
from tests.threaded.gefen_cases import local, records
from tests.threaded.muon_cases import shard, slice_of
from tests.unit.test_legacy_resume import (
    JOINED,
    WHOLE,
    contents,
    optimizer_for,
    parameters,
    resume,
    without_counters,
)

pytestmark = pytest.mark.slow

ROWS = [Shard(0)]
NAMES = (*WHOLE, *JOINED)


class Sharded:
    """The parameters of a file by rows on two ranks, and an optimizer as a user would build it."""

    def __init__(self, file: dict[str, Any], **options: Any) -> None:
        self.mesh = init_device_mesh("cpu", (2,))
        self.file = file
        whole = parameters(file)
        self.params = {
            name: nn.Parameter(shard(param.detach(), self.mesh, ROWS))
            for name, param in whole.items()
        }
        self.optimizer = optimizer_for(file, self.params, **options)

    def step(self) -> None:
        for name, param in self.params.items():
            param.grad = shard(self.file["grad4"][name], self.mesh, ROWS)
        self.optimizer.step()

    def far(self, expected: dict[str, torch.Tensor]) -> list[str]:
        """Which parameters are not where they should be, to 1e-6 of the length of their step."""
        found = []
        for name, param in self.params.items():
            mine, its = local(param), slice_of(expected[name], self.mesh, ROWS)
            step = its - slice_of(self.file["after3"][name], self.mesh, ROWS)
            if not (mine - its).norm() <= 1e-6 * step.norm().clamp(min=1e-6):
                found.append(name)
        return found


@dataclass(frozen=True)
class Resumed:
    far_from_gefen_x: list[str]
    far_from_one_device: list[str]
    records: list[Any]
    periods: list[int]


def resumed(rank: int, name: str) -> Resumed:
    file = contents(name)
    run = Sharded(file)
    run.optimizer.load_state_dict(copy.deepcopy(file["checkpoint"]))
    run.step()
    _, on_one_device = resume(file)
    return Resumed(
        run.far(file["after4"]),
        run.far(on_one_device),
        records(run.optimizer),
        [entry.get("automatic_period", 0) for entry in run.optimizer.state.values()],
    )


@pytest.mark.parametrize("name", NAMES)
def test_ranks_go_on_as_one_device_does(name: str) -> None:
    first, second = on_ranks(resumed, 2, name)
    assert first.far_from_one_device == second.far_from_one_device == []
    assert first.records == second.records
    assert first.periods == second.periods
    if name in WHOLE:
        assert first.far_from_gefen_x == second.far_from_gefen_x == []


def counters_gone(rank: int, name: str) -> tuple[list[str], set[int]]:
    stripped = without_counters(name)
    run = Sharded(stripped)
    run.optimizer.load_state_dict(stripped["checkpoint"])
    run.step()
    _, expected = resume(contents(name))
    counters = {
        entry[key]
        for entry in run.optimizer.state.values()
        for key in ("vmean_step", "factored_step")
        if key in entry
    }
    return run.far(expected), counters


@pytest.mark.parametrize("name", ["gefen_block", "gefen_factored", "gefen_rank_local"])
def test_a_moment_without_its_counter_gets_one_in_the_first_step(name: str) -> None:
    assert on_ranks(counters_gone, 2, name) == (([], {4}), ([], {4}))


def moments_gone_on_one_rank(rank: int, name: str) -> tuple[BaseException | None, str]:
    file = contents(name)
    run = Sharded(file)
    for key in ("vmean", "v_row", "v_col") if rank else ():
        file["checkpoint"]["state"][0].pop(key, None)
    before = snapshot(run.optimizer)
    error = caught(lambda: run.optimizer.load_state_dict(file["checkpoint"]))
    changed = caught(lambda: assert_unchanged(run.optimizer, before))
    return error, str(changed or "")


@pytest.mark.parametrize("name", ["gefen_block", "gefen_factored"])
def test_a_counter_without_its_moment_is_refused_by_all(name: str) -> None:
    for error, changed in on_ranks(moments_gone_on_one_rank, 2, name):
        assert isinstance(error, GroupFailure)
        assert [each.rank for each in error.failures] == [1]
        assert "the counter alone" in str(error)
        assert changed == ""


def alone(rank: int, name: str) -> tuple[str, str]:
    file = contents(name)
    run = Sharded(file, sharded_mode="approx")
    before = snapshot(run.optimizer)
    error = caught(lambda: run.optimizer.load_state_dict(file["checkpoint"]))
    changed = caught(lambda: assert_unchanged(run.optimizer, before))
    return f"{type(error).__name__}: {error}", str(changed or "")


@pytest.mark.parametrize("name", ["muon", "muon_approx", "muon_distributed"])
def test_ranks_that_learn_alone_refuse_it(name: str) -> None:
    """Their blocks are not those of the whole, also where the file was made in this mode."""
    for text, changed in on_ranks(alone, 2, name):
        assert text.startswith("ValueError: the state of lin.weight is that of the whole param")
        assert '"exact" can load it' in text
        assert changed == ""


def by_owners(rank: int, name: str) -> list[str]:
    file = contents(name)
    run = Sharded(file, sharded_mode="distributed")
    run.optimizer.load_state_dict(file["checkpoint"])
    run.step()
    return run.far(file["after4"])


@pytest.mark.parametrize("name", ["muon_normuon", "muon_distributed"])
def test_owners_go_on_as_gefen_x_did(name: str) -> None:
    assert on_ranks(by_owners, 2, name) == ([], [])

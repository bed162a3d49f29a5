"""State of sharded optimizers through torch.distributed.checkpoint, and its state dict helpers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from adapters import Gefen, GefenMuon, Hybrid, empty_state
from adapters._quantized import QuantizedOptimizer
from consensus import GroupFailure
from consensus.testing import assert_unchanged, snapshot
from tests.gloo._cases import caught, on_ranks
from tests.threaded.gefen_cases import local, records
from tests.threaded.muon_cases import fully_sharded

pytestmark = pytest.mark.slow

Make = Callable[..., QuantizedOptimizer]


def factored(model: nn.Module) -> QuantizedOptimizer:
    return Gefen(model.named_parameters(), lr=0.01, weight_decay=0.1)


def block(model: nn.Module) -> QuantizedOptimizer:
    return Gefen(model.named_parameters(), lr=0.01, factored_v_2d=False)


def muon(model: nn.Module) -> QuantizedOptimizer:
    return GefenMuon(model.named_parameters(), lr=0.01, normuon=True)


def by_owners(model: nn.Module) -> QuantizedOptimizer:
    pairs = model.named_parameters()
    return GefenMuon(pairs, lr=0.01, normuon=True, sharded_mode="distributed")


def hybrid(model: nn.Module) -> QuantizedOptimizer:
    first, second = model.named_parameters()
    return Hybrid([first], [second], lr=0.01, backup="adamw")


def alone(model: nn.Module) -> QuantizedOptimizer:
    return GefenMuon(model.named_parameters(), lr=0.01, sharded_mode="approx")


MESHES = {"FSDP": ((2,), 7, False), "HSDP": ((2, 2), 7, False), "FSDP over TP": ((2, 2), 8, True)}
LIKE_OVER_TP = {"FSDP on 4": ((4,), 8, False)}  # as many parts as FSDP over TP


class Training:
    """A model as FSDP2 shards it, and its optimizer."""

    def __init__(self, where: str, make: Make) -> None:
        mesh, rows, tensor_parallel = (MESHES | LIKE_OVER_TP)[where]
        self.model = fully_sharded(mesh, rows, tensor_parallel=tensor_parallel)
        self.optimizer = make(self.model)

    def step(self, *seeds: int) -> None:
        for seed in seeds:
            self.optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            self.model(x).square().sum().backward()
            self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [local(param).clone() for param in self.model.parameters()]

    def set_weights(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for param, value in zip(self.model.parameters(), values, strict=True):
                local(param).copy_(value)

    def numbers(self) -> list[Any]:
        found: list[Any] = [*self.weights(), *records(self.optimizer)]
        for param in self.model.parameters():
            entry = self.optimizer.state[param]
            for key in sorted(entry):
                value = entry[key]
                found.append(local(value).clone() if isinstance(value, Tensor) else (key, value))
        return found

    def query(self, options: StateDictOptions | None = None) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=options)

    def give(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state)


def same(left: list[Any], right: list[Any]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(left, right, strict=True)
    )


def through_files(rank: int, where: str, make: Make, folder: str) -> bool:
    run, other = Training(where, make), Training(where, make)
    run.step(1, 2)
    dcp.save({"optimizer": run.query()}, checkpoint_id=folder)
    weights = run.weights()
    run.step(3, 4)
    other.step(7)
    state = {"optimizer": other.query()}
    dcp.load(state, checkpoint_id=folder)
    other.give(state["optimizer"])
    other.set_weights(weights)
    other.step(3, 4)
    return same(run.numbers(), other.numbers())


@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize(
    "make", [factored, block, muon, by_owners, hybrid], ids=lambda make: make.__name__
)
def test_an_optimizer_goes_on_from_files(where: str, make: Make, tmp_path: Path) -> None:
    """Into one that has been stepped: it says which values there are to read."""
    world_size = 2 if where == "FSDP" else 4
    found = on_ranks(through_files, world_size, where, make, str(tmp_path))
    assert found == (True,) * world_size


def into_a_new_one(rank: int, where: str, make: Make, folder: str) -> bool:
    """As in a new process: no step, other weights, no idea of blocks or codebook."""
    run = Training(where, make)
    run.step(1, 2)
    dcp.save({"model": run.model.state_dict(), "optimizer": run.query()}, checkpoint_id=folder)
    run.step(3, 4)
    other = Training(where, make)
    other.set_weights([weight + 1 for weight in other.weights()])
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state = {"model": other.model.state_dict(), "optimizer": empty_state(other.optimizer, metadata)}
    dcp.load(state, checkpoint_id=folder)
    other.give(state["optimizer"])
    other.step(3, 4)
    return same(run.numbers(), other.numbers())


@pytest.mark.parametrize("where", MESHES)
@pytest.mark.parametrize(
    "make", [factored, block, muon, by_owners, hybrid], ids=lambda make: make.__name__
)
def test_a_new_optimizer_goes_on_from_files(where: str, make: Make, tmp_path: Path) -> None:
    world_size = 2 if where == "FSDP" else 4
    found = on_ranks(into_a_new_one, world_size, where, make, str(tmp_path))
    assert found == (True,) * world_size


def into_other_parts(
    rank: int, saved: str, where: str, make: Make, folder: str
) -> tuple[BaseException | None, str]:
    run = Training(saved, make)
    run.step(1, 2)
    dcp.save({"optimizer": run.query()}, checkpoint_id=folder)
    other = Training(where, make)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state = {"optimizer": empty_state(other.optimizer, metadata)}
    dcp.load(state, checkpoint_id=folder)
    before = snapshot(other.optimizer)
    error = caught(lambda: other.give(state["optimizer"]))
    return error, str(caught(lambda: assert_unchanged(other.optimizer, before)) or "")


@pytest.mark.parametrize(
    ("saved", "where"), [("FSDP on 4", "FSDP over TP"), ("FSDP over TP", "FSDP on 4")]
)
@pytest.mark.parametrize(
    "make", [factored, block, muon, by_owners, hybrid], ids=lambda make: make.__name__
)
def test_parts_in_another_order_are_not_taken_for_these(
    make: Make, saved: str, where: str, tmp_path: Path
) -> None:
    """Both cut rows in 4 parts, but number them differently: only two ranks hold what they held."""
    for error, changed in on_ranks(into_other_parts, 4, saved, where, make, str(tmp_path)):
        assert isinstance(error, GroupFailure), error
        assert "each rank loads what it saved itself" in str(error)
        assert changed == ""


def alone_through_files(rank: int, folder: str) -> tuple[str, str]:
    run = Training("FSDP", alone)
    run.step(1, 2)
    dcp.save({"optimizer": run.query()}, checkpoint_id=folder)
    state = {"optimizer": run.query()}
    dcp.load(state, checkpoint_id=folder)
    before = snapshot(run.optimizer)
    error = caught(lambda: run.give(state["optimizer"]))
    changed = caught(lambda: assert_unchanged(run.optimizer, before))
    return str(error), str(changed or "")


WRITTEN_FOR_ALL = "a tool has written one rank's for all. Let each rank save its own file"


def test_codebooks_of_ranks_that_learn_alone_are_not_mixed(tmp_path: Path) -> None:
    """The codebook in the file is that of one rank, and any other finds that out."""
    met = on_ranks(alone_through_files, 2, str(tmp_path))
    errors = [error for error, _ in met if error != "None"]
    assert errors
    assert [error for error in errors if WRITTEN_FOR_ALL not in error] == []
    assert [changed for error, changed in met if error != "None" and changed] == []


def gathered(rank: int, make: Make) -> tuple[BaseException | None, str]:
    run = Training("FSDP", make)
    run.step(1, 2)
    options = StateDictOptions(full_state_dict=True)
    state = run.query(options)
    before = snapshot(run.optimizer)
    error = caught(lambda: set_optimizer_state_dict(run.model, run.optimizer, state))
    changed = caught(lambda: assert_unchanged(run.optimizer, before))
    return error, str(changed or "")


@pytest.mark.parametrize("make", [factored, block, muon], ids=lambda make: make.__name__)
def test_what_torch_has_gathered_is_refused_by_all(make: Make) -> None:
    for error, changed in on_ranks(gathered, 2, make):
        assert isinstance(error, GroupFailure)
        assert 'a tool has removed its "origin". Save what state_dict() returns as it is' in str(
            error
        )
        assert changed == ""


def query_first(rank: int, make: Make) -> tuple[bool, bool]:
    run, twin = Training("FSDP", make), Training("FSDP", make)
    before = run.weights()
    state = run.query()
    unchanged = same(run.weights(), before) and not run.optimizer.state
    run.step(1, 2)
    twin.step(1, 2)
    del state
    return unchanged, same(run.numbers(), twin.numbers())


@pytest.mark.parametrize("make", [factored, muon], ids=lambda make: make.__name__)
def test_to_ask_a_new_optimizer_for_its_state_changes_nothing(make: Make) -> None:
    """torch makes a step with gradients of zeros to have some state to show."""
    assert on_ranks(query_first, 2, make) == ((True, True),) * 2

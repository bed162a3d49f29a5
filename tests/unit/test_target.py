"""What a checkpoint of torch.distributed.checkpoint is read into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from adapters import Gefen, GefenMuon, empty_state


class Training:
    """A model on one device."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
        self.optimizer = Gefen(self.model.named_parameters(), lr=0.01)

    def step(self, seed: int) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        self.model(x).square().sum().backward()
        self.optimizer.step()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_new_optimizer_on_one_device_goes_on_from_files(tmp_path: Path) -> None:
    run, other = Training(), Training()
    run.step(1)
    state: dict[str, Any] = {
        "weights": run.model.state_dict(),
        "all": get_optimizer_state_dict(run.model, run.optimizer),
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    run.step(2)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    state = {
        "weights": other.model.state_dict(),
        "all": empty_state(other.optimizer, metadata, "all"),
    }
    assert not other.optimizer.state
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other.model, other.optimizer, state["all"])
    other.step(2)
    for one, two in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)


def metadata_of(*saved: tuple[str, tuple[int, ...]], name: str = "w") -> Metadata:
    properties = TensorProperties(dtype=torch.float32)
    return Metadata(
        {
            f"optimizer.state.{name}.{key}": TensorStorageMetadata(
                properties, torch.Size(size), chunks=[]
            )
            for key, size in saved
        },
        planner_data={
            f"optimizer.state.{name}.{key}": ("optimizer", "state", name, key) for key, _ in saved
        },
    )


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def sharded(placement: Placement) -> GefenMuon:
    mesh = init_device_mesh("cpu", (2,))
    return GefenMuon([("w", nn.Parameter(distribute_tensor(torch.zeros(2, 6), mesh, [placement])))])


@pytest.mark.usefixtures("two_ranks")
def test_rows_of_the_shape_of_a_parameter_are_rows_all_the_same() -> None:
    saved = metadata_of(("origin", (2, 4)), ("m_magnitude", (2, 6)), ("m_codebook", (2, 6)))
    entry = empty_state(sharded(Shard(1)), saved)["state"]["w"]
    assert {key: value.placements for key, value in entry.items()} == {
        "origin": (Shard(0),),
        "m_magnitude": (Shard(0),),
        "m_codebook": (Shard(1),),
    }
    assert {key: tuple(value.to_local().shape) for key, value in entry.items()} == {
        "origin": (1, 4),
        "m_magnitude": (1, 6),
        "m_codebook": (2, 3),
    }


@pytest.mark.usefixtures("two_ranks")
def test_what_was_saved_whole_is_read_whole() -> None:
    saved = metadata_of(("m_magnitude", (3,)), ("m_codebook", (2, 6)))
    entry = empty_state(sharded(Shard(0)), saved)["state"]["w"]
    assert not any(isinstance(value, DTensor) for value in entry.values())
    assert [tuple(value.shape) for value in entry.values()] == [(3,), (2, 6)]


@pytest.mark.usefixtures("two_ranks")
def test_state_of_another_number_of_parts_is_refused() -> None:
    saved = metadata_of(("origin", (4, 4)))
    with pytest.raises(ValueError, match=r"state\.w\.origin was saved from 4 parts .* now has 2"):
        empty_state(sharded(Shard(0)), saved)


def test_a_parameter_that_is_not_there_is_named() -> None:
    saved = metadata_of(("vmean", (3,)), name="head.weight")
    with pytest.raises(ValueError, match=r"'head\.weight', which this Gefen does not have; it has"):
        empty_state(Training().optimizer, saved)


def test_a_key_that_is_not_there_is_named() -> None:
    saved = metadata_of(("vmean", (3,)))
    with pytest.raises(KeyError, match=r"nothing under 'optim', but under \['optimizer'\]"):
        empty_state(Training().optimizer, saved, "optim")

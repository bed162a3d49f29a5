"""State dicts of sharded optimizers: they go on bit for bit, and all ranks load or none does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from adapters import Gefen
from consensus import GroupFailure
from tests.gloo._cases import on_ranks
from tests.gloo.checkpoint_cases import (
    ADAMW,
    APPROX,
    BY_OWNERS,
    GEFEN,
    NORMUON,
    WHOLE,
    Refused,
    Run,
    from_bytes,
    layout,
    refused,
    same,
    to_bytes,
    unsharded,
)
from tests.threaded.gefen_cases import local
from tests.threaded.gefen_cases import named as named_params
from tests.threaded.muon_cases import shard
from tests.unit.checkpoint_cases import DAMAGES, damaged
from tests.unit.test_gefen import named, random_tensor

pytestmark = pytest.mark.slow

WHERE = (
    *("rows on 2 ranks", "columns on 2 ranks"),
    *("rows on 3 ranks", "rows, and plain parameters"),
    *("rows on 4 ranks", "HSDP", "FSDP over row TP", "FSDP over column TP"),
)
everywhere = pytest.mark.parametrize("name", WHERE)


# ---- what is saved goes on ----


def goes_on(run: Run, *before: int) -> list[str]:
    """What is wrong with a save after some steps, and a load of it into a fresh optimizer."""
    run.train(*before)
    kept = copy.deepcopy(run.optimizer.state_dict())
    given = from_bytes(run.saved())
    in_bytes = to_bytes(kept), to_bytes(given)
    loaded = run.successor()
    loaded.optimizer.load_state_dict(given)
    run.train(4, 5)
    loaded.train(4, 5)
    found = [] if same(run.values(), loaded.values()) else ["goes on as another"]
    if (to_bytes(kept), to_bytes(given)) != in_bytes:
        found.append("the dict has changed")
    return [f"{run.twins.recipe.name}, {run.twins.layout.name}: {text}" for text in found]


def everything_goes_on(rank: int, name: str) -> list[str]:
    return [
        text
        for recipe in (*WHOLE, *BY_OWNERS, *APPROX)
        # A half that learns alone on each rank needs something to learn from on each.
        if name != "rows on 4 ranks" or recipe is not APPROX[1]
        for before in ((), (1, 2, 3))[recipe not in (GEFEN, NORMUON, ADAMW) :]
        for text in goes_on(Run.on(layout(name), recipe), *before)
    ]


@everywhere
def test_what_was_saved_goes_on_as_the_run_that_saved_it(name: str) -> None:
    """Also on ranks without elements, and after the codebook was learned anew."""
    world_size = layout(name).world_size
    assert on_ranks(everything_goes_on, world_size, name) == ([],) * world_size


# ---- whole tensors ----


def cut_from_whole(rank: int, name: str) -> list[str]:
    found = []
    for recipe in (*WHOLE, *BY_OWNERS):
        run = Run.on(layout(name), recipe)
        twins, one_device = run.twins, unsharded(recipe, 1, 2)
        saved = from_bytes(to_bytes(one_device.state_dict()))
        for i, trained in enumerate(_in_order(one_device, run)):
            twins.whole[i].data = trained.detach().clone()
            with torch.no_grad():
                twins.sharded[i].copy_(twins.placed(trained, i))
        twin = recipe.make(twins.whole)
        twin.load_state_dict(copy.deepcopy(saved))
        run.optimizer.load_state_dict(saved)
        for step in (3, 4):
            twins.set_gradients(step)
            run.optimizer.step()
            twin.step()
            texts = twins.differences(run.optimizer, twin)
            found += [
                f"{recipe.name}, step {step}: {text}"
                for text in texts
                # With owners a rank has the moments of its own rows, under another name.
                if not (recipe in BY_OWNERS and text.startswith("normuon_v"))
            ]
    return found


def _in_order(optimizer: Any, run: Run) -> list[Any]:
    by_name = {name: param for _, name, param, _ in optimizer._members()}
    return [by_name[name] for name, _ in named_params(run.twins.whole)]


@everywhere
def test_whole_tensors_are_cut_and_go_on_as_on_one_device(name: str) -> None:
    world_size = layout(name).world_size
    assert on_ranks(cut_from_whole, world_size, name) == ([],) * world_size


# ---- all or none ----


def sharded_gefen(world_size: int) -> tuple[DeviceMesh, Gefen]:
    mesh = init_device_mesh("cpu", (world_size,))
    pairs = [
        (name, nn.Parameter(shard(param.detach(), mesh, [Shard(0)])))
        for name, param in named()
        if param.ndim
    ]
    scalar = nn.Parameter(named()[-1][1].detach().clone())
    return mesh, Gefen([*pairs, ("layer.4", scalar)], lr=0.01)


def train(mesh: DeviceMesh, optimizer: Gefen, *seeds: int) -> None:
    for seed in seeds:
        for i, param in enumerate(optimizer.param_groups[0]["params"]):
            grad = random_tensor(*param.shape, seed=100 * seed + i)
            sharded = isinstance(param, DTensor)
            param.grad = shard(grad, mesh, [Shard(0)]) if sharded else grad
        optimizer.step()


def damages_on_one_rank(rank: int, world_size: int) -> tuple[list[Refused], bool]:
    mesh, optimizer = sharded_gefen(world_size)
    _, twin = sharded_gefen(world_size)
    train(mesh, optimizer, 1, 2)
    train(mesh, twin, 1, 2)
    met = []
    for damage in DAMAGES:
        given = copy.deepcopy(optimizer.state_dict())
        if rank == 1:
            given = damaged(optimizer, damage)
        met.append(refused(optimizer, lambda given=given: optimizer.load_state_dict(given)))
    train(mesh, optimizer, 3)
    train(mesh, twin, 3)
    params, others = (each.param_groups[0]["params"] for each in (optimizer, twin))
    return met, same(map(local, params), map(local, others))


@pytest.mark.parametrize("world_size", [2, 3])
def test_damage_on_one_rank_is_refused_by_all_and_changes_nothing(world_size: int) -> None:
    by_rank = on_ranks(damages_on_one_rank, world_size, world_size)
    for i, damage in enumerate(DAMAGES):
        assert len({met[i].text for met, _ in by_rank}) == 1
        for met, _ in by_rank:
            error = met[i].error
            assert isinstance(error, GroupFailure), damage.name
            assert [each.rank for each in error.failures] == [1]
            assert error.caused_by(ValueError), damage.name
            assert (damage.sharded or damage.text) in str(error)
            assert met[i].changed == "", damage.name
    assert all(goes_on for _, goes_on in by_rank)

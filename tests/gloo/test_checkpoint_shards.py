"""Which shards a state dict is of: other ranks', other meshes', other modes' are refused by all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from adapters import Muon
from consensus import Disagreement, GroupFailure
from tests.gloo._cases import caught, on_ranks
from tests.gloo.checkpoint_cases import (
    ADAMW,
    ALONE,
    BLOCK,
    DENSE,
    GEFEN,
    HYBRID,
    NORMUON,
    WHOLE,
    Refused,
    Run,
    from_bytes,
    layout,
    of_all_ranks,
    refused,
    same,
    to_bytes,
    unsharded,
)
from tests.threaded.gefen_cases import Layout, Recipe, local
from tests.unit.test_gefen import random_tensor

pytestmark = pytest.mark.slow

ROWS, COLUMNS = layout("rows on 2 ranks"), layout("columns on 2 ranks")


def loads(run: Run, given: Any) -> Refused:
    return refused(run.optimizer, lambda: run.optimizer.load_state_dict(given))


def assert_all_refuse(by_rank: tuple[Refused, ...], kind: type[BaseException], text: str) -> None:
    assert len({met.text for met in by_rank}) == 1
    for met in by_rank:
        assert isinstance(met.error, kind), met.text
        assert text in met.text
        assert met.changed == ""


# ---- the same ranks, other contents ----


def older_on_one_rank(rank: int, recipe: Recipe) -> Refused:
    run = Run.on(ROWS, recipe)
    run.train(1, 2)
    given = copy.deepcopy(run.optimizer.state_dict())
    run.train(3)
    met = loads(run, given if rank else run.optimizer.state_dict())
    run.train(4)
    return met


@pytest.mark.parametrize("recipe", WHOLE, ids=lambda recipe: recipe.name)
def test_checkpoints_of_different_steps_are_a_disagreement(recipe: Recipe) -> None:
    by_rank = on_ranks(older_on_one_rank, 2, recipe)
    text = "loaded state" if recipe is DENSE else "codebooks and steps"
    assert_all_refuse(by_rank, Disagreement, text)


def of_another_run_on_one_rank(rank: int) -> Refused:
    run, other = Run.on(ROWS, GEFEN), Run.on(ROWS, GEFEN)
    run.train(1, 2)
    other.train(4, 5)
    return loads(run, other.optimizer.state_dict() if rank else run.optimizer.state_dict())


def test_different_codebooks_are_a_disagreement() -> None:
    by_rank = on_ranks(of_another_run_on_one_rank, 2)
    assert_all_refuse(by_rank, Disagreement, "codebooks and steps")


def counter_gone(rank: int, where: tuple[int, ...]) -> tuple[Refused, bool]:
    run, twin = Run.on(ROWS, GEFEN), Run.on(ROWS, GEFEN)
    run.train(1, 2)
    twin.train(1, 2)
    given = copy.deepcopy(run.optimizer.state_dict())
    for entry in given["state"].values() if rank in where else ():
        entry.pop("factored_step", None)
        entry.pop("vmean_step", None)
    met = loads(run, given)
    run.train(3, 4)
    twin.train(3, 4)
    return met, same(run.values(), twin.values())


def test_moments_without_counters_go_on_as_with_them() -> None:
    by_rank = on_ranks(counter_gone, 2, (0, 1))
    assert [(met.error, equal) for met, equal in by_rank] == [(None, True)] * 2


def test_counters_that_one_rank_lacks_are_a_disagreement() -> None:
    by_rank = on_ranks(counter_gone, 2, (1,))
    assert_all_refuse(tuple(met for met, _ in by_rank), Disagreement, "loaded state")
    assert all(equal for _, equal in by_rank)


def file_of_rank_0(rank: int, recipe: Recipe) -> Refused:
    run = Run.on(ROWS, recipe)
    run.train(1, 2)
    return loads(run, from_bytes(of_all_ranks(run.saved())[0]))


@pytest.mark.parametrize("recipe", WHOLE, ids=lambda recipe: recipe.name)
def test_what_rank_0_saved_is_not_taken_for_rank_1s(recipe: Recipe) -> None:
    """The shards have equal shapes, so nothing else tells them apart."""
    by_rank = on_ranks(file_of_rank_0, 2, recipe)
    first = recipe.shapes[0]
    upper, lower = (f"[{a}:{b}, 0:{first[1]}]" for a, b in ((0, first[0] // 2), (first[0] // 2, 6)))
    text = f"is that of elements {upper}, but this rank holds elements {lower}; each rank loads"
    assert_all_refuse(by_rank, GroupFailure, text)


# ---- other ranks ----


def save(rank: int, where: Layout, recipe: Recipe) -> bytes:
    run = Run.on(where, recipe)
    run.train(1, 2)
    return run.saved()


def load(rank: int, where: Layout, recipe: Recipe, files: tuple[bytes, ...]) -> Refused:
    run = Run.on(where, recipe)
    run.train(4)
    met = loads(run, from_bytes(files[min(rank, len(files) - 1)]))
    run.train(5)
    return met


STRIDED = layout("FSDP over row TP")
TWICE = layout("rows cut twice")
COPIES_INSIDE = Layout("copies inside", (2, 2), (Shard(0), Replicate()))
SAVED = "State of shards is loaded with the mesh and the placements it was saved with"


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (ROWS, layout("rows on 3 ranks")),
        (layout("rows on 3 ranks"), ROWS),
        (ROWS, COLUMNS),
        (COLUMNS, ROWS),
        (STRIDED, TWICE),
        (layout("HSDP"), COPIES_INSIDE),
        (ROWS, layout("HSDP")),
    ],
    ids=lambda where: where.name,
)
@pytest.mark.parametrize("recipe", [GEFEN, DENSE], ids=lambda recipe: recipe.name)
def test_other_shards_are_refused_by_all(saved: Layout, loaded: Layout, recipe: Recipe) -> None:
    files = on_ranks(save, saved.world_size, saved, recipe)
    by_rank = on_ranks(load, loaded.world_size, loaded, recipe, files)
    assert_all_refuse(by_rank, GroupFailure, SAVED)


@pytest.mark.parametrize("recipe", [GEFEN, NORMUON, DENSE], ids=lambda recipe: recipe.name)
def test_shards_are_not_loaded_into_whole_parameters(recipe: Recipe) -> None:
    given = from_bytes(on_ranks(save, 2, ROWS, recipe)[0])
    optimizer = unsharded(recipe, 4)
    met = refused(optimizer, lambda: optimizer.load_state_dict(given))
    assert type(met.error) is ValueError
    assert SAVED in str(met.error)
    assert met.changed == ""


# ---- the mode in which each rank learns alone ----


def of_another_mode(rank: int, saved: Recipe, loaded: Recipe) -> Refused:
    run = Run.on(COLUMNS, saved)
    run.train(1, 2)
    other = Run.on(COLUMNS, loaded)
    return loads(other, run.optimizer.state_dict())


@pytest.mark.parametrize(
    ("saved", "loaded"), [(NORMUON, ALONE), (ALONE, NORMUON)], ids=["exact", "approx"]
)
def test_shards_of_one_mode_are_not_read_as_those_of_the_other(
    saved: Recipe, loaded: Recipe
) -> None:
    for met in on_ranks(of_another_mode, 2, saved, loaded):
        assert "was saved with sharded_mode" in met.text
        assert met.changed == ""


def of_owners_and_back(rank: int, recipe: Recipe) -> tuple[Refused, Refused, bool]:
    """Loads between the two modes that have the blocks of one device."""
    options = {**recipe.options, "sharded_mode": "distributed"}
    by_owners = Recipe("", recipe.cls, options, recipe.shapes)
    run = Run.on(ROWS, recipe)
    run.train(1, 2)
    other = run.successor()
    owners = other.optimizer = by_owners.make(other.twins.sharded)
    there = loads(other, copy.deepcopy(run.optimizer.state_dict()))
    run.train(3)
    other.train(3)
    pairs = zip(run.twins.sharded, other.twins.sharded, strict=True)
    equal = all(torch.equal(local(a), local(b)) for a, b in pairs)
    return there, loads(run, copy.deepcopy(owners.state_dict())), equal


@pytest.mark.parametrize("recipe", [NORMUON, DENSE], ids=lambda recipe: recipe.name)
def test_owners_take_moments_of_all_rows_and_have_those_of_theirs(recipe: Recipe) -> None:
    by_rank = on_ranks(of_owners_and_back, 2, recipe)
    assert [(met.error, equal) for met, _, equal in by_rank] == [(None, True)] * 2
    back = tuple(met for _, met, _ in by_rank)
    assert_all_refuse(back, GroupFailure, 'saved with sharded_mode "distributed" and is that of')


def whole_into_approx(rank: int) -> Refused:
    run = Run.on(ROWS, ALONE)
    return loads(run, unsharded(NORMUON, 1, 2).state_dict())


def test_whole_tensors_are_not_cut_for_ranks_that_learn_alone() -> None:
    for met in on_ranks(whole_into_approx, 2):
        assert type(met.error) is ValueError
        assert 'With sharded_mode "approx" each rank has blocks of its own' in met.text
        assert met.changed == ""


def one_ranks_record_for_all(rank: int) -> Refused:
    """As a tool would that takes what is no DTensor for equal on all ranks."""
    run = Run.on(ROWS, ALONE)
    for i, param in enumerate(run.twins.sharded):
        param.grad = run.twins.placed(random_tensor(*param.shape, seed=i), i)
    run.optimizer.step()
    given = copy.deepcopy(run.optimizer.state_dict())
    given["param_groups"] = of_all_ranks(given["param_groups"])[0]
    return loads(run, given)


def test_one_ranks_codebook_is_not_taken_for_anothers() -> None:
    first, second = on_ranks(one_ranks_record_for_all, 2)
    assert first.error is None
    assert type(second.error) is ValueError
    assert "a tool has written one rank's for all. Let each rank save its own file" in second.text
    assert second.changed == ""


def gathered_by_a_tool(rank: int, recipe: Recipe) -> Refused:
    run = Run.on(COLUMNS, recipe)
    run.train(1, 2)
    given = copy.deepcopy(run.optimizer.state_dict())
    for entry in given["state"].values():
        for key, value in entry.items():
            entry[key] = value.full_tensor() if isinstance(value, DTensor) else value
    return loads(run, given)


@pytest.mark.parametrize("recipe", [GEFEN, BLOCK, NORMUON, ADAMW], ids=lambda recipe: recipe.name)
def test_rows_that_a_tool_has_joined_are_refused(recipe: Recipe) -> None:
    """They are no whole tensors: their order is that of the parts."""
    by_rank = on_ranks(gathered_by_a_tool, 2, recipe)
    assert_all_refuse(
        by_rank, GroupFailure, 'a tool has removed its "origin". Save what state_dict'
    )


# ---- what a rank does alone ----


def alone(rank: int) -> bool:
    run = Run.on(ROWS, HYBRID)
    run.train(1)
    group = dist.group.WORLD
    assert group is not None
    before = group._get_sequence_number_for_group()
    if rank == 0:
        run.optimizer.state_dict()
        repr(run.optimizer)
    silent = group._get_sequence_number_for_group() == before
    run.train(2)
    return silent


def test_one_rank_may_ask_for_its_state_alone() -> None:
    assert on_ranks(alone, 2) == (True, True)


def hook_on_one_rank(rank: int) -> tuple[Refused, list[str], bool]:
    run = Run.on(ROWS, HYBRID)
    run.train(1, 2)
    met: list[str] = []

    def complete(me: Any, saved: dict[str, Any]) -> None:
        met.extend(key for group in saved["param_groups"] for key in group if key == "gefen")
        met.extend(
            sorted({type(entry["m_codebook"]).__name__ for entry in saved["state"].values()})
        )

    run.optimizer.register_state_dict_post_hook(complete)
    saved = run.optimizer.state_dict()
    handle = run.optimizer.register_load_state_dict_pre_hook(_raises if rank else _passes)
    result = loads(run, {"wrapped": saved})
    handle.remove()
    run.optimizer.register_load_state_dict_pre_hook(_passes)
    run.optimizer.register_load_state_dict_post_hook(lambda me: met.append("loaded"))
    run.optimizer.load_state_dict({"wrapped": saved})
    return result, met, caught(lambda: run.train(3)) is None


def _passes(optimizer: Any, given: dict[str, Any]) -> Any:
    return given["wrapped"]


def _raises(optimizer: Any, given: dict[str, Any]) -> Any:
    raise OSError("disk")


def test_a_hook_that_raises_on_one_rank_is_told_to_all() -> None:
    by_rank = on_ranks(hook_on_one_rank, 2)
    assert_all_refuse(tuple(met for met, _, _ in by_rank), GroupFailure, "OSError: disk")
    for _, met, goes_on in by_rank:
        assert met == ["gefen", "gefen", "DTensor", "loaded"]
        assert goes_on


SIZE = torch.Size((4, 6))


def cut_by_hand(rank: int) -> tuple[str, bool, str]:
    """Rank 0 holds three rows of four, which no layout of torch's gives it."""
    mesh = DeviceMesh("cpu", [0, 1])
    rows = torch.arange(24.0).view(4, 6).cos()[[slice(0, 3), slice(3, 4)][rank]].clone()
    param = nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)], shape=SIZE, stride=(6, 1)))
    optimizer = Muon([("layer", param)], sharded_mode="approx")
    param.grad = param.detach().sin()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    before = local(optimizer.state[param]["momentum_buffer"]).clone()
    optimizer.step()
    loaded = caught(lambda: optimizer.load_state_dict(saved))
    equal = torch.equal(local(optimizer.state[param]["momentum_buffer"]), before)
    files = of_all_ranks(to_bytes(saved))
    other = caught(lambda: optimizer.load_state_dict(from_bytes(files[0])))
    return str(loaded), equal, str(other)


def test_a_part_that_is_no_box_is_saved_where_ranks_compute_alone() -> None:
    """Such ranks do not ask each other, so one that is given another's file refuses alone."""
    (*first, own), (*second, other) = on_ranks(cut_by_hand, 2)
    assert first == second == ["None", True]
    assert own == "None"
    assert "is that of place [0] on the mesh, but this rank holds place [1]" in other

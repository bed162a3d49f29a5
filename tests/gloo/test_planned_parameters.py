"""Parameters that are not those that were planned: built otherwise on one rank, or replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from adapters import Muon
from consensus import Disagreement
from consensus.testing import assert_unchanged, snapshot
from tests.gloo._cases import Trained, caught, cause_of, on_ranks
from tests.threaded.muon_cases import random_matrices, shard

pytestmark = pytest.mark.slow

# The first two have one shape: swapped, only their names tell them apart.
SHAPES = ((6, 4), (6, 4), (5, 3))


# ---- what is built differently on one rank ----

Shapes = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Build:
    """How one rank builds its optimizer."""

    shapes: Shapes = SHAPES
    names: Sequence[str] | None = ("a", "b", "c")
    placements: tuple[Placement, ...] = (Shard(0),)
    dtype: torch.dtype = torch.float32
    mode: Any = "exact"
    groups: int = 1

    def optimizer(self, mesh: DeviceMesh) -> Muon:
        params = []
        for weight in random_matrices(self.shapes, seed=1):
            param = nn.Parameter(shard(weight.to(self.dtype), mesh, self.placements))
            param.grad = shard(weight.cos().to(self.dtype), mesh, self.placements)
            params.append(param)
        listed: Sequence[Any] = params
        if self.names is not None:
            listed = list(zip(self.names, params, strict=True))
        size = -(-len(listed) // self.groups)
        groups = [{"params": listed[i : i + size]} for i in range(0, len(listed), size)]
        return Muon(groups, sharded_mode=self.mode)


BUILDS = {
    "one parameter fewer": (
        Build(SHAPES[:2], "ab"),
        "parameters: number 2: c (5, 3) float32 [S(0)] on mesh (2) on rank 0; absent on rank 1",
    ),
    "names swapped": (
        Build(names="bac"),
        "parameters: number 0: a (6, 4) float32 [S(0)] on mesh (2) on rank 0; b (6, 4)",
    ),
    "another shape": (
        Build(((6, 4), (8, 4), (5, 3))),
        "b (8, 4) float32 [S(0)] on mesh (2) on rank 1",
    ),
    "another order of shapes, unnamed": (
        Build(SHAPES[::-1], None),
        "parameters: number 0: a (6, 4) float32 [S(0)] on mesh (2) on rank 0; parameter 0 (5, 3)",
    ),
    "another dtype": (Build(dtype=torch.bfloat16), "a (6, 4) bfloat16"),
    "another placement": (Build(placements=(Shard(1),)), "a (6, 4) float32 [S(1)]"),
    "a copy instead of a shard": (Build(placements=(Replicate(),)), "a (6, 4) float32 [R]"),
    "another mode": (Build(mode="approx"), "sharded_mode"),
    "more groups": (Build(groups=3), "of group 1: absent on rank 0; "),
}


def built_differently(rank: int) -> list[tuple[str, str, bool]]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for build, _ in BUILDS.values():
        optimizer = (build if rank == 1 else Build()).optimizer(mesh)
        before = snapshot(optimizer)
        error = caught(optimizer.step)
        unchanged = caught(lambda: assert_unchanged(optimizer, before)) is None  # noqa: B023
        found.append((type(error).__name__, str(error), unchanged))
        again = caught(optimizer.step)  # not only the first time
        assert type(again) is type(error), again
    return found


def test_optimizers_that_are_built_differently_refuse_to_step() -> None:
    first, second = on_ranks(built_differently, 2)
    assert first == second
    for (name, (_, says)), (kind, text, unchanged) in zip(BUILDS.items(), first, strict=True):
        assert kind == "Disagreement", (name, text)
        assert says in text, (name, text)
        assert unchanged, name


# ---- parameters that are replaced while the step runs ----


def rebind(trained: Trained) -> None:
    group = trained.optimizer.param_groups[0]
    group["params"] = group["params"][:2]


def replace_one(trained: Trained) -> None:
    params = trained.optimizer.param_groups[0]["params"]
    params[0] = nn.Parameter(params[0].detach().clone())
    params[0].grad = params[1].grad


def freeze(trained: Trained) -> None:
    trained.twins.sharded[2].requires_grad_(False)


REPLACED = {
    "a group is bound to other parameters": (rebind, "expected 3 parameters; got 2"),
    "a tensor is replaced by one of its shape": (replace_one, "layer.0 is another tensor"),
    "a parameter is frozen": (freeze, "layer.2 now has requires_grad=False"),
}


def replaced(rank: int, everywhere: bool) -> list[tuple[str, str | None, list[str]]]:
    """By a closure, then by a pre-hook; what was replaced is put back afterwards."""
    trained = Trained.on(shapes=SHAPES, lr=0.02)
    found = []
    for change, _ in REPLACED.values():
        for by_hook in (False, True):
            params = list(trained.optimizer.param_groups[0]["params"])
            trained.give_gradients()

            def act(*_: Any, change: Callable[[Trained], None] = change) -> Any:
                if everywhere or rank == 1:
                    change(trained)

            if by_hook:
                handle = trained.optimizer.register_step_pre_hook(act)
                error = caught(trained.optimizer.step)
                handle.remove()
            else:
                error = caught(lambda: trained.optimizer.step(act))
            trained.optimizer.param_groups[0]["params"] = params
            params[2].requires_grad_(True)
            trained.healthy_step()
            found.append(
                (f"{type(error).__name__}: {error}", cause_of(error), trained.differences())
            )
    return found


@pytest.mark.parametrize("everywhere", [False, True], ids=["on one rank", "on all ranks"])
def test_parameters_replaced_by_a_closure_or_hook_are_found_on_all_ranks(everywhere: bool) -> None:
    first, second = on_ranks(replaced, 2, everywhere)
    expected = [says for _, says in REPLACED.values() for _ in range(2)]
    who = "ranks 0, 1" if everywhere else "rank 1"
    for says, (text, cause, wrong), (other, other_cause, also) in zip(
        expected, first, second, strict=True
    ):
        assert text == other
        assert text.startswith(f"GroupFailure: Muon.step failed on {who}")
        assert f"parameters changed during the step: {says}" in text
        assert (cause is not None, other_cause is not None) == (everywhere, True)
        assert (wrong, also) == ([], [])


def _tensors_change_places_between_two_steps(rank: int, everywhere: bool) -> str:
    optimizer = Build().optimizer(init_device_mesh("cpu", (2,)))
    optimizer.step()
    listed = optimizer.param_groups[0]["params"]
    if everywhere or rank == 1:
        listed[0], listed[1] = listed[1], listed[0]  # the names stay where they are
    try:
        optimizer.step()
    except Disagreement as error:
        return str(error)
    return "stepped"


def test_tensors_that_change_places_under_their_names_on_one_rank_are_found_on_all() -> None:
    first, second = on_ranks(_tensors_change_places_between_two_steps, 2, False)
    assert first == second
    assert "parameters: number 0: a (6, 4) float32 [S(0)] on mesh (2) on rank 0; a" in first
    assert "at first number 1 on rank 1" in first


def test_tensors_that_change_places_on_every_rank_are_accepted() -> None:
    assert on_ranks(_tensors_change_places_between_two_steps, 2, True) == ("stepped", "stepped")


def a_list_that_cannot_be_read(rank: int) -> list[str]:
    """Rank 1 has a name twice when its optimizer is new, and a tensor twice later on."""
    mesh = init_device_mesh("cpu", (2,))
    texts = []
    params = [Build().optimizer(mesh).param_groups[0]["params"][i] for i in range(2)]
    second = "a" if rank == 1 else "b"
    optimizer = Muon([{"params": [("a", params[0])]}, {"params": [(second, params[1])]}])
    texts += [str(caught(optimizer.step)) for _ in range(2)]
    optimizer = Muon([("a", params[0]), ("b", params[1])])
    texts.append(str(caught(optimizer.step)))
    group = optimizer.param_groups[0]
    if rank == 1:
        group["params"].append(params[0])
        group["param_names"].append("c")
    texts += [str(caught(optimizer.step)) for _ in range(2)]
    if rank == 1:
        group["params"].pop()
        group["param_names"].pop()
    texts.append(str(caught(optimizer.step)))
    return texts


def test_parameters_that_one_rank_cannot_read_stop_all_until_they_are_mended() -> None:
    first, second = on_ranks(a_list_that_cannot_be_read, 2)
    assert first == second
    for text in first[:2]:
        assert "rank 1: ValueError: 2 parameters are named 'a'" in text
    assert first[2] == "None"
    for text in first[3:5]:
        assert "rank 1: ValueError: parameter 2 (shape (6, 4)) is listed twice" in text
    assert first[5] == "None"

"""Whoever learns together learns what one process learns that holds everything, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import consensus
from adapters import _learning
from adapters.gefen import Gefen
from adapters.hybrid import Hybrid
from consensus.testing import faults, inject, run_ranks
from tests.gloo._cases import LIVENESS_S, caught, on_ranks, tell, wait_for
from tests.gloo.step_cases import (
    MATRICES,
    OTHERS,
    Contents,
    Named,
    Shapes,
    changes,
    contents,
    give_gradient,
    give_gradients,
    learned,
    members,
    met_in,
    parameters,
)

pytestmark = pytest.mark.slow

# More elements than a codebook has levels: fewer would teach it the same, counted once or twice.
WIDE: Shapes = {"wide": (30, 20)}
TALL: Shapes = {"tall": (50, 16)}
ALL: Shapes = {**MATRICES, **OTHERS, **WIDE, **TALL}


def whole_world() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def some(names: Sequence[str]) -> Shapes:
    return {name: ALL[name] for name in names}


def alone(shapes: Shapes = ALL) -> Contents:
    """Return what one process learns from parameters of these shapes."""
    optimizer = Gefen(parameters(shapes, None).items(), lr=0.02)
    give_gradients(optimizer, 1)
    optimizer.step()
    return learned(optimizer)


def together(params: Named, **options: Any) -> Contents:
    """Return what this rank learns of its parameters with those that it shares a scope with."""
    optimizer = Gefen(params.items(), lr=0.02, **options)
    give_gradients(optimizer, 1)
    optimizer.step()
    return learned(optimizer)


# What each rank holds as plain tensors.
HOLDINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "copies": (tuple(ALL), tuple(ALL), tuple(ALL)),
    "stages": (("up", "head"), ("down", "gate", "tall"), ("norm", "scale", "wide")),
    "a copy between stages": (
        ("up", "down", "wide"),
        ("wide", "gate", "tall"),
        ("head", "scale", "norm", "wide"),
    ),
    "nothing on the first rank": (
        (),
        ("up", "down", "gate", "tall"),
        ("head", "norm", "scale", "wide"),
    ),
}


def each_holding(rank: int) -> dict[str, list[str]]:
    found = {}
    for name, by_rank in HOLDINGS.items():
        own = by_rank[rank]
        # torch wants one parameter at least.
        params = parameters(some(own), None) or parameters({"empty": (0, 4)}, None)
        expected = {
            key: value
            for key, value in alone().items()
            if not key.startswith("automatic") or key.endswith(own or " ")
        }
        got = together(params, codebook_scope=dist.group.WORLD)
        found[name] = changes(expected, got)
    return found


def test_plain_parameters_in_a_scope_count_once_and_teach_all() -> None:
    expected: dict[str, list[str]] = {name: [] for name in HOLDINGS}
    assert on_ranks(each_holding, 3) == (expected,) * 3


def sharded(rank: int, shape: tuple[int, ...], placements: Any) -> list[str]:
    """Matrices placed like this beside plain tensors: all counted twice would look like once."""
    mesh = init_device_mesh("cpu", shape)
    shards, plain = {**MATRICES, **WIDE}, {**OTHERS, **TALL}
    params = {**parameters(shards, mesh, placements), **parameters(plain, None)}
    return changes(alone(), together(params))


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        pytest.param((3,), (Shard(0),), id="rows, some ranks empty"),
        pytest.param((2,), (Replicate(),), id="copies"),
        pytest.param((2, 2), (Replicate(), Shard(0)), id="HSDP"),
        pytest.param((2, 2), (Shard(0), Replicate()), id="copies inside"),
    ],
)
def test_shards_and_their_copies_count_once(shape: tuple[int, ...], placements: Any) -> None:
    size = torch.Size(shape).numel()
    assert on_ranks(sharded, size, shape, placements) == ([],) * size


def beside_shards(rank: int) -> list[str]:
    """Shards, copies of a plain parameter, and one that only the last rank holds."""
    params = parameters({**MATRICES, **WIDE}, whole_world()) | parameters(OTHERS, None)
    expected = alone()
    if rank == 1:
        params |= parameters(TALL, None)
    else:
        del expected["automatic_period of tall"]
    return changes(expected, together(params))


def test_plain_parameters_beside_shards_count_once() -> None:
    assert on_ranks(beside_shards, 2) == ([], [])


def unequal_copies(rank: int) -> tuple[Contents, list[str]]:
    """Copies whose gradients differ, as without an all_reduce: the lowest rank's count."""
    optimizer = Gefen(parameters(ALL, None).items(), lr=0.02, codebook_scope=dist.group.WORLD)
    give_gradients(optimizer, 1 + rank)
    optimizer.step()
    return learned(optimizer), changes(alone(), learned(optimizer))


def test_of_copies_with_different_gradients_those_of_the_lowest_rank_count() -> None:
    first, second = on_ranks(unequal_copies, 2)
    assert first == second
    assert first[1] == []


def halves(rank: int) -> Contents:
    """Equal names in the two halves of different ranks are no copies of each other."""
    mine, other = ("up",), ("head",)
    shapes = {"same": (30, 20)}
    muon = parameters({**some(mine), **(shapes if rank == 0 else {})}, None)
    backup = parameters({**some(other), **(shapes if rank == 1 else {})}, None)
    optimizer = Hybrid(muon.items(), backup.items(), lr=0.02, codebook_scope=dist.group.WORLD)
    give_gradients(optimizer, 1)
    optimizer.step()
    return {key: at for key, at in learned(optimizer).items() if key.startswith("codebook")}


def one_half(shapes: Shapes) -> object:
    return alone(shapes)["codebook of rule 0"]


def test_parameters_of_one_name_in_two_halves_are_not_copies() -> None:
    expected = {
        "codebook of rule 0": one_half({**some(("up",)), "same": (30, 20)}),
        "codebook of rule 1": one_half({**some(("head",)), "same": (30, 20)}),
    }
    assert on_ranks(halves, 2) == (expected,) * 2


# ---- ranks that do not want the same ----


def other_choice(rank: int) -> list[str]:
    found = []
    for name, values in CHOICES.items():
        options: dict[str, Any] = {name: values[rank]}
        optimizer = Gefen(parameters(ALL, whole_world()).items(), lr=0.02, **options)
        give_gradients(optimizer, 1)
        met = met_in(optimizer, optimizer.step)
        found.append(f"{met.text} {met.changed}")
    return found


CHOICES = {
    "first_gradient": ("raise", "defer"),
    "codebook_refresh_every": (0, 5),
    "period_one_substrings": ((), ("up",)),
    "force_1d_period_one": (False, True),
}


def test_ranks_with_other_options_are_told() -> None:
    first, second = on_ranks(other_choice, 2)
    assert first == second
    assert 'disagree about first_gradient: "raise" on rank 0; "defer" on rank 1' in first[0]
    assert "disagree about steps with the codebook: [0, 0] on rank 0; [0, 5] on rank 1" in first[1]
    assert (
        'disagree about period options: [false, false] on rank 0; [false, false, "up"]' in first[2]
    )
    assert "disagree about period options: [false, false] on rank 0; [true, false]" in first[3]


def other_scope(rank: int) -> tuple[str, bool]:
    """Rank 0 learns alone; rank 1 waits for it, but not for ever."""
    scope: Any = dist.group.WORLD if rank == 1 else "auto"
    optimizer = Gefen(parameters(ALL, None).items(), lr=0.02, codebook_scope=scope)
    give_gradients(optimizer, 1)
    before = contents(optimizer)
    error = caught(optimizer.step)
    tell(f"{rank} is back")
    wait_for(f"{1 - rank} is back")
    return type(error).__name__, changes(before, contents(optimizer)) == []


def test_a_rank_that_alone_names_a_scope_is_told_who_did_not_come() -> None:
    ranks = run_ranks(other_scope, 2, timeout=LIVENESS_S, group_timeout=3.0)
    assert ranks.values() == (("NoneType", False), ("LateRanks", True))


def scope_on_one_rank_of_a_mesh(rank: int) -> tuple[list[str], tuple[int, ...]]:
    """Ranks 0 and 1 share a mesh, but only rank 1 says that it shares a scope with rank 2."""
    pair = DeviceMesh("cpu", [0, 1])
    group: Any = dist.new_group([1, 2])
    own = {**MATRICES, **WIDE} if rank < 2 else {**OTHERS, **TALL}
    params = parameters(own, pair if rank < 2 else None)
    options = {"codebook_scope": group} if rank > 0 else {}
    optimizer = Gefen(params.items(), lr=0.02, **options)
    give_gradients(optimizer, 1)
    optimizer.step()
    expected = alone()["codebook of rule 0"]
    same = learned(optimizer)["codebook of rule 0"] == expected
    return [] if same else ["codebook"], consensus.control_group(optimizer).ranks


def test_ranks_that_are_tied_by_a_scope_of_one_of_them_learn_together() -> None:
    assert on_ranks(scope_on_one_rank_of_a_mesh, 3) == (([], (0, 1, 2)),) * 3


def other_levels(rank: int) -> tuple[str, str, list[str]]:
    """Rank 1 makes other levels of the same counts, as a processor with a fault might."""
    optimizer = Gefen(parameters(ALL, whole_world()).items(), lr=0.02)
    give_gradients(optimizer, 1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(_learning, "learn_levels", lambda counts: torch.linspace(-1, 1, 256))
        met = met_in(optimizer, optimizer.step)
    optimizer.step()
    return met.text, met.changed, changes(alone(), learned(optimizer))


def test_a_codebook_that_came_out_otherwise_on_one_rank_is_not_used() -> None:
    first, second = on_ranks(other_levels, 2)
    assert first == second
    assert "ranks disagree about codebooks learned" in first[0]
    assert first[1:] == ("", [])


def state_lost(rank: int) -> tuple[str, bool]:
    """Rank 1 loses its state between two steps, and the optimizer is not told."""
    optimizer = Gefen(parameters(ALL, whole_world()).items(), lr=0.02)
    give_gradients(optimizer, 1)
    optimizer.step()
    optimizer.step()  # from here on it knows its state
    if rank == 1:
        optimizer.state.clear()
    before = contents(optimizer)
    error = caught(optimizer.step)
    tell(f"{rank} is back")
    wait_for(f"{1 - rank} is back")
    return str(error), changes(before, contents(optimizer)) == []


def test_state_that_is_lost_on_one_rank_stops_all() -> None:
    ranks = run_ranks(state_lost, 2, timeout=LIVENESS_S, group_timeout=3.0)
    first, second = ranks.values()
    assert first == second
    assert "ranks disagree about" in first[0]
    assert first[1]


# ---- a parameter whose first gradient comes later ----


def later(rank: int) -> tuple[list[str], bool, str]:
    """Meshes {0,1} and {1,2}: "norm" is new to the second in the second step."""
    low, high = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    params = parameters({**MATRICES, **WIDE}, low) if rank < 2 else {}
    params |= parameters({**OTHERS, **TALL}, high) if rank > 0 else {}
    optimizer = Gefen(params.items(), lr=0.02)
    for name, param in members(optimizer):
        if name != "norm":
            give_gradient(name, param, 1)
    optimizer.step()
    codebook = learned(optimizer)["codebook of rule 0"]
    give_gradients(optimizer, 1)
    optimizer.step()
    found = learned(optimizer)
    expected = alone(some([name for name in ALL if name != "norm"]))
    expected |= {k: v for k, v in alone().items() if k.endswith(" norm")}
    wrong = [key for key in found if found[key] != expected[key]]
    return wrong, codebook == found["codebook of rule 0"], repr(caught(optimizer.step))


def test_a_parameter_may_be_new_to_the_ranks_of_one_mesh_only() -> None:
    assert on_ranks(later, 3) == (([], True, "None"),) * 3


# ---- a half that has nothing to learn from ----


def empty_half(rank: int, case: str) -> str:
    muon, backup = parameters(MATRICES, whole_world()), parameters(OTHERS, whole_world())
    options: dict[str, Any] = {}
    if case == "no matrices":
        muon = {}
    elif case == "nothing but matrices":
        backup = {}
    elif case == "an empty shard":  # of all matrices, on rank 1
        muon, options = parameters(some(("gate",)), whole_world()), {"sharded_mode": "approx"}
    elif case == "no gradient at a refresh":
        options = {"codebook_refresh_every": 1}
    optimizer = Hybrid(muon.items(), backup.items(), lr=0.02, **options)
    give_gradients(optimizer, 1)
    if case == "no gradient at a refresh":
        optimizer.step()
    if "no gradient" in case:
        for param in muon.values():
            param.grad = None
    return str(caught(optimizer.step))


@pytest.mark.parametrize(
    "case",
    [
        "no matrices",
        "nothing but matrices",
        "no gradient of matrices yet",
        "no gradient at a refresh",
        "an empty shard",
    ],
)
def test_a_half_without_gradients_does_not_stop_the_other(case: str) -> None:
    assert on_ranks(empty_half, 2, case) == ("None", "None")


def killed_while_it_learns(rank: int, nth: int) -> tuple[BaseException | None, list[str]]:
    """The two collectives that find out how long blocks are."""
    optimizer = Gefen(parameters(some(["wide", "tall"]), whole_world()).items(), lr=0.02)
    give_gradients(optimizer, 1)
    before = contents(optimizer)
    with inject((dist, "all_reduce"), rank=1, fault=faults.Kill(), nth=nth):
        error = caught(optimizer.step)
    return error, changes(before, contents(optimizer))


@pytest.mark.parametrize("nth", [1, 2])
def test_a_death_among_the_collectives_of_learning_is_an_agreed_failure(nth: int) -> None:
    ranks = run_ranks(killed_while_it_learns, 3, nth, timeout=LIVENESS_S)
    for survivor in (ranks[0], ranks[2]):
        assert survivor.value is not None
        error, changed = survivor.value
        assert isinstance(error, consensus.GroupFailure), error
        assert error.gone == (1,)
        assert "rank 1 is gone, its connection broke, so every rank of the group stops" in str(
            error
        )
        assert not changed

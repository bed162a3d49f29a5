"""Scopes that overlap tie the ranks of all of them: a failure on one end reaches the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import consensus
from adapters import Hybrid, Muon
from adapters.options import ShardedMode
from consensus import (
    GroupFailure,
    LateRanks,
    agree_sum,
    any_failed,
    control_group,
    fail_together,
)
from consensus._store import StoreClient
from consensus.enclosure import components
from consensus.testing import assert_unchanged, snapshot
from tests.gloo._cases import LIVENESS_S, caught, on_ranks
from tests.threaded.muon_cases import random_matrices, shard

pytestmark = pytest.mark.slow

CHAIN = ((0, 1), (1, 2), (2, 3))
NESTED = ((0, 1, 2, 3), (1, 2))
WIDE_AND_NARROW = ((0, 1, 2), (2, 3))
RING = ((0, 1), (1, 2), (0, 2))
# Of six ranks, some of which may be in none.
LAYOUTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "chain": (*CHAIN, (3, 4), (4, 5)),
    "ring of three": RING,
    "ring of six": (*CHAIN, (3, 4), (4, 5), (0, 5)),
    "star": ((2, 5), (0, 5), (3, 5)),
    "nested": NESTED,
    "wide and narrow": WIDE_AND_NARROW,
    "two pipelines": ((0, 2), (2, 4), (1, 3), (3, 5)),
    "two pipelines, tied": ((0, 2), (2, 4), (1, 3), (3, 5), (0, 1, 4, 5)),
}
SQUARE = ((0, 1), (2, 3), (0, 2), (1, 3))  # the rows and columns of a mesh, and its first row apart


def groups_of(rank: int, scopes: Sequence[tuple[int, ...]]) -> list[Any]:
    made = [dist.new_group(list(ranks)) for ranks in scopes]
    return [group for group, ranks in zip(made, scopes, strict=True) if rank in ranks]


def meshes_of(rank: int, scopes: Sequence[tuple[int, ...]]) -> list[Any]:
    made = [DeviceMesh("cpu", list(ranks)) for ranks in scopes]
    return [mesh for mesh, ranks in zip(made, scopes, strict=True) if rank in ranks]


def named_parameters_on(meshes: Sequence[DeviceMesh]) -> list[tuple[str, nn.Parameter]]:
    """One matrix a mesh; a mesh's ranks know it by one name, whatever else they hold."""
    params = []
    for mesh in meshes:
        first = mesh.mesh.flatten()[0].item()
        weight = random_matrices([(6 + int(first), 4)], seed=int(first))[0]
        param = nn.Parameter(shard(weight, mesh, [Shard(0)]))
        param.grad = shard(weight.cos(), mesh, [Shard(0)])
        params.append((f"of {mesh.mesh.tolist()}", param))
    return params


Told: TypeAlias = list[tuple[int, ...]]


def one_failure_each(rank: int, source: Any, backend: str) -> tuple[tuple[int, ...], Told]:
    """Let each rank fail in turn; return who votes, and who failed as this rank was told."""
    group = control_group(source, backend=backend)
    told: Told = []
    for odd in range(dist.get_world_size()):
        try:
            with fail_together("evaluate", group):
                if rank == odd:
                    raise ValueError("here")
            told.append(())
        except ValueError:  # nobody else to tell
            told.append((rank,))
        except GroupFailure as error:
            told.append(tuple(failure.rank for failure in error.failures))
    assert any_failed(False, group) is False
    assert agree_sum([rank, -1], group=group) == (sum(group.ranks), -len(group.ranks))
    return group.ranks, told


def on_every_layout(rank: int, backend: str) -> dict[str, tuple[tuple[int, ...], Told]]:
    """Once for each layout: scopes that are groups, and a mesh with a mesh of one of its rows."""
    found = {}
    for name, scopes in LAYOUTS.items():
        source: list[Any] = groups_of(rank, scopes)
        if backend == "auto" and name == "chain":  # one of them as parameters, one as meshes
            source = [param for _, param in named_parameters_on(meshes_of(rank, scopes))]
        elif name == "star":
            source = meshes_of(rank, scopes)
        found[name] = one_failure_each(rank, source, backend)
    square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("rows", "cols"))
    row = DeviceMesh("cpu", [0, 1])
    source = [*[square] * (rank < 4), *[row] * (rank < 2)]
    found["mesh and sub-mesh"] = one_failure_each(rank, source, backend)
    return found


@pytest.mark.parametrize("backend", ["auto", "sweep", "passes"])
def test_a_failure_on_any_rank_reaches_all_that_are_tied_and_no_others(backend: str) -> None:
    by_rank = on_ranks(on_every_layout, 6, backend)
    for name, scopes in {**LAYOUTS, "mesh and sub-mesh": SQUARE}.items():
        tied = {rank: (rank,) for rank in range(6)}
        tied |= {rank: ranks for ranks in components(scopes) for rank in ranks}
        for rank, found in enumerate(by_rank):
            told = [(odd,) if odd in tied[rank] else () for odd in range(6)]
            assert found[name] == (tied[rank], told), (name, rank)


def steps_on(
    rank: int, scopes: Sequence[tuple[int, ...]], reverse: Sequence[int], mode: ShardedMode
) -> tuple[list[str], bool] | None:
    """The optimizer's step fails on each rank in turn, then works; None without parameters."""
    params = named_parameters_on(meshes_of(rank, scopes))
    if not params:
        return None
    if rank in reverse:
        params.reverse()  # meshes are met in another order than on the other ranks
    optimizer = Muon(params, sharded_mode=mode)
    before = snapshot(optimizer)
    texts = []
    for odd in range(dist.get_world_size()):

        def closure(odd: int = odd) -> float:
            if rank == odd:
                raise ValueError("no data")
            return 1.0

        texts.append(str(caught(lambda: optimizer.step(closure))))
        if texts[-1] == "None":  # the odd one is not tied to this one
            before = snapshot(optimizer)
    unchanged = caught(lambda: assert_unchanged(optimizer, before)) is None
    optimizer.step()
    return texts, unchanged and len(optimizer.state) == len(params)


def steps_on_every_layout(rank: int, reverse: Sequence[int], mode: ShardedMode) -> dict[str, Any]:
    return {name: steps_on(rank, scopes, reverse, mode) for name, scopes in LAYOUTS.items()}


@pytest.mark.parametrize("mode", ["exact", "distributed"])
@pytest.mark.parametrize(
    "reverse", [(), (1, 2)], ids=["in order", "in another order on some ranks"]
)
def test_optimizers_on_overlapping_meshes_fail_together_and_go_on(
    reverse: Sequence[int], mode: ShardedMode
) -> None:
    by_rank = on_ranks(steps_on_every_layout, 6, reverse, mode)
    for name, scopes in LAYOUTS.items():
        tied = {rank: ranks for ranks in components(scopes) for rank in ranks}
        for rank, found in enumerate(by_rank):
            assert (found[name] is not None) == (rank in tied)
            texts, fine = found[name] or ([], True)
            assert fine, (name, rank)
            for odd, text in enumerate(texts):
                failed = odd in tied[rank]
                assert (f"Muon.step failed on rank {odd}" in text) is failed
                assert (text == "None") is not failed


def halves_on_two_meshes(rank: int) -> list[str]:
    """Owners compute a matrix on ranks 0 and 1; the other half lives on all three."""
    *narrow, wide = meshes_of(rank, ((0, 1), (0, 1, 2)))
    matrices = named_parameters_on(narrow)
    others = [(f"other {name}", param) for name, param in named_parameters_on([wide])]
    optimizer = Hybrid(matrices, others, sharded_mode="distributed")
    return [str(caught(optimizer.step)) for _ in range(2)]


def test_a_rank_without_matrices_takes_part_in_the_agreement_on_those_of_others() -> None:
    assert on_ranks(halves_on_two_meshes, 3) == (["None", "None"],) * 3


def unequal_halves(rank: int) -> tuple[str, list[tuple[str, str]]]:
    """One end of the chain holds another parameter than its neighbour; only they are named."""
    params = named_parameters_on(meshes_of(rank, CHAIN))
    if rank == 3:
        params = [("another name", param) for _, param in params]
    error = caught(Muon(params).step)
    assert isinstance(error, consensus.Disagreement), error
    return str(error), [(value, str(ranks)) for value, ranks in error.values.items()]


def test_a_disagreement_on_one_mesh_names_only_its_ranks_and_reaches_all() -> None:
    by_rank = on_ranks(unequal_halves, 4)
    assert len({text for text, _ in by_rank}) == 1
    for text, values in by_rank:
        assert "another name" in text
        assert sorted(ranks for _, ranks in values) == ["(2,)", "(3,)"]


def two_optimizers(rank: int) -> list[str]:
    """Two optimizers, one a mesh; stepped one after the other in the same order on all ranks."""
    meshes = meshes_of(rank, CHAIN[:2])
    optimizers = [Muon([named]) for named in named_parameters_on(meshes)]
    return [str(caught(optimizer.step)) for optimizer in optimizers for _ in range(2)]


def test_optimizers_of_one_mesh_each_vote_apart() -> None:
    first, second, third = on_ranks(two_optimizers, 3)
    assert (first, second, third) == (["None"] * 2, ["None"] * 4, ["None"] * 2)


def interrupted_while_planning(rank: int) -> BaseException | None:
    """The end of a chain that learns the plan from its neighbour gets a Ctrl-C as it waits."""
    groups = groups_of(rank, CHAIN[:2])
    if rank == 2:
        StoreClient.wait_for_all = _interrupt  # type: ignore[method-assign]
    return caught(lambda: control_group(groups, timeout=4 * LIVENESS_S).prepare())


def _interrupt(*args: Any, **options: Any) -> NoReturn:
    raise KeyboardInterrupt


def test_ranks_that_plan_are_told_of_one_that_is_interrupted() -> None:
    """Long before their own deadline, which is beyond that of this test."""
    *peers, interrupted = on_ranks(interrupted_while_planning, 3)
    assert isinstance(interrupted, KeyboardInterrupt)
    for error in peers:
        assert isinstance(error, LateRanks)
        assert "a rank was interrupted by KeyboardInterrupt" in str(error)

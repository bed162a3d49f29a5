"""Scopes that overlap tie the ranks of all of them: a failure on one end reaches the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import consensus
from adapters import Hybrid, Muon
from adapters.options import ShardedMode
from consensus import GroupFailure, any_failed, control_group, fail_together
from consensus.testing import assert_unchanged, snapshot
from tests.gloo._cases import caught, on_ranks
from tests.threaded.muon_cases import random_matrices, shard

pytestmark = pytest.mark.slow

CHAIN = ((0, 1), (1, 2), (2, 3))
STAR = ((0, 1), (0, 2), (0, 3))
NESTED = ((0, 1, 2, 3), (1, 2))
RING = ((0, 1), (1, 2), (2, 3), (0, 3))
WIDE_AND_NARROW = ((0, 1, 2), (2, 3))
APART = ((0, 1), (2, 3))


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


def one_failure_each(
    rank: int, scopes: Sequence[tuple[int, ...]], kind: str
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Let each rank fail in turn; return who votes, and who failed as this rank was told."""
    source: Any = {"groups": groups_of, "meshes": meshes_of, "parameters": meshes_of}[kind](
        rank, scopes
    )
    if kind == "parameters":
        source = [param for _, param in named_parameters_on(source)]
    group = control_group(source)
    told: list[tuple[int, ...]] = []
    for odd in range(dist.get_world_size()):
        try:
            with fail_together("evaluate", group):
                if rank == odd:
                    raise ValueError("here")
            told.append(())
        except GroupFailure as error:
            told.append(tuple(failure.rank for failure in error.failures))
    assert any_failed(False, group) is False
    return group.ranks, told


@pytest.mark.parametrize("kind", ["groups", "meshes", "parameters"])
def test_a_failure_at_one_end_of_a_chain_reaches_the_other(kind: str) -> None:
    expected = ((0, 1, 2, 3), [(0,), (1,), (2,), (3,)])
    assert on_ranks(one_failure_each, 4, CHAIN, kind) == (expected,) * 4


@pytest.mark.parametrize("scopes", [STAR, NESTED, RING, WIDE_AND_NARROW])
def test_a_failure_reaches_every_rank_that_is_tied(scopes: Sequence[tuple[int, ...]]) -> None:
    expected = ((0, 1, 2, 3), [(0,), (1,), (2,), (3,)])
    assert on_ranks(one_failure_each, 4, scopes, "groups") == (expected,) * 4


def test_a_failure_does_not_reach_ranks_that_are_not_tied() -> None:
    low, high = ((0, 1), [(0,), (1,), (), ()]), ((2, 3), [(), (), (2,), (3,)])
    assert on_ranks(one_failure_each, 4, APART, "groups") == (low, low, high, high)


def steps_on(
    rank: int, scopes: Sequence[tuple[int, ...]], reverse: Sequence[int], mode: ShardedMode
) -> tuple[list[str], bool]:
    """The optimizer's step fails on each rank in turn, then works."""
    params = named_parameters_on(meshes_of(rank, scopes))
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
    unchanged = caught(lambda: assert_unchanged(optimizer, before)) is None
    optimizer.step()
    return texts, unchanged and len(optimizer.state) == len(params)


@pytest.mark.parametrize("mode", ["exact", "distributed"])
@pytest.mark.parametrize("reverse", [(), (1,)], ids=["in order", "in another order on one rank"])
@pytest.mark.parametrize(
    "scopes",
    [CHAIN, RING, NESTED, WIDE_AND_NARROW],
    ids=["chain", "ring", "nested", "wide and narrow"],
)
def test_optimizers_on_overlapping_meshes_fail_together_and_go_on(
    scopes: Sequence[tuple[int, ...]], reverse: Sequence[int], mode: ShardedMode
) -> None:
    by_rank = on_ranks(steps_on, 4, scopes, reverse, mode)
    for texts, fine in by_rank:
        assert fine
        for odd, text in enumerate(texts):
            assert f"Muon.step failed on rank {odd}" in text


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


def two_optimizers(rank: int, tied: bool) -> list[str]:
    """Two optimizers, one a mesh; stepped one after the other in the same order on all ranks."""
    scopes = CHAIN[:2] if tied else APART
    meshes = meshes_of(rank, scopes)
    optimizers = [Muon([named]) for named in named_parameters_on(meshes)]
    return [str(caught(optimizer.step)) for optimizer in optimizers for _ in range(2)]


def test_optimizers_of_one_mesh_each_vote_apart() -> None:
    first, second, third = on_ranks(two_optimizers, 3, True)
    assert (first, second, third) == (["None"] * 2, ["None"] * 4, ["None"] * 2)

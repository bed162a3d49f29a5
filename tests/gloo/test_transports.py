"""How parcels travel changes no bit; failures travel along; and all ranks take the same way."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, get_args

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import consensus
from adapters import GefenMuon, Muon
from adapters._base import VotingOptimizer
from adapters._transports import Transport
from tests.gloo._cases import Met, caught, on_ranks
from tests.gloo.data_phase_cases import FSDP_OVER_TP
from tests.gloo.step_cases import (
    Contents,
    changes,
    contents,
    give_gradients,
    met_in,
    parameters,
)
from tests.gloo.test_muon_exact import Collectives
from tests.gloo.test_owner_faults import (
    BUCKET_BYTES,
    HSDP,
    ROWS_ON_2,
    ROWS_ON_3,
    Fault,
    Meshes,
    Run,
    matrices_on,
    pair_on,
    possible,
    problems,
    suffer,
)

pytestmark = pytest.mark.slow

WAYS: tuple[Transport, ...] = get_args(Transport)
OTHERS: tuple[Transport, ...] = ("p2p", "gather")
ON: tuple[Meshes, ...] = (ROWS_ON_2, ROWS_ON_3, HSDP, FSDP_OVER_TP)
KINDS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (Muon, {}),
    (GefenMuon, {}),
    (GefenMuon, {"normuon": True, "cautious": True}),
)
NUM_STEPS = 2


def trained(cls: Any, on: Meshes, transport: Transport, **options: Any) -> Contents:
    mesh = init_device_mesh("cpu", on[0])
    named = parameters(matrices_on(mesh), mesh, on[1]).items()
    optimizer: VotingOptimizer = cls(named, lr=0.02, sharded_mode="distributed", **options)
    optimizer.bucket_bytes, optimizer.transport = BUCKET_BYTES, transport
    for seed in range(NUM_STEPS):
        give_gradients(optimizer, seed)
        optimizer.step()
    return contents(optimizer)


def every_way(rank: int, on: Meshes) -> dict[str, list[str]]:
    """What differs from all_to_all."""
    found = {}
    for number, (cls, options) in enumerate(KINDS):
        first = trained(cls, on, "all_to_all", **options)
        assert len(first) > math.prod(on[0])
        for way in OTHERS:
            found[f"{number} {way}"] = changes(first, trained(cls, on, way, **options))
    return found


@pytest.mark.parametrize("on", ON, ids=str)
def test_all_ways_lead_to_the_same_bits(on: Meshes) -> None:
    for found in on_ranks(every_way, math.prod(on[0]), on):
        assert len(found) == len(KINDS) * len(OTHERS)
        assert {way: differences for way, differences in found.items() if differences} == {}


# ---- a rank that fails ----


def faults_on(rank: int, on: Meshes) -> list[Run]:
    """At both ends of a way, in the first round and in the last."""
    mesh, placements = init_device_mesh("cpu", on[0]), on[1]
    found = []
    for way, cls in zip(OTHERS, (Muon, GefenMuon), strict=True):
        pair = pair_on(mesh, placements, cls)
        pair.optimizer.transport = pair.twin.transport = way
        pair.healthy_step()
        for stage, at in itertools.product(("pack", "orthogonalize"), (0, 2)):
            faults = possible(pair, [Fault(stage, at, (bad,)) for bad in range(mesh.size())])
            found.append(suffer(rank, pair, faults[at % len(faults)]))
    return found


@pytest.mark.parametrize("on", ON, ids=str)
def test_a_failure_reaches_all_ranks_by_each_way(on: Meshes) -> None:
    by_rank = on_ranks(faults_on, math.prod(on[0]), on)
    found = [problems(runs) for runs in zip(*by_rank, strict=True)]
    assert len(found) == 2 * 2 * 2
    assert list(filter(None, found)) == []


# ---- what travels ----


def second_step(rank: int, on: Meshes, way: Transport) -> tuple[dict[str, int], list[int]]:
    """The collectives of a step that goes another way, and the bytes this rank gives to each."""
    pair = pair_on(init_device_mesh("cpu", on[0]), on[1])
    pair.give_gradients()
    pair.optimizer.step()
    pair.optimizer.transport = way  # from now on: plans of another way are no use
    with Collectives() as seen:
        pair.optimizer.step()
    return dict(seen.calls), seen.bytes


# There the first rank has most, one element a rank included; back, all owners have as much.
SHARDS = {
    ROWS_ON_2: [12 + 12, 18 + 15, 9 + 10 + 8 + 4],
    ROWS_ON_3: [8 + 12 + 8, 9 + 9 + 9, 6 + 5 + 6 + 8 + 3 + 8],
}
WHOLE = [24, 27, 15 + 8]


def gathered(on: Meshes) -> list[int]:
    """Bytes of each, in the order of the pipeline."""
    (num_ranks,), (first, second, third) = on[0], SHARDS[on]
    numels = [first, second, WHOLE[0], third, WHOLE[1], WHOLE[2]]
    return [2 * (numel + num_ranks) for numel in numels]


@pytest.mark.parametrize("on", SHARDS, ids=str)
def test_gathers_cost_as_much_as_the_longest_on_each_rank(on: Meshes) -> None:
    for calls, given in on_ranks(second_step, math.prod(on[0]), on, "gather"):
        assert calls == {"gather": 6}
        assert given == gathered(on)


def test_point_to_point_is_a_send_to_each_peer_and_a_receive_from_each() -> None:
    for calls, _ in on_ranks(second_step, 3, ROWS_ON_3, "p2p"):
        assert calls == {"send": 2 * 6, "recv": 2 * 6}


# ---- ranks that would not take the same way ----


def refused(rank: int, ways: tuple[Any, ...]) -> Met:
    pair = pair_on(init_device_mesh("cpu", (2,)), (Shard(0),))
    pair.healthy_step()
    pair.give_gradients()
    pair.optimizer.transport = ways[rank]
    met = met_in(pair.optimizer, pair.optimizer.step)
    pair.optimizer.transport = "gather"
    error = caught(pair.step)
    return replace(met, then=(repr(error),) if error else tuple(pair.differences()))


@pytest.mark.parametrize("ways", [("all_to_all", "p2p"), ("gather", "all_to_all")], ids=str)
def test_ranks_that_would_take_different_ways_disagree(ways: tuple[Any, ...]) -> None:
    for met in on_ranks(refused, 2, ways):
        assert isinstance(met.error, consensus.Disagreement)
        assert "transport" in met.text
        assert (met.changed, met.left, met.then) == ("", (), ())


@pytest.mark.parametrize("ways", [("all_to_all", "post"), ("post", "post")], ids=str)
def test_a_way_that_is_none_is_refused_on_all_ranks(ways: tuple[Any, ...]) -> None:
    for met in on_ranks(refused, 2, ways):
        assert isinstance(met.error, consensus.GroupFailure)
        assert {each.type_name for each in met.error.failures} == {"ValueError"}
        assert [each.rank for each in met.error.failures] == [
            rank for rank in range(2) if ways[rank] == "post"
        ]
        assert """transport must be "all_to_all" or "p2p" or "gather", but is: 'post'""" in met.text
        assert (met.changed, met.left, met.then) == ("", (), ())

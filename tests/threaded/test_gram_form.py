"""The gram form on shards: the bits of one device in both modes, and ranks agree on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import consensus
from adapters import GefenMuon, Muon
from adapters.options import ShardedMode
from consensus.testing._threads import run_threads
from tests.threaded.muon_cases import Case, Twins, local, named, names, slice_of

# Long enough for the gram form, several of a shape for a stack, and one that is nearly square.
SHAPES = ((6, 24), (33, 5), (1, 7), (40, 96), (40, 96), (9, 8))
CASES = (
    Case("rows", (2,), (Shard(0),), SHAPES),
    Case("columns", (2,), (Shard(1),), SHAPES),
    Case("copies of rows", (2, 2), (Replicate(), Shard(0)), SHAPES),
)


def against_one_device(rank: int, case: Case, mode: ShardedMode) -> list[int]:
    """Three steps of both; returns the matrices whose bits differ, or that took another form."""
    twins = Twins.of(case)
    options: dict[str, Any] = {"lr": 0.02, "ns_form": "gram"}
    ours = Muon(named(twins.sharded), sharded_mode=mode, **options)
    whole = Muon(named(twins.whole), **options)
    for seed in range(3):
        twins.set_gradients(seed=seed)
        ours.step()
        whole.step()
    return [
        i
        for i, (param, twin) in enumerate(zip(twins.sharded, twins.whole, strict=True))
        if not torch.equal(local(param), slice_of(twin.detach(), twins.mesh, twins.placements))
    ]


@pytest.mark.parametrize("mode", ["exact", "distributed"])
@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_both_modes_have_the_bits_of_one_device(case: Case, mode: ShardedMode) -> None:
    found = run_threads(against_one_device, case.world_size, case, mode).values()
    assert found == ([],) * case.world_size


def with_a_form_of_its_own(rank: int, kind: type[Muon] | type[GefenMuon]) -> tuple[str, bool]:
    twins = Twins.of(CASES[0])
    optimizer = kind(named(twins.sharded), ns_form="gram" if rank else "standard")
    before = [local(param).clone() for param in twins.sharded]
    twins.set_gradients(seed=1)
    try:
        optimizer.step()
    except consensus.Disagreement as error:
        same = all(map(torch.equal, before, map(local, twins.sharded)))
        return str(error), same
    return "stepped", False


@pytest.mark.parametrize("kind", [Muon, GefenMuon])
def test_ranks_that_differ_in_the_form_are_told(kind: type[Muon] | type[GefenMuon]) -> None:
    for text, same in run_threads(with_a_form_of_its_own, 2, kind).values():
        assert "ns_form" in text
        assert same

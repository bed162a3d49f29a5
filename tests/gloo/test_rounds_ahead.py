"""Rounds in a pipeline: the same bits, no memory reused too early, failures heard.

The exchanges here are as lazy as can be: nothing moves before it is waited for, and until then
nobody may touch what is sent or received.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from adapters import GefenMuon, Muon, _by_owners
from adapters._base import VotingOptimizer
from adapters._exchange import Courier
from adapters._parcels import Leg
from adapters._transports import CARRIES
from tests.gloo._cases import on_ranks
from tests.gloo.data_phase_cases import FSDP_OVER_TP
from tests.gloo.step_cases import Contents, Pair, changes, contents, give_gradients, parameters
from tests.gloo.test_owner_faults import (
    BUCKET_BYTES,
    HSDP,
    NUM_ROUNDS,
    ROWS_ON_2,
    ROWS_ON_3,
    Fault,
    Meshes,
    Run,
    matrices_on,
    problems,
    rounds_of,
    suffer,
)

pytestmark = pytest.mark.slow

ON: tuple[Meshes, ...] = (ROWS_ON_2, ROWS_ON_3, HSDP, FSDP_OVER_TP)
SENTINEL = -21555  # of int16: no number that a matrix here has
Make = Callable[[], VotingOptimizer]


@contextmanager
def without_a_pipeline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_by_owners, "AHEAD", 0)
        yield


@contextmanager
def nothing_moves_before_it_is_waited_for() -> Iterator[list[int]]:
    """Yield how many exchanges were under way at each start, that one included."""
    carry, under_way, noted = CARRIES["all_to_all"], 0, []

    def lazily(received: Tensor, sent: Tensor, leg: Leg, group: Any, scratch: Tensor) -> Any:
        nonlocal under_way
        under_way += 1
        noted.append(under_way)
        bits, target = sent.view(torch.int16), received.view(torch.int16)
        as_given = bits.clone()
        target.fill_(SENTINEL)

        def wait() -> None:
            nonlocal under_way
            under_way -= 1
            assert torch.equal(bits, as_given), "what is sent was overwritten"
            assert bool((target == SENTINEL).all()), "what is received was overwritten"
            carry(received, sent, leg, group, scratch)()

        return wait

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CARRIES, "all_to_all", lazily)
        yield noted


def trained(make: Make) -> Contents:
    optimizer = make()
    for seed in range(2):
        give_gradients(optimizer, seed)
        optimizer.step()
    return contents(optimizer)


def by_owners(named: Any, cls: Any, **options: Any) -> VotingOptimizer:
    made: VotingOptimizer = cls(named, lr=0.02, sharded_mode="distributed", **options)
    made.bucket_bytes = BUCKET_BYTES
    return made


def compared(make: Make) -> list[str]:
    """What is not as without a pipeline, and as without lazy exchanges."""
    with without_a_pipeline():
        plain = trained(make)
        with nothing_moves_before_it_is_waited_for() as one_by_one:
            found = changes(plain, trained(make))
    found += changes(plain, trained(make))
    with nothing_moves_before_it_is_waited_for() as under_way:
        found += changes(plain, trained(make))
    # At the start of an exchange the parcels of the next round are still on their way, or the
    # updates of the one before.
    if (max(one_by_one), max(under_way)) != (1, 3):
        found.append(f"under way: {max(one_by_one)}, then {max(under_way)}")
    return found


def on_one_mesh(rank: int, on: Meshes) -> list[str]:
    mesh, found = init_device_mesh("cpu", on[0]), []
    for cls, options in ((Muon, {}), (GefenMuon, {"normuon": True, "cautious": True})):

        def make(cls: Any = cls, options: Any = options) -> VotingOptimizer:
            return by_owners(parameters(matrices_on(mesh), mesh, on[1]).items(), cls, **options)

        found += compared(make)
    return found


@pytest.mark.parametrize("on", ON, ids=str)
def test_a_pipeline_gives_the_same_bits(on: Meshes) -> None:
    size = math.prod(on[0])
    assert on_ranks(on_one_mesh, size, on) == ([],) * size


def of_two_crews(rank: int) -> Make:
    """All three ranks, and two of them: crews that share ranks, but no group."""
    world, two = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [1, 2])

    def make() -> VotingOptimizer:
        named: list[tuple[str, Any]] = [*parameters(matrices_on(world), world).items()]
        if rank in (1, 2):
            some = parameters({f"{name} of two": at for name, at in matrices_on(two).items()}, two)
            named = [*some.items(), *named] if rank == 1 else [*named, *some.items()]
        return by_owners(named, Muon)

    return make


def of_sharing_crews(rank: int) -> Make:
    """Two crews share a group of ranks 0 and 2; between them in order is one with rank 0 alone.

    In one pipeline of all crews, rank 2 would start the second's exchanges too early for rank 0.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    some = DeviceMesh("cpu", [0, 1, 3])

    def make() -> VotingOptimizer:
        named: list[tuple[str, Any]] = []
        for number, (on, where) in enumerate(
            [(mesh, FSDP_OVER_TP[1]), (some, (Shard(0),)), (mesh["a"], (Shard(0),))]
        ):
            shapes = {f"{name} {number}": at for name, at in matrices_on(on).items()}
            if on is not some or rank != 2:
                named += parameters(shapes, on, where).items()
        return by_owners(named, Muon)

    return make


def on_crews(rank: int, crews: Callable[[int], Make]) -> list[str]:
    return compared(crews(rank))


@pytest.mark.parametrize(("crews", "size"), [(of_two_crews, 3), (of_sharing_crews, 4)])
def test_crews_that_overlap_do_not_mix_their_rounds(crews: Any, size: int) -> None:
    assert on_ranks(on_crews, size, crews) == ([],) * size


# ---- in which order ----


def order(rank: int) -> list[str]:
    """What one step does with its rounds."""
    noted: list[str] = []
    made: list[Courier] = []
    mesh = init_device_mesh("cpu", (2,))
    optimizer = by_owners(parameters(matrices_on(mesh), mesh).items(), Muon)
    give_gradients(optimizer, 1)

    def noting(name: str, call: Callable[[Courier], Any]) -> Callable[[Courier], Any]:
        def wrapped(courier: Courier) -> Any:
            if courier not in made:
                made.append(courier)
            noted.append(f"{name} {made.index(courier)}")
            return call(courier)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name in ("to_owners", "at_owners", "views", "from_owners", "back_from_owners"):
            patch.setattr(Courier, name, noting(name, getattr(Courier, name)))
        optimizer.step()
    return noted


EXPECTED = """
to_owners 0, to_owners 1, at_owners 0, views 0, from_owners 0,
to_owners 2, at_owners 1, views 1, from_owners 1, back_from_owners 0,
at_owners 2, views 2, from_owners 2, back_from_owners 1, back_from_owners 2
"""


def test_parcels_travel_one_round_ahead_and_updates_one_behind() -> None:
    expected = [each.strip() for each in EXPECTED.split(",")]
    assert on_ranks(order, 2) == (expected,) * 2


# ---- a rank that fails ----


def every_fault(rank: int, on: Meshes) -> list[Run]:
    mesh = init_device_mesh("cpu", on[0])

    def make() -> VotingOptimizer:
        return by_owners(parameters(matrices_on(mesh), mesh, on[1]).items(), Muon)

    pair, found = Pair(make(), make()), []
    with nothing_moves_before_it_is_waited_for():
        pair.healthy_step()
        rounds = rounds_of(pair)
        assert len(rounds) == NUM_ROUNDS
        for stage, at in itertools.product(("pack", "orthogonalize", "views"), range(NUM_ROUNDS)):
            faults = [Fault(stage, at, (bad,)) for bad in range(mesh.size())]
            able = [fault for fault in faults if fault.strikes(fault.ranks[0], rounds[at])]
            found.append(suffer(rank, pair, (able[at % len(able)],)))
    return found


@pytest.mark.parametrize("on", ON, ids=str)
def test_a_failure_in_any_round_stops_all(on: Meshes) -> None:
    by_rank = on_ranks(every_fault, math.prod(on[0]), on)
    found = [problems(runs) for runs in zip(*by_rank, strict=True)]
    assert len(found) == 3 * NUM_ROUNDS
    assert list(filter(None, found)) == []

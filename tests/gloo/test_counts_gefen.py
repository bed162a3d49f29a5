"""Exactly how much Gefen, GefenMuon and Hybrid communicate: votes, what they learn, and data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import consensus
from adapters import _reshard
from adapters._base import VotingOptimizer
from adapters.gefen import Gefen, GefenMuon
from adapters.hybrid import Hybrid
from consensus.testing._processes import run_ranks
from tests.gloo._cases import Recorder, on_ranks
from tests.gloo.step_cases import (
    KINDS,
    MATRICES,
    OTHERS,
    ROWS,
    Shapes,
    give_gradients,
    kind_of,
    parameters,
)
from tests.gloo.test_counts import position
from tests.gloo.test_muon_exact import Collectives

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows on 2 ranks": ((2,), (Shard(0),)),
    "HSDP": ((2, 2), (Replicate(), Shard(0))),
    "FSDP over TP": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
}
AMP: tuple[dict[str, float], ...] = (
    {},
    {"found_inf": 0.0},
    {"grad_scale": 2.0},
    {"found_inf": 0.0, "grad_scale": 2.0},
    {"found_inf": 1.0, "grad_scale": 2.0},
)


# ---- votes of a healthy step ----


def words_of_steps(optimizer: VotingOptimizer) -> tuple[list[int], list[int]]:
    """Return words of maxima and of sums: a plain step, one for each AMP control, an overflow."""
    recorder = Recorder.on(optimizer)
    give_gradients(optimizer, 1)
    optimizer.step()  # learns
    recorder.words.clear()
    recorder.sums.clear()
    for seed, controls in enumerate(AMP):
        give_gradients(optimizer, 2 + seed)
        vars(optimizer).update({name: torch.tensor([at]) for name, at in controls.items()})
        optimizer.step()
        for name in controls:
            delattr(optimizer, name)
    # Copies: those that listen later on the same channel are heard by this one too.
    return list(recorder.words), list(recorder.sums)


def words_of_all(rank: int, layout: str) -> dict[str, tuple[list[int], list[int]]]:
    shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape)
    return {kind.name: words_of_steps(kind.make(mesh, placements)) for kind in KINDS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_healthy_step_of_any_optimizer_takes_one_message_of_two_words(layout: str) -> None:
    size = torch.Size(LAYOUTS[layout][0]).numel()
    words: tuple[list[int], list[int]] = ([2] * len(AMP), [])
    expected = {kind.name: words for kind in KINDS}
    assert on_ranks(words_of_all, size, layout) == (expected,) * size


def on_two_meshes(rank: int, backup: Any) -> list[tuple[list[int], tuple[int, ...]]]:
    """Muon's half on one mesh, the backup half on another that overlaps with it or encloses it."""
    pair, chain = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    world = DeviceMesh("cpu", [0, 1, 2])
    found = []
    for other, its_ranks in ((chain, (1, 2)), (world, (0, 1, 2))):
        muon = parameters(MATRICES, pair if rank < 2 else None)
        muon = muon if rank < 2 else {}
        others = parameters(OTHERS, other) if rank in its_ranks else {}
        optimizer = Hybrid(muon.items(), others.items(), lr=0.02, backup=backup)
        words, sums = words_of_steps(optimizer)
        assert sums == []
        found.append((words, consensus.control_group(optimizer).ranks))
    return found


@pytest.mark.parametrize("backup", ["gefen", "adamw"])
def test_halves_on_two_meshes_share_one_message(backup: str) -> None:
    # One pair of words for all ranks, and one for each mesh that has not all of them.
    expected = [([6] * len(AMP), (0, 1, 2)), ([4] * len(AMP), (0, 1, 2))]
    assert on_ranks(on_two_meshes, 3, backup) == (expected,) * 3


def unsharded(rank: int) -> list[tuple[bool, int, dict[str, int], list[str]]]:
    found = []
    makers: list[Callable[[Any], VotingOptimizer]] = [
        lambda named: Gefen(named, lr=0.02),
        lambda named: GefenMuon(named, lr=0.02),
        lambda named: Hybrid(named, parameters(OTHERS, None).items(), lr=0.02),
        lambda named: Hybrid(named, parameters(OTHERS, None).items(), lr=0.02, backup="adamw"),
    ]
    for make in makers:
        optimizer = make(list(parameters(MATRICES, None).items()))
        before = position()
        with Collectives() as seen:
            for seed in (1, 2):
                give_gradients(optimizer, seed + 10 * rank)
                optimizer.step()
        group = consensus.control_group(optimizer)
        ours = [thread.name for thread in threading.enumerate() if "consensus" in thread.name]
        local = group.is_local and group.channel is None
        found.append((local, position() - before, dict(seen.calls), ours))
    return found


def test_unsharded_optimizers_take_no_message_no_group_and_no_thread() -> None:
    assert on_ranks(unsharded, 2) == ([(True, 0, {}, [])] * 4,) * 2


def scoped(rank: int) -> tuple[list[int], list[int]]:
    params = parameters(MATRICES, None).items()
    return words_of_steps(Gefen(params, lr=0.02, codebook_scope=dist.group.WORLD))


def test_a_scope_over_plain_parameters_takes_one_message_a_step() -> None:
    assert on_ranks(scoped, 2) == (([2] * len(AMP), []),) * 2


# ---- the step that learns ----


def learning(rank: int, name: str) -> tuple[list[int], list[int]]:
    optimizer = kind_of(name).make(init_device_mesh("cpu", (2,)))
    recorder = Recorder.on(optimizer)
    give_gradients(optimizer, 1)
    optimizer.step()
    return recorder.words, recorder.sums


BINS = 4096


@pytest.mark.parametrize(
    ("name", "agreements", "sums"),
    [
        # The step's own vote, six stages, and two sums: how many plain parameters there are, and
        # the histograms.
        ("Gefen", 9, [2, BINS]),
        ("GefenMuon", 9, [2, BINS]),
        ("Hybrid, backup Gefen", 9, [2, 2 * BINS]),
        ("Hybrid, backup AdamW", 9, [2, BINS]),
        # Two more sums: the names of three plain parameters on each rank, and three periods.
        ("Hybrid, only Gefen sharded", 11, [2, 6, 3, 2 * BINS]),
        ("Hybrid, only AdamW sharded", 11, [2, 6, 3, BINS]),
        ("Hybrid without matrices, Gefen", 9, [2, BINS]),
        ("Hybrid without matrices, AdamW", 1, []),
    ],
)
def test_a_step_that_learns_takes_so_many_agreements(
    name: str, agreements: int, sums: list[int]
) -> None:
    assert on_ranks(learning, 2, name) == (([2] * agreements, sums),) * 2


# ---- data ----

Sent: TypeAlias = list[tuple[str, int]]  # what a collective does, and the bytes given to it
MAX, SUM, GATHER = "max", "sum", "gather"
WORD = 1  # element of each message that says whether its sender failed
_NAMES = {dist.ReduceOp.MAX: MAX, dist.ReduceOp.SUM: SUM}


@contextmanager
def listening() -> Iterator[Sent]:
    """Note each collective that moves data; torch's own account must come to the same number."""
    sent: Sent = []
    all_reduce, gather = dist.all_reduce, _reshard.all_gather

    def reducing(tensor: Tensor, op: Any, group: Any) -> None:
        sent.append((_NAMES[op], tensor.nbytes))
        all_reduce(tensor, op=op, group=group)

    def gathering(output: Tensor, tensor: Tensor, group: Any) -> None:
        sent.append((GATHER, tensor.nbytes))
        gather(output, tensor, group=group)

    with pytest.MonkeyPatch.context() as patch, Collectives() as seen:
        patch.setattr(dist, "all_reduce", reducing)
        patch.setattr(_reshard, "all_gather", gathering)
        yield sent
    assert seen.bytes == [size for _, size in sent]


def data_of(optimizer: VotingOptimizer) -> tuple[Sent, Sent]:
    """Return the collectives of the first step, which learns, and of the third."""
    with listening() as first:
        give_gradients(optimizer, 1)
        optimizer.step()
    give_gradients(optimizer, 2)
    optimizer.step()
    with listening() as third:
        give_gradients(optimizer, 3)
        optimizer.step()
    return first, third


ONES: dict[str, Any] = {"force_1d_period_one": True, "force_2d_period_one": True}
PLAIN: Shapes = {"a": (6, 4), "b": (5, 3), "c": (7,)}
# A prime number of elements from 8 on is one block: nothing else divides it.
PRIMES: Shapes = {"p": (13,), "q": (11,)}
PRIME_MATRICES: Shapes = {"p": (13, 1), "q": (17, 1)}


def gefen_data(
    rank: int, shapes: Shapes, placements: Sequence[Placement], options: dict[str, Any]
) -> Sent:
    mesh = init_device_mesh("cpu", (2,) if len(placements) == 1 else (2, 2))
    named = parameters(shapes, mesh, placements).items()
    return data_of(Gefen(named, lr=0.02, **options))[1]


@pytest.mark.parametrize(
    ("shapes", "placements", "options", "expected"),
    [
        pytest.param(PLAIN, ROWS, {**ONES, "factored_v_2d": False}, [], id="nothing cut: none"),
        pytest.param(
            PLAIN, ROWS, ONES, [(SUM, 4 * (4 + 3 + WORD))], id="rows: a float for each column"
        ),
        pytest.param(
            PLAIN,
            (Replicate(), Shard(0)),
            ONES,
            [(SUM, 4 * (4 + 3 + WORD))],
            id="copies of rows: the same, between the parts",
        ),
        pytest.param(
            {"a": (6, 4), "b": (5, 3)},
            (Shard(1),),
            ONES,
            [(SUM, 4 * (4 + 6 + 3 + 5 + WORD))],
            id="columns: a float for each row too",
        ),
        pytest.param(
            {"a": (6, 4), "b": (5, 3)},
            (Shard(0), Shard(1)),
            ONES,
            [(SUM, 4 * (4 + 6 + 3 + 5 + WORD))] * 2,
            id="two cuts: twice",
        ),
        pytest.param(PLAIN, (Replicate(),), {}, [], id="copies: none"),
        pytest.param(PRIMES, ROWS, {}, [(MAX, 12), (SUM, 12)], id="two cut blocks: two floats"),
        pytest.param(
            {**PRIMES, "a": (6, 4)},
            ROWS,
            {"period_one_substrings": ["a"]},
            [(MAX, 12), (SUM, 12 + 16)],
            id="cut blocks and columns: together",
        ),
    ],
)
def test_gefen_moves_so_much(
    shapes: Shapes, placements: tuple[Placement, ...], options: dict[str, Any], expected: Sent
) -> None:
    size = 2 ** len(placements)
    assert run_ranks(gefen_data, size, shapes, placements, options).values() == (expected,) * size


def on_both_axes(rank: int) -> Sent:
    """Parameters on two axes of one mesh have two layouts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "other"))
    named = {**parameters({"a": (6, 4)}, mesh["one"]), **parameters({"b": (5, 3)}, mesh["other"])}
    return data_of(Gefen(named.items(), lr=0.02, **ONES))[1]


def test_each_layout_moves_its_own() -> None:
    for sent in run_ranks(on_both_axes, 4).values():
        assert sorted(sent) == [(SUM, 4 * (3 + WORD)), (SUM, 4 * (4 + WORD))]


def muon_data(rank: int, backup: str) -> tuple[Sent, Sent]:
    mesh = init_device_mesh("cpu", (2,))
    muon = parameters(PRIME_MATRICES, mesh).items()
    if not backup:
        return data_of(GefenMuon(muon, lr=0.02))
    others = parameters({"r": (11,), "s": (19,)}, mesh).items()
    return data_of(Hybrid(muon, others, lr=0.02, backup=backup))  # type: ignore[arg-type]


GATHERED = (GATHER, 2 * (7 + 9 + WORD))  # the larger parts, as bfloat16
# For each of two parameters: the largest square; sums for the one length to try, of six words,
# and then the largest element of its cut block.
LEARNED = [(MAX, 2 * 4), (SUM, 2 * 6 * 8), (MAX, 2 * 4)]


def test_gefen_muon_moves_what_muon_does_and_the_maxima_of_cut_blocks() -> None:
    step = [(MAX, 4 * (2 + WORD)), GATHERED]
    assert run_ranks(muon_data, 2, "").values() == ((LEARNED + step, step),) * 2


@pytest.mark.parametrize("backup", ["gefen", "adamw"])
def test_hybrid_moves_what_its_halves_do_and_learns_for_both_at_once(backup: str) -> None:
    step = [(MAX, 4 * (2 + WORD)), GATHERED]
    learned = LEARNED
    if backup == "gefen":
        step = [(MAX, 4 * (2 + WORD)), (SUM, 4 * (2 + WORD)), *step]  # the backup first
        learned = [(op, 2 * size) for op, size in LEARNED]
    assert run_ranks(muon_data, 2, backup).values() == ((learned + step, step),) * 2

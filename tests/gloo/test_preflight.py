"""Differences between ranks that a step must not paper over: the same error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import consensus
from consensus import Disagreement, GroupFailure
from tests.gloo._cases import Met, Recorder, Trained, caught, on_ranks, refused
from tests.threaded.muon_cases import named, shard

pytestmark = pytest.mark.slow


# ---- what is changed on one rank after a healthy step, and taken back afterwards ----


@dataclass(frozen=True)
class Difference:
    """What rank 1 does, what the error must say, and how it is undone for the next step."""

    name: str
    make: Callable[[Trained], None]
    says: tuple[str, ...]
    undo: Callable[[Trained], None] = lambda trained: None
    error: type[consensus.ConsensusError] = Disagreement


def option(name: str, value: object, says: str) -> Difference:
    def make(trained: Trained) -> None:
        trained.optimizer.param_groups[0][name] = value

    def undo(trained: Trained) -> None:
        trained.optimizer.param_groups[0][name] = trained.reference.param_groups[0][name]

    return Difference(name, make, (f"options: {name} of group 0", f"{says} on rank 1"), undo)


def without_gradient(*positions: int) -> Callable[[Trained], None]:
    def make(trained: Trained) -> None:
        for position in positions:
            trained.twins.sharded[position].grad = None

    return make


def found_inf(value: float) -> Callable[[Trained], None]:
    def make(trained: Trained) -> None:
        trained.optimizer.found_inf = torch.tensor([value])  # type: ignore[attr-defined]

    return make


def set_grad_scale(value: float) -> Callable[[Trained], None]:
    def make(trained: Trained) -> None:
        trained.optimizer.grad_scale = torch.tensor(value)  # type: ignore[attr-defined]

    return make


def swap(trained: Trained) -> None:
    for group in trained.optimizer.param_groups:
        group["params"][:2] = group["params"][1::-1]
        group["param_names"][:2] = group["param_names"][1::-1]


def set_gradient(make: Callable[[DTensor], torch.Tensor]) -> Callable[[Trained], None]:
    def give(trained: Trained) -> None:
        param = trained.twins.sharded[1]
        assert isinstance(param, DTensor)
        param.grad_dtype = None  # let torch take any
        param.grad = make(param)

    return give


def from_local(local: torch.Tensor, param: DTensor) -> DTensor:
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def ill_fitting(name: str, make: Callable[[DTensor], torch.Tensor], *says: str) -> Difference:
    return Difference(
        name, set_gradient(make), ("rank 1: ValueError: layer.1", *says), error=GroupFailure
    )


DIFFERENCES = (
    option("lr", 0.3, "0.3"),
    option("momentum", 0.5, "0.5"),
    option("weight_decay", 0.0, "0.0"),
    option("nesterov", False, "0.0"),
    option("ns_steps", 3, "3.0"),
    option("eps", 1e-5, "1e-05"),
    option("adjust_lr_fn", "match_rms_adamw", "'match_rms_adamw'"),
    Difference(
        "a gradient is missing",
        without_gradient(1),
        ("gradients: layer.1", "present on rank 0; missing on rank 1"),
    ),
    Difference(
        "all gradients are missing",
        without_gradient(0, 1, 2),
        ("gradients: layer.0", "also gradients: layer.1", "also gradients: layer.2"),
    ),
    Difference("two of one shape are swapped", swap, ("parameters: number 0",), undo=swap),
    Difference(
        "found_inf is NaN",
        found_inf(float("nan")),
        ("rank 1: ValueError: expected found_inf to be finite",),
        error=GroupFailure,
    ),
    Difference(
        "the loss scale is zero",
        set_grad_scale(0.0),
        ("rank 1: ValueError: expected grad_scale to be finite and > 0",),
        error=GroupFailure,
    ),
    ill_fitting("a sparse gradient", lambda p: torch.ones(p.shape).to_sparse(), "sparse_coo"),
    ill_fitting("a complex gradient", lambda p: from_local(p.to_local() + 0j, p), "complex64"),
    ill_fitting("a plain gradient", lambda p: torch.ones(p.shape), "DTensor", "plain Tensor"),
    ill_fitting(
        "a short shard", lambda p: from_local(p.to_local()[:1].detach(), p), "local (1, 4)"
    ),
    ill_fitting(
        "a replicated gradient",
        lambda p: shard(torch.ones(p.shape), p.device_mesh, [Replicate()]),
        "Replicate()",
    ),
    ill_fitting(
        "an unreduced gradient",
        lambda p: DTensor.from_local(torch.ones(p.shape), p.device_mesh, [Partial()]),
        "Partial",
    ),
    Difference(
        "a gradient of another dtype",
        set_gradient(lambda p: from_local(p.to_local().detach().bfloat16(), p)),
        ("gradients: layer.1", "present on rank 0; present as torch.bfloat16 on rank 1"),
    ),
)

# The first two have one shape: swapped, only their names tell them apart.
SHAPES = ((6, 4), (6, 4), (5, 3))


def each_difference(rank: int) -> list[Met]:
    """Train on through all of them: a refused step leaves the next one as it should be."""
    trained = Trained.on(shapes=SHAPES, lr=0.02)
    trained.healthy_step()
    found = []
    for difference in DIFFERENCES:
        trained.give_gradients()
        undo = partial(difference.undo, trained) if rank == 1 else bool
        if rank == 1:
            difference.make(trained)
        found.append(refused(trained, trained.optimizer.step, undo=undo))
    return found


def test_a_difference_is_the_same_error_on_every_rank_and_nothing_changes() -> None:
    first, second = on_ranks(each_difference, 2)
    for difference, mine, theirs in zip(DIFFERENCES, first, second, strict=True):
        assert mine.text == theirs.text, difference.name
        assert type(mine.error) is difference.error, mine.text
        missing = [part for part in difference.says if part not in mine.text]
        assert not missing, (difference.name, mine.text)
        assert (mine.changed, theirs.changed) == ("", ""), difference.name
        assert (mine.left, theirs.left) == ((), ()), difference.name
        assert (mine.then, theirs.then) == ((), ()), difference.name


def test_a_rank_may_lack_the_gradient_of_a_parameter_that_nobody_shares() -> None:
    assert on_ranks(plain_parameter_beside, 2) == ("stepped", "stepped")


def plain_parameter_beside(rank: int) -> str:
    trained = Trained.on()
    plain = nn.Parameter(torch.ones(3, 3))
    trained.optimizer.add_param_group({"params": [("plain", plain)]})
    trained.give_gradients()
    plain.grad = torch.ones(3, 3) if rank == 0 else None
    return str(caught(trained.optimizer.step) or "stepped")


# ---- what an optimizer's author brings ----


class Stopping(torch.optim.SGD):
    """SGD that votes, and agrees with the others on whether this is the last step."""

    stop = False
    width: object = 8

    def step(self, closure: Any = None) -> Any:
        with consensus.preflight(self) as vote:
            vote.range("stop", self.stop)
            vote.same("width", self.width)
            loss = vote.closure(closure)
        self.last = bool(vote.ranges.maximum[0])
        if not vote.skip:
            super().step()
        return loss


def stops_on_one_rank(rank: int) -> tuple[int, list[int]]:
    """Rank 1 is asked to stop in its third step; the flag rides in the step's own vote."""
    twins = Trained.on().twins
    optimizer = Stopping(named(twins.sharded), lr=0.1)
    recorder = Recorder.on(optimizer)
    steps = 0
    for number in range(10):
        twins.set_gradients(number)
        optimizer.stop = rank == 1 and number >= 2
        optimizer.step()
        steps += 1
        if optimizer.last:
            break
    return steps, recorder.words


def test_a_flag_of_the_user_rides_in_the_vote_and_stops_all_after_the_same_step() -> None:
    by_rank = on_ranks(stops_on_one_rank, 2)
    for steps, words in by_rank:
        assert steps == 3
        assert words[:3] == [2, 2, 2]
        assert len(words) == 4  # only the last step has something to say


class Tabled(torch.optim.SGD):
    """SGD whose ranks share a table with those they share a mesh with, and with nobody else."""

    def step(self, closure: Any = None) -> Any:
        with consensus.preflight(self) as vote:
            for ranks, table in self.tables.items():
                vote.same("table", table, ranks=ranks)
        return super().step(closure)

    tables: dict[tuple[int, ...], object]


CHAIN = ((0, 1), (1, 2))


def tables_of_meshes(rank: int) -> tuple[list[str], list[list[int]]]:
    """Meshes {0,1} and {1,2}; what is said, and the words of the messages of each step."""
    meshes = [DeviceMesh("cpu", list(ranks)) for ranks in CHAIN]
    params = [
        (f"of {ranks}", nn.Parameter(shard(torch.ones(4, 4), mesh, [Shard(0)])))
        for ranks, mesh in zip(CHAIN, meshes, strict=True)
        if rank in ranks
    ]
    optimizer = Tabled(params, lr=0.1)
    recorder = Recorder.on(optimizer)
    apart: dict[tuple[int, ...], object] = {ranks: ranks for ranks in CHAIN if rank in ranks}
    said, words = [], []
    steps: tuple[dict[tuple[int, ...], object], ...] = (
        apart,  # differ from mesh to mesh, by right
        {(1, 0): "listed anew"} if rank < 2 else {},
        {**apart, CHAIN[0]: rank} if rank < 2 else apart,
        {(0, 2): "no mesh"} if rank != 1 else {},
        {(0, 2): rank} if rank != 1 else {},
        {CHAIN[0]: 1},  # also on rank 2, which is not on it
    )
    for tables in steps:
        for _, param in params:
            param.grad = shard(torch.ones(4, 4), param.device_mesh, [Shard(0)])  # type: ignore[attr-defined]
        recorder.words.clear()
        optimizer.tables = tables
        said.append(str(caught(optimizer.step)))
        words.append(list(recorder.words))
    return said, words


def test_a_fact_is_compared_among_the_ranks_it_names_and_among_nobody_else() -> None:
    by_rank = on_ranks(tables_of_meshes, 3)
    first = by_rank[0]
    assert all(found == first for found in by_rank)
    (apart, listed, differing, no_mesh, differing_too, outside), words = first
    assert (apart, listed, no_mesh) == ("None",) * 3
    assert "ranks disagree about table: 0 on rank 0; 1 on rank 1" in differing
    assert "ranks disagree about table: 0 on rank 0; 2 on rank 2" in differing_too
    assert "rank 2: ValueError: rank 2 brings 'table', which is compared among" in outside
    assert [len(messages) for messages in words] == [1, 1, 3, 3, 3, 3]
    assert words[0] == [6]  # a pair for all, and one for each mesh


def bad_facts(rank: int) -> list[str]:
    twins = Trained.on().twins
    optimizer = Stopping(named(twins.sharded), lr=0.1)
    twins.set_gradients(1)
    found = []
    for width in (9, {1, 2}):
        optimizer.width = width if rank == 1 else 8
        found.append(f"{caught(optimizer.step)}")
    optimizer.width = 8
    optimizer.stop = 2**63 if rank == 1 else 0  # type: ignore[assignment]
    found.append(f"{caught(optimizer.step)}")
    optimizer.stop = False
    optimizer.step()
    return found


def test_facts_that_differ_or_cannot_be_sent_stop_all_ranks() -> None:
    first, second = on_ranks(bad_facts, 2)
    assert first == second
    assert "ranks disagree about width: 8 on rank 0; 9 on rank 1" in first[0]
    assert "rank 1: TypeError: Object of type set" in first[1]
    assert "rank 1: ValueError: expected an integer that fits int64" in first[2]

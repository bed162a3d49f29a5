"""The layouts whose steps are counted, and what each rank does to count them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import Optimizer

import consensus
from adapters import Gefen, GefenMuon, Hybrid, Muon
from benchmarks._counting import BYTES_PER_WORD, Ledger, bytes_sent, counting, keys_in_store
from consensus.testing import inject

Layout: TypeAlias = Literal["rows", "columns", "HSDP", "FSDP over TP", "two meshes", "plain"]
Record: TypeAlias = dict[str, Any]

EVEN = ((8, 8), (16, 8), (8, 16))
UNEVEN = ((5, 4), (3, 8), (1, 4), (7, 3))  # on 4 ranks, ranks without a row


@dataclass(frozen=True, slots=True)
class Case:
    """An optimizer on one layout, and which of its steps are counted."""

    name: str
    num_ranks: int
    layout: Layout
    shapes: tuple[tuple[int, int], ...] = EVEN
    optimizer: str = "Muon"  # a key of OPTIMIZERS
    mode: Literal["exact", "distributed", "approx"] = "exact"  # of Muon
    bucket_bytes: int | None = None
    num_optimizers: int = 1
    reverse: bool = False  # the parameters, last first
    mismatches: bool = False  # also count steps on which ranks disagree or fail


CASES = (
    Case("unsharded, 2 ranks", 2, "plain"),
    Case("rows, 2 ranks", 2, "rows", mismatches=True),
    Case("rows, uneven, 3 ranks", 3, "rows", UNEVEN, mismatches=True),
    Case("rows, some ranks empty, 4 ranks", 4, "rows", UNEVEN, mismatches=True),
    Case("columns, 2 ranks", 2, "columns"),
    Case("rows, a collective for each matrix, 2 ranks", 2, "rows", bucket_bytes=1),
    Case("rows, two optimizers, 2 ranks", 2, "rows", num_optimizers=2),
    Case("HSDP 2 x 2", 4, "HSDP", mismatches=True),
    Case("FSDP over TP 2 x 2", 4, "FSDP over TP"),
    Case("two meshes, one inside of the other, 4 ranks", 4, "two meshes", mismatches=True),
    Case("approx, 2 ranks", 2, "rows", mode="approx"),
    Case("distributed, 2 ranks", 2, "rows", mode="distributed", mismatches=True),
    Case("distributed, uneven, 3 ranks", 3, "rows", UNEVEN, mode="distributed"),
    Case("distributed, some ranks empty, 4 ranks", 4, "rows", UNEVEN, mode="distributed"),
    Case("distributed, HSDP 2 x 2", 4, "HSDP", mode="distributed"),
    Case("distributed, FSDP over TP 2 x 2", 4, "FSDP over TP", mode="distributed"),
    Case("distributed, two meshes, 4 ranks", 4, "two meshes", mode="distributed"),
    Case("Gefen, 2 ranks", 2, "rows", optimizer="Gefen", mismatches=True),
    Case("Gefen, uneven, 3 ranks", 3, "rows", UNEVEN, optimizer="Gefen"),
    Case("Gefen, HSDP 2 x 2", 4, "HSDP", optimizer="Gefen"),
    Case("Gefen, two meshes, 4 ranks", 4, "two meshes", optimizer="Gefen"),
    Case("Gefen, unsharded, 2 ranks", 2, "plain", optimizer="Gefen"),
    Case("GefenMuon, uneven, 3 ranks", 3, "rows", UNEVEN, optimizer="GefenMuon"),
    Case("Hybrid, 2 ranks", 2, "rows", optimizer="Hybrid", mismatches=True),
    Case("Hybrid with AdamW, FSDP over TP 2 x 2", 4, "FSDP over TP", optimizer="Hybrid, AdamW"),
)

Make: TypeAlias = Callable[[list[tuple[str, nn.Parameter]], str], Optimizer]


def _hybrid(named: list[tuple[str, nn.Parameter]], mode: Any, **options: Any) -> Optimizer:
    """Half of the matrices to each half."""
    middle = len(named) // 2
    return Hybrid(named[:middle], named[middle:], sharded_mode=mode, **options)


OPTIMIZERS: dict[str, Make] = {
    "Muon": lambda named, mode: Muon(named, sharded_mode=cast(Any, mode)),
    "Gefen": lambda named, mode: Gefen(named),
    "GefenMuon": lambda named, mode: GefenMuon(named, sharded_mode=cast(Any, mode)),
    "Hybrid": _hybrid,
    "Hybrid, AdamW": lambda named, mode: _hybrid(named, mode, backup="adamw"),
}


def count_steps(rank: int, case: Case) -> Record:
    """Return what ``rank`` communicates in each kind of step of ``case``."""
    optimizers = [_optimizer(case) for _ in range(case.num_optimizers)]
    with counting() as ledger:
        steps = _Steps(ledger, optimizers)
        counted = {
            "first step": steps.count(),
            "healthy step": steps.count(),
            "healthy step, AMP": steps.count(_with_amp(optimizers, overflow=0.0)),
            "overflow on all ranks": steps.count(_with_amp(optimizers, overflow=1.0)),
        }
        if case.mismatches:
            counted |= _count_mismatches(case, steps, optimizers[0])
            counted["healthy step, after them"] = steps.count()
        return counted


def _count_mismatches(case: Case, steps: _Steps, optimizer: Optimizer) -> Record:
    last = dist.get_rank() == case.num_ranks - 1
    overflow = _with_amp([optimizer], overflow=float(last))
    phase = f"{type(optimizer).__name__}.step"
    raised = inject(f"{phase}: closure", rank=0, fault=ValueError("of rank 0"))
    other_order = _optimizer(replace(case, reverse=last))
    found = {
        "lr differs on one rank": steps.count(
            _other_lr(optimizer, 0.5 if last else 0.25), error=consensus.Disagreement
        ),
        "a gradient is missing on one rank": steps.count(
            _without_gradient(optimizer) if last else None, error=consensus.Disagreement
        ),
        "overflow on one rank": steps.count(overflow, error=consensus.Disagreement),
        "the closure fails on one rank": steps.count(raised, error=consensus.GroupFailure),
        "first step, another order on one rank": steps.count_call(
            other_order.step, error=consensus.Disagreement
        ),
    }
    if case.optimizer == "Muon":
        other_mode = _optimizer(replace(case, mode="approx" if last else case.mode))
        found["first step, another mode on one rank"] = steps.count_call(
            other_mode.step, error=consensus.Disagreement
        )
    return found


def count_primitives(rank: int) -> Record:
    """Return what ``rank`` communicates in the agreements that need no optimizer."""
    last = rank == dist.get_world_size() - 1
    many = [0.5] * 9  # more than travel with the headers
    with counting() as ledger:
        steps = _Steps(ledger, [])
        counted = {"prepare": steps.count_call(consensus.control_group().prepare)}
        for name, call in {
            "any_failed, none did": lambda: consensus.any_failed(False),
            "any_failed, one did": lambda: consensus.any_failed(last),
            "agree_range, equal": lambda: consensus.agree_range([1, 0.5]),
            "agree_range, unequal": lambda: consensus.agree_range([rank, 0.5]),
            "agree_range, 9 values, equal": lambda: consensus.agree_range(many),
            "agree_range, 9 values, unequal": lambda: consensus.agree_range([*many[1:], rank]),
            "agree_same, equal": lambda: consensus.agree_same({"a": 1}),
        }.items():
            counted[name] = steps.count_call(call)
        with contextlib.suppress(consensus.Disagreement):
            counted["agree_same, unequal"] = steps.count_call(
                lambda: consensus.agree_same(rank), error=consensus.Disagreement
            )
        return counted


class _Steps:
    """Makes steps on all ranks together and says what each communicated."""

    def __init__(self, ledger: Ledger, optimizers: list[Optimizer]) -> None:
        self._ledger = ledger
        self._optimizers = optimizers
        self._data_connections: set[str] | None = None

    def count(
        self,
        condition: contextlib.AbstractContextManager[object] | None = None,
        *,
        error: type[Exception] | None = None,
    ) -> Record:
        """Count a step of every optimizer under ``condition``; ``error`` is what it must raise."""

        def step() -> None:
            for optimizer in self._optimizers:
                optimizer.step()

        with condition or contextlib.nullcontext():
            return self.count_call(step, error=error)

    def count_call(
        self, call: Callable[[], object], *, error: type[Exception] | None = None
    ) -> Record:
        """Count what ``call`` communicates."""
        keys = _keys_when_all_are_here()  # nobody is late, so nobody does what late ranks do
        before = bytes_sent()
        connecting = self._data_connections is None
        if self._data_connections is None:
            self._data_connections = set(before)
        self._ledger.settle()
        if error is None:
            call()
        else:
            _expect(error, call)
        counted, after = self._ledger.settle(), bytes_sent()
        # Met again: a rank that leaves closes connections that others still look at.
        keys_left = _keys_when_all_are_here() - keys
        sent = {name: size - before.get(name, 0) for name, size in after.items()}
        on_data = sum(size for name, size in sent.items() if name in self._data_connections)
        on_control = sum(sent.values()) - on_data
        record = _record(counted, error)
        # Which of two ranks connects, and so says hello, is left to chance.
        exact = not connecting and all(said["bytes"] is not None for said in record["control"])
        record["control, TCP bytes sent"] = on_control if exact and before else None
        record["data, TCP bytes sent"] = on_data if before else None
        record["store keys left"] = keys_left
        return record


def _keys_when_all_are_here() -> int:
    dist.barrier()
    keys = keys_in_store()
    dist.barrier()
    return keys


def _record(ledger: Ledger, error: type[Exception] | None) -> Record:
    messages: list[Record] = []
    for i, (call, words) in enumerate(ledger.control):
        # What follows a row for each rank is text (names, values, tracebacks), and how long that
        # is does not belong to the protocol.
        opening = ledger.control[0][1]
        text = i > 1 and ledger.control[i - 1][1] > opening != words
        size = None if text else words * BYTES_PER_WORD
        messages.append({"call": call, "words": None if text else words, "bytes": size})
    collectives: dict[str, dict[str, int]] = {}
    for name, size in ledger.data:
        found = collectives.setdefault(name, {"calls": 0, "bytes": 0})
        found["calls"] += 1
        found["bytes"] += size
    return {
        "raises": error.__name__ if error is not None else None,
        "control": messages,
        "data": collectives,
        "store": dict(ledger.store),
    }


def _expect(error: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"expected {error.__name__}; nothing was raised")


# ---- models ----


def _optimizer(case: Case) -> Any:
    shapes = case.shapes
    if case.layout == "two meshes":  # each pair of ranks holds a first matrix of its own
        shapes = ((8 + 8 * (dist.get_rank() // 2), 8), *shapes[1:])
    torch.manual_seed(0)  # values decide how long Gefen's blocks are
    model = nn.Sequential(*(nn.Linear(cols, rows, bias=False) for rows, cols in shapes))
    _shard(model, case.layout)
    named = list(model.named_parameters())
    listed = named[::-1] if case.reverse else named
    optimizer: Any = OPTIMIZERS[case.optimizer](listed, case.mode)
    if case.bucket_bytes is not None:
        optimizer.bucket_bytes = case.bucket_bytes
    for param in model.parameters():
        param.grad = param.detach().clone()
    return optimizer


def _shard(model: nn.Sequential, layout: Layout) -> None:
    world = dist.get_world_size()
    if layout == "rows":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif layout == "columns":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    elif layout == "HSDP":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))
    elif layout == "FSDP over TP":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        styles: tuple[ParallelStyle, ...] = (ColwiseParallel(), RowwiseParallel())
        plan = {name: styles[i % 2] for i, (name, _) in enumerate(model.named_children())}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    elif layout == "two meshes":  # as pipeline stages or experts, beside a part all ranks share
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
        fully_shard(model[0], mesh=mesh["dp"])
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


# ---- what may be special about a step ----


@contextlib.contextmanager
def _with_amp(optimizers: list[Optimizer], *, overflow: float) -> Iterator[None]:
    """Set what a GradScaler sets, and take it away as it does."""
    for optimizer in optimizers:
        vars(optimizer).update(found_inf=torch.tensor(overflow), grad_scale=torch.tensor(2.0))
    yield
    for optimizer in optimizers:
        vars(optimizer).pop("found_inf", None)
        vars(optimizer).pop("grad_scale", None)


@contextlib.contextmanager
def _other_lr(optimizer: Optimizer, lr: float) -> Iterator[None]:
    group = optimizer.param_groups[0]
    before, group["lr"] = group["lr"], lr
    yield
    group["lr"] = before


@contextlib.contextmanager
def _without_gradient(optimizer: Optimizer) -> Iterator[None]:
    param: Tensor = optimizer.param_groups[0]["params"][-1]
    grad, param.grad = param.grad, None
    yield
    param.grad = grad


def gather_ranks(records: tuple[Record, ...]) -> Record:
    """Return one record for all ranks: a value where all are equal, else a list in rank order.

    Store requests are summed: who comes last clears up, and who that is is left to chance.
    """
    found: Record = {}
    for step in records[0]:
        merged: Record = {}
        for what in records[0][step]:
            values = [record[step][what] for record in records]
            if what == "store":
                total = sum(map(Counter, values), Counter[str]())
                merged["store, all ranks"] = dict(sorted(total.items()))
            else:
                merged[what] = values[0] if all(value == values[0] for value in values) else values
        found[step] = merged
    return found

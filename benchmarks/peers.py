"""Time a step of Muon's sharded modes beside other implementations that can be imported.

    python benchmarks/peers.py --write      # a few minutes; writes results/peers_*

Every contender steps its own copy of the same sharded matrices, one after the other in each round,
in an order that is drawn anew: what ran just before leaves its traces in caches. A step takes as
long as it does on the slowest rank, and the processor time of all of them; what is compared are
ratios to our distributed mode within a round. Both are a report and gate nothing. Where ranks share
cores, the longest step is up to the scheduler too, and the sum of processor time says what is due.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Of a script the folder is searched too, and torch would take cuda.py in it for NVIDIA's package.
if __name__ == "__main__":
    sys.path.pop(1)

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from adapters import GefenMuon, Muon
from adapters._batches import Kind, in_batches, newton_schulz_stacked, stackable
from adapters._newton_schulz import DEFAULT_EPS, DEFAULT_SCHEDULE, newton_schulz
from adapters._schedules import Form
from benchmarks._common import Record, environment, markdown_table, spread, write_results
from consensus.testing import run_ranks

Named: TypeAlias = list[tuple[str, nn.Parameter]]
Make: TypeAlias = Callable[[Named, DeviceMesh], Any]
Times: TypeAlias = tuple[float, float]  # of one step: wall seconds, processor seconds

OURS = "Muon, distributed"
SIZES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "large": ((12, 512, 512), (12, 512, 2048)),
    "mixed": ((7, 512, 512), (3, 512, 1376), (3, 1376, 512), (1, 512, 1024), (1, 384, 512)),
    "small": ((48, 64, 64), (24, 64, 256), (24, 128, 128)),
}
TIMEOUT_S = 900.0


def contenders() -> tuple[dict[str, Make], dict[str, str]]:
    """Return how to make each contender, and why others cannot be."""
    made: dict[str, Make] = {
        OURS: lambda named, mesh: Muon(named, sharded_mode="distributed"),
        "Muon, distributed, again": lambda named, mesh: Muon(named, sharded_mode="distributed"),
        "Muon, distributed, gram form": lambda named, mesh: Muon(
            named, sharded_mode="distributed", ns_form="gram"
        ),
        "Muon, exact": lambda named, mesh: Muon(named, sharded_mode="exact"),
        "GefenMuon, distributed": lambda named, mesh: GefenMuon(named, sharded_mode="distributed"),
        "torch.optim.Muon on DTensors": lambda named, mesh: torch.optim.Muon(named),
        "Newton-Schulz alone, standard form": lambda named, mesh: _Alone(named, mesh, "standard"),
        "Newton-Schulz alone, gram form": lambda named, mesh: _Alone(named, mesh, "gram"),
    }
    missing = {}
    for name, module, make in (
        ("Gefen-X, distributed", "gefen", _gefen_x),
        ("dion's Muon", "dion", _dion),
    ):
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing[name] = str(error)
        else:
            made[name] = make
    return made, missing


class _Alone:
    """What is left of a step of ours without exchanges, momenta and weights: the floor.

    Each of N ranks takes every N-th matrix: an even share where N divides the number of each
    shape, as in "large" and "small".
    """

    def __init__(self, named: Named, mesh: DeviceMesh, form: Form) -> None:
        schedule = replace(DEFAULT_SCHEDULE, form=form)
        its = [tuple(param.shape) for _, param in named][mesh.get_local_rank() :: mesh.size()]
        kinds = [Kind((rows, cols), schedule, DEFAULT_EPS) for rows, cols in its]
        together = stackable(kinds, torch.device("cpu"))
        batches = in_batches([kind if kind in together else None for kind in kinds])
        self._stacks = [
            (kinds[batch[0]], torch.randn(len(batch), *kinds[batch[0]].shape).bfloat16())
            for batch in batches
        ]

    @torch.no_grad()
    def step(self) -> None:
        for kind, stack in self._stacks:
            if len(stack) > 1:
                newton_schulz_stacked(stack, kind)
            else:
                newton_schulz(stack[0], kind.schedule, eps=kind.eps)


def _gefen_x(named: Named, mesh: DeviceMesh) -> Any:
    gefen: Any = importlib.import_module("gefen")
    return gefen.GefenMuon(named, sharded_mode="distributed", fused=False)


def _dion(named: Named, mesh: DeviceMesh) -> Any:
    dion: Any = importlib.import_module("dion")
    return dion.Muon([param for _, param in named], distributed_mesh=mesh)


def time_steps(rank: int, size: str, rounds: int) -> dict[str, list[Times]]:
    """Return what each round's step took on this rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made, _ = contenders()
    optimizers: dict[str, tuple[Any, list[nn.Parameter]]] = {}
    found: dict[str, list[Times]] = {}
    for name, make in made.items():
        params = _parameters(size, mesh)
        named = [(f"layers.{i}.weight", param) for i, param in enumerate(params)]
        optimizers[name] = make(named, mesh), params
        found[name] = []
    names = list(made)
    for number in range(rounds + 2):  # the first ones learn, plan, connect
        order = random.Random(number).sample(names, len(names))  # equal on all ranks
        for name in order:
            optimizer, params = optimizers[name]
            for i, param in enumerate(params):  # some contenders write gradients
                param.grad = _gradient(param, seed=1000 * number + i)
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            optimizer.step()
            if number >= 2:
                found[name].append((time.perf_counter() - start, time.process_time() - used))
    return found


def _parameters(size: str, mesh: DeviceMesh) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [
        nn.Parameter(distribute_tensor(torch.randn(rows, cols), mesh, [Shard(0)]))
        for count, rows, cols in SIZES[size]
        for _ in range(count)
    ]


def _gradient(param: nn.Parameter, *, seed: int) -> DTensor:
    assert isinstance(param, DTensor)
    generator = torch.Generator().manual_seed(seed)
    local = torch.randn(param.to_local().shape, generator=generator)
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def measure(size: str, num_ranks: int, rounds: int) -> Record:
    """Return times and ratios of all contenders."""
    by_rank = run_ranks(
        time_steps, num_ranks, size, rounds, timeout=TIMEOUT_S, group_timeout=TIMEOUT_S
    ).values()
    in_rounds = {
        name: list(zip(*(found[name] for found in by_rank), strict=True)) for name in by_rank[0]
    }
    walls = {name: [max(each)[0] for each in rounds] for name, rounds in in_rounds.items()}
    sums = {
        name: [sum(used for _, used in each) for each in rounds]
        for name, rounds in in_rounds.items()
    }
    return {
        name: {
            "ms": spread([1e3 * each for each in walls[name]]),
            "against ours": spread(_ratios(walls[name], walls[OURS]), digits=2),
            "processor ms": spread([1e3 * each for each in sums[name]]),
            "processor, against ours": spread(_ratios(sums[name], sums[OURS]), digits=2),
        }
        for name in in_rounds
    }


def _ratios(of: Sequence[float], to: Sequence[float]) -> list[float]:
    return [its / own for its, own in zip(of, to, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    options = _parser().parse_args(arguments)
    where = environment(seed=0)
    _, missing = contenders()
    where["left out"] = missing or "nobody"
    content: Record = {}
    sections = ["# A step of sharded Muon beside others"]
    for size in options.size:
        found = content[size] = measure(size, options.ranks, options.rounds)
        shapes = ", ".join(f"{count} x {rows}x{cols}" for count, rows, cols in SIZES[size])
        rows = [_row(name, each) for name, each in found.items()]
        header = ["contender", "ms", "against ours", "quartiles"]
        header += ["processor ms", "against ours", "quartiles"]
        sections.append(f"## {shapes}; {options.ranks} ranks\n\n{markdown_table(header, rows)}")
    where["load when ended"] = round(os.getloadavg()[0], 1)
    text = "\n\n".join(sections)
    print(text)
    for name, why in missing.items():
        print(f"left out: {name} ({why})")
    if options.write:
        print(write_results("peers", f"{options.ranks}-ranks", where, content, text))
    return 0


def _row(name: str, found: Record) -> list[object]:
    cells: list[object] = [name]
    for times, against in (("ms", "against ours"), ("processor ms", "processor, against ours")):
        ratio = found[against]
        cells += [found[times]["median"], ratio["median"], f"{ratio['q1']} to {ratio['q3']}"]
    return cells


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time sharded Muon beside others.")
    parser.add_argument("--size", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/peers_*")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Time a step of Muon's sharded modes beside other implementations that can be imported.

    python benchmarks/peers.py --write      # a few minutes; writes results/peers_*

Every contender steps its own copy of the same sharded matrices, one after the other in each round,
in an order that is drawn anew: what ran just before leaves its traces in caches. A step takes as
long as it does on the slowest rank; what is compared are ratios to our distributed mode within a
round. Times are a report and gate nothing. More ranks than cores measure scheduling.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
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
from benchmarks._common import Record, environment, markdown_table, spread, write_results
from consensus.testing import run_ranks

Named: TypeAlias = list[tuple[str, nn.Parameter]]
Make: TypeAlias = Callable[[Named, DeviceMesh], Any]

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


def _gefen_x(named: Named, mesh: DeviceMesh) -> Any:
    gefen: Any = importlib.import_module("gefen")
    return gefen.GefenMuon(named, sharded_mode="distributed", fused=False)


def _dion(named: Named, mesh: DeviceMesh) -> Any:
    dion: Any = importlib.import_module("dion")
    return dion.Muon([param for _, param in named], distributed_mesh=mesh)


def time_steps(rank: int, size: str, rounds: int) -> dict[str, list[float] | str]:
    """Return the seconds of each round's step on this rank, or why a contender failed."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made, _ = contenders()
    optimizers, found = {}, {}
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
            start = time.perf_counter()
            optimizer.step()
            if number >= 2:
                found[name].append(time.perf_counter() - start)
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
    slowest = {
        name: [max(times) for times in zip(*(found[name] for found in by_rank), strict=True)]
        for name in by_rank[0]
    }
    return {
        name: {
            "ms": spread([1e3 * each for each in times]),
            "against ours": spread(
                [its / own for its, own in zip(times, slowest[OURS], strict=True)], digits=2
            ),
        }
        for name, times in slowest.items()
    }


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
    ratio = found["against ours"]
    return [name, found["ms"]["median"], ratio["median"], f"{ratio['q1']} to {ratio['q3']}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time sharded Muon beside others.")
    parser.add_argument("--size", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/peers_*")
    return parser


if __name__ == "__main__":
    sys.exit(main())

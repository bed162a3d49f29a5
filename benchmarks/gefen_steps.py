"""Time a step of the Gefen optimizers beside Gefen-X 0.5 and torch, and count their state.

    pip install gefen-x==0.5.0 numba   # optional; it is only compared with
    OMP_NUM_THREADS=1 python benchmarks/gefen_steps.py

All contenders step the same matrices with the same gradients, one after the other in each round.
What is compared are ratios of one round; times are a report and gate nothing. Without Gefen-X the
column is left out.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Of a script the folder is searched too, and torch would take cuda.py in it for NVIDIA's package.
if __name__ == "__main__":
    sys.path.pop(1)

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from adapters import Gefen, GefenMuon
from benchmarks._common import Record, environment, markdown_table, spread, write_results

Make = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]


@dataclass
class Contender:
    """One optimizer with parameters of its own."""

    name: str
    rival: str  # the contender that its times are divided by
    params: list[nn.Parameter]
    optimizer: Optimizer
    first: float = 0.0  # seconds of the step that learns
    seconds: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    where = environment(seed=options.seed)
    contenders = build(options)
    for number in range(options.rounds + 1):
        give_gradients(contenders, options.seed + number)
        first = number % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            start = time.perf_counter()
            contender.optimizer.step()
            seconds = time.perf_counter() - start
            if number:
                contender.seconds.append(seconds)
            else:
                contender.first = seconds
    where["load when ended"] = round(os.getloadavg()[0], 1)
    found = {each.name: measured(each, contenders) for each in contenders}
    text = report(found, options)
    print(text)
    if options.write:
        print(write_results("gefen", "steps", where, {"contenders": found}, text))
    return 0


def build(options: argparse.Namespace) -> list[Contender]:
    """Return all contenders that can be imported."""
    made: list[tuple[str, str, Make]] = [
        ("Gefen, factored", "Gefen-X, factored", Gefen),
        ("Gefen, by block", "Gefen-X, by block", lambda p: Gefen(p, factored_v_2d=False)),
        ("GefenMuon", "Gefen-X, Muon", GefenMuon),
        ("AdamW", "", torch.optim.AdamW),
    ]
    try:
        gefen_x: Any = importlib.import_module("gefen")
    except ImportError as error:
        print(f"Gefen-X is left out: {error}", file=sys.stderr)
    else:
        made += [
            ("Gefen-X, factored", "", lambda p: gefen_x.Gefen(p, fused=False)),
            ("Gefen-X, by block", "", lambda p: gefen_x.Gefen(p, fused=False, factored_v_2d=False)),
            ("Gefen-X, Muon", "", lambda p: gefen_x.GefenMuon(p, fused=False)),
        ]
    contenders = []
    for name, rival, make in made:
        params = parameters(options)
        named = [(f"layers.{i}.weight", param) for i, param in enumerate(params)]
        contenders.append(Contender(name, rival, params, make(named)))
    return contenders


def parameters(options: argparse.Namespace) -> list[nn.Parameter]:
    """Return the same matrices each time."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.rows, options.cols)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(options.matrices)]


def give_gradients(contenders: Sequence[Contender], seed: int) -> None:
    """Give all contenders the same gradients."""
    generator = torch.Generator().manual_seed(seed)
    for params in zip(*(each.params for each in contenders), strict=True):
        grad = torch.randn(params[0].shape, generator=generator)
        for param in params:
            param.grad = grad.clone()  # some contenders write it


def measured(contender: Contender, contenders: Sequence[Contender]) -> Record:
    """Return the times and the state of one contender."""
    seconds = contender.seconds
    found: Record = {
        "first step, s": round(contender.first, 3),
        "later steps, ms": spread([1e3 * each for each in seconds]),
        "state, bytes a parameter": round(state_bytes(contender), 4),
    }
    rivals = [each.seconds for each in contenders if each.name == contender.rival]
    for rival in rivals:
        ratios = [own / its for own, its in zip(seconds, rival, strict=True)]
        found["ratio"] = round(statistics.median(ratios), 3)
    return found


def state_bytes(contender: Contender) -> float:
    """Return the bytes of all tensors in the state, for each parameter."""
    tensors = [
        value
        for state in contender.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    stored = sum(each.numel() * each.element_size() for each in tensors)
    return stored / sum(param.numel() for param in contender.params)


def report(found: dict[str, Record], options: argparse.Namespace) -> str:
    """Return a table of all contenders."""
    header = ["optimizer", "step, ms", "against Gefen-X", "first step, s", "bytes a parameter"]
    rows = [
        [
            name,
            each["later steps, ms"]["median"],
            each.get("ratio", "-"),
            each["first step, s"],
            each["state, bytes a parameter"],
        ]
        for name, each in found.items()
    ]
    size = f"{options.matrices} matrices of {options.rows} x {options.cols}, float32, CPU"
    return f"# A step of {size}\n\n{markdown_table(header, rows)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time Gefen's steps.")
    parser.add_argument("--matrices", type=int, default=48)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--cols", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10, help="of which the median is taken")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/gefen_*")
    return parser


if __name__ == "__main__":
    sys.exit(main())

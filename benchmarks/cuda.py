"""Everything that a GPU has to show, in one run of under five minutes.

    python benchmarks/cuda.py --write

The tests that need a GPU; whether a stack of matrices has the bits of single ones; what
Newton-Schulz costs by form and schedule, eager and compiled; and a step of Muon beside torch's, in
which no operation may wait for the device. Without a GPU it says so and ends well. Times gate
nothing. Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Of a script the folder is searched too, and torch would take cuda.py in it for NVIDIA's package.
if __name__ == "__main__":
    sys.path.pop(1)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from adapters import Muon
from adapters._batches import Kind, newton_schulz_stacked
from adapters._newton_schulz import DEFAULT_EPS, DEFAULT_SCHEDULE, newton_schulz
from adapters._schedules import SCHEDULES, Schedule
from benchmarks._common import Record, environment, markdown_table, spread, write_results

ROOT = Path(__file__).resolve().parent.parent
Shape = tuple[int, int]
Work = Callable[[], object]

BIT_SHAPES: tuple[Shape, ...] = ((32, 32), (64, 64), (128, 512), (512, 128), (256, 1024))
TIME_SHAPES: tuple[Shape, ...] = ((1024, 1024), (1024, 4096), (4096, 4096))
COMPILED_SHAPE: Shape = (1024, 4096)
TESTS_S = 120.0  # for the tests; what is left is for the rest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    options = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no CUDA device here, so there is nothing to show.")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    where = environment(seed=options.seed)
    where["cpu"] = f"{torch.cuda.get_device_name(device)} on {where['cpu']}"
    where["cuda"] = torch.version.cuda
    end = time.monotonic() + options.seconds
    torch.manual_seed(options.seed)
    found: Record = {"tests": run_tests(min(TESTS_S, options.seconds / 2))}
    found["stacked bits"] = stacked_bits(device, BIT_SHAPES)
    with one_rank(device) as mesh:
        found["step"] = step_beside_torch(
            device, options.matrices, (1024, 4096), rounds=options.rounds, mesh=mesh
        )
    found["newton-schulz"] = newton_schulz_times(
        device, TIME_SHAPES, compiled_at=COMPILED_SHAPE, rounds=options.rounds, end=end
    )
    where["load when ended"] = round(os.getloadavg()[0], 1)
    text = report(found)
    print(text)
    if options.write:
        print(write_results("cuda", "all", where, found, text))
    return int(found["tests"]["exit code"] != 0)


# ---- the tests ----


def run_tests(seconds: float) -> Record:
    """Return how the tests of tests/cuda ended."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "tests/cuda"]
    try:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"exit code": -1, "end": f"not done after {seconds:.0f} s"}
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    return {"exit code": ended.returncode, "end": "\n".join(lines[-30:])}


# ---- bits ----


def stacked_bits(device: torch.device, shapes: Sequence[Shape], *, count: int = 8) -> Record:
    """Return, for each shape, how many matrices of a stack have the bits of a single one."""
    found: Record = {}
    for shape in shapes:
        matrices = [torch.randn(shape, device=device) * 10.0 ** (i % 3) for i in range(count)]
        single = [newton_schulz(each) for each in matrices]
        stacked = newton_schulz_stacked(
            torch.stack(matrices), Kind(shape, DEFAULT_SCHEDULE, DEFAULT_EPS)
        )
        pairs = list(zip(single, stacked, strict=True))
        found[_text(shape)] = {
            "equal": sum(torch.equal(a, b) for a, b in pairs),
            "of": count,
            "largest difference": max(float((a - b).abs().max()) for a, b in pairs),
        }
    return found


# ---- times ----


def newton_schulz_times(
    device: torch.device,
    shapes: Sequence[Shape],
    *,
    compiled_at: Shape | None,
    rounds: int,
    end: float,
) -> Record:
    """Return microseconds of one matrix by shape, schedule and form, in rounds that take turns.

    Args:
        device: Where to compute.
        shapes: Of the matrices.
        compiled_at: The shape for which compiled variants are timed too; compiling takes a while.
        rounds: Samples of each.
        end: Of time.monotonic(): no shape is begun after it.
    """
    schedules = {"default": DEFAULT_SCHEDULE, **SCHEDULES}
    variants = {
        f"{name}, {form}": Schedule(each.steps, each.safety, form)
        for name, each in schedules.items()
        for form in ("standard", "gram")
    }
    found: Record = {}
    for shape in shapes:
        if time.monotonic() > end:
            found[_text(shape)] = "left out: no time"
            continue
        matrix = torch.randn(shape, device=device)
        works: dict[str, Work] = {
            name: partial(newton_schulz, matrix, schedule) for name, schedule in variants.items()
        }
        if shape == compiled_at:
            works |= {
                f"{name}, compiled": _compiled(matrix, schedule)
                for name, schedule in variants.items()
                if name.startswith(("default", "you5"))
            }
        times = take_turns(works, rounds=rounds, device=device)
        found[_text(shape)] = {name: spread(1e6 * s for s in each) for name, each in times.items()}
    return found


def _compiled(matrix: Tensor, schedule: Schedule) -> Work:
    function = torch.compile(lambda x: newton_schulz(x, schedule), dynamic=False)
    return lambda: function(matrix)


def take_turns(
    works: dict[str, Work], *, rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return seconds of each work, one after the other in each round, after two to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 2):
        for name, work in works.items():
            took = _seconds(work, device)
            if number >= 2:
                seconds[name].append(took)
    return seconds


def _seconds(work: Work, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


# ---- a step ----


@contextmanager
def one_rank(device: torch.device) -> Iterator[DeviceMesh]:
    """Hand out a mesh of this process alone, on the backend of the device."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield init_device_mesh(device.type, (1,))
        finally:
            dist.destroy_process_group()


@contextmanager
def nothing_waits(device: torch.device) -> Iterator[None]:
    """Make operations that wait for the device raise."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def step_beside_torch(
    device: torch.device, matrices: int, shape: Shape, *, rounds: int, mesh: DeviceMesh
) -> Record:
    """Return times of a step of distributed Muon and of torch's, and how far they ended apart."""
    starts = [torch.randn(shape, device=device) for _ in range(matrices)]
    grads = [torch.randn(shape, device=device) for _ in range(matrices)]

    def on_mesh(tensor: Tensor) -> Tensor:
        return DTensor.from_local(tensor.clone(), mesh, [Shard(0)])

    ours = [nn.Parameter(on_mesh(start)) for start in starts]
    torchs = [nn.Parameter(start.clone()) for start in starts]
    for grad, own, its in zip(grads, ours, torchs, strict=True):
        own.grad, its.grad = on_mesh(grad), grad.clone()
    named = [(f"layers.{i}.weight", param) for i, param in enumerate(ours)]
    optimizers: dict[str, Optimizer] = {
        "ours": Muon(named, lr=0.01, sharded_mode="distributed"),
        "torch's": torch.optim.Muon(torchs, lr=0.01),
    }
    for optimizer in optimizers.values():
        optimizer.step()
    with nothing_waits(device):
        optimizers["ours"].step()
    optimizers["torch's"].step()
    steps: dict[str, Work] = {name: each.step for name, each in optimizers.items()}
    times = take_turns(steps, rounds=rounds, device=device)
    pairs = [(own.detach().to_local(), its.detach()) for own, its in zip(ours, torchs, strict=True)]  # type: ignore[attr-defined]
    return {
        "matrices": f"{matrices} of {_text(shape)}",
        "steps that waited for the device": 0,  # it would have raised
        "equal bits": sum(torch.equal(a, b) for a, b in pairs),
        "largest difference": max(float((a - b).abs().max()) for a, b in pairs),
        "milliseconds": {name: spread([1e3 * s for s in t], digits=2) for name, t in times.items()},
        "ratio": round(
            statistics.median(a / b for a, b in zip(times["ours"], times["torch's"], strict=True)),
            3,
        ),
    }


# ---- the report ----


def report(found: Record) -> str:
    """Return all parts as text."""
    parts = ["# What a GPU shows", "## tests/cuda", f"```\n{found['tests']['end']}\n```"]
    parts += ["## Stacked matrices with the bits of single ones"]
    rows = [
        [shape, f"{each['equal']} of {each['of']}", f"{each['largest difference']:.3g}"]
        for shape, each in found["stacked bits"].items()
    ]
    parts.append(markdown_table(["shape", "equal", "largest difference"], rows))
    step = found["step"]
    parts += [
        f"## A step of {step['matrices']}, distributed mode on one rank beside torch.optim.Muon"
    ]
    rows = [
        [name, each["min"], each["median"], each["max"]]
        for name, each in step["milliseconds"].items()
    ]
    parts.append(markdown_table(["ms", "min", "median", "max"], rows))
    parts.append(
        f"Median of ratios: {step['ratio']}. Matrices with equal bits: {step['equal bits']}; "
        f"largest difference {step['largest difference']:.3g}. None of our operations waited for "
        "the device."
    )
    parts += ["## Newton-Schulz of one matrix, us"]
    for shape, variants in found["newton-schulz"].items():
        if isinstance(variants, str):
            parts.append(f"{shape}: {variants}")
            continue
        rows = [[name, each["min"], each["median"], each["max"]] for name, each in variants.items()]
        parts.append(markdown_table([shape, "min", "median", "max"], rows))
    return "\n\n".join(parts)


def _text(shape: Shape) -> str:
    return f"{shape[0]} x {shape[1]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Show what only a GPU can show.")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin nothing after these")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each time")
    parser.add_argument("--matrices", type=int, default=24, help="of the step")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/cuda_*")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Measure the tensors that one step of sharded Muon makes beyond those that stand between steps.

    python benchmarks/memory.py --write      # half a minute; writes results/memory_*

Counted are bytes of storages that an operation returned and that are still referenced, at the
highest moment of the second step: the first one makes the state. What an operation allocates and
frees inside of itself, and what the transport keeps, is not seen.
"""

from __future__ import annotations

import argparse
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Of a script the folder is searched too, and torch would take cuda.py in it for NVIDIA's package.
if __name__ == "__main__":
    sys.path.pop(1)

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adapters import Muon
from adapters._plan import BUCKET_BYTES_ON_CPUS
from benchmarks._common import Record, environment, markdown_table, write_results
from consensus.testing import run_ranks

Shapes = tuple[tuple[int, int], ...]

MODELS: dict[str, Shapes] = {
    "many small": ((64, 64),) * 96,
    "few large": ((512, 512),) * 4 + ((512, 2048),) * 4,
    "one above the bucket": ((64, 64),) * 8 + ((1024, 2048),),
}
BUCKETS = (None, 2**20, 64 * 2**20)
MODES = ("exact", "distributed")
STACKED = 2**22  # elements that are computed together at most
SMALL = 2**16  # elements of a matrix that is computed together with others at most
SLACK = 4096  # bytes: flags of parcels, norms, and their positions


class Peak(TorchDispatchMode):
    """The highest number of bytes in storages made since it was entered."""

    def __init__(self) -> None:
        """Start at nothing."""
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, Any] = {}

    def stands(self, tensors: Sequence[Tensor]) -> None:
        """Leave out the storages of tensors that are there already."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._seen[storage._cdata] = storage  # type: ignore[attr-defined]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and note what it returned."""
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self._note(leaf.untyped_storage())
        return found

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        self._seen[key] = weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        if self._seen.pop(key, None) is not None:
            self.live -= size


def bound(shapes: Shapes, num_ranks: int, bucket_bytes: int | None, mode: str) -> int:
    """Return the bytes a step may add: those of its exchanges, updates, the largest batch.

    A bucket is that of the largest matrix if that is larger. In the exact mode an exchange needs
    one, which others sent here, and this rank's share of it. In the distributed mode it needs one
    for what this rank owns and as much for its shards of what all own; and there are up to three
    at a time. Updates are 2 bytes for each of this rank's elements. A batch is the matrices that
    are computed together: as they came, X, the next X, and two Gram matrices.
    """
    sizes = [2 * rows * cols for rows, cols in shapes]
    bucket = max(BUCKET_BYTES_ON_CPUS if bucket_bytes is None else bucket_bytes, *sizes)
    updates = 2 * sum(-(-rows // num_ranks) * cols for rows, cols in shapes)
    batch = max(_batch_bytes(shape, shapes) for shape in shapes)
    if mode == "exact":
        exchanges = (1 + 1 / num_ranks) * min(bucket, sum(sizes))
    else:
        owned = sum(sizes) // num_ranks + max(sizes)  # at most, as owners are chosen
        exchanges = 2 * min(3 * bucket, owned)
    return int(exchanges) + updates + batch + SLACK


def _batch_bytes(shape: tuple[int, int], shapes: Shapes) -> int:
    numel, side = shape[0] * shape[1], min(shape)
    together = min(shapes.count(shape), STACKED // numel) if numel <= SMALL else 1
    return together * 2 * (3 * numel + 2 * side * side)


def peak_of_step(rank: int, shapes: Shapes, mode: Any, bucket_bytes: int | None) -> int:
    """Return the bytes that the second step adds on this rank, at most."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(0)
    params = [
        nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)])) for shape in shapes
    ]
    optimizer = Muon([(f"p{i}", p) for i, p in enumerate(params)], sharded_mode=mode)
    optimizer.bucket_bytes = bucket_bytes
    for param in params:
        param.grad = param.detach().clone()
    optimizer.step()
    standing = [x for p in params for x in (p, p.grad, optimizer.state[p]["momentum_buffer"])]
    parts = [x.to_local().detach() for x in standing if isinstance(x, DTensor)]
    with Peak() as peak:
        peak.stands(parts)
        optimizer.step()
    return peak.peak


def measure(rank: int, models: dict[str, Shapes]) -> list[tuple[str, int | None, str, int]]:
    """Return (model, bytes of a bucket, mode, bytes) of every case on this rank."""
    return [
        (name, size, mode, peak_of_step(rank, shapes, mode, size))
        for name, shapes in models.items()
        for size in BUCKETS
        for mode in MODES
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(description="Measure the memory of a step of sharded Muon.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/memory_*")
    options = parser.parse_args(arguments)
    where = environment(seed=0)
    rows: list[list[Any]] = []
    for ranks in options.ranks:
        found = run_ranks(measure, ranks, MODELS, timeout=300.0, group_timeout=300.0).values()
        for cases in zip(*found, strict=True):
            name, size, mode, _ = cases[0]
            most, limit = max(case[3] for case in cases), bound(MODELS[name], ranks, size, mode)
            rows.append([name, ranks, size or "default", mode, most, limit, round(most / limit, 2)])
    header = ["model", "ranks", "bucket bytes", "mode", "measured", "bound", "ratio"]
    text = f"# Bytes that one step adds at most\n\n{markdown_table(header, rows)}"
    where["load when ended"] = round(os.getloadavg()[0], 1)
    content: Record = {"rows": [dict(zip(header, row, strict=True)) for row in rows]}
    print(text)
    if options.write:
        parts = "-".join(map(str, options.ranks)) + "-ranks"
        print(write_results("memory", parts, where, content, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())

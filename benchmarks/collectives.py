"""Count what a step communicates, exactly, and compare it with what was recorded.

    python benchmarks/collectives.py            # count, print, write results/collectives.json
    python benchmarks/collectives.py --check    # count, print what differs from that file; exit 1

Counts and bytes are facts: they do not depend on the machine, so a change of them is a change of
the program, and CI checks them. (Bytes on TCP connections include gloo's own headers and its
ring, so they belong to a version of torch.)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Of a script the folder is searched too, and torch would take cuda.py in it for NVIDIA's package.
if __name__ == "__main__":
    sys.path.pop(1)

import torch

from benchmarks._steps import CASES, Record, count_primitives, count_steps, gather_ranks
from consensus.testing import run_ranks

RECORDED = Path(__file__).resolve().parent / "results" / "collectives.json"
PRIMITIVES = {f"agreements without an optimizer, {size} ranks": size for size in (2, 4)}
NAMES = (*(case.name for case in CASES), *PRIMITIVES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    options = _parser().parse_args(arguments)
    names = tuple(options.case or NAMES)
    counted = count(names)
    if not options.check:
        print(table(counted))
        known = json.loads(options.file.read_text())["cases"] if names != NAMES else {}
        cases = {name: {**known, **counted}[name] for name in NAMES if name in {**known, **counted}}
        recorded_with = {"torch": torch.__version__, "command": "python benchmarks/collectives.py"}
        content = {"recorded with": recorded_with, "cases": cases}
        options.file.write_text(json.dumps(content, indent=1) + "\n")
        return 0
    recorded = json.loads(options.file.read_text())["cases"]
    differences = list(differing({name: recorded.get(name, {}) for name in names}, counted))
    if differences:
        print(f"\n{len(differences)} counts differ from {options.file.name} (- recorded, + now):")
        print("\n".join(differences))
        print("\nIf the change is meant, run this without --check and commit the file.")
        return 1
    print(f"\nall counts equal those in {options.file.name}")
    return 0


def count(names: Sequence[str]) -> Record:
    """Return what the named cases communicate, step by step."""
    counted = {}
    for case in CASES:
        if case.name in names:
            counted[case.name] = gather_ranks(run_ranks(count_steps, case.num_ranks, case).values())
    for name, num_ranks in PRIMITIVES.items():
        if name in names:
            counted[name] = gather_ranks(run_ranks(count_primitives, num_ranks).values())
    return counted


def differing(recorded: Record, counted: Record) -> Iterator[str]:
    """Yield a readable line pair for each count that is not as recorded."""
    before, now = dict(_leaves(recorded)), dict(_leaves(counted))
    for path in dict.fromkeys([*before, *now]):
        old, new = before.get(path, "nothing"), now.get(path, "nothing")
        # Some kernels do not tell what a connection has sent.
        unknown = "TCP" in path[-1] and None in (old, new)
        if old != new and not unknown:
            yield f"  {' / '.join(path)}\n    - {json.dumps(old)}\n    + {json.dumps(new)}"


def _leaves(record: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the steps' entries, such as all messages of one step, each as one value."""
    if len(path) == 3:
        yield path, record
        return
    for name, value in record.items():
        yield from _leaves(value, (*path, name))


def table(counted: Record) -> str:
    """Return the counts as a markdown table, a row for each kind of step."""
    rows = [
        "| layout | step | votes: words of each message | data: calls, bytes a rank brings |",
        "| --- | --- | --- | --- |",
    ]
    for name, steps in counted.items():
        for step, found in steps.items():
            rows.append(f"| {name} | {step} | {_votes(found)} | {_data(found)} |")
    return "\n".join(rows)


def _votes(found: Record) -> str:
    messages = found["control"]
    if messages and isinstance(messages[0], list):
        return "ranks differ"  # which only a broken protocol does
    words = ["text" if said["words"] is None else str(said["words"]) for said in messages]
    return ", ".join(words) or "none"


def _data(found: Record) -> str:
    data = found["data"] if isinstance(found["data"], list) else [found["data"]]
    listed = dict.fromkeys(
        ", ".join(f"{name} {one['calls']}, {one['bytes']}" for name, one in rank.items())
        for rank in data
    )
    return " or ".join(listed) or "none"


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="collectives.py", description=summary)
    parser.add_argument("--check", action="store_true", help="compare; exit 1 on a difference")
    parser.add_argument("--case", action="append", choices=NAMES, help="only this one; repeatable")
    parser.add_argument("--file", type=Path, default=RECORDED, help="the record (JSON)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

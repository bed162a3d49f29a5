"""Time an agreement beside other ways to agree, and what forming a vote costs the host.

    python benchmarks/overhead.py                # a minute or two; writes results/overhead_*.md
    chrt --rr 10 python benchmarks/overhead.py --only votes forming     # where others work, as root

Times depend on the machine; what is compared are ratios of samples of one round. They are a
report and gate nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Of a script the folder is searched too, and torch would take cuda.py in it for NVIDIA's package.
if __name__ == "__main__":
    sys.path.pop(1)

from benchmarks._common import (
    Record,
    environment,
    markdown_table,
    microseconds,
    spread,
    write_results,
)
from benchmarks._forming import time_forming
from benchmarks._votes import ALL, BARE, SHORT, Span, time_first_agreement, time_votes
from consensus.testing import run_ranks

TIMEOUT_S = 300.0
PARTS = ("votes", "first", "forming")
RUNS = {"short calls only": SHORT, "all contenders": ALL}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    options = _parser().parse_args(arguments)
    where = environment(seed=options.seed)
    content: Record = {}
    sections = ["# What an agreement costs"]
    if "votes" in options.only:
        votes = {
            size: {
                title: measure_votes(size, contenders, options.rounds, options.seed)
                for title, contenders in RUNS.items()
            }
            for size in options.ranks
        }
        content["votes"], sections = votes, [*sections, *report_votes(votes)]
    if "first" in options.only:
        first = {n: measure_first(n, options.repeats) for n in options.ranks}
        content["first agreement"], sections = first, [*sections, *report_first(first)]
    if "forming" in options.only:
        forming = measure_forming(options.params, options.rounds, options.seed)
        content["forming"] = forming
        sections += report_forming(forming, options.params)
    where["load when ended"] = round(os.getloadavg()[0], 1)
    text = "\n\n".join(sections)
    print(text)
    if options.write:
        parts = "-".join(part for part in PARTS if part in options.only)
        print(f"\nwrote {write_results('overhead', parts, where, content, text)}")
    return 0


def measure_votes(num_ranks: int, contenders: Sequence[str], rounds: int, seed: int) -> Record:
    """Return spreads in microseconds of the slowest rank, and of its ratio to the bare message."""
    arguments = (contenders, rounds, seed)
    ranks = run_ranks(time_votes, num_ranks, *arguments, timeout=TIMEOUT_S).values()
    slowest, afterwards = {}, {}
    for name in contenders:
        samples = list(zip(*(spans[name] for spans, _ in ranks), strict=True))
        slowest[name] = [_slowest(sample) for sample in samples]
        afterwards[name] = [_after_the_last(sample) for sample in samples]
    found: Record = {}
    for name in contenders:
        found[name] = {
            "slowest rank, us": spread(microseconds(slowest[name])),
            "ratio": spread(_ratios(slowest[name], slowest[BARE]), digits=3),
            "ratio after the last rank came": spread(
                _ratios(afterwards[name], afterwards[BARE]), digits=3
            ),
        }
    loops = {name: max(loop[name] for _, loop in ranks) for name in ranks[0][1]}
    for name, seconds in loops.items():
        found[name]["in a loop, us"] = round(1e6 * seconds, 1)
        found[name]["in a loop, ratio"] = round(seconds / loops[BARE], 3)
    return found


def measure_first(num_ranks: int, repeats: int) -> Record:
    """Return what the first agreement costs, in new processes each time."""
    times: dict[str, list[float]] = {"plan and connect": [], "first vote": [], "second vote": []}
    for _ in range(repeats):
        ranks = run_ranks(time_first_agreement, num_ranks, timeout=TIMEOUT_S).values()
        for i, values in enumerate(times.values()):
            values.append(_slowest([spans[i] for spans in ranks]))
    return {name: spread(microseconds(values)) for name, values in times.items()}


def measure_forming(num_params: int, rounds: int, seed: int) -> Record:
    """Return what forming a vote costs one rank, in microseconds."""
    found = run_ranks(time_forming, 2, num_params, rounds, seed, timeout=TIMEOUT_S).values()[0]
    return {
        kind: {part: spread(microseconds(seconds)) for part, seconds in parts.items()}
        for kind, parts in found.items()
    }


def _slowest(sample: Sequence[Span]) -> float:
    return max(end - begin for begin, end in sample)


def _after_the_last(sample: Sequence[Span]) -> float:
    return max(end for _, end in sample) - max(begin for begin, _ in sample)


def _ratios(values: Sequence[float], bare: Sequence[float]) -> list[float]:
    return [value / one for value, one in zip(values, bare, strict=True)]


# ---- the report ----


def report_votes(votes: dict[int, dict[str, Record]]) -> list[str]:
    """Return the section on single votes."""
    parts = [_VOTES]
    header = ("call", "min us", "median us", "max us", "ratio", "after the last", "in a loop")
    runs = [(size, title, found) for size, by in votes.items() for title, found in by.items()]
    for size, title, found in runs:
        rows = [
            (
                name,
                *(one["slowest rank, us"][key] for key in ("min", "median", "max")),
                _quartiles(one["ratio"]),
                _quartiles(one["ratio after the last rank came"]),
                one["in a loop, ratio"],
            )
            for name, one in found.items()
        ]
        parts += [f"### {size} ranks, {title}", markdown_table(header, rows)]
    return parts


def report_first(first: dict[int, Record]) -> list[str]:
    """Return the section on the first agreement of an optimizer."""
    names = list(next(iter(first.values())))
    rows = [(size, *(_range(found[name]) for name in names)) for size, found in first.items()]
    return [_FIRST, markdown_table(("ranks", *(f"{name}, us" for name in names)), rows)]


def report_forming(forming: Record, num_params: int) -> list[str]:
    """Return the section on what one rank does before it votes."""
    kinds = list(forming)
    rows = [(part, *(_range(forming[kind][part]) for kind in kinds)) for part in forming[kinds[0]]]
    title = f"## Forming a vote for {num_params} sharded parameters"
    return [title, _FORMING, markdown_table(("host time, us", *kinds), rows)]


_VOTES = """## One vote

All ranks meet before each sample; the order is drawn anew in each round. A sample is the time of
its slowest rank. Ratios are to the bare message of the same round: median [quartiles]. "After the
last" counts from when the last rank came; "in a loop" is the mean of many calls back to back,
without meeting. A vote forms nothing here: what that costs is a part of its own. Calls that pickle
leave the caches full of that, which costs most where most Python runs: hence two runs."""

_FIRST = """## The first agreement

Of an optimizer on a 1-D mesh, in new processes each time; slowest rank, median (min to max)."""

_FORMING = "On one rank while the others wait; median (min to max)."


def _quartiles(found: Record) -> str:
    return f"{found['median']:.2f} [{found['q1']:.2f}, {found['q3']:.2f}]"


def _range(found: Record) -> str:
    return f"{found['median']:.0f} ({found['min']:.0f} to {found['max']:.0f})"


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="overhead.py", description=summary)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=250, help="samples of each call")
    parser.add_argument("--repeats", type=int, default=5, help="of the first agreement")
    parser.add_argument("--params", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    return parser


if __name__ == "__main__":
    sys.exit(main())

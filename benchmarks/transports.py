"""Time every way to hold a vote on real ranks, and count and model them on up to 65,536.

    python benchmarks/transports.py              # two minutes; writes results/transports_*

Times depend on the machine, and gate nothing: with more ranks than cores they measure how much
work there is in all, where a cluster pays for rounds. Counts are facts.
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

from benchmarks import _at_scale
from benchmarks._at_scale import PLACES, REQUESTS_A_SECOND
from benchmarks._common import (
    Record,
    environment,
    markdown_table,
    microseconds,
    spread,
    write_results,
)
from benchmarks._links import AGAIN, BARE, time_links
from benchmarks._plot import log_log_plot
from consensus._hops import cheapest
from consensus._protocol import header_words
from consensus.testing import run_ranks

TIMEOUT_S = 170.0
PARTS = ("measured", "simulated")
HEADERS_ROUNDS = 4  # one round of the second message for so many of the first
SIZES = (2, 4, 8, 9, 16, 64, 256, 1024, 4096, 16384, 65536)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    options = _parser().parse_args(arguments)
    where = environment(seed=options.seed)
    content: Record = {}
    sections = ["# The ways to hold a vote"]
    if "measured" in options.only:
        found = {n: measure(n, options.rounds, options.seed) for n in options.ranks}
        content["measured"], sections = found, [*sections, *report_measured(found)]
    plot = ""
    if "simulated" in options.only:
        simulated = simulate_all()
        plot = plot_of(simulated)
        content["simulated"], sections = simulated, [*sections, *report_simulated(simulated)]
    where["load when ended"] = round(os.getloadavg()[0], 1)
    text = "\n\n".join(sections)
    print(text)
    if options.write:
        parts = "-".join(part for part in PARTS if part in options.only)
        path = write_results("transports", parts, where, content, text)
        if plot:
            path.with_suffix(".svg").write_text(plot)
        print(f"\nwrote {path}")
    return 0


def measure(num_ranks: int, rounds: int, seed: int) -> Record:
    """Return, by words and link, spreads of the slowest rank and of its ratio to the bare message.

    A message of two words is a healthy vote; the other length is what follows a failure.
    """
    lengths = {2: rounds, header_words(0) * num_ranks: max(2, rounds // HEADERS_ROUNDS)}
    ranks = run_ranks(time_links, num_ranks, lengths, seed, timeout=TIMEOUT_S).values()
    found: Record = {}
    for words in lengths:
        by_rank = [spans[words] for spans, _ in ranks]
        slowest, afterwards = {}, {}
        for name in by_rank[0]:
            samples = list(zip(*(spans[name] for spans in by_rank), strict=True))
            slowest[name] = [max(end - begin for begin, end in sample) for sample in samples]
            afterwards[name] = [
                max(end for _, end in sample) - max(begin for begin, _ in sample)
                for sample in samples
            ]
        found[f"{words} words"] = {
            name: {
                "slowest rank, us": spread(microseconds(slowest[name])),
                "ratio": spread(_ratios(slowest[name], slowest[BARE]), digits=3),
                "ratio after the last rank came": spread(
                    _ratios(afterwards[name], afterwards[BARE]), digits=3
                ),
            }
            for name in slowest
        }
    found["making it, ms"] = {
        name: round(1e3 * max(making[name] for _, making in ranks), 1) for name in ranks[0][1]
    }
    return found


def simulate_all() -> Record:
    """Return what votes and their planning take at scale."""
    largest = PLACES["a cluster"].num_ranks
    return {
        "held against runs": _at_scale.check_formulas(),
        "run for every rank": [_at_scale.simulated_vote(n, 2) for n in (9, 1000, largest)],
        "ways": {
            place: _at_scale.ways_by_size(SIZES, 2, PLACES[place].model)
            for place in ("one rack", "a cluster")
        },
        "layouts": {
            name: {
                layout: _at_scale.cost_of_layout(about, place)
                for layout, about in _at_scale.layouts(place.num_ranks).items()
            }
            for name, place in PLACES.items()
        },
    }


# ---- the report ----


def report_measured(found: dict[int, Record]) -> list[str]:
    """Return the section on real ranks."""
    parts = [_MEASURED]
    header = ("link", "min us", "median us", "ratio", "after the last", "making it, ms")
    for size, by_words in found.items():
        making = by_words["making it, ms"]
        for words, links in by_words.items():
            if not words.endswith(" words"):
                continue
            rows = [
                (
                    name,
                    *(one["slowest rank, us"][key] for key in ("min", "median")),
                    _quartiles(one["ratio"]),
                    _quartiles(one["ratio after the last rank came"]),
                    making.get(name, ""),
                )
                for name, one in links.items()
            ]
            parts += [f"### {size} ranks, {words}", markdown_table(header, rows)]
    return parts


def report_simulated(found: Record) -> list[str]:
    """Return the section on more ranks."""
    places = [(name, place.num_ranks, place.says) for name, place in PLACES.items()]
    parts = [_SIMULATED, markdown_table(("place", "ranks", "model"), places)]
    header = ("way", *(f"{size}" for size in SIZES))
    for place, ways in found["ways"].items():
        rows = [
            (name, *(_time(by_size[n]["seconds"]) if n in by_size else "" for n in SIZES))
            for name, by_size in ways.items()
        ]
        chosen = ("a link takes", *(cheapest(size, 2, sums=False) for size in SIZES))
        title = f"### A healthy vote by the latency of {place}"
        parts += [title, markdown_table(header, [*rows, chosen])]
    rounds = [
        (name, *(_rounds(by_size.get(size)) for size in SIZES))
        for name, by_size in found["ways"]["a cluster"].items()
    ]
    parts += ["### Rounds, and messages in all", markdown_table(header, rounds)]
    header = ("layout", "groups", "way", "words", "rounds", "messages", "kB", "vote")
    more = ("store requests", "a rank", "keys", "MB of plans", "construction")
    for place, by_layout in found["layouts"].items():
        rows = [_layout_row(layout, one) for layout, one in by_layout.items()]
        size = PLACES[place].num_ranks
        parts += [f"### {place.capitalize()}: {size} ranks", markdown_table(header + more, rows)]
    runs = [
        (one["ranks"], one["way"], one["rounds"], one["messages"])
        for one in found["run for every rank"]
    ]
    parts += ["### Run for every rank", _RUNS]
    return [*parts, markdown_table(("ranks", "way", "rounds", "messages"), runs)]


def plot_of(simulated: Record) -> str:
    """Return the times of a healthy vote on a cluster as a picture."""
    lines = {
        name: [(size, 1e6 * one["seconds"]) for size, one in by_size.items()]
        for name, by_size in simulated["ways"]["a cluster"].items()
    }
    title = f"One healthy vote by model: {PLACES['a cluster'].says}"
    return log_log_plot(title, "ranks", "us", lines)


_MEASURED = f"""## Measured

All ranks meet before each sample; the order is drawn anew in each round. A sample is the time of
its slowest rank; ratios are to one bare int32 all_reduce of the same round: median [quartiles].
"{AGAIN}" is the A/A run. "After the last" counts from when the last rank came. Two words are a
healthy vote; the other length is the second message, after a mismatch. gloo's links wait for a
thread of gloo, "tcp" ones exchange words in the thread that votes. Making a link includes its
first message."""

_SIMULATED = f"""## At scale, by a model

Messages, rounds and requests are counted by running the library's own generators, and beyond what
can be run by formulas that are held against those runs. Times follow from a latency, 4 us of work
for each end of a message, and a bandwidth; the store answers {REQUESTS_A_SECOND:,} requests a
second, and takes and gives 1 GB/s. All ranks come at once. Construction is planning, connecting and
three requests a rank to agree that it worked. A mesh of all ranks is planned in three requests a
rank; where scopes cross ("tied") it is ten, one rank searches for all, and each reads the plan."""

_RUNS = (
    """The schedule that a link takes, with two words a rank; every rank ends with the maximum."""
)


def _rounds(one: Record | None) -> str:
    if one is None:
        return ""
    if "requests" in one:
        return f"{one['requests']:,} requests"
    return f"{one['rounds']:,} / {one['messages']:,}"


def _layout_row(layout: str, one: Record) -> tuple[object, ...]:
    return (
        layout,
        one["groups"],
        one["way"],
        *(f"{one[key]:,}" for key in ("words", "rounds", "messages")),
        f"{one['bytes'] / 1e3:,.0f}",
        _time(one["vote, seconds"]),
        f"{one['store requests']:,}",
        f"{one['store requests a rank']:,.1f}",
        f"{one['most keys at once']:,}",
        f"{one['plan bytes'] / 1e6:,.1f}",
        _time(one["construction, seconds"]),
    )


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1e6 * seconds:.3g} us"


def _ratios(values: Sequence[float], bare: Sequence[float]) -> list[float]:
    return [value / one for value, one in zip(values, bare, strict=True)]


def _quartiles(found: Record) -> str:
    return f"{found['median']:.2f} [{found['q1']:.2f}, {found['q3']:.2f}]"


def _parser() -> argparse.ArgumentParser:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="transports.py", description=summary)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=120, help="samples of each link, two words")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Let one rank die, stop or raise at each moment of a step, and look at what the others do.

    python benchmarks/failures.py --write      # a quarter of an hour; writes results/failures_*

Each row is a run on new processes: a sharded Muon on 2 to 5 ranks, of which the lowest or the
highest goes wrong. Of every other rank it records the error, how long after the event it came, and
whether anything was written, byte for byte. A stopped rank is let go on when all others have ended,
and is asked the same. What a row is promised says `_failures.promise`; it is compared with that.
"""

from __future__ import annotations

import argparse
import itertools
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Of a script the folder is searched too, and torch would take cuda.py in it for NVIDIA's package.
if __name__ == "__main__":
    sys.path.pop(1)

from benchmarks._common import Record, environment, markdown_table, write_results
from benchmarks._failures import (
    DATA_S,
    DEATH_S,
    HARD_S,
    KINDS,
    LIVENESS_S,
    MOMENTS,
    SILENT_S,
    SLACK_S,
    Row,
    Seen,
    judged,
    promise,
    suffer,
)
from consensus.testing import Ranks, run_ranks

WORLDS = (2, 3, 4, 5)
AT_ONCE = 8  # ranks in one run
RUNS_AT_ONCE = 3  # they wait most of the time

# ---- one run ----


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one row.

    Attributes:
        seen: What each rank met; none of one that died.
        seconds: From the event until each survivor's error.
        ended: From the event until the process of each survivor had ended.
        again: From when a stopped rank was let go on until its own error; None for others.
        problems: What is not as promised.
    """

    row: Row
    seen: dict[int, Seen]
    seconds: dict[int, float]
    ended: dict[int, float]
    again: float | None
    problems: tuple[str, ...]


def outcomes(rows: Sequence[Row], *, grace: float = 0.0) -> list[Outcome]:
    """Run rows at once, which have no rank in common and use all from 0 on.

    An error that comes late by no more than ``grace`` seconds is no problem.
    """
    everyone = sorted(itertools.chain(*(row.ranks for row in rows)))
    assert everyone == list(range(len(everyone))), "expected each rank in one row"
    host: Literal["tcp", "rank0"] = "rank0" if any(row.hosts for row in rows) else "tcp"
    with (
        tempfile.TemporaryDirectory(prefix="failures-") as name,
        _Watch(rows, Path(name)) as watch,
    ):
        ranks = run_ranks(
            suffer,
            len(everyone),
            rows,
            name,
            timeout=LIVENESS_S,
            group_timeout=2 * LIVENESS_S,
            store=host,
        )
    return [_outcome(row, ranks, watch, grace) for row in rows]


def _outcome(row: Row, ranks: Ranks[Seen], watch: _Watch, grace: float) -> Outcome:
    problems = []
    for result in (ranks[rank] for rank in row.ranks if not ranks[rank].returned):
        if result.hung or not (row.dies and result.rank == row.victim):
            how = f"hung\n{result.stack}" if result.hung else f"ended: {result.error or result}"
            problems.append(f"rank {result.rank} {how}")
    if (event := watch.events.get(row.victim)) is None:
        problems.append("nothing went wrong: the rank never came to that place")
        event = 0.0
    found = {rank: ranks[rank].value for rank in row.ranks}
    seen = {rank: each for rank, each in found.items() if each is not None}
    seconds = {rank: seen[rank].at - event for rank in row.survivors if rank in seen}
    ended = {rank: watch.ends[rank] - event for rank in row.survivors if rank in watch.ends}
    goes_on, victim = watch.goes_on.get(row.victim), seen.get(row.victim)
    again = victim.at - goes_on if victim is not None and goes_on is not None else None
    problems += judged(row, seen, seconds, grace=grace)
    if again is not None and again > promise(row).seconds + grace:
        problems.append(f"rank {row.victim} took {again:.1f} s when it went on")
    return Outcome(row, seen, seconds, ended, again, tuple(problems))


class _Watch:
    """Notes when processes end, and lets a stopped one go on when all others have."""

    def __init__(self, rows: Sequence[Row], folder: Path) -> None:
        self.ends: dict[int, float] = {}
        self.goes_on: dict[int, float] = {}
        self.events: dict[int, float] = {}  # by victim: when it went wrong
        self._rows, self._folder = rows, folder
        self._handles: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        stopped = [row for row in self._rows if row.kind == "SIGSTOP"]
        try:
            while not self._over.wait(0.01):
                self._look()
                for row in [row for row in stopped if set(row.survivors) <= set(self.ends)]:
                    stopped.remove(row)
                    self.goes_on[row.victim] = time.monotonic()
                    with suppress(ProcessLookupError):  # it was never stopped, and has ended
                        signal.pidfd_send_signal(self._handles[row.victim], signal.SIGCONT)
            self._look()
            for path in self._folder.glob("event *"):
                if path.suffix != ".part":
                    self.events[int(path.name.removeprefix("event "))] = float(path.read_text())
        finally:
            for handle in self._handles.values():
                os.close(handle)

    def _look(self) -> None:
        for rank in (rank for row in self._rows for rank in row.ranks):
            path = self._folder / f"pid {rank}"
            if rank not in self._handles and path.exists():
                with suppress(ProcessLookupError):  # it has ended since
                    self._handles[rank] = os.pidfd_open(int(path.read_text()))
            handle = self._handles.get(rank)
            if (
                handle is not None
                and rank not in self.ends
                and select.select([handle], [], [], 0)[0]
            ):
                self.ends[rank] = time.monotonic()


# ---- all runs ----


def matrix() -> Iterator[Row]:
    """Yield all rows. Where the mode makes no difference, modes take turns."""
    turns = itertools.cycle(("exact", "distributed"))
    for kind, world, moment in itertools.product(KINDS, WORLDS, MOMENTS):
        ranks = tuple(range(world))
        for victim, hosts in ((0, False), (world - 1, False), (0, True)):
            if hosts and kind in ("os._exit", "exception"):
                continue
            in_update = moment in ("update", "exchange")
            modes: tuple[Any, ...] = ("exact", "distributed") if in_update else (next(turns),)
            for mode in modes:
                yield Row(kind, moment, mode, ranks, victim, hosts)


def batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield rows to run at once, ranks numbered through; each with its kind, by falling size.

    A row in which a rank hosts the store of all runs alone.
    """
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.ranks), reverse=True):
        for batch in batches:
            size = sum(len(each.ranks) for each in batch)
            alike = not row.hosts and not batch[0].hosts and row.kind == batch[0].kind
            if alike and size + len(row.ranks) <= AT_ONCE:
                break
        else:
            size, batch = 0, []
            batches.append(batch)
        ranks = tuple(rank + size for rank in row.ranks)
        batch.append(replace(row, ranks=ranks, victim=row.victim + size))
    yield from batches


def table(found: Sequence[Outcome]) -> str:
    """Return what came of each row, and then, in full, where a promise is not kept."""
    header = (
        "what happens",
        "when",
        "mode",
        "ranks",
        "to",
        "promised of the others, at most",
        "they raised",
        "after, s",
        "processes ended, s",
        "the rank itself",
        "kept",
    )
    lines = [_cells(each) for each in found]
    broken = [each for each in found if each.problems]
    parts = [markdown_table(header, lines), f"\n{len(found)} rows, {len(broken)} not as promised."]
    for each in broken:
        told = "\n".join(each.problems).replace("\n", "\n    ")
        parts.append(f"\n### {', '.join(_cells(each)[:5])}\n\n    {told}")
    return "\n".join(parts)


def _cells(outcome: Outcome) -> list[str]:
    row, seen = outcome.row, outcome.seen
    place = "lowest" if row.victim == row.ranks[0] else "highest"
    raised = dict.fromkeys(seen[rank].error or "nothing" for rank in row.survivors if rank in seen)
    itself = f"{seen[row.victim].error or 'nothing'}" if row.victim in seen else "-"
    if outcome.again is not None:
        itself += f", {outcome.again:.1f} s after it went on"
    kept = "NO" if outcome.problems else "yes"
    spans = [_span(outcome.seconds), _span(outcome.ended)]
    return [
        row.kind,
        row.moment,
        row.mode,
        str(len(row.ranks)),
        f"{place}, hosts the store" if row.hosts else place,
        promise(row).text(),
        ", ".join(raised),
        *spans,
        itself,
        kept,
    ]


def _order(outcome: Outcome) -> tuple[Any, ...]:
    row = outcome.row
    ours = list(KINDS).index(row.kind), list(MOMENTS).index(row.moment), row.mode
    return *ours, len(row.ranks), row.victim != row.ranks[0], row.hosts


def _span(seconds: Mapping[int, float]) -> str:
    low, high = (f"{end(seconds.values(), default=0.0):.2f}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


NEWLINE = chr(10)  # no backslash may stand in an f-string before Python 3.12
TEXT = f"""# What comes of a rank that dies, stops or raises

Every row is a step of sharded `adapters.Muon` on gloo ranks of which one goes wrong. After SIGKILL
and `os._exit` nothing is cleaned up; SIGSTOP is followed by SIGCONT when the processes of all
others have ended. Votes have a deadline of {HARD_S:g} s, collectives of the data plane a timeout of
{DATA_S:g} s. All others are promised:

- Once ranks are connected, which they are when they have voted, a death is an error within
  {DEATH_S:g} s, and names the rank. Before that it is a rank that does not come.
- A rank that does not come is named when the deadline has passed, at most {SLACK_S:g} s later.
- Where the rank hosts the job's store, nobody can be asked who is missing. The error says so, at
  most {SILENT_S:g} s after the deadline.
- An exception is a `GroupFailure` within {DEATH_S:g} s that names the rank. If it is raised while
  ranks plan or connect, those that wait for the rank see one that does not come.
- Where others wait in a collective of the update, that ends as the data plane ends it, at its own
  timeout at the latest. Then all raise a `GroupFailure` that names the rank.
- Nothing is written, on the others and on the rank itself. If it lives, it raises too; a rank that
  was stopped within as long.

Moments:

{NEWLINE.join(f"- *{name}*: {what}" for name, what in MOMENTS.items())}

"""


def main() -> int:
    """Run all rows; return 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write results/failures_*")
    parser.add_argument("--only", help="rows of this kind or moment", choices=[*KINDS, *MOMENTS])
    options = parser.parse_args()
    where = environment(seed=0)
    rows = [row for row in matrix() if options.only in (None, row.kind, row.moment)]
    found: list[Outcome] = []
    with ProcessPoolExecutor(RUNS_AT_ONCE, get_context("spawn")) as pool:
        for some in pool.map(outcomes, batches(rows)):
            found += some
            for outcome in some:
                print(" | ".join(_cells(outcome)), *outcome.problems, sep="\n    ", flush=True)
    found.sort(key=_order)
    text = TEXT + table(found)
    if options.write:
        content: Record = {"rows": [{**asdict(each), "kept": not each.problems} for each in found]}
        parts = options.only or "kill-stop-exit-raise"
        print("written:", write_results("failures", parts, where, content, text))
    return int(any(each.problems for each in found))


if __name__ == "__main__":
    sys.exit(main())

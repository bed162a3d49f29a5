"""Start the ranks, show what they do, and judge it."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import TextIO

from consensus.demo import _report
from consensus.demo._faults import FAULTS
from consensus.demo._judge import judge
from consensus.demo._outcome import Run
from consensus.demo._records import Feed, Record
from consensus.demo._settings import Settings
from consensus.demo._text import Corpus
from consensus.demo._train import train_rank
from consensus.testing import run_ranks

LOOK_S = 0.1  # between two looks at what ranks have written


def run_demo(settings: Settings, corpus: Corpus, out: TextIO) -> int:
    """Run the demo and show it on ``out``; return 0 if every promise held, else 1."""
    print(_report.opening(settings, corpus), file=out, flush=True)
    with tempfile.TemporaryDirectory(prefix="consensus-demo-") as name:
        watcher = _Watcher(Feed(Path(name), settings.ranks), _report.Display(settings, out))
        watcher.start()
        try:
            results = run_ranks(
                train_rank,
                settings.ranks,
                settings,
                corpus.text,
                Path(name),
                timeout=settings.deadline_s,
                group_timeout=settings.data_plane_s,
            )
        finally:
            watcher.stop()
    records: tuple[list[Record], ...] = tuple([] for _ in range(settings.ranks))
    for rank, record in watcher.records:
        records[rank].append(record)
    exitcodes = tuple(None if result.hung else result.exitcode for result in results)
    run = Run(settings, tuple(tuple(listed) for listed in records), exitcodes)
    promises = judge(run)
    tables = [_report.table(run, scene) for scene in FAULTS[settings.fault] if run.seen(scene)]
    parts = [_report.cost(run), *tables, _report.verdict(promises, settings, out)]
    print("\n" + "\n\n".join(part for part in parts if part), file=out, flush=True)
    held = all(promise.held for promise in promises)
    if not held:
        print(results.report(), file=out, flush=True)
    return 0 if held else 1


class _Watcher(threading.Thread):
    """Shows what the ranks write while the main thread waits for their ends."""

    def __init__(self, feed: Feed, display: _report.Display) -> None:
        super().__init__(name="demo-display", daemon=True)
        self.records: list[tuple[int, Record]] = []
        self._feed, self._display = feed, display
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._look()
        self._look()
        self._display.close()

    def stop(self) -> None:
        """Show the rest and end."""
        self._ended.set()
        self.join()

    def _look(self) -> None:
        new = self._feed.new()
        self.records += new
        self._display.show(new)

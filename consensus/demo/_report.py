"""What the demo shows: a progress bar, a table of what every rank saw, and the promises."""

from __future__ import annotations

import re
import shutil
import signal
import textwrap
from collections.abc import Mapping, Sequence
from typing import TextIO

from consensus._text import join_ranks
from consensus.demo._faults import FAULTS, Scene
from consensus.demo._judge import Promise, harm
from consensus.demo._outcome import Cost, Run, cost_of_last, duration, mean_loss
from consensus.demo._records import Built, Record, Seen, Step, Trigger
from consensus.demo._settings import Settings
from consensus.demo._text import Corpus

BAR = 24  # characters
TEXT_WIDTH = 100  # characters in a line of text
LINES = 10  # of progress, where there is no terminal


class Display:
    """Shows a run while it goes on.

    On a terminal the progress bar is one line that is painted anew. Elsewhere, in a log file or a
    pipe, it is a few lines and no carriage return.
    """

    def __init__(self, settings: Settings, out: TextIO) -> None:
        self._settings = settings
        self._out = out
        self._live = out.isatty()
        self._open_line = False
        self._steps: dict[int, list[Step]] = {}
        self._built = False

    def show(self, records: Sequence[tuple[int, Record]]) -> None:
        """Show what is new."""
        for _, record in records:
            if isinstance(record, Built) and not self._built:
                self._built = True
                self._print(_training_of(self._settings, record))
            elif isinstance(record, Step) and record.number < self._settings.steps:
                ranks = self._steps.setdefault(record.number, [])
                ranks.append(record)
                if len(ranks) == self._settings.ranks:
                    self._progress(record.number + 1, ranks)
            elif isinstance(record, Trigger):
                self._print(f"\nFault: {what_happens(self._settings, record.scene)}.")

    def close(self) -> None:
        """End a line that is still open."""
        if self._open_line:
            self._out.write("\n")
            self._out.flush()
            self._open_line = False

    def _print(self, text: str) -> None:
        self.close()
        print(text, file=self._out, flush=True)

    def _progress(self, done: int, ranks: Sequence[Step]) -> None:
        total = self._settings.steps
        line = _progress_line(done, total, ranks, agrees=not self._settings.unguarded)
        if self._live:
            width = _width() - 1
            self._out.write("\r" + line[:width].ljust(width))
            self._out.flush()
            self._open_line = True
        elif done * LINES // total > (done - 1) * LINES // total:
            self._print(line)


def what_happens(settings: Settings, scene: str) -> str:
    """Return the sentence that says what a scene does to which rank."""
    found = next(s for s in FAULTS[settings.fault] if s.name == scene)
    return found.what.format(guilty=f"rank {settings.guilty}")


def opening(settings: Settings, corpus: Corpus) -> str:
    """Return what is about to happen."""
    how = "every rank decides alone (--unguarded)" if settings.unguarded else "the ranks agree"
    return _wrapped(
        f"Training a character transformer on {corpus.origin} ({len(corpus.text):,} characters): "
        f"{settings.ranks} processes on this machine's CPU, gloo, FSDP2; {how}."
    )


def _training_of(settings: Settings, built: Built) -> str:
    by = f"{built.parameters:,} weights: {settings.optimizer} steps"
    if not built.others:
        return f"{by} all {built.stepped} parameters."
    return f"{by} {built.stepped} hidden matrices, AdamW {built.others} other parameters."


def _progress_line(done: int, total: int, ranks: Sequence[Step], *, agrees: bool) -> str:
    seconds = max(step.seconds for step in ranks)
    filled = BAR * done // total
    share = f"agreement {cost_of_last(ranks) / seconds:6.2%}" if agrees else "no agreement"
    return (
        f"step {done:{len(str(total))}}/{total} [{'#' * filled}{'-' * (BAR - filled)}] "
        f"loss {mean_loss(ranks):.3f}  {1e3 * seconds:4.0f} ms/step  {share}"
    )


def cost(run: Run) -> str:
    """Return what the agreements of the healthy steps took; empty when there were none."""
    steps = {n: ranks for n, ranks in run.steps().items() if n < run.settings.steps}
    if not steps or run.settings.unguarded:
        return ""
    found = Cost.of(steps)
    return _wrapped(
        f"A step took {duration(found.step)}. Its two agreements, one before anything is "
        f"written and one at the end, took {duration(found.added)} of it "
        f"({found.added / found.step:.2%}) on the rank that came last. The mean over all ranks is "
        f"{duration(found.waited)}: the others wait in them for the slowest rank, as they would "
        "in the next collective."
    )


def table(run: Run, scene: Scene) -> str:
    """Return what every rank saw of a scene: a table, then the errors in full."""
    seen = run.seen(scene)
    last = "harm" if run.settings.unguarded else "may go on"
    head = ("rank", "saw", "after", "parameters", last, "first line")
    rows = [head, *(_row(run, scene, rank) for rank in run.ranks)]
    title = f"What every rank saw ({scene.name}; * is the rank at fault):"
    return "\n".join([title, *_aligned(rows), *_in_full(seen)])


def _row(run: Run, scene: Scene, rank: int) -> tuple[str, ...]:
    name = f"{'*' if rank == run.settings.guilty else ' '}{rank}"
    what = run.seen(scene).get(rank)
    unguarded = run.settings.unguarded
    suffered = harm(run, scene, rank).name.lower()
    if what is None:
        return name, _gone(run.exitcodes[rank]), "", "", suffered if unguarded else "", ""
    delay = run.delays(scene).get(rank)
    state = "MOVED" if what.moved else "unmoved"
    if unguarded and not what.error:
        state = f"{what.diverged} wrong" if what.diverged else "right"
    first = what.text.partition("\n")[0]
    return (
        name,
        what.error or "no error",
        "" if delay is None else duration(delay),
        state,
        suffered if unguarded else "yes" if what.may_go_on else "NO",
        re.sub(r"^\[/\S+\] ", "", first),  # gloo begins with the path of its source file
    )


def _gone(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return "(nothing)"
    return f"({signal.Signals(-exitcode).name})"


def _in_full(seen: Mapping[int, Seen]) -> list[str]:
    texts: dict[str, tuple[int, ...]] = {}
    for rank, what in seen.items():
        text = f"{what.error}: {what.text}"
        texts[text] = (*texts.get(text, ()), rank)
    texts.pop(": ", None)  # of ranks without an error
    lines = []
    for text, ranks in texts.items():
        lines.append(f"In full, on {join_ranks(ranks)}:")
        lines += [f"    {line}" for line in text.splitlines()]
    return lines


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    limit = _width()
    lines = []
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        line = line.rstrip()
        lines.append(line if len(line) <= limit else f"{line[: limit - 3]}...")
    return lines


def verdict(promises: Sequence[Promise], settings: Settings, out: TextIO) -> str:
    """Return every promise with a tick or a cross, and how many held."""
    tick, cross = _marks(out)
    lines = []
    for promise in promises:
        mark = f"  {tick if promise.held else cross} "
        lines.append(_wrapped(promise.text, first=mark, indent=" " * len(mark)))
    broken = sum(not promise.held for promise in promises)
    end = f"{broken} of {len(promises)} did not hold." if broken else f"All {len(promises)} held."
    return "\n".join(["Checks" if settings.unguarded else "Promises", *lines, end])


def _marks(out: TextIO) -> tuple[str, str]:
    try:
        "\u2713\u2717".encode(out.encoding or "ascii")
    except UnicodeEncodeError:
        return "[ok]    ", "[BROKEN]"
    return "\u2713", "\u2717"


def _wrapped(text: str, *, first: str = "", indent: str = "") -> str:
    return textwrap.fill(
        text,
        min(_width(), TEXT_WIDTH),
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns

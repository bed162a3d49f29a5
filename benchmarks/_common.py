"""What the measurements share: where and with what they ran, spreads, and files of results."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

Record: TypeAlias = dict[str, Any]

RESULTS = Path(__file__).resolve().parent / "results"


def environment(*, seed: int) -> Record:
    """Return what a reader needs to know to repeat a measurement, or to distrust it."""
    return {
        "commit": _git("rev-parse", "--short", "HEAD"),
        "uncommitted changes": bool(_git("status", "--porcelain", "consensus", "adapters")),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads a rank": 1,
        "scheduling": _scheduling(),
        "load when started": round(os.getloadavg()[0], 1),
        "command": shlex.join(["python", *sys.argv]),
        "seed": seed,
    }


def spread(values: Iterable[float], *, digits: int = 1) -> Record:
    """Return count, minimum, quartiles and maximum."""
    listed = sorted(values)
    low, middle, high = statistics.quantiles(listed, n=4)
    found = {"min": listed[0], "q1": low, "median": middle, "q3": high, "max": listed[-1]}
    return {"samples": len(listed), **{name: round(x, digits) for name, x in found.items()}}


def microseconds(seconds: Iterable[float]) -> list[float]:
    """Return times in microseconds."""
    return [1e6 * value for value in seconds]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose first column is text and whose others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write_results(theme: str, parts: str, environment: Record, content: Record, text: str) -> Path:
    """Write results/THEME_HARDWARE_DATE_PARTS.json and .md; return the path of the latter."""
    hardware = f"{environment['cpu']} {environment['cores']} cores".lower()
    hardware = re.sub(r"[^a-z0-9]+", "-", hardware).strip("-")
    stem = f"{theme}_{hardware}_{environment['date']}_{parts}"
    RESULTS.mkdir(exist_ok=True)
    data = {"environment": environment, **content}
    (RESULTS / f"{stem}.json").write_text(json.dumps(data, indent=1) + "\n")
    path = RESULTS / f"{stem}.md"
    listed = "\n".join(f"- {name}: {value}" for name, value in environment.items())
    path.write_text(f"{text}\n\n## Where and how\n\n{listed}\n")
    return path


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(RESULTS.parent.parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _scheduling() -> str:
    policies = {os.SCHED_OTHER: "normal", os.SCHED_FIFO: "real-time", os.SCHED_RR: "real-time"}
    return f"{policies.get(os.sched_getscheduler(0), 'other')}, nice {os.nice(0)}"

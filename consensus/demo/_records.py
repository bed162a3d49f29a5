"""What ranks tell the process that started them, as lines of JSON in one file a rank.

Files and not pipes: what a rank wrote before it was killed or hung can still be read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Built:
    """What this rank trains; equal on every rank."""

    parameters: int  # numbers in the whole model
    stepped: int  # parameters of the optimizer that agrees
    others: int = 0  # parameters of AdamW


@dataclass(frozen=True, slots=True)
class Step:
    """One healthy training step of one rank."""

    number: int
    loss: float  # nats a character, of this rank's batch
    seconds: float
    votes: tuple[float, ...]  # seconds in each agreement, waiting for peers included


@dataclass(frozen=True, slots=True)
class Trigger:
    """The fault happens here and now."""

    scene: str
    at: float  # time.monotonic(), which all processes of a machine share


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw of a fault."""

    scene: str
    at: float  # time.monotonic() when the step ended
    error: str = ""  # class name; empty when the step returned
    text: str = ""  # of the error
    cause: str = ""  # class name of its __cause__
    failures: dict[str, str] = field(default_factory=dict)  # rank -> its own error
    absent: tuple[int, ...] = ()  # ranks that did not come, as the error says
    may_go_on: bool = True
    moved: str = ""  # what changed of parameters and optimizer state; empty when nothing did
    diverged: int = 0  # elements that are not those of the same step without the fault


Record: TypeAlias = Built | Step | Trigger | Seen

_KINDS: dict[str, Callable[..., Record]] = {
    kind.__name__: kind for kind in (Built, Step, Trigger, Seen)
}


class Log:
    """One rank's file, in the rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = _path(folder, rank).open("ab", buffering=0)

    def write(self, record: Record) -> None:
        """Append a record, in one piece."""
        line = json.dumps([type(record).__name__, dataclasses.asdict(record)])
        self._file.write(f"{line}\n".encode())


class Feed:
    """The files of all ranks, as they grow."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._paths = [_path(folder, rank) for rank in range(num_ranks)]
        self._read = [0] * num_ranks  # bytes

    def new(self) -> list[tuple[int, Record]]:
        """Return (rank, record) of what was written since the last call, by rank."""
        found: list[tuple[int, Record]] = []
        for rank, path in enumerate(self._paths):
            data = path.read_bytes()[self._read[rank] :] if path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]  # the rest is being written
            self._read[rank] += len(whole)
            found += [(rank, _parse(line)) for line in whole.splitlines()]
        return found


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def _parse(line: bytes) -> Record:
    kind, values = json.loads(line)
    return _KINDS[kind](**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

"""What a run came to: the records of all ranks and how their processes ended. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

from consensus.demo._faults import Scene
from consensus.demo._records import Record, Seen, Step, Trigger
from consensus.demo._settings import Settings

T = TypeVar("T", bound=Record)


@dataclass(frozen=True, slots=True)
class Run:
    """All that is known of a run."""

    settings: Settings
    records: tuple[tuple[Record, ...], ...]  # by rank, in the order they were written
    # By rank; negative for the signal that ended it, None if it still ran at the deadline.
    exitcodes: tuple[int | None, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.settings.ranks))

    @property
    def peers(self) -> tuple[int, ...]:
        """All ranks but the guilty one."""
        return tuple(rank for rank in self.ranks if rank != self.settings.guilty)

    def of(self, rank: int, kind: type[T]) -> list[T]:
        """Return the records of this kind that a rank wrote."""
        return [record for record in self.records[rank] if isinstance(record, kind)]

    def steps(self) -> dict[int, list[Step]]:
        """Return step number -> one record a rank, of the steps that every rank has taken."""
        by_number: dict[int, list[Step]] = {}
        for rank in self.ranks:
            for step in self.of(rank, Step):
                by_number.setdefault(step.number, []).append(step)
        return {
            n: listed for n, listed in sorted(by_number.items()) if len(listed) == len(self.ranks)
        }

    def seen(self, scene: Scene) -> dict[int, Seen]:
        """Return rank -> what it saw of a scene, for the ranks that lived to say so."""
        return {
            rank: seen
            for rank in self.ranks
            for seen in self.of(rank, Seen)
            if seen.scene == scene.name
        }

    def delays(self, scene: Scene) -> dict[int, float]:
        """Return rank -> seconds from the fault until its step ended."""
        struck = [t.at for t in self.of(self.settings.guilty, Trigger) if t.scene == scene.name]
        return {rank: seen.at - struck[0] for rank, seen in self.seen(scene).items() if struck}


def mean_loss(ranks: Sequence[Step]) -> float:
    """Return the loss of one step over all ranks, in nats a character."""
    return fmean(step.loss for step in ranks)


def cost_of_last(ranks: Sequence[Step]) -> float:
    """Return the seconds that a step's agreements took whoever came last to each of them.

    All others also wait for the slowest rank, and would do so in the next collective if there were
    no agreement. So this is what the agreements themselves add.
    """
    return sum(map(min, zip(*(step.votes for step in ranks), strict=True)), 0.0)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a healthy step and its agreements took; each the median over the steps, in seconds."""

    step: float  # on the slowest rank
    added: float  # see cost_of_last
    waited: float  # mean over ranks, waiting for the slowest rank included

    @classmethod
    def of(cls, steps: Mapping[int, Sequence[Step]]) -> Cost:
        """Return the cost of these steps; the first, which warms up, is left out."""
        counted = [steps[number] for number in sorted(steps)]
        counted = counted[1:] or counted
        return cls(
            step=median(max(step.seconds for step in ranks) for ranks in counted),
            added=median(cost_of_last(ranks) for ranks in counted),
            waited=median(fmean(sum(step.votes) for step in ranks) for ranks in counted),
        )


def duration(seconds: float) -> str:
    """Return "0.4 ms", "12 ms" or "4.2 s"."""
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.01 else f"{1e3 * seconds:.0f} ms"

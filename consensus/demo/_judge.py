"""Which promises held: from what the ranks said and how they ended, to named checks. No I/O."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import fmean

from consensus._text import join_ranks
from consensus.demo._faults import FAULTS, End, Scene
from consensus.demo._outcome import Run, duration, mean_loss
from consensus.demo._records import Seen
from consensus.demo._settings import DATA_PLANE_S, GIVE_UP_S, HANG_S, NOTICE_S, RELEASE_S


@dataclass(frozen=True, slots=True)
class Promise:
    """One thing that must hold, and whether it did."""

    text: str
    held: bool


def judge(run: Run) -> tuple[Promise, ...]:
    """Return every promise of this run, in the order to show them."""
    scenes = FAULTS[run.settings.fault]
    found = [_loss_fell(run)]
    if run.settings.unguarded:
        found += [_harm_shows(run, scene) for scene in scenes[:1]]
    else:
        for scene in scenes:
            found += _JUDGES[scene.end](run, scene)
        if scenes and scenes[-1].end in (End.GO_ON, End.SKIP):
            found.append(_went_on(run))
    return (*found, _all_ended(run))


def _loss_fell(run: Run) -> Promise:
    losses = [mean_loss(ranks) for n, ranks in run.steps().items() if n < run.settings.steps]
    few = max(1, len(losses) // 10)
    start, end = (fmean(part) if part else 0.0 for part in (losses[:few], losses[-few:]))
    return Promise(
        f"every rank trained {len(losses)} of {run.settings.steps} steps, and the loss fell "
        f"from {start:.2f} to {end:.2f} nats a character",
        len(losses) == run.settings.steps and end < start,
    )


def _all_raise(run: Run, scene: Scene) -> Iterator[Promise]:
    guilty, seen = run.settings.guilty, run.seen(scene)
    texts = {said.text for said in seen.values()}
    yield Promise(
        f"every rank raised {scene.error}",
        set(seen) == set(run.ranks) and all(s.error == scene.error for s in seen.values()),
    )
    yield Promise(
        f"with the same text everywhere, which names rank {guilty}",
        len(texts) == 1 and all(f"rank {guilty}" in text for text in texts),
    )
    if scene.said:
        own = scene.said.partition(":")[0]
        yield Promise(
            f"the text holds what rank {guilty} raised: {scene.said}",
            bool(texts) and all(scene.said in text for text in texts),
        )
        yield Promise(
            f"on rank {guilty} its own {own} is the __cause__",
            guilty in seen and seen[guilty].cause == own,
        )
    yield _nothing_moved(seen)
    yield _in_time(run, scene, NOTICE_S)


def _all_skip(run: Run, scene: Scene) -> Iterator[Promise]:
    seen = run.seen(scene)
    yield Promise(
        "when the overflow is agreed, every rank skips the step and none raises",
        set(seen) == set(run.ranks) and not any(s.error for s in seen.values()),
    )
    yield _nothing_moved(seen)


def _strands_peers(run: Run, scene: Scene) -> Iterator[Promise]:
    guilty, seen = run.settings.guilty, run.seen(scene)
    own = seen.get(guilty, Seen(scene.name, 0.0))
    kind = scene.said.partition(":")[0].rpartition(".")[2]
    yield Promise(
        f"rank {guilty} gave up after {GIVE_UP_S:.0f} s and raised its own error: {scene.said}",
        own.failures.get(str(guilty)) == scene.said and own.cause == kind,
    )
    yield Promise(f"it said who was missing: {join_ranks(run.peers)}", own.absent == run.peers)
    yield Promise(
        f"its end released its peers, each with an error that holds rank {guilty}'s",
        all(p in seen and seen[p].failures.get(str(guilty)) == scene.said for p in run.peers),
    )
    yield _nothing_moved(seen)
    yield _in_time(run, scene, RELEASE_S)
    yield _must_stop(seen)


def _is_killed(run: Run, scene: Scene) -> Iterator[Promise]:
    guilty, seen = run.settings.guilty, run.seen(scene)
    yield Promise(f"rank {guilty} is gone", run.exitcodes[guilty] == -signal.SIGKILL)
    yield Promise(
        f"every survivor raised an error that says that rank {guilty} did not come",
        all(peer in seen and guilty in seen[peer].absent for peer in run.peers),
    )
    yield _nothing_moved(seen)
    yield _in_time(run, scene, NOTICE_S)
    yield _must_stop(seen)


_JUDGES = {
    End.GO_ON: _all_raise,
    End.SKIP: _all_skip,
    End.STOP: _strands_peers,
    End.GONE: _is_killed,
}


def _nothing_moved(seen: Mapping[int, Seen]) -> Promise:
    return Promise(
        "no parameter and no optimizer state moved on any rank, byte for byte",
        bool(seen) and not any(said.moved for said in seen.values()),
    )


def _in_time(run: Run, scene: Scene, bound: float) -> Promise:
    slowest = max(run.delays(scene).values(), default=float("inf"))
    return Promise(
        f"every rank knew within {bound:.0f} s, the last after {duration(slowest)} "
        f"(a collective of the data plane waits {DATA_PLANE_S:.0f} s)",
        slowest <= bound,
    )


def _must_stop(seen: Mapping[int, Seen]) -> Promise:
    return Promise(
        "every rank was told that the group cannot go on",
        bool(seen) and not any(said.may_go_on for said in seen.values()),
    )


def _went_on(run: Run) -> Promise:
    losses = [mean_loss(ranks) for n, ranks in run.steps().items() if n >= run.settings.steps]
    shown = " ".join(f"{loss:.2f}" for loss in losses)
    return Promise(
        f"the group may go on and did: {len(losses)} of {run.settings.steps_after} more steps "
        f"(loss {shown or 'unknown'})",
        len(losses) == run.settings.steps_after
        and all(s.may_go_on for r in run.ranks for s in run.of(r, Seen)),
    )


def _all_ended(run: Run) -> Promise:
    hung = tuple(rank for rank, code in enumerate(run.exitcodes) if code is None)
    return Promise(
        "every process ended by itself"
        + (f"; {join_ranks(hung)} had to be killed" if hung else ""),
        not hung and (run.settings.unguarded or run.exitcodes == _expected_exitcodes(run)),
    )


def _expected_exitcodes(run: Run) -> tuple[int, ...]:
    """Return 0, or 1 for a rank that raises since the group cannot go on."""
    scenes = FAULTS[run.settings.fault]
    end = scenes[-1].end if scenes else End.GO_ON
    code = 1 if end in (End.STOP, End.GONE) else 0
    killed = -int(signal.SIGKILL) if end is End.GONE else code
    return tuple(killed if rank == run.settings.guilty else code for rank in run.ranks)


# ---- without agreement ----


class Harm(Enum):
    """What a rank suffers from a fault on which nobody agrees."""

    NONE = "nothing"
    HUNG = f"hung until the timeout of {HANG_S:.0f} s"
    DIED = "died inside of a collective"
    NAMELESS = "got an error that names no rank"
    DIVERGED = "went on with wrong parameters, without an error"


def harm(run: Run, scene: Scene, rank: int) -> Harm:
    """Return what a rank suffered that agreement would have prevented."""
    seen, guilty = run.seen(scene).get(rank), run.settings.guilty
    if seen is None:
        return Harm.NONE if rank == guilty and scene.end is End.GONE else Harm.DIED
    if seen.error and run.delays(scene).get(rank, 0.0) >= 0.8 * HANG_S:
        return Harm.HUNG
    if seen.error and rank != guilty and f"rank {guilty}" not in seen.text:
        return Harm.NAMELESS
    return Harm.DIVERGED if seen.diverged else Harm.NONE


def _harm_shows(run: Run, scene: Scene) -> Promise:
    suffered: dict[Harm, tuple[int, ...]] = {}
    for rank in run.ranks:
        what = harm(run, scene, rank)
        suffered[what] = (*suffered.get(what, ()), rank)
    suffered.pop(Harm.NONE, None)
    shown = "; ".join(f"{join_ranks(ranks)} {what.value}" for what, ranks in suffered.items())
    return Promise(
        f"without agreement the fault does harm: {shown or 'none was seen'}", bool(suffered)
    )

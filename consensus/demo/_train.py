"""What one rank does: train, meet the fault, say what it saw, and go on if the group may."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import consensus
from consensus.demo._faults import FAULTS, End, Scene
from consensus.demo._records import Built, Feed, Log, Seen, Step, Trigger
from consensus.demo._settings import GIVE_UP_S, Settings
from consensus.demo._worker import PREPARE_S, Worker, build_worker, train_step
from consensus.testing import Snapshot, assert_unchanged, snapshot, without_agreement

MAX_TEXT = 2000  # characters of an error in a record


def train_rank(rank: int, settings: Settings, text: str, folder: Path) -> None:
    """Run the whole demo on one rank; what it has to say goes to ``folder``.

    Raises:
        ConsensusError: The error after which the group cannot go on; it ends this process, as it
            would end a real job.
    """
    log = Log(folder, rank)
    with without_agreement() if settings.unguarded else nullcontext():
        worker = build_worker(rank, text, settings.optimizer)
        log.write(_describe(worker))
        _train(worker, range(settings.steps), log)
        scenes = FAULTS[settings.fault]
        for scene in scenes[:1] if settings.unguarded else scenes:
            error, seen = _meet(worker, scene, settings, log)
            log.write(seen)
            if settings.unguarded:
                _outstay(folder, settings)
            elif error is not None and not seen.may_go_on:
                raise error
        first = settings.steps
        _train(worker, range(first, first + settings.steps_after), log)


def _describe(worker: Worker) -> Built:
    parameters = list(worker.model.parameters())
    listed = [sum(len(group["params"]) for group in o.param_groups) for o in worker.optimizers]
    return Built(sum(parameter.numel() for parameter in parameters), *listed)


def _train(worker: Worker, numbers: range, log: Log) -> None:
    worker.clock.take()
    for number in numbers:
        start = time.perf_counter()
        loss = train_step(worker)
        seconds = time.perf_counter() - start
        log.write(Step(number, loss, seconds, worker.clock.take()))


def _meet(
    worker: Worker, scene: Scene, settings: Settings, log: Log
) -> tuple[Exception | None, Seen]:
    """Take one step in which the fault happens; return what it raised, and what was seen."""
    expected = _rehearse(worker) if settings.unguarded else None
    if scene.end is End.STOP:  # a rank that failed would wait half a minute for its peers
        consensus.control_group(worker.main, timeout=GIVE_UP_S).prepare(PREPARE_S)
    before = [snapshot(optimizer, gradients=False) for optimizer in worker.optimizers]
    error: Exception | None = None
    with ExitStack() as stack:
        if worker.rank == settings.guilty:
            stack.enter_context(
                scene.arm(worker, lambda: log.write(Trigger(scene.name, time.monotonic())))
            )
        if scene.everywhere is not None:
            stack.enter_context(scene.everywhere(worker))
        try:
            train_step(worker)
        except Exception as caught:
            error = caught
        at = time.monotonic()
    moved = _what_moved(worker.optimizers, before)
    diverged = _count_different(worker, expected) if expected is not None and not error else 0
    return error, _seen(scene, at, error, moved, diverged)


def _seen(scene: Scene, at: float, error: Exception | None, moved: str, diverged: int) -> Seen:
    if error is None:
        return Seen(scene.name, at, moved=moved, diverged=diverged)
    failures: dict[str, str] = {}
    absent: tuple[int, ...] = ()
    may_go_on = isinstance(error, consensus.Disagreement)
    if isinstance(error, consensus.GroupFailure):
        failures = {str(failure.rank): failure.headline() for failure in error.failures}
        absent, may_go_on = error.late_ranks, error.recoverable
    elif isinstance(error, consensus.LateRanks):
        absent = error.ranks
    cause = type(error.__cause__).__name__ if error.__cause__ is not None else ""
    return Seen(
        scene.name,
        at,
        error=type(error).__name__,
        text=str(error)[:MAX_TEXT],
        cause=cause,
        failures=failures,
        absent=absent,
        may_go_on=may_go_on,
        moved=moved,
    )


def _what_moved(optimizers: tuple[Optimizer, ...], before: list[Snapshot]) -> str:
    """Return what changed of parameters, state and options since ``before``, byte for byte."""
    found = []
    for optimizer, then in zip(optimizers, before, strict=True):
        try:
            assert_unchanged(optimizer, then)
        except AssertionError as changed:
            found.append(str(changed)[:MAX_TEXT])
    return "\n".join(found)


# ---- without agreement ----


def _rehearse(worker: Worker) -> list[Tensor]:
    """Take the coming step without the fault, and take it back; return the parameters it gave.

    Collectives:
        Those of :func:`train_step`. Every rank must call.
    """
    parameters = [_local(parameter) for parameter in worker.model.parameters()]
    kept = [parameter.clone() for parameter in parameters]
    states = [deepcopy(optimizer.state_dict()) for optimizer in worker.optimizers]
    batch = worker.generator.get_state()
    train_step(worker)
    expected = [parameter.clone() for parameter in parameters]
    for parameter, then in zip(parameters, kept, strict=True):
        parameter.copy_(then)
    for optimizer, state in zip(worker.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    worker.generator.set_state(batch)
    return expected


def _count_different(worker: Worker, expected: list[Tensor]) -> int:
    parameters = [_local(parameter) for parameter in worker.model.parameters()]
    return sum(int((a != b).sum()) for a, b in zip(parameters, expected, strict=True))


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which shares its memory with ``tensor``."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _outstay(folder: Path, settings: Settings) -> None:
    """Stay until the peers have come out of the step, or their timeout must have ended it.

    A process that ends closes its connections, and that frees its peers. A real one stays:
    it saves, it logs, or it goes on and waits in some other collective.
    """
    feed = Feed(folder, settings.ranks)
    left = set(range(settings.ranks))
    until = time.monotonic() + settings.data_plane_s + 2.0
    while left and time.monotonic() < until:
        left -= {rank for rank, record in feed.new() if isinstance(record, Seen)}
        time.sleep(0.05)

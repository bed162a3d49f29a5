"""Run an optimizer through the laws, and say which ones it keeps and what was seen otherwise.

[Note: how a law that hangs ends]
Each stage of a law runs in a thread of its rank, whose main thread waits until the deadline, asks
where the thread is, and tells the others over the job's store. So every rank learns how every other
fared, also when its own part is stuck in a collective. The processes then end, since a thread in a
collective cannot be freed, and the next law starts new ones. A rank whose process ends leaves what
it had seen in files; what it could not say is taken from the exit of its process.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
import select
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in __all__
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from consensus._text import join_ranks
from consensus.testing._laws import FAULTY, LAWS, Judged, Law, Seen, Stage, Trial
from consensus.testing._processes import run_ranks
from consensus.testing._ranks import RankResult, Ranks, describe
from consensus.testing._stacks import stack_of
from consensus.testing._subject import SHAPES, Named, NoOptimizer, Shapes, made_by

_STAGES = 3  # of one law, at most
_GRACE_SECONDS = 10.0  # beyond a deadline, for a rank to say how it fared
_SLICE_SECONDS = 0.1  # how long the end of a process may go unnoticed


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one law.

    Attributes:
        law: Its name.
        promise: What it asks for.
        problems: What was seen instead, line by line; empty if the law was kept.
        note: What the ranks said, or how equal results were.
    """

    law: str
    promise: str
    problems: tuple[str, ...]
    note: str

    @property
    def kept(self) -> bool:
        """Whether the optimizer keeps the law."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class Conformance:
    """Which laws an optimizer keeps; ``str()`` is a text to read.

    Attributes:
        optimizer: What it was called.
        world_size: How many ranks there were.
        seconds: The deadline of each step.
        verdicts: One a law, in order.
    """

    optimizer: str
    world_size: int
    seconds: float
    verdicts: tuple[Verdict, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the laws that it keeps."""
        return tuple(verdict.law for verdict in self.verdicts if verdict.kept)

    @property
    def broken(self) -> tuple[str, ...]:
        """The names of the laws that it does not keep."""
        return tuple(verdict.law for verdict in self.verdicts if not verdict.kept)

    def assert_kept(self, *, except_for: Iterable[str] = ()) -> None:
        """Raise unless the optimizer keeps all laws but these, and breaks these.

        Raises:
            AssertionError: It does not; the text is the report.
            ValueError: No law that was tried has one of these names.
        """
        __tracebackhide__ = True  # of pytest: the text says all there is to see
        expected = set(except_for)
        if unknown := expected - {verdict.law for verdict in self.verdicts}:
            raise ValueError(f"no such law was tried: {sorted(unknown)}")
        if expected != set(self.broken):
            wanted = f"expected it to break {sorted(expected)} and no other:\n" if expected else ""
            raise AssertionError(f"{wanted}{self}")

    def __str__(self) -> str:
        """Return the report."""
        head = (
            f"{self.optimizer} on {self.world_size} ranks keeps {len(self.kept)} of "
            f"{len(self.verdicts)} laws (deadline of a step: {self.seconds:g} s)"
        )
        return "\n".join([head, *map(_told, self.verdicts)])


def conformance(
    make_optimizer: Callable[[Named], Optimizer],
    *,
    world_size: int = 2,
    laws: Sequence[Law] = LAWS,
    timeout: float = 10.0,
    tolerance: float = 1e-5,
    shapes: Shapes = SHAPES,
    name: str | None = None,
) -> Conformance:
    """Return which laws an optimizer keeps when its parameters are sharded and a rank goes wrong.

    Parameters are DTensors on a mesh with one axis, placed ``Shard(0)`` as by FSDP2, some uneven
    and some empty on later ranks; backend gloo, on the CPU. An optimizer that hangs, raises or
    ends its process breaks the law that was tried, and the report says how; it is no error here.

    Args:
        make_optimizer: Makes the optimizer of ``[(name, parameter), ...]``: a class, or a function
            at the top level of an importable module. Called for sharded and for plain parameters.
        world_size: Number of ranks, 2 or more; rank 1 is the one that goes wrong.
        laws: What to try; see ``LAWS``.
        timeout: Seconds a step may take. Each law that ends in a hang costs as much, and new ranks.
        tolerance: Largest absolute difference from one device that counts as equal.
        shapes: Name -> shape of the parameters, two or more; faults are about the first two, which
            should be alike and have 2 rows or more. The default is four small matrices.
        name: What to call it; else the name of what makes it.

    Raises:
        ValueError: A number is out of range.
        TypeError: ``make_optimizer`` cannot be pickled, or returns no optimizer.

    Collectives:
        None here. In each rank: those of ``init_process_group`` and of the optimizer.
    """
    if world_size <= FAULTY or timeout <= 0 or tolerance < 0:
        raise ValueError(
            f"conformance needs 2 ranks, some time and a tolerance of 0 or more; got "
            f"{world_size=}, {timeout=}, {tolerance=}."
        )
    first_two = list(shapes.values())[:2]
    if len(first_two) < 2 or any(not shape or shape[0] < 2 for shape in first_two):
        raise ValueError(
            "conformance needs two parameters or more, the first two of 2 rows or more so that "
            f"rank {FAULTY} holds some; got {dict(shapes)}."
        )
    plan = _Plan(make_optimizer, shapes, tolerance, timeout)
    verdicts: list[Verdict] = []
    while len(verdicts) < len(laws):
        verdicts += _some_verdicts(plan, world_size, laws[len(verdicts) :])
    named = getattr(make_optimizer, "func", make_optimizer)  # of a partial, what it calls
    called = name or str(getattr(named, "__name__", named))
    return Conformance(called, world_size, timeout, tuple(verdicts))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What every rank is told."""

    make: Callable[[Named], Optimizer]
    shapes: Shapes
    tolerance: float
    seconds: float


def _some_verdicts(plan: _Plan, world_size: int, laws: Sequence[Law]) -> list[Verdict]:
    """Start ranks and try laws in order, until all are tried or the ranks can go on no more."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as name:
        folder = Path(name)
        longest = plan.seconds * _STAGES + _GRACE_SECONDS
        ranks = run_ranks(
            _try_laws,
            world_size,
            plan,
            laws,
            folder,
            timeout=longest * len(laws) + _GRACE_SECONDS,
            group_timeout=2 * longest,  # past the deadline, so that a hang is seen as one
        )
        _refuse_without_optimizer(ranks)
        verdicts = []
        for number, law in enumerate(laws):
            judged = _judged(folder, number, ranks)
            verdicts.append(Verdict(law.name, law.promise, judged.problems, judged.note))
            if not _file(folder, number, _ON).exists():
                break
    return verdicts


def _refuse_without_optimizer(ranks: Ranks[None]) -> None:
    """Raise once what each law would say again."""
    errors = [(result.rank, result.error) for result in ranks]
    wrong = {rank: e.message for rank, e in errors if e is not None and e.is_a(NoOptimizer)}
    if wrong:
        said = next(iter(wrong.values()))
        raise TypeError(f"conformance, on {join_ranks(tuple(wrong))}: {said}")


def _try_laws(rank: int, plan: _Plan, laws: Sequence[Law], folder: Path) -> None:
    """Try laws in order as one rank; leave a file for each, and end when ranks went apart."""
    store = PrefixStore("conformance", dist.distributed_c10d._get_default_store())
    peers = _Peers.meet(store)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for number, law in enumerate(laws):
        make = partial(made_by, plan.make)
        trial = Trial(make, plan.shapes, mesh, rank == FAULTY, plan.tolerance, plan.seconds)
        talk = _Talk(PrefixStore(f"law {number}", store), peers, plan.seconds)
        judged = _follow(law, trial, talk)
        _file(folder, number, str(rank)).write_bytes(pickle.dumps(judged))
        if not talk.together:
            # A thread in a collective cannot be ended, and closing its group would wait for it.
            os._exit(0)
        _file(folder, number, _ON).touch()


def _follow(law: Law, trial: Trial, talk: _Talk) -> Judged:
    """Run the stages of a law on this rank; every rank returns the same."""
    course = law.course(trial)
    try:
        stage = next(course)
        while True:
            stage = course.send(talk.exchange(_pass(stage, trial.seconds)))
    except StopIteration as stop:
        judged: Judged = stop.value
        return judged


def _pass(stage: Stage, seconds: float) -> Seen:
    """Run one stage in a thread of its own, until it ends or its time is over."""
    rank, problem = dist.get_rank(), []

    def run() -> None:
        torch.set_num_threads(1)  # each thread has its own count, and that changes the bits
        try:
            stage.act()
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=run, name=f"rank{rank}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return Seen(rank, "hung", _place(stack_of(thread)))
    if problem and isinstance(problem[0], NoOptimizer):
        raise problem[0]  # it ends the run: no law can be tried
    try:
        found, note = tuple(stage.look()), stage.note()
    except Exception as error:
        found, note = (f"left what cannot be looked at: {_text(error)}",), ""
    default: Any = dist.distributed_c10d._get_default_group()
    held = int(default._get_sequence_number_for_group())
    if problem:
        return Seen(rank, "raised", _text(problem[0]), found, note, held)
    return Seen(rank, "returned", "", found, note, held)


@dataclass
class _Talk:
    """Over which ranks tell each other how they fared, whatever their process groups do.

    Attributes:
        together: All ranks are where the others are, and can go into another law.
    """

    store: Store
    peers: _Peers
    seconds: float
    together: bool = True
    _stage: int = 0

    def exchange(self, mine: Seen) -> tuple[Seen, ...]:
        """Return what each rank saw, in rank order."""
        self._stage += 1
        self.store.set(f"{self._stage} {mine.rank}", pickle.dumps(mine).hex())
        seen = tuple(self._of(rank) for rank in range(dist.get_world_size()))
        ended = any(each.ending in ("hung", "ended") for each in seen)
        if ended or len({each.collectives for each in seen}) > 1:
            self.together = False
        return seen

    def _of(self, rank: int) -> Seen:
        key, end = f"{self._stage} {rank}", time.monotonic() + self.seconds + _GRACE_SECONDS
        while True:
            gone = time.monotonic() > end or self.peers.has_ended(rank)
            try:
                self.store.wait([key], timedelta(seconds=_SLICE_SECONDS))
            except RuntimeError:
                if gone:  # it was, before we looked for its word
                    return Seen(rank, "ended", _NO_WORD)
                continue
            word: Seen = pickle.loads(bytes.fromhex(self.store.get(key).decode()))
            return word


@dataclass(frozen=True, slots=True)
class _Peers:
    """The processes of all ranks, to see that one has ended; where the system cannot say, no."""

    handles: tuple[int, ...]

    @classmethod
    def meet(cls, store: Store) -> _Peers:
        """Learn who the others are; every rank calls this."""
        store.set(f"pid {dist.get_rank()}", str(os.getpid()))
        pids = [int(store.get(f"pid {rank}")) for rank in range(dist.get_world_size())]
        return cls(tuple(map(os.pidfd_open, pids)) if hasattr(os, "pidfd_open") else ())

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of ``rank`` is known to have ended."""
        return bool(self.handles and select.select([self.handles[rank]], [], [], 0)[0])


# ---- words ----

_NO_WORD = "ended without a word"
_ON = "goes on"  # the file that says that the ranks did, into the next law
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def _file(folder: Path, number: int, of: str) -> Path:
    return folder / f"law {number} {of}"


def _judged(folder: Path, number: int, ranks: Ranks[None]) -> Judged:
    """Return what the ranks concluded, with how those ended that could not say so themselves."""
    files = [_file(folder, number, str(rank)) for rank in range(len(ranks))]
    exits = [_exit_of(ranks[rank]) for rank, path in enumerate(files) if not path.exists()]
    written = [path for path in files if path.exists()]
    if not written:  # nobody lived to tell
        return Judged(tuple(exits))
    judged: Judged = pickle.loads(written[0].read_bytes())  # the same on each
    lines = [exits if line.endswith(_NO_WORD) else [line] for line in judged.problems]
    return replace(judged, problems=tuple(itertools.chain(*lines)))


def _exit_of(result: RankResult[None]) -> str:
    line = describe(result, output_lines=0).partition("\n")[0]
    return line.removeprefix("--- ").rpartition(" (")[0]  # without the seconds


def _told(verdict: Verdict) -> str:
    if verdict.kept:
        note = f": {verdict.note}" if verdict.note else ""
        return f"  kept    {verdict.law}{note}"
    lines = (f"expected: {verdict.promise}", *verdict.problems)
    return "\n".join([f"  BROKEN  {verdict.law}", *(f"            {line}" for line in lines)])


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} without a text"


def _place(stack: str) -> str:
    """Return the innermost frame of a stack and, if that is torch's, the one that led there."""
    frames = _FRAME.findall(stack)
    if not frames:
        return "an unknown place"
    inner, *outer = (_frame(*frame) for frame in frames)
    callers = [frame for frame in outer if not frame.startswith(_MACHINERY)]
    return f"{inner}, from {callers[0]}" if callers and inner.startswith(_MACHINERY) else inner


# torch without its optimizers: what only carries out what was asked for.
_MACHINERY = tuple(
    f"torch/{part}" for part in ("distributed", "_", "utils", "autograd", "nn", "optim/optimizer")
)


def _frame(path: str, line: str, function: str) -> str:
    short = path.partition("site-packages/")[2] or path
    return f"{short}:{line} in {function}"

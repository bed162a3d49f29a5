"""What a sharded optimizer should keep to when one rank is not like the others.

A law is a generator: it yields a stage, which all ranks run under a deadline, and is sent what
each rank saw of it, the same on every rank. So every rank comes to the same judgement, and goes
into the next stage only if all do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from consensus._text import join_ranks
from consensus.testing._snapshot import assert_unchanged, snapshot
from consensus.testing._subject import Named, Shapes, Subject
from consensus.testing.faults import Call, NanGradient

FAULTY = 1  # the rank that is not like the others
STEPS = 3  # of a law about healthy steps


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw of one stage.

    Attributes:
        ending: "ended" is a process that ended, or could not say how it fared.
        text: The error, for a rank that raised; where it was, for one that hung.
        found: What is not as it should be on that rank, beyond its ending.
        note: What is worth knowing all the same.
        collectives: How many the data plane has seen on that rank.
    """

    rank: int
    ending: Literal["returned", "raised", "hung", "ended"]
    text: str = ""
    found: tuple[str, ...] = ()
    note: str = ""
    collectives: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a law: what to do under a deadline, and what to look at afterwards on this rank."""

    act: Callable[[], object]
    look: Callable[[], Iterable[str]] = tuple  # yields what is not as it should be
    note: Callable[[], str] = str


@dataclass(frozen=True, slots=True)
class Judged:
    """What all ranks conclude: the law is kept if there are no problems."""

    problems: tuple[str, ...] = ()
    note: str = ""


@dataclass
class Trial:
    """What a law works on, on one rank."""

    make: Callable[[Named], Optimizer]
    shapes: Shapes
    mesh: DeviceMesh
    faulty: bool
    tolerance: float
    seconds: float  # the deadline of a stage

    def begin(self, steps: int) -> None:
        """Build a fresh optimizer with its twin, and step them."""
        self.subject = Subject.on(self.mesh, self.make, self.shapes)
        for _ in range(steps):
            self.subject.healthy_step()

    def unlike(self) -> tuple[str, ...]:
        """Return what is not as on one device."""
        return self.subject.likeness(self.tolerance).differences

    def likeness(self) -> str:
        """Return how equal the rest is."""
        return self.subject.likeness(self.tolerance).note


Course: TypeAlias = Generator[Stage, Sequence[Seen], Judged]
Act: TypeAlias = Callable[[], object]
Disturb: TypeAlias = Callable[[Subject, bool], tuple[Act, Act]]


@dataclass(frozen=True)
class Law:
    """One law.

    Attributes:
        name: What happens.
        promise: What an optimizer that keeps the law does then.
        course: How it is tried.
    """

    name: str
    promise: str
    course: Callable[[Trial], Course]


# ---- steps in which nothing goes wrong ----


def _like_one_device(trial: Trial) -> Course:
    seen = yield Stage(partial(trial.begin, STEPS))
    if problems := _not_returned(seen, trial):
        return Judged(problems)
    seen = yield Stage(_nothing, trial.unlike, trial.likeness)
    return _as_found(seen)


def _scaled(trial: Trial) -> Course:
    """The gradients are unscaled exactly, so the step is that of one device without a scaler."""
    seen = yield Stage(partial(trial.begin, 1))
    if problems := _not_returned(seen, trial):
        return Judged(("before the scaled step:", *problems))
    subject = trial.subject
    subject.new_gradients()
    subject.scale_gradients()
    seen = yield Stage(partial(subject.scaled_step, False))
    if problems := _not_returned(seen, trial):
        return Judged(problems)
    seen = yield Stage(subject.twin.step, trial.unlike, trial.likeness)
    return _as_found(seen)


def _as_found(seen: Sequence[Seen]) -> Judged:
    notes = dict.fromkeys(each.note for each in seen if each.note)
    return Judged(_found(seen), " / ".join(notes))


def _plain(trial: Trial) -> Course:
    """Rank 1 alone steps plain parameters; the others do nothing, so nothing may be awaited."""
    come: list[BaseException | None] = []

    def alone() -> None:
        if not trial.faulty:
            return
        whole = {name: nn.Parameter(torch.ones(shape)) for name, shape in trial.shapes.items()}
        optimizer = trial.make(list(whole.items()))
        for param in whole.values():
            param.grad = torch.ones_like(param)
        optimizer.step()
        try:
            optimizer.step(_raise_alone)
            come.append(None)
        except Exception as error:
            come.append(error)
        optimizer.step()

    def own_error() -> Iterable[str]:
        if come and not isinstance(come[0], OneRankOnly):
            yield f"raised OneRankOnly in its closure, and out of the step came {come[0]!r}"

    seen = yield Stage(alone, own_error)
    return Judged((*_not_returned(seen, trial), *_found(seen)))


# ---- steps that should not take place ----


class OneRankOnly(ValueError):
    """What the closure of one rank raises."""


@dataclass(frozen=True)
class Refused:
    """A step before which something happens to one rank, and which no rank should make.

    Attributes:
        disturb: Is told whether this is the rank; returns the step to make, and what to do before
            the next one.
        before: How many steps have been made.
        skipping: All ranks may also return without having written anything.
        stepping: Whether all ranks may also step: never, as long as all do, or only if what they
            write is right, as on one device.
    """

    disturb: Disturb
    before: int = 1
    skipping: bool = False
    stepping: Literal["never", "alike", "rightly"] = "never"

    def __call__(self, trial: Trial) -> Course:
        """Try the law."""
        seen = yield Stage(partial(trial.begin, self.before))
        if problems := _not_returned(seen, trial):
            return Judged(("before anything went wrong:", *problems))
        subject = trial.subject
        subject.new_gradients()
        step, undo = self.disturb(subject, trial.faulty)
        untouched, shards = snapshot(subject.optimizer), subject.shards()

        def written() -> Iterable[str]:
            try:
                assert_unchanged(subject.optimizer, untouched)
            except AssertionError as error:
                yield f"wrote: {_shortened(str(error).splitlines()[1:])}"

        seen = yield Stage(step, written)
        endings = {each.ending for each in seen}
        note = first_line(seen[0].text) or "all ranks skipped the step"
        if endings == {"returned"} and self.stepping == "alike":
            seen = yield Stage(_nothing, note=lambda: subject.stepped(shards))
            acts = {each.note for each in seen if each.note}
            if acts <= {"stepped"}:
                return Judged(_found(seen), "all ranks stepped")
            if acts == {"wrote nothing"}:
                return Judged(_found(seen), "all ranks skipped the step")
            return Judged(_by_rank((each.rank, each.note) for each in seen if each.note))
        if endings == {"returned"} and self.stepping == "rightly":
            seen = yield Stage(subject.twin.step, trial.unlike)
            return Judged(_found(seen), "all ranks stepped, as on one device")
        if not (endings == {"raised"} or (self.skipping and endings == {"returned"})):
            return Judged((*_endings(seen, trial), *_found(seen)))
        if problems := _found(seen):
            return Judged((*_endings(seen, trial), *problems))
        undo()
        seen = yield Stage(subject.healthy_step, trial.unlike)
        if problems := (*_not_returned(seen, trial), *_found(seen)):
            return Judged((f"first: {note}", "then, in the next step:", *problems))
        return Judged(note=note)


def _nothing() -> None:
    """Stand for nothing to do."""


def _raise_alone() -> float:
    raise OneRankOnly(f"of rank {FAULTY} alone")


def _closure_raises(subject: Subject, faulty: bool) -> tuple[Act, Act]:
    def closure() -> float:
        subject.give_gradients()  # the backward pass
        return _raise_alone() if faulty else 1.0

    return lambda: subject.optimizer.step(closure), _nothing


def _lose_gradients(which: slice, subject: Subject, faulty: bool) -> tuple[Act, Act]:
    for param in list(subject.sharded.values())[which] if faulty else ():
        param.grad = None
    return subject.optimizer.step, _nothing


def _nan_gradient(subject: Subject, faulty: bool) -> tuple[Act, Act]:
    if faulty:
        first = next(iter(subject.sharded.values()))
        NanGradient(first).meet(Call(_nothing, []))
    return subject.optimizer.step, _nothing


def _overflow_on_one(subject: Subject, faulty: bool) -> tuple[Act, Act]:
    subject.scale_gradients()
    return partial(subject.scaled_step, faulty), partial(_forget_scaler, subject.optimizer)


def _overflow_on_all(subject: Subject, faulty: bool) -> tuple[Act, Act]:
    subject.scale_gradients()
    return partial(subject.scaled_step, True), partial(_forget_scaler, subject.optimizer)


def _forget_scaler(optimizer: Optimizer) -> None:
    """Take back what a scaler sets for one step; torch's leaves it behind when the step raises."""
    for name in ("found_inf", "grad_scale"):
        vars(optimizer).pop(name, None)


def _other_rate(subject: Subject, faulty: bool) -> tuple[Act, Act]:
    groups = subject.optimizer.param_groups
    rates = [group["lr"] for group in groups]

    def restore() -> None:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    for group in groups if faulty else ():
        group["lr"] = group["lr"] * 2
    return subject.optimizer.step, restore


def _other_order(subject: Subject, faulty: bool) -> tuple[Act, Act]:
    def swap() -> None:
        for group in subject.optimizer.param_groups if faulty else ():
            for key in ("params", "param_names"):
                if key in group:
                    group[key][:2] = group[key][1::-1]

    swap()
    return subject.optimizer.step, swap


# ---- how what was seen is told ----


def first_line(text: str) -> str:
    """Return what fits a line of a report."""
    line = text.partition("\n")[0]
    return line if len(line) <= _LINE else f"{line[: _LINE - 3]}..."


def _shortened(differences: Sequence[str]) -> str:
    """Return the first of the differences of a snapshot, and how many more there are."""
    first, *rest = differences
    unlisted = re.fullmatch(r"\.\.\. and (\d+) more", rest[-1]) if rest else None
    more = len(rest) if unlisted is None else len(rest) - 1 + int(unlisted[1])
    return f"{first}, and {more} more" if more else first


def _ending(seen: Seen, trial: Trial) -> str:
    if seen.ending == "raised":
        return f"raised {first_line(seen.text)}"
    if seen.ending == "hung":
        return f"did not come back within {trial.seconds:g} s, at: {seen.text}"
    return seen.text or seen.ending


def _by_rank(lines: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    """Say once what is the same on several ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, line in lines:
        ranks_of.setdefault(line, []).append(rank)
    return tuple(f"{join_ranks(ranks)} {line}" for line, ranks in ranks_of.items())


def _endings(seen: Sequence[Seen], trial: Trial) -> tuple[str, ...]:
    return _by_rank((each.rank, _ending(each, trial)) for each in seen)


def _not_returned(seen: Sequence[Seen], trial: Trial) -> tuple[str, ...]:
    return _endings([each for each in seen if each.ending != "returned"], trial)


def _found(seen: Sequence[Seen]) -> tuple[str, ...]:
    return _by_rank((each.rank, what) for each in seen for what in each.found)


_LINE = 200  # characters of an error's text in a report
_ALL_RAISE = "every rank raises in time, nothing is written, and the next step is as on one device"

LAWS: tuple[Law, ...] = (
    Law("healthy steps", "parameters and state are as on one device", _like_one_device),
    Law("a step under a gradient scaler", "it is the step without one", _scaled),
    Law("plain parameters on one rank", "it steps without the others", _plain),
    Law("a closure raises on one rank", _ALL_RAISE, Refused(_closure_raises)),
    Law("a closure raises in the first step", _ALL_RAISE, Refused(_closure_raises, before=0)),
    Law(
        "a gradient is missing on one rank",
        _ALL_RAISE,
        Refused(partial(_lose_gradients, slice(1, 2))),
    ),
    Law("one rank has no gradients", _ALL_RAISE, Refused(partial(_lose_gradients, slice(None)))),
    Law(
        "a gradient is NaN on one rank",
        "all ranks step, all skip the step, or all raise",
        Refused(_nan_gradient, stepping="alike"),
    ),
    Law(
        "one rank sees an overflow",
        "all ranks skip the step, or all raise",
        Refused(_overflow_on_one, skipping=True),
    ),
    Law(
        "all ranks see an overflow",
        "all ranks skip the step, or all raise",
        Refused(_overflow_on_all, skipping=True),
    ),
    Law("the learning rate differs on one rank", _ALL_RAISE, Refused(_other_rate)),
    Law(
        "parameters are in another order on one rank",
        f"{_ALL_RAISE}; or all step, as on one device",
        Refused(_other_order, stepping="rightly"),
    ),
)

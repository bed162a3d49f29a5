"""Learn a codebook and the block lengths from gradients: all ranks learn the same, or none does.

    stage      what each rank computes                        what they combine
    squares    the largest square of each gradient            MAX, over the mesh of each parameter
    periods    sums over blocks of each possible length       SUM, over the mesh of each parameter
    copies     which plain parameters others hold too         SUM, over all ranks
    blocks     the largest element of blocks that are cut     MAX, between the parts
    codebook   a histogram of all elements                    SUM, over all ranks

Each stage's local work runs inside an agreement, so a rank that fails there takes the others with
it instead of leaving them in the collective that follows. Everything is staged; the codebooks are
compared; then, after the last agreement, it is published. All sums are of integers, so the result
does not depend on how many ranks there are, nor on their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

import consensus
from adapters._blocks import Grid, make_grid
from adapters._codebook import (
    NUM_BINS,
    Codebook,
    is_degenerate,
    learn_levels,
    make_codebook,
    reindex,
)
from adapters._gefen_math import (
    block_histogram,
    block_maxima,
    cut_values,
    set_cut_values_,
    to_rows,
)
from adapters._momenta import Momenta, digest_of
from adapters._period import (
    Search,
    add_sums_,
    choose_exponent,
    largest_square,
    period_of,
    plan_search,
)
from adapters._reshard import Reduction, reduce_together
from adapters._rules import Member, Owner, gradient_of
from adapters._shards import Shards

_ZEROS = "all gradients are zeros"
_ADVICE = (
    "no codebook can be learned from that. Skip this step, or build the optimizer with "
    'first_gradient="defer", which does so on all ranks'
)


class NothingToLearn(ValueError):
    """The gradients hold nothing to learn from: they are not finite, or all zeros."""


@dataclass(slots=True, eq=False)
class Sample:
    """One parameter whose gradient is learned from."""

    member: Member
    shards: Shards
    grad: Tensor  # this rank's part, unscaled
    period: int | None  # None: to be found
    counts_here: bool  # its elements are counted by this rank, not by one that holds a copy
    search: Search | None = None  # for the period
    exponent: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether other ranks hold it too, as parts or copies of a DTensor."""
        return len(self.shards.mesh_ranks) > 1


@dataclass(slots=True, eq=False)
class Lesson:
    """What the parameters of one rule learn, staged; :meth:`commit` publishes it."""

    label: str
    momenta: Momenta
    states: Any  # of the optimizer
    samples: list[Sample]
    wants_codebook: bool
    codebook: Codebook | None = None
    indices: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of the new codebook

    def commit(self) -> None:
        """Publish codebook, periods and new indices."""
        for sample in self.samples:
            self.states[sample.member.param].setdefault("automatic_period", sample.period)
        if self.codebook is not None:
            self.momenta.learned(self.codebook)
            for param, indices in self.indices:
                self.states[param]["m_codebook"] = indices
        self.momenta.forget_facts()


def lesson_of(
    momenta: Momenta, owner: Owner, members: Sequence[Member], inv_scale: float | None, label: str
) -> Lesson:
    """Return what the parameters of one rule have to learn from their gradients."""
    samples = []
    for member in momenta.to_learn_from(owner, members):
        shards = momenta.shards(member.param)
        period = owner.state.get(member.param, {}).get("automatic_period")
        if period is None and momenta.periods.forces_one(member.name, shards.shape):
            period = 1
        grad = gradient_of(member, inv_scale, widen=True)
        samples.append(Sample(member, shards, grad, period, counts_here=shards.is_first_copy))
    return Lesson(label, momenta, owner.state, samples, wants_codebook=momenta.is_due)


def learn(
    make: Callable[[], Sequence[Lesson]],
    owner: Optimizer,
    *,
    votes: bool,
    defer_unusable: bool,
    defer_zeros: bool,
) -> Sequence[Lesson]:
    """Stage what an optimizer's rules want to learn; raise alike on all ranks, or on none.

    Args:
        make: Returns the lessons of the optimizer's rules, in the same order on all ranks.
        owner: The optimizer whose ranks agree.
        votes: Whether it meets other ranks at all.
        defer_unusable: What to do if a gradient is not finite: return nothing instead of raising.
            The same on all ranks.
        defer_zeros: The same if all gradients of a rule are zeros.

    Returns:
        The lessons, to be committed; nothing if the step is to be skipped, on all ranks.

    Raises:
        NothingToLearn: See above. In a GroupFailure when several ranks agree.
        consensus.GroupFailure: Something failed on some rank.

    Collectives:
        Per stage one agreement and what the module says. Every rank of the optimizer's control
        group must call.
    """
    return _Class(owner, votes, defer_unusable, defer_zeros).learn(make)


class _Class:
    """Ranks that learn together."""

    def __init__(
        self, owner: Optimizer, votes: bool, defer_unusable: bool, defer_zeros: bool
    ) -> None:
        self._owner, self._votes = owner, votes
        self._defer_unusable, self._defer_zeros = defer_unusable, defer_zeros
        self._lessons: Sequence[Lesson] = ()
        self._samples: list[Sample] = []

    def learn(self, make: Callable[[], Sequence[Lesson]]) -> Sequence[Lesson]:
        with self._together("from its gradients"):
            self._lessons = make()
            self._samples = [sample for lesson in self._lessons for sample in lesson.samples]
            squares = [largest_square(sample.grad)[None] for sample in self._samples]
            problem = self._problem(squares)
            shared = [s.shards.over_mesh(v) for s, v in zip(self._samples, squares, strict=True)]
        if (self._defer_unusable or self._defer_zeros) and self._any(bool(problem)):
            return ()
        self._find_periods(shared)
        if self._votes:
            self._tell_copies_apart()
        # What a rank learns alone is its own business; that others learn, all have agreed on.
        wanted = [each for each in self._lessons if each.wants_codebook and not each.momenta.alone]
        if wanted and not self._learn_codebooks(wanted):
            return ()
        return self._lessons

    def _together(self, what: str) -> AbstractContextManager[consensus.fail_together | None]:
        """Fail on all ranks if the block fails on one."""
        if not self._votes:
            return nullcontext()
        return consensus.fail_together(f"{type(self._owner).__name__} learns {what}", self._owner)

    def _any(self, flag: bool) -> bool:
        return consensus.any_failed(flag, self._owner) if self._votes else flag

    def _problem(self, squares: Sequence[Tensor]) -> str:
        """Return what this rank cannot learn from, if it is to be skipped.

        Raises:
            NothingToLearn: It is not to be skipped.
        """
        problem = ""
        for sample, square in zip(self._samples, squares, strict=True):
            if not bool(square.isfinite()):
                problem = (
                    f"the gradient of {sample.member.name} is not finite, or its square is not"
                )
                break
        defer = self._defer_unusable
        if not problem:
            defer = self._defer_zeros
            by_sample = {id(s): float(v) for s, v in zip(self._samples, squares, strict=True)}
            for lesson in self._lessons:  # of others' gradients this rank knows nothing yet
                found = [by_sample[id(sample)] for sample in lesson.samples]
                if lesson.momenta.alone and lesson.wants_codebook and found and not any(found):
                    problem = _ZEROS
        if problem and not defer:
            raise NothingToLearn(f"{problem}; {_ADVICE}")
        return problem

    # ---- periods ----

    def _find_periods(self, squares: Sequence[tuple[Reduction, Tensor]]) -> None:
        # Collectives stand inside of what ranks do together: if one breaks, all are told of whom.
        searched = [sample for sample in self._samples if sample.period is None]
        with self._together("how long its blocks are"):
            largest = _reduce(squares, "max")
            for sample, square in zip(self._samples, largest, strict=True):
                numel = sum(part.numel for part in sample.shards.parts)
                sample.exponent = choose_exponent(float(square), numel)
            shared = [sample.shards.over_mesh(_period_sums(sample)) for sample in searched]
        with self._together("its periods"):
            totals = _reduce(shared, "sum")
            for sample, total in zip(searched, totals, strict=True):
                assert sample.search is not None
                sample.period = period_of(sample.search, total, sample.exponent)
            for lesson in self._lessons:
                if lesson.momenta.alone and lesson.wants_codebook and lesson.samples:
                    _solve(lesson, _histogram(lesson, dict(map(_blocks_of, lesson.samples))))

    def _tell_copies_apart(self) -> None:
        """Let plain parameters that several ranks hold count once, with one period.

        They are told apart by name and shape. The lowest rank that holds one counts it.
        """
        ranks = consensus.control_group(self._owner).ranks
        plain = [
            (_identity(lesson.label, sample), sample)
            for lesson in self._lessons
            if not lesson.momenta.alone
            for sample in lesson.samples
            if not sample.is_shared
        ]
        if len(ranks) == 1:
            return
        here = ranks.index(torch.distributed.get_rank())
        numbers = [len(plain) if i == here else 0 for i in range(len(ranks))]
        numbers = list(self._sum(numbers, "plain parameters"))
        if not any(numbers):
            return
        before = sum(numbers[:here])
        listed = [0] * sum(numbers)
        listed[before : before + len(plain)] = [identity for identity, _ in plain]
        listed = list(self._sum(listed, "names of plain parameters"))
        first = {identity: i for i, identity in reversed(list(enumerate(listed)))}
        places = {identity: i for i, identity in enumerate(sorted(first))}
        periods = [0] * len(places)
        for identity, sample in plain:
            sample.counts_here = before <= first[identity] < before + len(plain)
            if sample.counts_here:
                periods[places[identity]] = sample.period or 0
        periods = list(self._sum(periods, "periods of plain parameters"))
        for identity, sample in plain:
            sample.period = periods[places[identity]]

    def _sum(self, counts: Sequence[int] | Tensor, name: str) -> Sequence[int]:
        return consensus.agree_sum(counts, self._owner, name=name)

    # ---- codebooks ----

    def _learn_codebooks(self, wanted: Sequence[Lesson]) -> bool:
        """Stage codebooks of all ranks; return False if the step is to be skipped instead."""
        with self._together("its blocks"):
            samples = [sample for lesson in wanted for sample in lesson.samples]
            blocks = dict(map(_blocks_of, samples))
            cut = [sample for sample in samples if blocks[id(sample)][0].num_cut]
            both = [blocks[id(sample)] for sample in cut]
            ours_of = [cut_values(values, grid) for grid, values in both]
            parts = [s.shards.between_parts(v.numel()) for s, v in zip(cut, ours_of, strict=True)]
        with self._together("its histogram"):  # the blocks with what others hold of them
            for pair, reduced in zip(both, reduce_together(parts, ours_of, "max"), strict=True):
                grid, values = pair
                set_cut_values_(values, reduced, grid)
            ours = torch.cat([_histogram(lesson, blocks) for lesson in wanted])
        summed = self._sum(ours, "histogram") if self._votes else ours.tolist()
        with self._together("its codebook") as last:
            counts = torch.split(torch.tensor(summed, device="cpu"), NUM_BINS)
            # A half without any gradient has nothing to count; it learns when it has.
            some = [pair for pair in zip(wanted, counts, strict=True) if int(pair[1].sum())]
            zeros = any(is_degenerate(each) for _, each in some)
            if zeros and not self._defer_zeros:
                raise NothingToLearn(f"{_ZEROS}; {_ADVICE}")
            for lesson, each in some if not zeros else ():
                _solve(lesson, each)
            if last is not None:
                digests = [digest_of(each.codebook.levels) for each in wanted if each.codebook]
                last.same("codebooks learned", digests)
        return not zeros


Blocks: TypeAlias = tuple[Grid, Tensor]  # and the largest magnitude in each


def _blocks_of(sample: Sample) -> tuple[int, Blocks]:
    """Return the blocks of one gradient, as far as it lies here, and whose they are."""
    assert sample.period is not None
    shards, device = sample.shards, sample.grad.device
    grid = make_grid(shards.own, shards.parts, sample.period, device=device)
    return id(sample), (grid, block_maxima(to_rows(sample.grad.float(), grid), grid))


def _reduce(shared: Sequence[tuple[Reduction, Tensor]], op: Literal["max", "sum"]) -> list[Tensor]:
    return reduce_together([part for part, _ in shared], [vector for _, vector in shared], op)


def _identity(label: str, sample: Sample) -> int:
    text = f"{label}{sample.member.name} {tuple(sample.shards.shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little") + 1


def _period_sums(sample: Sample) -> Tensor:
    """What this rank adds to the search of one period."""
    shards = sample.shards
    sample.search = plan_search(shards.shape, shards.parts)
    sums = torch.zeros(sample.search.num_sums, dtype=torch.int64, device=sample.grad.device)
    add_sums_(sums, sample.search, sample.grad, shards.own, sample.exponent)
    return sums


def _histogram(lesson: Lesson, blocks: dict[int, Blocks]) -> Tensor:
    """What this rank counts of one rule's gradients."""
    total = torch.zeros(NUM_BINS, dtype=torch.int64, device="cpu")
    for sample in lesson.samples:
        if sample.counts_here and sample.grad.numel():
            grid, maxima = blocks[id(sample)]
            total += block_histogram(sample.grad, maxima, grid).cpu()
    return total


def _solve(lesson: Lesson, counts: Tensor) -> None:
    """Stage the codebook of one rule, and what the indices of all its momenta become."""
    levels = learn_levels(counts)
    assert levels is not None
    lesson.codebook = make_codebook(levels)
    old = lesson.momenta.codebook
    if old is None:
        return
    for param in lesson.momenta.params:
        indices = lesson.states.get(param, {}).get("m_codebook")
        if indices is not None:
            device = indices.device
            new = lesson.codebook.to(device)
            lesson.indices.append((param, reindex(indices, old=old.to(device), new=new)))

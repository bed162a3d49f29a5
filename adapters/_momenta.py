"""The momenta of some parameters, stored as one byte an element and one number a block.

A block is a run of equally many elements of the whole parameter, however it is sharded, and one
codebook serves all: so what is stored does not depend on how many ranks there are. A rank keeps
the indices of its own elements, and the magnitudes of the blocks that have elements here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import consensus
from adapters._blocks import Grid, cut_blocks, make_grid
from adapters._codebook import Codebook, make_codebook
from adapters._data_phase import DataPhase
from adapters._gefen_math import (
    block_maxima,
    cut_values,
    new_momentum,
    quantize,
    set_cut_values_,
)
from adapters._period import PeriodRules
from adapters._reshard import reduce_together
from adapters._rules import Member, Owner, local
from adapters._shards import Shards, read_shards


@dataclass(slots=True, eq=False)
class Moving:
    """A momentum on its way: computed, not yet written."""

    member: Member
    grad: Tensor  # this rank's part, unscaled
    shards: Shards
    grid: Grid
    book: Codebook
    indices: Tensor  # (elements here,) uint8: before, and then after this step
    magnitudes: Tensor  # (blocks here,) float32

    def commit(self, states: Any) -> None:
        """Write the momentum."""
        state = states[self.member.param]
        state["m_codebook"] = self.indices.view(self.grad.shape)
        state["m_magnitude"] = self.magnitudes


class Momenta:
    """Which codebook and which blocks the parameters of one rule have.

    Attributes:
        codebook: None until it is learned, from the first gradients.
        num_steps: Updates made with it.
    """

    def __init__(
        self, periods: PeriodRules, *, refresh_every: int = 0, alone: bool = False
    ) -> None:
        """Have nothing learned.

        Args:
            periods: Which parameters get one magnitude for each element.
            refresh_every: Learn the codebook anew after this many steps; 0 is never.
            alone: Take this rank's part of each parameter for a tensor of its own.
        """
        self.periods = periods
        self.refresh_every = refresh_every
        self.alone = alone
        self.codebook: Codebook | None = None
        self.num_steps = 0
        self._shards: dict[Tensor, Shards] = {}
        self._grids: dict[Tensor, Grid] = {}
        self._books: dict[torch.device, Codebook] = {}
        # Read from the state when it may have changed: see :meth:`forget_facts`.
        self._facts: tuple[tuple[tuple[int, ...], str], ...] | None = None
        self._without_period: tuple[Member, ...] | None = None

    def read(self, members: Sequence[Member]) -> None:
        """Read where the elements of each parameter lie."""
        self._shards = {
            param: read_shards(param, name=name, alone=self.alone) for _, name, param, _ in members
        }
        self._grids = {}
        self.forget_facts()

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters of the rule."""
        return tuple(self._shards)

    def has_elements(self, param: Tensor) -> bool:
        """Whether there is anything to step: not for an empty tensor."""
        return math.prod(self._shards[param].shape) > 0

    def shards(self, param: Tensor) -> Shards:
        """Return where the elements of a parameter lie."""
        return self._shards[param]

    def grid(self, param: Tensor, period: int) -> Grid:
        """Return the blocks of a parameter."""
        found = self._grids.get(param)
        if found is None or found.period != period:
            shards = self._shards[param]
            device = local(param).device
            found = make_grid(shards.own, shards.parts, period, device=device)
            self._grids[param] = found
        return found

    def book(self, device: torch.device) -> Codebook:
        """Return the codebook on a device."""
        if self.codebook is None:
            raise AssertionError("a step begins with a codebook")
        found = self._books.get(device)
        if found is None:
            found = self._books[device] = self.codebook.to(device)
        return found

    def learned(self, codebook: Codebook) -> None:
        """Take a codebook over."""
        self.codebook = codebook
        self._books = {}
        self.forget_facts()

    def forget_facts(self) -> None:
        """State has been written other than by a step."""
        self._facts = None
        self._without_period = None

    @property
    def is_due(self) -> bool:
        """Whether a codebook is to be learned now. The same on all ranks after their vote."""
        if self.codebook is None:
            return True
        every, done = self.refresh_every, self.num_steps
        return every > 0 and done > 0 and done % every == 0

    def to_learn_from(self, owner: Owner, members: Sequence[Member]) -> tuple[Member, ...]:
        """Return the parameters with a gradient that the next step must learn from."""
        if self._without_period is None:
            self._without_period = tuple(
                each
                for each in members
                if "automatic_period" not in owner.state.get(each.param, {})
                and self.has_elements(each.param)
            )
        among = members if self.is_due else self._without_period
        return tuple(
            each for each in among if each.param.grad is not None and self.has_elements(each.param)
        )

    def record(self) -> dict[str, Any]:
        """Return what belongs to no single parameter."""
        levels = None if self.codebook is None else self.codebook.levels.cpu()
        return {"codebook": levels, "global_step": self.num_steps}

    def set_record(self, record: Mapping[str, Any]) -> None:
        """Take over what :meth:`record` returned."""
        levels = record["codebook"]
        self.take(None if levels is None else make_codebook(levels.cpu()), record["global_step"])

    def take(self, codebook: Codebook | None, num_steps: int) -> None:
        """Take a codebook over, and how many steps have been made with it."""
        self.codebook, self.num_steps = codebook, num_steps
        self._books = {}
        self.forget_facts()

    # ---- what must be equal on all ranks ----

    def vote(
        self, owner: Owner, members: Sequence[Member], vote: consensus.preflight, label: str
    ) -> None:
        """Bring the codebook, and which blocks the parameters of each mesh have."""
        if self.alone:
            return
        if self._facts is None:
            self._facts = self._read_facts(owner, members)
        rules = self.periods
        decided = [rules.one_for_1d, rules.one_for_2d, *rules.one_for_names]
        vote.same(f"{label}steps with the codebook", [self.num_steps, self.refresh_every])
        vote.same(f"{label}period options", decided)
        for ranks, text in self._facts:
            what = "periods" if ranks else "codebook"
            vote.same(f"{label}{what}", text, ranks=ranks)

    def _read_facts(
        self, owner: Owner, members: Sequence[Member]
    ) -> tuple[tuple[tuple[int, ...], str], ...]:
        by_mesh: dict[tuple[int, ...], list[str]] = {}
        for member in members:
            ranks = self._shards[member.param].mesh_ranks
            if len(ranks) > 1:
                period = owner.state.get(member.param, {}).get("automatic_period")
                by_mesh.setdefault(ranks, []).append(f"{member.name} {period}")
        levels = None if self.codebook is None else self.codebook.levels
        facts = [((), "none yet" if levels is None else digest_of(levels))]
        return (*facts, *((ranks, digest("\n".join(by_mesh[ranks]))) for ranks in sorted(by_mesh)))

    # ---- a step ----

    def start(self, owner: Owner, member: Member, grad: Tensor) -> Moving:
        """Return the momentum of a parameter as it stands; zeros at first."""
        state: Mapping[str, Any] = owner.state.get(member.param, {})
        grid = self.grid(member.param, state["automatic_period"])
        indices, magnitudes = state.get("m_codebook"), state.get("m_magnitude")
        if indices is None or magnitudes is None:
            indices = torch.zeros(grad.numel(), dtype=torch.uint8, device=grad.device)
            magnitudes = torch.zeros(grid.num_blocks, device=grad.device)
        return Moving(
            member,
            grad,
            self._shards[member.param],
            grid,
            self.book(grad.device),
            indices.flatten(),
            magnitudes,
        )

    def advance(
        self,
        owner: Owner,
        members: Sequence[Member],
        moving: Sequence[Moving],
        beta: Callable[[Member], float],
        phase: DataPhase,
    ) -> None:
        """Add the gradients to the momenta.

        Args:
            owner: The optimizer.
            members: The parameters, in the same order on all ranks.
            moving: One for each, unless ``phase`` has failed. Each gets new indices and
                magnitudes; the old ones are not written.
            beta: The share of the old momentum that is kept, for each parameter.
            phase: Takes errors.

        Collectives:
            One all_reduce(MAX) of a float32 for each block that lies on several ranks, for each
            layout that has some, and each of its cuts; and one element more.
        """
        numels = [(member.param, self.num_cut(owner, member)) for member in members]
        parts = [self._shards[param].between_parts(numel) for param, numel in numels if numel]
        cut: list[tuple[Moving, Tensor]] = []
        maxima: list[Tensor] = []

        def add() -> None:
            for each in moving:
                rows = new_momentum(
                    each.indices,
                    each.magnitudes,
                    each.grad,
                    book=each.book,
                    grid=each.grid,
                    beta=beta(each.member),
                )
                each.magnitudes = block_maxima(rows, each.grid)
                if each.grid.num_cut:
                    cut.append((each, rows))
                    maxima.append(cut_values(each.magnitudes, each.grid))
                else:
                    each.indices = quantize(rows, each.magnitudes, book=each.book, grid=each.grid)

        phase.attempt(add)
        completed = reduce_together(parts, maxima, "max", phase)

        def round_cut() -> None:
            for (each, rows), reduced in zip(cut, completed, strict=True):
                set_cut_values_(each.magnitudes, reduced, each.grid)
                indices = quantize(rows, each.magnitudes, book=each.book, grid=each.grid)
                each.indices = indices.clone()  # without the padding of its rows

        phase.attempt(round_cut)

    def num_cut(self, owner: Owner, member: Member) -> int:
        """Return how many blocks of a parameter lie on several ranks; needs no device."""
        found = self._grids.get(member.param)
        period = owner.state[member.param]["automatic_period"]
        if found is not None and found.period == period:
            return found.num_cut
        return len(cut_blocks(self._shards[member.param].parts, period))


def digest_of(levels: Tensor) -> str:
    """Return what tells one codebook from another."""
    return hashlib.blake2b(levels.cpu().numpy().tobytes(), digest_size=8).hexdigest()


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Counted:
    """The write that ends a step."""

    momenta: Momenta

    def commit(self) -> None:
        """Count the step."""
        self.momenta.num_steps += 1


def age(state: Mapping[str, Any], moment: str, counter: str) -> int:
    """Return how many steps a second moment has seen.

    Checkpoints of early versions have no counter beside it: it is as old as the momentum.
    """
    if moment not in state:
        return 0
    found: int = state.get(counter, state["step"])
    return found

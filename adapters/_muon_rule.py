"""Muon's rule: orthogonalise momenta, of whole matrices by all ranks or owners, or by shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import consensus
from adapters._batches import Kind, in_batches, stackable, stacked
from adapters._by_all import BucketLines, compute_by_all, memory_of_buckets
from adapters._by_owners import compute_by_owners, memory_of_rounds
from adapters._captured import refusal
from adapters._data_phase import DataPhase
from adapters._exchange import Lines, make_lines
from adapters._muon_step import MaskedStep, Pending, Step, kind_of, orthogonalize
from adapters._newton_schulz import (
    adjust_lr,
    count_agreeing,
    mask_opposed,
)
from adapters._owners import Crew, plan_rounds
from adapters._parcels import plan_route
from adapters._plan import Matrix, Ranks, check_bucket_bytes, plan_buckets
from adapters._reshard import (
    Reduction,
    crew_of,
    describe,
    exchange_device,
    gather_groups,
    reduce_together,
    sharded_axes,
)
from adapters._rules import (
    Member,
    Owner,
    Rule,
    Write,
    check_state,
    gradient_of,
    group_id,
    local,
    scalar_lr,
    spans_ranks,
)
from adapters._transports import check_transport
from adapters.options import MuonOptions, ShardedMode


class MuonRule(Rule):
    """Muon for matrices: plain tensors, or DTensors that all ranks or owners gather."""

    pending: type[Pending] = Pending

    def __init__(
        self, sharded_mode: ShardedMode, *, options: type[MuonOptions] = MuonOptions, **kwargs: Any
    ) -> None:
        """Make the rule; see :class:`Rule` for the keyword arguments."""
        super().__init__(**kwargs)
        self.options = options
        self.mode = sharded_mode
        self.meets_ranks = sharded_mode != "approx"
        self._matrices: dict[int, Matrix] = {}  # position -> where its shards lie
        self._crews: dict[int, Crew] = {}  # position -> who divides the work on it
        self._kinds: dict[int, Kind] = {}  # position -> kind, of those computed in batches
        self._planned_for: tuple[Any, ...] = ()  # what the next two follow from
        self._exchanges: tuple[BucketLines, ...] = ()
        self._lines: tuple[Lines, ...] = ()

    def check_parameter(self, member: Member) -> None:
        """Raise unless the parameter is a real matrix whose placement is supported."""
        _, name, param, _ = member
        if param.ndim != 2:
            raise ValueError(
                "Muon only supports 2D parameters whereas we found a parameter with size: "
                f"{param.size()} ({name}). Give it to another optimizer, such as AdamW."
            )
        if param.is_complex():
            raise ValueError(f"Muon does not support complex parameters; {name} is {param.dtype}")
        if self.mode != "approx":
            describe(param, position=member.position, name=name)
        elif isinstance(param, DTensor):
            sharded_axes(param, name=name)

    def read(self, members: Sequence[Member]) -> None:
        """Read where the shards of each matrix lie."""
        self._planned_for, self._matrices, self._crews = (), {}, {}
        for position, name, param, _ in members if self.mode != "approx" else ():
            matrix = describe(param, position=position, name=name)
            if self.mode == "distributed" and isinstance(param, DTensor) and spans_ranks(param):
                matrix, self._crews[position] = crew_of(param, position=position, name=name)
            if matrix is not None and param.numel():
                self._matrices[position] = matrix
        self._kinds = {}
        if self.mode != "approx" and members:
            kinds = {each.position: kind_of(each) for each in members}
            devices = {each.position: self._device_of(each) for each in members}
            for device in set(devices.values()):
                some = {i: kind for i, kind in kinds.items() if devices[i] == device}
                found = stackable(some.values(), device)
                self._kinds |= {i: kind for i, kind in some.items() if kind in found}

    def _device_of(self, member: Member) -> torch.device:
        """Where a matrix is computed."""
        param = member.param
        if member.position in self._matrices and isinstance(param, DTensor):
            return exchange_device(param)
        return local(param).device

    def check_state(self, owner: Owner, member: Member) -> None:
        """Raise if the momentum does not lie as its parameter does."""
        buffer = owner.state.get(member.param, {}).get("momentum_buffer")
        check_state(member.name, member.param, buffer)

    def vote(self, owner: Owner, members: Sequence[Member], vote: consensus.preflight) -> None:
        """Bring what decides the collectives of the step."""
        vote.same("bucket_bytes", check_bucket_bytes(owner.bucket_bytes))
        if self.mode == "distributed":
            vote.same("transport", check_transport(owner.transport))

    def needs_commit_vote(self, ranks: Ranks, members: Sequence[Member]) -> bool:
        """Whether it is in the distributed mode, and its last exchange does not reach all ranks."""
        if self.mode != "distributed":
            return False
        crews = [self._crews[each.position] for each in members if each.position in self._crews]
        # Opposed elements are masked after the exchanges.
        masks = any(each.group.get("cautious", False) for each in members)
        return masks or any(crew.ranks != ranks for crew in crews)

    def check_capture(self, owner: Owner, members: Sequence[Member]) -> None:
        """Raise unless all groups are capturable, and momenta are there; and for some options."""
        if self.momenta is not None:
            super().check_capture(owner, members)
        if self.mode != "exact":
            raise refusal(owner, self.label, f'in sharded_mode="{self.mode}" yet; use "exact"')
        for each in members:
            if not each.group.get("capturable", False):
                raise RuntimeError(
                    f"Attempting CUDA graph capture of step() for an instance of "
                    f"{type(owner).__name__} but param_groups' capturable is False. Construct it "
                    "with capturable=True."
                )
            for option in ("normuon", "cautious"):
                if each.group.get(option, False):
                    raise refusal(owner, self.label, f"with {option}=True yet")
            if "momentum_buffer" not in owner.state.get(each.param, {}):
                raise RuntimeError(
                    f"{type(owner).__name__}: {self.label}expected a momentum of {each.name} "
                    "before the capture of a step in a CUDA graph, which would reset it in each "
                    "replay; there is none. Make a step outside of the capture that is not skipped."
                )

    def plan(self, owner: Owner, members: Sequence[Member]) -> Mapping[torch.device, int]:
        """Plan the exchanges, anew if they are others, and return what memory they need."""
        active = [
            each
            for each in members
            if each.position in self._matrices and each.param.grad is not None
        ]
        with_rows = frozenset(each.position for each in active if each.group.get("normuon", False))
        params = {each.position: each.param for each in active}
        planned_for = (tuple(params), owner.bucket_bytes, owner.transport, with_rows)
        if self._planned_for != planned_for:
            if self.mode == "distributed":
                self._lines = self._plan_lines(owner, params, with_rows)
            else:
                wanted = [self._matrices[position] for position in params]
                self._exchanges = tuple(
                    BucketLines(bucket, params[bucket.slots[0].position])
                    for bucket in plan_buckets(wanted, bucket_bytes=owner.bucket_bytes)
                )
            self._planned_for = planned_for
        if self.mode == "distributed":
            return memory_of_rounds(self._lines)
        return memory_of_buckets(self._exchanges)

    def _plan_lines(
        self, owner: Owner, params: Mapping[int, Any], with_rows: frozenset[int]
    ) -> tuple[Lines, ...]:
        transport = check_transport(owner.transport)
        every = [(self._matrices[i], self._crews[i]) for i in sorted(self._matrices)]
        rounds = plan_rounds(every, params, bucket_bytes=owner.bucket_bytes, with_rows=with_rows)
        found = []
        for each in rounds:
            first = each.tasks[0].positions[0]
            number = self._matrices[first].index
            route = plan_route(each, number, for_gather=transport == "gather")
            found.append(make_lines(each, route, params[first], transport))
        return tuple(found)

    def compute(
        self,
        owner: Owner,
        members: Sequence[Member],
        inv_scale: float | None,
        phase: DataPhase,
    ) -> Sequence[Write]:
        """Return the updates of all matrices.

        Collectives:
            For each bucket one all_gather for each cut of its layout, or those of
            :func:`compute_by_owners`; then, where opposed elements are masked, one all_reduce of
            an int64 for each matrix and one more.
        """
        rates: dict[Any, tuple[float | Tensor, float | Tensor]] = {}
        pending: dict[int, Pending] = {}

        def prepare() -> None:
            for each in members:
                pending[each.position] = self._prepare(owner, each, inv_scale, rates, phase)

        phase.attempt(prepare)
        self.advance(owner, members, list(pending.values()), phase)
        # First, so that others hear if it fails.
        phase.attempt(lambda: self._compute_alone(list(pending.values())))
        memory = phase.memory(self.label)
        if self.mode == "distributed":
            compute_by_owners(self._lines, pending, orthogonalize, memory, phase)
        else:
            compute_by_all(self._exchanges, pending, orthogonalize, memory, phase)
        phase.attempt(lambda: _bring_home(pending.values()))
        self._mask(members, pending, phase)
        works = list(pending.values())
        return [Step(works) if phase.in_graph is None else MaskedStep(works, phase.in_graph)]

    def advance(
        self, owner: Owner, members: Sequence[Member], pending: Sequence[Any], phase: DataPhase
    ) -> None:
        """Compute what the directions of all matrices need."""

    def _compute_alone(self, pending: Sequence[Pending]) -> None:
        """Compute what this rank computes by itself."""
        alone = [
            each
            for each in pending
            if each.member.position not in self._matrices and each.grad.numel()
        ]
        for batch in in_batches([each.kind for each in alone]):
            works = [alone[i] for i in batch]
            updates = orthogonalize(works, stacked(type(works[0]).directions(works)))
            for each, update in zip(works, updates, strict=True):
                each.update, each.row_moment = each.finish(update, each.state.get("normuon_v"))

    def _mask(
        self, members: Sequence[Member], pending: Mapping[int, Pending], phase: DataPhase
    ) -> None:
        """Leave out the elements of updates that point against their gradients, if asked for."""
        masked = [each for each in members if each.group.get("cautious", False)]
        counts: list[Tensor] = []

        def count() -> None:
            for each in (pending[member.position] for member in masked):
                found = torch.zeros(1, dtype=torch.int64, device=each.grad.device)
                if each.update is not None:
                    found += count_agreeing(each.update, each.grad)
                counts.append(found)

        phase.attempt(count)
        parts = [self._one_number(member) for member in masked]
        totals = reduce_together(parts, counts, "sum", phase)

        def mask() -> None:
            for member, total in zip(masked, totals, strict=True):
                each = pending[member.position]
                if each.update is not None:
                    numel = each.grad.numel() if self.mode == "approx" else member.param.numel()
                    each.update = mask_opposed(
                        each.update, each.grad, num_agreeing=total[0], numel=numel
                    )

        phase.attempt(mask)

    def _one_number(self, member: Member) -> Reduction:
        """What must be known of an int64 that the ranks of a matrix add up."""
        matrix, param = self._matrices.get(member.position), member.param
        if matrix is None or not isinstance(param, DTensor):
            return Reduction((), (), param.device, 1, torch.int64)
        layout = matrix.layout
        order = (layout.ranks, layout.places, layout.cuts)
        return Reduction(order, gather_groups(param), exchange_device(param), 1, torch.int64)

    def _prepare(
        self,
        owner: Owner,
        member: Member,
        inv_scale: float | None,
        rates: dict[Any, tuple[float | Tensor, float | Tensor]],
        phase: DataPhase,
    ) -> Pending:
        """Return what is known of a step before it is computed; ``rates`` are those known yet."""
        group, param = member.group, member.param
        lr = scalar_lr(group)
        rate = (group_id(group), param.shape)
        if rate not in rates:  # once for all of a shape: a tensor on a device is waited for
            adjusted = adjust_lr(lr, group["adjust_lr_fn"], param.shape)
            alpha = -(float(adjusted) if phase.in_graph is None else adjusted)
            rates[rate] = 1 - lr * group["weight_decay"], alpha
        decay, alpha = rates[rate]
        grad = self._gradient(member, inv_scale)
        return self.pending(
            member=member,
            states=owner.state,
            grad=grad if phase.in_graph is None else phase.in_graph.unscaled(grad),
            decay=decay,
            alpha=alpha,
            row_key="normuon_rows" if member.position in self._crews else "normuon_v",
            kind=self._kinds.get(member.position),
            momentum_buffer=self._momentum_buffer(owner, member),
        )

    def _gradient(self, member: Member, inv_scale: float | None) -> Tensor:
        return gradient_of(member, inv_scale)

    def _momentum_buffer(self, owner: Owner, member: Member) -> Tensor | None:
        """The momentum as it stands, or zeros; not yet in the state."""
        buffer: Tensor | None = owner.state.get(member.param, {}).get("momentum_buffer")
        if buffer is None and member.param.grad is not None:
            return torch.zeros_like(member.param.grad, memory_format=torch.preserve_format)
        return buffer


def _bring_home(pending: Iterable[Pending]) -> None:
    """Bring updates to where their parameters are: offloaded ones were computed elsewhere."""
    for each in pending:
        if each.update is not None:
            each.update = each.update.to(each.grad.device)

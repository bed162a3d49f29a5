"""The step that all optimizers here have in common: hooks, closure, agreement, then the update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Any, ClassVar, overload

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import consensus
from adapters._captured import InGraph, expect_capturable
from adapters._checkpoint import pack, stage
from adapters._codebook import make_codebook
from adapters._data_phase import DataPhase
from adapters._hooks import Closure, closure_of, run_post_hooks, run_pre_hooks
from adapters._rules import Member, Rule, Write, check_gradient, spans_ranks
from adapters._transports import Transport
from adapters.options import check_options

_COMMIT_VOTE = "a failure that not all would hear of"


@dataclass(frozen=True, slots=True)
class _Known:
    """What is read from the parameters once, and again only when they are others."""

    made_of: tuple[Any, ...] = ()  # the groups, then the parameters
    by_rule: tuple[tuple[Rule, tuple[Member, ...]], ...] = ()
    to_check: tuple[Member, ...] = ()  # their gradients are nobody else's business


class VotingOptimizer(Optimizer, ABC):
    """An optimizer whose ranks agree before any of them writes.

    What it does to parameters is up to its rules: each owns some of the parameter groups.
    """

    #: The group to agree in; None derives it from the meshes of the parameters.
    control_group: consensus.Source = None
    #: Whether this optimizer's steps meet other ranks. If not, it only takes part in planning.
    casts_votes: bool = True
    #: Upper limit for the whole matrices that a rank puts together at a time, in bytes as bfloat16.
    #: None for 16 MiB, and 2 MiB on CPUs. Equal on all ranks.
    bucket_bytes: int | None = None
    #: How shards travel to owners in the distributed mode: ``"all_to_all"``, or, where that is
    #: unreliable, ``"p2p"`` or ``"gather"``. Equal on all ranks.
    transport: Transport = "all_to_all"
    #: Whether torch.compile may look into an update in which this rank meets no other.
    traceable: ClassVar[bool] = True
    #: Whether ranks agree once more before they write, so that a failure after the last exchange,
    #: or on a rank with which others exchange nothing, stops all. Equal on all ranks.
    commit_vote: bool = False

    #: Attributes that a copy takes along. Process groups do not pickle, so a copy derives its
    #: control group from its parameters.
    _carried: ClassVar[tuple[str, ...]] = ()
    #: The same of every optimizer: what is set after construction.
    _settings: ClassVar[tuple[str, ...]] = ("bucket_bytes", "transport", "commit_vote")
    _rules: tuple[Rule, ...]
    #: What ranks brought to this step's vote as ranges: name -> the highest value.
    agreed: Mapping[str, float]

    @abstractmethod
    def _make_rules(self) -> tuple[Rule, ...]:
        """Return new rules, made from this optimizer's attributes."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """Set up rules and groups; a subclass has set the attributes they need before."""
        self._rules = self._make_rules()
        self._num_updates = 0
        super().__init__(params, defaults)
        self._install()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Closure) -> float: ...

    def step(self, *args: Any, **kwargs: Any) -> float | None:
        """Make one step: all ranks do, or all skip it, or all raise.

        Args:
            *args: At most the closure: evaluates the model again and returns the loss. It runs
                with gradients enabled.
            **kwargs: The closure by its name, ``closure``.

        Returns:
            The loss, or None without a closure.

        Raises:
            consensus.GroupFailure: A hook, the closure or a check failed on some rank; nothing
                was written on any. Without sharded parameters errors come as they are.
            consensus.Disagreement: Ranks differ in parameters, options, gradients or state.

        Collectives:
            One agreement on the control group, if parameters are sharded; then those of the
            update. All ranks that share a mesh must call.
        """
        try:
            # torch's profiler looks for this name.
            name = f"Optimizer.step#{self.__class__.__name__}.step"
            with torch.autograd.profiler.record_function(name):
                return self._agree_and_update((self, *args), kwargs)
        except BaseException:
            # torch's GradScaler leaves these behind when a step raises, and the next step would
            # be unscaled by the wrong value.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise

    # See [Note: hooks inside the agreement] in _hooks.py.
    step.hooked = True  # type: ignore[attr-defined]

    def _agree_and_update(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        with consensus.preflight(self) as vote:
            args, kwargs = run_pre_hooks(self, args, kwargs)
            loss: float | None = vote.closure(closure_of(args, kwargs))
            phase = self._check(vote)
        self.agreed = dict(zip(vote.ranges.names, vote.ranges.maximum, strict=True))
        if vote.capturing:
            phase.in_graph = InGraph.of(vote)
        if not vote.skip and self._prepare(vote):
            # Where ranks exchange, what is done depends on errors and on peers.
            traced = self.traceable and not phase.has_peers
            (self._execute if traced else self._execute_untraced)(vote.inv_scale, phase)
            # In a capture nothing has been written. torch 2.9 cannot trace this line.
            self._num_updates += phase.in_graph is None
        run_post_hooks(self, args, kwargs)
        return loss

    def _execute(self, inv_scale: float | None, phase: DataPhase) -> None:
        # A frame of its own that names torch: torch.compile then traces the update as one graph.
        with torch.no_grad():
            self._update(inv_scale, phase)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _execute_untraced(self, inv_scale: float | None, phase: DataPhase) -> None:
        self._execute(inv_scale, phase)

    # ---- parameters and their rules ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch; a group that is refused is not added.

        Raises:
            ValueError: An option is out of range, or a parameter cannot be updated.
            NotImplementedError: A placement is not supported.

        Collectives:
            None.
        """
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            rule = self._rule_of(group)
            check_options(group, rule.options, f"parameter group {len(self.param_groups) - 1}")
            if len(set(map(id, group["params"]))) < len(group["params"]):
                raise ValueError("a parameter is listed twice in a group; list it once")
            with torch.no_grad():
                for member in self._members():
                    if member.group is group:
                        rule.check_parameter(member)
        except Exception:
            self.param_groups.pop()
            raise
        self._forget()

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        return next(rule for rule in self._rules if rule.owns(group))

    def _members(self) -> Iterator[Member]:
        """Yield all parameters in the order of the groups."""
        position = 0
        for group in self.param_groups:
            names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                name = names[index] if names else f"parameter {position}"
                yield Member(position, name, param, group)
                position += 1

    def _forget(self) -> None:
        """Make the next step read the parameters, and the state, anew."""
        self._known = _Known()
        self._state_is_checked = False
        self._has_state: tuple[int, dict[tuple[int, ...], str]] = (-1, {})
        self._needs_commit_vote = False  # as agreed in the step before
        rules = {id(rule): rule for rule in map(self._rule_of, self.param_groups)}
        self.casts_votes = any(rule.meets_ranks for rule in rules.values())
        # True makes GradScaler hand the overflow over to the step, so that ranks agree on it.
        # Elsewhere it stays False: trainers refuse to clip gradients where it is True.
        # In a CUDA graph the step alone can mask its writes.
        capturable = any(group.get("capturable", False) for group in self.param_groups)
        self._step_supports_amp_scaling = capturable or (self.casts_votes and self._spans_ranks())

    def _spans_ranks(self) -> bool:
        return any(spans_ranks(member.param) for member in self._members())

    def _read_parameters(self) -> _Known:
        """Read them if they are not those of the last step: wrappers swap and shard them late."""
        groups = self.param_groups
        made_of = (*groups, *(param for group in groups for param in group["params"]))
        known = self._known
        if len(made_of) == len(known.made_of) and all(map(is_, made_of, known.made_of)):
            return known
        self._forget()
        members = tuple(self._members())
        by_rule = tuple(
            (rule, tuple(each for each in members if self._rule_of(each.group) is rule))
            for rule in self._rules
        )
        for rule, its_members in by_rule:
            rule.read(its_members)
        # The agreement checks the gradients of parameters that ranks share.
        to_check = tuple(
            member for member in members if not (self.casts_votes and spans_ranks(member.param))
        )
        self._known = _Known(made_of, by_rule, to_check)
        return self._known

    def _which_have_state(self) -> dict[tuple[int, ...], str]:
        """Return, for the ranks of each mesh, which of their parameters have been stepped."""
        # How many have is enough to see when to look again: entries come, or all are lost.
        if self._has_state[0] != len(self.state) and self.casts_votes:
            by_mesh: dict[tuple[int, ...], list[str]] = {}
            ranks_of: dict[int, tuple[int, ...]] = {}
            for member in self._members():
                meets_ranks = self._rule_of(member.group).meets_ranks
                if meets_ranks and isinstance(member.param, DTensor) and spans_ranks(member.param):
                    mesh = member.param.device_mesh
                    if id(mesh) not in ranks_of:
                        ranks_of[id(mesh)] = tuple(sorted(mesh.mesh.flatten().tolist()))
                    has_some = "1" if self.state.get(member.param) else "0"
                    by_mesh.setdefault(ranks_of[id(mesh)], []).append(has_some)
            self._has_state = len(self.state), {k: "".join(v) for k, v in sorted(by_mesh.items())}
        return self._has_state[1]

    # ---- one step ----

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _check(self, vote: consensus.preflight) -> DataPhase:
        """Raise for anything this rank can see is wrong. Runs after the closure, inside the vote.

        Args:
            vote: Takes facts that must be equal on all ranks.

        Returns:
            What the step needs until it writes, memory for its exchanges included.

        Collectives:
            None.
        """
        with torch.no_grad():
            known = self._read_parameters()
        for member in known.to_check:
            check_gradient(member.name, member.param)
        if vote.capturing:
            expect_capturable(self, known.by_rule)
        group = consensus.control_group(self)
        phase = DataPhase(group.ranks if self.casts_votes and not group.is_local else ())
        for rule, members in known.by_rule:
            if not self._state_is_checked:
                for member in members:
                    rule.check_state(self, member)
            rule.vote(self, members, vote)
            phase.reserve(rule.label, rule.plan(self, members))
        self._state_is_checked = True
        for ranks, which in self._which_have_state().items():
            vote.progress("state", which, ranks=ranks)
        # A rank that failed where its peers could not hear of it has made one less.
        vote.progress("updates made", self._num_updates)
        if phase.has_peers:
            vote.same("commit_vote", self.commit_vote)
            # Each rank sees this for its own parameters only. Kept, so that ranks bring the same
            # from then on: what differs takes more messages.
            wanted = any(rule.needs_commit_vote(group.ranks, its) for rule, its in known.by_rule)
            vote.range(_COMMIT_VOTE, self._needs_commit_vote or wanted)
        return phase

    def _prepare(self, vote: consensus.preflight) -> bool:
        """Get ready for the update that all ranks agreed to make; return whether to make it."""
        del vote
        return True

    def _update(self, inv_scale: float | None, phase: DataPhase) -> None:
        """Make the step. Runs without gradient tracking, after all ranks agreed to proceed.

        Args:
            inv_scale: What to multiply gradients by, or None. ``p.grad`` itself is not written.
            phase: Holds memory for exchanges, and takes errors.
        """
        writes: list[Write] = []
        # The last rule's first. AdamW's is torch's own, which computes as it writes; and a failure
        # of any is heard in the exchanges of the first, Muon's.
        with phase.exchanging(self):
            for rule, members in reversed(self._known.by_rule):
                active = [member for member in members if member.param.grad is not None]
                writes += rule.compute(self, active, inv_scale, phase)
        if phase.has_peers:
            self._settle(phase)
        for write in writes:
            write.commit()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _settle(self, phase: DataPhase) -> None:
        """Return if the step may be written; see :meth:`DataPhase.settle`."""
        self._needs_commit_vote = bool(self.agreed[_COMMIT_VOTE])
        phase.settle(self, commit_vote=self.commit_vote or self._needs_commit_vote)

    # ---- state dicts ----

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict: all ranks do, or none does and all raise the same error.

        It may be this optimizer's own, on the same ranks and meshes; one of whole tensors, which
        each rank cuts as its parameters are; or one that Gefen-X 0.5 saved. Parameters are
        matched by their place; names, where both have them, are compared. Options come from the
        state dict, as in torch.

        Args:
            state_dict: As :meth:`state_dict` returns it. Not written.

        Raises:
            ValueError: It does not belong to this optimizer, or is damaged. In a GroupFailure
                when several ranks agree. Nothing was written.
            consensus.Disagreement: Ranks were given checkpoints of different steps.

        Collectives:
            One agreement, if parameters are sharded. All ranks must call.
        """
        state_dict = dict(state_dict)
        with self._together(f"{type(self).__name__}.load_state_dict") as together:
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = pre_hook(self, state_dict) or state_dict
            staged = stage(self, state_dict)
            if together is not None:
                together.same("codebooks and steps", staged.common())
                for ranks, text in staged.by_mesh().items():
                    together.same("loaded state", text, ranks=ranks)
            codebooks = [
                make_codebook(record.codebook.cpu())
                if record and record.codebook is not None
                else None
                for record in staged.records
            ]
        self.__setstate__({"state": staged.state, "param_groups": staged.groups})
        for rule, record, codebook in zip(self._rules, staged.records, codebooks, strict=True):
            if rule.momenta is not None and record is not None:
                rule.momenta.take(codebook, record.global_step)
        self._num_updates = 0  # ranks that went apart are together again
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _install(self) -> None:
        """Complete state dicts before any hook of the user sees them."""
        if not any(hook is pack for hook in self._optimizer_state_dict_post_hooks.values()):
            self.register_state_dict_post_hook(pack, prepend=True)

    def _together(self, phase: str) -> AbstractContextManager[consensus.fail_together | None]:
        if not self.casts_votes:
            return nullcontext()
        return consensus.fail_together(phase, self)

    # ---- copies ----

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of."""
        carried = {name: getattr(self, name) for name in (*self._carried, *self._settings)}
        records = [rule.momenta.record() if rule.momenta else None for rule in self._rules]
        return {**super().__getstate__(), **carried, "records": records}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, or (from ``load_state_dict``) take over groups and state."""
        records = state.pop("records", None)
        super().__setstate__(state)
        if records is not None:
            self._num_updates = 0
            self._rules = self._make_rules()
            for rule, record in zip(self._rules, records, strict=True):
                if rule.momenta is not None:
                    rule.momenta.set_record(record)
        self._forget()
        self._install()

"""Control groups: reads torch's facts (meshes, DTensors, backends), plans, and votes.

Nothing here communicates in a constructor or a property: some programs build an optimizer only to
look at it, on one rank. Planning happens at the first agreement or in :meth:`ControlGroup.prepare`.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from consensus import _sources, placement
from consensus._absence import AgreementBroken
from consensus._channel import Channel
from consensus._data_links import link_over_data_groups
from consensus._manifest import Manifest, read_manifest
from consensus._session import TORCH_TIMEOUT_S, Session, current_session
from consensus._sources import Source, backend_facts, flatten, group_ranks, mesh_ranks
from consensus._text import join_ranks
from consensus._tours import OVER_DATA_GROUPS, TOURS
from consensus._transport import Link
from consensus._verdict import broken_error, late_ranks, raise_conflict, raise_if_decided
from consensus._waiting import Patience
from consensus.enclosure import Plan, Scope, components
from consensus.errors import EnclosureError
from consensus.vote import Decision, Fact, Ranks, Vote

BACKENDS = ("auto", "gloo", "store", *OVER_DATA_GROUPS)
SOFT_DEADLINE_S = 60.0


class ControlGroup:
    """The ranks whose fates are tied to this one's, and the private group they vote in.

    Attributes:
        ranks: Global ranks, sorted. Before planning, those this rank can see by itself; planning
            may find more, through peers whose scopes overlap.
        world_size: How many ranks that is; 1 when nothing is distributed.
        soft_timeout: Seconds after which a vote that waits still warns of late ranks. May be set.
    """

    def __init__(self, source: Source, *, timeout: float | None, backend: str) -> None:
        """Read which ranks ``source`` spans; use :func:`control_group` instead."""
        if backend not in BACKENDS:
            raise ValueError(f"expected backend to be one of {BACKENDS}; got {backend!r}")
        self._optimizer = weakref.ref(source) if isinstance(source, Optimizer) else None
        self._source = None if isinstance(source, Optimizer) else source
        self._timeout = timeout
        self._backend = backend
        self.soft_timeout = SOFT_DEADLINE_S
        self.is_kept = True  # by the caller; else made for one call, and planned as the last such
        self._manifest: Manifest | None = None
        self._problem: ValueError | None = None
        self._session: Session | None = None
        self._plan: Plan | None = None
        self._identity: tuple[Fact, ...] = ()
        self._channel: Channel | None = None
        self._scopes: tuple[Scope, ...] = ()
        self._read()

    def __repr__(self) -> str:
        """Return its ranks and backend, also when the job's process group is gone."""
        planned = "" if self._plan is not None or self.is_local else ", not planned yet"
        return f"<ControlGroup of {join_ranks(self.ranks)}, backend {self._backend!r}{planned}>"

    @property
    def ranks(self) -> Ranks:
        """Global ranks that vote together, sorted."""
        if self._plan is not None:
            return self._plan.members
        own = self._session.rank if self._session is not None else 0
        found = components(scope.ranks for scope in self._scopes)
        return next((ranks for ranks in found if own in ranks), (own,))

    @property
    def world_size(self) -> int:
        """Number of ranks that vote together."""
        return len(self.ranks)

    @property
    def is_local(self) -> bool:
        """Whether there is nobody to agree with: no group is made and nothing is sent."""
        return not self._scopes

    def agreement_scopes(self) -> tuple[Any, ...]:
        """Return the meshes and process groups that this was made from."""
        return (*self._meshes, *self._groups)

    @property
    def device(self) -> torch.device:
        """Device of the control tensors."""
        return self._channel.link.device if self._channel else torch.device("cpu")

    @property
    def manifest(self) -> Manifest | None:
        """The parameters as last read, when the source is an optimizer.

        Raises:
            ValueError: They could not be: one is listed twice, say.
        """
        if self._problem is not None:
            raise self._problem
        return self._manifest

    @property
    def identity(self) -> tuple[Fact, ...]:
        """Which of the optimizers on these ranks this is: unnamed parameters look all alike."""
        return self._identity

    @property
    def hard_deadline(self) -> float:
        """Seconds a vote waits for late ranks: the ``timeout`` given, else the data plane's."""
        if self._timeout is not None:
            return self._timeout
        return TORCH_TIMEOUT_S if self._session is None else self._session.data_plane_timeout()

    def prepare(self, timeout: float | None = None) -> ControlGroup:
        """Plan and connect now instead of at the first agreement; later calls do nothing.

        Args:
            timeout: Seconds to wait for late ranks; None is the group's own deadline.

        Raises:
            LateRanks: A rank that must take part did not come.
            Disagreement: Ranks would use a shared mesh in different ways.
            EnclosureError: No group can enclose the ranks.

        Collectives:
            Over the store: three requests a rank in the usual case; then one 16-byte message
            that tries the new group. Every rank of every scope must call.
        """
        self.refresh()
        return self.connect(timeout)

    def plan(self, timeout: float | None = None) -> Plan | None:
        """Find out whom this rank is tied to, if that is not known yet; None when nobody."""
        session = self._session
        if self._plan is not None or self.is_local or session is None:
            return self._plan
        patience = Patience("planning", hard=self._hard(timeout), soft=SOFT_DEADLINE_S)
        ask = session.plan if self._optimizer else partial(session.plan_named, again=self.is_kept)
        identity = session.identity(self._scopes)
        try:
            planned = ask(self._scopes, patience=patience)
        except AgreementBroken as broken:
            raise broken_error(Vote("planning"), (), broken) from None
        raise_conflict(planned.conflict)
        self._plan, self._identity = planned.plan, identity
        return self._plan

    def connect(self, timeout: float | None = None) -> ControlGroup:
        """Plan and make the private group, unless that is done or nothing is distributed."""
        plan, session = self.plan(timeout), self._session
        before = self._channel
        if (before is None or before.renewed) and plan is not None and session is not None:
            patience = Patience("making the control group", hard=self._hard(timeout))
            try:
                channel = session.channel(
                    plan, self._backend, self._inherited(plan), patience=patience
                )
            except AgreementBroken as broken:
                raise broken_error(Vote(patience.phase), (), broken) from None
            channel.watch(self._data_groups())
            channel.wounded = channel.wounded or before is not None
            self._channel = channel
        return self

    def refresh(self) -> ControlGroup:
        """Read the source again when torch's state has changed since: between two steps, say.

        The plan stays while the scopes do. When the optimizer has moved to other meshes, the old
        group agrees on it first, so that all of its ranks plan again or none does.

        Raises:
            PhaseMismatch: Only some of the ranks want to plan again.
            LateRanks: A rank did not come.
        """
        if current_session() is not self._session:  # a new init_process_group, or the first
            self._plan = self._channel = self._manifest = None
            self._read()
            return self
        known = self._manifest is None or self._manifest.is_current(self._param_groups())
        if known and self._problem is None:
            return self
        before = self._scopes
        self._read()
        moved = {s.ranks for s in before} != {s.ranks for s in self._scopes}
        if moved and self._plan is not None:
            again = Vote(phase="planning again, since parameters moved to other meshes")
            try:
                raise_if_decided(self.vote(again), again)
            except AgreementBroken as broken:
                raise late_ranks(again.phase, broken) from None
            self._plan = self._channel = None
        return self

    def what_changed(self) -> str:
        """Return what :meth:`refresh` would have to see to, in words; "" when nothing has changed.

        Collectives:
            None.
        """
        if current_session() is not self._session:
            return "torch's process groups were made anew or destroyed"
        if self._channel is not None and self._channel.closed and not self._channel.renewed:
            return f"the control group was closed ({self._channel.closed})"
        groups = self._param_groups()
        if self._manifest is None or self._manifest.is_current(groups):
            return ""
        return f"parameters changed ({self._manifest.what_changed(groups)})"

    def only_mesh(self) -> DeviceMesh | None:
        """Return a mesh of exactly these ranks if the parameters lie on no others, else None."""
        if self._manifest is None or tuple(self._manifest.by_scope) != (self.ranks,):
            return None
        return self._manifest.sharded[0].tensor.device_mesh

    def vote(self, vote: Vote, *, timeout: float | None = None) -> Decision:
        """Hold one agreement on this group; every member must call.

        Raises:
            AgreementBroken: It did not come about.
        """
        if self._channel is None or self._channel.renewed:
            self.prepare(timeout)
        assert self._session is not None
        assert self._plan is not None
        assert self._channel is not None
        hard = self.hard_deadline if timeout is None else timeout
        patience = Patience(vote.phase, hard, self.soft_timeout)
        return self._session.vote(vote, self._plan, self._channel, patience=patience)

    def close(self, reason: str) -> None:
        """Close the group for good; members that wait in it get an error."""
        if self._session is not None and self._channel is not None:
            self._session.close(self._channel, reason)

    def renew_inside(self) -> None:
        """Start anew with the groups inside this one, which has decided on a failure."""
        if self._session is not None and self._channel is not None:
            self._session.renew(self._channel)

    @property
    def channel(self) -> Channel | None:
        """What this group votes on; shared by all groups with the same plan, None until planned."""
        return self._channel

    def _hard(self, timeout: float | None) -> float:
        return self.hard_deadline if timeout is None else timeout

    # ---- reading the source ----

    def _param_groups(self) -> Any:
        optimizer = self._optimizer() if self._optimizer is not None else None
        return optimizer.param_groups if optimizer is not None else ()

    def _read(self) -> None:
        self._meshes: tuple[DeviceMesh, ...] = ()
        self._groups: tuple[Any, ...] = ()
        before, self._manifest = self._manifest, None
        self._problem, self._scopes = None, ()
        optimizer = self._optimizer() if self._optimizer is not None else None
        items = list(flatten(optimizer if optimizer is not None else self._source))
        if (session := current_session()) is None:
            _sources.refuse_without_job(items)  # before that is kept, so it is refused each time
            self._session = None
            return
        self._session = session
        try:
            if optimizer is not None:
                self._manifest = read_manifest(optimizer.param_groups, before)
        except ValueError as problem:  # told in the next vote: peers may be on their way to it
            self._problem = problem
        if self._manifest is not None:
            own_meshes = self._manifest.meshes
        else:
            own = (item.device_mesh for item in items if isinstance(item, DTensor))
            own_meshes = tuple({id(mesh): mesh for mesh in own}.values())
        self._own_meshes = own_meshes if optimizer is not None else ()
        self._meshes = (*own_meshes, *(i for i in items if isinstance(i, DeviceMesh)))
        self._groups = tuple(i for i in items if isinstance(i, dist.ProcessGroup))
        self._scopes = self._read_scopes(optimizer)

    def _read_scopes(self, optimizer: Optimizer | None) -> tuple[Scope, ...]:
        mode = f"{getattr(optimizer, 'sharded_mode', '')}/{self._backend}"
        manifests = dict(self._manifest.digests) if self._manifest else {}
        rank = dist.get_rank()
        for ranks in (*map(mesh_ranks, self._meshes), *map(group_ranks, self._groups)):
            if rank not in ranks:
                raise EnclosureError(
                    f"rank {rank} is not a member of ranks {list(ranks)}; only members agree"
                )
            manifests.setdefault(ranks, 0)
        groups = self._group_names()
        carrying = self._data_group_ranks() if self._backend in TOURS else frozenset()
        manifests |= {ranks: 0 for ranks in carrying if ranks not in manifests}
        return tuple(
            Scope(ranks, manifest, mode + groups.get(ranks, ""), ranks in carrying)
            for ranks, manifest in sorted(manifests.items())
            if len(ranks) > 1
        )

    def _group_names(self) -> dict[Ranks, str]:
        """Return which groups parameters or votes use: meshes that compare equal may hold others.

        Of a mesh with several axes a rank knows only its own groups, so there is nothing to say.
        """
        own = [mesh for mesh in self._own_meshes if mesh.ndim == 1 and mesh.size() > 1]
        used = [mesh.get_group() for mesh in own]
        if self._backend in OVER_DATA_GROUPS:
            used = [group for groups in self._data_groups().values() for group in groups]
        names: dict[Ranks, str] = {}
        for group, ranks in zip(used, map(group_ranks, used), strict=True):
            names[ranks] = f"{names.get(ranks, '')}/group {group.group_name}"
        return names

    def _data_group_ranks(self) -> frozenset[Ranks]:
        return frozenset(
            group_ranks(group) for groups in self._data_groups().values() for group in groups
        )

    def _data_groups(self) -> dict[Ranks, list[Any]]:
        return _sources.data_groups(self._meshes, self._groups)

    def _inherited(self, plan: Plan) -> Link | None:
        """Return a link over data-plane groups, where votes go over those and they are known."""
        if self._backend not in OVER_DATA_GROUPS:
            return None
        known = [group for groups in self._data_groups().values() for group in groups]
        hint = next((mesh.device_type for mesh in self._meshes), None)
        device_of = partial(control_device, hint=None if hint == "cpu" else hint)
        groups = (dist.group.WORLD, *known)
        return link_over_data_groups(plan, self._backend, groups, device_of, dist.get_rank())


def control_group(
    source: Source = None, *, timeout: float | None = None, backend: str = "auto"
) -> ControlGroup:
    """Return the control group that encloses everyone ``source`` will meet in collectives.

    Args:
        source: An optimizer, parameter groups, parameters, DeviceMeshes, process groups, an
            iterable of these, or None for all ranks of the job. A ControlGroup is returned as is.
        timeout: Hard deadline of its votes in seconds; None is that of the default group.
        backend: "auto" is connections of their own, else a private gloo group, else the job's
            store; "gloo" and "store" begin there. Or "inherit", to vote on the data plane's own
            group; "sweep" or "passes", to vote over its overlapping groups, one after the other,
            where no group encloses them all.

    Returns:
        A group that is not planned yet. The same optimizer or ranks always share one channel.

    Raises:
        EnclosureError: This rank is not a member of what it names.

    Collectives:
        None.
    """
    if isinstance(source, ControlGroup):
        return source
    if isinstance(source, Optimizer):
        known = _by_optimizer.get(source)
        if known is None or timeout is not None or backend != "auto":
            named = getattr(source, "control_group", None)
            if isinstance(named, ControlGroup):
                timeout = named._timeout if timeout is None else timeout
                backend = named._backend if backend == "auto" else backend
            known = _by_optimizer[source] = ControlGroup(source, timeout=timeout, backend=backend)
        return known
    return ControlGroup(source, timeout=timeout, backend=backend)


def control_device(group: Source = None, *, hint: torch.device | str | None = None) -> torch.device:
    """Return where a control tensor for ``group`` must live; never the ambient device.

    Args:
        group: A process group, mesh, ControlGroup or optimizer; None is the default group.
        hint: The caller's wish, such as a local shard's device.

    Returns:
        cpu for gloo, MPI, UCC and mixed groups; else the group's bound device, else the hint.
    """
    if isinstance(group, ControlGroup):
        return group.device
    if not (dist.is_available() and dist.is_initialized()):
        return torch.device(hint or "cpu")
    facts = backend_facts(group, hint=None if hint is None else str(torch.device(hint)))
    return torch.device(placement.control_device(facts))


_by_optimizer: weakref.WeakKeyDictionary[Optimizer, ControlGroup] = weakref.WeakKeyDictionary()

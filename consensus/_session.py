"""What one init_process_group owns: a store client, planning rounds, and channels to vote on.

Channels are shared: every plan with the same members and rank sets votes on the same one, so two
optimizers stepped in crossed order meet and are told, and many optimizers cost one group.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from consensus import _hops, _store, _transport, _waiting, log
from consensus._absence import Absence, AgreementBroken, Meeting, Post, Whereabouts
from consensus._channel import Channel
from consensus._nesting import nesting
from consensus._planning import Planned, Verdict, plan, plan_name, tally
from consensus._protocol import decide
from consensus._sockets import HopLink
from consensus._sources import options_of
from consensus._store import StoreClient
from consensus._tours import OVER_DATA_GROUPS
from consensus._transport import GroupLink, Link, StoreLink
from consensus._trial import make_link, trial_key
from consensus._waiting import LinkBroken, Patience
from consensus._watch import Watcher
from consensus._wire import digest
from consensus.enclosure import Plan, Scope, maximal
from consensus.errors import EnclosureError, Failure
from consensus.vote import Decision, Fact, Ranks, Vote

T = TypeVar("T")

TORCH_TIMEOUT_S = float(distributed_c10d.default_pg_timeout.total_seconds())


class Session:
    """State of this library between init_process_group and destroy_process_group."""

    def __init__(self, default_group: Any) -> None:
        self.rank: int = default_group.rank()
        self.world_size: int = default_group.size()
        store = distributed_c10d._get_default_store()
        if store is None:
            raise EnclosureError(
                "this job has no store (MPI); a control group cannot be planned without one"
            )
        self._store = store
        # Looked up once, which takes as long as the rest of a vote; read anew for each.
        self._data_plane = options_of(default_group)
        self._client = StoreClient(store, on_idle=self.end_if_destroyed)
        self._whereabouts = Whereabouts(self._client, self.rank)
        self._default_group = weakref.ref(default_group)
        world = distributed_c10d._world
        # Ranks that are threads have a world each, which no helper thread can see.
        self._world = world if type(world) is distributed_c10d._World else None
        self._rounds: Counter[Ranks] = Counter()  # of planning, that came about
        self._begun: Counter[str] = Counter()  # name -> how often this rank has come to meet there
        self._renewals: list[tuple[Ranks, str]] = []  # the latest first: see `renew`
        self._plans: dict[tuple[Scope, ...], Planned] = {}
        self._channels: dict[tuple[int, str], Channel] = {}  # by plan and backend
        self.lock = threading.RLock()
        weakref.finalize(default_group, self._client.close)

    def end(self) -> None:
        """Give back threads, connections and groups."""
        for channel in list(self._channels.values()):
            channel.closed = channel.closed or "the job's process group was destroyed"
            if isinstance(channel.link, GroupLink | HopLink):
                channel.link.close()
        self._client.close()

    def end_if_destroyed(self) -> None:
        """End when the default group was destroyed, though somebody holds it still.

        torch does, in its caches of what DTensors do.
        """
        if self._world is not None and self._world.default_pg is not self._default_group():
            self.end()

    def watch(self) -> None:
        """Answer ranks that ask where this one is, and ask late ones; until the session ends."""
        with self.lock:
            if self._whereabouts.watcher is None:
                alone = self._world is None  # other threads are other ranks
                self._whereabouts.watcher = Watcher(self._client, self.rank, alone=alone)

    def data_plane_timeout(self) -> float:
        """Return the default group's own timeout in seconds: the hard deadline of a vote."""
        if self._data_plane is None:
            return TORCH_TIMEOUT_S
        return float(self._data_plane._timeout.total_seconds())

    def plan(self, scopes: Sequence[Scope], *, patience: Patience) -> Planned:
        """Plan with every rank these scopes tie this one to; they must all call.

        Raises:
            AgreementBroken: Some of them did not come.
        """
        own = maximal(scope.ranks for scope in scopes)
        meetings = {ranks: self._meeting(plan_name(ranks), ranks) for ranks in own}
        names = {ranks: f"{each.name}/{each.number}" for ranks, each in meetings.items()}
        rounds = {ranks: name.removeprefix(f"{plan_name(ranks)}/") for ranks, name in names.items()}

        def post() -> None:
            for name in names.values():
                self._whereabouts.post(name, Post(0, patience.phase))

        def look_around() -> None:
            for each in meetings.values():
                self._look_around(each, patience)

        patience.on_wait, patience.on_slice = post, look_around
        with self.lock:
            # Also when it fails, on every rank, so that a second try meets under other names.
            self._begun.update(each.name for each in meetings.values())
            protocol = plan(scopes, rank=self.rank, rounds=rounds)
            with log.recording(self.rank, patience.phase, meetings[own[0]]) as record:
                try:
                    planned = _store.drive_store(protocol, self._client, patience)
                except LinkBroken as broken:
                    post()
                    found = [
                        self._whereabouts.absence(name, ranks, 0, patience, broken)
                        for ranks, name in names.items()
                    ]
                    late = tuple(sorted({rank for absence in found for rank in absence.late}))
                    raise AgreementBroken(replace(found[0], late=late)) from None
                record.members, record.disagreed = len(planned.plan.members), bool(planned.conflict)
            self._rounds.update(own)
            for name in names.values():
                self._whereabouts.withdraw(name)
        return planned

    def identity(self, scopes: Sequence[Scope]) -> tuple[Fact, ...]:
        """Return how often each of these scopes has been planned with; equal on its ranks."""
        times = {ranks: self._rounds[ranks] for ranks in maximal(s.ranks for s in scopes)}
        return tuple(
            Fact("optimizer", b"%d" % n, partial(dict, {"": f"number {n} planned here"}), ranks)
            for ranks, n in times.items()
        )

    def plan_named(self, scopes: tuple[Scope, ...], *, again: bool, patience: Patience) -> Planned:
        """Return the plan for scopes that a caller names.

        The whole job needs no planning. A smaller scope does: its members may be tied, through
        scopes that this rank cannot see, to ranks outside of it.

        Args:
            scopes: Of this rank.
            again: Plan also if the same scopes have been planned before. A peer for which they
                are others than before would wait for this rank.
            patience: How long to wait for the ranks that these scopes tie to this one.
        """
        whole = next((s.ranks for s in scopes if len(s.ranks) == self.world_size), None)
        if whole is not None:
            return Planned(Plan(whole))
        if again or scopes not in self._plans:
            self._plans[scopes] = self.plan(scopes, patience=patience)
        return self._plans[scopes]

    def channel(
        self, plan: Plan, backend: str, inherited: Link | None, *, patience: Patience
    ) -> Channel:
        """Return the channel of a plan; made, tried and agreed on by all members the first time.

        Raises:
            AgreementBroken: A member did not come.
            EnclosureError: The members derived different plans, or there is nothing to inherit.
        """
        key = (plan.key, backend)
        with self.lock:
            if key not in self._channels:
                meeting = self._meeting(f"channel/{plan.key:016x}", plan.members)
                self._begun[meeting.name] += 1  # on every member, also when it fails
                with log.recording(self.rank, patience.phase, meeting):
                    made = self._make_channel(plan, backend, inherited, meeting, patience)
                self._channels[key] = made
            return self._channels[key]

    def vote(self, vote: Vote, plan: Plan, channel: Channel, *, patience: Patience) -> Decision:
        """Hold one agreement; every member of the plan must call. Counts are added up after it.

        Raises:
            AgreementBroken: It did not come about; the channel is closed.
        """
        with channel.lock:
            if channel.closed:
                raise AgreementBroken(Absence((), {}, (), 0.0, channel.closed, closed=True))
            ballot = plan.ballot(rank=self.rank, sequence=channel.sequence)
            # Spelled out: replace() takes twice as long, and this is on the path of every vote.
            cast = Vote(
                vote.phase, vote.failures, vote.fatal, vote.facts, vote.ranges, channel.positions
            )
            try:
                here = Meeting(channel.name, channel.sequence, channel.members)
                data_plane = channel.data_plane()
                with log.recording(self.rank, vote.phase, here, vote, data_plane) as record:
                    decision = self._meet(
                        channel,
                        lambda: _transport.drive(decide(cast, ballot), channel.link, patience),
                        patience,
                        vote.failures,
                    )
                    if vote.counts and decision.agreed:
                        # Peers are on their way to this message, so nothing may come between.
                        decision = replace(decision, sums=self._sum(vote.counts, channel, patience))
                    record.decision = decision
                return decision
            except AgreementBroken:
                raise
            except BaseException as interrupted:  # Ctrl-C: let nobody wait on
                self.close(channel, f"interrupted by {type(interrupted).__name__}")
                raise

    def _sum(self, counts: tuple[int, ...], channel: Channel, voted: Patience) -> tuple[int, ...]:
        # A meeting of its own: a rank may have posted that it came to the vote, and then be gone.
        # And a wait of its own: with what one late rank left of the first, all would be late.
        patience = Patience(voted.phase, voted.hard, voted.soft)
        return self._meet(
            channel, lambda: tuple(channel.link.all_reduce_sum(counts, patience)), patience
        )

    def _meet(
        self,
        channel: Channel,
        exchange: Callable[[], T],
        patience: Patience,
        failures: tuple[Failure, ...] = (),
    ) -> T:
        """Return what the members exchange; when a link breaks, close and find out who is late."""
        sequence = channel.sequence
        meeting = Meeting(channel.name, sequence, channel.members)

        def post(*, expired: bool = False) -> None:
            said = Post(sequence, patience.phase, failures, expired, self._begun)
            self._whereabouts.post(channel.name, said)

        def warn(seconds: float) -> None:
            self._whereabouts.warn(channel.name, channel.members, sequence, patience)

        patience.on_wait, patience.on_soft = post, warn
        if not channel.inherited:  # else what was begun would meet what is sent there next
            patience.on_slice = partial(self._look_around, meeting, patience)
        channel.sequence += 1
        self._begun[channel.name] = channel.sequence
        try:
            return exchange()
        except LinkBroken as broken:
            self.close(channel, str(broken))
            post(expired=broken.expired)
            absence = self._whereabouts.absence(
                channel.name, channel.members, sequence, patience, broken
            )
            raise AgreementBroken(absence) from None

    def close(self, channel: Channel, reason: str) -> None:
        """Close a channel for good: peers that wait in it get an error instead of a timeout."""
        channel.closed = channel.closed or reason
        channel.link.close()

    def renew(self, within: Channel) -> None:
        """Start anew with all that lies inside a group which has decided on a failure.

        A rank may have come to that decision from a wait inside, which it then left for good: see
        [Note: a wait that cannot end]. All members know of the decision, so all drop the channels
        that lie inside, and meet again under names that nobody has waited for.
        """
        token = f"{digest([within.name.encode(), b'%d' % within.sequence]):016x}"
        past = {old for ranks, old in self._renewals if set(ranks) <= set(within.members)}
        self._renewals = [each for each in self._renewals if each[1] not in past]
        self._renewals.insert(0, (within.members, token))
        for name in [name for name in self._begun if name.rpartition("/")[2] in past]:
            del self._begun[name]  # nobody meets there again
        with self.lock:
            for key, channel in list(self._channels.items()):
                inside = set(channel.members) <= set(within.members) and channel is not within
                if inside and not channel.inherited:  # the caller's groups cannot be made anew
                    del self._channels[key], self._begun[channel.name]
                    channel.renewed = True
                    self.close(channel, "a failure was decided around it")
                    if isinstance(channel.link, StoreLink):
                        channel.link.forget()

    def _meeting(self, name: str, members: Ranks) -> Meeting:
        """Return where these ranks meet next under ``name``, the same on all of them."""
        tokens = [token for ranks, token in self._renewals if set(members) <= set(ranks)]
        place = "/".join([name, *tokens[:1]])
        return Meeting(place, self._begun[place], members)

    def _look_around(self, meeting: Meeting, patience: Patience) -> None:
        self._whereabouts.look_around(meeting, nesting().around(), patience)

    def _make_channel(
        self,
        plan: Plan,
        backend: str,
        inherited: Link | None,
        meeting: Meeting,
        patience: Patience,
    ) -> Channel:
        members = plan.members
        key = f"{meeting.name}/{meeting.number}"
        wanted = digest([plan.key.to_bytes(8, "little"), backend.encode()])
        met = self._tally(key, members, wanted, patience, meeting)
        if not met.same:
            raise EnclosureError(
                f"ranks {list(members)} want different control groups; they must pass the same "
                "backend and hold the same meshes"
            )
        name = f"{key}/{met.nonce}"  # a nonce: never reused, not even after a restart
        if backend in OVER_DATA_GROUPS:
            if inherited is None:
                wanted_groups = [list(ranks) for ranks in plan.groups or (members,)]
                raise EnclosureError(
                    f"{backend=} needs process groups of ranks {wanted_groups}; those of rank "
                    f"{self.rank} are not all known. Name them, or use 'auto'."
                )
            return Channel(name, members, inherited, inherited=True)
        by_store = StoreLink(self._client, name, members, self.rank)
        if backend == "store":
            return Channel(name, members, by_store)
        kinds = _hops.kinds_of_link(backend)
        for kind, instead in zip(kinds, (*kinds[1:], "the store"), strict=True):
            link, reason = make_link(
                kind,
                name,
                members,
                self.rank,
                job_store=self._store,
                client=self._client,
                patience=patience,
            )
            tried = 1 if link is not None else 2
            if self._tally(trial_key(kind, name), members, tried, patience).same and link:
                return Channel(name, members, link)
            if link is not None:
                link.close()
            _waiting.logger.warning(
                "no %s control group for ranks %s (%s); votes go over %s, which is slower for many "
                "ranks. If a rank has several network interfaces, set GLOO_SOCKET_IFNAME.",
                kind,
                list(members),
                reason or "it failed on another rank",
                instead,
            )
        return Channel(name, members, by_store)

    def _tally(
        self, key: str, members: Ranks, value: int, whole: Patience, meeting: Meeting | None = None
    ) -> Verdict:
        # Posts once, so one for each key; but what it has waited counts from the same start.
        patience = Patience(whole.phase, hard=whole.hard, started=whole.started)
        patience.on_wait = post = partial(self._whereabouts.post, key, Post(0, whole.phase))
        if meeting is not None:
            patience.on_slice = partial(self._look_around, meeting, patience)
        protocol = tally(key, members, value, nonce=secrets.token_hex(8))
        try:
            verdict = _store.drive_store(protocol, self._client, patience)
        except LinkBroken as broken:
            post()
            absence = self._whereabouts.absence(key, members, 0, patience, broken)
            raise AgreementBroken(absence) from None
        self._whereabouts.withdraw(key)
        return verdict


_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()
_sessions_lock = threading.Lock()


def end_session() -> None:
    """End the session of the default process group, if it has one."""
    if session := _sessions.get(distributed_c10d._get_default_group()):
        session.end()


def current_session() -> Session | None:
    """Return the session of the default process group, or None when not distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    default_group = distributed_c10d._get_default_group()
    if default_group.size() == 1:
        return None
    with _sessions_lock:
        session = _sessions.get(default_group)
        if session is None:
            for before in list(_sessions.values()):
                before.end_if_destroyed()
            session = _sessions[default_group] = Session(default_group)
        return session

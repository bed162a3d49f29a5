"""Who is late, and where: what ranks that wait post in the store, and what is read from it.

[Note: a wait that cannot end]
A rank that leaves a block early, with an error or without, votes at its end. If the block holds
another one, of another group, a peer may wait in that for this rank: each for the other, in two
groups. So a rank that waits inside of blocks reads, from time to time, who waits at the end of
those. If one is there that it waits for, and that has not been in its meeting, neither wait would
end: it leaves its own, with an error that brings it to where the other is. What a rank posts says
how often it has come to each place, so that nobody is taken for missing that has been there.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from consensus import _waiting
from consensus._store import StoreClient
from consensus._text import join_ranks, tidy
from consensus._waiting import LinkBroken, Patience
from consensus._watch import Watcher, is_stack
from consensus.errors import Failure
from consensus.vote import Ranks


@dataclass(frozen=True, slots=True)
class Absence:
    """What the store says of an agreement that did not come about."""

    late: Ranks  # have not posted that they reached it, or are gone
    phases: dict[int, str]  # where the late ones were last seen
    failures: tuple[Failure, ...]  # what ranks that gave up had to report
    seconds: float
    reason: str
    closed: bool = False  # the channel had been closed before
    gone: Ranks = ()  # of the late: their connections broke, and no deadline had passed
    silent: bool = False  # the store could not be asked, so nobody knows who is late
    stacks: dict[int, str] = field(default_factory=dict)  # of late ranks, if they were asked


class AgreementBroken(Exception):
    """The agreement did not come about; carries what is known about the absent."""

    def __init__(self, absence: Absence) -> None:
        super().__init__(absence.reason)
        self.absence = absence


class Meeting(NamedTuple):
    """Where ranks meet: the ``number``-th time under this name."""

    name: str
    number: int
    members: Ranks


class Post(NamedTuple):
    """What a rank that waits, or has given up, says of itself."""

    sequence: int
    phase: str
    failures: tuple[Failure, ...] = ()
    expired: bool = False  # its deadline had passed, so it closed its connections
    begun: Mapping[str, int] = {}  # name -> how often it has come to meet there


class Block(Protocol):
    """A block that is open on this rank, and what it will be decided on."""

    name: str
    members: Ranks
    sequence: int  # number of the next vote


class Elsewhere(LinkBroken):
    """Ranks that this one waits for wait for it elsewhere, so neither wait would end."""

    def __init__(self, posts: Mapping[int, Post], phase: str) -> None:
        where = sorted({post.phase for post in posts.values()})
        text = " and ".join(map(repr, where))
        who = join_ranks(tuple(posts))
        super().__init__(
            f"{who} did not come to {phase!r}, but to the end of {text} around it", expired=False
        )
        self.posts = posts


class Listener(Protocol):
    """Hears of it when this rank has failed and waits for others."""

    def failed(self, name: str, sequence: int) -> None:
        """Hear in which agreement, and the number of the vote; must not wait for long."""


class Whereabouts:
    """What the ranks post about themselves under the name of what they wait for."""

    def __init__(self, client: StoreClient, rank: int) -> None:
        """Post as ``rank``, through ``client``."""
        self._client = client
        self._rank = rank
        self.watcher: Watcher | None = None
        self.revoker: Listener | None = None
        self._posted: set[str] = set()

    def post(self, name: str, post: Post) -> None:
        """Say where this rank is; silently nothing when the store does not answer."""
        said = [[f.rank, f.type_name, f.message, list(f.type_names)] for f in post.failures[:4]]
        value = json.dumps([post.sequence, post.phase, said, post.expired, post.begun]).encode()
        try:
            self._client.put(f"{name}/at/{self._rank}", value, _brief_patience())
        except LinkBroken:
            return  # naming is a service; the wait itself has its own end
        if post.failures and self.revoker is not None:
            self.revoker.failed(name, post.sequence)
        self._posted.add(name)

    def withdraw(self, name: str) -> None:
        """Take back what was posted: all came, and nobody meets under this name again."""
        if name not in self._posted:
            return
        self._posted.discard(name)
        with contextlib.suppress(LinkBroken):
            self._client.drop([f"{name}/at/{self._rank}"], _brief_patience())

    def warn(self, name: str, members: Ranks, sequence: int, patience: Patience) -> None:
        """Log for whom this rank still waits, and where they are."""
        seconds = patience.waited
        try:
            posts = self._read(name, members)
        except LinkBroken:
            posts = {}
        late = self._late(posts, members, sequence)
        self._ask_where(late, f"{name}/stack/{sequence}/soft", patience)
        _waiting.warn_late(patience, late, seconds)

    def look_around(self, meeting: Meeting, around: Sequence[Block], patience: Patience) -> None:
        """Leave a wait that cannot end; see [Note: a wait that cannot end].

        Raises:
            Elsewhere: A rank of the meeting waits at the end of a block around this rank.
        """
        for block in around:
            others = set(meeting.members) & set(block.members) - {self._rank}
            if block.name == meeting.name or not others:
                continue
            try:
                posts = self._read(block.name, tuple(sorted(others)))
            except LinkBroken:
                return
            away = {
                rank: post
                for rank, post in posts.items()
                if post.sequence == block.sequence
                and post.begun.get(meeting.name, 0) <= meeting.number
            }
            if away:
                raise Elsewhere(away, patience.phase)

    def absence(
        self, name: str, members: Ranks, sequence: int, patience: Patience, broken: LinkBroken
    ) -> Absence:
        """Ask the store who came; peers that met the same error need a moment to post."""
        seconds, reason = patience.waited, str(broken)
        if self._client.starved and _waiting.NO_DESCRIPTOR not in reason:
            reason = f"{tidy(reason)}; {_waiting.NO_DESCRIPTOR}"
        if isinstance(broken, Elsewhere):
            phases = {rank: post.phase for rank, post in broken.posts.items()}
            failures = tuple(f for post in broken.posts.values() for f in post.failures)
            return Absence(tuple(phases), phases, failures, seconds, reason)
        until = time.monotonic() + (0.0 if broken.expired else _waiting.NAMING_S / 2)
        posts: Mapping[int, Post] = {}
        while True:
            try:
                posts = self._read(name, members)
            except LinkBroken as silent:
                if str(silent) not in reason:
                    reason = f"{tidy(reason)}; {silent}"
                return Absence((), {}, (), seconds, reason, silent=True)
            if not self._late(posts, members, sequence) or time.monotonic() >= until:
                break
            threading.Event().wait(0.05)
        late = self._late(posts, members, sequence)
        met = [post for post in posts.values() if post.sequence == sequence]
        gone: Ranks = ()
        # A peer whose deadline passes closes its connections too, and then nobody is gone.
        if broken.connection and not any(post.expired for post in met):
            if broken.gone is not None:  # perhaps one that had come and then died
                gone = (broken.gone,)
                late = tuple(sorted({*late, *gone}))
            elif len(late) == 1:
                gone = late
        others = tuple(rank for rank in late if rank not in gone)
        self._ask_where(others, f"{name}/stack/{sequence}/hard", patience)
        return Absence(
            late,
            phases={rank: posts[rank].phase for rank in late if rank in posts},
            failures=tuple(failure for post in met for failure in post.failures),
            seconds=seconds,
            reason=reason,
            gone=gone,
            stacks={rank: patience.stacks[rank] for rank in late if rank in patience.stacks},
        )

    def _ask_where(self, late: Ranks, name: str, patience: Patience) -> None:
        """Learn the stacks of late ranks, where ranks watch; an older one beats no answer."""
        if self.watcher is None or not late:
            return
        for rank, text in self.watcher.ask(late, name).items():
            if is_stack(text) or rank not in patience.stacks:
                patience.stacks[rank] = text

    def _read(self, name: str, members: Ranks) -> dict[int, Post]:
        posts = {}
        patience = _brief_patience()
        for rank in members:
            data = self._client.peek(f"{name}/at/{rank}", patience)
            if data is not None:
                sequence, phase, said, expired, begun = json.loads(data)
                failures = tuple(
                    Failure(failed, kind, message, "", tuple(names))
                    for failed, kind, message, names in said
                )
                posts[rank] = Post(sequence, phase, failures, expired, begun)
        return posts

    def _late(self, posts: Mapping[int, Post], members: Ranks, sequence: int) -> Ranks:
        here = {rank for rank, post in posts.items() if post.sequence >= sequence}
        return tuple(rank for rank in members if rank not in here | {self._rank})


def _brief_patience() -> Patience:
    return Patience("looking up late ranks", hard=_waiting.NAMING_S)

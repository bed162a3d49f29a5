"""How long a rank waits, and what it does meanwhile.

[Note: every wait has an end, and is sliced]
No call of this library blocks for more than half a second without looking up, so Ctrl-C arrives
and a late rank can be named while the operation stays pending and the group usable. A
collective's own timeout is the hard deadline: when it passes, gloo closes its connections, so a
rank that comes afterwards gets an error and can never complete the abandoned vote on its own.
Store requests run on a cloned client in a helper thread: a TCPStore wait may block past its own
timeout when the server is stopped, and a blocked wait locks its client.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from consensus._text import join_ranks
from consensus.errors import stack_lines
from consensus.vote import Ranks

logger = logging.getLogger("consensus")

SLICE_S = 0.5  # longest uninterrupted wait of the calling thread
STORE_SLICE_S = 10.0  # longest uninterrupted wait of a helper thread
IDLE_S = 5.0  # how long a helper thread has nothing to do until it asks whether it is needed
POST_AFTER_S = 1.0  # a rank that waits longer says in the store where it is
MAX_LOG_LINES = 60  # of late ranks' stacks in one warning
NAMING_S = 2.0  # how long late ranks are looked up before an error is raised without them


class LinkBroken(Exception):
    """A message did not get through; ``expired`` when our own deadline ended the wait.

    ``connection`` when it was not, and a connection to a peer broke; ``gone`` is that peer, or one
    that another rank has lost, where the transport knows it.
    """

    def __init__(
        self, reason: str, *, expired: bool, connection: bool = False, gone: int | None = None
    ) -> None:
        super().__init__(reason)
        self.expired = expired
        self.connection = connection
        self.gone = gone


@dataclass(slots=True)
class Patience:
    """How long one rank waits in one agreement, and what it does meanwhile."""

    phase: str
    hard: float  # seconds until the wait is given up
    soft: float = 60.0  # seconds until late ranks are named in a warning
    on_wait: Callable[[], None] = lambda: None  # after POST_AFTER_S, once
    on_soft: Callable[[float], None] = lambda seconds: None  # after soft, once
    # When it has waited for a second, two, four, and so on; may end the wait: LinkBroken.
    on_slice: Callable[[], None] = lambda: None
    started: float = field(default_factory=time.monotonic)
    stacks: dict[int, str] = field(default_factory=dict)  # of late ranks, if they were asked
    _posted: bool = False
    _warned: bool = False
    _looks_next: float = POST_AFTER_S

    @property
    def waited(self) -> float:
        """Seconds since the agreement began."""
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        """Seconds until the hard deadline; never negative."""
        return max(0.0, self.hard - (time.monotonic() - self.started))

    def look_up(self) -> None:
        """Do what is due after a slice without an answer."""
        waited = self.waited
        if waited >= min(POST_AFTER_S, self.soft) and not self._posted:
            self._posted = True
            self.on_wait()
        if waited >= self.soft and not self._warned:
            self._warned = True
            self.on_soft(waited)
        if waited >= self._looks_next:
            self._looks_next = 2 * waited  # so that many ranks that wait for long ask seldom
            self.on_slice()


NO_DESCRIPTOR = "this rank has no file descriptor left: raise its limit (ulimit -n) or close files"


def has_no_descriptor() -> bool:
    """Return whether this process can open nothing more; torch tells that in its log only."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


def warn_late(patience: Patience, ranks: Ranks, seconds: float) -> None:
    """Log that this rank still waits, for whom, and where they are if they said so."""
    who = join_ranks(ranks) if ranks else "ranks that did not post where they are"
    stacks = "".join(f"\n{line}" for line in stack_lines(patience.stacks, MAX_LOG_LINES))
    text = "%s: still waiting for %s after %.0f s%s"
    logger.warning(text, patience.phase, who, seconds, stacks)

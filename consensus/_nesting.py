"""Blocks inside of blocks: which errors pass without a vote. Pure; no torch.

[Note: an error that was decided together passes]
An error that a group decided on inside a block has already been raised on every rank of that
group. The blocks around it, on the same group, do not vote again: some ranks may have decided
while they were leaving the outer block, so a second vote would find nobody there. If the caller
swallows the error inside such a block, the block raises it at its end, on all ranks alike. Until
then it refuses any further agreement of the group, for the same reason.
"""

from __future__ import annotations

import threading
from typing import Any

from consensus.errors import ConsensusError


class OpenPhase:
    """A block that has been entered and not yet left."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.decided: ConsensusError | None = None

    def passes(self, error: BaseException | None) -> bool:
        """Return whether ``error`` leaves without a vote; raise one that was swallowed."""
        if self.decided is None:
            return False
        if error is None or (isinstance(error, Exception) and error is not self.decided):
            raise self.decided  # not "from error": its cause is what made this rank fail
        return True


class Nesting:
    """The open blocks of one rank (of one thread of it), outermost first."""

    def __init__(self) -> None:
        self._open: list[OpenPhase] = []

    def enter(self, group: Any) -> OpenPhase:
        """Open a block that will be decided on ``group``; refuse it as :meth:`refuse` says."""
        self.refuse(group)
        phase = OpenPhase(group)
        self._open.append(phase)
        return phase

    def leave(self, phase: OpenPhase) -> None:
        """Close a block and any that was left open inside of it."""
        if phase in self._open:
            del self._open[self._open.index(phase) :]

    def refuse(self, group: Any) -> None:
        """Raise what ``group`` has decided on, while a block around this is open on that group."""
        for phase in self._open:
            if phase.group is group and phase.decided is not None:
                raise phase.decided

    def decide(self, group: Any, error: ConsensusError) -> None:
        """Note that ``group`` decided on ``error``: its enclosing blocks pass it."""
        for phase in self._open:
            if phase.group is group:
                phase.decided = error

    def around(self) -> list[Any]:
        """Return the groups of the open blocks, the innermost first."""
        return [phase.group for phase in reversed(self._open) if phase.group is not None]


_local = threading.local()


def nesting() -> Nesting:
    """Return the blocks that are open on this thread."""
    if not hasattr(_local, "nesting"):
        _local.nesting = Nesting()
    found: Nesting = _local.nesting
    return found

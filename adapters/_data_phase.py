"""What a step does between its agreement and its writes, so that no rank leaves peers waiting.

[Note: a failure travels along]
    There ranks compute and exchange in turn. A rank that fails, out of memory for one, still takes
    part in every exchange of the step: it sends zeros, and each message has one element more which
    says that it failed. Whoever hears of it says so too. So after the last exchange all ranks that
    took part know, none has written, and a healthy step has cost no further message.

    Two kinds of failure stay unheard by some: what comes after the last exchange, and what happens
    on ranks with which they exchange nothing, such as other copies of their shards. For those ranks
    can agree again before they write (``commit_vote``). Otherwise they go on, and the next step's
    agreement finds that updates have been missed. Whether all know of a failure is known to all:
    it was said in an exchange in which all took part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

import consensus
from adapters._captured import InGraph
from adapters._plan import Ranks

T = TypeVar("T")


class DataPhase:
    """One step's local work and its errors, and what this rank has heard of its peers'."""

    def __init__(self, members: Ranks) -> None:
        """Begin.

        Args:
            members: The ranks that agree on the step. Without others errors are raised at once.
        """
        #: What stays on the device, where the step is captured in a CUDA graph.
        self.in_graph: InGraph | None = None
        self._members = members
        self._errors: list[BaseException] = []
        # By type of device: whether a rank failed, of shape (); the same, if all members know.
        self._heard: dict[str, Tensor] = {}
        self._known_to_all: dict[str, Tensor] = {}
        self._memory: dict[str, dict[torch.device, Tensor]] = {}

    @property
    def has_peers(self) -> bool:
        """Whether others wait for this rank."""
        return len(self._members) > 1

    @property
    def failed(self) -> bool:
        """Whether this rank has failed."""
        return bool(self._errors)

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Return what some local work returns, or None if it or some before it failed."""
        # A graph that is being captured is lost with the error, and no peer waits for its ranks.
        if not self.has_peers or self.in_graph is not None:
            return work()
        if self._errors:
            return None
        try:
            return work()
        except BaseException as error:  # raised by settle(), when peers have been told
            self._errors.append(error)
            return None

    # ---- for those who exchange ----

    def reserve(self, label: str, needed: Mapping[torch.device, int]) -> None:
        """Take memory for exchanges. Before ranks agree, so that all hear if there is none.

        Args:
            label: Of the rule that makes them.
            needed: bfloat16 elements on each device.
        """
        self._memory[label] = {
            device: torch.empty(numel, dtype=torch.bfloat16, device=device)
            for device, numel in needed.items()
        }

    def memory(self, label: str) -> Mapping[torch.device, Tensor]:
        """Return what was reserved; shape (elements,) on each device."""
        return self._memory[label]

    def word(self, device: torch.device) -> Tensor:
        """Return what to say in an exchange: whether any rank failed, as far as known here.

        Args:
            device: Where the exchange is made.

        Returns:
            Shape (), bool.
        """
        heard = self._heard.get(device.type)
        if heard is None:
            return torch.full((), self.failed, device=device)
        return heard | self.failed

    def hear(self, words: Tensor, *, ranks: Ranks) -> None:
        """Take note of what was said in an exchange.

        Args:
            words: Any shape and dtype, this rank's included; not 0 for a failure.
            ranks: All that took part and have heard the same.
        """
        found = words.any()
        _note(self._heard, found)
        if ranks == self._members:
            _note(self._known_to_all, found)

    @contextmanager
    def exchanging(self, owner: Any) -> Iterator[None]:
        """A block around all exchanges: one that itself fails is told to the peers.

        Its error is that of a transport and names no rank; a vote does, since a rank that is gone
        or stopped does not come to it.

        Args:
            owner: The optimizer, in whose control group ranks agree.

        Raises:
            consensus.GroupFailure: An exchange failed; with the ranks that are late or gone.

        Collectives:
            An agreement, if an exchange failed here.
        """
        try:
            yield
        except consensus.ConsensusError:  # from an agreement in between: all know
            raise
        except BaseException as error:
            if self.has_peers and self.in_graph is None:
                with consensus.fail_together(f"{type(owner).__name__}.step: update", owner):
                    raise
            raise error

    # ---- at the end ----

    def settle(self, owner: Any, *, commit_vote: bool) -> None:
        """Return if the step may be written; raise otherwise.

        Reading what was heard waits for the device, once in a healthy step that exchanged there.

        Args:
            owner: The optimizer, in whose control group ranks agree.
            commit_vote: Whether to agree once more in any case. The same on all ranks.

        Raises:
            consensus.GroupFailure: A rank failed, and all know. On all ranks the same.
            RuntimeError: A rank with which this one exchanges failed, and not all know of it.
            BaseException: What failed here, if not all know of it.

        Collectives:
            An agreement if ``commit_vote``, or if all know of a failure. None in a CUDA graph.
        """
        if self.in_graph is not None:  # what peers said is on the device; in a replay nobody fails
            return
        heard = _is_any(self._heard)
        known_to_all = heard and _is_any(self._known_to_all)
        if commit_vote or known_to_all:
            with consensus.fail_together(f"{type(owner).__name__}.step: update", owner):
                self._raise_first()
            if known_to_all:
                raise AssertionError("a rank failed, but none brought an error")
        self._raise_first()
        if heard:
            raise RuntimeError(
                f"{type(owner).__name__}.step: a rank that shares shards with this one failed "
                "amid the update, so nothing was written here. Its own error says why. Ranks with "
                "which neither exchanges shards may have made the step: the next one's agreement "
                "will find out. Restart from a checkpoint, or set commit_vote = True on the "
                "optimizer of every rank to agree on each update before it is written."
            )

    def _raise_first(self) -> None:
        if not self._errors:
            return
        error = self._errors[0]
        # Its traceback leads here: what it holds would live until the next garbage collection.
        self._errors, self._memory = [], {}
        try:
            raise error
        finally:
            del error


def _note(heard: dict[str, Tensor], found: Tensor) -> None:
    known = heard.get(found.device.type)
    heard[found.device.type] = found if known is None else known | found


def _is_any(heard: Mapping[str, Tensor]) -> bool:
    return any(bool(each) for each in heard.values())

"""One control group: who votes on it, over which link, and how far its data plane has come."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from consensus._transport import Link
from consensus._wire import digest
from consensus.vote import Ranks


@dataclass(slots=True)
class Channel:
    """One control group: who votes on it, over which link, and how many votes it has held."""

    name: str
    members: Ranks
    link: Link
    sequence: int = 0
    wounded: bool = False  # a failure was decided here, and no step has succeeded since
    closed: str = ""  # why it can no longer be used
    inherited: bool = False  # over the caller's groups: an operation begun there stays begun
    renewed: bool = False  # its members make another one: see `Session.renew`
    lock: threading.RLock = field(default_factory=threading.RLock)
    # Weak: the session lives until the default group is gone, which may be one of these.
    _data_groups: dict[Ranks, list[weakref.ref[Any]]] = field(default_factory=dict)

    def watch(self, data_groups: Mapping[Ranks, Sequence[Any]]) -> None:
        """Compare, after a failure, how far these groups have come on each rank of their scope."""
        for ranks, groups in data_groups.items():
            known = self._data_groups.setdefault(ranks, [])
            known += [ref for ref in map(weakref.ref, groups) if ref not in known]

    def positions(self) -> tuple[tuple[Ranks, int], ...]:
        """Return, for each scope, a digest of how many collectives its groups have seen.

        In the order in which parameters name them, which all ranks share. Sorted by ranks, axes
        would change places: on a mesh of 2 x 2 the column of rank 3 sorts before its row, that of
        rank 0 after it.
        """
        return tuple(
            (ranks, digest(b"%d" % _sequence_number(ref()) for ref in groups))
            for ranks, groups in self._data_groups.items()
        )

    def lose_data_groups(self) -> list[Any]:
        """Return these groups, and bring their positions from now on as those of lost ones.

        So they differ from those of a rank that has lost none.
        """
        lost = [ref() for refs in self._data_groups.values() for ref in refs]
        self._data_groups = {ranks: [_LOST] for ranks in self._data_groups}
        return [group for group in lost if group is not None]

    def data_plane(self) -> tuple[tuple[str, int], ...]:
        """Return the name of each of these groups, and the number of its last collective."""
        groups = (ref() for refs in self._data_groups.values() for ref in refs)
        return tuple((g.group_name, _sequence_number(g)) for g in groups if g is not None)


_LOST: weakref.ref[Any] = weakref.ref(threading.Event())  # nobody holds it, so it is gone


def _sequence_number(group: Any) -> int:
    if group is None:  # it has been destroyed
        return -1
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count
        return 0

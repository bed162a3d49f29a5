"""A vote over the groups that move the caller's data, where a private group is not wanted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from consensus._sources import group_ranks
from consensus._tours import TOURS, Tour
from consensus._transport import GroupLink, Link
from consensus._waiting import LinkBroken, Patience
from consensus.enclosure import Plan
from consensus.vote import Ranks


def link_over_data_groups(
    plan: Plan,
    backend: str,  # "inherit", or a name of TOURS
    groups: Iterable[Any],
    device_of: Callable[[Any], torch.device],
    rank: int,
) -> Link | None:
    """Return a link over groups that are there; None when those that it needs are not known.

    Raises:
        EnclosureError: The groups of all members do not connect them; the same on every member.
    """
    known = {group_ranks(group): group for group in groups}
    wanted = plan.groups or (plan.members,)
    tour = TOURS[backend](wanted) if backend in TOURS else (plan.members,)
    own = {ranks for ranks in tour if rank in ranks}
    if not own or not own <= known.keys():
        return None
    links = {ranks: GroupLink(_Borrowed(known[ranks]), device_of(known[ranks])) for ranks in own}
    return links[plan.members] if tour == (plan.members,) else TourLink(tour, links, plan, rank)


class _Borrowed:
    """A group of the caller's, as long as it is one: torch holds it until then."""

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)

    def __getattr__(self, name: str) -> Any:
        group = self._group()
        if group is None:
            raise LinkBroken("a process group that carried the vote was destroyed", expired=False)
        return getattr(group, name)


class TourLink:
    """A vote over overlapping groups, one after the other: see [Note: two tours] in `_tours`.

    Collectives: one all_reduce(MAX) of int64 a message for each group of the tour that this rank
    is a member of, in the order of the tour. A sum travels as a row for each member, twice as wide,
    since a rank that two groups share would be counted twice.
    """

    def __init__(self, tour: Tour, links: Mapping[Ranks, GroupLink], plan: Plan, rank: int) -> None:
        """Vote on the links, by ranks, of those groups of the tour that ``rank`` is in."""
        self.device = next(iter(links.values())).device
        self._own = [links[ranks] for ranks in tour if ranks in links]
        self._links = links
        self._place, self._num_ranks = plan.members.index(rank), len(plan.members)

    def all_reduce_max(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        """Return the maximum of each word over the members."""
        for link in self._own:
            words = link.all_reduce_max(words, patience)
        return words

    def all_reduce_sum(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        """Return the sum of each word over the members."""
        # A row of zeros is nobody's, so what is below zero travels apart.
        own = [part for word in words for part in (max(word, 0), max(-word, 0))]
        rows = [0] * (len(own) * self._num_ranks)
        rows[self._place * len(own) : (self._place + 1) * len(own)] = own
        heard = self.all_reduce_max(rows, patience)
        totals = [sum(heard[i :: len(own)]) for i in range(len(own))]
        return [above - below for above, below in zip(totals[::2], totals[1::2], strict=True)]

    def close(self) -> None:
        """Vote no more; peers wait in the callers' groups until their own deadline."""
        for link in self._links.values():
            link.close()

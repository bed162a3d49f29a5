"""In which order overlapping groups reduce, so that all ranks hear of all. Pure; no torch.

Where no group may be made that encloses a component, its vote goes over the groups that the ranks
have: the maximum of one, then of the next, each rank in those it is a member of. All ranks derive
the same order, and take their groups in it, so nobody waits in a ring.

[Note: two tours]
    One pass over the groups is not enough: with {0,1}, {1,2} in this order, rank 0 never hears of
    rank 2. *Passes* repeat the groups until everybody has heard of everybody, and no longer: the
    fewest reductions where groups are the rows and columns of a grid. A *sweep* goes up a tree of
    groups to one of them and down again: at most 2 G - 1 reductions of G groups, however they
    overlap, and the fewest in a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from consensus.errors import EnclosureError
from consensus.vote import Ranks

Tour: TypeAlias = tuple[Ranks, ...]  # groups in the order in which they reduce


def passes(groups: Iterable[Ranks]) -> Tour:
    """Return the groups again and again, up to where every rank has heard of every other.

    Args:
        groups: Of one component: connected by the ranks that they share.

    Raises:
        EnclosureError: They are not connected, or there is none.
    """
    each = _connected(groups)
    everybody = frozenset(rank for ranks in each for rank in ranks)
    heard = {rank: frozenset((rank,)) for rank in everybody}
    tour: list[Ranks] = []
    while True:
        for ranks in each:
            if all(heard[rank] == everybody for rank in everybody):
                return tuple(tour)
            together = frozenset[int]().union(*(heard[rank] for rank in ranks))
            if any(heard[rank] != together for rank in ranks):
                tour.append(ranks)
                heard.update(dict.fromkeys(ranks, together))


def sweep(groups: Iterable[Ranks]) -> Tour:
    """Return a way up a tree of the groups, and down again.

    Args:
        groups: Of one component: connected by the ranks that they share.

    Raises:
        EnclosureError: They are not connected, or there is none.
    """
    each = _connected(groups)
    down = _from(each[0], each)  # each shares a rank with one before it
    return (*reversed(down), *down[1:])


TOURS: Mapping[str, Callable[[Iterable[Ranks]], Tour]] = {"passes": passes, "sweep": sweep}
OVER_DATA_GROUPS = ("inherit", *TOURS)  # backends whose votes go over the caller's groups


def _connected(groups: Iterable[Ranks]) -> list[Ranks]:
    """Return the groups that no other encloses, sorted."""
    distinct = sorted(set(groups))
    each = [s for s in distinct if not any(set(s) < set(other) for other in distinct)]
    if not each or len(_from(each[0], each)) < len(each):
        shown = [list(ranks) for ranks in each[:8]]
        raise EnclosureError(
            f"expected groups that share ranks with each other; got {len(each)}: {shown}. A vote "
            "over them would not reach all; name further groups, or use backend='auto'."
        )
    return each


def _from(first: Ranks, groups: Iterable[Ranks]) -> list[Ranks]:
    """Return the groups that ranks tie to the first, nearest first."""
    by_rank: dict[int, list[Ranks]] = {}
    for ranks in groups:
        for rank in ranks:
            by_rank.setdefault(rank, []).append(ranks)
    order, known = [first], {first}
    for ranks in order:  # which grows meanwhile
        for rank in ranks:
            for other in by_rank.pop(rank, ()):
                if other not in known:
                    known.add(other)
                    order.append(other)
    return order

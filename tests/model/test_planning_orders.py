"""Planning in any order of requests, with ranks that give up at any of them or never come.

Where nobody gives up, ranks meet only in blocking requests, and one order is as good as another.
What a rank leaves in the store when it gives up races with what others put there, so here the
orders are drawn at random, and a rank gives up at each of its requests in turn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from consensus._planning import Add, Await, AwaitAll, Drop, GaveUp, Planned, Put, plan
from consensus.enclosure import Scope, plan_of
from tests.model.test_layouts import Family, components_of, held_by, up_to_names
from tests.model.test_strategies import FAMILIES, relabelled

pytestmark = pytest.mark.slow

Records = Mapping[int, Sequence[Scope]]

FEW: dict[str, Family] = {
    "chain": tuple(pairwise(range(5))),
    "chain, against the order": ((0, 4), (1, 4), (1, 3), (2, 3)),
    "ring": ((0, 1), (1, 2), (0, 2)),
    "mesh": ((0, 1), (2, 3), (0, 2), (1, 3)),
    "star": ((0, 4), (1, 4), (2, 4), (3, 4)),
    "two leaders": ((0, 2, 3), (1, 2, 3)),
}


@dataclass(slots=True)
class Orders:
    """One run: whose turn it is is drawn; a rank may give up at one of its requests."""

    chance: random.Random
    gives_up: dict[int, tuple[int, bool]] = field(default_factory=dict)
    # rank -> at which request, and whether the store has still got it
    store: dict[str, Any] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    gave_up: set[int] = field(default_factory=set)  # all that did, of themselves or because told
    all_met: bool = False  # and know it, or will
    asked: dict[int, int] = field(default_factory=dict)
    past: dict[int, bool] = field(default_factory=dict)  # rank that gave up -> all had met by then

    def run(self, programs: Mapping[int, Any], *, deadlines: bool = False) -> Orders:
        """Let all run to the end; at a standstill, one wait after the other ends if so asked."""
        live = dict(programs)
        wants = {rank: next(program) for rank, program in live.items()}
        while wants:
            ready = [r for r in sorted(wants) if self._leaves(r, wants) or self._answers(wants[r])]
            assert ready or deadlines, f"{wants} wait for ever"
            rank = self.chance.choice(ready or sorted(wants))
            leaves = self._leaves(rank, wants)
            self.asked[rank] = self.asked.get(rank, 0) + 1
            try:
                if leaves or not ready:
                    self.past[rank] = self.all_met
                    if leaves and self.gives_up[rank][1] and self._answers(wants[rank]):
                        self._answer(wants[rank])
                    wants[rank] = live[rank].throw(GaveUp(f"{rank} waited"))
                else:
                    wants[rank] = live[rank].send(self._answer(wants[rank]))
            except StopIteration as stop:
                self.results[rank] = stop.value
                del wants[rank]
            except GaveUp:
                self.gave_up.add(rank)
                del wants[rank]
        return self

    def _leaves(self, rank: int, wants: Mapping[int, Any]) -> bool:
        if rank not in self.gives_up or self.asked.get(rank, 0) != self.gives_up[rank][0]:
            return False
        return b"given up" not in getattr(wants[rank], "value", b"")  # once is enough

    def _answers(self, want: Any) -> bool:
        keys = [want.key] if isinstance(want, Await) else []
        return all(key in self.store for key in (want.keys if isinstance(want, AwaitAll) else keys))

    def _answer(self, want: Any) -> Any:
        if isinstance(want, Add):
            self.store[want.key] = self.store.get(want.key, 0) + want.amount
        elif isinstance(want, Put):
            self.store.setdefault(want.key, want.value)
            verdict = want.key.endswith("/done") and self.store[want.key].startswith(b"[true")
            self.all_met = self.all_met or verdict
        elif isinstance(want, Drop):
            for key in want.keys:
                self.store.pop(key, None)
            return None
        elif isinstance(want, AwaitAll):
            return [self.store[key] for key in want.keys]
        return self.store[want.key]


def records_of(family: Family, *, alike: bool = False) -> Records:
    """Return what each rank holds; if not alike, every scope something of its own."""
    manifests = [0 if alike else number for number in range(len(family))]
    return {r: held_by(r, family, manifests) for r in sorted({r for s in family for r in s})}


def programs_of(records: Records) -> dict[int, Any]:
    return {rank: plan(held, rank=rank, rounds={}) for rank, held in records.items()}


@pytest.mark.parametrize("name", FEW)
def test_the_order_of_requests_changes_nothing(name: str) -> None:
    records = records_of(FEW[name])
    for seed in range(10):
        run = Orders(random.Random(seed)).run(programs_of(records))
        assert run.results == dict.fromkeys(records, Planned(plan_of(records)))
        assert run.store == {}


def check_one_that_gives_up(records: Records, seed: str) -> None:
    """At each of its requests: all others are told at once, and all of them or none have planned.

    At once: none of their waits has to be ended by a deadline.
    """
    alone = Orders(random.Random(seed)).run(programs_of(records))
    for odd, requests in alone.asked.items():
        reached = 0
        for at in range(requests):
            for heard in (False, True):
                chance = random.Random(f"{seed} {odd} {at} {heard}")
                run = Orders(chance, {odd: (at, heard)}).run(programs_of(records))
                if odd not in run.past:  # in this order it had a request less to make
                    continue
                reached += 1
                may_lack = {odd} if run.past[odd] else set()  # all others had gone on
                assert run.results.keys() | may_lack in (may_lack, set(records)), (odd, at, heard)
                assert all(found == alone.results[odd] for found in run.results.values())
        assert reached >= 2 * requests - 4


@pytest.mark.parametrize("name", FEW)
def test_all_are_told_of_a_rank_that_gives_up_at_any_request(name: str) -> None:
    check_one_that_gives_up(records_of(FEW[name]), name)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_are_told_in_every_small_layout(size: int) -> None:
    for number, family in enumerate(up_to_names(size)):
        if len(components_of(family)) == 1:
            check_one_that_gives_up(records_of(family), f"{size} {number}")


def test_all_are_told_where_members_of_one_scope_hold_the_same() -> None:
    """Here they meet under the key of their scope, and not once more."""
    records = records_of(((0, 1, 2),), alike=True)
    for odd in records:
        for at, heard in ((0, False), (0, True), (1, False)):
            run = Orders(random.Random(0), {odd: (at, heard)}).run(programs_of(records))
            assert len(run.results) in (0, 3)


@pytest.mark.parametrize("kind", FAMILIES)
def test_several_that_give_up_leave_nobody_waiting(kind: str) -> None:
    """All others of a component have planned, or none."""
    chance = random.Random(kind)
    for _ in range(20):
        family = relabelled(FAMILIES[kind](8, chance), 8, chance)
        records = records_of(family, alike=chance.random() < 0.5)
        odd = chance.sample(sorted(records), min(len(records), chance.randint(2, 3)))
        when = {rank: (chance.randrange(14), chance.random() < 0.5) for rank in odd}
        run = Orders(chance, when).run(programs_of(records))
        for members in components_of(family):
            others = set(members) - set(run.past)
            assert run.results.keys() & others in (set(), others), (family, when)


@pytest.mark.parametrize("name", FEW)
def test_nobody_plans_without_a_rank_that_never_comes(name: str) -> None:
    records = records_of(FEW[name])
    for absent in records:
        programs = programs_of(records)
        del programs[absent]
        run = Orders(random.Random(absent)).run(programs, deadlines=True)
        assert run.gave_up == set(programs)

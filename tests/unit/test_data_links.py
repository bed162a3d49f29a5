"""Votes over the caller's groups do not keep these alive, and say so when one has gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from consensus._data_links import TOURS, link_over_data_groups
from consensus._waiting import LinkBroken, Patience
from consensus.enclosure import Plan
from consensus.vote import Ranks


class Done:
    """Work that has ended."""

    def wait(self, timeout: Any) -> None:
        del timeout


class Group:
    """A process group of some ranks, all of whom bring what this one brings."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Done:
        del tensors, options
        return Done()


@pytest.mark.parametrize("backend", ["inherit", *TOURS])
def test_a_group_that_was_destroyed_is_named_as_the_reason(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consensus._data_links.group_ranks", lambda group: group.ranks)
    chain = ((0, 1),) if backend == "inherit" else ((0, 1), (1, 2))
    groups = [Group(ranks) for ranks in chain]
    plan = Plan(tuple(sorted({*chain[0], *chain[-1]})), groups=chain)
    link = link_over_data_groups(plan, backend, groups, lambda group: torch.device("cpu"), 1)
    assert link is not None
    assert list(link.all_reduce_max((1, 2), Patience("test", hard=5.0))) == [1, 2]
    del groups
    with pytest.raises(LinkBroken, match="was destroyed") as caught:
        link.all_reduce_max((1, 2), Patience("test", hard=5.0))
    assert not caught.value.expired
    assert not caught.value.connection

"""What a rank does to time a message over each link; see [Note: ranks meet before every sample]."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks._votes import Span, meeting
from consensus import _sockets
from consensus._hops import WAYS
from consensus._store import StoreClient
from consensus._transport import GroupLink, Link, StoreLink, make_gloo
from consensus._waiting import Patience

BARE, AGAIN = "all_reduce int32[1]", "all_reduce int32[1], again"
ALL_TO_ALL, ALL_REDUCE, STORE = "gloo all_to_all", "gloo all_reduce", "store"
WARM_UP = 10
DEADLINE_S = 60.0


def time_links(
    rank: int, lengths: dict[int, int], seed: int
) -> tuple[dict[int, dict[str, list[Span]]], dict[str, float]]:
    """Time messages of some lengths, in words, so many rounds of each.

    Returns:
        Words -> link -> spans, and seconds that making each link took.
    """
    links, making = _links(rank)
    meet = meeting()
    flag = torch.zeros(1, dtype=torch.int32)

    def bare() -> None:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)

    found: dict[int, dict[str, list[Span]]] = {}
    order = random.Random(seed)
    for num_words, rounds in lengths.items():
        words = [rank * (i + 1) for i in range(num_words)]
        top = [(dist.get_world_size() - 1) * (i + 1) for i in range(num_words)]
        calls: dict[str, Callable[[], object]] = {BARE: bare, AGAIN: bare}
        for name, link in links.items():
            calls[name] = _reducing(link, words)
            if calls[name]() != top:
                raise AssertionError(f"{name} is wrong on rank {rank}")
        names = list(calls)
        spans: dict[str, list[Span]] = {name: [] for name in names}
        for _ in range(WARM_UP + rounds):
            order.shuffle(names)
            for name in names:
                meet()
                begin = time.perf_counter()
                calls[name]()
                spans[name].append((begin, time.perf_counter()))
        found[num_words] = {name: span[WARM_UP:] for name, span in spans.items()}
    meet()
    for link in links.values():
        link.close()
    return found, making


def _reducing(link: Link, words: list[int]) -> Callable[[], list[int]]:
    return lambda: list(link.all_reduce_max(words, Patience("benchmark", hard=DEADLINE_S)))


def _links(rank: int) -> tuple[dict[str, Link], dict[str, float]]:
    size = dist.get_world_size()
    members, store = tuple(range(size)), distributed_c10d._get_default_store()
    client = StoreClient(store)
    links: dict[str, Link] = {}
    making: dict[str, float] = {}

    def make(name: str, link: Callable[[], Link]) -> None:
        dist.barrier()
        begin = time.perf_counter()
        links[name] = link()
        links[name].all_reduce_max([rank], Patience("benchmark", hard=DEADLINE_S))
        making[name] = time.perf_counter() - begin

    make(ALL_REDUCE, lambda: _all_reduce(store, members, rank))
    for name, way in WAYS.items():
        if size <= way.most_ranks:
            if name == "direct":
                make(ALL_TO_ALL, lambda: make_gloo(store, "all_to_all", members, rank))
            make(f"tcp {name}", lambda name=name: _tcp(store, client, name, rank, size))  # type: ignore[misc]
    make(STORE, lambda: StoreLink(client, "votes", members, rank))
    return links, making


def _all_reduce(store: Any, members: tuple[int, ...], rank: int) -> Link:
    """Return what makes no difference between few ranks and many."""
    return GroupLink(make_gloo(store, "all_reduce", members, rank)._group, torch.device("cpu"))


def _tcp(store: Any, client: StoreClient, way: str, rank: int, size: int) -> Link:
    link = _sockets.connect(
        store, client, f"benchmark {way}", tuple(range(size)), rank, seconds=DEADLINE_S
    )
    link.way = way
    return link

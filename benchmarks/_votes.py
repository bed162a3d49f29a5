"""What a rank does to time agreements, one at a time and among other ways to agree.

[Note: ranks meet before every sample]
A step votes once, after a long stretch of other work, and ranks arrive at about the same time. So
before each sample all ranks meet in a barrier of a group that no contender uses. Calls made back
to back measure something else: a rank whose part in a ring is done starts the next call while
its peers still finish the last one, and whatever the call costs the host hides behind them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import consensus
from consensus.agree import hold
from consensus.vote import Fact, Vote

Span: TypeAlias = tuple[float, float]  # when a call began and ended; one clock for all processes

BARE, AGAIN = "all_reduce int32[1]", "all_reduce int32[1], again"
TWO_WORDS = "all_reduce int64[2]"
VOTE, VOTE_OF_A_STEP = "vote", "vote with a step's facts"
BY_STORE = "vote over the store"
DCP, OBJECTS = "DCP _DistWrapper.all_reduce", "all_gather_object"
SHORT = (BARE, AGAIN, TWO_WORDS, VOTE, VOTE_OF_A_STEP)
ALL = (*SHORT, BY_STORE, DCP, OBJECTS)  # the last pickle, and leave the caches full of that

WARM_UP = 20  # rounds that are thrown away


def time_votes(
    rank: int, contenders: Sequence[str], rounds: int, seed: int
) -> tuple[dict[str, list[Span]], dict[str, float]]:
    """Return the span of each sample of each contender, and seconds a call when called in a loop.

    See [Note: ranks meet before every sample]. The order of contenders is drawn anew each round,
    the same on all ranks, since each leaves the caches to the next.
    """
    calls, meet = _contenders(), meeting()
    order = random.Random(seed)
    names = list(contenders)
    spans: dict[str, list[Span]] = {name: [] for name in names}
    for _ in range(WARM_UP + rounds):
        order.shuffle(names)
        for name in names:
            call = calls[name]
            meet()
            begin = time.perf_counter()
            call()
            spans[name].append((begin, time.perf_counter()))
    in_a_loop = {}
    for name in contenders:
        meet()
        begin = time.perf_counter()
        for _ in range(rounds):
            calls[name]()
        in_a_loop[name] = (time.perf_counter() - begin) / rounds
    return {name: found[WARM_UP:] for name, found in spans.items()}, in_a_loop


def time_first_agreement(rank: int) -> list[Span]:
    """Return the spans of planning and making the group, of the first vote, and of the second."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shards = [torch.zeros(2, 8) for _ in range(4)]
    params = [nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)])) for shard in shards]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer = torch.optim.SGD([(f"layer {i}", param) for i, param in enumerate(params)])
    group = consensus.control_group(optimizer)
    meet = meeting()

    def step() -> None:
        with consensus.preflight(optimizer):
            pass

    meet()
    return [_span(call, meet) for call in (group.prepare, step, step)]


def _span(call: Callable[[], object], meet: Callable[[], None]) -> Span:
    meet()
    begin = time.perf_counter()
    call()
    return begin, time.perf_counter()


def _contenders() -> dict[str, Callable[[], object]]:
    flag = torch.zeros(1, dtype=torch.int32)
    words = torch.zeros(2, dtype=torch.int64)
    group = consensus.control_group().prepare()
    over_store = consensus.control_group(backend="store").prepare()
    plain = Vote("step")
    # As long as the keys that an optimizer forms: see consensus.preflight.
    names = ("parameters", "options", "gradients", "step", "AMP")
    full = Vote("step", facts=tuple(Fact(name, bytes(32), dict) for name in names))
    wrapper = _DistWrapper(None, True, 0)
    gathered: list[object] = [None] * dist.get_world_size()

    def bare() -> None:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)

    return {
        BARE: bare,
        AGAIN: bare,
        TWO_WORDS: lambda: dist.all_reduce(words, op=dist.ReduceOp.MAX),
        VOTE: lambda: hold(group, plain),
        VOTE_OF_A_STEP: lambda: hold(group, full),
        BY_STORE: lambda: hold(over_store, plain),
        DCP: lambda: wrapper.all_reduce("step", lambda: None, lambda results: None),
        OBJECTS: lambda: dist.all_gather_object(gathered, None),
    }


def meeting() -> Callable[[], None]:
    """Return a barrier on connections and threads of its own, so that it warms up nobody's."""
    store = PrefixStore("benchmark meeting", distributed_c10d._get_default_store())
    minute = timedelta(seconds=60)
    group: Any = dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), minute)

    def meet() -> None:
        group.barrier().wait()

    return meet

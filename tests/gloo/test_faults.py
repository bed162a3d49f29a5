"""Faults that need processes, and faults amid the steps and collectives of any optimizer."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from consensus.testing import faults, inject, run_ranks
from tests.gloo._cases import caught

pytestmark = pytest.mark.slow


def end_at_the_second_barrier(rank: int) -> str:
    with (
        inject((dist, "barrier"), rank=1, fault=faults.Exit(5), nth=2),
        inject((dist, "barrier"), rank=2, fault=faults.Kill(), nth=2),
    ):
        dist.barrier()
        return type(caught(dist.barrier)).__name__


def test_a_process_exits_or_is_killed_at_the_nth_call() -> None:
    ranks = run_ranks(end_at_the_second_barrier, 3)
    assert [result.exitcode for result in ranks] == [0, 5, -signal.SIGKILL]
    assert ranks[0].value == "RuntimeError"  # its peers were gone


def meet_at(rank: int, point: tuple[object, str]) -> str:
    with inject(point, rank=1, fault=ValueError("boom")):
        return str(caught(dist.get_world_size))


def test_a_point_with_a_module_can_be_sent_to_ranks() -> None:
    assert run_ranks(meet_at, 2, (dist, "get_world_size")).values() == ("None", "boom")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("point", [(dist, "get_world_size")])
def test_a_point_with_a_module_can_be_a_parameter(rank: int, point: tuple[object, str]) -> None:
    assert meet_at(rank, point) == ("boom" if rank == 1 else "None")


@pytest.mark.ranks(2)
def test_calls_that_change_places_mix_up_what_ranks_add(rank: int) -> None:
    one, ten = torch.ones(1), torch.full((1,), 10.0)
    with inject((dist, "all_reduce"), rank=1, fault=faults.LateCall()):
        dist.all_reduce(one)
        dist.all_reduce(ten)
    assert (one.item(), ten.item()) == (11.0, 11.0)  # else 2 and 20


@pytest.mark.ranks(2, backend="threaded")
def test_an_optimizer_of_others_fails_amid_its_update(rank: int) -> None:
    weights = [nn.Parameter(torch.eye(3)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones(3, 3)
    orthogonalize = (torch.optim._muon, "_zeropower_via_newtonschulz")
    with inject(orthogonalize, rank=1, fault=ValueError("out of memory"), nth=2):
        error = caught(torch.optim.Muon(weights).step)
    untouched = [bool(torch.equal(weight, torch.eye(3))) for weight in weights]
    if rank == 1:
        assert (str(error), untouched) == ("out of memory", [False, True, True])
    else:
        assert (error, untouched) == (None, [False, False, False])

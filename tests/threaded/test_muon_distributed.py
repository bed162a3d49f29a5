"""Muon by owners on sharded parameters against one device, ranks as threads.

The gloo tests run the same cases on processes, so that the fake is verified.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from adapters import GefenMuon, Hybrid, Muon
from adapters._muon_rule import MuonRule
from adapters.options import ShardedMode
from consensus.testing._threads import run_threads
from tests.threaded.muon_cases import (
    CASES,
    FSDP_CASES,
    Case,
    FsdpCase,
    Twins,
    fully_sharded,
    local,
    named,
    names,
    random_matrices,
    shard,
    slice_of,
    torchs_muon,
    whole_of,
)

Options = dict[str, Any]
TP_ROWS = _StridedShard(0, split_factor=2)
# Beyond what exact mode is tried on: where copies lie on several axes, or there are three.
COPIES = (
    Case("three copies", (3, 2), (Replicate(), Shard(0))),
    Case("three copies of columns, inside", (2, 3), (Shard(1), Replicate())),
    Case("copies on two axes", (2, 2, 2), (Replicate(), Replicate(), Shard(0))),
    Case("copies around a cut", (2, 2, 2), (Replicate(), Shard(0), Replicate())),
    Case("copies between two cuts", (2, 2, 2), (Shard(0), Replicate(), Shard(1))),
    Case("three cuts", (2, 2, 2), (Shard(1), TP_ROWS, Shard(0))),
    Case("nothing but copies, on two axes", (2, 2), (Replicate(), Replicate())),
)
ALL = (*CASES, *COPIES)


def by_owners(params: Any, **options: Any) -> Muon:
    return Muon(params, sharded_mode="distributed", **options)


def against_torch(rank: int, case: Case, options: Options) -> list[str]:
    """Three steps of both; every rank returns what differs, which should be nothing."""
    twins = Twins.of(case)
    ours = by_owners(named(twins.sharded), **options)
    torchs = torchs_muon(twins.whole, **options)
    for step in range(3):
        twins.set_gradients(seed=100 + step)
        ours.step()
        torchs.step()
    return twins.differences(ours, torchs)


@pytest.mark.parametrize("case", ALL, ids=names(ALL))
def test_it_is_bit_identical_to_one_device(case: Case) -> None:
    found = run_threads(against_torch, case.world_size, case, {"lr": 0.02}).values()
    assert found == ([],) * case.world_size


TORCHS_OPTIONS: tuple[Options, ...] = (
    {"lr": 0.02, "nesterov": False, "momentum": 0.8},
    {"lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"},
    {"lr": torch.tensor(0.02), "weight_decay": 0.3},
    {"lr": 0.02, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
)


@pytest.mark.parametrize("options", TORCHS_OPTIONS, ids=str)
def test_it_is_bit_identical_whatever_the_options(options: Options) -> None:
    for case in (CASES[1], CASES[7]):
        found = run_threads(against_torch, case.world_size, case, options).values()
        assert found == ([],) * case.world_size


# ---- options that torch's class does not have ----

# A large eps, so that it shows in the bits how many steps a moment is old.
ROWS: Options = {"normuon": True, "normuon_beta2": 0.7, "normuon_eps": 1e-2}
OUR_OPTIONS: tuple[Options, ...] = (
    *({"ns_schedule": name} for name in ("you5", "polar5", "deepseek10", "tuned4", "tuned3")),
    {"ns_schedule": [(2.0, -1.5, 0.5), (3.4445, -4.775, 2.0315)], "nesterov": False},
    {"cautious": True},
    ROWS,
    {**ROWS, "cautious": True, "ns_schedule": "tuned3"},
)


def unlike_whole(twins: Twins, ours: Muon, whole: Muon) -> list[str]:
    """What is not that of the same optimizer on one device; moments of rows are cut here."""
    found = []
    for i, (param, twin) in enumerate(zip(twins.sharded, twins.whole, strict=True)):
        mine, its = ours.state.get(param, {}), whole.state.get(twin, {})
        pairs = [("weight", local(param), twin.detach())]
        if its:
            pairs.append(("momentum", local(mine["momentum_buffer"]), its["momentum_buffer"]))
        if "normuon_v" in its and local(param).numel():
            rows = mine["normuon_rows"].expand(local(param).shape)
            pairs.append(("rows", rows, its["normuon_v"].expand(twin.shape)))
            if mine["normuon_step"] != its["normuon_step"]:
                found.append(f"step of the rows of {i}")
        for what, actual, expected in pairs:
            if not torch.equal(actual, slice_of(expected, twins.mesh, twins.placements)):
                found.append(f"{what} {i} of shape {tuple(twin.shape)}")
    return found


def against_one_device(rank: int, case: Case, options: Options, bucket_bytes: int) -> list[str]:
    twins = Twins.of(case)
    ours, whole = by_owners(named(twins.sharded), **options), Muon(named(twins.whole), **options)
    ours.bucket_bytes = bucket_bytes
    for step, skip in enumerate([(), (0, 3), (3,), (), ()]):
        twins.set_gradients(seed=step, skip=skip)
        ours.step()
        whole.step()
    return unlike_whole(twins, ours, whole)


MIB = 2**20


@pytest.mark.parametrize("options", OUR_OPTIONS[:-2], ids=str)
def test_our_own_options_are_those_of_one_device(options: Options) -> None:
    for case in (CASES[1], CASES[7], CASES[11]):
        found = run_threads(against_one_device, case.world_size, case, options, MIB).values()
        assert found == ([],) * case.world_size


@pytest.mark.parametrize("case", ALL, ids=names(ALL))
def test_moments_of_rows_are_those_of_one_device(case: Case) -> None:
    for options in OUR_OPTIONS[-2:]:
        found = run_threads(against_one_device, case.world_size, case, options, 300).values()
        assert found == ([],) * case.world_size


def normuon_begins_later(rank: int, mode: ShardedMode) -> list[str]:
    twins = Twins.of(CASES[0])
    ours, whole = Muon(named(twins.sharded), sharded_mode=mode), Muon(named(twins.whole))
    for seed in range(4):
        for optimizer in (ours, whole):
            optimizer.param_groups[0].update(ROWS if seed >= 2 else {})
        twins.set_gradients(seed)
        ours.step()
        whole.step()
    return [
        f"weight {i}"
        for i, (param, twin) in enumerate(zip(twins.sharded, twins.whole, strict=True))
        if not torch.equal(local(param), slice_of(twin.detach(), twins.mesh, twins.placements))
    ]


@pytest.mark.parametrize("mode", ["exact", "distributed"])
def test_rows_may_be_normalised_from_a_later_step_on(mode: ShardedMode) -> None:
    assert run_threads(normuon_begins_later, 2, mode).values() == ([], [])


# ---- which gradients there are, and how many rounds ----


def in_small_rounds(rank: int, case: Case, bucket_bytes: int) -> list[str]:
    """Other gradients are missing at each step, and once all of them."""
    twins = Twins.of(case)
    ours, torchs = by_owners(named(twins.sharded)), torchs_muon(twins.whole)
    ours.bucket_bytes = bucket_bytes
    everything = range(len(twins.whole))
    for step, skip in enumerate([(0, 3), (3,), everything, (9,), (), tuple(everything)[1:]]):
        twins.set_gradients(seed=step, skip=tuple(skip))
        ours.step()
        torchs.step()
    return twins.differences(ours, torchs)


@pytest.mark.filterwarnings("ignore:Muon.step. no parameter has a gradient:UserWarning")
@pytest.mark.parametrize("bucket_bytes", [1, 200, MIB])
def test_neither_missing_gradients_nor_the_size_of_a_bucket_change_anything(
    bucket_bytes: int,
) -> None:
    for case in (CASES[1], CASES[7], CASES[10]):
        found = run_threads(in_small_rounds, case.world_size, case, bucket_bytes).values()
        assert found == ([],) * case.world_size


def number_of_rounds(rank: int) -> list[int]:
    twins = Twins.of(CASES[1])
    ours, found = by_owners(named(twins.sharded)), []
    for bucket_bytes in (1, MIB, 1, None):
        ours.bucket_bytes = bucket_bytes
        twins.set_gradients(seed=1)
        ours.step()
        (rule,) = ours._rules
        assert isinstance(rule, MuonRule)
        found.append(len(rule._lines))
    return found


def test_a_limit_that_is_set_anew_holds_from_the_next_step_on() -> None:
    for many, one, again, default in run_threads(number_of_rounds, CASES[1].world_size).values():
        assert many == again > one == default == 1


# ---- models as users shard them, and bfloat16 ----


def on_fsdp(rank: int, case: FsdpCase) -> list[str]:
    """Train a real model; whole matrices get the gradients that FSDP computed."""
    model = fully_sharded(case.mesh, case.rows, tensor_parallel=case.tensor_parallel)
    backward: Callable[[Tensor], None] = Tensor.backward
    params = list(model.parameters())
    whole = [nn.Parameter(whole_of(param)) for param in params]
    ours, torchs = by_owners(model.named_parameters(), lr=0.02), torchs_muon(whole, lr=0.02)
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        backward(model(torch.randn(4, 8, generator=generator)).square().mean())
        for twin, param in zip(whole, params, strict=True):
            twin.grad = whole_of(param.grad)
        ours.step()
        torchs.step()
        ours.zero_grad()
    pairs = list(zip(whole, params, strict=True))
    return [str(twin.shape) for twin, param in pairs if not torch.equal(whole_of(param), twin)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("case", FSDP_CASES, ids=names(FSDP_CASES))
def test_it_is_bit_identical_on_fully_sharded_models(case: FsdpCase) -> None:
    world_size = math.prod(case.mesh)
    assert run_threads(on_fsdp, world_size, case).values() == ([],) * world_size


MODES: tuple[ShardedMode, ...] = ("exact", "distributed")


def in_bfloat16(rank: int, case: Case) -> list[int]:
    """Weights and gradients in bfloat16: what is not bit for bit that of exact mode."""
    mesh = init_device_mesh("cpu", case.mesh)
    ends = []
    for mode in MODES:
        weights = [each.bfloat16() for each in random_matrices(case.shapes, 1)]
        params = [nn.Parameter(shard(each, mesh, case.placements)) for each in weights]
        optimizer = Muon(named(params), lr=0.02, sharded_mode=mode)
        for seed in range(3):
            for param, grad in zip(params, random_matrices(case.shapes, seed), strict=True):
                param.grad = shard(grad.bfloat16(), mesh, case.placements)
            optimizer.step()
        ends.append([local(param) for param in params])
    return [
        i
        for i, (exact, ours) in enumerate(zip(*ends, strict=True))
        if not (torch.equal(exact, ours) or is_almost(exact, ours, case.shapes[i]))
    ]


def is_almost(exact: Tensor, ours: Tensor, shape: tuple[int, int]) -> bool:
    """The update of a tall matrix lies transposed in memory, where torch rounds otherwise."""
    difference = (exact.float() - ours.float()).abs().max()
    return shape[0] > shape[1] and bool(difference <= 2**-7 * exact.float().abs().max())


@pytest.mark.parametrize("case", [CASES[1], CASES[7], CASES[14]], ids=str)
def test_bfloat16_weights_are_those_of_exact_mode_but_for_the_last_bit(case: Case) -> None:
    found = run_threads(in_bfloat16, case.world_size, case).values()
    assert found == ([],) * case.world_size


# ---- what is kept ----


def switching(rank: int, case: Case) -> list[str]:
    """Two steps in each mode, from one optimizer's state dict to the next one's."""
    twins = Twins.of(case)
    torchs = torchs_muon(twins.whole, lr=0.02)
    found, state_dict = [], None
    for run, mode in enumerate(["distributed", "exact", "distributed", "distributed", "exact"]):
        ours = Muon(named(twins.sharded), lr=0.02, sharded_mode=mode)  # type: ignore[arg-type]
        if state_dict is not None:
            ours.load_state_dict(state_dict)
        for seed in (2 * run, 2 * run + 1):
            twins.set_gradients(seed)
            ours.step()
            torchs.step()
        found += [f"run {run}: {each}" for each in twins.differences(ours, torchs)]
        state_dict = ours.state_dict()
    return found


@pytest.mark.parametrize("case", [CASES[1], CASES[7], CASES[11]], ids=str)
def test_the_mode_may_change_from_run_to_run(case: Case) -> None:
    found = run_threads(switching, case.world_size, case).values()
    assert found == ([],) * case.world_size


def kept(rank: int, cls: Any) -> list[str]:
    """What is in the state but is not this rank's part, after two steps."""
    twins = Twins.of(CASES[7])
    optimizer = cls(named(twins.sharded), sharded_mode="distributed", normuon=True)
    for seed in range(2):
        twins.set_gradients(seed)
        optimizer.step()
    found = []
    for param in twins.sharded:
        numel, rows = local(param).numel(), local(param).size(0)
        for key, value in optimizer.state[param].items():
            buffer = key == "momentum_buffer"
            if buffer != isinstance(value, DTensor):
                found.append(key)
            elif buffer:
                same = (value.placements, value.device_mesh) == (twins.placements, twins.mesh)
                found += [key] * (not same or local(value).numel() != numel)
            elif isinstance(value, Tensor):
                found += [key] * (value.numel() > max(numel, rows))
                # Not a view, which would keep all that was received.
                found += [f"{key} is a view"] * (value.untyped_storage().nbytes() > value.nbytes)
    return found


@pytest.mark.parametrize("cls", [Muon, GefenMuon, Hybrid])
def test_a_rank_keeps_its_own_part_of_the_state_and_no_more(cls: Any) -> None:
    assert run_threads(kept, 4, cls).values() == ([],) * 4

from collections.abc import Mapping

import pytest

from consensus.placement import BackendFacts, control_device

MIXED = {"cpu": "gloo", "cuda": "nccl"}
NCCL = {"cuda": "nccl"}


@pytest.mark.parametrize(
    "backends",
    [
        {"cpu": "gloo"},
        {"cuda": "gloo"},
        {"cpu": "gloo", "cuda": "gloo"},
        {"cpu": "mpi"},
        {"cpu": "ucc", "cuda": "ucc"},
        {"cpu": "fake", "cuda": "fake"},
        MIXED,
        {"cpu": "gloo", "xpu": "xccl"},
        {},
    ],
    ids=str,
)
def test_a_group_with_a_cpu_backend_votes_on_the_cpu(backends: Mapping[str, str]) -> None:
    facts = BackendFacts(backends, bound_device="cuda:1", shard_devices=("cuda:2",))
    assert control_device(facts) == "cpu"


@pytest.mark.parametrize(
    ("backends", "device"),
    [(NCCL, "cuda"), ({"xpu": "xccl"}, "xpu"), ({"npu": "hccl"}, "npu"), ({"tpu": "own"}, "tpu")],
)
def test_an_accelerator_group_votes_on_its_accelerator(
    backends: Mapping[str, str], device: str
) -> None:
    assert control_device(BackendFacts(backends)) == device


def test_the_bound_device_comes_before_the_shards() -> None:
    facts = BackendFacts(NCCL, bound_device="cuda:3", shard_devices=("cuda:1",))
    assert control_device(facts) == "cuda:3"


def test_the_first_shard_on_the_right_kind_of_device_comes_next() -> None:
    facts = BackendFacts(NCCL, shard_devices=("cpu", "cuda:1", "cuda:2"))
    assert control_device(facts) == "cuda:1"


def test_offloaded_shards_do_not_move_an_nccl_vote_to_the_cpu() -> None:
    assert control_device(BackendFacts(NCCL, shard_devices=("cpu", "cpu"))) == "cuda"


def test_a_bound_device_of_another_kind_is_not_used() -> None:
    assert control_device(BackendFacts(NCCL, bound_device="cpu")) == "cuda"


@pytest.mark.parametrize(
    ("backends", "hint", "device"),
    [
        (MIXED, "cuda:5", "cuda:5"),
        (MIXED, "cuda", "cuda:3"),
        (MIXED, "cpu", "cpu"),
        (NCCL, "cuda:5", "cuda:5"),
        (NCCL, "cuda", "cuda:3"),
        ({}, "cuda", "cuda:3"),
        ({}, "xpu", "xpu"),
    ],
)
def test_a_hint_that_the_group_can_carry_is_followed(
    backends: Mapping[str, str], hint: str, device: str
) -> None:
    assert control_device(BackendFacts(backends, bound_device="cuda:3", hint=hint)) == device


@pytest.mark.parametrize(
    ("backends", "hint", "carried"),
    [({"cpu": "gloo"}, "cuda:0", "cpu"), (NCCL, "cpu", "cuda"), (MIXED, "xpu", "cpu or cuda")],
)
def test_a_hint_that_the_group_cannot_carry_is_refused(
    backends: Mapping[str, str], hint: str, carried: str
) -> None:
    with pytest.raises(ValueError, match=rf"\({carried}\); got '{hint}'"):
        control_device(BackendFacts(backends, hint=hint))

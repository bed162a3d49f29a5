"""State of gefen-x that two ranks kept of their own shards, against what each rank saved."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters._legacy import from_gefen_x
from tests.unit.test_legacy import BY_RANK, checkpoint, convert, same

Edit = Callable[[Any], None]


def unpack(given: Any, rank: int) -> Any:
    packed = given["state"][0][f"_gefen_rank_local_payload_{rank}"]
    data = ctypes.string_at(packed.data_ptr(), packed.numel())
    return torch.load(io.BytesIO(data), weights_only=True)


def pack(given: Any, rank: int, payload: Any) -> None:
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).clone()
    given["state"][0][f"_gefen_rank_local_payload_{rank}"] = packed


def dense(entry: dict[str, Any], levels: Tensor) -> Tensor:
    """The momentum of a flat or a two-dimensional m_codebook, flat."""
    blocks = levels[entry["m_codebook"].long()].view(-1, entry["automatic_period"])
    return (blocks * entry["m_magnitude"].view(-1, 1)).flatten()


def ranks_of(given: Any, index: int) -> list[tuple[Any, Any, Tensor]]:
    """What each rank that holds some of a parameter saved: its slot, state and codebook."""
    payloads = [unpack(given, rank) for rank in range(2)]
    found = [
        (each["signature"][index], each["states"][index], each["codebook"]) for each in payloads
    ]
    return [each for each in found if "m_codebook" in each[1]]


def is_whole(slot: Any) -> bool:
    return not slot["sharded"] or slot["sharded_mode"] in ("exact", "distributed")


def joined(held: list[tuple[Any, Any, Tensor]], parts: list[Tensor]) -> Tensor:
    slot = held[0][0]
    if is_whole(slot):
        return parts[0].reshape(slot["shape"])
    local = [
        part.reshape(slot["local_shape"]) for part, (slot, *_) in zip(parts, held, strict=True)
    ]
    return torch.cat(local, slot["placements"][0]["dim"])


@pytest.mark.parametrize("name", BY_RANK)
def test_shards_become_one_tensor(name: str) -> None:
    given = checkpoint(name)
    found = convert(given)
    levels = found["param_groups"][0]["gefen"]["codebook"]
    assert all(torch.equal(each["gefen"]["codebook"], levels) for each in found["param_groups"])
    assert list(found["state"]) == list(given["state"])
    for index, entry in found["state"].items():
        held = ranks_of(given, index)
        slot, old, _ = held[0]
        period = entry["automatic_period"]
        assert entry["m_codebook"].shape == tuple(slot["shape"])
        assert {key: entry[key] for key in entry if key.endswith("step")} == {
            key: old[key] for key in old if key.endswith("step")
        }
        momentum = joined(held, [dense(state, book) for _, state, book in held]).flatten()
        new = dense(entry, levels)
        blocks = momentum.view(-1, period)
        assert torch.equal(entry["m_magnitude"], blocks.abs().amax(1))
        # Each element has the nearest of all levels, so half a gap at most is lost.
        scaled = blocks / entry["m_magnitude"].where(entry["m_magnitude"] > 0, 1)[:, None]
        least = (scaled.flatten()[:, None] - levels).abs().amin(1)
        chosen = (scaled.flatten() - levels[entry["m_codebook"].flatten().long()]).abs()
        assert torch.equal(chosen, least)
        assert (new - momentum).norm() <= 1e-3 * momentum.norm()
        if is_whole(slot):
            assert period == old["automatic_period"]
            moments = {key: value for key, value in old.items() if key[0] == "v"}
            for key, value in moments.items():
                assert same(entry[key], value if key.endswith("step") else value.flatten())
            continue
        if "vmean" in old:
            values = [state["vmean"].expand_as(state["m_codebook"]) for _, state, _ in held]
            second = joined(held, values).view(-1, period)
            expected = second.double().mean(1).float()
            torch.testing.assert_close(entry["vmean"], expected, rtol=1e-6, atol=0)
        if "normuon_v" in old:
            rows = torch.cat([state["normuon_v"] for _, state, _ in held])
            assert torch.equal(entry["normuon_v"], rows)


def test_block_lengths_are_those_of_the_whole_tensor() -> None:
    periods = {
        name: [entry["automatic_period"] for entry in convert(checkpoint(name))["state"].values()]
        for name in BY_RANK
    }
    assert periods == {
        "gefen_rank_local": [16, 104, 1, 1],  # 7 elements and 1: too few for blocks
        "gefen_rank_local_columns": [8, 13, 1, 1],
        "gefen_mixed": [8, 64, 8],
        "muon_approx": [16, 13, 12],
        "muon_mixed": [8, 36, 8],
    }


@pytest.mark.parametrize("name", ["gefen_rank_local", "muon_approx"])
def test_a_block_length_is_searched_in_the_root_of_the_second_moment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []

    def spy(grad: Tensor) -> int:
        searched.append(grad)
        return 8

    monkeypatch.setattr("adapters._legacy_ranks.find_period", spy)
    given = one_parameter(name, 1)
    assert convert(given)["state"][0]["automatic_period"] == 8
    held = ranks_of(given, 0)
    if name == "muon_approx":  # it has none
        expected = joined(held, [dense(state, book) for _, state, book in held])
    else:
        values = [state["vmean"].expand_as(state["m_codebook"]) for _, state, _ in held]
        expected = joined(held, values).sqrt()
    torch.testing.assert_close(searched, [expected])


def test_one_conversion_equals_another() -> None:
    given = checkpoint("gefen_rank_local")
    assert same(from_gefen_x(given), from_gefen_x(given))


def one_parameter(name: str, index: int, edit: Edit = lambda payload: None) -> Any:
    """A rank-local file with one of its parameters, each rank's payload edited."""
    given = checkpoint(name)
    payloads = [unpack(given, rank) for rank in range(2)]
    given["state"] = {0: {"name": 0}}
    (group,) = given["param_groups"]
    group["params"] = [0]
    for key in ("param_names", "param_names_synthesized"):
        group[key] = [group[key][index]]
    for rank, payload in enumerate(payloads):
        for key in ("signature", "states"):
            payload[key] = [payload[key][index]]
        edit(payload)
        pack(given, rank, payload)
    return given


def test_shards_follow_the_mesh_and_not_the_ranks() -> None:
    def turn(payload: Any) -> None:
        payload["signature"][0]["coordinate"] = [1 - payload["global_rank"]]

    straight = convert(one_parameter("muon_approx", 2))["state"][0]
    turned = convert(one_parameter("muon_approx", 2, turn))["state"][0]
    assert torch.equal(turned["m_codebook"], straight["m_codebook"].roll(3, 0))
    assert torch.equal(turned["normuon_v"], straight["normuon_v"].roll(3, 0))


def test_columns_of_normuon_rows_are_averaged() -> None:
    def by_columns(payload: Any) -> None:
        rank = payload["global_rank"]
        payload["signature"][0] |= {"shape": [3, 24], "placements": [{"type": "Shard", "dim": 1}]}
        payload["states"][0]["normuon_v"] = torch.tensor([[1.0], [2.0], [6.0]]) * (1 + 2 * rank)

    entry = convert(one_parameter("muon_approx", 2, by_columns))["state"][0]
    assert entry["normuon_v"].tolist() == [[2.0], [4.0], [12.0]]
    assert entry["m_codebook"].shape == (3, 24)


def test_replicas_and_zeros_need_no_new_codebook() -> None:
    def replicate(payload: Any) -> None:
        slot = payload["signature"][0]
        slot["placements"] = [{"type": "Replicate"}]
        slot["shape"] = slot["local_shape"] = [3, 12]

    def stop(payload: Any) -> None:
        payload["states"][0]["m_magnitude"] = torch.zeros(3, 1)

    given = one_parameter("muon_approx", 2, replicate)
    entry = convert(given)["state"][0]
    state = unpack(given, 0)["states"][0]
    assert entry["automatic_period"] == 12
    assert torch.equal(entry["m_magnitude"], state["m_magnitude"].flatten())
    given = one_parameter("muon_approx", 2, stop)
    found = convert(given)
    levels = unpack(given, 0)["codebook"]
    assert torch.equal(found["param_groups"][0]["gefen"]["codebook"], levels)
    assert not found["state"][0]["m_magnitude"].any()
    chosen = levels[found["state"][0]["m_codebook"].long()].abs()
    assert torch.equal(chosen, levels.abs().amin().expand_as(chosen))


def test_what_was_never_stepped_has_no_state() -> None:
    def before(payload: Any) -> None:
        payload |= {"states": [{"name": "wide.weight"}], "codebook": None}

    found = convert(one_parameter("muon_approx", 2, before))
    assert found["state"] == {}
    assert found["param_groups"][0]["gefen"]["codebook"] is None


def test_a_missing_counter_stays_missing() -> None:
    def drop(payload: Any) -> None:
        del payload["states"][0]["vmean_step"]

    expected = convert(one_parameter("gefen_rank_local", 0))
    del expected["state"][0]["vmean_step"]
    assert same(convert(one_parameter("gefen_rank_local", 0, drop)), expected)

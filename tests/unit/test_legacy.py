"""Files that gefen-x 0.5.0 wrote, what becomes of them, and what is refused.

Each file of tests/data/legacy holds a checkpoint after three steps on tiny parameters, and beside
it what is needed to go on: the parameters before (``initial``) and after (``after3``) those steps,
the gradients of a fourth and the parameters after it (``grad4``, ``after4``). "Sharded" ones were
written by two ranks. gefen-x ran with torch 2.13 and numba on CPUs.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters._legacy import from_gefen_x, is_gefen_x

FILES = Path(__file__).parents[1] / "data" / "legacy"
EXACT = [
    *("gefen_factored", "gefen_block", "muon", "muon_normuon"),
    *("muon_exact_sharded", "muon_distributed"),
]
BY_RANK = [
    *("gefen_rank_local", "gefen_rank_local_columns", "gefen_mixed"),
    *("muon_approx", "muon_mixed"),
]
HYBRID = ["hybrid_gefen", "hybrid_adamw", "hybrid_rank_local"]


def checkpoint(name: str) -> Any:
    return torch.load(FILES / f"{name}.pt", weights_only=True)["checkpoint"]


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        # A NaN that was put in is to be found again.
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def convert(given: Any) -> dict[str, Any]:
    """Convert, and see that what was given is as before, even if the result is written to."""
    before = copy.deepcopy(given)
    try:
        found = from_gefen_x(given)
    finally:
        assert same(before, given)
    written = copy.deepcopy(found)
    for tensor in tensors(found):
        tensor.fill_(1)
    assert same(before, given)
    return written


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return (
        [] if not isinstance(value, dict | list) else [t for part in parts for t in tensors(part)]
    )


def check_exact(entry: dict[str, Any], old: dict[str, Any]) -> None:
    assert set(entry) == set(old) - {"name"}
    for key, value in entry.items():
        if not isinstance(value, Tensor):
            assert value == old[key]
            continue
        assert value.dtype == old[key].dtype
        assert torch.equal(value.flatten(), old[key].flatten())
        expected = old[key].shape if key == "normuon_v" else (old[key].numel(),)
        assert key == "m_codebook" or value.shape == expected


@pytest.mark.parametrize("name", EXACT)
def test_whole_state_is_that_of_the_file(name: str) -> None:
    given = checkpoint(name)
    found = convert(given)
    assert is_gefen_x(given)
    assert not is_gefen_x(found)
    assert list(found["state"]) == list(given["state"])
    for key, old in given["state"].items():
        check_exact(found["state"][key], old)
    for group, old in zip(found["param_groups"], given["param_groups"], strict=True):
        assert group["params"] == old["params"]
        assert group["param_names"] == old["param_names"]
        assert group["gefen"]["format"] == 1
        assert group["gefen"]["global_step"] == 3
        assert torch.equal(group["gefen"]["codebook"], given["gefen_codebook"])


def test_only_a_distributed_file_tells_shapes() -> None:
    shapes = [entry["m_codebook"].shape for entry in convert(checkpoint("muon"))["state"].values()]
    assert shapes == [(12 * 16,), (24 * 8,)]
    found = convert(checkpoint("muon_distributed"))["state"]
    assert [entry["m_codebook"].shape for entry in found.values()] == [(5, 16), (13, 8), (6, 12)]


def test_options_have_our_names() -> None:
    first, second = convert(checkpoint("gefen_block"))["param_groups"]
    assert first.keys() == second.keys()
    assert set(first) == {
        *("params", "param_names", "lr", "betas", "eps", "weight_decay", "gefen"),
    }
    assert (first["lr"], first["weight_decay"]) == (0.02, 0.1)
    assert (second["lr"], second["weight_decay"]) == (0.01, 0.0)
    assert (second["betas"], second["eps"]) == ((0.8, 0.95), 1e-6)
    (muon,) = convert(checkpoint("muon_normuon"))["param_groups"]
    assert set(muon) == {
        *("params", "param_names", "lr", "eps", "weight_decay", "momentum", "nesterov", "gefen"),
        *("ns_schedule", "ns_steps", "adjust_lr_fn", "cautious"),
        *("normuon", "normuon_beta2", "normuon_eps"),
    }
    assert (muon["momentum"], muon["eps"], muon["adjust_lr_fn"]) == (0.95, 1e-7, "match_rms_adamw")
    assert (muon["normuon"], muon["cautious"], muon["ns_steps"]) == (True, True, 3)
    assert muon["ns_schedule"][1] == (3.7534, -6.8083, 3.3840)
    (plain,) = convert(checkpoint("muon"))["param_groups"]
    assert (plain["ns_coefficients"], plain["ns_schedule"]) == ((3.4445, -4.775, 2.0315), None)


@pytest.mark.parametrize("name", HYBRID)
def test_a_hybrid_becomes_one_flat_dict(name: str) -> None:
    given = checkpoint(name)
    found = convert(given)
    assert list(found["state"]) == [0, 1, 2, 3]
    assert [group["params"] for group in found["param_groups"]] == [[0, 1], [2], [3]]
    assert [group["use_muon"] for group in found["param_groups"]] == [True, False, False]
    names = [group["param_names"] for group in found["param_groups"]]
    assert names == [["lin.weight", "tall.weight"], ["wte.weight"], ["norm.bias"]]
    assert [group["weight_decay"] for group in found["param_groups"]] == [0.05, 0.05, 0.0]
    muon, *backups = found["param_groups"]
    assert torch.equal(muon["gefen"]["codebook"], given["muon"]["gefen_codebook"])
    for key, old in given["muon"]["state"].items():
        check_exact(found["state"][key], old)
    for group in backups:
        assert "name" not in group
        assert group["betas"] == (0.9, 0.999)
        if name == "hybrid_adamw":
            assert not {"gefen", "fused", "capturable"} & set(group)
        elif name == "hybrid_gefen":
            assert torch.equal(group["gefen"]["codebook"], given["backup"]["gefen_codebook"])
    for key, old in given["backup"]["state"].items():
        if name == "hybrid_adamw":
            assert same(found["state"][2 + key], old)
            assert found["state"][2 + key]["step"] == torch.tensor(3.0)
        elif name == "hybrid_gefen":
            check_exact(found["state"][2 + key], old)


def test_half_a_hybrid_is_enough() -> None:
    given = checkpoint("hybrid_gefen")
    del given["backup_optimizer"]  # as in older files
    alone = convert({"muon": None, "backup": given["backup"]})
    assert list(alone["state"]) == [0, 1]
    assert [group["use_muon"] for group in alone["param_groups"]] == [False, False]
    assert [group["use_muon"] for group in convert({**given, "backup": None})["param_groups"]] == [
        True
    ]


def test_what_was_never_stepped_has_no_state() -> None:
    given = checkpoint("gefen_block")
    given["state"] = {key: {"name": entry["name"]} for key, entry in given["state"].items()}
    given["state"].pop(3)
    assert convert(given)["state"] == {}


@pytest.mark.parametrize("name", ["gefen_block", "gefen_factored"])
def test_a_missing_counter_stays_missing(name: str) -> None:
    given = checkpoint(name)
    expected = convert(given)
    for entry in (*given["state"].values(), *expected["state"].values()):
        for key in {"vmean_step", "factored_step"} & set(entry):
            del entry[key]
    assert same(convert(given), expected)


def test_counters_of_a_capturable_optimizer_become_numbers() -> None:
    given = checkpoint("gefen_factored")
    for entry in given["state"].values():
        for key in ("step", "vmean_step", "factored_step"):
            if key in entry:
                entry[key] = torch.tensor(float(entry[key]))
    assert same(convert(given), convert(checkpoint("gefen_factored")))


@pytest.mark.parametrize("name", ["gefen_factored", "gefen_rank_local", "muon_distributed"])
def test_groups_hold_all_that_is_needed(name: str) -> None:
    """As torch's DCP saves it: no other keys, and names instead of numbers."""
    given = checkpoint(name)
    expected = convert(given)
    given = {key: given[key] for key in ("state", "param_groups")}
    assert is_gefen_x(given)
    assert same(convert(given), expected)
    if name == "gefen_factored":
        names = given["param_groups"][0]["params"] = ["a", "b", "c", "d"]
        given["state"] = dict(zip(names, given["state"].values(), strict=True))
        assert list(convert(given)["state"]) == names


def test_names_that_were_made_up_are_left_out() -> None:
    given = checkpoint("gefen_block")
    given["param_groups"][0]["param_names_synthesized"] = [False, True]
    del given["param_groups"][1]["param_names_synthesized"]  # so nobody knows
    assert not any("param_names" in group for group in convert(given)["param_groups"])


def test_a_users_own_options_are_kept_and_copied() -> None:
    given = checkpoint("gefen_factored")
    given["param_groups"][0] |= {"lr": torch.tensor(0.5), "initial_lr": 0.1, "name": "all"}
    (group,) = convert(given)["param_groups"]
    assert (float(group["lr"]), group["initial_lr"], group["name"]) == (0.5, 0.1, "all")


def test_an_older_manifest_has_no_list() -> None:
    given = checkpoint("muon_distributed")
    marker = given["gefen_muon_distributed"]  # the group's copy is the same object
    marker["version"] = 1
    del marker["groups"]
    shapes = [entry["m_codebook"].dim() for entry in convert(given)["state"].values()]
    assert shapes == [1, 1, 1]


def test_other_dicts_are_not_taken_for_ours() -> None:
    params = [nn.Parameter(torch.ones(2, 2))]
    params[0].grad = torch.ones(2, 2)
    optimizer = torch.optim.AdamW(params)
    optimizer.step()
    others: list[dict[str, Any]] = [
        {},
        optimizer.state_dict(),
        {"model": {}, "optimizer": checkpoint("muon")},
        {"muon": checkpoint("muon")},
        {"muon": {}, "backup": {}, "param_groups": []},
        {"state": {}, "param_groups": None},
        *(from_gefen_x(checkpoint(name)) for name in ("muon", "gefen_mixed", "hybrid_adamw")),
    ]
    for other in others:
        assert not is_gefen_x(other)
        with pytest.raises(ValueError, match="expected a state_dict of gefen-x, got a dict with"):
            convert(other)
    assert all(is_gefen_x(checkpoint(name)) for name in EXACT + BY_RANK + HYBRID)

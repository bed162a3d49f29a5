"""State dicts on one process: what is saved goes on bit for bit, damage changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import Gefen, GefenMuon, Hybrid
from adapters._quantized import QuantizedOptimizer
from consensus.testing import assert_unchanged
from consensus.testing import snapshot as everything
from tests.unit.checkpoint_cases import DAMAGES, Damage, damaged, from_file
from tests.unit.test_gefen import named, params_of, set_gradients, train
from tests.unit.test_quantized import KINDS, MATRICES, Kind, assert_same

ALL_KINDS = (
    *KINDS,
    Kind("GefenMuon, approx", GefenMuon, {"sharded_mode": "approx", "normuon": True}, MATRICES),
    Kind("Hybrid, both dense", Hybrid, {"muon": "dense", "backup": "adamw"}),
)
every_kind = pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.name)


def successor(kind: Kind, of: QuantizedOptimizer, state_dict: Any, **options: Any) -> Any:
    """A fresh optimizer of other parameters with the same values, given a state dict."""
    pairs = [
        (name, nn.Parameter(param.detach().clone()))
        for (name, _), param in zip(named(kind.shapes), in_order(of), strict=True)
    ]
    made = kind.make(pairs, **options)
    made.load_state_dict(state_dict)
    return made


def in_order(optimizer: QuantizedOptimizer) -> list[nn.Parameter]:
    """Parameters as they were listed; Hybrid's groups have another order."""
    by_name = {name: param for _, name, param, _ in optimizer._members()}
    return [by_name[name] for name in sorted(by_name)]  # type: ignore[misc]


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


@every_kind
@pytest.mark.parametrize("before", [(), (1,), (1, 2, 3)], ids=["new", "one step", "trained"])
def test_what_was_saved_goes_on_as_the_run_that_saved_it(
    kind: Kind, before: tuple[int, ...]
) -> None:
    """A refresh lies before the end of the last, and after the loads."""
    optimizer = kind.make(codebook_refresh_every=2)
    train(optimizer, *before)
    saved = from_file(optimizer.state_dict())
    loaded = successor(kind, optimizer, saved, codebook_refresh_every=2, lr=0.5)
    assert_same(loaded, optimizer)
    train(optimizer, 4, 5, 6)
    train(loaded, 4, 5, 6)
    assert_same(loaded, optimizer)
    assert equal(loaded.state_dict(), optimizer.state_dict())


@every_kind
def test_a_copied_dict_is_as_it_was_after_more_steps_and_after_it_is_loaded(kind: Kind) -> None:
    optimizer = kind.make()
    train(optimizer, 1, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = copy.deepcopy(saved)
    loaded, other = successor(kind, optimizer, saved), successor(kind, optimizer, saved)
    train(optimizer, 3)
    train(loaded, 3)
    for tensor in (value for entry in other.state.values() for value in entry.values()):
        if isinstance(tensor, Tensor):
            tensor.fill_(1)
    assert equal(saved, expected)
    loaded.param_groups[0]["lr"] = 0.0
    assert equal(saved, expected)


@every_kind
def test_a_parameter_without_state_has_none_after_a_load(kind: Kind) -> None:
    optimizer = kind.make()
    set_gradients(optimizer, 1, skip=[1])
    optimizer.step()
    loaded = successor(kind, optimizer, from_file(optimizer.state_dict()))
    assert params_of(loaded)[1] not in loaded.state
    train(optimizer, 2, 3)
    train(loaded, 2, 3)
    assert_same(loaded, optimizer)


@every_kind
def test_a_load_replaces_all_that_was_there(kind: Kind) -> None:
    optimizer, other = kind.make(), kind.make()
    new = copy.deepcopy(optimizer.state_dict())
    train(optimizer, 1, 2)
    train(other, 7)
    other.load_state_dict(optimizer.state_dict())
    for param, value in zip(params_of(other), params_of(optimizer), strict=True):
        param.data = value.detach().clone()
    train(optimizer, 3)
    train(other, 3)
    assert_same(other, optimizer)
    other.load_state_dict(new)
    assert not other.state
    assert equal(other.state_dict(), new)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_what_is_damaged_is_refused_and_changes_nothing(damage: Damage) -> None:
    optimizer = Gefen(named(), lr=0.01)
    train(optimizer, 1, 2)
    twin = copy.deepcopy(optimizer)
    given = damaged(optimizer, damage)
    before, copied = everything(optimizer), copy.deepcopy(given)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is checked as it stands
        optimizer.load_state_dict(given)
    assert type(caught.value) is ValueError
    assert damage.text in str(caught.value)
    assert_unchanged(optimizer, before)
    assert equal(given, copied) or "NaN" in damage.name
    train(optimizer, 3)
    train(twin, 3)
    assert_same(optimizer, twin)


def test_indices_that_lie_in_another_way_are_refused() -> None:
    optimizer = Gefen(named())
    train(optimizer, 1)
    given = copy.deepcopy(optimizer.state_dict())
    given["state"][0]["m_codebook"] = given["state"][0]["m_codebook"].mT
    with pytest.raises(ValueError, match=r"m_codebook has shape \(12, 8\); expected \(8, 12\)"):
        optimizer.load_state_dict(given)


def test_what_one_half_saved_is_not_the_others() -> None:
    optimizer = Hybrid(named())
    train(optimizer, 1)
    given = copy.deepcopy(optimizer.state_dict())
    given["param_groups"][0]["use_muon"] = False
    before = everything(optimizer)
    with pytest.raises(ValueError, match="group 0 was of the other half when it was saved; build"):
        optimizer.load_state_dict(given)
    assert_unchanged(optimizer, before)


def test_groups_that_tell_different_codebooks_are_refused() -> None:
    optimizer = Gefen([{"params": named()[:2]}, {"params": named()[2:]}])
    train(optimizer, 1)
    before = everything(optimizer)
    for key, value in (("global_step", 7), ("codebook", torch.linspace(-1, 1, 256))):
        given = copy.deepcopy(optimizer.state_dict())
        given["param_groups"][1]["gefen"][key] = value
        with pytest.raises(ValueError, match="group 0 and another have different codebooks or st"):
            optimizer.load_state_dict(given)
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize("gone", ["vmean_step", "factored_step"])
def test_a_moment_without_its_counter_is_as_old_as_the_momentum(gone: str) -> None:
    optimizer = Gefen(named(), lr=0.01)
    train(optimizer, 1, 2)
    old = copy.deepcopy(optimizer.state_dict())
    for entry in old["state"].values():
        entry.pop(gone, None)
    loaded = successor(Kind("", Gefen, {}), optimizer, old)
    assert not any(gone in entry for entry in loaded.state.values())
    train(optimizer, 3)
    train(loaded, 3)
    assert_same(loaded, optimizer)
    assert any(gone in entry for entry in loaded.state.values())


def test_a_dense_moment_of_another_shape_is_refused_at_the_load() -> None:
    optimizer = Hybrid(named(), muon="dense", backup="adamw")
    train(optimizer, 1)
    for key, position in (("momentum_buffer", 0), ("normuon_v", 0), ("exp_avg", 2)):
        given = copy.deepcopy(optimizer.state_dict())
        given["state"][position][key] = torch.zeros(2, 2)
        with pytest.raises(ValueError, match=rf"{key} has shape \(2, 2\); expected"):
            optimizer.load_state_dict(given)


def test_options_come_from_the_dict_and_names_may_differ_in_case() -> None:
    optimizer = Gefen(named(), lr=0.01)
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {
        "lr": 0.5,
        "initial_lr": 0.7,
        "param_names": [name.upper() for name, _ in named()],
    }
    del saved["param_groups"][0]["eps"]
    optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["initial_lr"], group["eps"]) == (0.5, 0.7, 1e-8)
    assert group["param_names"] == [name for name, _ in named()]


def test_a_users_own_state_is_copied() -> None:
    optimizer = Gefen(named())
    optimizer.state["mine"] = {"seen": torch.zeros(2)}  # type: ignore[index]
    saved = optimizer.state_dict()
    loaded = Gefen(named())
    loaded.load_state_dict(saved)
    saved["state"]["mine"]["seen"].fill_(1)
    assert loaded.state["mine"]["seen"].tolist() == [0, 0]  # type: ignore[index]


def test_hooks_see_the_complete_dict_and_may_replace_it() -> None:
    optimizer = Gefen(named())
    train(optimizer, 1)
    met: list[Any] = []
    optimizer.register_state_dict_post_hook(lambda me, saved: met.append(saved["param_groups"][0]))
    optimizer.register_state_dict_post_hook(lambda me, saved: {"wrapped": saved})
    saved = optimizer.state_dict()
    assert set(met[0]["gefen"]) == {"format", "codebook", "global_step"}
    assert list(saved) == ["wrapped"]
    loaded = Gefen(named())
    loaded.register_load_state_dict_pre_hook(lambda me, given: given["wrapped"])
    loaded.register_load_state_dict_pre_hook(lambda me, given: met.append(list(given)))
    loaded.register_load_state_dict_post_hook(lambda me: met.append(len(me.state)))
    loaded.load_state_dict(saved)
    assert met[1:] == [["state", "param_groups"], 5]


def test_a_hook_that_raises_leaves_everything_as_it_was() -> None:
    optimizer = Gefen(named())
    train(optimizer, 1)
    before, saved = everything(optimizer), optimizer.state_dict()

    def hook(me: Any, given: Any) -> None:
        raise OSError("disk")

    handle = optimizer.register_load_state_dict_pre_hook(hook)
    with pytest.raises(OSError, match="disk"):
        optimizer.load_state_dict(saved)
    assert_unchanged(optimizer, before)
    handle.remove()
    optimizer.load_state_dict(saved)


def test_copies_save_too() -> None:
    optimizer = copy.deepcopy(Gefen(named()))
    train(optimizer, 1)
    assert "gefen" in optimizer.state_dict()["param_groups"][0]
    assert len(optimizer._optimizer_state_dict_post_hooks) == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(optimizer._optimizer_state_dict_post_hooks) == 1

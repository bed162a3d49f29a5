"""Hybrid on one process: one optimizer of two halves, each with the bits of its own kind."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import Gefen, GefenMuon, Hybrid
from tests.unit.test_gefen import (
    cases,
    differences,
    golden_params,
    params_of,
    random_tensor,
    replay,
    set_gradients,
    snapshot,
    train,
)
from tests.unit.test_gefen_muon import but_for_matrix_products


class Model(nn.Module):
    """An embedding, a hidden matrix, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.hidden = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 5, bias=False)
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                param.copy_(random_tensor(*param.shape, seed=i))


MUONS = ["hidden.weight"]
BACKUPS = ["embed.weight", "hidden.bias", "norm.weight", "norm.bias", "lm_head.weight"]


def names_of(optimizer: Hybrid) -> dict[bool, list[str]]:
    halves: dict[bool, list[str]] = {True: [], False: []}
    for group in optimizer.param_groups:
        halves[group["use_muon"]] += group["param_names"]
    return halves


# ---- the reference ----


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("hybrid"))
def test_five_steps_are_the_reference(case: dict[str, Any]) -> None:
    options = dict(case["kwargs"])
    options["backup"] = options.pop("backup_optimizer", "gefen")
    params = golden_params(case["param_order"])
    muon, backup = (
        [(name, params[name]) for name in case["split"][half]] for half in ("muon", "backup")
    )
    adamw = options["backup"] == "adamw"
    check = but_for_matrix_products(options["lr"], "match_rms_adamw", adamw=adamw)
    replay(Hybrid(muon, backup, **options), params, case, check)


# ---- which half ----


def test_a_model_pairs_and_two_lists_mean_the_same() -> None:
    model = Model()
    pairs = dict(model.named_parameters())
    lists = [(name, pairs[name]) for name in MUONS], [(name, pairs[name]) for name in BACKUPS]
    made = [
        Hybrid.from_model(model),
        Hybrid(model),
        Hybrid(model.named_parameters(), backup_substrings=["embed", "head"]),
        Hybrid(*lists),
    ]
    for optimizer in made:
        assert names_of(optimizer) == {True: MUONS, False: BACKUPS}
    trained = []
    for make in (Hybrid.from_model, lambda each: Hybrid(each.named_parameters())):
        model = Model()
        train(make(model), 1, 2)
        trained.append(model)
    assert all(map(torch.equal, *(each.parameters() for each in trained)))


def test_a_model_and_a_list_are_too_much() -> None:
    model = Model()
    with pytest.raises(TypeError, match="got a model and a list"):
        Hybrid(model, list(model.named_parameters()))


def test_frozen_parameters_of_a_model_are_left_out() -> None:
    model = Model()
    model.embed.weight.requires_grad_(False)
    optimizer = Hybrid(model)
    assert names_of(optimizer) == {True: MUONS, False: BACKUPS[1:]}


def test_a_parameter_listed_twice_is_refused() -> None:
    pairs = list(Model().named_parameters())
    with pytest.raises(ValueError, match=r"embed\.weight"):
        Hybrid([*pairs, pairs[0]])


def test_the_listing_says_where_each_parameter_goes_and_why() -> None:
    text = repr(Hybrid(Model(), backup="adamw"))
    assert "use_muon: True" in text
    for name in (*MUONS, *BACKUPS, "GefenMuon", "AdamW"):
        assert name in text
    late = Hybrid(Model(), muon="dense")
    late.add_param_group({"params": [("late", nn.Parameter(torch.eye(2)))], "use_muon": True})
    assert "its parameter group" in repr(late)


# ---- options ----


def test_the_arguments_are_those_of_the_reference() -> None:
    signature = inspect.signature(Hybrid).parameters.values()
    assert {each.name: each.default for each in signature if each.name != "backup_substrings"} == {
        **{"muon_params": inspect.Parameter.empty, "backup_params": None},
        **{"lr": 1e-3, "muon_lr": None, "backup_lr": None},
        **{"weight_decay": 0.0, "muon_weight_decay": None, "backup_weight_decay": None},
        **{"no_decay_substrings": (), "muon": "gefen", "backup": "gefen"},
        **{"betas": (0.9, 0.999), "eps": 1e-8, "backup_factored_v_2d": False},
        **{"backup_1d_period_one": False, "backup_2d_period_one": False},
        **{"momentum": 0.95, "nesterov": True, "ns_steps": 5, "ns_schedule": "tuned3"},
        "ns_form": "standard",
        **{"adjust_lr_fn": "match_rms_adamw", "normuon": True, "normuon_beta2": 0.95},
        **{"normuon_eps": 1e-8, "cautious": False, "sharded_mode": "exact"},
        **{"codebook_refresh_every": 0, "codebook_scope": "auto", "first_gradient": "raise"},
        "control_group": None,
    }


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "Hybrid, the Muon half: lr: Learning rate"),
        ({"muon_lr": -1.0}, "Hybrid, the Muon half: lr: Learning rate"),
        ({"backup_lr": -1.0}, "Hybrid, the backup half: lr: Learning rate"),
        ({"backup_weight_decay": -1.0}, "the backup half: weight_decay"),
        ({"betas": (1.0, 0.9)}, "the backup half: betas"),
        ({"eps": 0.0}, "the backup half: eps"),
        ({"ns_schedule": "tuned9"}, "the Muon half: ns_schedule"),
        ({"muon": "sgd"}, "muon must be one of"),
        ({"backup": "sgd"}, "backup must be one of"),
        ({"sharded_mode": "fast"}, "sharded_mode must be"),
        ({"first_gradient": "skip"}, "first_gradient must be"),
        ({"codebook_refresh_every": 1.0}, "codebook_refresh_every must be"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Hybrid(Model(), **options)


def test_each_half_has_its_learning_rate_and_decay() -> None:
    optimizer = Hybrid(
        Model(),
        lr=0.1,
        backup_lr=0.2,
        weight_decay=0.3,
        muon_weight_decay=0.4,
        no_decay_substrings=["NORM", "bias"],
    )
    found = [
        (group["use_muon"], group["param_names"], group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    assert found == [
        (True, MUONS, 0.1, 0.4),
        (False, ["embed.weight", "lm_head.weight"], 0.2, 0.3),
        (False, ["hidden.bias", "norm.weight", "norm.bias"], 0.2, 0.0),
    ]


@pytest.mark.parametrize("wrong", [{}, {"use_muon": None}, {"use_muon": 1}], ids=str)
def test_a_late_group_says_which_half_it_belongs_to(wrong: dict[str, Any]) -> None:
    optimizer = Hybrid(Model())
    late = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(ValueError, match="needs use_muon=True"):
        optimizer.add_param_group({"params": [("late", late)], **wrong})
    pair = ("bias", nn.Parameter(torch.ones(3)))
    with pytest.raises(ValueError, match=r"Muon only supports 2D.*bias"):
        optimizer.add_param_group({"params": [pair], "use_muon": True})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [("late", late)], "use_muon": True, "lr": 0.5})
    assert optimizer.param_groups[2]["lr"] == 0.5
    assert optimizer.param_groups[2]["ns_schedule"] == "tuned3"


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_takes_groups_and_knows_its_reasons(copied: Any) -> None:
    twin = copied(Hybrid(Model(), backup="adamw", muon="dense", backup_lr=0.5))
    twin.add_param_group({"params": [("late", nn.Parameter(torch.ones(3)))], "use_muon": False})
    assert twin.param_groups[-1]["lr"] == 0.5
    assert "embedding" in repr(twin)
    assert "AdamW" in repr(twin)


# ---- each half is itself ----


def backup_params(optimizer: Hybrid) -> list[nn.Parameter]:
    groups = [group for group in optimizer.param_groups if not group["use_muon"]]
    return [param for group in groups for param in group["params"]]


def follow(twin: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    """Step on the gradients of ``params``."""
    for param, other in zip(params_of(twin), params, strict=True):
        param.grad = None if other.grad is None else other.grad.clone()
    twin.step()


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone()) for param in params]


def assert_half(optimizer: Hybrid, twin: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for seed in (1, 2, 3):
        train(optimizer, seed)
        follow(twin, params)
        for param, other in zip(params, params_of(twin), strict=True):
            assert torch.equal(param, other)
            mine, its = optimizer.state[param], twin.state[other]
            assert set(mine) == set(its)
            assert differences(dict(mine), dict(its)) == []


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
def test_the_adamw_half_has_the_bits_of_torchs(lr: float | Tensor) -> None:
    options: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = Hybrid(Model(), backup="adamw", backup_lr=lr, **options)
    params = backup_params(optimizer)
    assert_half(optimizer, torch.optim.AdamW(copies(params), lr=lr, **options), params)


def test_the_dense_muon_half_has_the_bits_of_torchs() -> None:
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "ns_steps": 4}
    dense: dict[str, Any] = {"ns_schedule": None, "adjust_lr_fn": None, "normuon": False}
    optimizer = Hybrid(Model(), muon="dense", **options, **dense)
    params: list[nn.Parameter] = optimizer.param_groups[0]["params"]
    twin: Any = torch.optim.Muon(copies(params), **options)
    assert_half(optimizer, twin, params)


def test_each_half_learns_a_codebook_of_its_own() -> None:
    muon: dict[str, Any] = {
        "normuon": True,
        "adjust_lr_fn": "match_rms_adamw",
        "ns_schedule": "tuned3",
        "weight_decay": 0.0,
    }
    optimizer = Hybrid(Model(), lr=0.01, backup_1d_period_one=True, codebook_refresh_every=2)
    params = params_of(optimizer)[:1]
    assert_half(
        optimizer, GefenMuon(copies(params), 0.01, codebook_refresh_every=2, **muon), params
    )
    optimizer = Hybrid(
        Model(),
        lr=0.01,
        backup_2d_period_one=True,
        backup_factored_v_2d=True,
        codebook_refresh_every=2,
    )
    params = backup_params(optimizer)
    backup = Gefen(copies(params), 0.01, force_2d_period_one=True, codebook_refresh_every=2)
    assert_half(optimizer, backup, params)


def test_groups_and_state_are_its_own() -> None:
    model = Model()
    optimizer = Hybrid(model)
    train(optimizer, 1)
    assert set(optimizer.state) == set(model.parameters())
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[1]["lr"] = 0.0
    before = [param.detach().clone() for param in model.parameters()]
    train(optimizer, 2)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_half_that_fails_keeps_the_other_from_writing() -> None:
    optimizer = Hybrid(Model())
    train(optimizer, 1)
    before = snapshot(optimizer)
    optimizer.param_groups[1]["betas"] = ()
    with pytest.raises(IndexError):
        train(optimizer, 2)
    assert differences(before, snapshot(optimizer)) == []


@pytest.mark.parametrize("half", [True, False], ids=["Muon", "backup"])
def test_a_half_without_gradients_learns_when_it_has_some(half: bool) -> None:
    optimizer, twin = Hybrid(Model()), Hybrid(Model())
    missing = [i for i, (*_, group) in enumerate(optimizer._members()) if group["use_muon"] is half]
    set_gradients(optimizer, 1, skip=missing)
    optimizer.step()
    set_gradients(optimizer, 2)
    optimizer.step()
    assert set(optimizer.state) == set(params_of(optimizer))
    set_gradients(twin, 2)
    twin.step()
    late = [params_of(each)[i] for each in (optimizer, twin) for i in missing]
    assert all(map(torch.equal, late[: len(missing)], late[len(missing) :]))


def test_there_may_be_matrices_only() -> None:
    optimizer = Hybrid([("hidden", nn.Parameter(random_tensor(6, 8, seed=1)))])
    train(optimizer, 1, 2)
    assert len(optimizer.state) == 1

"""Files of gefen-x 0.5, loaded into our optimizers and gone on with, on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import Gefen, GefenMuon, Hybrid
from adapters._legacy import from_gefen_x
from adapters._quantized import QuantizedOptimizer
from consensus.testing import assert_unchanged, snapshot
from tests.unit.test_legacy import BY_RANK, EXACT, FILES
from tests.unit.test_legacy_ranks import dense, joined, pack, ranks_of, unpack

WHOLE = (*EXACT, "hybrid_gefen", "hybrid_adamw")
JOINED = (*BY_RANK, "hybrid_rank_local")


def contents(name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(FILES / f"{name}.pt", weights_only=True)
    return found


def parameters(file: dict[str, Any]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value.clone()) for name, value in file["after3"].items()}


def optimizer_for(
    file: dict[str, Any], params: dict[str, nn.Parameter], **options: Any
) -> QuantizedOptimizer:
    """As a user would build it: the groups of the file, with options that it will replace."""
    given = file["checkpoint"]
    if "param_groups" in given:
        groups = [{"params": pairs} for pairs in _pairs(given["param_groups"], params)]
        has_muon = "momentum" in given["param_groups"][0]
        return GefenMuon(groups, **options) if has_muon else Gefen(groups, **options)
    muon, backup = (_pairs(given[half]["param_groups"], params) for half in ("muon", "backup"))
    # Its groups are those that decay and those that do not.
    return Hybrid(
        [pair for pairs in muon for pair in pairs],
        [pair for pairs in backup for pair in pairs],
        backup=given["backup_optimizer"],
        no_decay_substrings=("bias",),
        **options,
    )


def _pairs(groups: Any, params: dict[str, nn.Parameter]) -> list[list[tuple[str, nn.Parameter]]]:
    return [[(name, params[name]) for name in group["param_names"]] for group in groups]


def resume(file: dict[str, Any], **options: Any) -> tuple[QuantizedOptimizer, dict[str, Tensor]]:
    """Load the file and make its fourth step."""
    params = parameters(file)
    optimizer = optimizer_for(file, params, **options)
    optimizer.load_state_dict(file["checkpoint"])
    for name, param in params.items():
        param.grad = file["grad4"][name].clone()
    optimizer.step()
    return optimizer, {name: param.detach() for name, param in params.items()}


def distance(file: dict[str, Any], params: dict[str, Tensor], name: str) -> float:
    """How far a parameter is from where gefen-x went, in lengths of its step."""
    expected = file["after4"][name]
    step = (expected - file["after3"][name]).norm()
    return float((params[name] - expected).norm() / step)


@pytest.mark.parametrize("name", WHOLE)
def test_state_of_whole_parameters_goes_on_as_gefen_x_did(name: str) -> None:
    file = contents(name)
    _, params = resume(file)
    assert {each: distance(file, params, each) < 1e-6 for each in params} == dict.fromkeys(
        params, True
    )


@pytest.mark.parametrize("name", [*WHOLE, *JOINED])
def test_options_and_steps_are_those_of_the_file(name: str) -> None:
    file = contents(name)
    native = from_gefen_x(file["checkpoint"])
    optimizer, _ = resume(file, lr=0.7)
    for group, saved in zip(optimizer.param_groups, native["param_groups"], strict=True):
        assert all(group[key] == saved[key] for key in ("lr", "weight_decay", "eps"))
    assert {rule.momenta.num_steps for rule in optimizer._rules if rule.momenta} == {4}
    steps = {float(entry["step"]) for entry in optimizer.state.values()}
    assert steps == {4.0}


# In one group of this file a matrix has a moment by block and another by row and column. Only one
# of them can go on with what it has.
STARTS_ANEW = {("gefen_mixed", "lin.weight")}


@pytest.mark.parametrize("name", JOINED)
def test_state_of_shards_goes_on_near_to_it(name: str) -> None:
    """A conversion that rounds: parameters this small may go far from gefen-x, but not away."""
    file = contents(name)
    _, params = resume(file)
    for each, value in params.items():
        assert bool(value.isfinite().all())
        assert distance(file, params, each) < (3 if (name, each) in STARTS_ANEW else 0.8)


@pytest.mark.parametrize("name", BY_RANK)
def test_a_momentum_moves_by_half_a_gap_at_most(name: str) -> None:
    file = contents(name)
    optimizer = optimizer_for(file, parameters(file))
    optimizer.load_state_dict(file["checkpoint"])
    (rule,) = optimizer._rules
    assert rule.momenta is not None
    levels = rule.momenta.record()["codebook"]
    half_a_gap = float(levels.diff().max()) / 2
    for position, _, param, _ in optimizer._members():
        entry = optimizer.state[param]
        held = ranks_of(file["checkpoint"], position)
        before = joined(held, [dense(state, book) for _, state, book in held]).flatten()
        moved = (dense(entry, levels) - before).view(-1, entry["automatic_period"]).abs().amax(1)
        assert bool((moved <= half_a_gap * entry["m_magnitude"] * (1 + 1e-5)).all())


def without_counters(name: str) -> dict[str, Any]:
    file = contents(name)
    given = file["checkpoint"]
    by_rank = [unpack(given, rank) for rank in range(2)] if name in BY_RANK else []
    states = [*given["state"].values(), *(state for each in by_rank for state in each["states"])]
    for entry in states:
        entry.pop("vmean_step", None)
        entry.pop("factored_step", None)
    for rank, payload in enumerate(by_rank):
        pack(given, rank, payload)
    return file


@pytest.mark.parametrize("name", ["gefen_block", "gefen_factored", "gefen_rank_local"])
def test_a_moment_without_its_counter_gets_one_in_the_first_step(name: str) -> None:
    """As old as the momentum, as gefen-x had it: so nothing differs from a file that has it."""
    _, expected = resume(contents(name))
    optimizer, params = resume(without_counters(name))
    assert all(torch.equal(params[each], expected[each]) for each in params)
    for entry in optimizer.state.values():
        counters = {"vmean_step", "factored_step"} & set(entry)
        assert {entry[key] for key in counters} == {4}


@pytest.mark.parametrize("name", ["gefen_block", "gefen_factored"])
def test_a_counter_without_its_moment_is_refused(name: str) -> None:
    file = contents(name)
    entry = file["checkpoint"]["state"][0]
    for key in ("vmean", "v_row", "v_col"):
        entry.pop(key, None)
    optimizer = optimizer_for(file, parameters(file))
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"lin\.weight.*the counter alone"):
        optimizer.load_state_dict(file["checkpoint"])
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize("name", [*WHOLE, *JOINED])
def test_what_was_loaded_is_saved_in_our_own_form(name: str) -> None:
    file = contents(name)
    optimizer, params = resume(file)
    twin = optimizer_for(file, {key: nn.Parameter(value.clone()) for key, value in params.items()})
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, twin):
        for _, key, param, _ in each._members():
            param.grad = file["grad4"][key].clone()
        each.step()
    for mine, its in zip(optimizer._members(), twin._members(), strict=True):
        assert torch.equal(mine.param, its.param)


@pytest.mark.parametrize("name", ["muon", "gefen_factored"])
def test_a_file_of_the_other_optimizer_is_refused(name: str) -> None:
    file = contents(name)
    params = {key: value for key, value in parameters(file).items() if value.ndim == 2}
    pairs = list(params.items())
    optimizer = Gefen(pairs) if name == "muon" else GefenMuon(pairs)
    given = file["checkpoint"]
    if name == "gefen_factored":
        group = given["param_groups"][0]
        for key in ("params", "param_names", "param_names_synthesized"):
            group[key] = group[key][:2]
        for key in (2, 3):
            del given["state"][key]
    with pytest.raises(ValueError, match="another optimizer has saved it"):
        optimizer.load_state_dict(given)

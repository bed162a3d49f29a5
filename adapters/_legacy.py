"""Checkpoints of gefen-x 0.5, converted to the whole form that our optimizers load.

Plain data in, plain data out: nothing here communicates, and every rank that is given the same
file computes the same. The input is read, never written, and shares no memory with the result.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from adapters._legacy_format import (
    AdamWEntry,
    File,
    Group,
    Id,
    Manifest,
    Metadata,
    Param,
    Source,
    in_brief,
    malformed,
    parse,
)
from adapters._legacy_ranks import join_ranks, read_ranks

FORMAT = 1  # of what we write into a group's record
# What only gefen-x has, or what our optimizers are told at construction.
_DROPPED = {
    *("sharded_mode", "fp8_ns", "fp8_ns_compile", "batched_ns", "batched_ns_workspace_bytes"),
    *("fused", "foreach", "capturable", "differentiable", "stochastic_round", "deterministic"),
    *("ns_schedule", "codebook_refresh_every"),  # the steps of a schedule are in ns_coefficients
}

_T = TypeVar("_T")


def is_gefen_x(state_dict: Mapping[str, Any]) -> bool:
    """Whether a dict is what an optimizer of gefen-x returned, to judge by its keys alone."""
    if "param_groups" not in state_dict:
        return {"muon", "backup"} <= set(state_dict)
    groups = state_dict["param_groups"]
    in_groups = isinstance(groups, Sequence) and any(
        isinstance(group, Mapping) and "_gefen_checkpoint_metadata" in group for group in groups
    )
    return in_groups or not {"gefen_codebook", "gefen_global_step"}.isdisjoint(state_dict)


def from_gefen_x(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint of gefen-x in the whole form of our optimizers.

    Everything is exactly what the file holds, unless each rank saved state of its own shards; see
    [Note: rank-local files] in ``_legacy_ranks``.
    A second moment without its counter stays without it. What gefen-x does not record is not
    made up: indices stay flat where the parameter's shape is unknown, and options keep the values
    of the file, which the optimizer that loads them must check.

    Args:
        state_dict: What Gefen, GefenMuon or GefenMuonHybrid returned; see :func:`is_gefen_x`.

    Returns:
        ``{"state": {id: entry}, "param_groups": [group, ...]}``. Groups of a quantised optimizer
        have a ``"gefen"`` record; those of a hybrid have ``"use_muon"``, Muon's come first.
        ``"param_names"`` are lower case, and left out where gefen-x made one of them up.

    Raises:
        ValueError: The dict is malformed or incomplete.
    """
    if not is_gefen_x(state_dict):
        keys = sorted(map(str, state_dict))
        raise malformed("the whole", f"a state_dict of gefen-x, got a dict with the keys {keys}")
    if "param_groups" in state_dict:
        return _convert(state_dict, "")
    muon, backup = state_dict["muon"], state_dict["backup"]
    kind = state_dict.get("backup_optimizer", "gefen")  # older files have Gefen only
    if kind not in ("gefen", "adamw"):
        raise malformed("backup_optimizer", f'"gefen" or "adamw", got {kind!r}')
    if muon is None and backup is None:
        raise malformed("the whole", "a Muon half, a backup half or both, got neither")
    state: dict[Id, Any] = {}
    groups: list[dict[str, Any]] = []
    for half, use_muon in ((muon, True), (backup, False)):
        if half is None:
            continue
        where = "Muon half, " if use_muon else "backup half, "
        convert = _convert if use_muon or kind == "gefen" else _convert_adamw
        found = convert(half, where)
        shift = sum(len(group["params"]) for group in groups)
        state |= {_shifted(key, shift): entry for key, entry in found["state"].items()}
        for group in found["param_groups"]:
            params = [_shifted(key, shift) for key in group["params"]]
            groups.append(group | {"params": params, "use_muon": use_muon})
    ids = [key for group in groups for key in group["params"]]
    if len(ids) != len(set(ids)):
        raise malformed("the two halves", "parameter ids counted from 0 in each, got others")
    return {"state": state, "param_groups": groups}


def _shifted(key: Id, by: int) -> Id:
    return key + by if isinstance(key, int) else key


def _convert(raw: object, where: str) -> dict[str, Any]:
    """Convert what a Gefen or a GefenMuon returned; ``where`` starts the place of errors."""
    file = parse(File, raw, f"{where}state_dict")
    params = _params(file, where)
    step, levels = _run_level(file, where)
    groups = [_quantised_options(group, where) for group in file.param_groups]
    ranks = _agreed([each.rank_local_sharded_state for each in _metadata(file)], where, "the ranks")
    if sources := read_ranks(file, params, ranks):
        _check_owners(file, params, sources[0], where)
        state, levels = join_ranks(params, sources)
    else:
        source = Source(file.state, levels)
        state = _exact(params, source, _check_owners(file, params, source, where))
    for group in groups:
        copied = None if levels is None else levels.detach().clone()
        group["gefen"] = {"format": FORMAT, "codebook": copied, "global_step": step}
    return {"state": state, "param_groups": groups}


def _convert_adamw(raw: object, where: str) -> dict[str, Any]:
    file = parse(File, raw, f"{where}state_dict")
    for param in _params(file, where):
        if (entry := file.state.get(param.id)) is not None:
            parse(AdamWEntry, entry, param.label)
    state = {
        # A sharded one stays a DTensor: nothing is computed from it.
        key: {name: tensor.detach().clone() for name, tensor in entry.items()}
        for key, entry in file.state.items()
    }
    return {"state": state, "param_groups": [_options(group) for group in file.param_groups]}


def _params(file: File, where: str) -> list[Param]:
    found: dict[Id, Param] = {}
    for index, group in enumerate(file.param_groups):
        count, place = len(group.params), f"{where}parameter group {index}"
        names: Sequence[str | None] = group.param_names or [None] * count
        if len(names) != count:
            raise malformed(place, f"{count} param_names, one for each id, got {len(names)}")
        for key, name in zip(group.params, names, strict=True):
            label = f"{where}parameter {key}" + (f" ({name})" if name else "")
            if key in found:
                raise malformed(label, "it to be listed once, got it twice")
            found[key] = Param(key, name, label, "momentum" in (group.model_extra or {}))
    for key in file.state:
        if key not in found:
            raise malformed(f"{where}parameter {key}", "a group to list it, got its state alone")
    return list(found.values())


def _metadata(file: File) -> list[Metadata]:
    return [group.metadata for group in file.param_groups if group.metadata is not None]


def _agreed(copies: Sequence[_T], where: str, what: str) -> _T | None:
    """Return the one value that all parameter groups have a copy of."""
    if any(each != copies[0] for each in copies):
        raise malformed(f"{where}param_groups", f"{what} to be the same in all, got different ones")
    return copies[0] if copies else None


def _run_level(file: File, where: str) -> tuple[int, Tensor | None]:
    """Return the global step and the codebook. Groups have copies: DCP drops the originals."""
    steps = {each.global_step for each in _metadata(file)}
    if file.gefen_global_step is not None:
        steps.add(file.gefen_global_step)
    if len(steps) != 1:
        raise malformed(f"{where}gefen_global_step", f"one number, got {sorted(steps)}")
    books = [file.gefen_codebook, *(each.codebook for each in _metadata(file))]
    levels = [each.cpu() for each in books if each is not None]
    if any(not torch.equal(each, levels[0]) for each in levels):
        raise malformed(f"{where}gefen_codebook", "equal copies in all groups, got unequal ones")
    return steps.pop(), levels[0] if levels else None


def _options(group: Group) -> dict[str, Any]:
    """Return a group as torch has it, without what has no counterpart here."""
    options = {
        key: value for key, value in (group.model_extra or {}).items() if key not in _DROPPED
    }
    names = group.param_names
    if names and [options.get("name")] == names:
        del options["name"]  # gefen-x calls a group of one parameter like that
    # Without the flags nobody knows who made the names. torch's AdamW has those of the caller.
    made_up = group.param_names_synthesized
    known = names and ("betas" in options if made_up is None else not any(made_up))
    named = {"param_names": list(names)} if names and known else {}
    return copy.deepcopy({"params": list(group.params), **named, **options})


def _quantised_options(group: Group, where: str) -> dict[str, Any]:
    options = _options(group)
    if "momentum" not in options:
        if group.beta1 is None or group.beta2 is None:
            raise malformed(f"{where}param_groups", "beta1 and beta2 in each group, got none")
        options["betas"] = (group.beta1, group.beta2)
        return options
    # The steps of a schedule, named or not, stand where the coefficients of one step stand else.
    coefficients = options.pop("ns_coefficients", None)
    if not isinstance(coefficients, list | tuple) or not coefficients:
        got = in_brief(coefficients)
        raise malformed(f"{where}param_groups", f"ns_coefficients in each group, got {got}")
    if isinstance(coefficients[0], list | tuple):
        options["ns_schedule"] = tuple(map(tuple, coefficients))
    else:
        options |= {"ns_coefficients": tuple(coefficients), "ns_schedule": None}
    return options


def _exact(
    params: Sequence[Param], source: Source, shapes: Mapping[Id, Sequence[int]]
) -> dict[Id, dict[str, Any]]:
    """Convert state that is that of whole parameters already."""
    state: dict[Id, dict[str, Any]] = {}
    for param in params:
        if (entry := source.entry(param)) is not None:
            indices = entry.m_codebook.detach().clone()
            state[param.id] = {
                "automatic_period": entry.automatic_period,
                "m_codebook": indices.view(shapes.get(param.id, (-1,))),
                "m_magnitude": entry.m_magnitude.detach().flatten().clone(),
                **entry.moments(),
            }
    return state


def _check_owners(
    file: File, params: Sequence[Param], source: Source, where: str
) -> dict[Id, tuple[int, ...]]:
    """Return the shapes that a distributed GefenMuon recorded, if its state is that of all owners.

    Each matrix has an owner, and other ranks have no state of it. In a file that was written
    without gathering, parameters of other owners look as if they had never been stepped.
    """
    manifests = [file.gefen_muon_distributed] if file.gefen_muon_distributed else []
    manifests += [
        each.muon_distributed_state for each in _metadata(file) if each.muon_distributed_state
    ]
    manifest: Manifest | None = _agreed(manifests, where, "the owner manifest")
    by_id = {param.id: param for param in params}
    if manifest is None or manifest.version == 1:
        keys = [
            key
            for group in file.param_groups
            if (group.model_extra or {}).get("sharded_mode") == "distributed"
            for key in group.params
        ]
        without = [by_id[key].label for key in keys if source.entry(by_id[key]) is None]
        if without and len(without) < len(keys):
            raise malformed(without[0], "the state that its owner has, got none, and no manifest")
        return {}
    shapes: dict[Id, tuple[int, ...]] = {}
    for owners in manifest.groups:
        for index, owned in enumerate(owners.params):
            if (param := by_id.get(owned.saved_id)) is None or param.id in shapes:
                raise malformed(
                    f"{where}owner manifest",
                    f"each parameter of the file once, got {owned.saved_id!r}",
                )
            if owned.owner != index % owners.world_size:
                expected = f"owner {index % owners.world_size} in the manifest"
                raise malformed(param.label, f"{expected}, got {owned.owner}")
            keys_here = sorted(source.states.get(param.id, {}))
            if sorted(owned.state_keys) != keys_here:
                expected = f"the state {sorted(owned.state_keys)} of its owner"
                raise malformed(param.label, f"{expected}, got {keys_here}")
            entry = source.entry(param)
            if owned.initialized != (entry is not None):
                expected = f"initialized={entry is not None} in the manifest"
                raise malformed(param.label, f"{expected}, got {owned.initialized}")
            if entry is not None and entry.m_codebook.numel() != math.prod(owned.shape):
                expected = f"state of the shape {tuple(owned.shape)} in the manifest"
                raise malformed(param.label, f"{expected}, got {entry.m_codebook.numel()} elements")
            shapes[param.id] = tuple(owned.shape)
    return shapes

"""State that is not quantised, as it is loaded: AdamW's moments, and Muon's dense momentum."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from adapters._muon_rule import MuonRule
from adapters._rows import Origin, as_param, cut, own_part, own_row
from adapters._rules import Member, Rule, local, spans_ranks
from adapters._shards import read_shards

# Moments of the rows of Muon's updates: of all rows, and in the mode "distributed" of this rank's.
ALL_ROWS, OWN_ROWS = "normuon_v", "normuon_rows"
_LIKE_PARAM = ("momentum_buffer", "exp_avg", "exp_avg_sq")


def is_alone(rule: Rule) -> bool:
    """Whether a rule takes each rank's part of a parameter for a tensor of its own."""
    return not rule.meets_ranks


def row_key(rule: Rule, key: str, param: Tensor, where: str) -> str:
    """Return what a rule calls the moments of rows that were saved as ``key``.

    Raises:
        ValueError: It needs those of all rows, and this rank's were saved.
    """
    own = isinstance(rule, MuonRule) and rule.mode == "distributed" and spans_ranks(param)
    if key == OWN_ROWS and not own:
        raise ValueError(
            f'{where} was saved with sharded_mode "distributed" and is that of one rank\'s rows; '
            "load it with that mode"
        )
    return OWN_ROWS if own else ALL_ROWS


def with_place_for_rows(entry: Mapping[str, Any], rule: Rule, member: Member) -> dict[str, Any]:
    """Return a state with the tensors that it has on ranks with elements of the parameter.

    Ranks without any orthogonalise nothing, and so have no moments of rows. But tools gather the
    tensors of a state one by one, and would wait for theirs.
    """
    found, param = dict(entry), member.param
    is_muons = isinstance(rule, MuonRule) and not is_alone(rule)
    if is_muons and member.group.get("normuon", False) and not local(param).numel():
        key = row_key(rule, ALL_ROWS, param, "")
        found.setdefault(key, torch.zeros(0, device=local(param).device))
    return found


def dense_entry(
    rule: Rule, member: Member, saved: Mapping[str, Any], origin: object
) -> dict[str, Any]:
    """Return what an optimizer will hold of ``saved``, in memory of its own.

    Args:
        rule: The one that the parameter belongs to.
        member: The parameter that it is of.
        saved: Its state, of a packed state dict or of whole tensors.
        origin: What was packed with it, if anything.

    Raises:
        ValueError: It does not fit the parameter.

    Collectives:
        None.
    """
    where, param = f"the state of {member.name}", member.param
    if origin is not None:
        Origin.of(param, alone=is_alone(rule)).check(origin, param, where)
    staged: dict[str, Any] = {}
    for key, value in saved.items():
        if not isinstance(value, Tensor):
            staged[key] = deepcopy(value)
            continue
        at = f"{where}, {key}"
        if key in (ALL_ROWS, OWN_ROWS):
            found = row_key(rule, key, param, at)
            staged[found] = _row_moment(rule, (key, found), value, param, at).clone()
            continue
        if key in _LIKE_PARAM:
            value = _as_its_param(value, member, at)
        staged[key] = _copy(key, value, param)
    return staged


def _row_moment(
    rule: Rule, keys: tuple[str, str], value: Tensor, param: Tensor, where: str
) -> Tensor:
    """Return the moments that were saved under one key and belong under another."""
    saved_as, wanted = keys
    start, length = (0, local(param).size(0))
    if not is_alone(rule):
        start, length = read_shards(param, name=where).box[0]
    rows = param.size(0) if saved_as == ALL_ROWS and not is_alone(rule) else length
    if isinstance(value, DTensor):
        value = own_row(value, rows, param.size(0), param, where).view(rows, 1)
    if value.shape != (rows, 1):
        raise ValueError(f"{where} has shape {tuple(value.shape)}; expected {(rows, 1)}")
    value = value.narrow(0, start, length) if saved_as != wanted else value
    return value.to(local(param).device)


def _as_its_param(value: Tensor, member: Member, where: str) -> Tensor:
    param = member.param
    if isinstance(value, DTensor):
        part = own_part(value, param, where)
    elif value.shape != param.shape:
        raise ValueError(
            f"{where} has shape {tuple(value.shape)}; expected {tuple(param.shape)}, as of the "
            "whole parameter"
        )
    else:
        return cut(value, param, member.name) if isinstance(param, DTensor) else value
    if not isinstance(param, DTensor):
        raise AssertionError("own_part() refuses it")
    return as_param(part, param)


def _copy(key: str, value: Tensor, param: Tensor) -> Tensor:
    """As torch: state has the dtype and the device of its parameter, but for counters."""
    if key == "step":
        return value.clone()
    dtype = param.dtype if param.is_floating_point() else value.dtype
    return value.to(dtype=dtype, device=param.device, copy=True)

"""State dicts of optimizers with quantised momenta: packed as they are, loaded by all or by none.

A state dict is torch's, with three additions::

    {
        "state": {0: {"automatic_period": 64, "step": 3, "m_codebook": ..., ...}, ...},
        "param_groups": [{..., "gefen": {"format": 1, "codebook": ..., "global_step": 3}}, ...],
    }

The codebook stands in the groups, next to the indices that it decodes and where every tool that
handles state dicts of torch keeps it. State of a sharded parameter is this rank's, as DTensors, so
that no tool takes one rank's for another's: indices lie as the parameter does, everything else is
one row for each part of the parameter. A state dict without DTensors holds whole tensors, and can
be loaded into sharded parameters too: each rank takes its part.

[Note: stage, then publish]
    Loading checks everything, and makes everything that the optimizer will hold, before anything
    of it is written; ranks then agree; what remains are assignments.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from adapters._legacy import from_gefen_x, is_gefen_x
from adapters._momenta import Momenta, digest, digest_of
from adapters._rules import Member, Rule, local
from adapters._shards import read_shards
from adapters._state import FORMAT, RECORD, Entry, Kind, Record, kinds_of, parse
from adapters.options import check_options

# ---- packing ----


def pack(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Complete what torch's ``state_dict`` returned, in place.

    Collectives:
        None.
    """
    members = list(optimizer._members())
    for member, group in zip(
        members, _group_of_each(state_dict["param_groups"], len(members)), strict=True
    ):
        momenta = optimizer._rule_of(member.group).momenta
        if momenta is None:
            continue
        group[RECORD] = {"format": FORMAT, **momenta.record()}
        entry = state_dict["state"].get(member.position)
        if entry and isinstance(member.param, DTensor):
            state_dict["state"][member.position] = _pack_entry(entry, member, momenta)


def _group_of_each(groups: Sequence[dict[str, Any]], total: int) -> list[dict[str, Any]]:
    found = [group for group in groups for _ in group["params"]]
    if len(found) != total:
        raise AssertionError("torch packs every parameter once")
    return found


def _pack_entry(entry: Mapping[str, Any], member: Member, momenta: Momenta) -> dict[str, Any]:
    shards = read_shards(member.param, name=member.name, alone=momenta.alone)
    kinds = kinds_of(shards, entry["automatic_period"])
    return {
        key: _as_row(value, key, kinds[key], member.param, momenta.alone)
        if isinstance(value, Tensor)
        else value
        for key, value in entry.items()
    }


def _as_row(value: Tensor, key: str, kind: Kind, param: Tensor, alone: bool) -> DTensor:
    """Return this rank's part of a state tensor as a DTensor on the mesh of its parameter."""
    if not isinstance(param, DTensor):
        raise AssertionError("plain parameters have plain state")
    if key == "m_codebook":
        return DTensor.from_local(
            value,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    # A rank that learns alone knows nothing of the others' blocks, but they have elements.
    width = _largest_part(param) if alone else max(kind.lengths())
    row = value.new_zeros(1, max(width, value.numel()))
    row[0, : value.numel()] = value.flatten()
    placements = [Replicate() if p.is_replicate() else Shard(0) for p in param.placements]
    num_rows = 1
    for axis, placement in enumerate(placements):
        num_rows *= 1 if placement.is_replicate() else param.device_mesh.size(axis)
    shape = torch.Size((num_rows, row.size(1)))
    return DTensor.from_local(
        row, param.device_mesh, placements, run_check=False, shape=shape, stride=(row.size(1), 1)
    )


def _largest_part(param: DTensor) -> int:
    shards = read_shards(param, name="")
    return max(max(part.numel for part in shards.parts), sum(param.shape))


# ---- loading ----


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """What an optimizer will hold once all ranks agree to it."""

    state: dict[Any, Any]
    groups: list[dict[str, Any]]
    records: tuple[Record | None, ...]  # of its rules

    def common(self) -> list[Any]:
        """Return what must be equal on all ranks."""
        return [
            None
            if record is None
            else [record.codebook is not None and digest_of(record.codebook), record.global_step]
            for record in self.records
        ]

    def by_mesh(self) -> dict[tuple[int, ...], str]:
        """Return, for the ranks of each mesh, what must be equal on them."""
        # Which counters and moments there are, and how old they are.
        texts: dict[tuple[int, ...], list[str]] = {}
        for i, group in enumerate(self.groups):
            for j, param in enumerate(group["params"]):
                if isinstance(param, DTensor) and param.device_mesh.size() > 1:
                    ranks = tuple(sorted(param.device_mesh.mesh.flatten().tolist()))
                    entry = self.state.get(param, {})
                    counters = [f"{k}={v}" for k, v in sorted(entry.items()) if type(v) is int]
                    keys = ",".join(sorted(map(str, entry)))
                    texts.setdefault(ranks, []).append(f"{i}.{j} {keys} {counters}")
        return {ranks: digest("\n".join(lines)) for ranks, lines in sorted(texts.items())}


def stage(optimizer: Any, state_dict: Mapping[str, Any]) -> Staged:
    """Return what loading ``state_dict`` would make of the optimizer; nothing is written.

    Raises:
        ValueError: It does not belong to this optimizer, or is damaged. The text says where.

    Collectives:
        None.
    """
    if is_gefen_x(state_dict):
        state_dict = from_gefen_x(state_dict)
    saved = deepcopy(list(state_dict["param_groups"]))
    _check_groups(optimizer.param_groups, saved)
    found: dict[Rule, list[tuple[str, Any]]] = {rule: [] for rule in optimizer._rules}
    for i, (group, new) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        rule = optimizer._rule_of(group)
        found[rule].append((f"parameter group {i}", new.pop(RECORD, None)))
        if rule is not optimizer._rule_of({**group, **new}):
            raise ValueError(f"parameter group {i} was of the other half when it was saved")
        check_options(new, rule.options, f"parameter group {i}")
        for key, value in group.items():  # torch keeps what an old checkpoint does not know
            new.setdefault(key, value)
        new["params"] = group["params"]
    records = tuple(_record(rule, found[rule]) for rule in optimizer._rules)
    by_rule = dict(zip(optimizer._rules, records, strict=True))
    ids = [key for group in state_dict["param_groups"] for key in group["params"]]
    state: dict[Any, Any] = defaultdict(dict)
    with torch.no_grad():
        for key, member in zip(ids, optimizer._members(), strict=True):
            if key in state_dict["state"]:
                rule = optimizer._rule_of(member.group)
                entry = state_dict["state"][key]
                state[member.param] = _entry(rule, by_rule[rule], member, entry)
    known = set(ids)
    state.update({k: v for k, v in state_dict["state"].items() if k not in known})
    return Staged(state, saved, records)


def _check_groups(groups: Sequence[Mapping[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
    sizes, saved_sizes = ([len(each["params"]) for each in some] for some in (groups, saved))
    if sizes != saved_sizes:
        raise ValueError(
            f"the optimizer has groups of {sizes} parameters, the state dict of {saved_sizes}; "
            "build the optimizer as the one that was saved"
        )
    for i, (group, new) in enumerate(zip(groups, saved, strict=True)):
        names, saved_names = group.get("param_names"), new.get("param_names")
        if not names or not saved_names:
            continue
        for mine, its in zip(names, saved_names, strict=True):
            if mine.lower() != its.lower():
                raise ValueError(
                    f"parameter group {i} has {mine} where the state dict has {its}; list "
                    "parameters in the order in which they were saved"
                )
        new["param_names"] = names


def _record(rule: Rule, found: Sequence[tuple[str, Any]]) -> Record | None:
    """Return what the groups of one rule say of all its parameters."""
    if rule.momenta is None:
        extra = [where for where, value in found if value is not None]
        if extra:
            raise ValueError(
                f"{extra[0]} was saved with a quantised momentum, but this optimizer keeps none"
            )
        return None
    records = []
    for where, value in found:
        if value is None:
            raise ValueError(
                f"{where} has no record of a codebook; the state dict was saved by an optimizer "
                "without quantised momenta, or a tool has removed it"
            )
        if isinstance(value, Mapping) and value.get("format", FORMAT) != FORMAT:
            raise ValueError(
                f"{where} has format {value['format']!r}; this version reads format {FORMAT}"
            )
        records.append(parse(Record, value, f"{where}, {RECORD}"))
    for other in records[1:]:
        if not _same_record(records[0], other):
            raise ValueError(f"{found[0][0]} and another have different codebooks or steps")
    return records[0] if records else Record(format=1, codebook=None, global_step=0)


def _same_record(one: Record, other: Record) -> bool:
    books = (one.codebook, other.codebook)
    if any(book is None for book in books):
        return books == (None, None) and one.global_step == other.global_step
    first, second = (book for book in books if book is not None)
    return torch.equal(first, second) and one.global_step == other.global_step


def _entry(rule: Rule, record: Record | None, member: Member, saved: Any) -> dict[str, Any]:
    if rule.momenta is None or record is None:
        return {key: _cast(key, value, member.param) for key, value in saved.items()}
    where = f"the state of {member.name}"
    if not saved:
        return {}
    entry: Entry = parse(Entry, dict(saved), where)
    if entry.m_codebook is not None and record.codebook is None:
        raise ValueError(
            f"{where} has indices, but there is no codebook to read them with; the state dict is "
            "incomplete"
        )
    shards = read_shards(member.param, name=member.name, alone=rule.momenta.alone)
    numel = sum(part.numel for part in shards.parts)
    if numel % entry.automatic_period:
        raise ValueError(
            f"{where}: blocks of {entry.automatic_period} elements do not divide a parameter of "
            f"{numel}"
        )
    kinds = kinds_of(shards, entry.automatic_period)
    staged: dict[str, Any] = {}
    for key in saved:
        value = getattr(entry, key)
        if isinstance(value, Tensor):
            if key not in kinds:
                raise ValueError(f"{where}: only matrices have {key}")
            value = _own_part(value, kinds[key], member.param, f"{where}, {key}")
            _check_values(value, key, where)
        if value is not None:
            staged[key] = value
    return staged


def _own_part(value: Tensor, kind: Kind, param: Tensor, where: str) -> Tensor:
    """Return this rank's part of a saved tensor, from its own row or from the whole."""
    device = local(param).device
    numel = math.prod(kind.shape)
    if isinstance(value, DTensor):
        same = isinstance(param, DTensor) and value.device_mesh == param.device_mesh
        if not same:
            raise ValueError(
                f"{where} was saved on {value.device_mesh} {value.placements}; load it into a "
                "parameter on the same mesh"
            )
        row = value.to_local()
        if row.shape != kind.shape:  # not indices, which lie as their parameter
            if row.dim() != 2 or row.size(0) != 1 or row.size(1) < numel:
                raise ValueError(
                    f"{where} has shape {tuple(row.shape)} on this rank; expected 1 row of at "
                    f"least {numel}. It was saved with other shards: use the same mesh and "
                    "placements, or a state dict of whole tensors."
                )
            row = row[0, :numel]
    elif value.numel() == kind.length:
        row = kind.take(value.flatten())
    elif value.shape == kind.shape or (value.numel() == numel and not isinstance(param, DTensor)):
        row = value
    else:
        raise ValueError(
            f"{where} has {value.numel()} elements; expected the {kind.length} of the whole "
            "parameter"
        )
    return row.reshape(kind.shape).to(device, copy=True)


def _check_values(value: Tensor, key: str, where: str) -> None:
    wanted = torch.uint8 if key == "m_codebook" else torch.float32
    if value.dtype != wanted:
        raise ValueError(f"{where}, {key} is {value.dtype}; expected {wanted}")
    if wanted == torch.float32 and not bool(((value >= 0) & value.isfinite()).all()):
        raise ValueError(f"{where}, {key} holds values that are negative or not finite")


def _cast(key: str, value: Any, param: Tensor) -> Any:
    """As torch: state has the dtype and the device of its parameter, but for counters."""
    if not isinstance(value, Tensor) or key == "step":
        return value
    dtype = param.dtype if param.is_floating_point() else value.dtype
    return value.to(dtype=dtype, device=param.device)

"""What torch.distributed.checkpoint reads an optimizer's state into, before there is any.

DCP fills tensors that are there. A new Gefen has none: how long its blocks are, and so how much
state it has, is learned from gradients. But the checkpoint's metadata says what was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from adapters._rows import ORIGIN, as_param, as_row
from adapters._rules import local
from adapters._state import Entry

# Lengths of their own: one row a part. The rest lies as its parameter does, or is plain.
_IN_ROWS = {*Entry.model_fields, ORIGIN} - {"m_codebook"}


def empty_state(optimizer: Any, metadata: Metadata, key: str = "optimizer") -> dict[str, Any]:
    """Return a state dict of an optimizer that made no step, for ``dcp.load`` to fill.

        metadata = dcp.FileSystemReader(path).read_metadata()
        state = {"model": ..., "optimizer": adapters.empty_state(optimizer, metadata)}
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    Args:
        optimizer: One of this package, built on ``named_parameters()`` of the sharded model.
        metadata: Of a checkpoint of what ``get_optimizer_state_dict`` returned.
        key: Under which that was saved.

    Returns:
        Tensors of zeros: for a parameter that is cut, this rank's part, on its device; all else
        whole and on the CPU. None for what is no tensor. Nothing of it is the optimizer's yet.

    Raises:
        KeyError: The checkpoint holds nothing under this key.
        ValueError: It holds state of a parameter that this optimizer does not have, or of one that
            was cut into another number of parts.

    Collectives:
        None.
    """
    params = {member.name: member.param for member in optimizer._members()}
    paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data or {}
    wanted = {path[1:]: name for name, path in paths.items() if path[:1] == (key,)}
    if not wanted:
        held = sorted({str(path[0]) for path in paths.values()})
        raise KeyError(f"the checkpoint holds nothing under {key!r}, but under {held}")
    is_cut = {path[1] for path in wanted if path[0] == "state" and path[-1] == ORIGIN}
    found: dict[str | int, Any] = {}
    for path, name in wanted.items():
        saved = metadata.state_dict_metadata[name]
        value = None
        if isinstance(saved, TensorStorageMetadata):
            param = None
            if path[0] == "state":
                param = _param_of(str(path[1]), params, optimizer)
            where = ".".join(map(str, path))
            value = _zeros(saved, param if path[1] in is_cut else None, path[-1], where)
        _put(found, path, value)
    return {str(part): _as_lists(value) for part, value in found.items()}


def _param_of(name: str, params: Mapping[str, Tensor], optimizer: Any) -> Tensor:
    if name not in params:
        raise ValueError(
            f"the checkpoint holds state of {name!r}, which this {type(optimizer).__name__} does "
            f"not have; it has {', '.join(sorted(params)[:4])}, ... Build it on named_parameters() "
            "of the same model, and save what get_optimizer_state_dict returns."
        )
    return params[name]


def _zeros(
    saved: TensorStorageMetadata, param: Tensor | None, key: str | int, where: str
) -> Tensor:
    dtype = saved.properties.dtype
    if not isinstance(param, DTensor):
        return torch.zeros(saved.size, dtype=dtype, device="cpu")
    device = local(param).device
    if key in _IN_ROWS and len(saved.size) == 2:
        row = as_row(torch.zeros(0, dtype=dtype, device=device), param, saved.size[1])
        if row.shape != saved.size:
            raise ValueError(
                f"{where} was saved from {saved.size[0]} parts of the parameter, which now has "
                f"{row.size(0)}. State of shards is loaded with the mesh and the placements it was "
                "saved with."
            )
        return row
    if saved.size == param.shape:
        return as_param(torch.zeros_like(local(param), dtype=dtype), param)
    return torch.zeros(saved.size, dtype=dtype, device=device)


def _put(tree: dict[str | int, Any], path: tuple[str | int, ...], value: Any) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value


def _as_lists(tree: Any) -> Any:
    """Return a tree in which what has numbers for keys is a list, as it was saved."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return [_as_lists(tree[key]) for key in sorted(tree)]
    return {key: _as_lists(value) for key, value in tree.items()}

"""What a caller may name as a source of ranks, and what torch says of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from consensus.enclosure import rank_set
from consensus.errors import EnclosureError
from consensus.placement import BackendFacts
from consensus.vote import Ranks

# An optimizer, parameter groups, parameters, DeviceMeshes, process groups, anything that has
# ``agreement_scopes()`` (a ControlGroup), an iterable of these, or None for all ranks.
Source: TypeAlias = Any


def flatten(source: Source) -> Iterator[Any]:
    """Yield the tensors, meshes and process groups that ``source`` names."""
    if source is None:
        yield dist.group.WORLD
    elif isinstance(source, Tensor | DeviceMesh | dist.ProcessGroup):
        yield source
    elif isinstance(source, Optimizer):
        yield from (param for group in source.param_groups for param in group["params"])
        named = getattr(source, "control_group", None)
        yield from flatten(named) if named is not None else ()
        if hasattr(source, "agreement_scopes"):
            yield from flatten(source.agreement_scopes())
    elif hasattr(source, "agreement_scopes"):
        yield from flatten(source.agreement_scopes())
    elif isinstance(source, dict):
        yield from flatten(source["params"])
    elif source is dist.GroupMember.NON_GROUP_MEMBER:
        raise EnclosureError("this rank is not a member of the process group it names")
    elif isinstance(source, Iterable):
        for item in source:
            yield from flatten(item)
    else:
        raise TypeError(
            "expected an optimizer, parameters, DeviceMeshes, process groups or None; got "
            f"{type(source).__name__}"
        )


def refuse_without_job(items: Iterable[Any]) -> None:
    """Raise if meshes or groups of several ranks are named though no job is there, or no longer.

    Raises:
        EnclosureError: Their ranks have no store to meet in. To go on alone would not be told apart
            from agreeing.
    """
    for item in items:
        holder = item.device_mesh if isinstance(item, DTensor) else item
        if not isinstance(holder, Tensor) and holder is not None and holder.size() > 1:
            raise EnclosureError(
                f"{holder} spans {holder.size()} ranks, which cannot agree: the default process "
                "group was destroyed, or never made. Call init_process_group, and build anew what "
                "lies on meshes"
            )


def mesh_ranks(mesh: DeviceMesh) -> Ranks:
    """Return the global ranks of a mesh, sorted."""
    return rank_set(mesh.mesh.flatten().tolist())


def group_ranks(group: Any) -> Ranks:
    """Return the global ranks of a process group, sorted."""
    return rank_set(dist.get_process_group_ranks(group))


def data_groups(meshes: Iterable[DeviceMesh], groups: Iterable[Any]) -> dict[Ranks, list[Any]]:
    """Return the process groups that move data, by the scope they belong to."""
    found: dict[Ranks, list[Any]] = {}
    for mesh in meshes:
        listed = found.setdefault(mesh_ranks(mesh), [])
        listed += [group for group in mesh.get_all_groups() if group not in listed]
    for group in groups:
        found.setdefault(group_ranks(group), []).append(group)
    return found


def backend_facts(group: Source, *, hint: str | None) -> BackendFacts:
    """Read what decides on which device a control tensor for ``group`` lives."""
    sharded = [p for p in flatten(group) if isinstance(p, DTensor)] if group is not None else []
    if isinstance(group, Optimizer):
        group = sharded[0].device_mesh if sharded else None
    if isinstance(group, DeviceMesh):
        group = group.get_group(0)
    group = dist.group.WORLD if group is None else group
    bound = getattr(group, "bound_device_id", None)
    return BackendFacts(
        backends={d.type: group._get_backend(d).name() for d in group._device_types},
        bound_device=None if bound is None else str(bound),
        shard_devices=tuple(str(param.device) for param in sharded),
        hint=hint,
    )


def options_of(group: Any) -> Any:
    """Return the options of a group's first backend that has any; they show later changes too."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return options
    return None

"""On which device the control tensor lives: backend facts in, device name out. Pure; no torch.

The ambient current device says nothing about the group that will carry the tensor, so it is never
consulted. A CPU-offloaded shard under an nccl-only group still needs a CUDA control tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CPU_BACKENDS = frozenset({"gloo", "mpi", "ucc", "fake", "threaded"})
DEVICE_OF = {"nccl": "cuda", "xccl": "xpu", "hccl": "npu"}


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """What a process group says of itself, and where the caller's shards live."""

    backends: Mapping[str, str] = field(default_factory=dict)  # device type -> backend name
    bound_device: str | None = None  # "cuda:3": the device the group was created for
    shard_devices: tuple[str, ...] = ()  # devices of the local shards, in parameter order
    hint: str | None = None  # the caller's own word


def control_device(facts: BackendFacts) -> str:
    """Return the device of a control tensor on this group, such as "cpu" or "cuda:3".

    CPU wherever the group has a CPU backend: a vote then never waits for queued GPU work. Else the
    accelerator that the group is bound to, else the caller's hint, else the first local shard on
    that kind of device, else the kind alone, which torch reads as its current device.

    Raises:
        ValueError: The hint names a device that no backend of the group can carry.
    """
    kinds = {_device_type(device, backend) for device, backend in facts.backends.items()}
    if facts.hint is not None and kinds and _kind(facts.hint) not in kinds:
        expected = " or ".join(sorted(kinds))
        raise ValueError(
            f"expected a control device the group can carry ({expected}); got {facts.hint!r}"
        )
    if facts.hint is not None and facts.hint != _kind(facts.hint):
        return facts.hint  # an explicit index is the caller's decision
    if "cpu" in kinds and (facts.hint is None or _kind(facts.hint) == "cpu"):
        return "cpu"
    kind = _kind(facts.hint) if facts.hint else min(kinds, default="cpu")
    candidates = (facts.bound_device, *facts.shard_devices)
    return next((device for device in candidates if device and _kind(device) == kind), kind)


def _device_type(device: str, backend: str) -> str:
    return "cpu" if backend in CPU_BACKENDS else DEVICE_OF.get(backend, device)


def _kind(device: str) -> str:
    return device.split(":", 1)[0]

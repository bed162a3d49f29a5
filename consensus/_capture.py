"""What a CUDA graph holds of an optimizer's step, and what must not have changed since.

[Note: a graph holds what the host decided]
A graph replays kernels with the numbers and addresses they had when it was captured. Whatever the
host decides is decided once, for all replays. So a captured step can hold no vote. It stands on the
last agreement outside of the capture (the warm-up), to which this rank compares its facts. What
must be decided anew in each replay, an overflow, stays on the device: see ``preflight.found_inf``.

Not run on a GPU yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from consensus._manifest import option_text
from consensus._transport import agree_flag_on_device
from consensus.groups import ControlGroup
from consensus.vote import Fact

WARM_UP = (
    "Make at least one step outside of the capture, on a side stream, as torch's documentation on "
    "CUDA graphs says, and capture after it."
)
ABSENT = "absent"  # what the AMP fact says of a control that is not set


def is_capturing() -> bool:
    """Return whether the current CUDA stream is captured into a graph; waits for nothing."""
    # The second raises where torch was built without CUDA.
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(in_use) and torch.cuda.is_current_stream_capturing()


def agree_in_graph(found_inf: Tensor, group: ControlGroup, phase: str) -> Tensor:
    """Return the highest ``found_inf`` of the ranks of ``group``, agreed in each replay anew.

    Raises:
        NotImplementedError: Several meshes tie these ranks together.

    Collectives:
        One all_reduce(MAX) of one element for each axis of the mesh.
    """
    mesh = group.only_mesh()
    if mesh is None:
        raise NotImplementedError(
            f"{phase}: found_inf cannot be agreed inside of a CUDA graph over ranks "
            f"{list(group.ranks)}, which several meshes tie together; only over the ranks of one "
            "mesh. Capture without a GradScaler (bfloat16 needs none), or leave the optimizer's "
            "step out of the graph."
        )
    return agree_flag_on_device(found_inf, mesh.get_all_groups())


# ---- what was agreed in the last step against what this rank brings now ----


def changed_facts(
    then: Sequence[Fact], now: Sequence[Fact], *, moving: Collection[str]
) -> list[str]:
    """Return what is no longer as it was agreed, a line for each value.

    Args:
        then: This rank's facts of the last agreed step, which all its peers held too.
        now: Its facts in the step that is being captured.
        moving: Names of facts that go on with each step, such as counters.
    """
    before, after = (
        {(fact.name, fact.scope): fact for fact in facts if fact.name not in moving}
        for facts in (then, now)
    )
    lines: list[str] = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            lines.append(f"{key[0]}: {'not agreed on yet' if old is None else 'not brought now'}")
        elif old.key != new.key:
            lines += _changed_values(old, new)
    return lines


def _changed_values(old: Fact, new: Fact) -> list[str]:
    was, now = (_values(fact, new) for fact in (old, new))
    return [
        f"{old.name}: {name + ' ' if name else ''}was {was.get(name, 'not there')}, "
        f"is {now.get(name, 'not there')}"
        for name in dict.fromkeys([*was, *now])
        if was.get(name) != now.get(name)
    ]


def _values(fact: Fact, new: Fact) -> Mapping[str, str]:
    items = (new if fact.name == "gradients" else fact).items()
    if fact.name == "AMP":  # values are the device's own business: they change by right
        return {name: ABSENT if text == ABSENT else "present" for name, text in items.items()}
    if fact.name == "gradients":  # the texts of old ones would be read now; one byte for each
        codes = ("missing", "present")
        return {
            name: codes[code] if code < 2 else f"present in another dtype ({code})"
            for name, code in zip(items, fact.key, strict=True)
        }
    return items


# ---- what a graph holds of an optimizer ----


@dataclass(frozen=True, slots=True)
class Held:
    """All of one optimizer that is a constant in a graph: numbers, and where tensors lie."""

    # Held, so that their addresses are not given to others. What they are is compared by identity.
    params: tuple[Tensor, ...]
    names: tuple[str, ...]
    options: tuple[Mapping[str, str], ...]
    tensors: Mapping[str, int]  # "gradient of layer.1" -> address of this rank's part

    @classmethod
    def of(cls, optimizer: Optimizer) -> Held:
        """Read it; waits for no device."""
        groups = optimizer.param_groups
        params = tuple(param for group in groups for param in group["params"])
        names = _names(groups)
        tensors: dict[str, int] = {}
        for name, param in zip(names, params, strict=True):
            tensors[name] = _address(param)
            if param.grad is not None:
                tensors[f"gradient of {name}"] = _address(param.grad)
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"state {key} of {name}"] = _address(value)
        return cls(params, names, tuple(_options(group) for group in groups), tensors)

    def changes(self, now: Held) -> list[str]:
        """Return what is not as it was in ``self``, a line for each."""
        if len(self.params) != len(now.params):
            return [f"{len(self.params)} parameters were captured, there are {len(now.params)}"]
        if len(self.options) != len(now.options):
            return [f"{len(self.options)} groups were captured, there are {len(now.options)}"]
        others = {
            name
            for name, old, new in zip(self.names, self.params, now.params, strict=True)
            if old is not new
        }
        lines = [f"{name} is another tensor than was captured" for name in sorted(others)]
        for number, (was, are) in enumerate(zip(self.options, now.options, strict=True)):
            lines += [
                f"{name} of group {number} was {was.get(name, 'not set')} when captured, "
                f"is {are.get(name, 'not set')}"
                for name in dict.fromkeys([*was, *are])
                if was.get(name) != are.get(name)
            ]
        for name in dict.fromkeys([*self.tensors, *now.tensors]):
            old, new = self.tensors.get(name), now.tensors.get(name)
            if old != new and name not in others:
                lines.append(f"{name} {_moved(old, new)}")
        return lines


def _moved(old: int | None, new: int | None) -> str:
    if old is None:
        return "was not there when captured"
    return "is no longer there" if new is None else "has moved to other memory"


def _names(groups: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    names: list[str] = []
    for group in groups:
        given = group.get("param_names")
        start = len(names)
        names += given or (f"parameter {start + i}" for i in range(len(group["params"])))
    return tuple(names)


def _options(group: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: _option(value)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def _option(value: Any) -> str:
    # A graph reads a tensor on its device anew in each replay: what it says may change.
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return f"tensor at {_address(value):#x}"
    return option_text(value)


def _address(tensor: Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()


_captured: weakref.WeakKeyDictionary[Optimizer, Held] = weakref.WeakKeyDictionary()


def note_captured(optimizer: Optimizer) -> None:
    """Note what a graph holds of an optimizer whose step is being captured."""
    _captured[optimizer] = Held.of(optimizer)


def take_captured(optimizer: Optimizer) -> Held:
    """Return what was noted last, once; else what the optimizer holds now."""
    return _captured.pop(optimizer) if optimizer in _captured else Held.of(optimizer)

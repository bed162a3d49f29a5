"""What `consensus.recover` refuses, and that it drops gradients; the rest needs ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from consensus import GroupFailure, recover

FINE = GroupFailure("step", ())


def unbuilt(kind: type[nn.Module]) -> nn.Module:
    """Return a module that has only its type: building one takes process groups."""
    module: nn.Module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


class OfAnOldTorch(nn.Module, FSDPModule):
    __new__ = nn.Module.__new__  # not FSDPModule's, which makes an instance of another class

    def _get_fsdp_state(self) -> Any:
        return SimpleNamespace(_is_root=True)

    @property
    def reset_iter_state(self) -> Any:
        raise AttributeError("no attribute 'reset_iter_state'")


def test_gradients_are_dropped() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    recover(model, FINE)
    assert [param.grad for param in model.parameters()] == [None, None]


def test_where_training_cannot_go_on_the_error_is_raised_and_nothing_is_touched() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    lost = GroupFailure("step", (), recoverable=False)
    with pytest.raises(GroupFailure) as raised:
        recover(model, lost)
    assert raised.value is lost
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (DistributedDataParallel, "wrap the module anew"),
        (FullyShardedDataParallel, "Restart from a checkpoint"),
    ],
)
def test_what_keeps_a_failed_backward_pass_is_refused_before_anything_is_dropped(
    kind: type[nn.Module], advice: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), unbuilt(kind))
    model[0](torch.ones(2)).sum().backward()
    with pytest.raises(ValueError, match=f"expected a model without {kind.__name__}; 1 .*{advice}"):
        recover(model, FINE)
    assert all(param.grad is not None for param in model.parameters())


def test_a_torch_that_cannot_reset_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"torch 2.* cannot reset .*reset_iter_state"):
        recover(nn.Sequential(OfAnOldTorch()), FINE)

"""Options are checked where they enter, by their names, and refused in words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from adapters import Muon


def parameters(count: int = 1) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 3)) for _ in range(count)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "Learning rate should be >= 0 and finite but is: -1.0"),
        ({"lr": torch.tensor(-1.0)}, "Learning rate should be >= 0 and finite"),
        ({"lr": torch.tensor(float("nan"))}, "Learning rate should be >= 0 and finite"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"lr": float("nan")}, "lr: Input should be a finite number"),
        ({"lr": True}, "lr: Input should be a valid number"),
        ({"lr": "0.1"}, "lr: Input should be a valid number"),
        ({"momentum": -0.5}, "momentum should be >= 0 but is: -0.5"),
        ({"momentum": float("inf")}, "momentum: Input should be a finite number"),
        ({"weight_decay": -0.1}, "weight decay should be >= 0 but is: -0.1"),
        ({"nesterov": 1}, "nesterov: Input should be a valid boolean"),
        ({"ns_coefficients": (1.0, 2.0)}, "Coefficients must be a tuple of exactly 3 values"),
        ({"ns_coefficients": (1.0, 2.0, float("nan"))}, "ns_coefficients: Input should be a fin"),
        ({"ns_steps": 100}, "Number of steps must be less than 100"),
        ({"ns_steps": -1}, "ns_steps: Input should be greater than or equal to 0"),
        ({"ns_steps": 2.0}, "ns_steps: Input should be a valid integer"),
        ({"eps": -1e-7}, "eps: Input should be greater than or equal to 0"),
        ({"adjust_lr_fn": "moonshot"}, "Adjust learning rate function moonshot is not supported"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Muon(parameters(), **options)
    optimizer = Muon(parameters())
    with pytest.raises(ValueError, match="parameter group 1: .*" + re.escape(text)):
        optimizer.add_param_group({"params": parameters(), **options})
    assert len(optimizer.param_groups) == 1


def test_a_misspelt_option_is_refused_and_a_users_own_key_is_not() -> None:
    with pytest.raises(ValueError, match=r"weigth_decay: .* did you mean weight_decay"):
        Muon([{"params": parameters(), "weigth_decay": 0.0}])
    own = {"initial_lr": 0.1, "lr_scale": 0.5, "name": "hidden", "max_momentum": 0.95}
    group = Muon([{"params": parameters(), **own}]).param_groups[0]
    assert own.items() <= group.items()


def test_modes_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="'exact', 'distributed', 'approx'"):
        Muon(parameters(), sharded_mode="distribute")  # type: ignore[arg-type]

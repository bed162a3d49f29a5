"""Optimizers with codebooks, each through the same laws: a step, its arguments, and copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from adapters import Gefen, GefenMuon, Hybrid
from adapters._quantized import QuantizedOptimizer
from tests.unit.test_gefen import (
    SHAPES,
    differences,
    named,
    params_of,
    random_tensor,
    set_gradients,
    snapshot,
    train,
)

MATRICES = ((8, 12), (5, 6), (6, 5))


@dataclass(frozen=True)
class Kind:
    """An optimizer with its options, and parameters for it."""

    name: str
    cls: type[QuantizedOptimizer]
    options: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...] = SHAPES

    def make(
        self, params: list[tuple[str, nn.Parameter]] | None = None, **options: Any
    ) -> QuantizedOptimizer:
        cls: Any = self.cls
        pairs = named(self.shapes) if params is None else params
        made: QuantizedOptimizer = cls(pairs, **{"lr": 0.01, **self.options, **options})
        return made


KINDS = (
    Kind("Gefen, factored", Gefen, {"weight_decay": 0.1}),
    Kind("Gefen, block", Gefen, {"factored_v_2d": False, "betas": (0.5, 0.9)}),
    Kind("GefenMuon", GefenMuon, {}, MATRICES),
    Kind("GefenMuon, tuned", GefenMuon, {"normuon": True, "cautious": True}, MATRICES),
    Kind("Hybrid", Hybrid, {"weight_decay": 0.1}),
    Kind("Hybrid, AdamW", Hybrid, {"backup": "adamw"}),
    Kind("Hybrid, dense", Hybrid, {"muon": "dense", "backup_factored_v_2d": True}),
)
# torch keeps dense moments in the dtype of the parameter.
WITHOUT_DENSE = [kind for kind in KINDS if not {"adamw", "dense"} & set(kind.options.values())]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def assert_same(left: QuantizedOptimizer, right: QuantizedOptimizer) -> None:
    assert differences(snapshot(left), snapshot(right)) == []


@every_kind
def test_training_repeats_bit_for_bit(kind: Kind) -> None:
    left, right = kind.make(), kind.make()
    train(left, 1, 2, 3)
    train(right, 1, 2, 3)
    assert_same(left, right)
    assert not torch.equal(params_of(left)[0], params_of(kind.make())[0])


@every_kind
def test_a_missing_gradient_leaves_a_parameter_alone(kind: Kind) -> None:
    optimizer = kind.make()
    set_gradients(optimizer, 1, skip=[1])
    optimizer.step()
    untouched = params_of(optimizer)[1]
    assert untouched not in optimizer.state
    assert torch.equal(untouched, named(kind.shapes)[1][1])
    train(optimizer, 2)
    before = snapshot(optimizer)
    set_gradients(optimizer, 3, skip=[1])
    optimizer.step()
    changed = differences(before, snapshot(optimizer))
    assert "parameter 0" in changed
    assert not [key for key in changed if key.endswith(" 1")]


@every_kind
def test_without_any_gradient_only_the_step_is_counted(kind: Kind) -> None:
    optimizer = kind.make()
    before = snapshot(optimizer)
    optimizer.step()
    after = snapshot(optimizer)
    assert not optimizer.state
    assert all(key.endswith("global_step") for key in differences(before, after))
    train(optimizer, 1)
    twin = kind.make()
    train(twin, 1)
    found = differences(snapshot(optimizer), snapshot(twin))
    assert all(key.endswith("global_step") for key in found)


@every_kind
def test_a_parameter_that_wants_no_gradient_may_be_listed(kind: Kind) -> None:
    pairs = named(kind.shapes)
    pairs[0][1].requires_grad_(False)
    optimizer = kind.make(pairs)
    set_gradients(optimizer, 1, skip=[0])
    optimizer.step()
    assert pairs[0][1] not in optimizer.state
    assert len(optimizer.state) == len(pairs) - 1


@every_kind
def test_an_empty_parameter_has_no_state_and_does_no_harm(kind: Kind) -> None:
    optimizer, twin = kind.make(named((*kind.shapes, (0, 3)))), kind.make()
    for seed in (1, 2):
        set_gradients(optimizer, seed)
        set_gradients(twin, seed)
        optimizer.step()
        twin.step()
    empty = str(len(kind.shapes))
    changed = differences(snapshot(optimizer), snapshot(twin))
    assert all(key.endswith(f" {empty}") for key in changed)
    assert "m_codebook" not in optimizer.state.get(params_of(optimizer)[-1], {})


@every_kind
def test_parameters_that_are_not_contiguous_get_the_same_update(kind: Kind) -> None:
    strided = [
        (name, nn.Parameter(param.detach().mT.contiguous().mT)) if param.ndim > 1 else (name, param)
        for name, param in named(kind.shapes)
    ]
    optimizer, twin = kind.make(strided), kind.make()
    train(optimizer, 1, 2)
    train(twin, 1, 2)
    assert_same(optimizer, twin)
    assert not params_of(optimizer)[0].is_contiguous()


@every_kind
def test_gradients_that_are_not_contiguous_mean_the_same(kind: Kind) -> None:
    optimizer, twin = kind.make(), kind.make()
    for seed in (1, 2):
        set_gradients(twin, seed)
        for param, other in zip(params_of(optimizer), params_of(twin), strict=True):
            grad = other.grad
            assert grad is not None
            param.grad = grad.mT.contiguous().mT if grad.ndim > 1 else grad.clone()
        optimizer.step()
        twin.step()
    left, right = snapshot(optimizer), snapshot(twin)
    for key, value in left.items():
        if isinstance(value, Tensor) and value.dtype == torch.float32:
            # Column and row sums are added in another order.
            torch.testing.assert_close(value, right[key], rtol=2e-6, atol=1e-7)
        else:
            assert differences({key: value}, {key: right[key]}) == []


@every_kind
def test_gradients_are_read_not_written(kind: Kind) -> None:
    optimizer = kind.make()
    set_gradients(optimizer, 1)
    before = [param.grad.clone() for param in params_of(optimizer) if param.grad is not None]
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(1), torch.tensor(8.0)  # type: ignore[attr-defined]
    optimizer.step()
    after = [param.grad for param in params_of(optimizer) if param.grad is not None]
    assert all(map(torch.equal, before, after))


@every_kind
def test_a_scale_is_folded_into_the_step(kind: Kind) -> None:
    """A power of two is exact, so the scaled step has the bits of the unscaled one."""
    optimizer, twin = kind.make(), kind.make()
    for seed in (1, 2):
        set_gradients(optimizer, seed, scale=1024.0)
        optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
        optimizer.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
        optimizer.step()
        train(twin, seed)
    assert_same(optimizer, twin)


@every_kind
def test_an_overflow_in_the_first_step_leaves_everything_to_the_next(kind: Kind) -> None:
    optimizer, twin = kind.make(), kind.make()
    before = snapshot(optimizer)
    set_gradients(optimizer, 1, scale=float("inf"))
    optimizer.found_inf, optimizer.grad_scale = torch.ones(1), torch.tensor(8.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert differences(before, snapshot(optimizer)) == []
    assert not optimizer.state
    del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
    train(optimizer, 2)
    train(twin, 2)
    assert_same(optimizer, twin)


@pytest.mark.parametrize("kind", WITHOUT_DENSE, ids=lambda kind: kind.name)
def test_a_bfloat16_parameter_has_the_state_of_a_float32_one(kind: Kind) -> None:
    """Gradients are averaged in float32, whatever their dtype."""
    short, full = kind.make(named(kind.shapes, torch.bfloat16)), kind.make()
    for seed in (1, 2):
        set_gradients(short, seed)
        for param, other in zip(params_of(full), params_of(short), strict=True):
            param.data = other.detach().float()
            param.grad = None if other.grad is None else other.grad.float()
        short.step()
        full.step()
    for key, value in snapshot(full).items():
        if not key.startswith("parameter"):
            assert differences({key: value}, {key: snapshot(short)[key]}) == []
    for param, other in zip(params_of(short), params_of(full), strict=True):
        assert param.dtype == torch.bfloat16
        torch.testing.assert_close(param.float(), other, rtol=2**-7, atol=0)


@every_kind
@pytest.mark.parametrize("lr", [torch.tensor(0.01), torch.tensor([0.01])], ids=["()", "(1,)"])
def test_a_learning_rate_may_be_a_tensor(kind: Kind, lr: Tensor) -> None:
    optimizer, twin = kind.make(lr=lr), kind.make()
    train(optimizer, 1, 2)
    train(twin, 1, 2)
    for param, other in zip(params_of(optimizer), params_of(twin), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda each: lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda each: lr_scheduler.CosineAnnealingLR(each, T_max=3),
    "OneCycleLR": lambda each: lr_scheduler.OneCycleLR(
        each, max_lr=0.1, total_steps=4, cycle_momentum="Gefen" in type(each).__name__
    ),
}


@every_kind
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedulers_drive_it(kind: Kind, schedule: str) -> None:
    optimizer, twin = kind.make(), kind.make()
    scheduler = SCHEDULES[schedule](optimizer)
    rates = []
    for seed in (1, 2, 3):
        train(optimizer, seed)
        rates.append(optimizer.param_groups[0]["lr"])
        for group, source in zip(twin.param_groups, optimizer.param_groups, strict=True):
            group |= {key: source[key] for key in ("lr", "momentum", "betas") if key in source}
        train(twin, seed)
        scheduler.step()
    assert len(set(rates)) == 3
    assert_same(optimizer, twin)


@every_kind
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_and_a_closure_make_a_training_loop(kind: Kind, to_none: bool) -> None:
    optimizer = kind.make()
    params = params_of(optimizer)

    def closure() -> float:
        optimizer.zero_grad(set_to_none=to_none)
        loss = torch.stack([(param - 1).square().sum() for param in params]).sum()
        torch.autograd.backward(loss)
        return float(loss.detach())

    losses = [optimizer.step(closure) for _ in range(30)]
    assert losses[-1] < losses[15] < losses[0]


@every_kind
def test_a_hook_may_replace_the_closure_and_what_is_learned_from(kind: Kind) -> None:
    optimizer, twin = kind.make(), kind.make()

    def hook(me: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def closure() -> float:
            set_gradients(me, 2)
            return 7.0

        return (me, closure), kwargs

    optimizer.register_step_pre_hook(hook)
    counted: list[int] = []
    optimizer.register_step_post_hook(lambda me, *_: counted.append(len(me.state)))
    set_gradients(optimizer, 1)
    assert optimizer.step(lambda: 1.0) == 7.0
    assert counted == [len(kind.shapes)]
    train(twin, 2)
    assert_same(optimizer, twin)


@every_kind
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))],
    ids=["deepcopy", "pickle"],
)
@pytest.mark.parametrize("steps", [(), (1, 2)], ids=["new", "trained"])
def test_a_copy_goes_on_as_the_original(kind: Kind, copied: Any, steps: tuple[int, ...]) -> None:
    optimizer = kind.make(codebook_refresh_every=3, first_gradient="defer", control_group=[])
    train(optimizer, *steps)
    twin = copied(optimizer)
    assert twin.control_group is None
    assert (twin.codebook_refresh_every, twin.first_gradient) == (3, "defer")
    assert_same(optimizer, twin)
    before = snapshot(optimizer)
    train(twin, 3, 4, 5)
    assert differences(before, snapshot(optimizer)) == []
    train(optimizer, 3, 4, 5)
    assert_same(optimizer, twin)


# What the first step learns, it keeps.
LEARNED = ("automatic_period", "rule 0, codebook", "rule 1, codebook")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_compiled_step_has_the_same_bits(kind: Kind) -> None:
    optimizer, twin = kind.make(), kind.make()
    step: Any = torch.compile(optimizer.step, backend="eager")
    optimizer.step = step  # type: ignore[method-assign]
    train(optimizer, 1, 2, 3)
    train(twin, 1, 2, 3)
    assert differences(snapshot(optimizer), snapshot(twin)) == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("first", [1, 2], ids=["first step", "second step"])
def test_a_step_that_fails_half_way_can_be_made_again(kind: Kind, first: int) -> None:
    """Options are checked where they enter; one that is set later is found by the arithmetic."""
    optimizer, twin = kind.make(), kind.make()
    train(optimizer, *range(1, first))
    train(twin, *range(1, first + 1))
    before = snapshot(optimizer)
    group = optimizer.param_groups[-1]
    right = dict(group)
    group |= {"betas": (), "ns_schedule": [(1.0, 2.0)]}
    with pytest.raises((ValueError, IndexError)):
        train(optimizer, first)
    changed = differences(before, snapshot(optimizer))
    assert [key for key in changed if not key.startswith(LEARNED)] == []
    assert changed == [] or first == 1
    group.clear()
    group |= right
    train(optimizer, first)
    assert_same(optimizer, twin)


@every_kind
def test_a_sparse_gradient_is_refused_and_nothing_is_written(kind: Kind) -> None:
    optimizer = kind.make()
    set_gradients(optimizer, 1)
    last = params_of(optimizer)[1]
    last.grad = random_tensor(*last.shape, seed=1).to_sparse()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"sparse gradients are not supported; layer\.1"):
        optimizer.step()
    assert differences(before, snapshot(optimizer)) == []

"""When a codebook is learned, what is learned from, and what a failure leaves behind."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from adapters import Gefen, GefenMuon
from adapters import _learning as learning
from adapters._blocks import whole_grid
from adapters._codebook import Codebook, dequantize, histogram, learn_levels, make_codebook, reindex
from adapters._gefen_math import block_maxima, new_momentum, quantize
from adapters._learning import NothingToLearn
from adapters._momenta import Momenta
from adapters._period import find_period
from adapters._quantized import QuantizedOptimizer
from tests.unit.test_gefen import (
    differences,
    named,
    params_of,
    set_gradients,
    snapshot,
    train,
)
from tests.unit.test_quantized import KINDS, Kind, assert_same, every_kind

FACTORED, BLOCK = KINDS[:2]


def momenta_of(optimizer: QuantizedOptimizer) -> list[Momenta]:
    return [rule.momenta for rule in optimizer._rules if rule.momenta is not None]


def book_of(optimizer: QuantizedOptimizer) -> Codebook:
    found = momenta_of(optimizer)[0].codebook
    assert found is not None
    return found


def levels_of(params: list[nn.Parameter], periods: list[int]) -> Tensor:
    """The codebook of all gradients, by the definition."""
    counts = []
    for param, period in zip(params, periods, strict=True):
        assert param.grad is not None
        rows = param.grad.reshape(-1, period)
        counts.append(histogram(rows, rows.abs().amax(1, keepdim=True)))
    levels = learn_levels(torch.stack(counts).sum(0))
    assert levels is not None
    return levels


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [((8, 12), (5, 6), (7,)), ((30, 40), (9, 16))], ids=str)
def test_periods_and_codebook_come_from_all_first_gradients(
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    optimizer = Gefen(named(shapes))
    set_gradients(optimizer, 1)
    params = params_of(optimizer)
    grads = [param.grad.clone() for param in params if param.grad is not None]
    optimizer.step()
    periods = [optimizer.state[param]["automatic_period"] for param in params]
    assert periods == [find_period(grad) for grad in grads]
    assert torch.equal(book_of(optimizer).levels, levels_of(params, periods))


def test_a_codebook_is_learned_from_unscaled_gradients() -> None:
    """Squares of these gradients are not finite before they are unscaled."""
    optimizer, twin = FACTORED.make(), FACTORED.make()
    set_gradients(optimizer, 1, scale=2.0**90)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(1), torch.tensor(2.0**90)  # type: ignore[attr-defined]
    optimizer.step()
    train(twin, 1)
    assert_same(optimizer, twin)


# ---- gradients that hold nothing to learn from ----


@every_kind
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e20])
def test_a_first_gradient_that_is_not_finite_is_refused_by_name(kind: Kind, value: float) -> None:
    optimizer, twin = kind.make(), kind.make()
    position = 3 if kind.options.get("muon") == "dense" else 0
    before = snapshot(optimizer)
    set_gradients(optimizer, 1)
    grad = params_of(optimizer)[position].grad
    assert grad is not None
    grad.view(-1)[2] = value
    name = list(optimizer._members())[position].name
    with pytest.raises(NothingToLearn, match=f"the gradient of {name} is not finite"):
        optimizer.step()
    assert differences(before, snapshot(optimizer)) == []
    train(optimizer, 1)
    train(twin, 1)
    assert_same(optimizer, twin)


@every_kind
def test_first_gradients_of_zeros_are_refused(kind: Kind) -> None:
    optimizer, twin = kind.make(), kind.make()
    before = snapshot(optimizer)
    set_gradients(optimizer, 1, scale=0.0)
    with pytest.raises(NothingToLearn, match="all gradients are zeros"):
        optimizer.step()
    assert differences(before, snapshot(optimizer)) == []
    train(optimizer, 1)
    train(twin, 1)
    assert_same(optimizer, twin)


@every_kind
@pytest.mark.parametrize("scale", [0.0, math.inf], ids=["zeros", "infinite"])
def test_or_the_step_is_skipped(kind: Kind, scale: float) -> None:
    optimizer, twin = kind.make(first_gradient="defer"), kind.make()
    before = snapshot(optimizer)
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("hook"))
    set_gradients(optimizer, 1, scale=scale)
    assert optimizer.step(lambda: 5.0) == 5.0
    assert called == ["hook"]
    assert differences(before, snapshot(optimizer)) == []
    train(optimizer, 1, 2)
    train(twin, 1, 2)
    assert_same(optimizer, twin)


def test_other_errors_are_not_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Tensor:
        raise ValueError("no room")

    optimizer = BLOCK.make(first_gradient="defer", lr=0.0)
    monkeypatch.setattr(learning, "learn_levels", failing)
    with pytest.raises(ValueError, match="no room"):
        train(optimizer, 1)
    assert not optimizer.state


def test_some_zeros_are_learned_from_as_they_are() -> None:
    optimizer = BLOCK.make()
    set_gradients(optimizer, 1)
    first, second = params_of(optimizer)[:2]
    assert first.grad is not None
    assert second.grad is not None
    first.grad.zero_()
    second.grad[1:] = 0
    before = first.detach().clone()
    optimizer.step()
    assert optimizer.state[first]["automatic_period"] == 96
    assert torch.equal(first, before)
    assert not optimizer.state[first]["m_magnitude"].any()
    periods = [optimizer.state[param]["automatic_period"] for param in params_of(optimizer)]
    assert torch.equal(book_of(optimizer).levels, levels_of(params_of(optimizer), periods))


@every_kind
def test_zeros_with_a_learning_rate_of_zero_are_no_step(kind: Kind) -> None:
    optimizer = kind.make(lr=0.0)
    before = snapshot(optimizer)
    set_gradients(optimizer, 1, scale=0.0)
    optimizer.step()
    assert differences(before, snapshot(optimizer)) == []
    set_gradients(optimizer, 1, scale=math.nan)
    with pytest.raises(NothingToLearn):
        optimizer.step()


@every_kind
def test_a_look_at_the_state_before_training_changes_nothing(kind: Kind) -> None:
    """torch's checkpointing makes a step of zeros to see what state an optimizer has."""
    optimizer, twin = kind.make(), kind.make()
    model = nn.ParameterDict({str(i): param for i, param in enumerate(params_of(optimizer))})
    get_optimizer_state_dict(model, optimizer)
    train(optimizer, 1, 2)
    train(twin, 1, 2)
    assert_same(optimizer, twin)


@pytest.mark.parametrize("first_gradient", ["raise", "defer"])
def test_a_late_gradient_that_is_not_finite_stops_the_step(first_gradient: str) -> None:
    optimizer = BLOCK.make(first_gradient=first_gradient)
    set_gradients(optimizer, 1, skip=[1])
    optimizer.step()
    before = snapshot(optimizer)
    set_gradients(optimizer, 2)
    late = params_of(optimizer)[1]
    assert late.grad is not None
    late.grad[0, 0] = math.nan
    if first_gradient == "raise":
        with pytest.raises(NothingToLearn, match=r"layer\.1"):
            optimizer.step()
    else:
        optimizer.step()
    assert differences(before, snapshot(optimizer)) == []


def test_a_late_gradient_of_zeros_has_a_period_by_its_shape() -> None:
    optimizer = BLOCK.make()
    set_gradients(optimizer, 1, skip=[1])
    optimizer.step()
    levels = book_of(optimizer).levels
    set_gradients(optimizer, 2)
    late = params_of(optimizer)[1]
    assert late.grad is not None
    late.grad.zero_()
    optimizer.step()
    assert optimizer.state[late]["automatic_period"] == 30
    assert torch.equal(book_of(optimizer).levels, levels)


# ---- failures ----


@every_kind
@pytest.mark.parametrize("stage", ["plan_search", "make_grid", "learn_levels", "make_codebook"])
def test_a_first_step_that_failed_can_be_made_again(
    kind: Kind, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    optimizer, twin = kind.make(), kind.make()
    before = snapshot(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(learning, stage, failing)
        with pytest.raises(MemoryError):
            train(optimizer, 1)
    assert differences(before, snapshot(optimizer)) == []
    assert not optimizer.state
    train(optimizer, 1)
    train(twin, 1)
    assert_same(optimizer, twin)


# ---- refresh ----


def books_of_steps(optimizer: QuantizedOptimizer, num_steps: int) -> list[Tensor]:
    found = []
    for seed in range(1, num_steps + 1):
        train(optimizer, seed)
        found.append(book_of(optimizer).levels)
    return found


def test_a_codebook_is_learned_anew_every_so_many_steps() -> None:
    books = books_of_steps(BLOCK.make(codebook_refresh_every=2), 6)
    changed = [not torch.equal(*pair) for pair in pairwise(books)]
    assert changed == [False, True, False, True, False]
    frozen = books_of_steps(BLOCK.make(), 6)
    assert all(torch.equal(book, frozen[0]) for book in frozen)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Gefen, GefenMuon])
def test_a_refresh_moves_each_index_to_the_nearest_new_level(cls: Any) -> None:
    optimizer: QuantizedOptimizer = cls(named(((16, 24), (9, 16))), codebook_refresh_every=2)
    (momenta,) = momenta_of(optimizer)
    train(optimizer, 1, 2)
    assert momenta.codebook is not None
    old, before = momenta.codebook, snapshot(optimizer)
    train(optimizer, 3)
    params = params_of(optimizer)
    periods = [optimizer.state[param]["automatic_period"] for param in params]
    new = make_codebook(levels_of(params, periods))
    assert torch.equal(momenta.codebook.levels, new.levels)
    assert not torch.equal(old.levels, new.levels)
    beta = 0.95 if cls is GefenMuon else 0.9
    for i, (param, period) in enumerate(zip(params, periods, strict=True)):
        grid = whole_grid(param.numel(), period)
        moved = reindex(before[f"m_codebook {i}"], old=old, new=new)
        assert param.grad is not None
        rows = new_momentum(
            moved, before[f"m_magnitude {i}"], param.grad, book=new, grid=grid, beta=beta
        )
        indices = quantize(rows, block_maxima(rows, grid), book=new, grid=grid)
        assert torch.equal(optimizer.state[param]["m_codebook"].flatten(), indices)


def test_a_momentum_without_gradient_is_moved_too() -> None:
    optimizer = BLOCK.make(codebook_refresh_every=2)
    train(optimizer, 1, 2)
    old, before = book_of(optimizer), snapshot(optimizer)
    set_gradients(optimizer, 3, skip=[0])
    optimizer.step()
    moved = reindex(before["m_codebook 0"], old=old, new=book_of(optimizer))
    assert torch.equal(optimizer.state[params_of(optimizer)[0]]["m_codebook"], moved)
    assert not torch.equal(moved, before["m_codebook 0"])
    values = dequantize(moved, book_of(optimizer)) - dequantize(before["m_codebook 0"], old)
    assert values.abs().max() < 0.2


@every_kind
@pytest.mark.parametrize("scale", [math.nan, 0.0], ids=["NaN", "zeros"])
@pytest.mark.parametrize("first_gradient", ["raise", "defer"])
def test_a_refresh_that_fails_leaves_everything_and_stays_due(
    kind: Kind, scale: float, first_gradient: str
) -> None:
    options: dict[str, Any] = {"codebook_refresh_every": 2, "first_gradient": first_gradient}
    optimizer, twin = kind.make(**options), kind.make(**options)
    train(optimizer, 1, 2)
    train(twin, 1, 2)
    before = snapshot(optimizer)
    set_gradients(optimizer, 3, scale=scale)
    if first_gradient == "raise":
        with pytest.raises(NothingToLearn):
            optimizer.step()
    else:
        optimizer.step()
    assert differences(before, snapshot(optimizer)) == []
    train(optimizer, 4, 5)
    train(twin, 4, 5)
    assert_same(optimizer, twin)
    assert any(key.endswith("codebook") for key in differences(before, snapshot(optimizer)))


def test_a_refresh_that_is_interrupted_leaves_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def failing(indices: Tensor, *, old: Codebook, new: Codebook) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no room")
        return reindex(indices, old=old, new=new)

    optimizer, twin = (BLOCK.make(codebook_refresh_every=1) for _ in range(2))
    train(optimizer, 1)
    train(twin, 1, 2)
    before = snapshot(optimizer)
    monkeypatch.setattr(learning, "reindex", failing)
    with pytest.raises(MemoryError):
        train(optimizer, 2)
    assert differences(before, snapshot(optimizer)) == []
    train(optimizer, 2)
    assert_same(optimizer, twin)

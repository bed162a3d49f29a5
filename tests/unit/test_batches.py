"""Small matrices of one shape are computed together, with the bits of one at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from adapters import Muon, _batches, _muon_rule
from adapters._batches import (
    MAX_NUMEL,
    MIN_SIDE,
    Kind,
    in_batches,
    newton_schulz_stacked,
    stackable,
)
from adapters._newton_schulz import DEFAULT_EPS, DEFAULT_SCHEDULE, newton_schulz
from adapters._schedules import SCHEDULES, Schedule

CPU = torch.device("cpu")


def kind(rows: int, cols: int, schedule: Schedule = DEFAULT_SCHEDULE) -> Kind:
    return Kind((rows, cols), schedule, DEFAULT_EPS)


def matrices(rows: int, cols: int, number: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, cols, generator=generator) for _ in range(number)]


@pytest.mark.parametrize(
    "schedule", [DEFAULT_SCHEDULE, SCHEDULES["polar5"]], ids=["default", "polar5"]
)
@pytest.mark.parametrize("shape", [(32, 32), (33, 65), (64, 33), (64, 256)], ids=str)
def test_a_stack_has_the_bits_of_each(shape: tuple[int, int], schedule: Schedule) -> None:
    each = matrices(*shape)
    before = [matrix.clone() for matrix in each]
    same = kind(*shape, schedule)
    if same not in stackable([same] * 3, CPU):
        pytest.skip("not on this machine, so it is not done")
    for matrix, update in zip(each, newton_schulz_stacked(each, same), strict=True):
        assert torch.equal(update, newton_schulz(matrix, schedule))
    assert all(map(torch.equal, each, before))


def test_a_zero_matrix_in_a_stack_stays_zero() -> None:
    each = [torch.zeros(4, 6), *matrices(4, 6)]
    assert not newton_schulz_stacked(each, kind(4, 6))[0].any()


def test_only_small_matrices_of_which_there_are_several_are_stacked() -> None:
    rows = MAX_NUMEL // 64 + 1
    large, tiny = kind(rows, 64), kind(MIN_SIDE - 1, 64)
    kinds = [kind(64, 64), kind(64, 64), kind(40, 40), large, large, tiny, tiny]
    assert stackable(kinds, CPU) <= {kind(64, 64)}
    assert stackable(kinds, torch.device("meta")) == frozenset()


def test_what_comes_out_otherwise_is_not_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = kind(37, 39)
    monkeypatch.setattr(
        _batches, "newton_schulz_stacked", lambda each, _: [matrix.bfloat16() for matrix in each]
    )
    _batches._gives_same_bits.cache_clear()
    assert stackable([odd, odd], CPU) == frozenset()
    _batches._gives_same_bits.cache_clear()


def test_matrices_of_a_kind_share_a_batch_up_to_a_limit() -> None:
    a, b = kind(8, 8), kind(4, 4)
    assert in_batches([a, None, b, a, None, b, a]) == [[0, 3, 6], [1], [2, 5], [4]]
    large = kind(256, 256)
    sizes = [len(batch) for batch in in_batches([large] * 130)]
    assert sizes == [64, 64, 2]


def test_a_step_in_batches_has_torchs_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[int] = []

    def counted(each: list[Tensor], same: Kind) -> list[Tensor]:
        stacks.append(len(each))
        return newton_schulz_stacked(each, same)

    monkeypatch.setattr(_muon_rule, "newton_schulz_stacked", counted)
    shapes = [(40, 40), (33, 50), (40, 40), (33, 50), (40, 40), (50, 33)]
    ours = [nn.Parameter(matrices(*shape, 1)[0]) for shape in shapes]
    torchs = [nn.Parameter(param.detach().clone()) for param in ours]
    optimizers = Muon(ours), torch.optim.Muon(torchs)
    for seed in range(3):
        for i, (a, b) in enumerate(zip(ours, torchs, strict=True)):
            grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(10 * seed + i))
            a.grad, b.grad = grad, grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, ours, torchs))
    expected = [
        n for s, n in (((40, 40), 3), ((33, 50), 2)) if kind(*s) in stackable([kind(*s)] * 2, CPU)
    ]
    assert stacks == expected * 3


def test_options_that_change_after_matrices_were_grouped_are_followed() -> None:
    params = [nn.Parameter(matrix) for matrix in matrices(48, 48, 2)]
    groups = [{"params": [param]} for param in params]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    ours, torchs = Muon(groups), torch.optim.Muon([{"params": [param]} for param in twins])
    for steps in (5, 3):
        ours.param_groups[1]["ns_steps"] = torchs.param_groups[1]["ns_steps"] = steps
        for a, b in zip(params, twins, strict=True):
            a.grad = matrices(48, 48, 1)[0]
            b.grad = a.grad.clone()
        ours.step()
        torchs.step()
    assert all(map(torch.equal, params, twins))

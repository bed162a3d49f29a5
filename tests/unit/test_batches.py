"""Small matrices of one shape are computed together, with the bits of one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from adapters import Muon, _batches, _muon_step
from adapters._batches import (
    MIN_SIDE,
    Kind,
    in_batches,
    newton_schulz_stacked,
    stackable,
)
from adapters._newton_schulz import DEFAULT_EPS, DEFAULT_SCHEDULE, newton_schulz, schedule_of
from adapters._plan import MAX_STACKABLE_NUMEL, MAX_STACKED_NUMEL
from adapters._schedules import SCHEDULES, Schedule
from tests.unit.owner_cases import ROWS_ON_TWO, Place, rounds_of

CPU = torch.device("cpu")


def kind(rows: int, cols: int, schedule: Schedule = DEFAULT_SCHEDULE) -> Kind:
    return Kind((rows, cols), schedule, DEFAULT_EPS)


def matrices(rows: int, cols: int, number: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, cols, generator=generator) for _ in range(number)]


TRIED = {
    "default": DEFAULT_SCHEDULE,
    "polar5": SCHEDULES["polar5"],
    "gram": replace(DEFAULT_SCHEDULE, form="gram"),
    "polar5, gram": replace(SCHEDULES["polar5"], form="gram"),
}


@pytest.mark.parametrize("schedule", TRIED.values(), ids=TRIED)
@pytest.mark.parametrize("shape", [(32, 32), (33, 65), (64, 33), (64, 256), (77, 33)], ids=str)
def test_a_stack_has_the_bits_of_each(shape: tuple[int, int], schedule: Schedule) -> None:
    each = matrices(*shape)
    before = [matrix.clone() for matrix in each]
    same = kind(*shape, schedule)
    if same not in stackable([same] * 3, CPU):
        pytest.skip("not on this machine, so it is not done")
    for matrix, update in zip(each, newton_schulz_stacked(torch.stack(each), same), strict=True):
        assert torch.equal(update, newton_schulz(matrix, schedule))
    assert all(map(torch.equal, each, before))


def test_a_zero_matrix_in_a_stack_stays_zero() -> None:
    each = [torch.zeros(4, 6), *matrices(4, 6)]
    assert not newton_schulz_stacked(torch.stack(each), kind(4, 6))[0].any()


def test_only_small_matrices_of_which_there_are_several_are_stacked() -> None:
    rows = MAX_STACKABLE_NUMEL // 64 + 1
    large, tiny = kind(rows, 64), kind(MIN_SIDE - 1, 64)
    kinds = [kind(64, 64), kind(64, 64), kind(40, 40), large, large, tiny, tiny]
    assert stackable(kinds, CPU) <= {kind(64, 64)}
    assert stackable(kinds, torch.device("meta")) == frozenset()


def test_a_stack_is_computed_in_the_form_of_its_kind() -> None:
    each = torch.stack(matrices(8, 32))
    forms = [newton_schulz_stacked(each, kind(8, 32, TRIED[name])) for name in ("default", "gram")]
    assert not any(map(torch.equal, *forms))


def test_two_forms_are_two_kinds() -> None:
    group = {"ns_schedule": "you5", "ns_form": "gram"}
    one, other = kind(64, 256, SCHEDULES["you5"]), kind(64, 256, schedule_of(group))
    assert one != other
    assert in_batches([one, other, one]) == [[0, 2], [1]]
    assert stackable([one, other], CPU) == frozenset()


def test_what_comes_out_otherwise_is_not_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = kind(37, 39)
    monkeypatch.setattr(_batches, "newton_schulz_stacked", lambda matrices, _: matrices.bfloat16())
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

    def counted(each: Tensor, same: Kind) -> Tensor:
        stacks.append(len(each))
        return newton_schulz_stacked(each, same)

    monkeypatch.setattr(_muon_step, "newton_schulz_stacked", counted)
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


def test_small_matrices_of_a_shape_and_an_owner_are_one_task() -> None:
    """Up to what is computed at once; others are alone."""
    large = (MAX_STACKABLE_NUMEL // 4 + 1, 4)
    shapes = [(4, 4), (4, 6), (4, 4), large, large, (4, 4), (6, 4), (4, 6)]
    alone = Place(())  # a single owner
    (round_,) = rounds_of(alone, shapes, with_rows=frozenset((5,)))
    assert [task.positions for task in round_.tasks] == [(0, 2), (1, 7), (3,), (4,), (5,), (6,)]
    most = MAX_STACKED_NUMEL // MAX_STACKABLE_NUMEL
    shapes = [(2, MAX_STACKABLE_NUMEL // 2)] * (2 * most + 1)
    (round_,) = rounds_of(alone, shapes, bucket_bytes=2**30, with_rows=frozenset())
    assert [len(task.positions) for task in round_.tasks] == [most, most, 1]
    (halves,) = rounds_of(ROWS_ON_TWO, [(4, 4)] * 5)
    assert sorted(task.positions for task in halves.tasks) == [(0, 2, 4), (1, 3)]

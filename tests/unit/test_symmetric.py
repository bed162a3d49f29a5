"""Symmetric products, of which one half is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from adapters import _newton_schulz, _symmetric
from adapters._newton_schulz import newton_schulz
from adapters._schedules import DEFAULT_COEFFICIENTS, Form, Schedule

LARGE = [(512, 512), (513, 600), (512, 1030), (700, 520), (1030, 515)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def matrix(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16() / shape[-1]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (257, 40), *LARGE], ids=str)
def test_a_product_in_halves_is_the_whole_product(shape: tuple[int, int]) -> None:
    """Small integers, whose sums are exact in any order."""
    x = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(0)).float()
    gram = _symmetric.gram(x)
    assert torch.equal(gram, x @ x.T)
    squared = _symmetric.add_product(gram, gram, gram, beta=2.0, alpha=-1.0)
    assert torch.equal(squared, 2 * gram - gram @ gram)


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_the_bits_are_those_of_whole_products(
    shape: tuple[int, int], form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Schedule((DEFAULT_COEFFICIENTS,) * 3, form=form)
    found = newton_schulz(matrix(*shape), schedule)
    monkeypatch.setattr(_newton_schulz, "IN_HALVES", _newton_schulz.SINGLE)
    assert torch.equal(found, newton_schulz(matrix(*shape), schedule))


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_the_bits_are_torchs(shape: tuple[int, int]) -> None:
    expected = _zeropower_via_newtonschulz(matrix(*shape), DEFAULT_COEFFICIENTS, 5, 1e-7)
    assert torch.equal(newton_schulz(matrix(*shape)), expected)


def wrong_in_one_sum(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrong(*args: Tensor, **factors: float) -> Tensor:
        found = product(*args, **factors)
        found[-1, 0] += found[-1, 0].abs() * 2**-7  # the last bit
        return found

    return wrong


@pytest.mark.parametrize("name", ["gram", "add_product"])
def test_where_a_trial_finds_other_bits_products_are_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_symmetric, name, wrong_in_one_sum(getattr(_symmetric, name)))
    _symmetric._gives_same_bits.cache_clear()
    assert not _symmetric.pays(matrix(512, 640))
    _symmetric._gives_same_bits.cache_clear()


def test_a_transposed_view_has_a_trial_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def gram(x: Tensor) -> Tensor:
        seen.append(x.stride())
        return x @ x.mT

    monkeypatch.setattr(_symmetric, "gram", gram)
    _symmetric._gives_same_bits.cache_clear()
    for x in (matrix(512, 700), matrix(700, 512).T, matrix(512, 700)):
        _symmetric.pays(x)
    _symmetric._gives_same_bits.cache_clear()
    assert seen == [(700, 1), (1, 512)]


def test_a_transposed_view_needs_both_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step it is contiguous."""
    monkeypatch.setattr(_symmetric, "_gives_same_bits", lambda *args: not args[2])
    assert not _symmetric.pays(matrix(700, 512).T)


def test_products_are_whole_where_halves_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_symmetric, "_gives_same_bits", lambda *args: True)
    assert _symmetric.pays(torch.empty(512, 512))
    assert not _symmetric.pays(torch.empty(511, 4096))
    assert not _symmetric.pays(torch.empty(512, 512, device="meta"))
    torch.set_num_threads(_symmetric.MAX_THREADS + 1)
    assert not _symmetric.pays(torch.empty(512, 512))
    torch.set_num_threads(1)
    compiled = torch.compile(_symmetric.pays, fullgraph=True, backend="eager")
    assert not compiled(torch.empty(512, 512))

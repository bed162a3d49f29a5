"""Gefen on one process: the reference's values, torch's manners, and about a byte of state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import Gefen
from adapters._codebook import dequantize
from adapters._gefen_rule import GefenRule
from adapters._quantized import QuantizedOptimizer
from tests.unit.test_codebook import floats, golden

INPUTS = golden("inputs")["params"]
# Below 256 elements, where a codebook takes no time to learn.
SHAPES = ((8, 12), (5, 6), (2, 3, 4), (7,), ())


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def named(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"layer.{i}", nn.Parameter(random_tensor(*shape, seed=i, dtype=dtype)))
        for i, shape in enumerate(shapes)
    ]


def params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_gradients(
    optimizer: torch.optim.Optimizer, seed: int, *, scale: float = 1.0, skip: Sequence[int] = ()
) -> None:
    for i, param in enumerate(params_of(optimizer)):
        grad = scale * random_tensor(*param.shape, seed=100 * seed + i)
        param.grad = None if i in skip else grad.to(param.dtype)


def train(optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    for seed in seeds:
        set_gradients(optimizer, seed)
        optimizer.step()


def snapshot(optimizer: QuantizedOptimizer) -> dict[str, Any]:
    """All that a step may write."""
    found: dict[str, Any] = {}
    for position, _, param, _ in optimizer._members():
        found[f"parameter {position}"] = param
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{key} {position}"] = value
    for i, rule in enumerate(optimizer._rules):
        if rule.momenta is not None:
            found |= {f"rule {i}, {key}": value for key, value in rule.momenta.record().items()}
    tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
    return {**found, **{key: value.detach().clone() for key, value in tensors.items()}}


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """What is not equal bit for bit."""
    return [key for key in {**left, **right} if not same(left.get(key), right.get(key))]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return bool(type(left) is type(right) and left == right)


# ---- the reference ----


def golden_params(names: Sequence[str]) -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(floats(INPUTS[name]["init"], INPUTS[name]["shape"])) for name in names
    }


def replay(
    optimizer: QuantizedOptimizer,
    params: dict[str, nn.Parameter],
    case: dict[str, Any],
    check: Callable[[str, Tensor, Tensor], None],
) -> None:
    """Five steps on the reference's gradients; ``check`` compares a named value with its own."""
    for step in range(1, 6):
        for name, param in params.items():
            param.grad = floats(INPUTS[name]["grads"][step - 1], INPUTS[name]["shape"])
        optimizer.step()
        expected = case.get(f"after_{step}")
        if expected is None:
            continue
        for name, param in params.items():
            assert_state(optimizer.state[param], expected["state"][name], check)
            wanted = floats(expected["params"][name], param.shape)
            check(f"{name} after {step}", param.detach(), wanted)
        books = [rule.momenta for rule in optimizer._rules if rule.momenta is not None]
        for momenta, levels in zip(books, expected["codebook"].values(), strict=True):
            assert momenta.codebook is not None
            assert torch.equal(momenta.codebook.levels, floats(levels))
            assert momenta.num_steps == step


def assert_state(
    state: dict[str, Any], expected: dict[str, Any], check: Callable[[str, Tensor, Tensor], None]
) -> None:
    assert set(state) == set(expected) - {"name"}
    for key, value in state.items():
        wanted = expected[key]
        if isinstance(wanted, int):
            assert value == wanted, key
        elif "ints" in wanted:
            assert value.dtype == torch.uint8
            assert value.flatten().tolist() == wanted["ints"], key
        else:
            check(key, value.flatten(), floats(wanted["hex"]))


def cases(name: str) -> list[Any]:
    found = golden(name)["cases"]
    return [pytest.param(found[case], id=f"{name}-{case}") for case in found]


def equal_but_for_two_roots(what: str, actual: Tensor, expected: Tensor) -> None:
    # Made with MKL's root, which rounds what is close to a tie in its own way.
    assert (actual != expected).sum() <= (2 if what == "lin16x24.weight after 5" else 0), what
    torch.testing.assert_close(actual, expected, rtol=2**-22, atol=2**-28)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("gefen_factored") + cases("gefen_block"))
def test_five_steps_are_the_reference(case: dict[str, Any]) -> None:
    params = golden_params(case["param_order"])
    optimizer = Gefen(list(params.items()), **case["kwargs"])
    replay(optimizer, params, case, equal_but_for_two_roots)


# ---- what users give ----


def test_the_arguments_are_those_of_the_reference() -> None:
    signature = inspect.signature(Gefen).parameters.values()
    assert [(each.name, each.default) for each in signature][1:] == [
        ("lr", 1e-3),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-8),
        ("weight_decay", 0.0),
        ("force_1d_period_one", False),
        ("force_2d_period_one", False),
        ("period_one_substrings", ()),
        ("factored_v_2d", True),
        ("codebook_refresh_every", 0),
        ("codebook_scope", "auto"),
        ("first_gradient", "raise"),
        ("control_group", None),
    ]
    assert [each.name for each in signature if each.kind is not each.KEYWORD_ONLY] == [
        *("params", "lr", "betas", "eps", "weight_decay")
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "lr: Learning rate should be >= 0 and finite but is: -1.0"),
        ({"lr": torch.ones(2)}, "lr: Tensor lr must be 1-element"),
        ({"betas": (0.9, 1.0)}, "betas: Input should be less than 1, got 1.0"),
        ({"betas": (-0.1, 0.9)}, "betas: Input should be greater than or equal to 0, got -0.1"),
        ({"betas": (0.9,)}, "betas: Field required"),
        ({"eps": 0.0}, "eps: Input should be greater than 0, got 0.0"),
        ({"eps": float("inf")}, "eps: Input should be a finite number"),
        ({"weight_decay": -0.1}, "weight_decay: weight decay should be >= 0 but is: -0.1"),
        ({"factored_v_2d": 1}, "factored_v_2d: Input should be a valid boolean, got 1"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^Gefen: {text}"):
        Gefen(named(), **options)
    optimizer = Gefen(named(SHAPES[:1]))
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=f"^parameter group 1: {text}"):
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(2)))], **options})
    assert optimizer.param_groups == before


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"codebook_refresh_every": -1}, ValueError, "codebook_refresh_every must be a number"),
        ({"codebook_refresh_every": True}, ValueError, "codebook_refresh_every must be a number"),
        ({"codebook_refresh_every": 2.0}, ValueError, "codebook_refresh_every must be a number"),
        ({"first_gradient": "skip"}, ValueError, 'must be "raise" or "defer", but is: \'skip\''),
        (
            {"period_one_substrings": "norm"},
            TypeError,
            "period_one_substrings must be several strings",
        ),
    ],
    ids=str,
)
def test_an_option_of_the_optimizer_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Gefen(named(), **options)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64], ids=str)
def test_a_parameter_that_is_not_real_is_refused_by_name(dtype: torch.dtype) -> None:
    wrong = nn.Parameter(torch.zeros(2, 2, dtype=dtype), requires_grad=False)
    with pytest.raises(ValueError, match=rf"real floating-point.*head\.weight is {dtype}"):
        Gefen([("head.weight", wrong)])
    optimizer = Gefen(named())
    with pytest.raises(ValueError, match=r"head\.weight"):
        optimizer.add_param_group({"params": [("head.weight", wrong)]})
    assert len(optimizer.param_groups) == 1


def test_a_parameter_of_another_group_is_refused() -> None:
    pairs = named()
    optimizer = Gefen(pairs)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": pairs[:1]})
    assert len(optimizer.param_groups) == 1


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        Gefen([])


def test_groups_have_options_of_their_own() -> None:
    def stepped(params: Any, **options: Any) -> list[nn.Parameter]:
        optimizer = Gefen(params, **options)
        train(optimizer, 1, 2)
        return params_of(optimizer)

    pairs = named(((8, 12), (8, 12)))
    hot: dict[str, Any] = {"lr": 0.1, "betas": [0.5, 0.6], "weight_decay": 0.1, "eps": 1e-3}
    hot["factored_v_2d"] = False
    cold = named(((8, 12), (8, 12)))
    expected = stepped(cold, lr=0.01)[0], stepped(named(((8, 12), (8, 12))), **hot)[1]
    found = stepped([{"params": pairs[:1]}, {"params": pairs[1:], **hot}], lr=0.01)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("options", "ones"),
    [
        ({}, [4]),
        ({"force_1d_period_one": True}, [3, 4]),
        ({"force_2d_period_one": True}, [0, 1, 4]),
        ({"period_one_substrings": ["R.2", "r.1"]}, [1, 2, 4]),
    ],
    ids=str,
)
def test_some_parameters_get_a_magnitude_for_each_element(
    options: dict[str, Any], ones: list[int]
) -> None:
    shapes = (*SHAPES[:3], (11,), ())
    optimizer = Gefen(named(shapes), **options)
    train(optimizer, 1)
    states = [optimizer.state[param] for param in params_of(optimizer)]
    assert [i for i, state in enumerate(states) if state["automatic_period"] == 1] == ones
    for i in ones:
        assert states[i]["m_magnitude"].numel() == params_of(optimizer)[i].numel()


# ---- state ----


def second_moments(optimizer: Gefen) -> list[set[str]]:
    keys = {"vmean", "v_row", "v_col"}
    return [keys & set(optimizer.state[param]) for param in params_of(optimizer)]


def test_only_matrices_are_factored() -> None:
    factored, block = Gefen(named()), Gefen(named(), factored_v_2d=False)
    train(factored, 1)
    train(block, 1)
    assert second_moments(factored) == [{"v_row", "v_col"}] * 2 + [{"vmean"}] * 3
    assert second_moments(block) == [{"vmean"}] * 5


@pytest.mark.parametrize("factored", [True, False], ids=["then factored", "then block"])
def test_another_second_moment_begins_anew_and_the_old_one_stays(factored: bool) -> None:
    optimizer = Gefen(named(((8, 12),)), lr=0.01, factored_v_2d=not factored)
    train(optimizer, 1, 2, 3)
    (param,) = params_of(optimizer)
    state, before = optimizer.state[param], snapshot(optimizer)
    optimizer.param_groups[0]["factored_v_2d"] = factored
    train(optimizer, 4)
    ages = (state["step"], state["factored_step"], state["vmean_step"])
    assert ages == ((4, 1, 3) if factored else (4, 3, 1))
    for key in ("vmean",) if factored else ("v_row", "v_col"):
        assert same(state[key], before[f"{key} 0"])
    assert param.grad is not None
    squares = param.grad.square()
    second = squares.view(-1, state["automatic_period"]).mean(1, keepdim=True)
    second = second.expand(-1, state["automatic_period"]).reshape(8, 12)
    if factored:
        second = torch.outer(squares.mean(1), squares.mean(0)) / squares.mean()
    (rule,) = optimizer._rules
    assert isinstance(rule, GefenRule)
    assert rule.momenta.codebook is not None
    momentum = dequantize(state["m_codebook"], rule.momenta.codebook)
    momentum = momentum.view(-1, state["automatic_period"]) * state["m_magnitude"].view(-1, 1)
    update = 0.01 * momentum.view(8, 12) / (second.sqrt() + 1e-8) / (1 - 0.9**4)
    torch.testing.assert_close(param.detach(), before["parameter 0"] - update)


def state_bytes(optimizer: torch.optim.Optimizer, param: Tensor) -> int:
    values = optimizer.state[param].values()
    return sum(each.numel() * each.element_size() for each in values if isinstance(each, Tensor))


@pytest.mark.slow
@pytest.mark.parametrize(("factored", "most"), [(True, 1.01), (False, 1.008)])
def test_a_parameter_takes_about_a_byte_of_state(factored: bool, most: float) -> None:
    optimizer = Gefen(named(((1024, 1024),)), factored_v_2d=factored)
    train(optimizer, 1)
    (param,) = params_of(optimizer)
    assert 1 < state_bytes(optimizer, param) / param.numel() <= most


def test_a_late_parameter_takes_the_codebook_over_and_finds_its_own_period() -> None:
    optimizer = Gefen(named(((8, 12),)), lr=0.01)
    train(optimizer, 1)
    before = snapshot(optimizer)
    late = nn.Parameter(random_tensor(6, 16, seed=5))
    optimizer.add_param_group({"params": [("late", late)], "lr": 0.02})
    assert differences(before, snapshot(optimizer)) == ["parameter 1"]
    blocks = random_tensor(12, seed=6).exp().repeat_interleave(8).view(6, 16)
    optimizer.zero_grad()
    late.grad = random_tensor(6, 16, seed=7).sign() * blocks
    optimizer.step()
    assert optimizer.state[late]["automatic_period"] == 8
    assert optimizer.state[late]["step"] == 1
    after = snapshot(optimizer)
    assert same(before["rule 0, codebook"], after["rule 0, codebook"])
    (rule,) = optimizer._rules
    assert isinstance(rule, GefenRule)
    assert rule.momenta.num_steps == 2

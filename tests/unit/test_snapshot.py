"""What a snapshot sees and what it leaves alone. Its DTensor side is in tests/threaded."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from consensus.testing._snapshot import assert_unchanged, snapshot


def optimizer_after_a_step() -> torch.optim.SGD:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return optimizer


def weight(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    parameter = optimizer.param_groups[0]["params"][0]
    assert isinstance(parameter, torch.Tensor)
    return parameter


def state(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.state[weight(optimizer)]


def gradient(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    found = weight(optimizer).grad
    assert found is not None
    return found


def change(optimizer: torch.optim.Optimizer, before: Any = None) -> list[str]:
    """What assert_unchanged says, line by line, without its heading."""
    with pytest.raises(AssertionError, match=r"^changed since the snapshot:") as caught:
        assert_unchanged(optimizer, before)
    return str(caught.value).splitlines()[1:]


def test_an_untouched_optimizer_is_unchanged() -> None:
    optimizer = optimizer_after_a_step()
    before = snapshot(optimizer)
    assert_unchanged(optimizer, before)


def test_a_snapshot_makes_no_state_and_moves_no_generator() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    snapshot(optimizer)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_a_step_changes_parameters_and_state_but_not_gradients() -> None:
    optimizer = optimizer_after_a_step()
    before = snapshot(optimizer)
    optimizer.step()
    assert change(optimizer, before) == [
        "parameter[weight] changed at 8 of 8 elements",
        "parameter[bias] changed at 2 of 2 elements",
        "state[weight].momentum_buffer changed at 8 of 8 elements",
        "state[bias].momentum_buffer changed at 2 of 2 elements",
    ]


@torch.no_grad()
def write_one(tensor: torch.Tensor, value: float) -> None:
    tensor.view(-1)[0] = value


CHANGES: dict[str, tuple[Callable[[torch.optim.Optimizer], object], str]] = {
    "value": (
        lambda o: write_one(weight(o), 5.0),
        "parameter[weight] changed at 1 of 8 elements",
    ),
    "gradient": (
        lambda o: write_one(gradient(o), float("nan")),
        "gradient[weight] changed at 1 of 8 elements",
    ),
    "gradient gone": (
        lambda o: setattr(weight(o), "grad", None),
        "gradient[weight] disappeared",
    ),
    "state": (
        lambda o: write_one(state(o)["momentum_buffer"], 5.0),
        "state[weight].momentum_buffer changed at 1 of 8 elements",
    ),
    "state entry": (
        lambda o: state(o).update(step=1),
        "state[weight].step appeared",
    ),
    "dtype": (
        lambda o: state(o).update(momentum_buffer=state(o)["momentum_buffer"].double()),
        "state[weight].momentum_buffer changed its dtype from torch.float32 to torch.float64",
    ),
    "stride": (
        lambda o: state(o).update(momentum_buffer=state(o)["momentum_buffer"].T.contiguous().T),
        "state[weight].momentum_buffer changed its stride from (4, 1) to (1, 2)",
    ),
    "tensor to number": (
        lambda o: state(o).update(momentum_buffer=0.0),
        "state[weight].momentum_buffer changed between a tensor and another value",
    ),
    "rate": (
        lambda o: o.param_groups[0].update(lr=0.2),
        "param_groups[0].lr changed from 0.1 to 0.2",
    ),
    "type of a number": (
        lambda o: o.param_groups[0].update(dampening=0.0),
        "param_groups[0].dampening changed from 0 to 0.0",
    ),
    "swap": (
        lambda o: o.param_groups[0]["params"].__setitem__(0, weight(o).detach().clone()),
        "parameter[weight] is another tensor",
    ),
    "requires_grad": (
        lambda o: weight(o).requires_grad_(False),
        "parameter[weight] changed its requires_grad from True to False",
    ),
    "python generator": (lambda _: random.random(), "rng.python changed from"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name: str) -> None:
    act, expected = CHANGES[name]
    optimizer = optimizer_after_a_step()
    before = snapshot(optimizer)
    act(optimizer)
    assert change(optimizer, before)[0].startswith(expected)


def test_a_drawn_random_number_is_a_change() -> None:
    optimizer = optimizer_after_a_step()
    before = snapshot(optimizer)
    torch.rand(1)
    assert change(optimizer, before)[0].startswith("rng.torch changed at")


def test_gradients_can_be_left_out() -> None:
    optimizer = optimizer_after_a_step()
    before = snapshot(optimizer, gradients=False)
    optimizer.zero_grad()
    assert_unchanged(optimizer, before)


def test_equal_nans_are_equal_and_zeros_of_two_signs_are_not() -> None:
    parameter = torch.nn.Parameter(torch.tensor([float("nan"), 0.0]))
    optimizer = torch.optim.SGD([parameter], lr=float("nan"))
    before = snapshot(optimizer)
    optimizer.param_groups[0]["lr"] = float("nan")
    assert_unchanged(optimizer, before)
    parameter.data.neg_().neg_()
    assert_unchanged(optimizer, before)
    parameter.data[1] = -0.0
    assert change(optimizer, before) == ["parameter[group0[0]] changed at 1 of 2 elements"]


@dataclass
class Codebook:
    levels: torch.Tensor
    period: int


def test_nested_state_is_followed_to_its_leaves() -> None:
    optimizer = optimizer_after_a_step()
    book = Codebook(torch.zeros(3), period=4)
    state(optimizer)["inner"] = {"pair": [torch.zeros(2), (1, book)], 7: None}
    before = snapshot(optimizer)
    assert_unchanged(optimizer, before)
    write_one(book.levels, 1.0)
    book.period = 5
    assert change(optimizer, before) == [
        "state[weight].inner.pair[1][1].levels changed at 1 of 3 elements",
        "state[weight].inner.pair[1][1].period changed from 4 to 5",
    ]


# Each makes a tensor that holds the number somewhere.
KINDS: dict[str, Callable[[float], torch.Tensor]] = {
    "scalar": lambda x: torch.tensor(x),
    "bfloat16": lambda x: torch.tensor([0.0, x], dtype=torch.bfloat16),
    "float8": lambda x: torch.tensor([0.0, x]).to(torch.float8_e4m3fn),
    "bool": lambda x: torch.tensor([False, bool(x)]),
    "conjugate": lambda x: torch.tensor([1j, x * 1j]).conj(),
    "transposed": lambda x: torch.tensor([[0.0, 0.0, x]]).T,
    "expanded": lambda x: torch.tensor([x]).expand(4),
    "sparse": lambda x: torch.tensor([0.0, x + 1]).to_sparse(),
    "csr": lambda x: torch.sparse_csr_tensor([0, 1], [0], [x], (1, 2), check_invariants=True),
    "csc": lambda x: torch.sparse_csc_tensor([0, 1, 1], [0], [x], (1, 2), check_invariants=True),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch calls CSR a beta
@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_tensor_can_be_state(kind: str) -> None:
    optimizer = optimizer_after_a_step()
    state(optimizer)["extra"] = KINDS[kind](0.0)
    before = snapshot(optimizer)
    state(optimizer)["extra"] = KINDS[kind](0.0)
    assert_unchanged(optimizer, before)
    state(optimizer)["extra"] = KINDS[kind](1.0)
    assert "changed at" in change(optimizer, before)[0]


@pytest.mark.parametrize("empty", [torch.empty(0, 4), torch.empty(3, device="meta")])
def test_a_tensor_without_bytes_is_compared_by_its_description(empty: torch.Tensor) -> None:
    optimizer = optimizer_after_a_step()
    state(optimizer)["extra"] = empty
    before = snapshot(optimizer)
    assert_unchanged(optimizer, before)
    state(optimizer)["extra"] = empty.double()
    assert change(optimizer, before) == [
        "state[weight].extra changed its dtype from torch.float32 to torch.float64"
    ]


def test_what_cannot_be_pickled_is_compared_by_identity() -> None:
    optimizer = optimizer_after_a_step()
    optimizer.param_groups[0]["lock"] = threading.Lock()
    before = snapshot(optimizer)
    assert_unchanged(optimizer, before)
    old, optimizer.param_groups[0]["lock"] = optimizer.param_groups[0]["lock"], threading.Lock()
    assert change(optimizer, before)[0].startswith("param_groups[0].lock changed")
    del old


def test_equal_names_in_two_groups_are_told_apart() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups = [{"params": [("w", first)]}, {"params": [("w", second)]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    before = snapshot(optimizer)
    write_one(second, 1.0)
    assert change(optimizer, before) == ["parameter[w of group1[0]] changed at 1 of 2 elements"]


def test_a_long_list_of_changes_is_cut() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(30)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    before = snapshot(optimizer)
    for parameter in parameters:
        write_one(parameter, 1.0)
    lines = change(optimizer, before)
    assert lines[0] == "parameter[group0[0]] changed at 1 of 1 elements"
    assert lines[-1] == "... and 10 more"
    assert len(lines) == 21

"""A step in a CUDA graph, where nothing is distributed: what it stands on, and its replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import consensus
from consensus import _capture
from consensus.vote import Fact
from tests.unit.capture_cases import FakeGraph, NothingIsRead, Voting, capture, refused


def optimizer_of(**options: Any) -> tuple[Voting, nn.Parameter]:
    param = nn.Parameter(torch.ones(2, 3))
    param.grad = torch.ones(2, 3)
    return Voting([("weight", param)], **{"lr": 0.1, "momentum": 0.9, **options}), param


def captured() -> tuple[Voting, nn.Parameter]:
    """Return an optimizer after a warm-up step and one in a capture."""
    optimizer, param = optimizer_of()
    optimizer.step()
    with capture():
        optimizer.step()
    return optimizer, param


def test_nothing_is_captured_where_there_is_no_gpu() -> None:
    assert not _capture.is_capturing()


def test_a_capture_without_a_warm_up_step_is_refused_and_says_what_to_do() -> None:
    optimizer, param = optimizer_of()
    with capture():
        said = refused(RuntimeError, optimizer.step)
    assert "Voting.step: expected an agreed step of this optimizer before its capture" in said
    assert "Make at least one step outside of the capture, on a side stream" in said
    assert torch.equal(param, torch.ones(2, 3))


def test_a_failed_step_is_no_warm_up() -> None:
    optimizer, _ = optimizer_of()

    def fail() -> float:
        raise ValueError("a closure that fails")

    refused(ValueError, lambda: optimizer.step(fail))
    with capture():
        assert "there was none" in refused(RuntimeError, optimizer.step)


def test_a_step_after_a_warm_up_is_captured_and_hands_out_what_is_decided_on_the_device() -> None:
    optimizer, _ = optimizer_of()
    optimizer.step()
    assert not optimizer.vote.capturing
    optimizer.stop = 3.0
    found_inf, grad_scale = torch.ones(1), torch.tensor(3.0)
    optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale  # type: ignore[attr-defined]
    with capture():
        optimizer.step()
    vote = optimizer.vote
    assert vote.capturing
    assert not vote.skip  # the host does not know
    assert vote.inv_scale is None
    assert vote.found_inf is found_inf
    assert vote.inv_scale_tensor is not None
    assert vote.ranges.maximum == (3.0,)
    optimizer.step()  # outside: read, with the same bits
    assert optimizer.vote.skip
    assert optimizer.vote.inv_scale == float(vote.inv_scale_tensor)


@pytest.mark.parametrize(("name", "value"), [("found_inf", 0.0), ("grad_scale", torch.ones(2))])
def test_amp_controls_must_be_tensors_of_one_element(name: str, value: object) -> None:
    optimizer, _ = optimizer_of()
    optimizer.step()
    setattr(optimizer, name, value)
    with capture():
        said = refused(ValueError, optimizer.step)
    assert f"expected {name} to be a one-element tensor under capture; got" in said


@pytest.mark.parametrize(
    "read",
    [
        lambda flag, x: x if flag else flag,
        lambda flag, x: x.add_(x, alpha=flag),
        lambda flag, x: x.mul_(float(flag)),
        lambda flag, x: torch.equal(flag, x),
    ],
)
def test_the_tests_see_a_read_on_the_host(read: Callable[..., object]) -> None:
    flag, x = torch.zeros(()), torch.ones(2)
    with NothingIsRead(), pytest.raises(AssertionError, match="reads on the host"):
        read(flag, x)


def test_an_error_inside_comes_as_it_is() -> None:
    optimizer, _ = optimizer_of()
    optimizer.step()

    def fail() -> float:
        raise KeyError("gone")

    with capture():
        assert "gone" in refused(KeyError, lambda: optimizer.step(fail))


# ---- replays ----


def test_a_replay_runs_while_nothing_has_changed() -> None:
    optimizer, _ = captured()
    graph = FakeGraph()
    step = consensus.CapturedStep(graph, optimizer)
    step.replay()
    step.replay()
    assert graph.replays == 2


def set_lr(optimizer: Voting, param: nn.Parameter) -> None:
    optimizer.param_groups[0]["lr"] = 0.3


def rebind(optimizer: Voting, param: nn.Parameter) -> None:
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(2, 3))


def drop_gradient(optimizer: Voting, param: nn.Parameter) -> None:
    optimizer.zero_grad()


def new_gradient(optimizer: Voting, param: nn.Parameter) -> None:
    param.grad = torch.ones(2, 3)


def move_parameter(optimizer: Voting, param: nn.Parameter) -> None:
    param.data = torch.ones(2, 3)


def load(optimizer: Voting, param: nn.Parameter) -> None:
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = torch.zeros(2, 3)
    optimizer.load_state_dict(state)


def add_group(optimizer: Voting, param: nn.Parameter) -> None:
    optimizer.add_param_group({"params": [("bias", nn.Parameter(torch.ones(2)))]})


def drop_state(optimizer: Voting, param: nn.Parameter) -> None:
    optimizer.state.clear()


def add_option(optimizer: Voting, param: nn.Parameter) -> None:
    optimizer.param_groups[0]["initial_lr"] = 0.1


CHANGES: dict[str, tuple[Callable[[Voting, nn.Parameter], None], str]] = {
    "lr": (set_lr, "lr of group 0 was 0.1 when captured, is 0.3"),
    "parameter": (rebind, "weight is another tensor than was captured"),
    "no gradient": (drop_gradient, "gradient of weight is no longer there"),
    "gradient": (new_gradient, "gradient of weight has moved to other memory"),
    "memory": (move_parameter, "weight has moved to other memory"),
    "state": (load, "state momentum_buffer of weight has moved to other memory"),
    "no state": (drop_state, "state momentum_buffer of weight is no longer there"),
    "group": (add_group, "1 parameters were captured, there are 2"),
    "option": (add_option, "initial_lr of group 0 was not set when captured, is 0.1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_replay_after_a_change_is_refused_and_says_what_has_changed(name: str) -> None:
    change, says = CHANGES[name]
    optimizer, param = captured()
    graph = FakeGraph()
    kept = param.grad  # so that new tensors have other addresses
    step = consensus.CapturedStep(graph, optimizer)
    change(optimizer, param)
    said = refused(RuntimeError, step.replay)
    assert says in said
    assert "Nothing was replayed. Undo it, or capture again." in said
    assert graph.replays == 0
    del kept


def test_a_change_that_is_undone_can_be_replayed() -> None:
    optimizer, param = captured()
    graph = FakeGraph()
    step = consensus.CapturedStep(graph, optimizer)
    set_lr(optimizer, param)
    refused(RuntimeError, step.replay)
    optimizer.param_groups[0]["lr"] = 0.1
    step.replay()
    assert graph.replays == 1


def test_what_counts_is_what_the_captured_step_held_not_what_is_there_when_it_is_wrapped() -> None:
    optimizer, param = captured()
    set_lr(optimizer, param)
    step = consensus.CapturedStep(FakeGraph(), optimizer)
    assert "lr of group 0 was 0.1 when captured, is 0.3" in refused(RuntimeError, step.replay)


def test_several_optimizers_are_told_apart() -> None:
    (first, _), (second, param) = captured(), captured()
    step = consensus.CapturedStep(FakeGraph(), [first, second])
    set_lr(second, param)
    said = refused(RuntimeError, step.replay)
    assert "Voting, number 1: lr of group 0" in said
    assert "number 0" not in said


def test_an_optimizer_that_does_not_vote_is_taken_as_it_is_when_wrapped() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    graph = FakeGraph()
    step = consensus.CapturedStep(graph, optimizer)
    step.replay()
    optimizer.param_groups[0]["lr"] = 0.2
    assert "lr of group 0" in refused(RuntimeError, step.replay)
    assert graph.replays == 1


def test_a_graph_without_optimizers_is_refused() -> None:
    with pytest.raises(ValueError, match="got none"):
        consensus.CapturedStep(FakeGraph(), [])


# ---- facts ----


def fact(name: str, value: str) -> Fact:
    return Fact(name, value.encode(), lambda: {"": value})


def test_facts_that_changed_came_or_went_are_named_and_moving_ones_are_not() -> None:
    then = [fact("a", "1"), fact("b", "1"), fact("c", "1"), fact("step", "1")]
    now = [fact("a", "1"), fact("b", "2"), fact("d", "1"), fact("step", "2")]
    assert _capture.changed_facts(then, now, moving={"step"}) == [
        "b: was 1, is 2",
        "c: not brought now",
        "d: not agreed on yet",
    ]


def test_gradients_are_told_by_what_was_agreed_then() -> None:
    def items() -> dict[str, str]:
        return {"up": "missing", "down": "present", "gate": "present as torch.bfloat16"}

    then, now = Fact("gradients", b"\1\1\1", items), Fact("gradients", b"\0\1\3", items)
    assert _capture.changed_facts([then], [now], moving=()) == [
        "gradients: up was present, is missing",
        "gradients: gate was present, is present in another dtype (3)",
    ]


def test_of_amp_only_what_is_set_is_compared() -> None:
    def amp(**values: str) -> Fact:
        return Fact("AMP", str(values).encode(), lambda: values)

    then = amp(found_inf="False", grad_scale="8.0")
    assert not _capture.changed_facts(
        [then], [amp(found_inf="present", grad_scale="present")], moving=()
    )
    assert _capture.changed_facts(
        [then], [amp(found_inf="present", grad_scale="absent")], moving=()
    ) == ["AMP: grad_scale was present, is absent"]

"""What goes wrong while codebooks are learned goes wrong on all ranks and leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import consensus
from adapters import _learning
from adapters._base import VotingOptimizer
from adapters._codebook import make_codebook
from adapters.gefen import Gefen
from consensus.testing import run_ranks
from tests.gloo._cases import DATA_PLANE_S, LIVENESS_S, Met, caught, on_ranks
from tests.gloo.step_cases import (
    MATRICES,
    OTHERS,
    Pair,
    changes,
    give_gradients,
    kind_of,
    learned,
    members,
    met_in,
    parameters,
)

pytestmark = pytest.mark.slow

KINDS = ("Hybrid, backup Gefen", "Hybrid, only Gefen sharded")
# Functions that the ranks call on their own between what they combine, in the order of the stages.
STAGES = (
    "largest_square",
    "choose_exponent",
    "plan_search",
    "add_sums_",
    "make_grid",
    "to_rows",
    "block_maxima",
    "block_histogram",
    "is_degenerate",
    "learn_levels",
    "make_codebook",
    "digest_of",
)
REFRESH = ("largest_square", "block_maxima", "block_histogram", "learn_levels", "reindex")
OUTSIDE = ("gradient_of", "period_of")


def whole_world() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@contextmanager
def failing(stage: str, *, odd: bool, error: type[BaseException]) -> Iterator[None]:
    """Let one function of the lesson raise on this rank, if it is the odd one."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error(stage)

    with pytest.MonkeyPatch.context() as patch:
        if odd:
            patch.setattr(_learning, stage, fail)
        yield


def fail_at(pair: Pair, stage: str, *, odd: bool, error: type[BaseException] = MemoryError) -> Met:
    with failing(stage, odd=odd, error=error):
        return met_in(pair.optimizer, pair.optimizer.step)


def trace(met: Met, *says: str) -> list[str]:
    """Return what is wrong with a lesson that failed on one rank."""
    found = [f"{part!r} not in {met.text}" for part in says if part not in met.text]
    return [*found, *filter(None, [met.changed, *met.left])]


def each_stage(rank: int, name: str) -> dict[str, tuple[str, list[str]]]:
    """Fail at each stage on the last rank; then retry with the same gradients."""
    mesh, found = whole_world(), {}
    last = dist.get_world_size() - 1
    for stage in STAGES:
        pair = Pair.of(kind_of(name), mesh)
        pair.give_gradients()
        met = fail_at(pair, stage, odd=rank == last)
        wrong = trace(met, "GroupFailure", f"rank {last}: MemoryError: {stage}", "learns")
        retried = caught(pair.step)
        wrong += [repr(retried)] if retried else pair.differences()
        found[stage] = met.text, wrong
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_a_stage_that_fails_on_one_rank_fails_on_all_and_can_be_retried(
    name: str, world_size: int
) -> None:
    by_rank = on_ranks(each_stage, world_size, name)
    for stage in STAGES:
        assert len({found[stage][0] for found in by_rank}) == 1
        assert [found[stage][1] for found in by_rank] == [[]] * world_size, stage


def outside(rank: int, stage: str) -> tuple[str, list[str]]:
    pair = Pair.of(kind_of(KINDS[0]), whole_world())
    pair.give_gradients()
    met = fail_at(pair, stage, odd=rank == 1)
    return met.text, trace(met, "GroupFailure", f"rank 1: MemoryError: {stage}")


@pytest.mark.parametrize("stage", OUTSIDE)
def test_a_stage_between_two_agreements_fails_on_all_too(stage: str) -> None:
    (first, wrong), (second, also_wrong) = on_ranks(outside, 2, stage)
    assert first == second
    assert (wrong, also_wrong) == ([], [])


def refreshing(mesh: DeviceMesh) -> Pair:
    """Gefen that learns its codebook anew in each second step."""

    def make() -> Gefen:
        params = {**parameters(MATRICES, mesh), **parameters(OTHERS, mesh)}
        return Gefen(params.items(), lr=0.02, codebook_refresh_every=2)

    return Pair(make(), make())


def each_refresh(rank: int) -> dict[str, tuple[str, list[str], bool]]:
    mesh, found = whole_world(), {}
    for stage in REFRESH:
        pair = refreshing(mesh)
        pair.healthy_step()
        pair.healthy_step()
        pair.give_gradients()
        met = fail_at(pair, stage, odd=rank == 1)
        wrong = trace(met, "GroupFailure", f"rank 1: MemoryError: {stage}")
        before = learned(pair.optimizer)
        retried = caught(pair.step)
        wrong += [repr(retried)] if retried else pair.differences()
        found[stage] = (
            met.text,
            wrong,
            "codebook of rule 0" in changes(before, learned(pair.optimizer)),
        )
    return found


def test_a_refresh_that_fails_on_one_rank_leaves_the_old_codebook_and_indices_on_all() -> None:
    first, second = on_ranks(each_refresh, 2)
    assert first == second
    for stage, (_, wrong, refreshed) in first.items():
        assert wrong == [], stage
        assert refreshed, stage


# ---- a rank that leaves while others learn ----


def interrupted(rank: int, where: str) -> list[str]:
    """Rank 1 is interrupted by the keyboard; return what each met, and what came next."""
    pair = Pair.of(kind_of(KINDS[0]), whole_world())
    pair.give_gradients()

    def closure() -> float:
        if rank == 1:
            raise KeyboardInterrupt
        return 1.0

    if where == "closure":
        met = met_in(pair.optimizer, lambda: pair.optimizer.step(closure))
    else:
        met = fail_at(pair, where, odd=rank == 1, error=KeyboardInterrupt)
    assert (met.changed, met.left) == ("", ())
    fatal = isinstance(met.error, consensus.GroupFailure) and met.error.fatal
    return [type(met.error).__name__, str(fatal), f"{caught(pair.optimizer.step)}"]


@pytest.mark.parametrize("where", ["closure", "add_sums_", "learn_levels"])
def test_an_interrupt_is_told_to_the_peers_and_the_group_is_closed(where: str) -> None:
    peer, itself = on_ranks(interrupted, 2, where)
    assert peer[:2] == ["GroupFailure", "True"]
    assert itself[:2] == ["KeyboardInterrupt", "False"]
    for *_, later in (peer, itself):
        assert "closed" in later  # at once: nobody waits for somebody who has left


def killed(rank: int, stage: str) -> tuple[str, str]:
    """Rank 1 ends as a killed process does."""

    def leave(*_: Any, **__: Any) -> NoReturn:
        os._exit(3)

    pair = Pair.of(kind_of(KINDS[0]), whole_world())
    pair.give_gradients()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(_learning, stage, leave)
        met = met_in(pair.optimizer, pair.optimizer.step)
    return type(met.error).__name__, met.changed


@pytest.mark.parametrize("stage", ["add_sums_", "period_of", "block_histogram", "learn_levels"])
def test_a_rank_that_is_killed_while_it_learns_leaves_nothing_learned(stage: str) -> None:
    ranks = run_ranks(killed, 3, stage, timeout=LIVENESS_S, group_timeout=DATA_PLANE_S)
    assert [each.exitcode for each in ranks][1] == 3
    for each in (ranks[0], ranks[2]):
        assert each.value is not None, ranks.report()
        kind, changed = each.value
        assert kind in ("LateRanks", "RuntimeError")  # of the vote, or of the data plane
        assert changed == ""


# ---- gradients from which nothing can be learned ----

Spoil = Callable[[int, VotingOptimizer], None]


def fill(optimizer: VotingOptimizer, value: float) -> None:
    for _, param in members(optimizer):
        assert param.grad is not None
        grad: Any = param.grad
        getattr(grad, "_local_tensor", grad).fill_(value)


def one_filled(value: float) -> Spoil:
    return lambda rank, optimizer: fill(optimizer, value) if rank == 1 else None


SPOILED: dict[str, tuple[Spoil, str]] = {
    "NaN": (one_filled(float("nan")), "rank 1: adapters.NothingToLearn: the gradient of"),
    "inf": (one_filled(float("inf")), "rank 1: adapters.NothingToLearn: the gradient of"),
    "too large": (one_filled(1e30), "rank 1: adapters.NothingToLearn: the gradient of"),
    "zeros": (
        lambda rank, optimizer: fill(optimizer, 0.0),
        "ranks 0, 1: adapters.NothingToLearn: all gradients are zeros",
    ),
}


def spoiled(rank: int, first_gradient: Any) -> dict[str, tuple[str, list[str]]]:
    mesh, found = whole_world(), {}
    for name, (spoil, says) in SPOILED.items():
        pair = Pair.of(kind_of(KINDS[0]), mesh)
        for each in (pair.optimizer, pair.twin):
            each.first_gradient = first_gradient  # type: ignore[attr-defined]
        pair.give_gradients()
        spoil(rank, pair.optimizer)
        met = met_in(pair.optimizer, pair.optimizer.step)
        wrong = trace(met, *([says] if first_gradient == "raise" else []))
        then = caught(pair.healthy_step)
        wrong += [repr(then)] if then else pair.differences()
        found[name] = met.text, wrong
    return found


@pytest.mark.parametrize("first_gradient", ["raise", "defer"])
def test_nothing_is_learned_from_gradients_that_hold_nothing(first_gradient: str) -> None:
    first, second = on_ranks(spoiled, 2, first_gradient)
    assert first == second
    for name, (text, wrong) in first.items():
        assert wrong == [], name
        assert text.startswith("GroupFailure" if first_gradient == "raise" else "NoneType"), name


def zeros_on_one_rank(rank: int) -> str:
    """Return what a step meets on a rank whose parts of all gradients are zeros."""
    optimizer = kind_of("Gefen").make(whole_world())
    give_gradients(optimizer, 1)
    if rank == 1:
        fill(optimizer, 0.0)
    optimizer.step()
    return repr(learned(optimizer)["codebook of rule 0"])


def test_a_rank_with_zeros_learns_what_the_others_do() -> None:
    first, second = on_ranks(zeros_on_one_rank, 2)
    assert first == second


def deferred_then_without_gradients(rank: int) -> str:
    """A step that was put off is no failure, so the next may have no gradient at all."""
    optimizer = kind_of("Gefen").make(whole_world())
    optimizer.first_gradient = "defer"  # type: ignore[attr-defined]
    give_gradients(optimizer, 1)
    fill(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad()
    return repr(caught(optimizer.step))


def test_a_step_that_was_put_off_is_no_failure() -> None:
    assert on_ranks(deferred_then_without_gradients, 2) == ("None", "None")


def asks_for_its_state(rank: int) -> tuple[str, list[str]]:
    """Make the step that torch's checkpointing makes, to see what state there will be."""
    pair = Pair.of(kind_of(KINDS[0]), whole_world())
    options = [group["lr"] for group in pair.optimizer.param_groups]
    give_gradients(pair.optimizer, 1)
    fill(pair.optimizer, 0.0)
    for group in pair.optimizer.param_groups:
        group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], torch.Tensor) else 0.0
    error = repr(caught(pair.optimizer.step))
    for group, lr in zip(pair.optimizer.param_groups, options, strict=True):
        group["lr"] = lr
    then = caught(pair.healthy_step)
    return error, [repr(then)] if then else pair.differences()


def test_a_step_of_zeros_without_a_learning_rate_learns_nothing_and_says_nothing() -> None:
    assert on_ranks(asks_for_its_state, 2) == (("None", []),) * 2


# ---- ranks that hold different things ----


def lose(optimizer: VotingOptimizer) -> Callable[[], None]:
    kept = dict(optimizer.state)
    optimizer.state.clear()
    _momenta(optimizer).forget_facts()
    return lambda: (optimizer.state.update(kept), _momenta(optimizer).forget_facts())[0]


def _momenta(optimizer: VotingOptimizer) -> Any:
    return optimizer._rules[0].momenta


def poke(optimizer: VotingOptimizer) -> Callable[[], None]:
    """Put another codebook, or the first one, on this rank."""
    old = _momenta(optimizer).record()
    levels = torch.linspace(-1, 1, 256)
    _momenta(optimizer).learned(make_codebook(levels))
    return lambda: _momenta(optimizer).set_record(old)


def forget(optimizer: VotingOptimizer) -> Callable[[], None]:
    old = _momenta(optimizer).record()
    _momenta(optimizer).set_record({**old, "codebook": None})
    return lambda: _momenta(optimizer).set_record(old)


def count(optimizer: VotingOptimizer) -> Callable[[], None]:
    old = _momenta(optimizer).record()
    _momenta(optimizer).num_steps += 1
    return lambda: _momenta(optimizer).set_record(old)


DIFFERENT: dict[str, tuple[int, Callable[[VotingOptimizer], Callable[[], None]], str]] = {
    "a codebook on one rank only": (0, poke, "ranks disagree about codebook: "),
    "another codebook on one rank": (2, poke, "ranks disagree about codebook: "),
    "no codebook on one rank": (2, forget, "ranks disagree about codebook: "),
    "no state on one rank": (2, lose, "ranks disagree about periods: "),
    "a step more on one rank": (2, count, "ranks disagree about steps with the codebook: "),
}


def different(rank: int) -> dict[str, tuple[str, list[str]]]:
    mesh, found = whole_world(), {}
    for name, (steps, make, says) in DIFFERENT.items():
        pair = Pair.of(kind_of("Gefen"), mesh)
        for _ in range(steps):
            pair.healthy_step()
        pair.give_gradients()
        undo = make(pair.optimizer) if rank == 1 else lambda: None
        met = met_in(pair.optimizer, pair.optimizer.step)
        undo()
        wrong = trace(met, "Disagreement", says)
        then = caught(pair.step)
        wrong += [repr(then)] if then else pair.differences()
        found[name] = met.text, wrong
    return found


def test_what_differs_between_ranks_stops_all_until_it_is_undone() -> None:
    first, second = on_ranks(different, 2)
    assert first == second
    assert {name: wrong for name, (_, wrong) in first.items() if wrong} == {}

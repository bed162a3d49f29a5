from collections.abc import Generator
from typing import Any

import pytest

from consensus._planning import Add, Await, AwaitAll, Drop, Put
from consensus._protocol import AllReduceMax
from consensus.testing import Deadlock, simulate

Program = Generator[Any, Any, Any]


def asks(*wanted: object) -> Program:
    """Ask for each of these; return the answers."""
    answers = []
    for want in wanted:
        answers.append((yield want))
    return answers


def reduces(rank: int, *groups: tuple[int, ...]) -> Program:
    return asks(*(AllReduceMax(group, (rank, -rank)) for group in groups))


def test_a_collective_answers_all_members_with_the_maximum() -> None:
    run = simulate({rank: reduces(rank, (0, 1, 2)) for rank in range(3)})
    assert run.results == {rank: [(2, 0)] for rank in range(3)}
    assert run.collectives == [((0, 1, 2), 2)]


def test_groups_run_apart() -> None:
    run = simulate({rank: reduces(rank, (0, 1) if rank < 2 else (2, 3)) for rank in range(4)})
    assert [run.results[rank] for rank in range(4)] == [[(1, 0)]] * 2 + [[(3, -2)]] * 2
    assert sorted(run.collectives) == [((0, 1), 2), ((2, 3), 2)]


def test_ranks_that_visit_two_groups_in_different_orders_are_a_deadlock() -> None:
    a, b = (0, 1), (0, 1, 2)
    with pytest.raises(Deadlock) as stuck:
        simulate({0: reduces(0, a, b), 1: reduces(1, b, a), 2: reduces(2, b)})
    assert set(stuck.value.waiting) == {0, 1, 2}
    assert "rank 0 waits in a collective of ranks 0, 1 (2 words)" in str(stuck.value)
    assert "rank 2 waits in a collective of ranks 0-2 (2 words)" in str(stuck.value)


def test_three_groups_in_a_circle_are_a_deadlock() -> None:
    circle = [(0, 1), (1, 2), (0, 2)]
    orders = {0: (0, 2), 1: (1, 0), 2: (2, 1)}
    with pytest.raises(Deadlock):
        simulate({r: reduces(r, *(circle[i] for i in order)) for r, order in orders.items()})
    run = simulate({r: reduces(r, *(circle[i] for i in sorted(o))) for r, o in orders.items()})
    assert len(run.collectives) == 3


@pytest.mark.parametrize("absent", [asks(), asks(Put("k", b"v"))])
def test_waiting_for_a_rank_that_has_finished_is_a_deadlock(absent: Program) -> None:
    with pytest.raises(Deadlock) as stuck:
        simulate({0: reduces(0, (0, 1)), 1: absent})
    assert set(stuck.value.waiting) == {0}


def test_waiting_for_a_rank_that_has_failed_is_a_deadlock() -> None:
    def fails() -> Program:
        raise ValueError("boom")
        yield

    with pytest.raises(Deadlock):
        simulate({0: reduces(0, (0, 1)), 1: fails()})


def test_a_failure_of_a_rank_is_an_outcome() -> None:
    def fails() -> Program:
        yield AllReduceMax((0, 1), (1,))
        raise ValueError("boom")

    run = simulate({0: fails(), 1: asks(AllReduceMax((0, 1), (2,)))})
    assert [str(error) for error in run.errors.values()] == ["boom"]
    assert run.results == {1: [(2,)]}


def test_different_lengths_in_one_collective_are_an_error() -> None:
    with pytest.raises(AssertionError, match=r"different lengths \[1, 2\]"):
        simulate({0: asks(AllReduceMax((0, 1), (1,))), 1: asks(AllReduceMax((0, 1), (1, 2)))})


def test_an_unknown_request_is_an_error() -> None:
    with pytest.raises(AssertionError, match="rank 0 yielded 'what'"):
        simulate({0: asks("what")})


def test_the_store_counts_sets_waits_and_forgets() -> None:
    run = simulate(
        {
            0: asks(Await("k", (1,)), Add("n", 2), Drop(("k", "absent"))),
            1: asks(Add("n", 5), Put("k", b"v")),
        }
    )
    assert run.results[0][0] == b"v"
    assert run.results[1] == [5, b"v"]
    assert run.results[0][1] == 7
    assert run.store == {"n": 7}
    assert run.requests == {0: 3, 1: 2}


def test_waiting_for_a_key_that_nobody_sets_is_a_deadlock_that_names_it() -> None:
    with pytest.raises(Deadlock, match="Await\\(key='k'"):
        simulate({0: asks(Await("k", (1,))), 1: asks()})


def test_several_keys_are_awaited_together_and_what_was_set_first_stays() -> None:
    run = simulate(
        {
            0: asks(AwaitAll(("k", "j"), (1, 2))),
            1: asks(Put("j", b"1")),
            2: asks(Put("j", b"2"), Put("k", b"3")),
        }
    )
    assert run.results == {0: [[b"3", b"1"]], 1: [b"1"], 2: [b"1", b"3"]}
    assert run.requests == {0: 1, 1: 1, 2: 2}
    with pytest.raises(Deadlock, match="AwaitAll\\(keys=\\('k', 'j'"):
        simulate({0: asks(AwaitAll(("k", "j"), (1, 2))), 1: asks(Put("j", b"1"))})


def test_a_store_that_is_passed_in_is_kept() -> None:
    store: dict[str, Any] = {"k": b"v"}
    run = simulate({0: asks(Await("k", (1,)), Put("j", b"w"))}, store=store)
    assert run.results == {0: [b"v", b"w"]}
    assert store == {"k": b"v", "j": b"w"}

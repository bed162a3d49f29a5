"""The demo says that a promise held only if it did: good runs, each spoiled in one way."""

import signal
from collections.abc import Sequence
from dataclasses import replace

import pytest

from consensus.demo._faults import FAULTS
from consensus.demo._judge import Harm, harm, judge
from consensus.demo._outcome import Cost, Run, cost_of_last, duration
from consensus.demo._records import Record, Seen, Step, Trigger
from consensus.demo._settings import AFTER, FAULT_NAMES, HANG_S, NOTICE_S, RELEASE_S, Settings

RANKS = 3
STRUCK = 100.0  # seconds, when the fault happened
SAID = "ValueError: the labels of this batch are broken"
MEMORY = "torch.OutOfMemoryError: tried to allocate 2.00 GiB in forward"


def step(number: int, *, loss: float = 3.0, votes: tuple[float, ...] = (0.001, 0.002)) -> Step:
    return Step(number, loss=loss - 0.1 * number, seconds=0.1, votes=votes)


def run_of(
    fault: str,
    seen: Sequence[Seen | None],
    *,
    exitcodes: Sequence[int | None] = (0, 0, 0),
    after: int = AFTER,
    unguarded: bool = False,
) -> Run:
    settings = Settings(RANKS, steps=2, fault=fault, optimizer="muon", unguarded=unguarded)
    records: list[tuple[Record, ...]] = []
    for rank, said in enumerate(seen):
        before: list[Record] = [step(0), step(1)]
        struck = [Trigger(scene.name, STRUCK) for scene in FAULTS[fault][:1] if rank == 1]
        then: list[Record] = [step(2 + i) for i in range(after)]
        records.append((*before, *struck, *([said] if said else []), *then))
    return Run(settings, tuple(records), tuple(exitcodes))


def broken(run: Run) -> list[str]:
    """The promises that did not hold."""
    return [promise.text for promise in judge(run) if not promise.held]


def closure_run(**spoiled: object) -> Run:
    """A good run of the closure fault; ``spoiled`` changes what rank 2 saw."""
    text = f"Muon.step failed on rank 1, so every rank of the group stops\n  rank 1: {SAID}"
    good = Seen("closure", STRUCK + 0.01, "GroupFailure", text, failures={"1": SAID})
    return run_of("closure", [good, replace(good, cause="ValueError"), replace(good, **spoiled)])  # type: ignore[arg-type]


def forward_run(**spoiled: object) -> Run:
    """A good run of the forward fault; ``spoiled`` changes what rank 1, at fault, saw."""
    peer = Seen(
        "forward", STRUCK + 4.2, "GroupFailure", "text", failures={"1": MEMORY}, may_go_on=False
    )
    own = replace(peer, cause="OutOfMemoryError", absent=(0, 2))
    seen = [peer, replace(own, **spoiled), peer]  # type: ignore[arg-type]
    return run_of("forward", seen, exitcodes=(1, 1, 1), after=0)


def kill_run(**spoiled: object) -> Run:
    """A good run of the kill fault; ``spoiled`` changes what rank 2 saw."""
    good = Seen("kill", STRUCK + 1.0, "LateRanks", "text", absent=(1,), may_go_on=False)
    seen = [good, None, replace(good, **spoiled)]  # type: ignore[arg-type]
    return run_of("kill", seen, exitcodes=(1, -signal.SIGKILL, 1), after=0)


def test_every_fault_that_can_be_asked_for_exists() -> None:
    assert set(FAULTS) == set(FAULT_NAMES)


@pytest.mark.parametrize("run", [closure_run(), forward_run(), kill_run()])
def test_a_good_run_keeps_every_promise(run: Run) -> None:
    assert broken(run) == []
    assert len(judge(run)) >= 7


def test_an_agreed_overflow_is_skipped() -> None:
    text = "Muon.step: ranks disagree about AMP: False on ranks 0, 2; True on rank 1"
    refused = Seen("overflow", STRUCK + 0.01, "Disagreement", text)
    run = run_of("overflow", [refused] * RANKS)
    skipped = Seen("overflow, agreed", STRUCK + 1.0)
    good = replace(run, records=tuple((*listed, skipped) for listed in run.records))
    assert broken(good) == []
    raised = replace(skipped, error="Disagreement")
    bad = replace(run, records=tuple((*listed, raised) for listed in run.records))
    assert len(broken(bad)) == 1
    assert "every rank skips" in broken(bad)[0]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (closure_run(moved="parameter[a] changed"), "no parameter and no optimizer state"),
        (closure_run(error="LateRanks"), "every rank raised GroupFailure"),
        (closure_run(text=f"rank 1 said {SAID}"), "the same text everywhere"),
        (closure_run(at=STRUCK + NOTICE_S + 1), f"within {NOTICE_S:.0f} s"),
        (closure_run(may_go_on=False), "the group may go on and did"),
        (forward_run(cause=""), "raised its own error"),
        (forward_run(absent=(0,)), "it said who was missing: ranks 0, 2"),
        (forward_run(may_go_on=True), "cannot go on"),
        (forward_run(moved="state[a] changed"), "no parameter and no optimizer state"),
        (forward_run(at=STRUCK + RELEASE_S + 1), f"within {RELEASE_S:.0f} s"),
        (kill_run(absent=(0,)), "rank 1 did not come"),
        (kill_run(may_go_on=True), "cannot go on"),
    ],
)
def test_one_thing_that_goes_wrong_breaks_its_promise(run: Run, expected: str) -> None:
    assert len(broken(run)) == 1
    assert expected in broken(run)[0]


def test_peers_that_are_not_told_the_cause_break_a_promise() -> None:
    run = forward_run()
    peer = replace(run.of(0, Seen)[0], failures={"0": "RuntimeError: Connection closed"})
    spoiled = replace(run, records=((*run.of(0, Step), peer), *run.records[1:]))
    assert [text for text in broken(spoiled) if "released its peers" in text]


def test_a_rank_that_says_nothing_breaks_a_promise() -> None:
    run = closure_run()
    silent = tuple(record for record in run.records[2] if not isinstance(record, Seen))
    assert broken(replace(run, records=(*run.records[:2], silent))) == [
        "every rank raised GroupFailure"
    ]


def test_a_rank_that_hangs_breaks_a_promise() -> None:
    run = replace(closure_run(), exitcodes=(0, None, 0))
    assert broken(run) == ["every process ended by itself; rank 1 had to be killed"]


def test_an_unexpected_exit_code_breaks_a_promise() -> None:
    assert broken(replace(closure_run(), exitcodes=(0, 0, 1))) == ["every process ended by itself"]


def test_training_that_stops_breaks_a_promise() -> None:
    run = closure_run()
    stopped = replace(run, records=(run.records[0], run.records[1], run.records[2][:-1]))
    assert len(broken(stopped)) == 1
    assert f"{AFTER - 1} of {AFTER} more steps" in broken(stopped)[0]


def test_a_loss_that_does_not_fall_breaks_a_promise() -> None:
    run = run_of("none", [None] * RANKS, after=0)
    assert broken(run) == []
    flat = tuple((step(0), step(1, loss=3.1)) for _ in range(RANKS))
    assert len(broken(replace(run, records=flat))) == 1


def test_a_run_that_did_not_start_keeps_no_promise() -> None:
    run = Run(closure_run().settings, ((), (), ()), (1, 1, 1))
    assert not any(promise.held for promise in judge(run))


@pytest.mark.parametrize(
    ("seen", "exitcode", "expected"),
    [
        (Seen("closure", STRUCK + HANG_S, "RuntimeError", "timed out"), 0, Harm.HUNG),
        (Seen("closure", STRUCK + 0.1, "RuntimeError", "closed by peer"), 0, Harm.NAMELESS),
        (Seen("closure", STRUCK + 0.1, diverged=7), 0, Harm.DIVERGED),
        (None, -signal.SIGABRT, Harm.DIED),
        (None, None, Harm.DIED),
        (Seen("closure", STRUCK + 0.1, "RuntimeError", "rank 1 is gone"), 0, Harm.NONE),
        (Seen("closure", STRUCK + 0.1), 0, Harm.NONE),
    ],
)
def test_harm_has_a_name(seen: Seen | None, exitcode: int | None, expected: Harm) -> None:
    own = Seen("closure", STRUCK + 0.1, "ValueError", "the labels of this batch are broken")
    run = run_of("closure", [None, own, seen], exitcodes=(0, 0, exitcode), unguarded=True)
    assert harm(run, FAULTS["closure"][0], 2) is expected
    assert harm(run, FAULTS["closure"][0], 1) is Harm.NONE


def test_a_fault_without_harm_is_not_shown_as_harm() -> None:
    harmless = [Seen("closure", STRUCK + 0.1)] * RANKS
    run = run_of("closure", harmless, after=0, unguarded=True)
    assert broken(run) == ["without agreement the fault does harm: none was seen"]


def test_only_the_last_rank_shows_what_an_agreement_costs() -> None:
    ranks = [step(0, votes=(0.050, 0.002)), step(0, votes=(0.001, 0.070))]
    assert cost_of_last(ranks) == pytest.approx(0.003)
    found = Cost.of({0: ranks, 1: ranks})
    assert found.added == pytest.approx(0.003)
    assert found.waited == pytest.approx((0.052 + 0.071) / 2)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.00042, "0.4 ms"), (0.0124, "12 ms"), (4.21, "4.2 s")]
)
def test_durations_are_short(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected

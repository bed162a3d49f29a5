"""The agreement log as a trace, and traces of several ranks on one clock."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from consensus import log
from consensus.__main__ import main
from consensus._absence import Absence, AgreementBroken, Meeting
from consensus._trace import Agreement, Clock, agreements_in, clocks_of, merged, trace_of
from consensus.vote import Decision, Difference, Fact, Ranks, Vote
from tests.simulated import failure

YEAR_2026 = 1_780_000_000_000_000_000


def agreement(
    rank: int, sequence: int, end: int, *, channel: str = "a", late: bool = False
) -> Agreement:
    """One that took 100 us and ended ``end`` ns after a moment in 2026."""
    return Agreement(
        rank,
        "Muon.step",
        channel,
        sequence,
        sequence,
        YEAR_2026 + end - 100_000,
        100_000,
        None if late else 1,
        "late" if late else "agreed",
        2,
        (("0", 7),),
    )


def test_a_trace_has_a_track_for_each_rank_and_times_in_microseconds() -> None:
    trace = trace_of([agreement(3, 0, 100_000), agreement(1, 0, 101_500)])
    assert trace["baseTimeNanoseconds"] == YEAR_2026
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    assert names == {1: "rank 1", 3: "rank 3"}
    event = [event for event in trace["traceEvents"] if event["ph"] == "X"][1]
    assert event == {
        "name": "Muon.step",
        "cat": "agreement",
        "ph": "X",
        "pid": 1,
        "tid": 0,
        "ts": 1.5,
        "dur": 100.0,
        "args": {
            "channel": "a",
            "sequence": 0,
            "step": 0,
            "messages": 1,
            "decision": "agreed",
            "members": 2,
            "data_plane": {"0": 7},
        },
    }


def test_a_trace_is_read_back_to_the_nanosecond() -> None:
    hours_apart = [agreement(0, 0, 1), agreement(0, 1, 36_000_000_000_123, late=True)]
    assert agreements_in(json.loads(json.dumps(trace_of(hours_apart)))) == tuple(hours_apart)
    assert agreements_in(trace_of([])) == ()


def test_a_clock_is_moved_by_the_median_difference_of_ends() -> None:
    first = [agreement(0, i, 1_000_000 * i) for i in range(5)]
    noise = (3_000, -2_000, 1_000, 900_000, 0)  # one end is an outlier: a rank was descheduled
    second = [agreement(1, i, 1_000_000 * i + 50_000 + noise[i]) for i in range(5)]
    assert clocks_of([first, second]) == (Clock((0,), 0, 0, 0), Clock((1,), -51_000, 5, 2_000))


def test_agreements_that_broke_say_nothing_of_clocks() -> None:
    first = [agreement(0, 0, 0), agreement(0, 1, 10, late=True)]
    second = [agreement(1, 0, 5), agreement(1, 1, 9_000_000, late=True)]
    assert clocks_of([first, second])[1] == Clock((1,), -5, 1, 0)


def test_ranks_that_share_no_agreement_with_the_first_are_set_through_others() -> None:
    last = [agreement(2, 0, 300, channel="b")]
    both = [agreement(1, 0, 40), agreement(1, 0, 200, channel="b")]
    clocks = clocks_of([[agreement(0, 0, 0)], last, both])
    assert [clock.offset_ns for clock in clocks] == [0, -140, -40]


def test_a_trace_that_shares_nothing_keeps_its_clock() -> None:
    alone = [agreement(2, 0, 300, channel="b")]
    assert clocks_of([[agreement(0, 0, 0)], alone])[1] == Clock((2,), 0, 0, 0)


def test_in_a_merged_trace_agreements_end_together() -> None:
    first = [agreement(0, i, 1_000_000 * i) for i in range(3)]
    second = [agreement(1, i, 1_000_000 * i + 70_000_000) for i in range(3)]
    trace, _ = merged([first, second])
    ends: dict[int, set[int]] = {}
    for each in agreements_in(trace):
        ends.setdefault(each.sequence, set()).add(each.start_ns + each.duration_ns)
    assert ends == {i: {YEAR_2026 + 1_000_000 * i} for i in range(3)}
    assert trace["metadata"]["clocks"][1]["offset_ns"] == -70_000_000


def test_files_are_merged_and_one_that_stands_alone_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agreements = [[agreement(0, 0, 0)], [agreement(1, 0, 5)], [agreement(2, 0, 0, channel="b")]]
    paths = [tmp_path / f"{rank}.json" for rank in range(3)]
    for path, each in zip(paths, agreements, strict=True):
        path.write_text(json.dumps(trace_of(each)))
    with caplog.at_level(logging.WARNING, "consensus"):
        clocks = log.merge(paths, tmp_path / "all.json")
    assert [clock.offset_ns for clock in clocks] == [0, -5, 0]
    found = agreements_in(json.loads((tmp_path / "all.json").read_text()))
    assert sorted(each.rank for each in found) == [0, 1, 2]
    assert [str(paths[2]) in record.getMessage() for record in caplog.records] == [True]


def test_the_command_merges_and_says_how_clocks_were_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / f"{rank}.json") for rank in range(2)]
    for rank, path in enumerate(paths):
        Path(path).write_text(json.dumps(trace_of([agreement(rank, 0, 5_000 * rank)])))
    assert main(["merge-traces", str(tmp_path / "all.json"), *paths]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{paths[0]}: clock moved by 0.0 us, give or take 0.0, by 0 shared agreements"
    assert second == f"{paths[1]}: clock moved by -5.0 us, give or take 0.0, by 1 shared agreements"
    assert (tmp_path / "all.json").exists()
    assert main(["merge-traces", str(tmp_path / "all.json"), str(tmp_path / "missing")]) == 1
    assert "missing" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"baseTimeNanoseconds": 0, "traceEvents": [1]}'])
def test_a_file_that_is_no_trace_of_ours_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is none"):
        log.merge([tmp_path / "other.json"], tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()


def recorded(
    vote: Vote, decision: Decision | None = None, error: BaseException | None = None
) -> Agreement:
    meeting = Meeting("a", 4, (0, 1, 2))
    log.clear()  # it may be full
    with (
        nullcontext() if error is None else pytest.raises(type(error)),
        log.recording(1, vote.phase, meeting, vote, (("0", 7),)) as record,
    ):
        if error is not None:
            raise error
        record.decision = decision
    (found,) = log.records()
    return found


def test_a_record_says_who_agreed_on_what() -> None:
    fact = Fact("step", b"12", dict)
    found = recorded(Vote("Muon.step", facts=(fact,)), Decision(messages=1))
    assert found.start_ns > YEAR_2026
    assert found.duration_ns >= 0
    assert found == Agreement(
        1, "Muon.step", "a", 4, 12, found.start_ns, found.duration_ns, 1, "agreed", 3, (("0", 7),)
    )


def broken(*, gone: Ranks) -> AgreementBroken:
    return AgreementBroken(Absence((2,), {}, (), 1.0, "timed out", gone=gone))


DIFFERENCE = Difference("lr", (("0.1", (0,)), ("0.2", (1,))))


@pytest.mark.parametrize(
    ("decision", "error", "word", "messages"),
    [
        (Decision(2), None, "agreed", 2),
        (Decision(1, sums=(3, 4)), None, "agreed", 2),
        (Decision(3, failures=(failure(1, "boom"),), phases=((0, "a"),)), None, "failed", 3),
        (Decision(3, failures=(failure(1, "boom"),), fatal=True), None, "fatal", 3),
        (Decision(3, phases=((0, "a"), (1, "b"))), None, "mismatch", 3),
        (Decision(3, differences=(DIFFERENCE,)), None, "disagreed", 3),
        (None, broken(gone=()), "late", None),
        (None, broken(gone=(2,)), "gone", None),
        (None, KeyboardInterrupt(), "interrupted", None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_record_says_how_it_ended(
    decision: Decision | None, error: BaseException | None, word: str, messages: int | None
) -> None:
    found = recorded(Vote("load"), decision, error)
    assert (found.decision, found.messages, found.step) == (word, messages, None)


def test_a_step_that_is_no_number_is_left_out() -> None:
    fact = Fact("step", b"json 5", dict)
    assert recorded(Vote("load", facts=(fact,)), Decision(1)).step is None


def test_the_log_is_bounded_and_can_be_cleared() -> None:
    for _ in range(log.MAX_RECORDS + 1 - len(log.records())):
        log._records.append(agreement(0, 0, 0))
    assert len(log.records()) == log.MAX_RECORDS
    log.clear()
    assert log.records() == ()


def test_an_agreement_is_a_range_of_the_profiler_only_while_one_runs() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        recorded(Vote("seen"), Decision(1))
        recorded(Vote("seen, and interrupted"), error=KeyboardInterrupt())
    recorded(Vote("unseen"), Decision(1))
    names = {event.name for event in profile.events()}
    assert {"seen", "seen, and interrupted"} <= names
    assert "unseen" not in names

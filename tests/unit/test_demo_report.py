import io
from pathlib import Path

from consensus.demo._judge import Promise
from consensus.demo._records import Built, Feed, Log, Record, Seen, Step, Trigger
from consensus.demo._report import Display, verdict
from consensus.demo._settings import Settings

SETTINGS = Settings(ranks=2, steps=20, fault="closure", optimizer="muon", unguarded=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def records_of_a_step(number: int) -> list[tuple[int, Step]]:
    return [(rank, Step(number, 3.0 + rank, 0.1, (0.001 * (1 + rank),))) for rank in (0, 1)]


def shown_on(out: io.StringIO) -> str:
    display = Display(SETTINGS, out)
    display.show([(0, Built(1000, 18, 11)), (1, Built(1000, 18, 11))])
    for number in range(20):
        display.show(records_of_a_step(number))
    display.show([(1, Trigger("closure", 1.0))])
    display.close()
    return out.getvalue()


def test_a_log_file_gets_few_lines_and_no_carriage_return() -> None:
    lines = shown_on(io.StringIO()).splitlines()
    progress = [line for line in lines if line.startswith("step")]
    assert len(progress) == 10
    assert progress[0] == (
        "step  2/20 [##----------------------] loss 3.500   100 ms/step  agreement  1.00%"
    )
    assert "\r" not in "".join(lines)


def test_a_terminal_gets_one_line_that_is_painted_anew() -> None:
    bar, fault = shown_on(Terminal()).split("\n\n")
    assert bar.count("\r") == 20
    assert bar.count("\n") == 1
    assert fault.startswith("Fault: rank 1 raises ValueError")


def test_a_step_is_shown_when_every_rank_has_taken_it() -> None:
    out = Terminal()
    display = Display(SETTINGS, out)
    first, second = records_of_a_step(0)
    display.show([first])
    assert out.getvalue() == ""
    display.show([second])
    assert "loss 3.500" in out.getvalue()


def test_a_broken_promise_is_marked_and_counted() -> None:
    text = verdict([Promise("a", True), Promise("b", False)], SETTINGS, io.StringIO())
    marks = [line.split()[0] for line in text.splitlines()[1:3]]
    assert marks[0] != marks[1]
    assert text.endswith("1 of 2 did not hold.")


def test_a_stream_without_ticks_gets_words() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    text = verdict([Promise("a", True), Promise("b", False)], SETTINGS, out)
    assert text.isascii()
    assert "[BROKEN] b" in text


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    written: list[Record] = [
        Step(0, 3.0, 0.1, (0.001, 0.002)),
        Trigger("kill", 1.5),
        Seen("kill", 2.5, "GroupFailure", "a\nb", failures={"1": "ValueError"}, absent=(0, 2)),
    ]
    log = Log(tmp_path, 1)
    for record in written:
        log.write(record)
    feed = Feed(tmp_path, 2)
    assert feed.new() == [(1, record) for record in written]
    assert feed.new() == []


def test_half_a_record_of_a_killed_rank_is_no_record(tmp_path: Path) -> None:
    log = Log(tmp_path, 0)
    log.write(Trigger("kill", 1.5))
    with (tmp_path / "rank0.jsonl").open("ab") as file:
        file.write(b'["Step", {"num')
    assert Feed(tmp_path, 1).new() == [(0, Trigger("kill", 1.5))]

"""The check of recorded counts passes on what it recorded, and says what differs from it."""

import json
from pathlib import Path

import pytest

from benchmarks import collectives

pytestmark = pytest.mark.slow

CASE = "rows, 2 ranks"


def check(file: Path) -> int:
    return collectives.main(["--check", "--case", CASE, "--file", str(file)])


def test_the_recorded_counts_are_those_of_today() -> None:
    assert check(collectives.RECORDED) == 0


def test_a_second_vote_in_a_step_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = json.loads(collectives.RECORDED.read_text())
    step = recorded["cases"][CASE]["healthy step"]
    vote = step["control"][0]
    assert step["control"] == [vote]
    step["control"] = [vote, vote]
    file = tmp_path / "counts.json"
    file.write_text(json.dumps(recorded))
    assert check(file) == 1
    said = capsys.readouterr().out
    assert "1 counts differ from counts.json" in said
    assert f"{CASE} / healthy step / control" in said
    assert f"    - {json.dumps([vote, vote])}\n    + {json.dumps([vote])}" in said


def test_a_healthy_step_is_one_message_of_two_words_in_every_sharded_layout() -> None:
    cases = json.loads(collectives.RECORDED.read_text())["cases"]
    votes = {
        (name, step): [message["words"] for message in counted["control"]]
        for name, steps in cases.items()
        for step, counted in steps.items()
        if step.startswith("healthy step")
    }
    without = ("unsharded, 2 ranks", "approx, 2 ranks", "Gefen, unsharded, 2 ranks")
    several = {
        "rows, two optimizers, 2 ranks": [2, 2],
        "two meshes, one inside of the other, 4 ranks": [6],
        "Gefen, two meshes, 4 ranks": [6],
        "distributed, two meshes, 4 ranks": [6, 6],  # the second before anything is written
    }
    for (name, step), words in votes.items():
        expected = [] if name in without else several.get(name, [2])
        if name not in several or step == "healthy step":
            assert words == expected, (name, step)
    assert {name for name, _ in votes} >= {*without, *several}

"""The demo and the check as a user meets them: what they print, and their exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from consensus.__main__ import main
from consensus.demo._settings import AFTER

ROOT = Path(__file__).resolve().parents[2]

# Generous: on an idle machine a run takes two seconds, or as long as the fault is waited for.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NOTHING_MOVED = "no parameter and no optimizer state moved on any rank, byte for byte"
WENT_ON = f"the group may go on and did: {AFTER} of {AFTER} more steps"
STOPPED = "every rank was told that the group cannot go on"

# What must be printed for each fault, beside that every promise held.
GUARDED = {
    "none": ("step 6/6 [", "agreement"),
    "closure": ("GroupFailure", "ValueError: the labels of this batch are broken", WENT_ON),
    "overflow": ("Disagreement", "overflow (found_inf)", "every rank skips the step", WENT_ON),
    "missing-grad": ("Disagreement", "missing on rank 1", WENT_ON),
    "order": ("Disagreement", "ranks disagree about parameters", WENT_ON),
    "forward": ("GroupFailure", "torch.OutOfMemoryError", "who was missing", STOPPED),
    "backward": ("GroupFailure", "torch.OutOfMemoryError", "who was missing", STOPPED),
    "kill": ("(SIGKILL)", "rank 1 did not come", STOPPED),
}
UNGUARDED = {
    "closure": "ranks 0, 2 hung until the timeout",
    "order": "ranks 0-2 went on with wrong parameters, without an error",
}


def unwrapped(text: str) -> str:
    """One line: where lines are broken depends on the terminal."""
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("fault", GUARDED)
def test_every_promise_holds(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["demo", "--ranks", "3", "--steps", "6", "--fault", fault])
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert re.search(r"^All \d+ held\.$", shown, re.MULTILINE)
    for expected in (*GUARDED[fault], *([NOTHING_MOVED] if fault != "none" else [])):
        assert expected in unwrapped(shown)


@pytest.mark.parametrize(
    ("optimizer", "fault"),
    [("gefen", "closure"), ("gefen-muon", "order"), ("hybrid", "missing-grad")],
)
def test_every_promise_holds_whatever_the_optimizer(
    optimizer: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["demo", "--ranks", "3", "--steps", "3", "--fault", fault, "--optimizer", optimizer]
    code = main(command)
    shown = capsys.readouterr().out
    assert code == 0, shown
    for expected in (*GUARDED[fault], NOTHING_MOVED):
        assert expected in unwrapped(shown)


def test_without_agreement_a_hybrid_hangs(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "3", "--steps", "3", "--optimizer", "hybrid", "--unguarded"]
    code = main(["demo", *options])
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert UNGUARDED["closure"] in unwrapped(shown)


@pytest.mark.parametrize("fault", UNGUARDED)
def test_without_agreement_the_fault_does_harm(
    fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["demo", "--ranks", "3", "--steps", "3", "--fault", fault, "--unguarded"])
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert UNGUARDED[fault] in unwrapped(shown)
    assert "no agreement" in shown


def test_the_command_trains_on_a_users_file() -> None:
    command = ["demo", "--ranks", "2", "--steps", "2", "--text", str(ROOT / "README.md")]
    done = run_command([sys.executable, "-m", "consensus", *command])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "README.md" in done.stdout
    assert WENT_ON in unwrapped(done.stdout)
    assert "\r" not in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--text", "nowhere.txt"], ["--ranks", "1"], ["--steps", "0"], ["--fault", "fire"]],
    ids=" ".join,
)
def test_what_cannot_be_run_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["demo", *arguments])
    except SystemExit as refused:
        code = refused.code
    assert code == 2
    assert arguments[1] in capsys.readouterr().err


def test_a_missing_optimizer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "adapters", None)  # as if it were not installed
    assert main(["demo"]) == 2
    assert "'muon' is Muon of package 'adapters'" in capsys.readouterr().err


def test_check_reports_a_job() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["--nproc-per-node", "2", "-m", "consensus", "check"]
    done = run_command([*launcher, *command])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(re.findall(r"^(\S.*?|  its message) {2,}(.*)$", done.stdout, re.MULTILINE))
    assert "gloo" in lines["backends"]
    assert lines["control device"] == "cpu"
    assert lines["enclosing group"] == "ranks 0, 1"
    assert lines["votes go over"].startswith("connections between the ranks")
    for timed in ("one vote", "  its message", "bare all_reduce"):
        found = re.match(r"min (\d+), median (\d+), max (\d+) us", lines[timed])
        assert found is not None
        assert int(found[1]) <= int(found[2]) <= int(found[3])


def test_check_of_a_single_process_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["check"]) == 0
    shown = capsys.readouterr().out
    assert "nobody to agree with" in shown
    assert "torchrun" in shown


def run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=150,
        check=False,
    )

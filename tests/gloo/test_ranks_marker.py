"""Tests marked ``ranks``: in this suite itself, and in small suites that a user might write.

The small suites run in this process, so that they share its forkserver; what needs a pytest of its
own is in one subprocess.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# Imported here, or each small suite would import them anew, torch's libraries among them.
import consensus.testing._marked

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow


# ---- here ----


@dataclass(frozen=True)
class Case:
    """A parameter of this module's own type, which a rank must find again."""

    factor: int


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", [Case(3)])
def test_a_body_runs_on_processes(
    rank: int, world_size: int, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    assert (total.item() * case.factor, world_size, dist.get_backend()) == (9, 2, "gloo")
    (tmp_path / str(rank)).touch()  # one folder for all
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


@pytest.mark.ranks(3, backend="threaded")
def test_a_body_runs_on_threads(rank: int, world_size: int) -> None:
    total = torch.tensor([rank])
    dist.all_reduce(total)
    assert (total.item(), world_size, dist.get_backend()) == (3, 3, "threaded")


class TestMethods:
    def setup_method(self) -> None:
        self.number = 7

    @pytest.mark.ranks(1)
    def test_a_method_runs_with_what_was_set_up(self, rank: int) -> None:
        assert (self.number, rank, dist.get_world_size()) == (7, 0, 1)


# ---- small suites ----

OPTIONS = ("-p", "step_consensus_pytest", "-p", "no:cacheprovider", "--strict-markers")


def lines_of(pytester: pytest.Pytester, *options: str, **outcomes: int) -> list[str]:
    """Run the suite, see that it ends as it should, and return what pytest printed."""
    result = pytester.runpytest_inprocess(*OPTIONS, *options)
    result.assert_outcomes(**outcomes)
    return list(map(str.rstrip, result.outlines))


def has(lines: list[str], *wanted: str) -> bool:
    """Whether these lines stand there one after the other."""
    return any(tuple(lines[at : at + len(wanted)]) == wanted for at in range(len(lines)))


def test_an_assertion_of_one_rank_is_shown_as_pytest_shows_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch.distributed as dist

        @pytest.mark.ranks(2)
        def test_processes(rank):
            print("hello from", rank)
            found = {"rank": rank, "same": 1}
            assert found == {"rank": 0, "same": 1}

        @pytest.mark.ranks(2, backend="threaded")
        def test_threads(rank):
            found = {"rank": rank, "same": 1}
            assert found == {"rank": 0, "same": 1}
            dist.barrier()
        """
    )
    lines = lines_of(pytester, failed=2)
    shown = (
        '>       assert found == {"rank": 0, "same": 1}',
        "E       AssertionError: assert {'rank': 1, 'same': 1} == {'rank': 0, 'same': 1}",
        "E",
        "E         Omitting 1 identical items, use -vv to show",
        "E         Differing items:",
        "E         {'rank': 1} != {'rank': 0}",
    )
    on_processes, on_threads = (
        lines[lines.index(name) :]
        for name in (f"{' test_processes ':_^80}".rstrip(), f"{' test_threads ':_^80}".rstrip())
    )
    assert has(on_processes, *shown)
    assert has(on_threads, *shown)
    assert has(on_processes, "    @pytest.mark.ranks(2)", "    def test_processes(rank):")
    assert has(on_processes, "1 of 2 ranks failed: [1]")
    assert any(line.startswith("--- rank 0 returned (") for line in on_processes)
    assert has(on_processes, f"{' Captured output of rank 1 call ':-^80}", "hello from 1")
    assert has(on_threads, "2 of 2 ranks failed: [0, 1]; rank 1 was the first")
    assert not any("_marked_rank.py" in line for line in lines)  # the kit's own frames


def test_every_way_to_end_is_told(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, pytest, threading, torch, torch.distributed as dist

        @pytest.mark.ranks(2, timeout=2.5)
        def test_hang(rank):
            if rank == 0:
                dist.all_reduce(torch.ones(1))
            threading.Event().wait()

        @pytest.mark.ranks(3)
        def test_all(rank):
            if rank:
                pytest.fail("both", pytrace=False)

        @pytest.mark.ranks(2)
        def test_death(rank):
            if rank == 1:
                os._exit(3)

        @pytest.mark.ranks(3)
        def test_death_amid_a_collective(rank):
            if rank == 2:
                os.kill(os.getpid(), 9)
            dist.barrier()

        @pytest.mark.ranks(2)
        def test_skip():
            pytest.skip("not today")

        @pytest.mark.ranks(2)
        def test_skip_of_one(rank):
            if rank == 0:
                pytest.skip("not I")

        @pytest.mark.ranks(2)
        def test_expected(rank):
            pytest.xfail("known")

        @pytest.mark.xfail(strict=True)
        @pytest.mark.ranks(1, backend="threaded")
        def test_expected_too(rank):
            assert rank == 1
        """
    )
    lines = lines_of(pytester, "-rxs", failed=5, skipped=1, xfailed=2)
    assert has(lines, "2 of 2 ranks failed: [0, 1]")
    in_collective = next(at for at, line in enumerate(lines) if line.endswith(" in all_reduce"))
    assert lines[in_collective + 2].endswith("line 6 in test_hang")
    assert any(line.endswith("line 7 in test_hang") for line in lines)
    assert not any("_marked_rank.py" in line for line in lines)  # the kit's own frames
    (both,) = [at for at, line in enumerate(lines) if line.startswith("--- ranks 1, 2 failed (")]
    assert lines[both + 1] == "both"
    assert any(line.startswith("--- rank 1 ended with exit code 3, no result") for line in lines)
    killed = lines.index("3 of 3 ranks failed: [0, 1, 2]") + 1  # above those it took along
    assert lines[killed].startswith("--- rank 2 was killed by SIGKILL (")
    assert any(line.endswith("not today") for line in lines)
    assert "1 of 2 ranks failed: [0]" in lines
    assert any(line.startswith("--- rank 0 skipped (") for line in lines)


def test_what_cannot_run_on_ranks_is_refused_with_a_reason(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, unittest

        @pytest.fixture
        def of_rank(rank):
            return 2 * rank

        @pytest.mark.ranks(2)
        def test_capsys(capsys): pass

        @pytest.mark.ranks(2)
        def test_fixture(of_rank): pass

        @pytest.mark.ranks(0)
        def test_nobody(): pass

        @pytest.mark.ranks(2, treads=True)
        def test_typing_error(): pass

        @pytest.mark.ranks(2, backend="threaded", group_timeout=1)
        def test_timeout(): pass

        @pytest.mark.ranks(2)
        async def test_async(): pass

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("rank", [5])
        def test_parameter(rank): pass

        def test_unmarked(rank): pass

        class TestCase(unittest.TestCase):
            @pytest.mark.ranks(2)
            def test_method(self): pass
        """
    )
    lines = lines_of(pytester, failed=6, errors=3)
    for text in (
        "test_capsys: the argument 'capsys' of type CaptureFixture cannot be sent to a rank, which",
        "E       TypeError: a fixture is set up once for all ranks, in pytest's process, so it ",
        "@pytest.mark.ranks needs a number of ranks, 1 or more, and some time; got 0 and timeo",
        "@pytest.mark.ranks: ranks() got an unexpected keyword argument 'treads'",
        "@pytest.mark.ranks: collectives of ranks on threads have no timeout of their own; leave g",
        "an async test cannot run on ranks; use asyncio.run in it",
        "`rank` is each rank's own; name the parameter otherwise",
        "'rank' is for tests that run on ranks; mark test_unmarked with @pytest.mark.ranks(2), for",
        "methods of a unittest.TestCase do not run on ranks; make TestCase a plain class, or start",
    ):
        assert any(line.startswith(text) for line in lines), text


SUITE = """
    import dataclasses, pytest

    @dataclasses.dataclass
    class Case:
        number: int

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize("case", [Case(4)])
    def test_own_type(rank, case):
        assert case.number == 4

    @pytest.mark.ranks(1)
    def test_failing(case=Case(4)):
        assert case == Case(5)

    @pytest.mark.ranks(1)
    def test_of_conftest(thing):
        assert thing.number == 1
    """
CONFTEST = """
    import pytest

    class Thing:
        number = 1

    @pytest.fixture
    def thing():
        return Thing()
    """


@pytest.mark.parametrize(("mode", "reached"), [("prepend", True), ("importlib", False)])
def test_a_rank_imports_the_test_as_pytest_did(
    pytester: pytest.Pytester, mode: str, reached: bool
) -> None:
    # A name by which pytest's own rules would not rewrite assertions.
    files = {f"suite_{mode}/conftest": CONFTEST, f"suite_{mode}/deeper/check_{mode}": SUITE}
    for name, text in files.items():
        path = pytester.path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line[4:] for line in text.splitlines()))
    outcomes = {"passed": 2, "failed": 1} if reached else {"passed": 1, "failed": 2}
    lines = lines_of(pytester, f"--import-mode={mode}", "-o", "python_files=check_*.py", **outcomes)
    assert "E       Differing attributes:" in [line.replace("  Diff", "Diff") for line in lines]
    if not reached:
        assert any(
            "TypeError: the argument 'thing' cannot be rebuilt in a rank" in x for x in lines
        )


def test_the_plugin_imports_no_torch_and_changes_nothing_where_no_test_is_marked(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_nothing():
            assert "step_consensus_pytest" in sys.modules
            assert not {"torch", "consensus"} & set(sys.modules)
        """
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(consensus.__file__).parents[1]))
    result = pytester.runpytest_subprocess(*OPTIONS, "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.ranks(world_size, *, backend='gloo', timeout=60.0*"])
    pytester.runpytest_subprocess(*OPTIONS).assert_outcomes(passed=1)

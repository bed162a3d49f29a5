"""The checkout keeps the rules of the house, and no rule has gone blind.

``VIOLATIONS`` shows each rule what it must find, ``ALLOWED`` what it must leave alone.
"""

from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.house import (
    LONGER,
    MAY_COMMUNICATE,
    PURE,
    RULES,
    Rule,
    Source,
    consensus_knows_no_optimizer,
    folders_without_init,
    long_parts,
    no_group_by_counter,
    no_package_prints,
    no_sleep_orders_events,
    nothing_is_too_long,
    only_named_modules_communicate,
    parse,
    pure_modules_import_no_torch,
)

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("consensus", "adapters", "benchmarks", "tests")

DIST = "import torch.distributed as dist\n"

VIOLATIONS: dict[Rule, list[tuple[str, str]]] = {
    consensus_knows_no_optimizer: [
        ("consensus/amp.py", "import adapters"),
        ("consensus/amp.py", "def f():\n    import adapters.muon as m"),
        ("consensus/testing/a.py", "from adapters import Muon"),
    ],
    pure_modules_import_no_torch: [
        ("consensus/vote.py", "import torch"),
        ("adapters/_plan.py", "from torch.distributed import get_rank"),
        ("consensus/vote.py", "from consensus import groups"),
        ("consensus/vote.py", "from . import agree"),
        ("consensus/vote.py", "from .groups import control_group"),
    ],
    only_named_modules_communicate: [
        ("consensus/agree.py", DIST + "dist.all_reduce(x)"),
        ("consensus/agree.py", DIST + "f(dist.broadcast_object_list)"),
        ("consensus/agree.py", DIST + "dist.send(x, 1)"),
        ("consensus/groups.py", DIST + "dist.monitored_barrier()"),
        ("adapters/muon.py", "import torch\ntorch.distributed.reduce_scatter_tensor(x, y)"),
        ("adapters/muon.py", "from torch.distributed import all_to_all_single as a\na(x, y)"),
        ("consensus/groups.py", "group.allreduce([x]).wait()"),
        ("consensus/groups.py", "self.group._allgather_base(x, y)"),
        ("consensus/groups.py", "group.allgather_into_tensor_coalesced(x, y)"),
        ("consensus/groups.py", "group.send([x], 1, 0)"),
        ("adapters/muon.py", "parameter.full_tensor()"),
    ],
    no_group_by_counter: [
        ("consensus/_transport.py", DIST + "dist.new_group([0])"),
        ("consensus/demo.py", "from torch.distributed import new_group as make"),
        ("benchmarks/overhead.py", DIST + "make = dist.new_subgroups"),
    ],
    no_package_prints: [
        ("adapters/muon.py", "print(1)"),
        ("consensus/testing/ranks.py", "print(1)"),
    ],
    no_sleep_orders_events: [
        ("tests/gloo/test_a.py", "import time\ntime.sleep(1)"),
        ("tests/test_a.py", "from time import sleep as nap\nnap(1)"),
        ("tests/test_a.py", "import time\nx = 1  # stall\ntime.sleep(1)"),
    ],
    nothing_is_too_long: [
        ("tests/test_a.py", "\n" * 401),
        ("adapters/muon.py", "def f():\n" + "    x = 1\n" * 60),
    ],
}

ALLOWED: dict[Rule, list[tuple[str, str]]] = {
    consensus_knows_no_optimizer: [
        ("adapters/muon.py", "from adapters import options"),
        ("consensus/amp.py", "import adapters_elsewhere"),
    ],
    pure_modules_import_no_torch: [
        ("consensus/vote.py", "from . import _wire"),
        ("adapters/_plan.py", "from consensus.vote import Vote"),
        ("consensus/groups.py", "import torch"),
    ],
    only_named_modules_communicate: [
        ("consensus/_transport.py", DIST + "dist.all_reduce(x)"),
        ("consensus/testing/ranks.py", DIST + "dist.barrier()"),
        ("consensus/agree.py", DIST + "dist.get_world_size()"),
        ("consensus/agree.py", "from . import _transport\n_transport.all_reduce(x)"),
        ("consensus/agree.py", "link.all_reduce_max(words)"),
        ("consensus/_protocol.py", "protocol.send(result)"),
        ("consensus/stall.py", "pipe.recv()"),
        ("adapters/muon.py", "import torch\ntorch.gather(x, 0, y)"),
    ],
    no_group_by_counter: [("tests/gloo/test_a.py", DIST + "dist.new_group([0])")],
    no_package_prints: [
        ("consensus/__main__.py", "print(1)"),
        ("consensus/demo/table.py", "print(1)"),
        ("benchmarks/overhead.py", "print(1)"),
    ],
    no_sleep_orders_events: [
        ("tests/test_a.py", "import time\n# The stall\n# itself.\ntime.sleep(9)"),
        ("tests/test_a.py", "import time\ntime.sleep(9)  # the stall"),
        ("consensus/stall.py", "import time\ntime.sleep(1)"),
    ],
    nothing_is_too_long: [
        ("tests/test_a.py", "\n" * 400),
        ("adapters/muon.py", "def f():\n" + "    x = 1\n" * 59),
    ],
}


def cases(table: dict[Rule, list[tuple[str, str]]]) -> list[tuple[Rule, str, str]]:
    return [(rule, path, text) for rule, shown in table.items() for path, text in shown]


@cache
def checkout() -> tuple[Source, ...]:
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    paths = [file.relative_to(ROOT).as_posix() for file in files]
    return tuple(parse(path, (ROOT / path).read_text("utf-8")) for path in paths)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps(rule: Rule) -> None:
    assert [problem for source in checkout() for problem in rule(source)] == []


def test_every_test_folder_is_a_package() -> None:
    paths = [source.path for source in checkout() if source.in_tests]
    assert folders_without_init(paths) == []


@pytest.mark.parametrize("path", sorted(PURE | set(MAY_COMMUNICATE)))
def test_a_listed_module_exists(path: str) -> None:
    # A list that names a file which was renamed guards nothing.
    assert any(fnmatch(source.path, path) for source in checkout())


def test_every_exception_has_a_reason_and_is_needed() -> None:
    needed = {key for source in checkout() for key, _ in long_parts(source)}
    assert set(LONGER) <= needed
    assert all(reason.strip() for reason in LONGER.values())


@pytest.mark.parametrize(("rule", "path", "text"), cases(VIOLATIONS))
def test_a_rule_finds_its_violation(rule: Rule, path: str, text: str) -> None:
    problems = rule(parse(path, text))
    assert len(problems) == 1
    assert problems[0].startswith(f"{path}:")


@pytest.mark.parametrize(("rule", "path", "text"), cases(ALLOWED))
def test_a_rule_leaves_the_allowed_alone(rule: Rule, path: str, text: str) -> None:
    assert rule(parse(path, text)) == []


def test_every_rule_is_shown_a_violation() -> None:
    assert set(VIOLATIONS) == set(RULES)


def test_a_folder_without_init_is_found() -> None:
    paths = ["tests/__init__.py", "tests/unit/test_a.py", "tests/model/__init__.py"]
    assert folders_without_init(paths) == ["tests/unit"]

"""What runs in each rank of a test marked ``ranks``: its body, and how pytest would show its end.

A rank that is a process has no pytest running. It imports the test's module as pytest does, with
rewritten assertions, so that a failure is shown with its values.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import pickle
import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from _pytest.assertion import util  # private: this hook is set by pytest's runner only
from _pytest.terminal import TerminalReporter  # pytest 8.0 does not make it public


@dataclass(frozen=True, slots=True)
class Style:
    """How the user's pytest was told to show failures."""

    traceback: str  # as in --tb
    showlocals: bool
    verbosity: int


@dataclass(frozen=True, slots=True)
class Body:
    """A test's body, as it travels to another process."""

    module: str  # as pytest imported it
    path: str
    name: str  # "test_a" or "TestA.test_a"
    instance: bytes | None  # pickled; None for a function
    arguments: Mapping[str, bytes]  # pickled one by one, so that an error can name one
    style: Style


class Ended(Exception):
    """A body came to another end than its last line; raised instead of what it raised.

    Attributes:
        kind: "failed", "skipped" or "xfailed".
        text: What pytest shows of it; or the reason.
        at: When, in seconds of the machine's monotonic clock.
    """

    def __init__(self, kind: Literal["failed", "skipped", "xfailed"], text: str, at: float):
        super().__init__(kind, text, at)  # what a copy is made of
        self.kind, self.text, self.at = kind, text, at

    def __str__(self) -> str:
        """Return the text alone."""
        return self.text


def run_shipped(rank: int, body: Body) -> None:
    """Run a body that came from another process.

    Raises:
        Ended: It did not come to its last line.
    """
    _show_assertions(body.style)
    try:
        function = _function(body)
        arguments = {name: _rebuilt(name, data) for name, data in body.arguments.items()}
    except BaseException as error:
        raise _ended(error, body.path, replace(body.style, traceback="short")) from error
    call(function, rank, arguments, body.path, body.style)


def call(
    function: Callable[..., object],
    rank: int,
    arguments: Mapping[str, object],
    path: str,
    style: Style,
) -> None:
    """Run a body as one rank; ``rank`` is filled in where the body asks for it.

    Raises:
        Ended: It did not come to its last line.
        SystemExit: As it was raised: so are threaded ranks released.
    """
    given = {**arguments, "rank": rank} if "rank" in arguments else dict(arguments)
    try:
        function(**given)
    except SystemExit:
        raise
    except BaseException as error:
        raise _ended(error, path, style) from error


def _ended(error: BaseException, path: str, style: Style) -> Ended:
    now = time.monotonic()
    if isinstance(error, pytest.skip.Exception):
        return Ended("skipped", str(error), now)
    if isinstance(error, pytest.xfail.Exception):
        return Ended("xfailed", str(error), now)
    return Ended("failed", _shown(error, path, style), now)


def _shown(error: BaseException, path: str, style: Style) -> str:
    """Return what pytest would show of ``error``: from the test's file on, without this kit."""
    info = pytest.ExceptionInfo.from_exception(error)
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        return str(error)

    def from_test_on(info: pytest.ExceptionInfo[BaseException]) -> Any:
        entries = info.traceback.cut(path=path).filter(info)
        if style.traceback == "auto":  # pytest's way: all but the first and the last in short
            middle = [entry.with_repr_style("short") for entry in entries[1:-1]]
            entries = type(entries)([entries[0], *middle, *entries[1:][-1:]])
        return entries

    look: Any = "long" if style.traceback == "auto" else style.traceback
    text = info.getrepr(style=look, showlocals=style.showlocals, tbfilter=from_test_on)
    lines = str(text)  # which pytest has stripped, the indentation of the first line too
    return f"    {lines}" if look == "long" and not lines.startswith((">", "E")) else lines


def _function(body: Body) -> Callable[..., object]:
    found: Any = _module(body.module, Path(body.path))
    *classes, name = body.name.split(".")
    for part in classes:
        found = getattr(found, part)
    if body.instance is not None:
        found = _rebuilt("self", body.instance)
    function: Callable[..., object] = getattr(found, name)
    return function


def _module(name: str, path: Path) -> types.ModuleType:
    """Import the test's module under the name that pytest gave it, with rewritten assertions.

    By its name where that leads to the file, else (``--import-mode=importlib``) from the file.
    """
    pytest.register_assert_rewrite(name)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # of another module, which the test's imports
    else:
        if module.__file__ is not None and Path(module.__file__).samefile(path):
            return module
    return _from_file(name, path)


def _from_file(name: str, path: Path) -> types.ModuleType:
    parents = name.split(".")[:-1]
    for count in range(1, len(parents) + 1):  # pickle looks for them
        parent = ".".join(parents[:count])
        sys.modules.setdefault(parent, types.ModuleType(parent))
    for finder in sys.meta_path:  # the first one rewrites assertions
        spec = finder.find_spec(name, [str(path.parent)])
        if spec is not None and spec.loader is not None and spec.origin == str(path):
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ImportError(
        f"a rank cannot import {path} as the module {name!r}. A test that runs on ranks must be in "
        "a module that can be imported by its name (a package, or a file in a folder on sys.path), "
        "or with --import-mode=importlib in a file whose name is the last part of the module's."
    )


def _rebuilt(name: str, data: bytes) -> object:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise TypeError(
            f"the argument {name!r} cannot be rebuilt in a rank: {error!r}. Its class must be in a "
            "module that a rank can import: the test's own, or one on sys.path."
        ) from None


def _show_assertions(style: Style) -> None:
    """Let modules imported from now on explain their assertions, as under pytest.

    The configuration holds no plugin, conftest or ini file of the user: a body needs none, and
    they may take long to load.
    """
    variable = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        config = pytest.Config.fromdictargs(
            {"verbose": style.verbosity}, ["-c", os.devnull, "--rootdir", os.getcwd(), *_LEAN]
        )
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before

    # pytest asks the reporter of the terminal how to highlight; this one writes nowhere.
    config.pluginmanager.register(TerminalReporter(config, io.StringIO()), "terminalreporter")

    def explain(operator: str, left: object, right: object) -> str | None:
        try:
            found = config.hook.pytest_assertrepr_compare(
                config=config, op=operator, left=left, right=right
            )
            lines = next((list(lines) for lines in found if lines), [])
        except Exception:  # a failed explanation must not take the place of the failed assertion
            return None
        return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%") or None

    util._reprcompare = explain


_LEAN = ("--noconftest", "-p", "no:cacheprovider", "-p", "no:faulthandler")

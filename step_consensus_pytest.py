"""What pytest loads of step-consensus: the marker ``ranks``, which runs a test on several ranks.

Outside of the package ``consensus``, whose import brings torch along: that takes seconds, and a
test run that uses no marker should not pay them. The rest is in ``consensus.testing._marked`` and
is imported by the first test that is marked.
"""

from __future__ import annotations

import unittest
from typing import Any, NoReturn

import pytest

_MARKER = (
    "ranks(world_size, *, backend='gloo', timeout=60.0, group_timeout=None): run the test on that "
    "many ranks, as processes, or as threads with backend='threaded'; all must end in time"
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> object:
    """The global rank that runs the test (in a test marked ``ranks``; not in fixtures)."""
    _mark_of(request)
    return EachRankHasItsOwn()


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> object:
    """The number of ranks that run the test (in a test marked ``ranks``, and in its fixtures)."""
    mark = _mark_of(request)
    return mark.kwargs.get("world_size", *mark.args[:1])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marked test of a kind that would run here, on one rank, and prove nothing."""
    if item.get_closest_marker("ranks") is None:
        return
    owner = getattr(item, "cls", None)
    if not isinstance(item, pytest.Function):
        pytest.fail(f"only test functions and methods run on ranks; got {item!r}", pytrace=False)
    if isinstance(owner, type) and issubclass(owner, unittest.TestCase):
        pytest.fail(
            f"methods of a unittest.TestCase do not run on ranks; make {owner.__name__} a plain "
            "class, or start the ranks in the test with consensus.testing.run_ranks",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on ranks, in place of pytest's own call."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    from consensus.testing._marked import run_marked  # imports torch

    run_marked(pyfuncitem, mark)
    return True


class EachRankHasItsOwn:
    """Stands for the rank where there is none: in pytest's own process, in other fixtures."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            "a fixture is set up once for all ranks, in pytest's process, so it has no rank; use "
            "`rank` in the test itself"
        )

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse
    __hash__ = __int__ = __index__ = __str__ = __format__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __mod__ = __sub__ = __rsub__ = _refuse


def _mark_of(request: pytest.FixtureRequest) -> pytest.Mark:
    mark: pytest.Mark | None = request.node.get_closest_marker("ranks")
    if mark is None:
        pytest.fail(
            f"{request.fixturename!r} is for tests that run on ranks; mark {request.node.name} "
            "with @pytest.mark.ranks(2), for example",
            pytrace=False,
        )
    return mark

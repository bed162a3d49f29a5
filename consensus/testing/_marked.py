"""Run a test that is marked ``ranks``, and turn what its ranks did into one result of pytest."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from consensus._text import join_ranks
from consensus.testing import _marked_rank
from consensus.testing._marked_rank import Body, Ended, Style, call, run_shipped
from consensus.testing._processes import pickled, run_ranks
from consensus.testing._ranks import RankResult, Ranks, describe
from consensus.testing._threads import run_threads

_THREADED = "threaded"  # the name of torch's in-process backend


@dataclass(frozen=True, slots=True)
class RanksMark:
    """The arguments of the marker, with its defaults."""

    world_size: int
    backend: str = "gloo"
    timeout: float = 60.0
    group_timeout: float | None = None

    @property
    def collective_seconds(self) -> float:
        """How long a collective may take: past the deadline, so that a hang is seen as one."""
        return 2 * self.timeout if self.group_timeout is None else self.group_timeout


def run_marked(item: pytest.Function, mark: pytest.Mark) -> None:
    """Run the body of ``item`` on ranks; called in place of it.

    Arguments of the body are values of fixtures and parameters as usual, set up once, here. Each
    rank gets ``rank`` and, as a process, a copy of the others.

    Raises:
        pytest.fail.Exception: The marker is wrong, an argument cannot be sent, or a rank raised,
            hung, died, or skipped while others did not; the text says what each rank did.
        pytest.skip.Exception: All ranks skipped.
        pytest.xfail.Exception: All ranks called ``pytest.xfail``.
    """
    __tracebackhide__ = True
    wanted = _read(mark)
    if inspect.iscoroutinefunction(item.obj):
        pytest.fail("an async test cannot run on ranks; use asyncio.run in it", pytrace=False)
    if "rank" in getattr(getattr(item, "callspec", None), "params", {}):
        pytest.fail("`rank` is each rank's own; name the parameter otherwise", pytrace=False)
    ranks = _on_threads(item, wanted) if wanted.backend == _THREADED else _shipped(item, wanted)
    for result in ranks:
        if result.output:
            item.add_report_section("call", f"output of rank {result.rank}", result.output)
    _conclude(ranks)


def _read(mark: pytest.Mark) -> RanksMark:
    wrong = None
    try:
        wanted = RanksMark(*mark.args, **mark.kwargs)
    except TypeError as error:
        wrong = str(error).replace("RanksMark.__init__", "ranks").replace("__init__", "ranks")
    if wrong is not None:  # not inside the handler, whose error pytest would show too
        pytest.fail(f"@pytest.mark.ranks: {wrong}", pytrace=False)
    size = wanted.world_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or not wanted.timeout > 0:
        pytest.fail(
            "@pytest.mark.ranks needs a number of ranks, 1 or more, and some time; got "
            f"{size!r} and timeout={wanted.timeout!r}",
            pytrace=False,
        )
    if wanted.backend == _THREADED and wanted.group_timeout is not None:
        pytest.fail(
            "@pytest.mark.ranks: collectives of ranks on threads have no timeout of their own; "
            "leave group_timeout out",
            pytrace=False,
        )
    return wanted


def _arguments(item: pytest.Function) -> dict[str, Any]:
    names = item._fixtureinfo.argnames  # private: what pytest itself hands to the body
    return {name: item.funcargs[name] for name in names}


def _style(item: pytest.Function) -> Style:
    option = item.config.getoption
    return Style(option("tbstyle"), option("showlocals"), item.config.get_verbosity())


def _on_threads(item: pytest.Function, wanted: RanksMark) -> Ranks[None]:
    run = partial(_call_on_thread, item.obj, _arguments(item), str(item.path), _style(item))
    return run_threads(run, wanted.world_size, timeout=wanted.timeout)


def _call_on_thread(
    function: Any, arguments: Mapping[str, object], path: str, style: Style, rank: int
) -> None:
    call(function, rank, arguments, path, style)


def _shipped(item: pytest.Function, wanted: RanksMark) -> Ranks[None]:
    return run_ranks(
        run_shipped,
        wanted.world_size,
        _body(item),
        timeout=wanted.timeout,
        backend=wanted.backend,
        group_timeout=wanted.collective_seconds,
    )


def _body(item: pytest.Function) -> Body:
    name = item.obj.__qualname__
    if "<locals>" in name:
        pytest.fail(f"a rank cannot find {name}, which was made inside a function", pytrace=False)
    given = {**_arguments(item), "rank": None}  # each rank has its own
    arguments = {key: _pickled(item, key, given[key]) for key in _arguments(item)}
    itself = None if item.instance is None else _pickled(item, "self", item.instance)
    return Body(item.module.__name__, str(item.path), name, itself, arguments, _style(item))


def _pickled(item: pytest.Function, name: str, value: object) -> bytes:
    try:
        return pickled(value)
    except Exception as error:
        wrong = str(error)
    pytest.fail(
        f"{item.name}: the argument {name!r} of type {type(value).__name__} cannot be sent to a "
        f"rank, which is another process: {wrong}. A fixture is set up once, here, and each rank "
        "gets a copy. Let it return something that can be pickled, make it inside the test, or "
        "use backend='threaded'.",
        pytrace=False,
    )


# ---- from ranks to one result ----


def _conclude(ranks: Ranks[None]) -> None:
    __tracebackhide__ = True
    ends = [_end_of(result) for result in ranks]
    kinds = {end.kind if end is not None else None for end in ends}
    first = ends[0]
    if first is not None and kinds == {"skipped"}:
        pytest.skip(first.text)
    if first is not None and kinds == {"xfailed"}:
        pytest.xfail(first.text)
    if any(result.failed for result in ranks):
        pytest.fail(_report(ranks), pytrace=False)


def _end_of(result: RankResult[None]) -> Ended | None:
    error = result.error.exception if result.error is not None else None
    return error if isinstance(error, Ended) else None


def _report(ranks: Ranks[None]) -> str:
    """Return what each rank did, the one that began it on top: others fail because of it."""
    failed = [result.rank for result in ranks if result.failed]
    by_time = sorted(ranks, key=_moment)
    head = f"{len(failed)} of {len(ranks)} ranks failed: {failed}"
    first = by_time[0]
    if len(failed) > 1 and _end_of(first) is not None:
        head += f"; rank {first.rank} was the first"
    return "\n".join([head, *_parts(by_time)])


def _moment(result: RankResult[None]) -> tuple[int, float]:
    end = _end_of(result)
    if _left(result):  # it could not say when; what others raised is most often what came of it
        return 0, result.seconds
    if end is not None:
        return 1, end.at
    return (2 if result.failed else 3), result.rank


def _left(result: RankResult[None]) -> bool:
    """Return whether a rank was killed, or exited, amid the test."""
    if result.hung or result.returned:
        return False
    if result.error is not None:
        return result.error.is_a(SystemExit)
    return result.exitcode is not None  # else a thread that was released


def _parts(results: Sequence[RankResult[None]]) -> Iterator[str]:
    """Yield what each rank did; those of which the same is to be shown together."""
    alike: dict[tuple[str, str], list[RankResult[None]]] = {}
    for result in results:
        end = _end_of(result)
        key = (end.kind, end.text) if end is not None else ("", str(result.rank))
        alike.setdefault(key, []).append(result)
    for (kind, text), ranks in alike.items():
        if kind:
            who = join_ranks([result.rank for result in ranks])
            yield f"--- {who} {kind} ({ranks[0].seconds:.2f} s)\n{text}"
        else:
            stack = _from_the_body_on(ranks[0].stack)
            yield describe(replace(ranks[0], stack=stack), output_lines=0)


def _from_the_body_on(stacks: str) -> str:
    """Return the stacks of a rank's threads without the frames below the test's own."""
    kept = []
    for stack in stacks.split("\n\n"):
        above, found, _ = stack.partition('  File "' + _marked_rank.__file__)
        kept.append(above.rstrip() if found else stack)
    return "\n\n".join(kept)

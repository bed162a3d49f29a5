"""Exceptions and rank lists as bounded text: nothing here can raise on a hostile exception."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence

MESSAGE_LIMIT = 4096  # bytes of one exception's message
NAME_LIMIT = 256  # bytes of one type's name
MAX_LEAVES = 8  # exceptions of a group that are told
MAX_WALK = 1000  # exceptions looked at: their chains may be rings
TRACEBACK_LIMIT = 8192  # bytes of one formatted traceback; the end is what a reader needs


def type_names(error: BaseException) -> tuple[str, ...]:
    """Return qualified names of the class and its bases, itself first; of a group's members too."""
    every = [error, *leaves_of(error)[:MAX_LEAVES]]
    bases = [base for each in every for base in type(each).__mro__[:-1]]
    return tuple(dict.fromkeys(map(qualified_name, bases)))


def qualified_name(kind: type[BaseException]) -> str:
    """Return "package.module.Name"."""
    return bounded(f"{kind.__module__}.{kind.__qualname__}", NAME_LIMIT)


def short_name(kind: type[BaseException]) -> str:
    """Return "ValueError" for built-ins, else "package.Name" without the modules between."""
    root = str(kind.__module__).split(".", 1)[0]  # a class may set it to anything
    name = kind.__qualname__ if root == "builtins" else f"{root}.{kind.__qualname__}"
    return bounded(name, NAME_LIMIT)


def message_of(error: BaseException) -> str:
    """Return what an exception says, those that it groups, and the one that began it all.

    That is ``str(error)``, or a remark when the exception cannot say what it is; for a group the
    headlines of its exceptions; and where it was raised from or while handling another, the first
    of those.
    """
    text = _own_text(error)
    leaves = leaves_of(error)
    if leaves:
        more = [f"and {len(leaves) - MAX_LEAVES} more"] if len(leaves) > MAX_LEAVES else []
        text = "; ".join([f"{text}: {_headline(leaves[0])}", *map(_headline, leaves[1:MAX_LEAVES])])
        text = "; ".join([text, *more])
    first, relation = _began(error)
    if first is not None:
        # Short first: what the exception itself says may fill all the room there is.
        began = f" ({relation} {bounded(_headline(first), MESSAGE_LIMIT // 4)})"
        return bounded(text, MESSAGE_LIMIT - len(began.encode())) + began
    return bounded(text, MESSAGE_LIMIT)


def leaves_of(error: BaseException) -> list[BaseException]:
    """Return the exceptions that a group holds, however deep; none if it is no group."""
    found: list[BaseException] = []
    waiting = [*reversed(_held_by(error))]
    for _ in range(MAX_WALK):
        if not waiting:
            break
        each = waiting.pop()
        inside = _held_by(each)
        waiting += reversed(inside)
        found += [] if inside else [each]
    return found


def _held_by(error: BaseException) -> list[BaseException]:
    # Before Python 3.11 groups come from a package, so they are known by what they have.
    try:
        inside = tuple(error.exceptions)  # type: ignore[attr-defined]
    except Exception:  # most have no such attribute, and it may be anything
        return []
    return [each for each in inside if isinstance(each, BaseException)]


def _began(error: BaseException) -> tuple[BaseException | None, str]:
    """Return the exception that led to this one, if any, and how."""
    relation = "caused by" if error.__cause__ is not None else "while handling"
    known = [error]
    while len(known) < MAX_WALK:
        last = known[-1]
        before = last.__cause__
        if before is None and not last.__suppress_context__:
            before = last.__context__
        if before is None or any(before is each for each in known):
            break
        known.append(before)
    return (known[-1], relation) if len(known) > 1 else (None, "")


def _headline(error: BaseException) -> str:
    text = _own_text(error)
    return f"{short_name(type(error))}: {text}" if text else short_name(type(error))


def _own_text(error: BaseException) -> str:
    try:
        return bounded(str(error), MESSAGE_LIMIT)
    except Exception as broken:  # a broken __str__ must not hide the failure
        return f"<{short_name(type(error))} whose text raised {short_name(type(broken))}>"


def traceback_of(error: BaseException) -> str:
    """Return the end of the formatted traceback, at most :data:`TRACEBACK_LIMIT` bytes."""
    try:
        lines = traceback.format_tb(error.__traceback__)
    except Exception:  # source files can vanish, frames can be odd; the message still stands
        return ""
    text = "".join(lines)
    data = text.encode("utf-8", "backslashreplace")
    return data[-TRACEBACK_LIMIT:].decode("utf-8", "ignore")


def bounded(text: str, limit: int) -> str:
    """Return ``text`` as valid Unicode of at most ``limit`` UTF-8 bytes, marked where cut."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return data.decode("utf-8")
    mark = f"... ({len(data)} bytes in all)"
    return data[: limit - len(mark)].decode("utf-8", "ignore") + mark


_TRANSPORT_MARKS = (
    "closed by peer",
    "reset by peer",
    "Timed out waiting",
    "pair closure",
    "communicator was aborted",
)


def says_transport(message: str) -> bool:
    """Return whether this is a transport's complaint: a consequence, hardly ever a cause."""
    return any(mark in message for mark in _TRANSPORT_MARKS)


def tidy(message: str) -> str:
    """Return a transport's message without its source file, address and advice."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", message.strip())
    text = text.split(" This is typically caused by", 1)[0]
    return re.sub(r"\s*\[[0-9a-f.:]*\]:\d+", "", text).rstrip(". ")


def join_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5": runs are shortened, long lists are cut."""
    if not ranks:
        return "no rank"
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs[:16]]
    more = "" if len(runs) <= 16 else f", ... ({len(ordered)} ranks in all)"
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(shown)}{more}"


def ranks_are(ranks: Sequence[int]) -> str:
    """Return the verb that agrees with the number of ranks."""
    return "is" if len(ranks) == 1 else "are"

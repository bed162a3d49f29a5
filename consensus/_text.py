"""Exceptions and rank lists as bounded text: nothing here can raise on a hostile exception."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence

MESSAGE_LIMIT = 4096  # bytes of one exception's message
NAME_LIMIT = 256  # bytes of one type's name
TRACEBACK_LIMIT = 8192  # bytes of one formatted traceback; the end is what a reader needs


def type_names(kind: type[BaseException]) -> tuple[str, ...]:
    """Return qualified names of ``kind`` and its bases, the class itself first."""
    return tuple(
        bounded(f"{base.__module__}.{base.__qualname__}", NAME_LIMIT) for base in kind.__mro__[:-1]
    )


def short_name(kind: type[BaseException]) -> str:
    """Return "ValueError" for built-ins, else "package.Name" without the modules between."""
    root = str(kind.__module__).split(".", 1)[0]  # a class may set it to anything
    name = kind.__qualname__ if root == "builtins" else f"{root}.{kind.__qualname__}"
    return bounded(name, NAME_LIMIT)


def message_of(error: BaseException) -> str:
    """Return ``str(error)``, or a remark when the exception cannot say what it is."""
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


_TRANSPORT_MARKS = ("closed by peer", "reset by peer", "Timed out waiting", "pair closure")


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

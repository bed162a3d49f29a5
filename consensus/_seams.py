"""Where the test kit reaches in. Unused, each costs one comparison."""

from __future__ import annotations

from collections.abc import Callable

fault: Callable[[str], None] | None = None  # called with the name of each point that is reached
agreement = True  # False: every rank decides alone, as if this library were not there


def reach(point: str) -> None:
    """Mark that this rank has come to ``point``; an injected fault raises (or worse) here."""
    if fault is not None:
        fault(point)

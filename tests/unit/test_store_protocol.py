"""A protocol over the store whose wait is left: what it still says, and what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # missing in __all__

from consensus._planning import Await, GaveUp, Put, StoreProtocol
from consensus._store import StoreClient, drive_store
from consensus._waiting import LinkBroken, Patience

BROKEN = LinkBroken("the store is gone", expired=False)


@pytest.fixture
def client() -> Iterator[StoreClient]:
    made = StoreClient(HashStore())
    yield made
    made.close()


def gives_up() -> StoreProtocol[str]:
    try:
        yield Await("verdict", (0, 1))
    except GaveUp as gave_up:
        yield Put("verdict", str(gave_up).encode())
        raise
    return "planned"


def has_planned_all_the_same() -> StoreProtocol[str]:
    try:
        yield Await("verdict", (0, 1))
    except GaveUp:
        yield Put("verdict", b"all had come")
    return "planned"


def leave_with(error: BaseException, client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*args: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(client, "wait_for_all", wait)


@pytest.mark.parametrize(
    ("error", "told"),
    [(BROKEN, "the store is gone"), (KeyboardInterrupt(), "interrupted by KeyboardInterrupt")],
    ids=["broken", "interrupted"],
)
def test_peers_are_told_why_a_wait_was_left(
    error: BaseException, told: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_with(error, client, monkeypatch)
    with pytest.raises(type(error)):
        drive_store(gives_up(), client, Patience("planning", hard=5.0))
    said = client.peek("verdict", Patience("planning", hard=5.0))
    assert said is not None
    assert told in said.decode()


def test_what_came_about_at_the_last_moment_counts(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_with(BROKEN, client, monkeypatch)
    patience = Patience("planning", hard=5.0)
    assert drive_store(has_planned_all_the_same(), client, patience) == "planned"


def test_an_interrupt_comes_out_even_where_it_came_about(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_with(KeyboardInterrupt(), client, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        drive_store(has_planned_all_the_same(), client, Patience("planning", hard=5.0))

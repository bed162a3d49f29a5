"""What a rank that is late says of its threads, and how this is shown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # missing in __all__

from consensus import _watch
from consensus._absence import Post, Whereabouts
from consensus._store import StoreClient
from consensus._waiting import LinkBroken, Patience
from consensus._watch import (
    MAX_ASKED,
    MAX_FRAMES,
    MAX_THREADS,
    SILENT,
    STACK_LIMIT,
    UNHEARD,
    UNWATCHED,
    Watcher,
    is_stack,
    readable,
    stacks_of_threads,
)
from consensus.errors import MAX_STACK_LINES, LateRanks
from consensus.testing import run_ranks
from consensus.vote import Ranks

DUMP = """Thread 0x00000000000000a1 (most recent call first):
  File "/a/_store.py", line 3 in _serve

Thread 0x00000000000000a2 (most recent call first):
  File "/a/load.py", line 7 in read
  File "/a/load.py", line 2 in work

Current thread 0x00000000000000a3 (most recent call first):
  File "/a/train.py", line 9 in main
"""
NAMES = {0xA1: "consensus-store-watch", 0xA3: "MainThread"}
MAIN = 'MainThread, innermost call first\n  File "/a/train.py", line 9 in main'


def test_the_main_thread_comes_first_and_our_own_threads_are_left_out() -> None:
    assert readable(DUMP, NAMES, 0xA3, alone=False) == (
        f"{MAIN}\n"
        "thread 0xa2, innermost call first\n"
        '  File "/a/load.py", line 7 in read\n'
        '  File "/a/load.py", line 2 in work'
    )


def test_of_a_rank_that_is_a_thread_no_other_is_shown() -> None:
    assert readable(DUMP, NAMES, 0xA3, alone=True) == MAIN


def test_many_deep_threads_are_bounded() -> None:
    frames = "\n".join(f'  File "/{"d" * 80}", line {i} in f' for i in range(MAX_FRAMES + 5))
    dump = "\n\n".join(f"Thread 0x{i:016x} (most recent call first):\n{frames}" for i in range(20))
    text = readable(dump, {}, 3, alone=False)
    assert text.startswith("thread 0x3, innermost call first\n")
    assert "\n  and 5 more\nthread 0x0," in text
    assert len(text.encode()) <= STACK_LIMIT
    short = readable(dump.replace("d" * 80, "d"), {}, 3, alone=False)
    assert short.count("innermost call first") == MAX_THREADS
    assert short.endswith(f"\nand {20 - MAX_THREADS} more threads")


def wait_in_a_lock(inside: threading.Event, leave: threading.Lock) -> None:
    inside.set()
    leave.acquire()


def test_a_thread_that_the_dump_leaves_out_is_said_to_be_missing() -> None:
    text = readable(
        "Thread 0x2 (most recent call first):\n  File f", {1: "MainThread"}, 1, alone=False
    )
    first, *rest = text.splitlines()
    assert first.startswith("MainThread is not shown: this process has too many threads")
    assert rest == ["thread 0x2, innermost call first", "  File f"]


def stacks_of_a_process(rank: int) -> None:
    inside, leave = threading.Event(), threading.Lock()
    leave.acquire()
    thread = threading.Thread(target=wait_in_a_lock, args=(inside, leave), name="loader")
    thread.start()
    inside.wait()
    try:
        text = stacks_of_threads()
        assert text.startswith("MainThread, innermost call first\n")
        assert "in stacks_of_a_process" in text
        assert "in wait_in_a_lock" in text.partition("loader, innermost call first\n")[2]
        alone = stacks_of_threads(thread.ident)
        assert alone.startswith("loader, innermost call first\n")
        assert "MainThread" not in alone
    finally:
        leave.release()
        thread.join()


def test_stacks_of_a_process_name_its_threads_and_where_they_are() -> None:
    """In one of its own: of many threads, such as other tests may leave, some are not shown."""
    run_ranks(stacks_of_a_process, 1, init=False, timeout=40.0).values()


def test_an_error_shows_ranks_at_the_same_place_together_and_keeps_the_rest() -> None:
    deep = "\n".join(["MainThread, innermost call first", *["  File f"] * 100])
    stacks = {1: MAIN, 2: deep, 3: MAIN, 4: UNWATCHED}
    error = LateRanks("load", (1, 2, 3, 4), seconds=2.0, stacks=stacks)
    assert error.stacks == stacks
    text = str(error)
    assert f"  ranks 1, 3: {MAIN.splitlines()[0]}\n      File" in text
    assert f"  rank 4: {UNWATCHED}" in text
    assert text.count("File f") < MAX_STACK_LINES
    assert [is_stack(each) for each in stacks.values()] == [True, True, True, False]


class Rank:
    """A rank that watches, with a client of its own."""

    def __init__(self, store: Any, number: int) -> None:
        self.client = StoreClient(store)
        self.watcher = Watcher(self.client, number, alone=False)
        # What it is asked from now on, it is asked when it says that it is here.
        store.wait([f"consensus/watch/here/{number}"])


@pytest.fixture
def store() -> Any:
    return HashStore()


@pytest.fixture
def ranks(store: Any) -> Iterator[list[Rank]]:
    made = [Rank(store, number) for number in range(2)]
    yield made
    for rank in made:
        rank.client.close()


def test_a_rank_answers_again_and_again_and_keeps_one_answer(store: Any, ranks: list[Rank]) -> None:
    asker, late = ranks
    for number in range(3):
        answers = asker.watcher.ask((1, 2), f"vote/{number}")
        assert is_stack(answers[1])
        assert answers[2] == UNWATCHED
    late.client.close()
    assert store.num_keys() == 1
    assert store.check(["consensus/watch/here/0"])
    assert asker.watcher.ask((1,), "vote/3") == {1: UNWATCHED}
    asker.client.close()
    assert store.num_keys() == 0
    assert "consensus-store-watch" not in {thread.name for thread in threading.enumerate()}


def test_all_that_ask_for_one_agreement_share_an_answer(ranks: list[Rank]) -> None:
    asker = ranks[0].watcher
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: asker.ask((1,), "vote/0"), range(8)))
    assert all(is_stack(answer[1]) for answer in answers)
    before = asker.ask((1,), "vote/0")
    assert asker.ask((1,), "vote/0") == before  # read, not asked for


def test_a_rank_that_gives_no_answer_is_not_waited_for_long(
    store: Any, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_watch, "ANSWER_S", 0.1)
    for number in range(2, 9):
        store.set(f"consensus/watch/here/{number}", "1")
    asked = ranks[0].watcher.ask(tuple(range(2, 9)), "vote/0")
    assert asked == dict.fromkeys(range(2, 2 + MAX_ASKED), SILENT)


class Answers:
    """Stands in for a watcher: hands out one answer after the other."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.names: list[str] = []

    def ask(self, ranks: tuple[int, ...], name: str) -> dict[int, str]:
        self.names.append(name)
        return dict.fromkeys(ranks, self.texts.pop(0))


@pytest.mark.parametrize(
    ("soft", "hard", "shown"), [(DUMP, SILENT, DUMP), (DUMP, MAIN, MAIN), (SILENT, MAIN, MAIN)]
)
def test_the_newest_stack_is_shown_or_an_older_one_where_there_is_no_answer(
    store: Any, soft: str, hard: str, shown: str
) -> None:
    client = StoreClient(store)
    whereabouts = Whereabouts(client, 0)
    answers: Any = Answers(soft, hard)
    whereabouts.watcher = answers
    patience = Patience("load", hard=1.0)
    whereabouts.warn("vote", (0, 1), 5, patience)
    expired = LinkBroken("timed out", expired=True)
    absence = whereabouts.absence("vote", (0, 1), 5, patience, expired)
    client.close()
    assert absence.stacks == {1: shown}
    assert answers.names == ["vote/stack/5/soft", "vote/stack/5/hard"]


def test_a_rank_whose_connection_broke_is_not_asked(store: Any) -> None:
    client = StoreClient(store)
    whereabouts = Whereabouts(client, 0)
    answers: Any = Answers()
    whereabouts.watcher = answers
    broken = LinkBroken("reset", expired=False, connection=True)
    absence = whereabouts.absence("vote", (0, 1), 5, Patience("load", hard=1.0), broken)
    client.close()
    assert absence.gone == (1,)
    assert absence.stacks == {}
    assert answers.names == []


@pytest.mark.parametrize(
    ("posted", "late", "asked"),
    [((), (1, 2, 3), (2, 3)), ((2,), (1, 3), (3,)), ((1,), (1, 2, 3), (2, 3))],
)
def test_only_the_rank_whose_connection_broke_is_gone(
    store: Any, posted: Ranks, late: Ranks, asked: Ranks
) -> None:
    """Also one that had come before it died; the others are asked where they are."""
    client = StoreClient(store)
    for rank in posted:
        Whereabouts(client, rank).post("vote", Post(5, "load"))
    whereabouts = Whereabouts(client, 0)
    whereabouts.watcher = Answers("somewhere")  # type: ignore[assignment]
    broken = LinkBroken("reset", expired=False, connection=True, gone=1)
    absence = whereabouts.absence("vote", (0, 1, 2, 3), 5, Patience("load", hard=1.0), broken)
    client.close()
    assert (absence.late, absence.gone, tuple(absence.stacks)) == (late, (1,), asked)


def test_nobody_is_gone_where_a_deadline_had_passed(store: Any) -> None:
    """Whoever it passed for has closed its connections."""
    client = StoreClient(store)
    Whereabouts(client, 2).post("vote", Post(5, "load", expired=True))
    broken = LinkBroken("reset", expired=False, connection=True, gone=2)
    patience = Patience("load", hard=1.0)
    absence = Whereabouts(client, 0).absence("vote", (0, 1, 2), 5, patience, broken)
    client.close()
    assert (absence.late, absence.gone) == ((1,), ())


def test_where_nobody_knows_whose_connection_broke_one_of_many_late_ranks_is_not_accused(
    store: Any,
) -> None:
    client = StoreClient(store)
    broken = LinkBroken("reset", expired=False, connection=True)
    patience = Patience("load", hard=1.0)
    absence = Whereabouts(client, 0).absence("vote", (0, 1, 2), 5, patience, broken)
    client.close()
    assert (absence.late, absence.gone) == ((1, 2), ())


def test_a_store_that_does_not_answer_is_said_and_no_error(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise LinkBroken("the store failed", expired=False)

    monkeypatch.setattr(ranks[0].client, "peek", fail)
    assert ranks[0].watcher.ask((1,), "vote/0") == {1: UNHEARD}

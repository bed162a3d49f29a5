"""Where a late rank is: its Python stacks, sent to ranks that wait, without its cooperation.

[Note: a rank that is busy answers]
A thread of each rank that watches blocks in a wait of the job's store, for a key of its rank. Who
waits for a late rank sets this key, to the name under which it looks for the answer. So nothing is
polled, nothing is sent on the healthy path, and the late rank's own code takes no part: it may
sleep, hold a lock or wait in a collective. But the thread needs the GIL: a process that is stopped,
or in C code that holds the GIL, cannot answer, which is said.

All that wait in one agreement look under the same name, so a rank answers each of them at once, and
once only for all of them. Its last answer stays in the store until the next one, or the end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

from consensus._store import StoreClient, get_within
from consensus._text import bounded
from consensus._waiting import LinkBroken, Patience
from consensus.vote import Ranks

ANSWER_S = 2.0  # for all ranks that are asked together; an answer takes milliseconds
MAX_ASKED = 4  # more stacks than these nobody reads
MAX_THREADS = 8  # shown of one rank
MAX_FRAMES = 30  # shown of one thread, the innermost
STACK_LIMIT = 16384  # bytes of one rank's answer

# torch's store logs a warning each time that a wait runs out.
_LONG_S = 86400.0
_STOP, _STOP_S = b"stop", 1.0

_NUMBER = re.compile(r"thread 0x([0-9a-f]+)", re.IGNORECASE)

SILENT = f"gave no answer within {ANSWER_S:.0f} s: stopped, gone, or in C code that holds the GIL"
UNWATCHED = "does not watch (it has not called consensus.watch(), or has ended)"
UNHEARD = "could not be asked: the store does not answer"


class Watcher:
    """Answers ranks that ask where this one is, and asks late ones. See the module's note."""

    def __init__(self, client: StoreClient, rank: int, *, alone: bool) -> None:
        """Answer from a thread of ``client``, until it is closed.

        Args:
            client: This rank's.
            rank: Global.
            alone: Show the calling thread only: the others are other ranks.
        """
        self._client = client
        self._own, self._asked = _here(rank), _asked(rank)
        self._only = threading.get_ident() if alone else None
        self._stopped = False
        client.serve("watch", self._answer, self._stop)

    def _stop(self) -> None:
        self._stopped = True  # first: the thread may be about to delete the key that wakes it
        self._client.tell(self._asked, _STOP)

    def _answer(self, store: Any) -> None:
        store.set(self._own, b"1")
        answers: set[str] = set()
        found: list[Any] | None = None
        try:
            while not self._stopped:
                found = get_within(store, keys=[self._asked], seconds=_LONG_S)
                if found is not None and not self._stopped:
                    name = bytes(found[0]).decode()
                    store.set(name, stacks_of_threads(self._only).encode())
                    store.delete_key(self._asked)
                    for before in answers - {name}:
                        store.delete_key(before)
                    answers = {name}
        finally:
            with contextlib.suppress(RuntimeError):  # the store may be what has gone
                # The key that stops this thread may be on its way, and nobody else would delete it.
                if self._stopped and found != [_STOP]:
                    get_within(store, keys=[self._asked], seconds=_STOP_S)
                for key in (self._own, self._asked, *answers):
                    store.delete_key(key)

    def ask(self, ranks: Ranks, name: str) -> dict[int, str]:
        """Return where the first few of ``ranks`` are, or why they do not say; never raises.

        Args:
            ranks: Who is late, by the caller's lights.
            name: The agreement they are late for; those that wait in it share the answers.
        """
        asked = ranks[:MAX_ASKED]
        answers: dict[int, str] = {}
        waiting: dict[int, str] = {}  # rank -> key of its answer
        patience = Patience("asking late ranks where they are", hard=ANSWER_S)
        try:
            for rank in asked:
                if self._client.peek(_here(rank), patience) is None:
                    answers[rank] = UNWATCHED
                else:
                    waiting[rank] = self._question(rank, f"{name}/{rank}", patience)
            pause = 0.01
            while True:
                for rank, key in list(waiting.items()):
                    found = self._client.peek(key, patience)
                    if found is not None:
                        answers[rank] = found.decode()
                        del waiting[rank]
                if not waiting or patience.left <= 0:
                    return {rank: answers.get(rank, SILENT) for rank in asked}
                threading.Event().wait(min(pause, patience.left))
                pause *= 2
        except LinkBroken:
            return {rank: answers.get(rank, UNHEARD) for rank in asked}

    def _question(self, rank: int, answer: str, patience: Patience) -> str:
        """Ask for ``answer``, unless it is there; return the key to look under."""
        if self._client.peek(answer, patience) is not None:
            return answer
        # Where somebody else has just asked, for another agreement, that answer is as good.
        return self._client.claim(_asked(rank), answer.encode(), patience).decode()


def _here(rank: int) -> str:
    return f"watch/here/{rank}"


def _asked(rank: int) -> str:
    return f"watch/asked/{rank}"


def is_stack(text: str) -> bool:
    """Return whether a rank answered, rather than why it did not."""
    return "\n" in text


def stacks_of_threads(only: int | None = None) -> str:
    """Return where the Python threads of this process are, innermost frame first, bounded.

    faulthandler reads them while it holds the GIL and makes no frame objects, so no frame moves
    meanwhile: ``traceback`` lets threads run, and frames of running threads have crashed the
    interpreter. No source lines: the file system may be what the rank is stuck in.

    Args:
        only: Number of the one thread to show; None is all, the main thread first, helper threads
            of this library left out.
    """
    try:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            dump = file.read()
    except OSError as error:  # no room, or no descriptor left
        return f"cannot write its stacks: {error}"
    names = {thread.ident or 0: thread.name for thread in threading.enumerate()}
    return readable(dump, names, only or threading.main_thread().ident or 0, alone=only is not None)


def readable(dump: str, names: Mapping[int, str], first: int, *, alone: bool) -> str:
    """Return faulthandler's text of all threads with their names, bounded.

    Args:
        dump: One paragraph a thread, which begins with its number.
        names: Number -> name, where Python knows it.
        first: The thread to begin with.
        alone: Leave the others out.
    """
    stacks: dict[int, list[str]] = {}
    for paragraph in dump.strip().split("\n\n"):
        head, *frames = paragraph.splitlines()
        number = _NUMBER.search(head)
        if number is not None:
            stacks[int(number[1], 16)] = frames
    order = sorted(stacks, key=lambda thread: thread != first)
    shown = [each for each in order if not names.get(each, "").startswith("consensus-")]
    shown = [each for each in shown if each == first or not alone]
    parts = []
    if first not in stacks:  # faulthandler lists 100 threads, and the main one is the oldest
        name = names.get(first, f"thread {first:#x}")
        parts.append(f"{name} is not shown: this process has too many threads, others are newer")
    for thread in shown[:MAX_THREADS]:
        frames, more = stacks[thread][:MAX_FRAMES], len(stacks[thread]) - MAX_FRAMES
        title = f"{names.get(thread, f'thread {thread:#x}')}, innermost call first"
        parts.append("\n".join([title, *frames, *([f"  and {more} more"] if more > 0 else [])]))
    if len(shown) > MAX_THREADS:
        parts.append(f"and {len(shown) - MAX_THREADS} more threads")
    return bounded("\n".join(parts), STACK_LIMIT)

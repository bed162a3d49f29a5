"""The job's key-value store, with an end to every request; see [Note: every wait has an end]."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore

from consensus._planning import (
    Add,
    Await,
    AwaitAll,
    GaveUp,
    Put,
    StoreAnswer,
    StoreProtocol,
    StoreRequest,
)
from consensus._waiting import (
    IDLE_S,
    NAMING_S,
    NO_DESCRIPTOR,
    SLICE_S,
    STORE_SLICE_S,
    LinkBroken,
    Patience,
    has_no_descriptor,
)

T = TypeVar("T")

MAX_NAMED = 8  # keys in one error message
_HOST_GONE = "the process that hosts it may be stopped or gone"


class StoreClient:
    """The job's key-value store on connections and threads of its own.

    One for requests that are answered at once and one for waits, since a wait locks its client.
    """

    def __init__(self, store: Any, *, on_idle: Callable[[], None] = lambda: None) -> None:
        """Use ``store``; ``on_idle`` is called by threads that have had nothing to do for long."""
        self._base = store
        self._on_idle = on_idle
        self._workers: dict[str, _Worker] = {}
        self._answers = True  # the last request was answered, or there has been none
        self._left: list[_Worker] = []  # still in a request that nobody waits for any more
        self._stops: list[Callable[[], None]] = []

    def put(self, key: str, value: bytes, patience: Patience) -> None:
        """Set ``key``."""
        self._call(lambda store: store.set(key, value), patience)

    def claim(self, key: str, value: bytes, patience: Patience) -> bytes:
        """Set ``key`` unless it is set; return what it holds now, the same to everyone."""
        return bytes(self._call(lambda store: store.compare_set(key, b"", value), patience))

    def add(self, key: str, amount: int, patience: Patience) -> int:
        """Add to a counter and return its new value."""
        return int(self._call(lambda store: store.add(key, amount), patience))

    def drop(self, keys: Sequence[str], patience: Patience) -> None:
        """Forget ``keys``."""
        self._call(lambda store: [store.delete_key(key) for key in keys], patience)

    def peek(self, key: str, patience: Patience) -> bytes | None:
        """Return the value of ``key`` if it is set now."""
        found = self._call(
            lambda store: bytes(store.get(key)) if store.check([key]) else None, patience
        )
        return found if found is None else bytes(found)

    def wait(self, key: str, patience: Patience) -> bytes:
        """Return the value of ``key`` once somebody sets it."""
        return self.wait_for_all([key], patience)[0]

    def wait_for_all(self, keys: Sequence[str], patience: Patience) -> list[bytes]:
        """Return the values of ``keys`` once all are set: two requests, whatever their number."""
        while True:
            # torch logs a warning each time a wait runs out, so these slices are long.
            seconds = min(STORE_SLICE_S, max(patience.left, 0.01))
            found = self._call(partial(get_within, keys=keys, seconds=seconds), patience, "wait")
            if found is not None:
                return list(map(bytes, found))
            if patience.left <= 0:
                raise LinkBroken(f"nobody set {_some_of(keys)}", expired=True)

    @property
    def starved(self) -> bool:
        """Whether a connection to the store waits for a file descriptor of this process."""
        return any(worker.starved for worker in (*self._workers.values(), *self._left))

    def serve(self, name: str, work: Callable[[Any], None], stop: Callable[[], None]) -> None:
        """Have a helper thread do ``work`` with a store, until :meth:`close` calls ``stop``."""
        self._stops.append(stop)
        self._start(name, work)

    def tell(self, key: str, value: bytes) -> None:
        """Set ``key`` soon: for a thread that must not wait."""
        self._start("ask", lambda store: store.set(key, value))

    def close(self) -> None:
        """End the helper threads.

        Also called at exit: a thread that comes back from C++ while the interpreter is being
        finalized is ended by force, and C++ then aborts the process.
        """
        while self._stops:
            self._stops.pop()()
        for worker in (*self._workers.values(), *self._left):
            worker.end()
        self._workers.clear()
        self._left.clear()

    def _start(self, worker: str, work: Callable[[Any], Any]) -> _Request:
        if worker not in self._workers:
            self._workers[worker] = _Worker(self._base, worker, self._on_idle)
        return self._workers[worker].ask(work)

    def _call(self, work: Callable[[Any], Any], patience: Patience, worker: str = "ask") -> Any:
        request = self._start(worker, work)
        # Who waited for a store in vain once need not do so for each further question.
        patient = self._answers or worker == "wait"
        until = time.monotonic() + (max(patience.left, 0.0) + NAMING_S if patient else 0.0)
        try:
            while not request.done.wait(SLICE_S):
                patience.look_up()
                if time.monotonic() > until:
                    self._answers = False
                    why = NO_DESCRIPTOR if self.starved else _HOST_GONE
                    raise LinkBroken(f"the store does not answer; {why}", expired=True)
        except BaseException:
            left = self._workers.pop(worker, None)  # at work still; the next request has another
            if left is not None:
                left.end_soon()
                self._left.append(left)
            raise
        self._answers = True
        if request.error is not None:
            raise LinkBroken(f"the store failed: {request.error}", expired=False)
        return request.result


@dataclass(slots=True)
class _Request:
    work: Callable[[Any], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None


class _Worker:
    """A thread with a connection of its own to the store."""

    def __init__(self, base: Any, name: str, on_idle: Callable[[], None]) -> None:
        self._base = base
        self._on_idle = on_idle
        self.starved = False  # it has yet to connect, and no descriptor was left for that
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, daemon=True, name=f"consensus-store-{name}"
        )
        self._thread.start()

    def ask(self, work: Callable[[Any], Any]) -> _Request:
        request = _Request(work)
        self._requests.put(request)
        return request

    def end_soon(self) -> None:
        self._requests.put(None)

    def end(self) -> None:
        self.end_soon()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def _serve(self) -> None:
        self.starved = has_no_descriptor()  # torch then tries on, until one is free
        try:
            store = PrefixStore("consensus", self._base.clone())
        except (RuntimeError, NotImplementedError):  # an in-process store need not be cloned
            store = PrefixStore("consensus", self._base)
        self.starved = False
        while True:
            try:
                request = self._requests.get(timeout=IDLE_S)
            except queue.Empty:
                self._on_idle()
                continue
            if request is None:
                return
            try:
                request.result = request.work(store)
            except Exception as error:  # carried to the thread that asked
                request.error = error
            request.done.set()


def get_within(store: Any, *, keys: Sequence[str], seconds: float) -> list[Any] | None:
    """Return the values of ``keys``, or None when they are not all set within ``seconds``."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:  # DistStoreError is one; only its text says which kind
        if "imeout" in str(error) or "imed out" in str(error):
            return None
        raise
    if len(keys) == 1 or not store.has_extended_api():
        return [store.get(key) for key in keys]
    return list(store.multi_get(keys))


def drive_store(protocol: StoreProtocol[T], client: StoreClient, patience: Patience) -> T:
    """Run a store protocol; when it leaves a wait it may tell the others, and then ends.

    Raises:
        LinkBroken: The wait was left, here or by a peer, or the store failed.
        BaseException: What interrupted the wait, such as Ctrl-C; the others have been told.
    """
    go_on = partial(protocol.send, None)
    own: BaseException | None = None
    why = ""
    try:
        while True:
            wanted = go_on()
            try:
                answer = _answer(wanted, client, patience)
            except BaseException as error:
                if own is None:
                    own, why = error, _why_given_up(error, patience)
                    patience = Patience(patience.phase, hard=NAMING_S)
                go_on = partial(protocol.throw, GaveUp(why))
            else:
                go_on = partial(protocol.send, answer)
    except StopIteration as stop:
        if own is not None and not isinstance(own, LinkBroken):
            raise own from None
        result: T = stop.value
        return result
    except GaveUp as gave_up:
        raise own or LinkBroken(f"planning was given up: {gave_up}", expired=False) from None


def _why_given_up(error: BaseException, patience: Patience) -> str:
    if not isinstance(error, LinkBroken):
        return f"a rank was interrupted by {type(error).__name__}"
    return f"a rank waited {patience.waited:.1f} s" if error.expired else str(error)


def _some_of(keys: Sequence[str]) -> str:
    if len(keys) == 1:
        return repr(keys[0])
    more = f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
    return f"at least one of {', '.join(map(repr, keys[:MAX_NAMED]))}{more}"


def _answer(wanted: StoreRequest, client: StoreClient, patience: Patience) -> StoreAnswer:
    if isinstance(wanted, Add):
        return client.add(wanted.key, wanted.amount, patience)
    if isinstance(wanted, Put):
        return client.claim(wanted.key, wanted.value, patience)
    if isinstance(wanted, Await):
        return client.wait(wanted.key, patience)
    if isinstance(wanted, AwaitAll):
        return client.wait_for_all(wanted.keys, patience)
    client.drop(wanted.keys, patience)
    return None

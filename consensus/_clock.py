"""Measures the messages of agreements from outside, for the demo and the check."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from consensus._channel import Channel
from consensus._transport import Link
from consensus._waiting import Patience


class VoteClock:
    """Notes how long this rank spends in each message of a channel, waiting for peers included."""

    def __init__(self, channel: Channel) -> None:
        """Put a clock on the channel's link."""
        self._seconds: list[float] = []
        channel.link = _TimedLink(channel.link, self._seconds, channel.link.device)

    def take(self) -> tuple[float, ...]:
        """Return the seconds of each message since the last call."""
        taken = tuple(self._seconds)
        self._seconds.clear()
        return taken


@dataclass(slots=True)
class _TimedLink:
    link: Link
    seconds: list[float]
    device: torch.device

    def all_reduce_max(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        with self._timed():
            return self.link.all_reduce_max(words, patience)

    def all_reduce_sum(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        with self._timed():
            return self.link.all_reduce_sum(words, patience)

    def close(self) -> None:
        self.link.close()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds.append(time.perf_counter() - start)

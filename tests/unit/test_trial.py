"""A new link is relied on only if it answers as it must."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

import pytest

from consensus import _sockets
from consensus._trial import make_link
from consensus._waiting import NO_DESCRIPTOR, LinkBroken, Patience


class Answers:
    """A link of rank 1 among three that answers with what it was given, or breaks."""

    def __init__(self, answer: Sequence[int] | None) -> None:
        self.answer = answer
        self.asked: list[Sequence[int]] = []

    def all_reduce_max(self, words: Sequence[int], patience: Patience) -> Sequence[int]:
        self.asked.append(words)
        if self.answer is None:
            raise LinkBroken("no answer in 0.1 s", expired=True)
        return self.answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([3, 3], ""),
        ([2, 2], "expected (3, 3) from a MAX over int64; got (2, 2)"),
        ([3, 2], "expected (3, 3) from a MAX over int64; got (3, 2)"),
        ([5, 4], "expected (3, 3) from a MAX over int64; got (5, 4)"),  # a sum
        (None, "no answer in 0.1 s"),
    ],
)
def test_a_link_that_answers_otherwise_is_not_used(
    answer: Sequence[int] | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Answers(answer)
    monkeypatch.setattr(_sockets, "connect", lambda *args, **options: link)
    nobody: Any = None
    patience = Patience("making", hard=1.0)
    found = make_link("tcp", "a", (4, 5, 6), 5, job_store=nobody, client=nobody, patience=patience)
    assert found == (None if reason else link, reason)
    assert link.asked == [(2, 2)]  # of ranks 4 and 6 they are (1, 3) and (3, 1)


def test_a_link_for_which_no_descriptor_is_left_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(_sockets, "connect", connect)
    nobody: Any = None
    patience = Patience("making", hard=1.0)
    found = make_link("tcp", "a", (4, 5), 5, job_store=nobody, client=nobody, patience=patience)
    assert found[1].endswith("Too many open files; " + NO_DESCRIPTOR)

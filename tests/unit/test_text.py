from collections.abc import Iterator
from itertools import pairwise

import pytest

from consensus._text import (
    MESSAGE_LIMIT,
    NAME_LIMIT,
    TRACEBACK_LIMIT,
    bounded,
    join_ranks,
    message_of,
    qualified_name,
    ranks_are,
    says_transport,
    short_name,
    tidy,
    traceback_of,
    type_names,
)


class BrokenText(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class NoText(Exception):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


class Endless(Exception):
    def __str__(self) -> str:
        return str(self)


class NoModule(Exception):
    __module__ = None  # type: ignore[assignment]


LongName = type("L" * 100_000, (Exception,), {})


def raised(error: BaseException, depth: int = 0) -> BaseException:
    """Return ``error`` with a traceback of ``depth`` calls, no two in a row alike."""

    def fail(left: int) -> None:
        if left:
            call(left - 1)
        raise error

    def call(left: int) -> None:
        fail(left)

    try:
        fail(depth)
    except BaseException as caught:
        return caught
    raise AssertionError("fail() did not raise")


# ---- exceptions ----


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("boom"), "boom"),
        (ValueError(), ""),
        (KeyError("k"), "'k'"),
        (BrokenText(), "<tests.BrokenText whose text raised ZeroDivisionError>"),
        (NoText(), "<tests.NoText whose text raised TypeError>"),
        (Endless(), "<tests.Endless whose text raised RecursionError>"),
        (ValueError("\ud800"), "\\ud800"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_exception_has_a_message(error: BaseException, text: str | None) -> None:
    assert message_of(error) == (str(error) if text is None else text)


class Grouped(Exception):
    """What a group looks like on every Python; the language has its own since 3.11."""

    def __init__(self, text: str, exceptions: object) -> None:
        super().__init__(text)
        self.exceptions = exceptions


class RaisesOnLook(Exception):
    @property
    def exceptions(self) -> list[Exception]:
        raise ZeroDivisionError


def test_a_group_says_what_it_holds_and_is_known_by_it() -> None:
    inner = Grouped("inner", [KeyError("k"), BrokenText()])
    error = Grouped("2 failed", (ValueError("boom"), inner))
    assert message_of(error) == (
        "2 failed: ValueError: boom; KeyError: 'k'; "
        "tests.BrokenText: <tests.BrokenText whose text raised ZeroDivisionError>"
    )
    names = type_names(error)
    assert names[0] == "tests.unit.test_text.Grouped"
    assert {"builtins.ValueError", "builtins.LookupError"} < set(names)
    assert len(names) == len(set(names))


def test_a_large_group_and_one_that_holds_itself_have_an_end() -> None:
    assert message_of(Grouped("many", [ValueError(i) for i in range(20)])).endswith(
        "ValueError: 7; and 12 more"
    )
    ring = Grouped("ring", ())
    ring.exceptions = (ring,)
    assert message_of(ring) == "ring"
    assert message_of(RaisesOnLook("odd")) == "odd"
    assert message_of(Grouped("odd", 3)) == "odd"


def chained(*errors: BaseException, cause: bool) -> BaseException:
    for before, after in pairwise(errors):
        setattr(after, "__cause__" if cause else "__context__", before)
    return errors[-1]


def test_what_began_it_all_is_told() -> None:
    first, last = ValueError("boom"), AttributeError("in the handler")
    expected = "in the handler ({} ValueError: boom)"
    for cause, relation in ((False, "while handling"), (True, "caused by")):
        error = chained(first, KeyError("between"), last, cause=cause)
        assert message_of(error) == expected.format(relation)
    last.__cause__, last.__suppress_context__ = None, True  # raise ... from None
    assert message_of(last) == "in the handler"
    first.__context__ = last  # a ring
    last.__suppress_context__ = False
    assert "in the handler" in message_of(last)


def test_what_began_it_all_is_told_however_long_the_rest_is() -> None:
    text = message_of(chained(ValueError("ä" * 9000), KeyError("é" * 9000), cause=True))
    assert len(text.encode()) <= MESSAGE_LIMIT
    assert "(caused by ValueError: ä" in text


def test_a_huge_message_is_cut_and_says_so() -> None:
    text = message_of(ValueError("ä" * 1_000_000))
    assert text.startswith("äää")
    assert text.endswith("... (2000000 bytes in all)")
    assert len(text.encode()) <= MESSAGE_LIMIT


@pytest.mark.parametrize(
    ("kind", "name"),
    [(ValueError, "ValueError"), (BrokenText, "tests.BrokenText"), (NoModule, "None.NoModule")],
)
def test_a_short_name_is_what_a_reader_expects(kind: type[BaseException], name: str) -> None:
    assert short_name(kind) == name


def test_a_class_is_named_with_its_bases() -> None:
    assert type_names(KeyError()) == (
        "builtins.KeyError",
        "builtins.LookupError",
        "builtins.Exception",
        "builtins.BaseException",
    )
    assert type_names(NoModule())[0] == qualified_name(NoModule) == "None.NoModule"


def test_a_huge_name_is_cut_the_same_everywhere() -> None:
    assert len(short_name(LongName)) <= NAME_LIMIT
    assert len(qualified_name(LongName)) <= NAME_LIMIT


def test_a_traceback_ends_where_the_exception_was_raised() -> None:
    text = traceback_of(raised(ValueError("boom"), depth=3))
    assert text.rstrip().endswith("raise error")
    assert "in fail" in text


def test_a_deep_traceback_keeps_its_end() -> None:
    text = traceback_of(raised(ValueError("boom"), depth=300))
    assert TRACEBACK_LIMIT - 10 < len(text.encode()) <= TRACEBACK_LIMIT
    assert text.rstrip().endswith("raise error")


def test_an_exception_that_was_never_raised_has_no_traceback() -> None:
    assert traceback_of(ValueError("boom")) == ""


# ---- text ----


@pytest.mark.parametrize("text", ["", "plain", "ä" * 100, "\U0001f600" * 40, "\ud800x", "a\x00b"])
@pytest.mark.parametrize("limit", [64, 65, 66, 67, 160, 200])
def test_bounded_text_is_valid_and_within_its_limit(text: str, limit: int) -> None:
    data = bounded(text, limit).encode("utf-8")
    assert len(data) <= limit
    if len(text.encode("utf-8", "backslashreplace")) <= limit:
        assert data == text.encode("utf-8", "backslashreplace")
    else:
        assert data.endswith(b" bytes in all)")


def runs() -> Iterator[tuple[list[int], str]]:
    yield [], "no rank"
    yield [3], "rank 3"
    yield [0, 1], "ranks 0, 1"
    yield [0, 1, 2], "ranks 0-2"
    yield [5, 0, 1, 2, 1], "ranks 0-2, 5"
    yield [9, 10, 11, 100], "ranks 9-11, 100"
    yield list(range(1000)), "ranks 0-999"
    even = ", ".join(str(rank) for rank in range(0, 32, 2))
    yield list(range(0, 64, 2)), f"ranks {even}, ... (32 ranks in all)"


@pytest.mark.parametrize(("ranks", "text"), list(runs()), ids=lambda value: str(value)[:20])
def test_ranks_are_listed_briefly(ranks: list[int], text: str) -> None:
    assert join_ranks(ranks) == text


def test_the_verb_agrees() -> None:
    assert (ranks_are([1]), ranks_are([1, 2])) == ("is", "are")


# ---- the transport's own messages ----


@pytest.mark.parametrize(
    ("message", "tidied"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
            "[127.0.0.1]:35049. This is typically caused by a crash.",
            "Connection closed by peer",
        ),
        (
            "[../pair.cc:1] Timed out waiting 5000ms for recv operation to complete",
            "Timed out waiting 5000ms for recv operation to complete",
        ),
    ],
)
def test_a_transport_message_is_recognised_and_tidied(message: str, tidied: str) -> None:
    assert says_transport(message)
    assert tidy(message) == tidied


def test_a_user_message_is_not_taken_for_the_transport() -> None:
    assert not says_transport("connection to the dataset is closed")

import math
import random
import struct
from collections.abc import Sequence
from itertools import combinations, product

import pytest

from consensus._wire import (
    ALL,
    FAILED,
    digest,
    number_bytes,
    number_key,
    number_words,
    pack_bytes,
    pack_ranks,
    pair,
    pairs_agree,
    unpack_bytes,
    unpack_ranks,
    utf8,
    word_number,
    words_for,
)

Number = int | float

# Equal by value within a row; the rows ascend. Signs, subnormals, the ends of int64 and of
# float64, and the integers around 2**53 and 2**63, where float64 rounds.
LADDER: tuple[tuple[Number, ...], ...] = (
    (-math.inf,),
    (-1.7976931348623157e308,),
    (-(2.0**63) * (1 + 2**-52),),
    (-(2**63), -(2.0**63)),
    (-(2**63) + 1,),
    (-(2**53) - 1,),
    (-(2**53), -(2.0**53)),
    (-1, -1.0),
    (-2.2250738585072014e-308,),
    (-5e-324,),
    (0, 0.0, -0.0, False),
    (5e-324,),
    (2.225073858507201e-308,),
    (2.2250738585072014e-308,),
    (0.1,),
    (1, 1.0, True),
    (1.0000000000000002,),
    (2**53 - 1, 2.0**53 - 1),
    (2**53, 2.0**53),
    (2**53 + 1,),
    (2**53 + 2, 2.0**53 + 2),
    (2**62 + 1,),
    (2**62 + 512,),  # as far from the next float64 as an int64 can be
    (2**63 - 512,),
    (2**63 - 1,),
    (2.0**63,),
    (1.7976931348623157e308,),
    (math.inf,),
    (math.nan, -math.nan),
)
NUMBERS = [number for row in LADDER for number in row]


def maximum(*rows: Sequence[int]) -> list[int]:
    return [max(column) for column in zip(*rows, strict=True)]


# ---- pairs ----


def test_a_pair_agrees_exactly_when_all_digests_are_equal() -> None:
    digests = (1, 2, 3, ALL // 2, ALL // 2 + 1, ALL - 2, ALL - 1)
    for ranks in (1, 2, 3):
        for held in product(digests, repeat=ranks):
            assert pairs_agree(maximum(*map(pair, held))) is (len(set(held)) == 1)


@pytest.mark.parametrize("other", [1, ALL // 2, ALL - 1])
def test_a_failing_rank_spoils_its_pair_whatever_the_others_hold(other: int) -> None:
    assert not pairs_agree(maximum(FAILED, pair(other)))
    assert not pairs_agree(maximum(FAILED, FAILED))


def test_a_rank_outside_of_a_pair_changes_nothing() -> None:
    assert pairs_agree(maximum((0, 0), pair(1), pair(1)))
    assert not pairs_agree(maximum((0, 0), pair(1), pair(2)))


def test_one_unequal_pair_among_many_is_seen() -> None:
    for at in range(3):
        held = [7, 7, 7]
        held[at] = 8
        words = maximum([w for h in (7, 7, 7) for w in pair(h)], [w for h in held for w in pair(h)])
        assert not pairs_agree(words)


def test_words_of_a_pair_are_non_negative_int64() -> None:
    for word in (*pair(1), *pair(ALL - 1), *FAILED):
        assert 0 <= word < 2**63


# ---- digests ----


@pytest.mark.parametrize("hashed", [0, 1, ALL - 2, ALL - 1, ALL, 2**63, 2**64 - 1])
def test_no_digest_looks_like_an_absent_or_a_failing_rank(
    hashed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hash:
        def __init__(self, digest_size: int) -> None:
            assert digest_size == 8

        def update(self, data: bytes) -> None: ...

        def digest(self) -> bytes:
            return hashed.to_bytes(8, "little")

    monkeypatch.setattr("hashlib.blake2b", Hash)
    assert 1 <= digest([b"anything"]) <= ALL - 1


def test_a_digest_depends_on_where_its_parts_end() -> None:
    splits = [[b"abc"], [b"ab", b"c"], [b"a", b"bc"], [b"", b"abc"], [b"abc", b""]]
    assert len({digest(parts) for parts in splits}) == len(splits)


def test_a_digest_is_the_same_on_every_machine() -> None:
    assert digest([]) == 3797230976420062953
    assert digest([b"consensus", b"1"]) == 721823679283219972


# ---- numbers ----


def test_keys_order_numbers_by_value() -> None:
    rows = [{number_key(number) for number in row} for row in LADDER]
    assert all(len(row) == 1 for row in rows)
    keys = [row.pop() for row in rows]
    assert keys == sorted(set(keys))
    assert len(keys) == len(LADDER)


def test_keys_compare_as_python_does_exactly_between_ints_and_floats() -> None:
    rng = random.Random(0)
    for _ in range(5000):
        near = rng.getrandbits(rng.randrange(1, 63)) * rng.choice((1, -1))
        numbers: list[Number] = [
            near,
            near + rng.randrange(-2000, 2000),
            float(near),
            math.nextafter(float(near), math.inf),
            struct.unpack(">d", rng.randbytes(8))[0],
        ]
        finite = [n for n in numbers if not math.isnan(n) and -(2**63) <= n < 2**63]
        for a, b in combinations(finite, 2):
            assert (number_key(a) < number_key(b)) is (a < b)
            assert (number_key(a) == number_key(b)) is (a == b)
        assert [word_number(number_words(number)) for number in finite] == finite


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_a_number_survives_its_words(number: Number) -> None:
    words = number_words(number)
    assert all(0 <= word < 2**63 for word in words)
    back = word_number(words)
    assert type(back) is (float if isinstance(number, float) else int)
    assert repr(back) == repr(number + 0) if not math.isnan(number) else math.isnan(back)


def test_every_nan_is_one_number_and_the_largest() -> None:
    patterns = (0x7FF0000000000001, 0x7FF8000000000000, 0xFFF8000000000000, 0xFFFFFFFFFFFFFFFF)
    nans = [struct.unpack(">d", struct.pack(">Q", bits))[0] for bits in patterns]
    assert len({number_key(nan) for nan in nans}) == 1
    assert number_key(nans[0]) > number_key(math.inf)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**30])
def test_an_int_outside_of_int64_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="fits int64"):
        number_key(number)


def test_bytes_of_a_number_tell_its_value_and_not_its_type() -> None:
    rows = [{number_bytes(number) for number in row} for row in LADDER]
    assert all(len(row) == 1 for row in rows)
    assert len(set.union(*rows)) == len(LADDER)


# ---- text and rank sets ----


@pytest.mark.parametrize("length", range(30))
def test_bytes_survive_their_words(length: int) -> None:
    for data in (bytes(length), b"\xff" * length, random.Random(length).randbytes(length)):
        words = pack_bytes(data)
        assert len(words) == words_for(length)
        assert all(0 <= word < 2**63 for word in words)
        assert unpack_bytes(words, length) == data


def test_any_text_has_bytes_of_its_own() -> None:
    texts = ["", "a", "ä", "a\u0308", "\ud800", "\udfff", "\U0001f600", "\\ud800", "?"]
    assert len({utf8(text) for text in texts}) == len(texts)


def test_every_rank_set_survives_its_runs() -> None:
    for size in range(9):
        for ranks in combinations(range(8), size):
            assert unpack_ranks(pack_ranks(ranks)) == list(ranks)


@pytest.mark.parametrize("ranks", [range(65536), range(3, 65536, 8), (5,)], ids=str)
def test_the_ranks_of_a_mesh_are_one_run(ranks: Sequence[int]) -> None:
    assert len(pack_ranks(ranks)) == 1
    assert unpack_ranks(pack_ranks(ranks)) == list(ranks)

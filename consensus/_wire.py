"""What travels: facts as a pair of words, numbers and text as words. Pure; no torch.

[Note: two words say "all equal, nobody failed"]
Every rank folds what must be equal into one 62-bit digest h and sends (h, ALL - h). After an
elementwise MAX, first + second == ALL says max(h) == min(h): all digests are equal. A failing
rank sends (ALL, ALL), which no digest can complement. So one fixed-size message answers both
questions, whatever the number of facts. All words are non-negative: MAX on negative or unsigned
integers differs between backends, and a float MAX drops NaN on gloo unless it sits on rank 0.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from operator import add

ALL = 2**62 - 1
FAILED = (ALL, ALL)  # no healthy pair: its sum with anything exceeds ALL
BYTES_PER_WORD = 7  # an int64 stays non-negative
NUMBER_WORDS = 2

_NAN_KEY = 2**64 - 1  # above +inf, so a NaN on any rank is the maximum and is never dropped
_RESIDUAL_BIAS = 1024  # |x - int(float(x))| <= 512 for every int64


def digest(parts: Iterable[bytes]) -> int:
    """Return a digest in [1, ALL - 1] of ``parts``; lengths are part of it, so no two splits tie.

    0 is left to ranks that take no part in a pair, ALL to ranks that failed.
    """
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        hasher.update(len(part).to_bytes(4, "little"))
        hasher.update(part)
    return int.from_bytes(hasher.digest(), "little") % (ALL - 1) + 1


def pair(value: int) -> tuple[int, int]:
    """Return the two words that stand for ``value`` under MAX."""
    return value, ALL - value


def pairs_agree(words: Sequence[int]) -> bool:
    """Return whether every (MAXed) pair says that its members' digests are equal."""
    return all(map(ALL.__eq__, map(add, words[::2], words[1::2])))


def number_key(value: int | float) -> tuple[int, int]:
    """Return a key that orders numbers by value, across int and float, NaN last.

    Rounding to float64 is monotone, so (order-preserving bits of the float, what rounding lost)
    orders every int64 and every float64 exactly; 2**53 and 2**53 + 1 stay distinct.

    Raises:
        ValueError: An int outside of int64.
    """
    if isinstance(value, int):  # bool included
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"expected an integer that fits int64; got {value!r}")
        rounded = float(value)
        return _float_key(rounded), value - int(rounded)
    return _float_key(value), 0


def _float_key(value: float) -> int:
    if math.isnan(value):
        return _NAN_KEY
    (bits,) = struct.unpack(">Q", struct.pack(">d", value + 0.0))  # -0.0 + 0.0 is 0.0
    return int(bits ^ (2**64 - 1) if bits >> 63 else bits | 1 << 63)


def number_words(value: int | float) -> tuple[int, int]:
    """Return two non-negative words that hold ``value`` exactly, and whether it was an int."""
    key, residual = number_key(value)
    packed = (key << 12) | (residual + _RESIDUAL_BIAS) << 1 | isinstance(value, int)
    return packed >> 38, packed & (2**38 - 1)


def word_number(words: Sequence[int]) -> int | float:
    """Return the number that :func:`number_words` packed."""
    packed = words[0] << 38 | words[1]
    key, residual = packed >> 12, (packed >> 1 & 0x7FF) - _RESIDUAL_BIAS
    if key == _NAN_KEY:
        return math.nan
    bits = key ^ (2**64 - 1) if not key >> 63 else key ^ 1 << 63
    (value,) = struct.unpack(">d", struct.pack(">Q", bits))
    return int(value) + residual if packed & 1 else float(value)


def number_bytes(value: int | float) -> bytes:
    """Return the canonical bytes of a number's value: 1, 1.0 and True are the same."""
    key, residual = number_key(value)
    return struct.pack("<Qh", key, residual)


def utf8(text: str) -> bytes:
    """Return the bytes of any text; file names may hold halves of surrogate pairs."""
    return text.encode("utf-8", "surrogatepass")


def pack_ranks(ranks: Iterable[int]) -> list[list[int]]:
    """Return sorted ranks as runs of [first, step, count]: those of a mesh take few runs."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][2] == 1:
            runs[-1][1:] = rank - runs[-1][0], 2
        elif runs and rank == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([rank, 1, 1])
    return runs


def unpack_ranks(runs: Iterable[Sequence[int]]) -> list[int]:
    """Return the ranks that :func:`pack_ranks` packed."""
    return [first + step * i for first, step, count in runs for i in range(count)]


def pack_bytes(data: bytes) -> list[int]:
    """Return ``data`` as non-negative words, seven bytes each; the length travels apart."""
    return [
        int.from_bytes(data[i : i + BYTES_PER_WORD], "little")
        for i in range(0, len(data), BYTES_PER_WORD)
    ]


def unpack_bytes(words: Iterable[int], length: int) -> bytes:
    """Return the first ``length`` bytes of what :func:`pack_bytes` packed."""
    return b"".join(word.to_bytes(BYTES_PER_WORD, "little") for word in words)[:length]


def words_for(length: int) -> int:
    """Return how many words ``length`` bytes take."""
    return -(-length // BYTES_PER_WORD)

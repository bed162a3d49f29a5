"""Real text as training data: where it comes from, and how characters become numbers."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MAX_CHARACTERS = 1_000_000  # enough for a demo; a larger file is cut
MIN_CHARACTERS = 2_000
MAX_VOCABULARY = 128  # rarer characters share one number
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The characters a model knows, in a fixed order; the first stands for all others."""

    characters: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        """Return the most frequent characters of ``text``, equal wherever the text is."""
        counted = sorted(Counter(text).items(), key=lambda item: (-item[1], item[0]))
        known = sorted(character for character, _ in counted[: MAX_VOCABULARY - 1])
        return cls((UNKNOWN, *(character for character in known if character != UNKNOWN)))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Return the number of each character, shape (characters,), int64."""
        number = {character: i for i, character in enumerate(self.characters)}
        return torch.tensor([number.get(character, 0) for character in text])


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text and where it is from."""

    text: str
    origin: str


def load_corpus(path: Path | None) -> Corpus:
    """Return the user's file, or the help topics that come with every Python.

    Raises:
        ValueError: The file cannot be read as UTF-8 text, or is too short to train on.
    """
    if path is None:
        topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
        text, origin = "\n\n".join(topics[name] for name in sorted(topics)), "Python's help topics"
    else:
        try:
            text, origin = path.read_text("utf-8"), path.name
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {path} as UTF-8 text: {error}") from error
    text = text[:MAX_CHARACTERS]
    if len(text) < MIN_CHARACTERS:
        raise ValueError(
            f"expected at least {MIN_CHARACTERS} characters to train on; {origin} has {len(text)}"
        )
    return Corpus(text, origin)


def sample_batch(
    tokens: Tensor,  # (characters,), int64
    *,
    batch: int,
    context: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return inputs and the characters that follow each, both (batch, context), int64."""
    starts = torch.randint(len(tokens) - context, (batch, 1), generator=generator)
    at = starts + torch.arange(context)
    return tokens[at], tokens[at + 1]

from pathlib import Path

import pytest
import torch

from consensus.demo._text import MAX_VOCABULARY, UNKNOWN, Vocabulary, load_corpus, sample_batch


def test_python_itself_brings_enough_english_text() -> None:
    corpus = load_corpus(None)
    assert len(corpus.text) > 100_000
    assert "statement" in corpus.text


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("Für Elise. " * 300, "utf-8")
    corpus = load_corpus(file)
    assert corpus.origin == "mine.txt"
    assert corpus.text == "Für Elise. " * 300


@pytest.mark.parametrize("content", [b"too short", b"\xff\xfe\xff" * 2000], ids=["short", "binary"])
def test_a_file_that_cannot_be_trained_on_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"mine\.txt"):
        load_corpus(file)


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        load_corpus(tmp_path / "nowhere.txt")


def test_characters_are_numbered_in_a_fixed_order() -> None:
    vocabulary = Vocabulary.of("banana")
    assert vocabulary.characters == (UNKNOWN, "a", "b", "n")
    assert vocabulary.encode("nab?").tolist() == [3, 1, 2, 0]


def test_rare_characters_share_a_number() -> None:
    common = "".join(chr(0x4E00 + i) for i in range(MAX_VOCABULARY)) * 2
    vocabulary = Vocabulary.of(common + "z")
    assert len(vocabulary) == MAX_VOCABULARY
    assert vocabulary.encode("z").tolist() == [0]


def test_a_target_is_the_character_that_follows() -> None:
    tokens = torch.arange(100)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = sample_batch(tokens, batch=3, context=10, generator=generator)
    assert inputs.shape == targets.shape == (3, 10)
    assert torch.equal(targets, inputs + 1)


def test_the_last_excerpt_fits() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = sample_batch(torch.arange(5), batch=50, context=4, generator=generator)
    assert torch.equal(inputs, torch.arange(4).expand(50, 4))
    assert torch.equal(targets, torch.arange(1, 5).expand(50, 4))

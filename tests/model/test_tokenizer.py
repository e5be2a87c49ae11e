import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from anymla.model.tokenizer import Tokenizer, TokenizerError, byte_letters
from anymla.testing.tiny_tokenizer import BOS, EOS, write_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, 260, 1000)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_dir(directory)


def ids(text: str) -> list[int]:
    return [2 + byte for byte in text.encode()]


def test_bytes_behind_a_leading_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("aé\0") == [0, *ids("aé\0")]
    assert tokenizer.encode("") == [0]
    assert tokenizer.vocab_size == 260


def test_special_tokens_in_a_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(f"a{EOS}b") == [0, *ids("a"), 1, *ids("b")]
    assert tokenizer.decode([0, *ids("a"), 1, 258, *ids("b")]) == "ab"


def test_byte_letters_are_the_librarys() -> None:
    letters = byte_letters()
    assert sorted(letters) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert (letters[0x20], letters[0x0A], letters[0x41]) == ("Ġ", "Ċ", "A")


@given(text=st.text())
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(token_ids=st.lists(st.integers(-2, 300)))
def test_any_ids_stream_to_the_text_that_they_decode_to(
    tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    stream = tokenizer.stream()
    text = "".join([stream.push(token) for token in token_ids]) + stream.finish()
    assert text == tokenizer.decode(token_ids)
    known = bytes(token - 2 for token in token_ids if 2 <= token < 258)
    assert text == known.decode("utf-8", "replace")


def test_a_character_appears_when_it_is_complete(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids("é€")] == ["", "é", "", "", "€"]
    assert stream.push(ids("€")[0]) == ""
    assert stream.finish() == "\ufffd"


def test_transformers_reads_the_same_ids(directory: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory)
    text = "Größe: 10 µm\n\tindent  two spaces"
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert (theirs.bos_token, theirs.eos_token) == (BOS, EOS)


def test_no_leading_token_unless_asked_for(directory: Path, tmp_path: Path) -> None:
    inner = json.loads((directory / "tokenizer.json").read_text())
    inner["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(inner))
    assert Tokenizer.from_dir(tmp_path).encode("a") == ids("a")
    for bos in (BOS, {"content": BOS}):
        config = {"add_bos_token": True, "bos_token": bos}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert Tokenizer.from_dir(tmp_path).encode("a") == [0, *ids("a")]


def unknown_bos(path: Path) -> None:
    config = {"add_bos_token": True, "bos_token": "<s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def other_decoder(path: Path) -> None:
    inner = json.loads((path / "tokenizer.json").read_text())
    inner["decoder"] = {"type": "Fuse"}
    (path / "tokenizer.json").write_text(json.dumps(inner))


REFUSED: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: (path / "tokenizer.json").unlink(), r"has no tokenizer.json$"),
    (lambda path: (path / "tokenizer.json").write_text("{"), r"tokenizer.json: cannot be read: "),
    (
        lambda path: (path / "tokenizer.json").write_text("[" * 100_000),
        r"tokenizer.json: cannot be read: ",
    ),
    (
        lambda path: (path / "tokenizer_config.json").write_text("[" * 100_000),
        r"tokenizer_config.json: cannot be read: nested more than 64 deep$",
    ),
    (
        lambda path: (path / "tokenizer_config.json").write_text("[]"),
        r"tokenizer_config.json: cannot be read: not a JSON object",
    ),
    (other_decoder, r"tokenizer.json: its decoder must be ByteLevel, got "),
    (unknown_bos, r"tokenizer_config.json: bos_token '<s>' is not in the vocabulary$"),
    (
        lambda path: (path / "tokenizer_config.json").write_text("{"),
        r"tokenizer_config.json: cannot be read: ",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(spoil: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 258, 1000)
    spoil(tmp_path)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_dir(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("known", ["", "ab"])
def test_text_that_the_vocabulary_would_drop_is_refused(known: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 258, 1000)
    inner = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = {letter: number + 2 for number, letter in enumerate(known)}
    inner["model"]["vocab"] = {BOS: 0, EOS: 1} | vocab
    (tmp_path / "tokenizer.json").write_text(json.dumps(inner))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode(known) == [0, *vocab.values()]
    message = "vocabulary lacks 2 bytes of this text: 0xbc, 0xc3"
    with pytest.raises(ValueError, match=message):
        tokenizer.encode(known + "ü")


def test_text_without_utf8_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 258, 1000)
    with pytest.raises(ValueError, match="the text is not UTF-8: surrogates not allowed at 2"):
        Tokenizer.from_dir(tmp_path).encode("ab\udcff")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_tokenizer_that_panics(directory: Path, tmp_path: Path) -> None:
    """Rust's panics are BaseExceptions, which no ``except Exception`` catches."""
    inner = json.loads((directory / "tokenizer.json").read_text())
    inner["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(inner))
    with pytest.raises(
        TokenizerError, match=r"cannot encode the text: no entry found|cannot be re"
    ):
        Tokenizer.from_dir(tmp_path).encode("a")


def test_an_id_near_the_end_of_32_bits(directory: Path, tmp_path: Path) -> None:
    inner = json.loads((directory / "tokenizer.json").read_text())
    inner["model"]["vocab"]["a"] = 2**31 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(inner))
    began = time.perf_counter()
    assert 2**31 - 1 in Tokenizer.from_dir(tmp_path).encode("a")
    assert time.perf_counter() - began < 2

"""Conversion of text to token ids and back, also one id at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from anymla.model.tokenizer_config import (
    CONFIG_FILE,
    TokenizerError,
    add_tokens,
    read_tokenizer_config,
    token_text,
)
from anymla.model.tokenizer_file import TOKENIZER_FILE, library_errors, read_tokenizer, within

__all__ = ["TextStream", "Tokenizer", "TokenizerError", "byte_letters"]

# An encoder takes some microseconds a byte; a pattern that backtracks may never end.
_SECONDS, _SECONDS_A_BYTE = 5.0, 20e-6
# Bytes of text that are counted at a time; size of a text, and of its tokens, that is always
# encoded.
_PIECE, _SHORT_TEXT, _SHORT_TOKEN = 1 << 16, 1 << 18, 8


class Tokenizer:
    """A checkpoint's byte-level tokenizer.

    Attributes:
        bos_token_id: id put before every text, or None if the checkpoint does not ask for it.
        vocab_size: number of token ids.
    """

    def __init__(self, inner: tokenizers.Tokenizer, bos_token_id: int | None) -> None:
        self._inner = inner
        self.bos_token_id = bos_token_id
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        self._bytes = _token_bytes(inner)
        self._known = {token[0] for token in self._bytes.values() if len(token) == 1}

    @classmethod
    def from_dir(cls, directory: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, for its special tokens, ``tokenizer_config.json``.

        Texts become the ids that transformers gives them. Truncation, padding and dropout, which a
        training run may have left in the file, are ignored.

        Raises:
            TokenizerError: ``tokenizer.json`` is absent, unreadable, not byte-level, or too
                expensive: see ``read_tokenizer``.
        """
        inner, fields = read_tokenizer(directory)
        path, decoder = Path(directory) / TOKENIZER_FILE, fields.get("decoder")
        if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
            raise TokenizerError(f"{path}: its decoder must be ByteLevel, got {decoder}")
        config = read_tokenizer_config(directory)
        add_tokens(inner, config)
        return cls(inner, _leading_token(inner, config, path.with_name(CONFIG_FILE)))

    def encode(self, text: str, *, leading: bool = True, most: int | None = None) -> list[int]:
        """Encode a text as token ids.

        Args:
            text: text to encode, in which special tokens may be spelled out.
            leading: True to put the leading token first, if the checkpoint asks for one. The output
                of a chat template contains it already.
            most: number of useful tokens. A text with far more is refused without encoding all of
                it; one with a few more is not.

        Raises:
            TokenizerError: the tokenizer cannot encode it.
            ValueError: the text has no UTF-8 form, characters that the vocabulary would drop, or
                far more tokens than ``most``.
        """
        try:
            written = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not UTF-8: {error.reason} at {error.start}") from None
        if lacking := sorted(set(written) - self._known):
            named = ", ".join(f"{byte:#04x}" for byte in lacking[:4])
            raise ValueError(
                f"the tokenizer's vocabulary lacks {len(lacking)} bytes of this text: {named}"
            )
        if most is not None and len(written) > max(_SHORT_TEXT, most * _SHORT_TOKEN):
            self._refuse_long(text, most)
        ids = self._ids(text, leading=leading)
        if leading and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def _ids(self, text: str, *, leading: bool) -> list[int]:
        """Return the library's ids, within a time limit that any sound pattern keeps."""
        seconds = _SECONDS + len(text) * _SECONDS_A_BYTE
        with library_errors("the tokenizer cannot encode the text"):
            # Encoded as a batch, because only that releases the interpreter lock.
            (encoded,) = within(
                seconds,
                lambda: self._inner.encode_batch_fast([text], add_special_tokens=leading),
                f"its patterns took more than {seconds:.0f} s for {len(text)} characters",
            )
        ids: list[int] = encoded.ids
        return ids

    def _refuse_long(self, text: str, most: int) -> None:
        """Raise ValueError if the pieces of a text have twice as many tokens as ``most``.

        Cutting a text into pieces changes its tokens at the cuts, but only a few.
        """
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self._ids(text[start : start + _PIECE], leading=False))
            if count > 2 * most:
                raise ValueError(
                    f"the text has {len(text)} characters, far more than {most} tokens can hold"
                )

    def decode(self, token_ids: Iterable[int]) -> str:
        """Decode token ids; special and unknown ids give nothing, bad UTF-8 gives U+FFFD."""
        stream = self.stream()
        return "".join([stream.push(token) for token in token_ids]) + stream.finish()

    def stream(self, shown: Iterable[str] = ()) -> TextStream:
        """Create a decoder for ids that arrive one at a time.

        Args:
            shown: special tokens that are written out where they occur.
        """
        spelled = {
            token_id: token.encode()
            for token in shown
            if (token_id := self.token_id(token)) is not None
        }
        return TextStream(self._bytes | spelled)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling, or None."""
        token_id: int | None = self._inner.token_to_id(token)
        return token_id


class TextStream:
    """Decodes ids one at a time, holding back the bytes of incomplete characters."""

    def __init__(self, token_bytes: dict[int, bytes]) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the characters that this id completes, maybe none."""
        return self._decoder.decode(self._bytes.get(token_id, b""))

    def finish(self) -> str:
        """Return the rest: U+FFFD if the last character is incomplete."""
        return self._decoder.decode(b"", final=True)


def _token_bytes(inner: tokenizers.Tokenizer) -> dict[int, bytes]:
    """Return the bytes that each id stands for; special tokens stand for none."""
    added = inner.get_added_tokens_decoder()
    letters = byte_letters()
    byte_of = {letter: byte for byte, letter in enumerate(letters)}
    out: dict[int, bytes] = {}
    for token, token_id in inner.get_vocab(with_added_tokens=True).items():
        if token_id in added:
            # The library treats a token that was special as special, whatever the entry says now.
            out[token_id] = token.encode() if inner.decode([token_id]) else b""
        else:
            out[token_id] = bytes(byte_of[letter] for letter in token if letter in byte_of)
    return out


def byte_letters() -> list[str]:
    """Return the printable character that byte-level vocabularies write for each of the 256 bytes.

    Printable Latin-1 characters stand for themselves, the other bytes, in order, for the
    characters from U+0100 on. (The convention of GPT-2's ``encoder.json``.)
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _leading_token(inner: tokenizers.Tokenizer, config: dict[str, Any], path: Path) -> int | None:
    if not config.get("add_bos_token"):
        return None
    token = token_text(config.get("bos_token"))
    token_id = inner.token_to_id(token) if token is not None else None
    if token_id is None:
        raise TokenizerError(f"{path}: bos_token {token!r} is not in the vocabulary")
    return int(token_id)

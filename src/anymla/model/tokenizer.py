"""Text to token ids and back, one id at a time if wanted."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers

from anymla.formats.untrusted import Refused, read_object


class TokenizerError(ValueError):
    """A tokenizer that cannot be used; one line that names the file."""


class Tokenizer:
    """A checkpoint's byte-level tokenizer.

    Attributes:
        bos_token_id: put in front of every text, or None if the checkpoint does not ask for it.
        vocab_size: number of ids it knows.
    """

    def __init__(self, inner: tokenizers.Tokenizer, bos_token_id: int | None) -> None:
        self._inner = inner
        self.bos_token_id = bos_token_id
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        self._bytes = _token_bytes(inner)
        self._known = {token[0] for token in self._bytes.values() if len(token) == 1}

    @classmethod
    def from_dir(cls, directory: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and, for the leading token, ``tokenizer_config.json``.

        Raises:
            TokenizerError: no ``tokenizer.json``, unreadable, or not byte-level.
        """
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{directory}: has no tokenizer.json")
        with _library_errors(f"{path}: cannot be read"):
            # Not the library's own text of it, which counts up to the largest id.
            decoder = read_object(path).get("decoder")
            inner = tokenizers.Tokenizer.from_file(str(path))
        if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
            raise TokenizerError(f"{path}: its decoder must be ByteLevel, got {decoder}")
        return cls(inner, _leading_token(inner, path.with_name("tokenizer_config.json")))

    def encode(self, text: str, *, leading: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: the text; special tokens may be written out in it.
            leading: put the leading token in front, if the checkpoint asks for one. What a chat
                template has written holds it already.

        Raises:
            TokenizerError: the tokenizer cannot encode it.
            ValueError: a text that has no UTF-8, or characters that the vocabulary would drop.
        """
        try:
            used = set(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not UTF-8: {error.reason} at {error.start}") from None
        if lacking := sorted(used - self._known):
            named = ", ".join(f"{byte:#04x}" for byte in lacking[:4])
            raise ValueError(
                f"the tokenizer's vocabulary lacks {len(lacking)} bytes of this text: {named}"
            )
        with _library_errors("the tokenizer cannot encode the text"):
            ids: list[int] = self._inner.encode(text, add_special_tokens=leading).ids
        if leading and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of token ids; special and unknown ids give nothing, bad UTF-8 gives U+FFFD."""
        stream = self.stream()
        return "".join([stream.push(token) for token in token_ids]) + stream.finish()

    def stream(self, shown: Iterable[str] = ()) -> TextStream:
        """A decoder for ids that arrive one at a time.

        Args:
            shown: special tokens that are written out where they come.
        """
        spelled = {
            token_id: token.encode()
            for token in shown
            if (token_id := self.token_id(token)) is not None
        }
        return TextStream(self._bytes | spelled)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling, or None."""
        token_id: int | None = self._inner.token_to_id(token)
        return token_id


class TextStream:
    """Decodes ids as they come, holding back the bytes of characters that are not complete."""

    def __init__(self, token_bytes: dict[int, bytes]) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this id completes, maybe none."""
        return self._decoder.decode(self._bytes.get(token_id, b""))

    def finish(self) -> str:
        """What is left: U+FFFD if the last character never became complete."""
        return self._decoder.decode(b"", final=True)


@contextlib.contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Turn what the library raises into ``TokenizerError``: bare Exceptions, and Rust's panics."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TokenizerError(f"{what}: {reason}") from None


def _token_bytes(inner: tokenizers.Tokenizer) -> dict[int, bytes]:
    """The bytes that each id stands for; special tokens stand for none."""
    added = inner.get_added_tokens_decoder()
    letters = byte_letters()
    byte_of = {letter: byte for byte, letter in enumerate(letters)}
    out: dict[int, bytes] = {}
    for token, token_id in inner.get_vocab(with_added_tokens=True).items():
        if token_id in added:
            out[token_id] = b"" if added[token_id].special else token.encode()
        else:
            out[token_id] = bytes(byte_of[letter] for letter in token if letter in byte_of)
    return out


def byte_letters() -> list[str]:
    """The printable character that byte-level vocabularies write for each of the 256 bytes.

    Printable Latin-1 characters stand for themselves, the other bytes, in order, for the
    characters from U+0100 on. (The convention of GPT-2's ``encoder.json``.)
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _leading_token(inner: tokenizers.Tokenizer, path: Path) -> int | None:
    try:
        config = read_object(path)
    except FileNotFoundError:
        return None
    except (OSError, Refused) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from None
    if not config.get("add_bos_token"):
        return None
    token = config.get("bos_token")
    if isinstance(token, dict):
        token = token.get("content")
    token_id = inner.token_to_id(token) if isinstance(token, str) else None
    if token_id is None:
        raise TokenizerError(f"{path}: bos_token {token!r} is not in the vocabulary")
    return int(token_id)

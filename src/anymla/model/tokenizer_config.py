"""Tokens that ``tokenizer_config.json`` names and adds, read as transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from anymla.formats.untrusted import Refused, read_object

CONFIG_FILE = "tokenizer_config.json"
# File with the same names, in tokenizers saved before added_tokens_decoder existed.
_MAP_FILE = "special_tokens_map.json"
_MOST_BYTES = 32 << 20
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FURTHER = ("extra_special_tokens", "additional_special_tokens")


class TokenizerError(ValueError):
    """A tokenizer that cannot be used; one line that names the file."""


def read_tokenizer_config(directory: str | Path) -> dict[str, Any]:
    """Read ``tokenizer_config.json``, completed by ``special_tokens_map.json``.

    Returns:
        Fields of both files; {} without either file.

    Raises:
        TokenizerError: a file cannot be read.
    """
    config = _object(Path(directory) / CONFIG_FILE)
    if "added_tokens_decoder" not in config:
        config |= _object(Path(directory) / _MAP_FILE)
    return config


def token_text(value: Any) -> str | None:
    """Return a token's text, which is written as a string or as an object with "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return texts by name ("bos_token", ...), including names that the file itself defines.

    Args:
        config: result of ``read_tokenizer_config``.
    """
    found = {name: text for name in _NAMED if (text := token_text(config.get(name))) is not None}
    own = {name: value for name, value in config.items() if name.endswith("_token")}
    if isinstance(further := config.get(_FURTHER[0]), dict):
        own |= further
    return found | {
        name: value for name, value in own.items() if isinstance(value, str) and name not in found
    }


def add_tokens(inner: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Make listed or named tokens indivisible wherever they occur in a text.

    A token that is not in the vocabulary is added only under the id that the file gives it.

    Args:
        inner: tokenizer of the library, changed in place.
        config: result of ``read_tokenizer_config``.
    """
    known = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    listed = dict(_listed(config.get("added_tokens_decoder")))
    known |= {token.content: token for token in listed.values()}
    for token_id, token in sorted(listed.items(), key=lambda item: item[0]):
        if inner.token_to_id(token.content) is not None or token_id == inner.get_vocab_size():
            inner.add_tokens([token])
    further: list[Any] = []
    for name in _FURTHER:
        further += value if isinstance(value := config.get(name), list) else []
    for text in (*named_tokens(config).values(), *map(token_text, further)):
        if text and inner.token_to_id(text) is not None:
            token = known.get(text) or AddedToken(text, special=True, normalized=False)
            inner.add_special_tokens([token])


def _object(path: Path) -> dict[str, Any]:
    try:
        # model_max_length is 10^30 if nobody has set it.
        return read_object(path, _MOST_BYTES, wide=True)
    except FileNotFoundError:
        return {}
    except (OSError, Refused) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from None


_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def _listed(value: Any) -> Iterator[tuple[int, AddedToken]]:
    """Yield ids and tokens of ``added_tokens_decoder``; entries of another form are skipped."""
    for name, entry in value.items() if isinstance(value, dict) else ():
        text = token_text(entry) if isinstance(entry, dict) else None
        if text and name.isascii() and name.isdigit() and len(name) < 12:
            flags = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
            yield int(name), AddedToken(text, **flags)

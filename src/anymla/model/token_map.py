"""Token ids after normalisation, in which Engram's n-grams are hashed; equal texts share an id."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
from tokenizers import normalizers
from torch import Tensor

from anymla.model.config import ConfigError, ModelConfig
from anymla.model.tokenizer_config import TokenizerError
from anymla.model.tokenizer_file import read_tokenizer

# Stand-in that protects a token of a single space from stripping.
_LONE_SPACE = "\ue000"
_REPLACEMENT = "\ufffd"


def token_map(directory: str | Path, config: ModelConfig) -> Tensor:
    """Map every token id to the number of its normalised text, int64 [vocab].

    The text of a single token is normalised: compatibility forms, accents and case are dropped,
    runs of blanks become one space, and blanks at the ends are dropped. A token that is no whole
    character keeps its own name. Texts are numbered in order of first occurrence.

    Args:
        directory: directory with ``tokenizer.json``.
        config: configuration of a model with Engram.

    Raises:
        TokenizerError: there is no ``tokenizer.json``, or it cannot be read.
        ConfigError: the number of texts differs from the configuration's, on which hashes depend;
            or there are fewer tokens than the vocabulary has.
    """
    assert config.engram is not None
    path = Path(directory) / "tokenizer.json"
    if not path.exists():
        raise TokenizerError(f"{directory}: has no tokenizer.json, which Engram's hashes need")
    inner, _ = read_tokenizer(directory)
    known = inner.get_vocab_size(with_added_tokens=True)
    found = normalised_tokens(inner, min(known, config.vocab_size))
    count = max(found, default=-1) + 1
    if count != config.engram.tokens:
        raise ConfigError(
            f"config: engram_compressed_vocab_size is {config.engram.tokens}, but {path.name} has "
            f"{count} tokens after normalisation"
        )
    # Ids without a token never occur in a text.
    pad = found[config.engram.pad_token] if config.engram.pad_token < len(found) else 0
    return torch.tensor(found + [pad] * (config.vocab_size - len(found)))


def normalised_tokens(inner: tokenizers.Tokenizer, count: int) -> list[int]:
    """Return the numbers of the first ``count`` tokens' texts; see ``token_map``."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(_key(inner, token), len(numbers)) for token in range(count)]


def _key(inner: tokenizers.Tokenizer, token: int) -> str:
    text: str = inner.decode([token], skip_special_tokens=False)
    if _REPLACEMENT in text:
        return str(inner.id_to_token(token))
    return _NORMALIZER.normalize_str(text) or text


_NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(tokenizers.Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)

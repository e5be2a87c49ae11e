"""A byte-level tokenizer without merges: a text is its UTF-8 bytes after a leading token."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from anymla.model.encoding import BOS, EOS, MARKS
from anymla.model.tokenizer import byte_letters

SPECIAL = (BOS, EOS)
MIN_VOCAB = len(SPECIAL) + 256
# Further tokens of dialogues, after the bytes.
_CHAT_MARKS = tuple(mark for mark in MARKS if mark not in SPECIAL)
# The total includes one reserved token, which no text holds.
CHAT_VOCAB = MIN_VOCAB + len(_CHAT_MARKS) + 1


def write_tokenizer(directory: Path, vocab_size: int, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``.

    Ids 0 and 1 are the two special tokens, 2 + b is byte b. The tokens of dialogues follow, as far
    as they fit; reserved special tokens fill the rest.

    Args:
        directory: directory of the files.
        vocab_size: number of tokens, at least 258.
        max_length: number of tokens of the longest text, for readers that warn of it.
    """
    write_files(directory, tiny_tokenizer(vocab_size), max_length)


def tiny_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Return the tokenizer that ``write_tokenizer`` writes."""
    letters = byte_letters()
    more = vocab_size - MIN_VOCAB
    reserved = [f"<|reserved_{n}|>" for n in range(more - len(_CHAT_MARKS))]
    behind = [*_CHAT_MARKS, *reserved][:more]
    names = [*SPECIAL, *letters, *behind]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=[])
    )
    inner.add_special_tokens([AddedToken(name, special=True) for name in (*SPECIAL, *behind)])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    return inner


def write_files(
    directory: Path, inner: tokenizers.Tokenizer, max_length: int, chat_template: str | None = None
) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` of any tokenizer with BOS and EOS.

    Args:
        directory: directory of the files.
        inner: tokenizer of the library, which puts BOS before a text.
        max_length: number of tokens of the longest text, for readers that warn of it.
        chat_template: template in Jinja, or None.
    """
    (directory / "tokenizer.json").write_text(inner.to_str(pretty=True) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

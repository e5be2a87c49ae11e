"""The tiny model's tokenizer: byte-level BPE, numbers in pairs of digits."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers

from anymla.testing.tiny_tokenizer import BOS, EOS, write_files

USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
SPECIAL = (BOS, EOS, USER, ASSISTANT)
SIZE = 1536
# A word with the space in front of it, one or two digits, other signs, white space.
_WORDS = r" ?[A-Za-z]+|\d{1,2}| ?[^A-Za-z\d\s]+|\s"
# As DeepSeek's own templates, reduced to what this model has seen.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '" + ASSISTANT + "' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'user' %}{{ '" + USER + "' + message['content'] }}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)


def train(text: str, phrases: Iterable[str] = ()) -> tokenizers.Tokenizer:
    """Learn merges from a text, and from phrases that shall take few tokens.

    Ids 0 to 3 are the special tokens, and every pair of digits is a token.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pairs = " ".join(f"{n:02}" for n in range(100))
    inner.train_from_iterator([*text.split("\n"), *phrases, *[pairs] * 2000], trainer)
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    assert all(inner.token_to_id(f"{n:02}") is not None for n in range(100))
    assert inner.get_vocab_size() == SIZE
    return inner


def write(inner: tokenizers.Tokenizer, directory: pathlib.Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    write_files(directory, inner, max_length, CHAT_TEMPLATE)


def read(directory: pathlib.Path) -> tokenizers.Tokenizer:
    """Read ``tokenizer.json`` of a directory."""
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))

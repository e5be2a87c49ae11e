"""The fields of a ``config.json`` that describe Engram, a memory of n-grams."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from anymla.model.config_fields import Fields, unsupported

_MOST_NGRAM, _MOST_HEADS = 16, 256
_INT64 = 2**63 - 1
# DeepSeek's own, of the generator of a layer's multipliers.
_SEED_STEP = 10007


@dataclasses.dataclass(frozen=True)
class EngramConfig:
    """Tables of rows that n-grams of tokens are hashed to.

    Attributes:
        layer_ids: layers that read one.
        rows: of each table.
        max_ngram: tokens of the longest n-gram; the shortest has two.
        buckets: hashes are taken modulo primes from here on.
        heads: hashes of an n-gram.
        head_dim: channels of a row.
        pad_token: stands for tokens before the first.
        tokens: distinct tokens after normalisation.
    """

    layer_ids: tuple[int, ...]
    rows: tuple[int, ...]
    max_ngram: int
    buckets: int
    heads: int
    head_dim: int
    pad_token: int
    tokens: int

    @property
    def columns(self) -> int:
        """Rows that a token reads of a table."""
        return (self.max_ngram - 1) * self.heads

    @property
    def filled_rows(self) -> tuple[int, ...]:
        """Rows of each table that hashes can reach, which must be all: the sums of the primes."""
        return tuple(sum(primes) for primes in self.primes().values())

    def multipliers(self, layer: int) -> tuple[int, ...]:
        """Odd factors of the tokens at distance 0, 1, .. in a layer's hashes."""
        bound = max(1, (_INT64 // self.tokens) // 2)
        drawn = np.random.default_rng(_SEED_STEP * layer).integers(
            0, bound, size=self.max_ngram, dtype=np.int64
        )
        return tuple(int(value) * 2 + 1 for value in drawn)

    def primes(self) -> dict[int, tuple[int, ...]]:
        """Moduli of each layer's columns, all different; bigrams first, their heads in order."""
        found: dict[int, tuple[int, ...]] = {}
        used: set[int] = set()
        for layer in self.layer_ids:
            of_layer = []
            for _ in range(self.max_ngram - 1):
                at = self.buckets - 1
                for _ in range(self.heads):
                    at = _next_prime(at, used)
                    used.add(at)
                    of_layer.append(at)
            found[layer] = tuple(of_layer)
        return found


def engram_config(fields: Fields, layers: int, vocab: int) -> EngramConfig | None:
    """The tables, or None without ``engram_layer_ids``.

    Args:
        fields: the configuration.
        layers: of the backbone.
        vocab: token ids.

    Raises:
        ConfigError: a field is missing or has a value that no table can have.
    """
    if not fields.has("engram_layer_ids"):
        return None
    ids = fields.integers("engram_layer_ids")
    if not ids:
        return None
    if list(ids) != sorted(set(ids)) or ids[-1] >= layers:
        raise unsupported("engram_layer_ids", list(ids), f"ascending layers below {layers}")
    rows = fields.integers("engram_num_embeddings")
    if len(rows) != len(ids):
        raise unsupported("engram_num_embeddings", list(rows), f"one for each of {len(ids)} layers")
    config = EngramConfig(
        layer_ids=ids,
        rows=rows,
        max_ngram=fields.integer("engram_max_ngram_size", minimum=2, maximum=_MOST_NGRAM),
        buckets=fields.integer("engram_vocab_size", minimum=2),
        heads=fields.integer("engram_n_heads", minimum=1, maximum=_MOST_HEADS),
        head_dim=fields.integer("engram_head_dim", minimum=1),
        pad_token=fields.integer("engram_pad_token_id"),
        tokens=fields.integer("engram_compressed_vocab_size", minimum=1, maximum=vocab),
    )
    if config.pad_token >= vocab:
        raise unsupported("engram_pad_token_id", config.pad_token, f"below vocab_size = {vocab}")
    # Every row of a table is one that some n-gram is hashed to: with rows to spare, the primes are
    # not those that it was trained with.
    for layer, held, filled in zip(ids, rows, config.filled_rows, strict=True):
        if held != filled:
            raise unsupported(
                "engram_num_embeddings",
                held,
                f"{filled} for layer {layer}, the sum of its primes from engram_vocab_size = "
                f"{config.buckets} on",
            )
    return config


def _next_prime(start: int, used: set[int]) -> int:
    """The first prime above ``start`` that is not used."""
    candidate = start + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    odd = range(3, math.isqrt(number) + 1, 2)
    return number % 2 == 1 and all(number % divisor for divisor in odd)

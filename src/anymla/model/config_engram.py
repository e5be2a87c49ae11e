"""The fields of a ``config.json`` that describe Engram, a memory of n-grams."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from anymla.model.config_fields import Fields, unsupported

_MOST_NGRAM, _MOST_HEADS = 16, 256
_INT64 = 2**63 - 1
# Step between the seeds of two layers' multipliers, as in DeepSeek's code.
_SEED_STEP = 10007


@dataclasses.dataclass(frozen=True)
class EngramConfig:
    """Tables of rows that n-grams of tokens are hashed to.

    Attributes:
        layer_ids: indices of layers that read a table.
        rows: number of rows of each table.
        max_ngram: number of tokens of the longest n-gram; the shortest has two.
        buckets: lower bound of the primes that hashes are reduced by.
        heads: number of hashes of an n-gram.
        head_dim: number of channels of a row.
        pad_token: id that stands for tokens before the first.
        tokens: number of distinct tokens after normalisation.
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
        """Number of rows of a table that a token reads."""
        return (self.max_ngram - 1) * self.heads

    @property
    def filled_rows(self) -> tuple[int, ...]:
        """Reachable rows of each table, the sums of the primes, which must be all rows."""
        return tuple(sum(primes) for primes in self.primes().values())

    def multipliers(self, layer: int) -> tuple[int, ...]:
        """Return the odd factors of the tokens at distance 0, 1, .. in a layer's hashes."""
        bound = max(1, (_INT64 // self.tokens) // 2)
        drawn = np.random.default_rng(_SEED_STEP * layer).integers(
            0, bound, size=self.max_ngram, dtype=np.int64
        )
        return tuple(int(value) * 2 + 1 for value in drawn)

    def primes(self) -> dict[int, tuple[int, ...]]:
        """Return the moduli of each layer's columns, all different; bigrams first."""
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
    """Read the tables' configuration; None without ``engram_layer_ids``.

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
    # Some n-gram is hashed to every row of a table. If rows are left over, the primes are not those
    # that the table was trained with.
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
    """Return the first prime above ``start`` that is not used."""
    candidate = start + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    odd = range(3, math.isqrt(number) + 1, 2)
    return number % 2 == 1 and all(number % divisor for divisor in odd)

"""Engram in float64: the hash of n-grams to rows, and the rows' contribution to the streams."""

from __future__ import annotations

import pathlib
import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import tokenizers
import torch
from torch import Tensor

from anymla.testing.oracle.blocks import rms_norm
from anymla.testing.oracle.config import EngramNumbers
from anymla.testing.oracle.weights import Weights


def moduli(numbers: EngramNumbers, layer: int) -> list[int]:
    """Return the primes of a layer's columns."""
    count = (numbers.max_ngram - 1) * numbers.heads
    before = numbers.layers.index(layer) * count
    # A search restarts for every length of n-gram, but uses no prime twice.
    return _primes_from(numbers.buckets, before + count)[before:]


def rows_of(numbers: EngramNumbers, layer: int, tokens: Sequence[int], pad: int) -> Tensor:
    """Return row numbers [T, columns] of a sequence of normalised tokens.

    Args:
        numbers: Engram numbers of the model.
        layer: index of the layer, which selects the table.
        tokens: normalised token ids.
        pad: normalised padding token, which precedes the first token.
    """
    bound = max(1, (2**63 - 1) // numbers.tokens // 2)
    generator = np.random.default_rng(10007 * layer)
    factors = generator.integers(0, bound, size=numbers.max_ngram, dtype=np.int64) * 2 + 1
    primes = moduli(numbers, layer)
    found = []
    for place in range(len(tokens)):
        row: list[int] = []
        hashed = 0
        for back in range(numbers.max_ngram):
            token = tokens[place - back] if back <= place else pad
            hashed ^= token * int(factors[back])
            if back:
                columns = range((back - 1) * numbers.heads, back * numbers.heads)
                row += [sum(primes[:c]) + hashed % primes[c] for c in columns]
        found.append(row)
    return torch.tensor(found)


def normalised_ids(directory: str | pathlib.Path, ids: Sequence[int]) -> list[int]:
    """Return numbers of tokens after normalisation, by first occurrence in the vocabulary."""
    inner = tokenizers.Tokenizer.from_file(str(pathlib.Path(directory) / "tokenizer.json"))
    numbers: dict[str, int] = {}
    table = []
    for token in range(inner.get_vocab_size(with_added_tokens=True)):
        text = inner.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            key = str(inner.id_to_token(token))
        else:
            plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
            plain = "".join(c for c in plain if unicodedata.category(c) != "Mn").lower()
            plain = re.sub(r"[ \t\r\n]+", " ", plain)
            key = (plain if plain == " " else plain.strip()) or text
        table.append(numbers.setdefault(key, len(numbers)))
    return [table[token] for token in ids]


def add_engram(
    h: Tensor, rows: Tensor, weights: Weights, prefix: str, eps: float, error: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Add to each of the streams [T, N, D] the rows' value, gated by its agreement with the key.

    A gate takes a root of its dot before the sigmoid, and jumps where the dot changes sign. For a
    small dot it is less accurate than its inputs; the second result says by how much.

    Args:
        h: [T, N, D], streams before the memory is added.
        rows: int64 [T, columns], row numbers in the layer's table.
        weights: weights of the checkpoint.
        prefix: name prefix of the layer's memory.
        eps: epsilon of the norms.
        error: bound on the relative error of a run's streams, and of its keys. Errors of channels
            are independent and add as squares.

    Returns:
        The streams, and [T], the relative error that the gates add to a run's streams.
    """
    values = weights.table(f"{prefix}.embed", rows).flatten(1)
    projected = weights.apply(values, f"{prefix}.wkv").unflatten(1, (h.shape[1] + 1, h.shape[2]))
    keys = rms_norm(projected[:, :-1], weights[f"{prefix}.k_weight"], eps)
    queries = rms_norm(h, weights[f"{prefix}.q_weight"], eps)
    terms = queries * keys / h.shape[2] ** 0.5
    dot, value = terms.sum(-1), projected[:, -1:]
    slack = 2 * error * terms.square().sum(-1).sqrt()
    gate = _gate(dot)
    moved = torch.maximum(_gate(dot + slack) - gate, gate - _gate(dot - slack))
    added = h + gate.unsqueeze(-1) * value
    sizes = [each.square().mean(-1).sqrt() for each in (value, added)]
    return added, (moved * sizes[0] / sizes[1]).amax(1)


def _gate(dot: Tensor) -> Tensor:
    sign = torch.where(torch.signbit(dot), -1.0, 1.0)
    return torch.sigmoid(sign * dot.abs().clamp(min=1e-6).sqrt())


def _primes_from(start: int, count: int) -> list[int]:
    """Return the first primes from ``start`` on."""
    found: list[int] = []
    number = start
    while len(found) < count:
        if number > 1 and all(number % d for d in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 1
    return found

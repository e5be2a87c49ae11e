"""The choice of the next token, reproducible whatever else runs in the batch.

The random number of a choice is a function of the request's seed and the token's position alone.
So a request's tokens depend neither on its neighbours, nor on how its prompt was split, nor on
speculation: a draft is accepted exactly if it is what would have been chosen anyway.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a request chooses its tokens.

    Attributes:
        temperature: 0 takes the best token; otherwise logits are divided by it.
        top_p: choose among the fewest most probable tokens that together have this probability.
        seed: any integer of 64 bits.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken."""
        return self.temperature == 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {self.seed}")


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1), a multiple of 2**-53, that belongs to a seed and a position."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def choose_tokens(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    best: Tensor | None = None,
) -> list[int]:
    """Choose one token for each row.

    Args:
        logits: float [n, V].
        samplings: of each row.
        positions: that the chosen token of each row will have.
        best: ``best_tokens`` of the logits, if it is known.

    Returns:
        Token ids. Equal logits: the lowest id wins, or comes first in the order of probability.

    Raises:
        FloatingPointError: a row holds NaN or +inf, or nothing but -inf.
    """
    vocab = logits.shape[-1]
    tokens: list[int] = best.tolist() if best is not None else _best_on_host(logits)
    for row, (token, sampling, position) in enumerate(
        zip(tokens, samplings, positions, strict=True)
    ):
        if token == vocab:
            raise FloatingPointError(f"the logits for position {position} are not numbers")
        if sampling.temperature > 0:
            tokens[row] = _sample(logits[row], sampling, uniform(sampling.seed, position))
    return tokens


def best_tokens(logits: Tensor) -> Tensor:
    """Lowest id, int64, of the best logit in each row [n, V]; V if the row has no finite best."""
    vocab = logits.shape[-1]
    best = logits.amax(-1, keepdim=True)
    ids = torch.arange(vocab, device=logits.device)
    # torch's argmax names no winner among equals. NaN equals nothing, which leaves id V.
    is_best = (logits == best) & best.isfinite()
    return torch.where(is_best, ids, vocab).amin(-1)


def _best_on_host(logits: Tensor) -> list[int]:
    """``best_tokens`` as a list."""
    if logits.is_cpu and logits.dtype != torch.bfloat16:
        # NumPy's argmax names the first of equals, and takes a NaN for the best.
        rows = logits.numpy()
        return [
            best if math.isfinite(row[best]) else logits.shape[-1]
            for row, best in zip(rows, rows.argmax(-1).tolist(), strict=True)
        ]
    tokens: list[int] = best_tokens(logits).tolist()
    return tokens


def _sample(logits: Tensor, sampling: Sampling, number: float) -> int:
    """Invert the cumulative distribution, most probable token first, at ``number``."""
    # On the host: not every device has float64.
    wide = logits.cpu().double()
    # Subtracting first keeps a tiny temperature from overflowing.
    probabilities = ((wide - wide.amax()) / sampling.temperature).softmax(-1)
    probabilities, order = probabilities.sort(descending=True, stable=True)
    mass = probabilities.cumsum(-1)
    # The running sum may end short of top_p by rounding; impossible tokens stay out all the same.
    kept = min(int((mass < sampling.top_p).sum()) + 1, int((probabilities > 0).sum()))
    place = int(torch.searchsorted(mass[:kept], number * mass[kept - 1], right=True))
    return int(order[min(place, kept - 1)])

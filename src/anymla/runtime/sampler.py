"""The choice of the next token, reproducible whatever else runs in the batch.

A token is sampled as the best of ``logits / temperature + noise`` with independent Gumbel noise for
every token of the vocabulary, which draws from the softmax exactly (Gumbel 1954; the "Gumbel-max
trick"). The noise is a function of the request's seed, the position and the token id alone. So a
request's tokens depend neither on its neighbours, nor on how its prompt was split, nor on
speculation: a draft is accepted exactly if it is the token that would have been chosen anyway. A
drafter that uses the same noise guesses the same token wherever its distribution is close: both
choose v with probability 1 / sum_i max(p_i / p_v, q_i / q_v).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.model.generation import GenerationDefaults
from anymla.runtime.scoring import block_rows

# SplitMix64's increment and multipliers, as signed numbers of 64 bits.
_GAMMA, _FIRST, _SECOND = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# Below the first temperature, logits that differ at all differ by more than any noise; above the
# second, float32 cannot tell them apart.
_LEAST_TEMPERATURE, _LARGEST_TEMPERATURE = 1e-30, 1e30
_MOST_PENALTY = 100.0


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Parameters of a request's choice of tokens.

    Attributes:
        temperature: divisor of the logits; 0 takes the best token.
        top_p: keep the fewest most probable tokens whose probabilities sum to this, 0 to 1.
        seed: any integer of 64 bits.
        top_k: number of most probable tokens to keep; 0 for all, as is -1.
        min_p: keep tokens with at least this fraction of the largest probability.
        repetition_penalty: divisor of positive logits and factor of others, for tokens in the
            prompt or the text; 1 for none, at most 100 and at least 0.01.
        presence_penalty: amount subtracted from logits of generated tokens, -100 to 100.
        frequency_penalty: amount subtracted for each time that a token has been generated, -100 to
            100.

    Penalties are applied first, then temperature, ``top_k``, ``top_p`` of the rest and ``min_p``:
    the order of transformers' generation.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """True if the best token is taken."""
        return self.temperature == 0

    @property
    def is_penalised(self) -> bool:
        """True if logits depend on the tokens before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def takes_best_logit(self) -> bool:
        """True if the token with the model's best logit is taken."""
        return self.is_greedy and not self.is_penalised

    @property
    def is_restricted(self) -> bool:
        """True if some tokens are excluded."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k == -1:  # vLLM's and llama.cpp's spelling
            object.__setattr__(self, "top_k", 0)
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 1 / _MOST_PENALTY <= self.repetition_penalty <= _MOST_PENALTY:
            raise ValueError(
                f"repetition_penalty must be in [0.01, 100], got {self.repetition_penalty}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -_MOST_PENALTY <= getattr(self, name) <= _MOST_PENALTY:
                raise ValueError(f"{name} must be in [-100, 100], got {getattr(self, name)}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {self.seed}")


# Fields of a sampling for which a checkpoint may have defaults.
DEFAULTED = tuple(field.name for field in dataclasses.fields(Sampling) if field.name != "seed")


def sampling_of(said: GenerationDefaults, asked: Mapping[str, float | None]) -> Sampling:
    """Combine the fields of ``Sampling`` that are not None with the checkpoint's defaults.

    Raises:
        ValueError: a value is out of range.
    """
    held: dict[str, Any] = {name: getattr(said, name) for name in DEFAULTED}
    held |= {name: value for name, value in asked.items() if value is not None}
    return Sampling(**held)


def noise_key(seed: int, position: int) -> int:
    """Return the signed 64-bit key that determines the noise of a seed and a position."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def gumbel_noise(keys: Tensor, vocab: int) -> Tensor:
    """Draw standard Gumbel noise for every token.

    Token t takes output t of SplitMix64 (Steele, Lea, Flood 2014) from the key on: u in (0, 1) of
    63 bits, and ``-log(-log(1 - u))``. In this form the largest values, up to 44.4, have all of
    float32's relative precision.

    Args:
        keys: int64 [n] noise keys, see ``noise_key``.
        vocab: V, the size of the vocabulary.

    Returns:
        float32 [n, V]. Devices differ by the rounding of their logarithms.
    """
    steps = torch.arange(1, vocab + 1, device=keys.device) * _GAMMA
    z = keys.unsqueeze(1) + steps
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    z = z ^ _shifted(z, 31)
    u = ((_shifted(z, 1).float() + 0.5) * 2.0**-63).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift int64 logically to the right."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def sample_tokens(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Sample one token for each row without waiting for the device.

    Args:
        logits: float [n, V], one row a token.
        temperatures: float32 [n]; rows of 0 take the best token.
        keys: int64 [n] noise keys, see ``noise_key``.

    Returns:
        int64 [n] token ids; V for a row without a finite best.
    """
    rows = block_rows(logits.shape[-1])
    parts = zip(logits.split(rows), temperatures.split(rows), keys.split(rows), strict=True)
    return torch.cat([best_tokens(_noisy(*part)) for part in parts])


def _noisy(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Return the noisy logits, float32 [n, V], whose maximum is the sampled token."""
    logits, temperatures = logits.float(), temperatures.unsqueeze(1)
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    divisors = temperatures.clamp(min=_LEAST_TEMPERATURE, max=_LARGEST_TEMPERATURE)
    scaled = (logits - logits.amax(-1, keepdim=True)) / divisors
    return torch.where(temperatures > 0, scaled + gumbel_noise(keys, logits.shape[-1]), logits)


def choose_tokens(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    best: Tensor | None = None,
) -> list[int]:
    """Choose one token for each row.

    Args:
        logits: float [n, V], one row a token.
        samplings: sampling parameters of each row.
        positions: position that the chosen token of each row will have.
        best: ``best_tokens`` of the logits, if they are known.

    Returns:
        Token ids. Of equal values the lowest id wins, and comes first in the order of probability.

    Raises:
        FloatingPointError: a row holds NaN or +inf, or nothing but -inf.
    """
    tokens = guess_tokens(logits, samplings, positions, best)
    require_tokens(tokens, positions, logits.shape[-1])
    return tokens


def require_tokens(tokens: Sequence[int], positions: Sequence[int], vocab: int) -> None:
    """Raise FloatingPointError for a choice of V, which ``guess_tokens`` returns for no token."""
    for token, position in zip(tokens, positions, strict=True):
        if token == vocab:
            raise FloatingPointError(f"the logits for position {position} are not numbers")


def guess_tokens(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    best: Tensor | None = None,
) -> list[int]:
    """Choose like ``choose_tokens``, but return V for a row without a finite best."""
    tokens: list[int] = best.tolist() if best is not None else _best_on_host(logits)
    rows = [row for row, sampling in enumerate(samplings) if not sampling.is_greedy]
    if not rows:
        return tokens
    kept = {
        place: _candidates(logits[row], samplings[row])
        for place, row in enumerate(rows)
        if samplings[row].is_restricted
    }
    wanted = logits if len(rows) == len(tokens) else logits[rows]
    if kept:
        wanted = wanted.clone()
        for place, ids in kept.items():
            ids = ids.to(logits.device)
            inside = wanted[place, ids]
            wanted[place] = -torch.inf
            wanted[place, ids] = inside
    temperatures = torch.tensor([samplings[row].temperature for row in rows], dtype=torch.float32)
    keys = torch.tensor([noise_key(samplings[row].seed, positions[row]) for row in rows])
    device = logits.device
    sampled: list[int] = sample_tokens(wanted, temperatures.to(device), keys.to(device)).tolist()
    for row, token in zip(rows, sampled, strict=True):
        tokens[row] = token
    return tokens


def best_tokens(logits: Tensor) -> Tensor:
    """Return the lowest id, int64, of the best logit in each row [n, V]; V if none is finite."""
    # torch's documentation promises the first of equal values; NaN counts as the largest.
    best = logits.argmax(-1, keepdim=True)
    value = logits.gather(-1, best)
    is_finite = value - value == 0  # in fewer launches than isfinite
    return torch.where(is_finite, best, logits.shape[-1]).squeeze(-1)


def _best_on_host(logits: Tensor) -> list[int]:
    """Return ``best_tokens`` as a list."""
    if logits.is_cpu and logits.dtype != torch.bfloat16:
        # NumPy's argmax returns the first of equal values, and counts NaN as the largest.
        rows = logits.numpy()
        return [
            best if math.isfinite(row[best]) else logits.shape[-1]
            for row, best in zip(rows, rows.argmax(-1).tolist(), strict=True)
        ]
    tokens: list[int] = best_tokens(logits).tolist()
    return tokens


def _candidates(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the ids that ``top_k``, ``top_p`` and ``min_p`` keep, most probable first."""
    # Computed on the host, because not every device has float64.
    wide = logits.cpu().double()
    probabilities = ((wide - wide.amax()) / sampling.temperature).softmax(-1)
    probabilities, order = probabilities.sort(descending=True, stable=True)
    if sampling.top_k:
        probabilities = probabilities[: sampling.top_k]
    # Rounding may end the running sum below top_p; impossible tokens are excluded all the same.
    kept = int((probabilities > 0).sum())
    if sampling.top_p < 1:
        mass = probabilities.cumsum(-1)
        kept = min(int((mass < sampling.top_p * mass[-1]).sum()) + 1, kept)
    if sampling.min_p > 0:
        kept = min(int((probabilities >= sampling.min_p * probabilities[0]).sum()), kept)
    return order[:kept]

"""vLLM's formulas of a layer in float64, and how far rounded activations may move their results.

vLLM multiplies MXFP4 experts by activations in bfloat16 (Marlin), anymla and DeepSeek's reference
by the same activations in e4m3. A value that is rounded to multiples of u is off by a random number
of variance u^2 / 12; a sum of many such errors, weighted by a matrix, has the weighted sum of the
variances. ``excess`` compares an error with that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK, quantize_fp8_rows

BF16_FRACTION_BITS, E4M3_FRACTION_BITS, E4M3_LEAST_EXPONENT = 7, 3, -6


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A result without any rounding, and the variance of one with rounding.

    Attributes:
        value: float64.
        variance: float64, of every element.
    """

    value: Tensor
    variance: Tensor

    @classmethod
    def exact(cls, value: Tensor) -> Estimate:
        """A value that is given."""
        return cls(value.double(), torch.zeros_like(value, dtype=torch.float64))

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.value + other.value, self.variance + other.variance)

    def rounded(self) -> Estimate:
        """As bfloat16."""
        return Estimate(self.value, self.variance + _rounding(_unit(self.value)))

    def quantised(self) -> Estimate:
        """As e4m3 in blocks of 128 channels."""
        _, scales = quantize_fp8_rows(self.value.float())
        scale = scales.double().repeat_interleave(FP8_BLOCK, -1)[..., : self.value.shape[-1]]
        least = torch.full_like(scale, 2.0**E4M3_LEAST_EXPONENT)
        size = torch.maximum((self.value / scale).abs(), least)
        unit = torch.exp2(torch.floor(torch.log2(size)) - E4M3_FRACTION_BITS) * scale
        return Estimate(self.value, self.variance + _rounding(unit))

    def times(self, weight: Tensor) -> Estimate:
        """The product with a matrix [N, K], rounded to bfloat16."""
        w = weight.double()
        return Estimate(self.value @ w.T, self.variance @ w.square().T).rounded()


def _unit(value: Tensor) -> Tensor:
    """Unit in the last place of bfloat16."""
    size = value.abs().clamp(min=2.0**-126)
    return torch.exp2(torch.floor(torch.log2(size)) - BF16_FRACTION_BITS)


def _rounding(unit: Tensor) -> Tensor:
    return unit.square() / 12


def swiglu(gate: Estimate, up: Estimate, limit: float, weight: Tensor | float = 1.0) -> Estimate:
    """weight * silu(min(gate, limit)) * clamp(up, -limit, limit), rounded."""
    g, u = gate.value.clamp(max=limit), up.value.clamp(-limit, limit)
    sigmoid = torch.sigmoid(g)
    silu, slope = g * sigmoid, sigmoid * (1 + g * (1 - sigmoid))
    free_g, free_u = gate.value < limit, up.value.abs() < limit
    variance = (slope * u).square() * gate.variance * free_g + silu.square() * up.variance * free_u
    factor = torch.as_tensor(weight, dtype=torch.float64, device=g.device)
    return Estimate(factor * silu * u, factor.square() * variance).rounded()


def route(x: Tensor, gate: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Ids and weights of the k experts with the best biased scores, sqrt(softplus(x gate^T))."""
    scores = _scores(x, gate)
    ids = (scores + bias.double()).topk(k, -1).indices
    return ids, _normalised(scores, ids, scale)


def route_by_table(
    x: Tensor, gate: Tensor, token_ids: Tensor, table: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Ids and weights of the experts that a table lists."""
    ids = table[token_ids.long()].long()
    return ids, _normalised(_scores(x, gate), ids, scale)


def _scores(x: Tensor, gate: Tensor) -> Tensor:
    return torch.nn.functional.softplus(x.double() @ gate.double().T).sqrt()


def _normalised(scores: Tensor, ids: Tensor, scale: float) -> Tensor:
    chosen = scores.gather(1, ids)
    return chosen / chosen.sum(-1, keepdim=True) * scale


def mixture(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    matrices: Callable[[int], tuple[Tensor, Tensor, Tensor]],
    limit: float,
    *,
    quantised: bool,
) -> Estimate:
    """Sum of each token's experts; ``matrices(e)`` are w1, w3 and w2 of one."""
    given = Estimate.exact(x)
    given = given.quantised() if quantised else given
    total = Estimate.exact(torch.zeros_like(x))
    for e in ids.unique().tolist():
        token, column = (ids == e).nonzero(as_tuple=True)
        w1, w3, w2 = matrices(e)
        rows = Estimate(given.value[token], given.variance[token])
        weight = weights[token, column, None]
        inner = swiglu(rows.times(w1), rows.times(w3), limit, weight)
        out = (inner.quantised() if quantised else inner).times(w2)
        total.value.index_add_(0, token, out.value)
        total.variance.index_add_(0, token, out.variance)
    return total


def shared_expert(
    x: Tensor, gate_up: Tensor, down: Tensor, limit: float, *, quantised: bool = True
) -> Estimate:
    """The expert of every token; vLLM quantises its activations as anymla does."""
    given = Estimate.exact(x)
    given = given.quantised() if quantised else given
    gate, up = gate_up.chunk(2)
    inner = swiglu(given.times(gate), given.times(up), limit)
    return (inner.quantised() if quantised else inner).times(down)


def excess(found: Tensor, wanted: Estimate) -> dict[str, float]:
    """An error in standard deviations: the largest, and the root of the mean square."""
    apart = (found.double() - wanted.value) / wanted.rounded().variance.sqrt()
    return {"largest": float(apart.abs().max()), "mean": float(apart.square().mean().sqrt())}

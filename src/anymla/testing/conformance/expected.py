"""Expected results of the cases: float64 mathematics of decoded rows, shared with the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.testing.oracle.blocks import rms_norm
from anymla.testing.oracle.config import OracleConfig, Yarn
from anymla.testing.oracle.rope import frequencies
from anymla.testing.tolerance import Bound, accumulation, assert_close, ulps

EPS = 1e-6
# float16 probabilities are at most 2^15 and multiples of 2^-24, so off by 2^-40 of the largest at
# most. A unit of bfloat16 of this share is as much.
_LEAST_SHARE = 2.0**-33


@dataclasses.dataclass(frozen=True)
class Attention:
    """Expected softmax attention of some queries.

    Attributes:
        out: float64 [T, H, D], output of each head.
        lse: float64 [T, H], natural logarithm, without the sink.
        weight: float64 [T, H, D], sum of (p + 2^-33) |v|, the scale of rounding errors.
        score_norm: float64 [T, H], Euclidean norm of the terms that add up to a score, as a mean
            over rows by p; the scale of rounding errors of ``lse``.
    """

    out: Tensor
    lse: Tensor
    weight: Tensor
    score_norm: Tensor

    def check(self, result: tuple[Tensor, Tensor | None], name: str = "attention") -> float:
        """Compare with an operation's (out, lse); a library that returns no lse gives None.

        Returns the largest error as a share of what is allowed.

        One bfloat16 unit of sum(p |v|) for probabilities rounded to bfloat16 (half a unit) and the
        float32 errors of scores and sums, and one unit of the result for rounding it (half). Where
        the likely rows have zeros, p is what rounding to float16 leaves of an unlikely one. The
        lse is float32 of scores that are dot products of the row's width. Terms of a score that
        cancel walk at random before they do: a partial sum is about their Euclidean norm, however
        small the score is.
        """
        out, lse = result
        error = ulps(torch.bfloat16 if out.dtype == torch.bfloat16 else torch.float32, 1)
        error = error + accumulation(out.shape[-1], torch.float32)
        where, weight = f"{name}: out", self.weight
        worst = assert_close(out, self.out, atol=error, rtol=error, scale=weight, name=where)
        if lse is None:
            return worst
        slack = accumulation(out.shape[-1], torch.float32, c=4.0)
        name, scale = f"{name}: lse", self.score_norm.clamp(min=8.0)
        return max(
            worst, assert_close(lse, self.lse, atol=slack, rtol=slack, scale=scale, name=name)
        )


def attend(
    q: Tensor,
    rows: Sequence[Tensor],
    sink: Tensor | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
) -> Attention:
    """Attend each of T queries [T, H, D] to its own float64 rows [n, D]."""
    tokens, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    values = dim if value_dim is None else value_dim
    parts = []
    for t in range(tokens):
        if not len(rows[t]):
            empty = torch.zeros(heads, values, dtype=torch.float64)
            none = torch.zeros(heads, dtype=torch.float64)
            parts.append((empty, none - torch.inf, empty, none))
            continue
        scores = q[t].double() @ rows[t].T * scale
        lse = scores.logsumexp(-1)
        share = (scores - lse.unsqueeze(1)).exp()
        norms = (q[t].double().square() @ rows[t].square().T).sqrt() * scale
        norm = torch.where(share > 0, share * norms, 0.0).sum(1)
        if sink is not None:
            share = share * torch.sigmoid(lse - sink.double()).unsqueeze(1)
        value = rows[t][:, :values]
        parts.append((share @ value, lse, (share + _LEAST_SHARE) @ value.abs(), norm))
    return Attention(*map(torch.stack, zip(*parts, strict=True)))


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Compute sum_h w_h relu(q_h . k): float64 [M, N] of [M, H, D], [N, D] and [M, H]."""
    dots = torch.einsum("mhd,nd->mhn", q.double(), keys.double()).clamp(min=0)
    return torch.einsum("mhn,mh->mn", dots, weights.double())


def index_scale(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Compute sum_h |w_h| sum_d |q_hd| |k_d|, [M, N], the scale of float32 scores' errors."""
    dots = torch.einsum("mhd,nd->mhn", q.double().abs(), keys.double().abs())
    return torch.einsum("mhn,mh->mn", dots, weights.double().abs())


RATIOS = (0, 4, 128)


def v4_config() -> OracleConfig:
    """Return DeepSeek-V4's constants; sizes that no case uses are 1."""
    return OracleConfig(
        layers=3,
        mtp_layers=0,
        heads=1,
        head_dim=512,
        rope_dim=64,
        groups=1,
        window=128,
        ratios=RATIOS,
        index_heads=64,
        index_dim=128,
        index_topk=512,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        yarn=Yarn(16.0, 65536, 32.0, 1.0),
        sinkhorn_iters=20,
        hc_eps=1e-6,
        experts_per_token=1,
        hash_layers=0,
        routed_scaling=1.0,
        swiglu_limit=10.0,
        norm_eps=EPS,
        weight_block=(128, 128),
        dynamic_activations=False,
    )


def table(positions: int, *, compressed: bool) -> Tensor:
    """Return float32 [positions, 64] cosines and sines of V4's rotary embedding."""
    inv_freq = frequencies(v4_config(), compressed=compressed)
    angle = (torch.arange(positions).float().unsqueeze(1) * inv_freq).double()
    return torch.cat((angle.cos(), angle.sin()), 1).float()


@dataclasses.dataclass(frozen=True)
class EngramGate:
    """Streams with n-grams added by gates, and bounds of their rounding errors.

    A sum of D products and the two root mean squares change the dot d by up to ``slack``. The gate
    is more sensitive for smaller d (its root's slope is at most 125), and jumps where d changes
    sign, so its change is computed from its values at both ends.

    Attributes:
        out: float64 [T, N, D], streams with the gated n-grams added.
        error: float64 [T, N, D], error before the result is rounded.
    """

    out: Tensor
    error: Tensor

    @classmethod
    def of(cls, h: Tensor, projected: Tensor, weight: Tensor, eps: float) -> EngramGate:
        """Compute from arguments of ``engram_gate`` in float64; errors are float32's."""
        width = h.shape[2]
        state, parts = h.double(), projected.double().unflatten(1, (-1, width))
        keys, value = parts[:, :-1], parts[:, -1:]
        terms = rms_norm(state, weight.double(), eps) * rms_norm(keys, None, eps) * width**-0.5
        dot = terms.sum(2, keepdim=True)
        relative = accumulation(width, torch.float32) * 2 + ulps(torch.float32, 8)
        slack = relative * terms.abs().sum(2, keepdim=True)
        gate, low, high = (_gate(d) for d in (dot, dot - slack, dot + slack))
        moved = torch.maximum(high - gate, gate - low) + ulps(torch.float32, 4)
        added = gate * value
        rounding = ulps(torch.float32, 1) * (state.abs() + added.abs())
        return cls(state + added, value.abs() * moved + rounding)

    def check(self, got: Tensor, name: str) -> float:
        """Compare with the operation's result, allowing half a unit for its rounding."""
        half = ulps(got.dtype, 0.5)
        why = Bound(1 + half, "what the gates and sums of float32 may err")
        return assert_close(got, self.out, atol=why, rtol=half, scale=self.error, name=name)


def _gate(dot: Tensor) -> Tensor:
    root = dot.abs().clamp(min=1e-6).sqrt()
    return torch.sigmoid(torch.where(dot < 0, -root, root))

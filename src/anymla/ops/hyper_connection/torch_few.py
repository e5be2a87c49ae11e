"""The gates of one or two tokens with four streams, in Python numbers.

A decode step has some sixty numbers a site, for which every library call costs more than the
arithmetic: on one core 35 us here against 100 us as the calls of ``torch_streams``. Python's
float64 makes the gates more exact, not less.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anymla.ops import _host

_FEW_TOKENS = 2
_STREAMS = 4
_LOWEST_LOGIT = -700.0  # exp(700) is finite, and the sigmoid below it is 0 in every dtype


def suits(h: Tensor, norm_eps: float, hc_eps: float) -> bool:
    """Whether streams [T, N, D] go this way; without both eps Python could divide by zero."""
    tokens, streams, _ = h.shape
    return (
        streams == _STREAMS
        and 0 < tokens <= _FEW_TOKENS
        and norm_eps > 0
        and hc_eps > 0
        and _host.on_host(h)
    )


def gates(
    mix: Tensor,
    norm: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    channels: int,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> Tensor:
    """The gates of a site.

    Args:
        mix: [T, 24], f @ fn^T, not yet normalised.
        norm: [T], Euclidean norms of f.
        base: [24].
        scale: [3].
        channels: N D, length of f.
        norm_eps: see interface.hc_pre.
        hc_eps: likewise.
        iters: likewise.

    Returns:
        [T, 24] in mix's dtype: pre [4], post [4] and comb [4, 4].
    """
    offsets, factors = base.tolist(), scale.tolist()
    rows = []
    for row, length in zip(mix.tolist(), norm.tolist(), strict=True):
        inverse = 1.0 / math.sqrt(length * length / channels + norm_eps)
        a, b, c = (inverse * factor for factor in factors)
        pre = [_sigmoid(m * a + o) + hc_eps for m, o in zip(row[:4], offsets[:4], strict=True)]
        post = [2.0 * _sigmoid(m * b + o) for m, o in zip(row[4:8], offsets[4:8], strict=True)]
        logits = [m * c + o for m, o in zip(row[8:], offsets[8:], strict=True)]
        comb = [_softmax(logits[start : start + 4], hc_eps) for start in (0, 4, 8, 12)]
        rows.append([*pre, *post, *_balance(comb, hc_eps, iters)])
    return torch.tensor(rows, dtype=mix.dtype)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(x, _LOWEST_LOGIT)))


def _softmax(logits: list[float], eps: float) -> list[float]:
    top = max(logits)
    e0, e1, e2, e3 = (math.exp(logit - top) for logit in logits)
    inverse = 1.0 / (e0 + e1 + e2 + e3)
    return [e0 * inverse + eps, e1 * inverse + eps, e2 * inverse + eps, e3 * inverse + eps]


def _balance(rows: list[list[float]], eps: float, iters: int) -> list[float]:
    """Sinkhorn iterations of one 4 x 4 matrix, kept as factors of rows r and columns c around it.

    Dividing a row by (its sum + eps) divides its factor r by (r <row, c> + eps); columns likewise.
    """
    (k0, k1, k2, k3), (l0, l1, l2, l3), (m0, m1, m2, m3), (n0, n1, n2, n3) = rows
    rk = rl = rm = rn = c0 = c1 = c2 = c3 = 1.0
    for iteration in range(iters):
        if iteration:
            rk /= rk * (k0 * c0 + k1 * c1 + k2 * c2 + k3 * c3) + eps
            rl /= rl * (l0 * c0 + l1 * c1 + l2 * c2 + l3 * c3) + eps
            rm /= rm * (m0 * c0 + m1 * c1 + m2 * c2 + m3 * c3) + eps
            rn /= rn * (n0 * c0 + n1 * c1 + n2 * c2 + n3 * c3) + eps
        c0 /= c0 * (k0 * rk + l0 * rl + m0 * rm + n0 * rn) + eps
        c1 /= c1 * (k1 * rk + l1 * rl + m1 * rm + n1 * rn) + eps
        c2 /= c2 * (k2 * rk + l2 * rl + m2 * rm + n2 * rn) + eps
        c3 /= c3 * (k3 * rk + l3 * rl + m3 * rm + n3 * rn) + eps
    columns = (c0, c1, c2, c3)
    return [
        r * value * c
        for r, row in zip((rk, rl, rm, rn), rows, strict=True)
        for value, c in zip(row, columns, strict=True)
    ]

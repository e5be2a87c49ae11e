"""Hyper-connections on any torch device; tokens are processed in blocks that bound scratch."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from anymla.ops import _host
from anymla.ops._check import wide_dtype
from anymla.ops._quantized import fill_codes
from anymla.ops.hyper_connection.reference import post_then_pre

# Largest number of tokens whose gates are computed in Python. A site has some sixty numbers a
# token, for which a library call costs more than its arithmetic: on one core, a token's gates take
# 35 us in Python and 100 us as torch calls. Python's float64 is also more exact.
_MOST_PYTHON_TOKENS = 2
_STREAMS = 4
_LOWEST_LOGIT = -700.0  # exp(700) is finite, and below this the sigmoid is 0 in every dtype


def suits_few(h: Tensor, norm_eps: float, hc_eps: float) -> bool:
    """Return True if Python computes the gates of h [T, N, D]; both eps must exclude 0 / 0."""
    tokens, streams, _ = h.shape
    return (
        streams == _STREAMS
        and 0 < tokens <= _MOST_PYTHON_TOKENS
        and norm_eps > 0
        and hc_eps > 0
        and _host.on_host(h)
    )


def _gates_few(
    f: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gates pre, post and comb of few flattened streams, in Python numbers."""
    mix, norm = functional.linear(f, fn.to(f.dtype)), torch.linalg.vector_norm(f, dim=-1)
    offsets, factors = base.tolist(), scale.tolist()
    rows = []
    for row, length in zip(mix.tolist(), norm.tolist(), strict=True):
        inverse = 1.0 / math.sqrt(length * length / f.shape[1] + norm_eps)
        a, b, c = (inverse * factor for factor in factors)
        pre = [_sigmoid(m * a + o) + hc_eps for m, o in zip(row[:4], offsets[:4], strict=True)]
        post = [2.0 * _sigmoid(m * b + o) for m, o in zip(row[4:8], offsets[4:8], strict=True)]
        logits = [m * c + o for m, o in zip(row[8:], offsets[8:], strict=True)]
        comb = [_softmax(logits[start : start + 4], hc_eps) for start in (0, 4, 8, 12)]
        rows.append([*pre, *post, *_balance(comb, hc_eps, iters)])
    n, gates = _STREAMS, torch.tensor(rows, dtype=mix.dtype)
    return gates[:, :n], gates[:, n : 2 * n], gates[:, 2 * n :].view(len(f), n, n)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(x, _LOWEST_LOGIT)))


def _softmax(logits: list[float], eps: float) -> list[float]:
    top = max(logits)
    e0, e1, e2, e3 = (math.exp(logit - top) for logit in logits)
    inverse = 1.0 / (e0 + e1 + e2 + e3)
    return [e0 * inverse + eps, e1 * inverse + eps, e2 * inverse + eps, e3 * inverse + eps]


def _balance(rows: list[list[float]], eps: float, iters: int) -> list[float]:
    """Run Sinkhorn iterations on one 4 x 4 matrix, kept as row factors r and column factors c.

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


# An N x N matrix (N = 4) is divided 39 times by its column or row sums, so for few tokens call
# overhead dominates: on one core 230 us as torch calls, 40 us as the NumPy products below. The last
# division is by column sums.
def sinkhorn(logits: Tensor, *, eps: float, iters: int) -> Tensor:
    """Balance logits [T, N, N] to nearly doubly stochastic matrices; see ``reference.sinkhorn``."""
    c = torch.softmax(logits, dim=-1).add_(eps)
    if _host.on_host(c):
        return _balance_numpy(c, eps, iters)
    # Sums instead of products with ones, since products might be computed in TF32.
    c.div_(c.sum(dim=-2, keepdim=True).add_(eps))
    for _ in range(iters - 1):
        c.div_(c.sum(dim=-1, keepdim=True).add_(eps))
        c.div_(c.sum(dim=-2, keepdim=True).add_(eps))
    return c


@functools.cache
def _summing_matrices(n: int, eps: float, dtype: Any) -> tuple[Any, Any]:
    """Return matrices [N^2 + 1, N^2 + 1] that map a matrix to its row sums and column sums + eps.

    A matrix is a row of N^2 numbers followed by a 1. The 1 carries eps into each sum; its own sum
    is 1, so that it survives the division.
    """
    identity, ones = np.eye(n), np.ones((n, n))
    matrices = []
    for pattern in (np.kron(identity, ones), np.kron(ones, identity)):
        matrix = np.zeros((n * n + 1, n * n + 1), dtype)
        matrix[:-1, :-1] = pattern
        matrix[-1] = eps
        matrix[-1, -1] = 1
        matrices.append(matrix)
    return matrices[0], matrices[1]


def _balance_numpy(c: Tensor, eps: float, iters: int) -> Tensor:
    tokens, n, _ = c.shape
    given = c.view(tokens, n * n).numpy()
    rows, columns = _summing_matrices(n, eps, given.dtype)
    flat = np.empty((tokens, n * n + 1), given.dtype)
    flat[:, :-1] = given
    flat[:, -1] = 1
    sums = np.empty_like(flat)
    with np.errstate(all="ignore"):  # NaN streams give NaN gates, as in torch
        np.dot(flat, columns, sums)
        np.divide(flat, sums, flat)
        for _ in range(iters - 1):
            np.dot(flat, rows, sums)
            np.divide(flat, sums, flat)
            np.dot(flat, columns, sums)
            np.divide(flat, sums, flat)
    return torch.from_numpy(flat[:, :-1]).view(tokens, n, n)


# Elements of a block of streams that is copied to float32: 4 MiB fit in a CPU's cache, 256 MiB keep
# a GPU busy.
_CPU_BLOCK = 1 << 20
_DEVICE_BLOCK = 1 << 26


def _block_tokens(h: Tensor) -> int:
    elements = _CPU_BLOCK if h.device.type == "cpu" else _DEVICE_BLOCK
    return max(1, elements // max(1, h.shape[1] * h.shape[2]))


@functools.cache
def _scale_of_row(n: int, device: torch.device) -> Tensor:
    """Return, for each of fn's (2 + N) N rows, which of the three scales it takes."""
    return torch.tensor([0] * n + [1] * n + [2] * (n * n), device=device)


@functools.cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    eps_tensor = _constant(eps, x.dtype, x.device)
    return torch.addcmul(eps_tensor, norm, norm, value=1 / x.shape[-1]).rsqrt_()


def _mix(f: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    return functional.linear(f, fn.to(f.dtype)).mul_(_inverse_rms(f, norm_eps))


def _collapse(f: Tensor, pre: Tensor, dtype: torch.dtype) -> Tensor:
    n = pre.shape[1]
    if len(pre) == 1:
        return torch.mm(pre, f.view(n, -1)).to(dtype)
    streams = f.view(f.shape[0], n, f.shape[1] // n)
    return torch.bmm(pre.unsqueeze(1), streams).squeeze(1).to(dtype)


def _gates_block(
    f: Tensor,
    n: int,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gates of flattened streams [T, N D]; ``scale`` has one number for each row of fn."""
    gates = torch.addcmul(base, _mix(f, fn, norm_eps), scale)
    pre = gates[:, :n].sigmoid().add_(hc_eps)
    post = gates[:, n : 2 * n].sigmoid().mul_(2)
    comb = sinkhorn(gates[:, 2 * n :].view(len(f), n, n), eps=hc_eps, iters=iters)
    return pre, post, comb


def _site(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    *,
    collapses: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return collapsed streams [T, D], or pre [T, N] unless ``collapses``; then post and comb."""
    tokens, n, d = h.shape
    dtype, few = wide_dtype(h.dtype), suits_few(h, norm_eps, hc_eps)
    if not few:
        scale = scale.index_select(0, _scale_of_row(n, h.device)).to(dtype)
        base = base.to(dtype)

    def of(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f = part.reshape(len(part), fn.shape[1]).to(dtype)
        options = (fn, base, scale, norm_eps, hc_eps, iters)
        pre, post, comb = _gates_few(f, *options) if few else _gates_block(f, n, *options)
        return _collapse(f, pre, h.dtype) if collapses else pre, post, comb

    block = _block_tokens(h)
    if few or tokens <= block:
        return of(h)
    first = h.new_empty((tokens, d)) if collapses else h.new_empty((tokens, n), dtype=dtype)
    post = h.new_empty((tokens, n), dtype=dtype)
    comb = h.new_empty((tokens, n, n), dtype=dtype)
    for start in range(0, tokens, block):
        part = slice(start, start + block)
        first[part], post[part], comb[part] = of(h[part])
    return first, post, comb


def hc_pre(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    norm_weight: Tensor | None = None,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backend of ``interface.hc_pre`` in torch; see its contract."""
    y, post, comb = _site(h, fn, base, scale, norm_eps, hc_eps, iters, collapses=True)
    if norm_weight is not None:
        x = y.to(post.dtype)
        y = (x * _inverse_rms(x, norm_eps)).mul_(norm_weight).to(h.dtype)
    fill_codes(y, codes, code_scales)
    return y, post, comb


def hc_gates(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backend of ``interface.hc_gates`` in torch; see its contract."""
    return _site(h, fn, base, scale, norm_eps, hc_eps, iters, collapses=False)


def hc_collapse_norm(
    h: Tensor,
    pre: Tensor,
    norm_weight: Tensor | None,
    *,
    norm_eps: float,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Tensor:
    """Backend of ``interface.hc_collapse_norm`` in torch; see its contract."""
    y = h.new_empty((h.shape[0], h.shape[2]))
    for start in range(0, len(h), _block_tokens(h)):
        part = slice(start, start + _block_tokens(h))
        y[part] = _collapse(h[part].flatten(1).to(pre.dtype), pre[part], h.dtype)
        if norm_weight is not None:
            x = y[part].to(pre.dtype)
            y[part] = (x * _inverse_rms(x, norm_eps)).mul_(norm_weight)
    fill_codes(y, codes, code_scales)
    return y


def _post_block(u: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.bmm(comb.transpose(1, 2), h.to(comb.dtype))
    return mixed.addcmul_(post.unsqueeze(2), u.unsqueeze(1)).to(h.dtype)


def hc_post(u: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Backend of ``interface.hc_post`` in torch; see its contract."""
    tokens = h.shape[0]
    block = _block_tokens(h)
    if tokens <= block:
        return _post_block(u, h, post, comb)
    streams = torch.empty_like(h, memory_format=torch.contiguous_format)
    for start in range(0, tokens, block):
        part = slice(start, start + block)
        streams[part] = _post_block(u[part], h[part], post[part], comb[part])
    return streams


def hc_head(
    h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float, hc_eps: float
) -> Tensor:
    """Backend of ``interface.hc_head`` in torch; see its contract."""
    tokens, _, d = h.shape
    dtype = wide_dtype(h.dtype)
    base, scale = base.to(dtype), scale.to(dtype)
    y = h.new_empty((tokens, d))
    block = _block_tokens(h)
    for start in range(0, tokens, block):
        f = h[start : start + block].flatten(1).to(dtype)
        pre = torch.addcmul(base, _mix(f, fn, norm_eps), scale).sigmoid_().add_(hc_eps)
        y[start : start + block] = _collapse(f, pre, h.dtype)
    return y


hc_post_pre_norm = functools.partial(post_then_pre, hc_post, hc_pre)

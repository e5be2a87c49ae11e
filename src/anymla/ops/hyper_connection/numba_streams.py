"""Hyper-connections for few tokens on a CPU; each site is one kernel."""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit

from anymla.ops._numba_rows import (
    CACHE,
    KERNEL,
    dot,
    f32_at,
    from_bf16,
    gemv_f32,
    inverse_rms,
    narrow,
    to_bf16,
    u16_at,
    widen,
)


def hc_pre(
    h, fn, base, scale, *, norm_eps, hc_eps, iters, norm_weight=None, codes=None, code_scales=None
):
    """Backend of ``interface.hc_pre`` in numba; see its contract."""
    return _enter(None, h, None, None, fn, base, scale, norm_weight, norm_eps, hc_eps, iters)[1:]


def hc_post_pre_norm(
    u, h, post, comb, fn, base, scale, norm_weight, *,
    norm_eps, hc_eps, iters, codes=None, code_scales=None,
):  # fmt: skip
    """Backend of ``interface.hc_post_pre_norm`` in numba; see its contract."""
    return _enter(u, h, post, comb, fn, base, scale, norm_weight, norm_eps, hc_eps, iters)


def _enter(u, h, post, comb, fn, base, scale, norm_weight, norm_eps, hc_eps, iters):
    """Return new streams, the site's input, post and comb; without u, h itself is the streams."""
    tokens, n, width = h.shape
    h = h.contiguous()
    streams, before = h, (0, 0, 0)
    if u is not None:
        streams = torch.empty(h.shape, dtype=h.dtype)
        u, post, comb = u.contiguous(), post.contiguous(), comb.contiguous()
        before = u.data_ptr(), post.data_ptr(), comb.data_ptr()
    y = torch.empty((tokens, width), dtype=h.dtype)
    new_post = torch.empty((tokens, n), dtype=torch.float32)
    new_comb = torch.empty((tokens, n, n), dtype=torch.float32)
    fn, base, scale = fn.contiguous(), base.contiguous(), scale.contiguous()
    if norm_weight is not None:
        norm_weight = norm_weight.contiguous()
    norm = 0 if norm_weight is None else norm_weight.data_ptr()
    _site(
        (tokens, n, width), h.data_ptr(), before, streams.data_ptr(),
        (fn.data_ptr(), base.data_ptr(), scale.data_ptr(), norm), norm_eps, hc_eps, iters,
        y.data_ptr(), new_post.data_ptr(), new_comb.data_ptr(),
    )  # fmt: skip
    return streams, y, new_post, new_comb


def hc_post(u, h, post, comb):
    """Backend of ``interface.hc_post`` in numba; see its contract."""
    u, h, post, comb = u.contiguous(), h.contiguous(), post.contiguous(), comb.contiguous()
    out = torch.empty(h.shape, dtype=h.dtype)
    before = u.data_ptr(), post.data_ptr(), comb.data_ptr()
    _return(tuple(h.shape), h.data_ptr(), before, out.data_ptr())
    return out


def hc_head(h, fn, base, scale, *, norm_eps, hc_eps):
    """Backend of ``interface.hc_head`` in numba; see its contract."""
    tokens, n, width = h.shape
    h, fn, base, scale = h.contiguous(), fn.contiguous(), base.contiguous(), scale.contiguous()
    y = torch.empty((tokens, width), dtype=h.dtype)
    weights = fn.data_ptr(), base.data_ptr(), scale.data_ptr()
    _head((tokens, n, width), h.data_ptr(), weights, norm_eps, hc_eps, y.data_ptr())
    return y


@njit(**KERNEL)
def _return(shape, h, before, out):
    """Expand outputs u into the streams: ``out_j = post_j u + sum_i comb_ij h_i``."""
    tokens, n, width = shape
    u, post, comb = before
    streams, total = np.empty((n, width), np.float32), np.empty(width, np.float32)
    for token in range(tokens):
        widen(u16_at(h + 2 * token * n * width, n * width), streams.reshape(-1))
        output = u16_at(u + 2 * token * width, width)
        mixes, factors = f32_at(comb + 4 * token * n * n, n * n), f32_at(post + 4 * token * n, n)
        for j in range(n):
            total[:] = 0
            for i in range(n):
                _add(mixes[i * n + j], streams[i], total)
            factor = factors[j]
            for d in range(width):
                total[d] += factor * from_bf16(output[d])
            narrow(total, u16_at(out + 2 * (token * n + j) * width, width))


@njit(cache=CACHE)
def _add(factor, row, total):
    for d in range(len(total)):
        total[d] += factor * row[d]


@njit(**KERNEL)
def _site(
    shape, h, before, streams, weights, norm_eps, hc_eps, iters, y, new_post, new_comb
):  # fmt: skip
    tokens, n, width = shape
    fn, base, scale, norm = weights
    if before[0] != 0:
        _return(shape, h, before, streams)
    gates = (2 + n) * n
    f, x = np.empty(n * width, np.float32), np.empty(width, np.float32)
    mix = np.empty(gates, np.float32)
    offsets, factors = f32_at(base, gates), f32_at(scale, 3)
    pre, comb = np.empty(n, np.float32), np.empty((n, n), np.float64)
    for token in range(tokens):
        widen(u16_at(streams + 2 * token * n * width, n * width), f)
        gemv_f32(fn, gates, f, mix)
        inverse = 1.0 / math.sqrt(np.float64(dot(f, f)) / (n * width) + norm_eps)
        post = f32_at(new_post + 4 * token * n, n)
        for i in range(n):
            pre[i] = _sigmoid(inverse * factors[0] * mix[i] + offsets[i]) + hc_eps
            post[i] = 2.0 * _sigmoid(inverse * factors[1] * mix[n + i] + offsets[n + i])
            for j in range(n):
                place = (2 + i) * n + j
                comb[i, j] = inverse * factors[2] * mix[place] + offsets[place]
        _balance(comb, hc_eps, iters)
        out = f32_at(new_comb + 4 * token * n * n, n * n)
        for i in range(n):
            for j in range(n):
                out[i * n + j] = comb[i, j]
        _collapse(f, pre, x)
        to = u16_at(y + 2 * token * width, width)
        narrow(x, to)
        if norm != 0:
            widen(to, x)  # the norm is that of the rounded sum
            inverse_of_x = inverse_rms(x, norm_eps)
            norms = f32_at(norm, width)
            for d in range(width):
                to[d] = to_bf16(x[d] * inverse_of_x * norms[d])


@njit(cache=CACHE, error_model="numpy")
def _sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


@njit(cache=CACHE)
def _collapse(f, pre, x):
    """Sum the streams [N D], weighted by gates [N]."""
    width = len(x)
    x[:] = 0
    for i in range(len(pre)):
        _add(pre[i], f[i * width : (i + 1) * width], x)


@njit(cache=CACHE, error_model="numpy")
def _balance(c, eps, iters):
    """Take each row's softmax + eps, then run Sinkhorn's iterations, first and last on columns."""
    n = len(c)
    for i in range(n):
        top = c[i, 0]
        for j in range(1, n):
            if c[i, j] > top:
                top = c[i, j]
        total = 0.0
        for j in range(n):
            c[i, j] = math.exp(c[i, j] - top)
            total += c[i, j]
        for j in range(n):
            c[i, j] = c[i, j] / total + eps
    for iteration in range(iters):
        if iteration:
            for i in range(n):
                total = eps
                for j in range(n):
                    total += c[i, j]
                factor = 1.0 / total
                for j in range(n):
                    c[i, j] *= factor
        for j in range(n):
            total = eps
            for i in range(n):
                total += c[i, j]
            factor = 1.0 / total
            for i in range(n):
                c[i, j] *= factor


@njit(**KERNEL)
def _head(shape, h, weights, norm_eps, hc_eps, y):
    tokens, n, width = shape
    fn, base, scale = weights
    f, x = np.empty(n * width, np.float32), np.empty(width, np.float32)
    mix, pre = np.empty(n, np.float32), np.empty(n, np.float32)
    offsets, factor = f32_at(base, n), f32_at(scale, 1)[0]
    for token in range(tokens):
        widen(u16_at(h + 2 * token * n * width, n * width), f)
        gemv_f32(fn, n, f, mix)
        inverse = inverse_rms(f, norm_eps)
        for i in range(n):
            pre[i] = _sigmoid(np.float64(mix[i] * inverse * factor + offsets[i])) + hc_eps
        _collapse(f, pre, x)
        narrow(x, u16_at(y + 2 * token * width, width))

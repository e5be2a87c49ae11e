"""Gradients of hyper-connections in Triton: every sum over tokens or channels has a fixed order.

    expand_backward    a CTA for each token: dout, u, h -> du, dh, dpost, dcomb

A site takes these kernels, each of which reads the streams at most once:

    mix                by slices of D, as in the forward pass -> partial mixes
    collapse_backward  a CTA for each token: the gradient of pre, and numbers of the norm
    comb_backward      a token in each lane: through Sinkhorn's steps to the logits of comb
    mixes_backward     tokens by mixes: to the products of streams and weights
    streams_backward   by slices of D and of tokens: dh, and partial sums of dfn and dnorm
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_cast import widen
from anymla.ops._sizes import next_power_of_2
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.device import target_of
from anymla.ops.hyper_connection.config import (
    BackwardConfig,
    choose_backward_config,
    takes_many_tokens,
)
from anymla.ops.hyper_connection.triton_gates import (
    PartialMixes,
    Site,
    _divided_by_columns,
    _divided_by_rows,
    _inverse,
    _softmax,
    _sum,
    lane_sums,
    load_columns,
    load_constants,
    load_streams,
    placed,
    pre_gates,
)
from anymla.ops.hyper_connection.triton_mix import launch_mix
from anymla.ops.hyper_connection.triton_mix_many_tokens import launch_many


@triton.jit
def expand_backward_kernel(
    dout,
    u,
    h,
    post,
    comb,
    du,
    dh,
    dpost,
    dcomb,
    token_stride,
    stream_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Differentiate h'_j = post_j u + sum_i comb_ij h_i for a token; strides are those of h."""
    row = tl.program_id(0).to(tl.int64)
    post_gates = load_columns(post, row, row >= 0, N)
    comb_gates = load_columns(comb, row, row >= 0, N * N)
    sums = ()
    for _ in tl.static_range(N + N * N):
        sums += (tl.zeros((COLUMNS,), tl.float32),)
    for first in range(0, D, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        mask = d < D
        g = ()
        wide = ()
        for j in tl.static_range(N):
            at = row * (N * D) + j * D + d
            g += (widen(tl.load(dout + at, mask, other=0.0)),)
            at = row * token_stride + j * stream_stride + d
            wide += (widen(tl.load(h + at, mask, other=0.0)),)
        before = widen(tl.load(u + row * D + d, mask, other=0.0))
        total = post_gates[0] * g[0]
        for j in tl.static_range(1, N):
            total += post_gates[j] * g[j]
        tl.store(du + row * D + d, total.to(du.dtype.element_ty), mask)
        added = ()
        for j in tl.static_range(N):
            added += (sums[j] + before * g[j],)
        for i in tl.static_range(N):
            total = comb_gates[i * N] * g[0]
            for j in tl.static_range(1, N):
                total += comb_gates[i * N + j] * g[j]
            tl.store(dh + row * (N * D) + i * D + d, total.to(dh.dtype.element_ty), mask)
            for j in tl.static_range(N):
                added += (sums[N + i * N + j] + wide[i] * g[j],)
        sums = added
    for j in tl.static_range(N):
        tl.store(dpost + row * N + j, tl.sum(sums[j], 0))
    for i in tl.static_range(N * N):
        tl.store(dcomb + row * (N * N) + i, tl.sum(sums[N + i], 0))


def hc_post_backward(
    dout: Tensor, u: Tensor, h: Tensor, post: Tensor, comb: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backend of ``interface.hc_post_backward`` in Triton; see its contract."""
    tokens, n, d = h.shape
    du, dpost, dcomb = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (u, post, comb)
    )
    dh = torch.empty((tokens, n, d), dtype=h.dtype, device=h.device)
    if not h.numel():
        return du, dh, dpost.zero_(), dcomb.zero_()
    h = placed(h)
    launch = _expansion(tuple(h.shape), h.stride(), h.dtype, h.device)
    given = (dout.contiguous(), u.contiguous(), h, post.contiguous(), comb.contiguous())
    launch(*given, du, dh, dpost, dcomb)
    return du, dh, dpost, dcomb


@functools.lru_cache(LAUNCHES)
def _expansion(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> PreparedLaunch:
    tokens, n, d = shape
    config = choose_backward_config(dtype, target_of(device))
    return PreparedLaunch(
        expand_backward_kernel, (tokens,), *strides[:2], N=n, D=d,
        COLUMNS=min(config.expand_columns, next_power_of_2(d)), num_warps=config.expand_warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["mix_token", "mix_stride"])
def collapse_backward_kernel(
    h,
    dy,
    mixed,
    base,
    scale,
    norm_weight,
    given,
    dpre,
    states,
    norm_eps,
    hc_eps,
    token_stride,
    stream_stride,
    mix_token,
    mix_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradient of a token's pre through its collapsed streams.

    With g the gradient of the sum y = sum_i pre_i h_i, it is <h_i, g>, plus what is ``given``.
    With a norm, g = n weight dy - c y, where n = rsqrt(mean(y^2) + eps) and
    c = n^3 mean(weight dy y). ``states`` [T, N + 2] takes pre, n and c.
    """
    row = tl.program_id(0).to(tl.int64)
    site = Site(base, scale, norm_eps, hc_eps)
    mixed += row * mix_token
    inverse = tl.rsqrt(tl.load(mixed + MIXES * mix_stride) / (N * D) + norm_eps)
    mixes = ()
    for i in tl.static_range(N):
        mixes += (tl.load(mixed + i * mix_stride) * inverse,)
    gates = pre_gates(mixes, load_constants(site, 0, 0, N), hc_eps, N)
    sums = ()
    for _ in tl.static_range(2 * N + 2):
        sums += (tl.zeros((COLUMNS,), tl.float32),)
    for first in range(0, D, COLUMNS):
        d = first + tl.arange(0, COLUMNS)
        mask = d < D
        pull = widen(tl.load(dy + row * D + d, mask, other=0.0))
        y = tl.zeros((COLUMNS,), tl.float32)
        wide = ()
        for i in tl.static_range(N):
            at = row * token_stride + i * stream_stride + d
            wide += (widen(tl.load(h + at, mask, other=0.0)),)
            y += gates[i] * wide[i]
        if norm_weight is not None:
            y = widen(y.to(h.dtype.element_ty))
            pull *= tl.load(norm_weight + d, mask, other=0.0).to(tl.float32)
        added = ()
        for i in tl.static_range(N):
            added += (sums[i] + wide[i] * pull,)
        for i in tl.static_range(N):
            added += (sums[N + i] + wide[i] * y,)
        sums = added + (sums[2 * N] + y * y, sums[2 * N + 1] + pull * y)  # noqa: RUF005
    n = 1.0
    c = 0.0
    if norm_weight is not None:
        n = tl.rsqrt(tl.sum(sums[2 * N], 0) / D + norm_eps)
        c = n * n * n * tl.sum(sums[2 * N + 1], 0) / D
    for i in tl.static_range(N):
        total = n * tl.sum(sums[i], 0)
        if norm_weight is not None:
            total -= c * tl.sum(sums[N + i], 0)
        if given is not None:
            total += tl.load(given + row * N + i)
        tl.store(dpre + row * N + i, total)
        tl.store(states + row * (N + 2) + i, gates[i])
    tl.store(states + row * (N + 2) + N, n)
    tl.store(states + row * (N + 2) + N + 1, c)


@triton.jit
def _unbalance(g, x, totals, ROWS: tl.constexpr, N: tl.constexpr):
    """Go back through x = previous / totals, whose totals are sums of rows or of columns.

    Returns the gradient of the previous matrix, and that matrix.
    """
    pulls = ()
    inverses = ()
    for k in tl.static_range(N):
        products = ()
        for m in tl.static_range(N):
            products += (g[k * N + m if ROWS else m * N + k] * x[k * N + m if ROWS else m * N + k],)
        pulls += (_sum(products, 0, 1, N),)
        inverses += (_inverse(totals[k]),)
    back = ()
    before = ()
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            back += ((g[i * N + j] - pulls[i if ROWS else j]) * inverses[i if ROWS else j],)
            before += (x[i * N + j] * totals[i if ROWS else j],)
    return back, before


@triton.jit
def _totals(x, hc_eps, ROWS: tl.constexpr, N: tl.constexpr):
    """Sum the rows or the columns of a matrix, and add hc_eps."""
    totals = ()
    for k in tl.static_range(N):
        if ROWS:
            totals += (_sum(x, k * N, 1, N) + hc_eps,)
        else:
            totals += (_sum(x, k, N, N) + hc_eps,)
    return totals


@triton.jit(do_not_specialize=["tokens", "iters", "mix_token", "mix_stride"])
def comb_backward_kernel(
    mixed,
    base,
    scale,
    dcomb,
    sums,
    dlogits,
    tokens,
    norm_eps,
    hc_eps,
    iters,
    mix_token,
    mix_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Compute the gradient [N N, T] of comb's logits of TOGETHER tokens.

    ``sums`` [2 (iters - 1), N, T] keeps what each step divided by. On the way back each step's
    matrix is what it became, times what it was divided by.
    """
    rows = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    # Lanes behind the last token compute it again, so that no mask takes registers.
    rows = tl.minimum(rows, tokens - 1)
    inside = rows >= 0
    table = PartialMixes(mixed, mix_token, 0, mix_stride)
    square = lane_sums(table, rows, inside, 1.0, MIXES, 1, 1)[0]
    inverse = tl.rsqrt(square / (N * D) + norm_eps)
    mixes = lane_sums(table, rows, inside, inverse, 2 * N, N * N, 1)
    constants = load_constants(Site(base, scale, norm_eps, hc_eps), 2, 2 * N, N * N)
    p = ()
    for i in tl.static_range(N):
        logits = ()
        for j in tl.static_range(N):
            logits += (mixes[i * N + j] * constants[0] + constants[1][i * N + j],)
        p += _softmax(logits, 0.0, N)
    x = ()
    for i in tl.static_range(N * N):
        x += (p[i] + hc_eps,)
    first = _totals(x, hc_eps, False, N)
    x = _divided_by_columns(x, hc_eps, N)
    for step in range(iters - 1):
        at = sums + (2 * N * step) * tokens + rows
        totals = _totals(x, hc_eps, True, N)
        for k in tl.static_range(N):
            tl.store(at + k * tokens, totals[k])
        x = _divided_by_rows(x, hc_eps, N)
        totals = _totals(x, hc_eps, False, N)
        for k in tl.static_range(N):
            tl.store(at + (N + k) * tokens, totals[k])
        x = _divided_by_columns(x, hc_eps, N)
    tl.debug_barrier()
    g = load_columns(dcomb, rows, inside, N * N)
    for step in range(iters - 1):
        at = sums + (2 * N * (iters - 2 - step)) * tokens + rows
        totals = ()
        for k in tl.static_range(N):
            totals += (tl.load(at + (N + k) * tokens),)
        g, x = _unbalance(g, x, totals, False, N)
        totals = ()
        for k in tl.static_range(N):
            totals += (tl.load(at + k * tokens),)
        g, x = _unbalance(g, x, totals, True, N)
    g, x = _unbalance(g, x, first, False, N)
    for i in tl.static_range(N):
        products = ()
        for j in tl.static_range(N):
            products += (g[i * N + j] * p[i * N + j],)
        total = _sum(products, 0, 1, N)
        for j in tl.static_range(N):
            at = dlogits + (i * N + j) * tokens + rows
            tl.store(at, p[i * N + j] * (g[i * N + j] - total))


@triton.jit(do_not_specialize=["tokens", "mix_token", "mix_stride"])
def mixes_backward_kernel(
    mixed,
    base,
    scale,
    dpre,
    dpost,
    dlogits,
    draw,
    pulls,
    totals,
    tokens,
    norm_eps,
    mix_token,
    mix_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    P: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Go back from gates of TOGETHER tokens to the products of streams and weights.

    ``dlogits`` [N N, T] is the gradient of comb's logits. ``draw`` takes the gradient of f @ fn^T:
    [T, MIXES] float32, or [2, T, MIXES] bfloat16 whose sum it is nearly. ``pulls`` [T] takes the
    factor of f that goes back through f's norm, ``totals`` [CTAs, 2, MIXES] sums over tokens of the
    logits' gradient, and of that times the mix.
    """
    rows = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    inside = rows < tokens
    mix = tl.arange(0, P)
    mask = inside[:, None] & (mix < MIXES)[None, :]
    of_token = mixed + rows * mix_token
    square = tl.load(of_token + MIXES * mix_stride, inside, other=0.0)
    inverse = tl.rsqrt(square / (N * D) + norm_eps)[:, None]
    mixes = tl.load(of_token[:, None] + (mix * mix_stride)[None, :], mask, other=0.0) * inverse
    part = tl.where(mix < N, 0, tl.where(mix < 2 * N, 1, 2))
    factor = tl.load(scale + part, mix < MIXES, other=0.0)[None, :]
    s = tl.sigmoid(mixes * factor + tl.load(base + mix, mix < MIXES, other=0.0)[None, :])
    at = dpre + (rows * N)[:, None] + mix[None, :]
    g = tl.load(at, mask & (mix < N)[None, :], other=0.0) * s * (1.0 - s)
    if MIXES > N:
        at = dpost + (rows * N)[:, None] + (mix - N)[None, :]
        there = mask & ((mix >= N) & (mix < 2 * N))[None, :]
        g += tl.load(at, there, other=0.0) * 2.0 * s * (1.0 - s)
        at = dlogits + rows[:, None] + ((mix - 2 * N) * tokens)[None, :]
        g += tl.load(at, mask & (mix >= 2 * N)[None, :], other=0.0)
    totals += tl.program_id(0) * (2 * MIXES) + mix
    tl.store(totals, tl.sum(g, 0), mix < MIXES)
    tl.store(totals + MIXES, tl.sum(g * mixes, 0), mix < MIXES)
    g *= factor
    pull = tl.sum(g * mixes, 1)[:, None] * inverse * inverse / (N * D)
    tl.store(pulls + rows[:, None], pull, inside[:, None])
    rate = g * inverse
    at = draw + (rows * MIXES)[:, None] + mix[None, :]
    high = rate.to(draw.dtype.element_ty)
    tl.store(at, high, mask)
    if draw.dtype.element_ty != tl.float32:
        tl.store(at + tokens * MIXES, (rate - high.to(tl.float32)).to(high.dtype), mask)


@triton.jit
def _load_rates(
    draw, rows, inside, tokens, MIXES: tl.constexpr, P: tl.constexpr, SPLIT: tl.constexpr
):
    """Load gradients of the mixes of tokens ``rows`` as [r, P]: one tile, or high and low parts."""
    mix = tl.arange(0, P)
    known = inside[:, None] & (mix < MIXES)[None, :]
    at = draw + (rows * MIXES)[:, None] + mix[None, :]
    if SPLIT:
        return tl.load(at, known, other=0.0), tl.load(at + tokens * MIXES, known, other=0.0)
    else:
        return (tl.load(at, known, other=0.0),)


@triton.jit
def _product(left, right, total):
    """Add left @ right to ``total``; of two parts each, all products but that of the lesser."""
    if len(left) == 1:
        return tl.dot(left[0], right[0], total, input_precision="ieee")
    else:
        part = tl.dot(left[1], right[0])
        part = tl.dot(left[0], right[1], part)
        return total + tl.dot(left[0], right[0], part)


@triton.jit(do_not_specialize=["tokens", "span"])
def streams_backward_kernel(
    h,
    dy,
    fn,
    norm_weight,
    states,
    draw,
    pulls,
    dh,
    dfn,
    dnorm,
    tokens,
    span,
    token_stride,
    stream_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Compute dh of COLUMNS channels of ``span`` tokens, and the sums over these tokens.

    ``dfn`` [splits, MIXES, N D] and ``dnorm`` [splits, D] take sums of the span. With SPLIT, fn and
    draw are a high and a low part in the streams' dtype, one behind the other. With ALONE, a CTA
    differentiates one stream, of as many as the grid's third axis has.
    """
    d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    one = tl.program_id(2) if ALONE else 0
    COUNT: tl.constexpr = 1 if ALONE else N
    mix = tl.arange(0, P)
    fits = (mix < MIXES)[:, None] & (d < D)[None, :]
    sums = ()
    weights = ()
    for i in tl.static_range(COUNT):
        sums += (tl.zeros((COLUMNS, P), tl.float32),)
        of_stream = fn + (mix * (N * D))[:, None] + ((one + i) * D + d)[None, :]
        if SPLIT:
            low = tl.load(of_stream + MIXES * (N * D), fits, other=0.0)
            weights += ((tl.load(of_stream, fits, other=0.0), low),)
        else:
            weights += ((tl.load(of_stream, fits, other=0.0),),)
    weight_sums = tl.zeros((COLUMNS,), tl.float32)
    weight = 1.0
    if norm_weight is not None:
        weight = tl.load(norm_weight + d, d < D, other=0.0).to(tl.float32)[None, :]
    for first in range(split * span, tl.minimum(split * span + span, tokens), ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = rows < tokens
        mask = inside[:, None] & (d < D)[None, :]
        streams = load_streams(h, rows, d, mask, token_stride, stream_stride, N)
        pull = tl.load(pulls + rows, inside, other=0.0)[:, None]
        rates = _load_rates(draw, rows, inside, tokens, MIXES, P, SPLIT)
        if dy is not None:
            g = widen(tl.load(dy + (rows * D)[:, None] + d[None, :], mask, other=0.0))
            state = states + rows * (N + 2)
            pre = ()
            for i in tl.static_range(N):
                pre += (tl.load(state + i, inside, other=0.0)[:, None],)
            if norm_weight is not None:
                n = tl.load(state + N, inside, other=0.0)[:, None]
                y = pre[0] * widen(streams[0])
                for i in tl.static_range(1, N):
                    y += pre[i] * widen(streams[i])
                y = widen(y.to(h.dtype.element_ty))
                weight_sums += tl.sum(g * y * n, 0)
                g = n * weight * g - tl.load(state + N + 1, inside, other=0.0)[:, None] * y
        if ALONE:
            at = (rows * token_stride)[:, None] + d[None, :]
            streams = (tl.load(h + one * stream_stride + at, mask, other=0.0),)
            if dy is not None:
                pre = (tl.load(state + one, inside, other=0.0)[:, None],)
        added = ()
        for i in tl.static_range(COUNT):
            total = -pull * widen(streams[i])
            if dy is not None:
                total += pre[i] * g
            total = _product(rates, weights[i], total)
            at = dh + (rows * (N * D))[:, None] + ((one + i) * D + d)[None, :]
            tl.store(at, total.to(dh.dtype.element_ty), mask)
            transposed = tl.trans(streams[i] if SPLIT else widen(streams[i]))
            # Tensor cores truncate when they add to a sum.
            part = tl.dot(transposed, rates[0], input_precision="ieee")
            if SPLIT:
                part = tl.dot(transposed, rates[1], part)
            added += (sums[i] + part,)
        sums = added
    for i in tl.static_range(COUNT):
        at = (split.to(tl.int64) * MIXES + mix[None, :]) * (N * D) + ((one + i) * D + d)[:, None]
        tl.store(dfn + at, sums[i], (mix < MIXES)[None, :] & (d < D)[:, None])
    if norm_weight is not None:
        # All streams' CTAs have the same sums.
        tl.store(dnorm + split * D + d, weight_sums, (d < D) & (one == 0))


def hc_pre_backward(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    dy: Tensor | None,
    dpre: Tensor | None,
    dpost: Tensor | None,
    dcomb: Tensor | None,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Backend of ``interface.hc_pre_backward`` in Triton; see its contract."""
    (tokens, n, d), mixes, device = h.shape, len(fn), h.device

    def empty(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    dh = torch.empty((tokens, n, d), dtype=h.dtype, device=device)
    if not h.numel():
        norm = fn.new_zeros(0) if norm_weight is None else torch.zeros_like(norm_weight)
        return dh, torch.zeros_like(fn), torch.zeros_like(base), torch.zeros_like(scale), norm
    h, fn, base, scale = placed(h), fn.contiguous(), base.contiguous(), scale.contiguous()
    dy, dpre, dpost, dcomb, weight = (
        None if x is None else x.contiguous() for x in (dy, dpre, dpost, dcomb, norm_weight)
    )
    config = choose_backward_config(h.dtype, target_of(device))
    # Arc A multiplies in float32.
    split = h.dtype == torch.bfloat16 and not target_of(device).arc_a
    mixed = (launch_many(h, fn) if takes_many_tokens(h) else launch_mix(h, fn)).sum(1)
    launches = _site(
        (tuple(h.shape), h.stride()), mixed.stride(),
        (mixes, norm_eps, hc_eps, iters, split), config, device,
    )  # fmt: skip
    states = empty((tokens, n + 2))
    if dy is not None:
        through = empty((tokens, n))
        launches.collapse(h, dy, mixed, base, scale, weight, dpre, through, states)
        dpre = through
    parts = (2,) if split else ()
    draw = empty((*parts, tokens, mixes), dtype=h.dtype if split else torch.float32)
    pulls = empty(tokens)
    totals = empty((cdiv(tokens, config.together), 2, mixes))
    dlogits = None
    if mixes > n:
        dlogits = empty((n * n, tokens))
        launches.comb(mixed, base, scale, dcomb, empty((2 * (iters - 1), n, tokens)), dlogits)
    launches.mixes(mixed, base, scale, dpre, dpost, dlogits, draw, pulls, totals)
    if split:
        high = fn.to(h.dtype)
        fn = torch.stack((high, (fn - high).to(h.dtype)))
    dfn = empty((launches.splits, mixes, n * d))
    dnorm = empty((0 if weight is None else launches.splits, d))
    launches.streams(h, dy, fn, weight, states, draw, pulls, dh, dfn, dnorm)
    dbase, by_mix = totals.sum(0)
    shares = by_mix.split([n] if mixes == n else [n, n, n * n])
    dscale = torch.stack([share.sum() for share in shares])
    norm = fn.new_empty(0, dtype=dfn.dtype) if weight is None else dnorm.sum(0).to(weight.dtype)
    return dh, dfn.sum(0), dbase, dscale, norm


class _Launches(NamedTuple):
    """Prepared launches of a site's gradients, and the number of splits of the tokens."""

    collapse: PreparedLaunch
    comb: PreparedLaunch
    mixes: PreparedLaunch
    streams: PreparedLaunch
    splits: int


@functools.lru_cache(LAUNCHES)
def _site(
    layout: tuple[tuple[int, ...], tuple[int, ...]],
    mix_strides: tuple[int, ...],
    numbers: tuple[int, float, float, int, bool],
    config: BackwardConfig,
    device: torch.device,
) -> _Launches:
    """Prepare the launches for shape and strides of streams, and strides of mixes."""
    (tokens, n, d), strides = layout
    mixes, norm_eps, hc_eps, iters, split = numbers
    fixed = {"N": n, "D": d, "MIXES": mixes}
    width, many = next_power_of_2(d), max(16, next_power_of_2(mixes))
    collapse = PreparedLaunch(
        collapse_backward_kernel, (tokens,), norm_eps, hc_eps, *strides[:2], *mix_strides,
        **fixed, COLUMNS=min(config.collapse_columns, width), num_warps=config.collapse_warps,
    )  # fmt: skip
    ctas = (cdiv(tokens, config.together),)
    comb = PreparedLaunch(
        comb_backward_kernel, ctas, tokens, norm_eps, hc_eps, iters, *mix_strides, **fixed,
        TOGETHER=config.together, num_warps=1,
    )  # fmt: skip
    back = PreparedLaunch(
        mixes_backward_kernel, ctas, tokens, norm_eps, *mix_strides, **fixed, P=many,
        TOGETHER=config.together, num_warps=4,
    )  # fmt: skip
    columns = min(config.columns, max(16, width))
    splits = max(1, min(config.ctas // cdiv(d, columns), cdiv(tokens, config.rows)))
    span = cdiv(cdiv(tokens, splits), config.rows) * config.rows
    splits = cdiv(tokens, span)
    streams = PreparedLaunch(
        streams_backward_kernel, (cdiv(d, columns), splits, n if config.alone else 1), tokens,
        span, *strides[:2], **fixed, P=many, ROWS=config.rows, COLUMNS=columns, SPLIT=split,
        ALONE=config.alone, num_warps=config.num_warps,
    )  # fmt: skip
    return _Launches(collapse, comb, back, streams, splits)

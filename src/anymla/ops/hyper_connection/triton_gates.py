"""The gates of a site inside kernels: scalars, or with ``load_columns`` vectors, in tuples.

Sinkhorn's forty normalisations of a token's N x N matrix then need no communication at all, and
every thread has every gate without a change of layout.

    partial [T, slices, P] -> sum over slices -> N pre, N post, N x N comb
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_columns(table, rows, inside, COUNT: tl.constexpr):
    """The first COUNT columns of rows [n] of a [T, COUNT] table, as COUNT vectors [n]."""
    columns = ()
    for i in tl.static_range(COUNT):
        columns += (tl.load(table + rows * COUNT + i, mask=inside, other=0.0),)
    return columns


@triton.jit
def store_columns(table, rows, inside, columns, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Store COUNT of the vectors ``columns``, from FIRST on, as rows of a [T, COUNT] table."""
    for i in tl.static_range(COUNT):
        tl.store(table + rows * COUNT + i, columns[FIRST + i], mask=inside)


@triton.jit
def _summed(partial, slice_stride, SLICES: tl.constexpr, BLOCK_S: tl.constexpr):
    slices = tl.arange(0, BLOCK_S)
    return tl.sum(tl.load(partial + slices * slice_stride, slices < SLICES, other=0.0), 0)


@triton.jit
def mixes_of_one(
    partial,
    slice_stride,
    mix_stride,
    norm_eps,
    COUNT: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """COUNT mixes of the token at ``partial``, scalars, over its streams' root mean square."""
    square = _summed(partial + COUNT * mix_stride, slice_stride, SLICES, BLOCK_S)
    inverse = tl.rsqrt(square / CHANNELS + norm_eps)
    mixes = ()
    for i in tl.static_range(COUNT):
        mixes += (_summed(partial + i * mix_stride, slice_stride, SLICES, BLOCK_S) * inverse,)
    return mixes


@triton.jit
def pre_gates(mixes, base, scale, hc_eps, N: tl.constexpr):
    """N gates that collapse the streams."""
    factor = tl.load(scale)
    gates = ()
    for i in tl.static_range(N):
        gates += (tl.sigmoid(mixes[i] * factor + tl.load(base + i)) + hc_eps,)
    return gates


@triton.jit
def _post_gates(mixes, base, scale, N: tl.constexpr):
    factor = tl.load(scale + 1)
    gates = ()
    for i in tl.static_range(N):
        gates += (2.0 * tl.sigmoid(mixes[N + i] * factor + tl.load(base + N + i)),)
    return gates


@triton.jit
def _comb_gates(mixes, base, scale, hc_eps, iters, N: tl.constexpr):
    factor = tl.load(scale + 2)
    comb = ()
    for i in tl.static_range(N):
        logits = ()
        for j in tl.static_range(N):
            logit = mixes[2 * N + i * N + j] * factor + tl.load(base + 2 * N + i * N + j)
            logits += (logit,)
        comb += _softmax(logits, hc_eps, N)
    comb = _divided_by_columns(comb, hc_eps, N)
    for _ in range(iters - 1):
        comb = _divided_by_rows(comb, hc_eps, N)
        comb = _divided_by_columns(comb, hc_eps, N)
    return comb


@triton.jit
def _softmax(logits, hc_eps, N: tl.constexpr):
    top = logits[0]
    for j in tl.static_range(1, N):
        top = tl.maximum(top, logits[j])
    powers = ()
    for j in tl.static_range(N):
        powers += (tl.exp(logits[j] - top),)
    total = powers[0]
    for j in tl.static_range(1, N):
        total += powers[j]
    inverse = 1.0 / total
    shares = ()
    for j in tl.static_range(N):
        shares += (powers[j] * inverse + hc_eps,)
    return shares


@triton.jit
def _divided_by_rows(comb, hc_eps, N: tl.constexpr):
    divided = ()
    for i in tl.static_range(N):
        total = comb[i * N]
        for j in tl.static_range(1, N):
            total += comb[i * N + j]
        inverse = 1.0 / (total + hc_eps)
        for j in tl.static_range(N):
            divided += (comb[i * N + j] * inverse,)
    return divided


@triton.jit
def _divided_by_columns(comb, hc_eps, N: tl.constexpr):
    inverses = ()
    for j in tl.static_range(N):
        total = comb[j]
        for i in tl.static_range(1, N):
            total += comb[i * N + j]
        inverses += (1.0 / (total + hc_eps),)
    divided = ()
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            divided += (comb[i * N + j] * inverses[j],)
    return divided


@triton.jit
def store_gates(
    mixes,
    base,
    scale,
    post,
    comb,
    rows,
    inside,
    hc_eps,
    iters,
    N: tl.constexpr,
):
    """Finish post [T, N] and comb [T, N, N] of tokens ``rows`` from their mixes."""
    store_columns(post, rows, inside, _post_gates(mixes, base, scale, N), 0, N)
    gates = _comb_gates(mixes, base, scale, hc_eps, iters, N)
    store_columns(comb, rows, inside, gates, 0, N * N)

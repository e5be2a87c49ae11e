"""The gates of a site inside kernels: a tuple of scalars, or of vectors with a token a lane.

Sinkhorn's forty normalisations of a token's N x N matrix then need no communication at all.

Grid of the kernel: blocks of tokens.

    partial [slices, P, T] -> sum over slices -> N pre, N post, N x N comb
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton import Build, Target

# One warp's lanes on most targets: more tokens a program would leave too few programs.
TOKENS = 32
# Channels of the slices whose partial mixes are added up.
SLICES_OF_MANY = (128, 256, 512)


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
def _mixes_of_many(
    partial,
    tokens,
    rows,
    inside,
    norm_eps,
    COUNT: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLICES: tl.constexpr,
    P: tl.constexpr,
):
    """As ``mixes_of_one`` for tokens ``rows`` [n]: tokens are lanes, and slices pass one by one."""
    slice_stride = tokens.to(tl.int64) * P
    totals = ()
    for _ in tl.static_range(COUNT + 1):
        totals += (tl.zeros(rows.shape, tl.float32),)
    for first in range(0, SLICES, 4):
        # Four slices at a time, whose loads wait together.
        for further in tl.static_range(4):
            slice_at = partial + (first + further) * slice_stride + rows
            mask = inside & (first + further < SLICES)
            sums = ()
            for i in tl.static_range(COUNT + 1):
                sums += (totals[i] + tl.load(slice_at + i * tokens, mask=mask, other=0.0),)
            totals = sums
    inverse = tl.rsqrt(totals[COUNT] / CHANNELS + norm_eps)
    mixes = ()
    for i in tl.static_range(COUNT):
        mixes += (totals[i] * inverse,)
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


@triton.jit(do_not_specialize=["tokens", "iters"])
def gates_kernel(
    partial,
    base,
    scale,
    pre,
    post,
    comb,
    tokens,
    norm_eps,
    hc_eps,
    iters,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLICES: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A block of tokens: its three kinds of gates."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    rows = token.to(tl.int64)
    mixes = _mixes_of_many(
        partial, tokens, rows, inside, norm_eps, (2 + N) * N, CHANNELS, SLICES, P
    )
    store_columns(pre, rows, inside, pre_gates(mixes, base, scale, hc_eps, N), 0, N)
    store_gates(mixes, base, scale, post, comb, rows, inside, hc_eps, iters, N)


def launch_gates(
    partial: Tensor,
    base: Tensor,
    scale: Tensor,
    pre: Tensor,
    post: Tensor,
    comb: Tensor,
    *,
    channels: int,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> None:
    """Fill pre [T, N], post [T, N] and comb [T, N, N] from partial [T, slices, P], T innermost."""
    tokens, slices, width = partial.shape
    assert partial.stride(0) == 1
    gates_kernel[(triton.cdiv(tokens, TOKENS),)](
        partial,
        base,
        scale,
        pre,
        post,
        comb,
        tokens,
        norm_eps,
        hc_eps,
        iters,
        N=pre.shape[1],
        CHANNELS=channels,
        SLICES=slices,
        P=width,
        ROWS=TOKENS,
        num_warps=1,
    )


def builds(target: Target) -> Iterator[Build]:
    """Four streams of Flash and Pro."""
    pointers = dict.fromkeys(("partial", "base", "scale", "pre", "post", "comb"), "*fp32")
    numbers = {"tokens": "i32", "norm_eps": "fp32", "hc_eps": "fp32", "iters": "i32"}
    for d, slices in ((d, d // width) for d in (4096, 7168) for width in SLICES_OF_MANY):
        sizes = {"N": 4, "CHANNELS": 4 * d, "SLICES": slices, "P": 32, "ROWS": TOKENS}
        yield Build(
            f"D {d}, {slices} slices",
            gates_kernel,
            pointers | numbers,
            sizes,
            num_warps=1,
        )

"""Triton device functions for a site's gates and N streams: tuples of scalars, vectors or tiles.

Gates are scalars, or with ``load_columns`` vectors. Sinkhorn's forty normalisations of a token's N
x N matrix then need no communication, and every thread has every gate without a change of layout.

    partial [T, slices, P] -> sum over slices -> N pre, N post, N x N comb

A single token's slices are read as one tile, whose sum is taken apart into gates. With many tokens,
each is a lane that sums its own slices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Site(NamedTuple):
    """Pointers and numbers from which a site's gates are computed.

    Attributes:
        base: pointer to float32 offsets of the scaled mixes: N pre, N post, N x N comb.
        scale: pointer to float32 [3], factors of pre, post and comb.
        norm_eps: number added to the mean of the streams' squares.
        hc_eps: number added to gates, see ``interface``.
    """

    base: Any
    scale: Any
    norm_eps: Any
    hc_eps: Any


class PartialMixes(NamedTuple):
    """Mixes by slices, still to be summed, as ``launch_mix`` leaves them.

    Attributes:
        sums: pointer to float32 [T, SLICES, P]; the sum of squares follows the MIXES mixes.
        token_stride: elements of sums between consecutive tokens.
        slice_stride: elements of sums between consecutive slices.
        mix_stride: elements of sums between consecutive mixes.
    """

    sums: Any
    token_stride: Any
    slice_stride: Any
    mix_stride: Any


class Streams(NamedTuple):
    """Streams in memory, [T, N, D] with adjacent channels.

    Attributes:
        h: pointer to the first token's first stream.
        token_stride: elements between consecutive tokens.
        stream_stride: elements between consecutive streams.
    """

    h: Any
    token_stride: Any
    stream_stride: Any


@triton.jit
def load_columns(table, rows, inside, COUNT: tl.constexpr):
    """Load the first COUNT columns of rows [n] of a [T, COUNT] table as COUNT vectors [n]."""
    columns = ()
    for i in tl.static_range(COUNT):
        columns += (tl.load(table + rows * COUNT + i, mask=inside, other=0.0),)
    return columns


@triton.jit
def store_columns(table, rows, inside, columns, COUNT: tl.constexpr):
    """Store COUNT vectors as rows of a [T, COUNT] table."""
    for i in tl.static_range(COUNT):
        tl.store(table + rows * COUNT + i, columns[i], mask=inside)


@triton.jit
def load_constants(site, PART: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Load a part's scale (0 pre, 1 post, 2 comb), and COUNT bases from FIRST on, as scalars."""
    bases = ()
    for i in tl.static_range(COUNT):
        bases += (tl.load(site.base + FIRST + i),)
    return tl.load(site.scale + PART), bases


@triton.jit
def place_sums(
    partial, slice_stride, mix_stride, MIXES: tl.constexpr, COUNT: tl.constexpr,
    SLICES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Sum a token's first COUNT mixes, and its squares, over slices; return scalars."""
    slice = tl.arange(0, LANES)
    found = ()
    for i in tl.static_range(COUNT + 1):
        at = partial + (i if i < COUNT else MIXES) * mix_stride
        total = tl.load(at + slice * slice_stride, slice < SLICES, other=0.0)
        for first in tl.static_range(LANES, SLICES, LANES):
            there = first + slice < SLICES
            total += tl.load(at + (first + slice) * slice_stride, there, other=0.0)
        found += (tl.sum(total, 0),)
    return found


@triton.jit
def slice_sums(partial, SLICES: tl.constexpr, LANES: tl.constexpr, P: tl.constexpr):
    """Sum a token's mixes, and after them its squares, over slices; return a vector [P]."""
    mix = tl.arange(0, P)
    total = tl.zeros((P,), tl.float32)
    for first in tl.static_range(0, SLICES, LANES):
        slice = first + tl.arange(0, LANES)
        there = (slice < SLICES)[:, None]
        total += tl.sum(tl.load(partial + slice[:, None] * P + mix[None, :], there, other=0.0), 0)
    return total


@triton.jit
def entry(vector, place, P: tl.constexpr):
    """Return the scalar at a place of a vector [P]."""
    return tl.sum(tl.where(tl.arange(0, P) == place, vector, 0.0), 0)


@triton.jit
def entries(vector, FIRST: tl.constexpr, COUNT: tl.constexpr, P: tl.constexpr):
    """Return COUNT scalars of a vector [P], from FIRST on."""
    found = ()
    for i in tl.static_range(COUNT):
        found += (entry(vector, FIRST + i, P),)
    return found


@triton.jit
def pre_gates(mixes, constants, hc_eps, N: tl.constexpr):
    """Compute the N gates that collapse the streams."""
    gates = ()
    for i in tl.static_range(N):
        gates += (tl.sigmoid(mixes[i] * constants[0] + constants[1][i]) + hc_eps,)
    return gates


@triton.jit
def post_gates(mixes, constants, N: tl.constexpr):
    """Compute the N gates of a sublayer's output."""
    gates = ()
    for i in tl.static_range(N):
        gates += (2.0 * tl.sigmoid(mixes[i] * constants[0] + constants[1][i]),)
    return gates


@triton.jit
def comb_gates(mixes, constants, hc_eps, iters, N: tl.constexpr):
    """Compute the N x N gates that mix the streams."""
    comb = ()
    for i in tl.static_range(N):
        logits = ()
        for j in tl.static_range(N):
            logits += (mixes[i * N + j] * constants[0] + constants[1][i * N + j],)
        comb += _softmax(logits, hc_eps, N)
    comb = _divided_by_columns(comb, hc_eps, N)
    for _ in range(iters - 1):
        comb = _divided_by_rows(comb, hc_eps, N)
        comb = _divided_by_columns(comb, hc_eps, N)
    return comb


@triton.jit
def _inverse(x):
    """Return 1 / x of a positive x: a division would check for ranges that do not occur here."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _sum(values, FIRST: tl.constexpr, STEP: tl.constexpr, N: tl.constexpr):
    """Sum N of the values, adding those at even and at odd places separately."""
    total = values[FIRST]
    for i in tl.static_range(2, N, 2):
        total += values[FIRST + i * STEP]
    if N > 1:
        odd = values[FIRST + STEP]
        for i in tl.static_range(3, N, 2):
            odd += values[FIRST + i * STEP]
        total += odd
    return total


@triton.jit
def _softmax(logits, hc_eps, N: tl.constexpr):
    top = logits[0]
    for j in tl.static_range(1, N):
        top = tl.maximum(top, logits[j])
    powers = ()
    for j in tl.static_range(N):
        powers += (tl.exp(logits[j] - top),)
    inverse = _inverse(_sum(powers, 0, 1, N))
    shares = ()
    for j in tl.static_range(N):
        shares += (powers[j] * inverse + hc_eps,)
    return shares


@triton.jit
def _divided_by_rows(comb, hc_eps, N: tl.constexpr):
    divided = ()
    for i in tl.static_range(N):
        inverse = _inverse(_sum(comb, i * N, 1, N) + hc_eps)
        for j in tl.static_range(N):
            divided += (comb[i * N + j] * inverse,)
    return divided


@triton.jit
def _divided_by_columns(comb, hc_eps, N: tl.constexpr):
    inverses = ()
    for j in tl.static_range(N):
        inverses += (_inverse(_sum(comb, j, N, N) + hc_eps),)
    divided = ()
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            divided += (comb[i * N + j] * inverses[j],)
    return divided


@triton.jit
def lane_sums(
    partial, rows, inside, inverse,
    FIRST: tl.constexpr, COUNT: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Sum COUNT mixes from FIRST on of tokens ``rows``, times ``inverse``; return vectors."""
    mixes = ()
    first = partial.sums + rows * partial.token_stride
    for i in tl.static_range(COUNT):
        at = first + (FIRST + i) * partial.mix_stride
        total = tl.load(at, inside, other=0.0)
        for slice in tl.static_range(1, SLICES):
            total += tl.load(at + slice * partial.slice_stride, inside, other=0.0)
        mixes += (total * inverse,)
    return mixes


@triton.jit
def load_streams(h, rows, d, mask, token_stride, stream_stride, N: tl.constexpr):
    """Load channels d [c] of the N streams of tokens rows [r]: N tiles [r, c] as stored."""
    at = (rows * token_stride)[:, None] + d[None, :]
    streams = ()
    for i in tl.static_range(N):
        streams += (tl.load(h + i * stream_stride + at, mask, other=0.0),)
    return streams


@triton.jit
def expand(u, streams, post, comb, N: tl.constexpr):
    """Compute h'_j = post_j u + sum_i comb_ij h_i of tiles [r, c], rounded once to their dtype."""
    wide = u.to(tl.float32)
    expanded = ()
    for j in tl.static_range(N):
        total = post[j][:, None] * wide
        for i in tl.static_range(N):
            total += comb[i * N + j][:, None] * streams[i].to(tl.float32)
        expanded += (total.to(u.dtype),)
    return expanded


def placed(h: Tensor) -> Tensor:
    """Return streams [T, N, D] with adjacent channels; token and stream strides may be any."""
    return h if h.stride(2) == 1 else h.contiguous()

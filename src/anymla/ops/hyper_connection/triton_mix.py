"""The 2N + N^2 mixes of a site in Triton: streams times weights, and the streams' squared sum.

Every mix depends on all N D channels of a token, and the weights (1.5 MiB for D = 4096) are needed
for every token. So a CTA takes some tokens and a slice of D, and a later kernel adds up its sums.
In this way tokens share the weights that they read, and even one token keeps many CTAs busy.

Grid: (blocks of tokens, slices of D).

            D ->  | slice | slice | ...
    ROWS tokens   |  N streams of ROWS x SLICE, in chunks of COLUMNS -> partial [T, slices, P]

With EXPAND, the CTA first completes the previous site: it computes the N streams h' of its slice
from u, h and that site's gates, stores them, and continues with the rounded values. Four streams
form one operand, side by side, and pass ``_materialized`` first. Otherwise the compiler would
compute them twice, in the layout of the store and in that of the product, and convert every gate
between the two.

If a slice is one chunk, its weights are loading before the CTA waits for the previous kernel. With
DIRECT, streams are multiplied from the registers into which they were loaded:

A warp loads rows of 32 channels of bfloat16, eight channels to a thread and four threads to a row:
eight rows at a time, and then eight more. The matrix instruction expects the same thread to have
the same rows, but pairs of channels, and the thread's eight channels are four such pairs. So
channels and tokens are renumbered until both layouts agree; the weights follow their channels, and
the results follow their tokens. Nothing moves through shared memory, and there is no barrier.

    loaded      row  p * 8 W + w * 8 + g      channel  8 t + 4 s + 2 f + e
    multiplied  row  16 w + 8 p + g           channel  16 s + 8 f + 2 t + e

with W warps w, p and f of 2, lanes g of 8 and t of 4.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_cast import widen
from anymla.formats.triton_dot import exact_dot
from anymla.ops._sizes import next_power_of_2
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.device import target_of
from anymla.ops.hyper_connection.config import (
    MANY_TOKENS,
    choose_mix_config,
    dependents_late,
    joins_streams,
)
from anymla.ops.hyper_connection.triton_gates import (
    expand,
    load_columns,
    load_streams,
)
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch
from anymla.ops.streams import scratch

# Channels that four threads load together.
CHANNELS = 32


@triton.jit
def fragments(a, b, c, d, WARPS: tl.constexpr):
    """Arrange channels [16 WARPS, 32] of four streams side by side, [16 WARPS, 128]."""
    x = tl.join(tl.join(a, b), tl.join(c, d))
    x = tl.reshape(x, (2, WARPS, 8, 4, 2, 2, 2, 2, 2))  # p, w, g, t, s, f, e, and two of streams
    x = tl.permute(x, (1, 0, 2, 8, 7, 4, 5, 3, 6))
    return tl.reshape(x, (16 * WARPS, 128))


@triton.jit
def in_order(weights):
    """Put weights [P, 128] of 32 channels of four streams into the order of ``fragments``."""
    P: tl.constexpr = weights.shape[0]
    x = tl.reshape(weights, (P, 4, 4, 2, 2, 2))  # stream, t, s, f, e
    return tl.reshape(tl.permute(x, (0, 1, 3, 4, 2, 5)), (P, 128))


@triton.jit
def loaded_rows(WARPS: tl.constexpr):
    """Return the loaded row for each row of a product of ``fragments``, [16 WARPS]."""
    row = tl.arange(0, 16 * WARPS)
    return row // 16 * 8 + row % 16 // 8 * (8 * WARPS) + row % 8


@triton.jit
def _load_weights(
    fn, first, STREAM: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    MIXES: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load weights of COLUMNS channels of COUNT streams side by side, [P, COUNT COLUMNS].

    This is one load, so that no load waits for another's result to be moved to the product.
    """
    mix = tl.arange(0, P)
    place = tl.arange(0, COUNT * COLUMNS)
    d = first + place % COLUMNS
    at = fn + (mix * (N * D))[:, None] + ((STREAM + place // COLUMNS) * D + d)[None, :]
    return tl.load(at, (mix < MIXES)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _joined(a, b, c, d):
    """Arrange four tiles [r, c] side by side, [r, 4 c]."""
    together = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 3, 2, 1))
    return tl.reshape(together, (a.shape[0], 4 * a.shape[1]))


@triton.jit
def _materialized(x):
    """Give x one layout: the compiler carries no layout through a sum, even of one term."""
    return tl.sum(tl.reshape(x.to(tl.float32), (1, x.shape[0], x.shape[1])), 0).to(x.dtype)


@triton.jit
def _load_chunk(
    h, u, post, comb, rows, first, inside, token_stride, stream_stride,
    N: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, EXPAND: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Load COLUMNS channels of the streams, or with EXPAND compute the streams that replace them.

    WIDE returns them as float32.
    """
    d = first + tl.arange(0, COLUMNS)
    mask = inside[:, None] & (d < D)[None, :]
    streams = load_streams(h, rows, d, mask, token_stride, stream_stride, N)
    if EXPAND:
        before = tl.load(u + (rows * D)[:, None] + d[None, :], mask, other=0.0)
        streams = expand(before, streams, post, comb, N)
    if WIDE:
        wide = ()
        for j in tl.static_range(N):
            wide += (widen(streams[j]),)
        streams = wide
    return streams


@triton.jit
def _add_chunk(
    total, square, streams, out, fn, weights, rows, first, inside,
    N: tl.constexpr, D: tl.constexpr, MIXES: tl.constexpr, P: tl.constexpr,
    COLUMNS: tl.constexpr, JOINED: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Add products and squares of COLUMNS channels of the streams; store the streams if ``out``."""
    d = first + tl.arange(0, COLUMNS)
    mask = inside[:, None] & (d < D)[None, :]
    for j in tl.static_range(N):
        if out is not None:
            tl.store(out + (rows * (N * D) + j * D)[:, None] + d[None, :], streams[j], mask)
        wide = widen(streams[j])
        square += wide * wide
        if not JOINED:
            operand = streams[j]
            if out is not None:
                operand = _materialized(operand)
            of_stream = _load_weights(fn, first, j, 1, N, D, MIXES, P, COLUMNS)
            total = exact_dot(operand, of_stream, total)
    if DIRECT:
        operand = fragments(streams[0], streams[1], streams[2], streams[3], total.shape[0] // 16)
        total = exact_dot(operand, in_order(weights), total)
    elif JOINED:
        operand = _materialized(_joined(streams[0], streams[1], streams[2], streams[3]))
        total = exact_dot(operand, weights, total)
    return total, square


@triton.jit(do_not_specialize=["tokens", "chunks"])
def mix_kernel(
    u,
    h,
    post,
    comb,
    out,
    fn,
    partial,
    tokens,
    chunks,
    token_stride,
    stream_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    P: tl.constexpr,
    EXPAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SINGLE: tl.constexpr,
    JOINED: tl.constexpr,
    DIRECT: tl.constexpr,
    WIDE: tl.constexpr,
    MANY: tl.constexpr,
    LAUNCH_LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute partial mixes of a block of tokens and a slice of D, and with EXPAND the streams.

    With LAUNCH_LATE, its dependents are launched (PDL) when only the mixes are left to store.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    rows = token.to(tl.int64)
    first = tl.program_id(1) * (chunks * COLUMNS)
    weights = fn
    if SINGLE and JOINED:
        weights = _load_weights(fn, first, 0, N, N, D, MIXES, P, COLUMNS)
    if PDL:
        gdc_wait()
        if not LAUNCH_LATE:
            gdc_launch_dependents()
    total = tl.zeros((ROWS, P), tl.float32)
    square = tl.zeros((ROWS, COLUMNS), tl.float32)
    post_gates = None
    comb_gates = None
    if EXPAND:
        post_gates = load_columns(post, rows, inside, N)
        comb_gates = load_columns(comb, rows, inside, N * N)
    if SINGLE:
        streams = _load_chunk(
            h, u, post_gates, comb_gates, rows, first, inside, token_stride, stream_stride,
            N, D, COLUMNS, EXPAND, WIDE,
        )  # fmt: skip
        total, square = _add_chunk(
            total, square, streams, out, fn, weights, rows, first, inside,
            N, D, MIXES, P, COLUMNS, JOINED, DIRECT,
        )  # fmt: skip
    else:
        # If the compiler knew the number of chunks, it would unroll the loop, at the price of
        # spills.
        for chunk in range(chunks):
            at = first + chunk * COLUMNS
            of_chunk = fn
            if JOINED:
                of_chunk = _load_weights(fn, at, 0, N, N, D, MIXES, P, COLUMNS)
            streams = _load_chunk(
                h, u, post_gates, comb_gates, rows, at, inside, token_stride, stream_stride,
                N, D, COLUMNS, EXPAND, WIDE,
            )  # fmt: skip
            total, square = _add_chunk(
                total, square, streams, out, fn, of_chunk, rows, at, inside,
                N, D, MIXES, P, COLUMNS, JOINED, DIRECT,
            )  # fmt: skip
    if PDL and LAUNCH_LATE:
        gdc_launch_dependents()
    slice = tl.program_id(1)
    slices = tl.num_programs(1)
    mix = tl.arange(0, P)
    squares = tl.sum(square, 1)
    result = total
    multiplied = rows
    there = inside
    if DIRECT:
        token = tl.program_id(0) * ROWS + loaded_rows(ROWS // 16)
        multiplied = token.to(tl.int64)
        there = token < tokens
    known = there[:, None]
    if DIRECT or MANY:
        known &= (mix < MIXES)[None, :]
    else:
        result = tl.where((mix == MIXES)[None, :], squares[:, None], total)
    if MANY:
        partial += slice.to(tl.int64) * (P * tokens)
        tl.store(partial + MIXES * tokens + rows, squares, inside)
        tl.store(partial + multiplied[:, None] + (mix * tokens)[None, :], result, known)
    else:
        if DIRECT:
            tl.store(partial + (rows * slices + slice) * P + MIXES, squares, inside)
        at = (multiplied * slices + slice) * P
        tl.store(partial + at[:, None] + mix[None, :], result, known)


def launch_mix(
    h: Tensor,
    fn: Tensor,
    *,
    u: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute partial mixes of ``placed`` h [T, N, D], or of the new streams written to ``out``.

    Returns:
        float32 [T, slices, P]: each slice's share of the mixes, its sum of squares in column
        len(fn), and undefined columns after it. With many tokens, T is innermost in memory.
    """
    in_order, expands = fn.is_contiguous(), out is not None
    layout = h.shape, h.stride(), h.dtype
    launch, size = _mixing(layout, fn.shape[0], in_order, expands, h.device)
    partial = scratch(size, fn.dtype, fn.device)
    launch(u, h, post, comb, out, fn if in_order else fn.contiguous(), partial)
    return partial.permute(2, 0, 1) if h.shape[0] >= MANY_TOKENS else partial


@functools.lru_cache(LAUNCHES)
def _mixing(
    layout: tuple[tuple[int, ...], tuple[int, ...], torch.dtype],
    mixes: int,
    in_order: bool,
    expands: bool,
    device: torch.device,
) -> tuple[PreparedLaunch, tuple[int, int, int]]:
    """Prepare a launch for shape, strides and dtype of streams; return the partial mixes' shape."""
    (tokens, n, d), strides, dtype = layout
    target = target_of(device)
    chosen = choose_mix_config(tokens, d, dtype, target)
    width = max(16, next_power_of_2(mixes + 1))
    slices = cdiv(d, chosen.columns * chosen.chunks)
    many = tokens >= MANY_TOKENS
    launch = PreparedLaunch(
        mix_kernel,
        (cdiv(tokens, chosen.rows), slices),
        tokens,
        chosen.chunks,
        *strides[:2],
        N=n,
        D=d,
        MIXES=mixes,
        P=width,
        EXPAND=expands,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        SINGLE=chosen.chunks == 1,
        JOINED=joins_streams(n, dtype, target),
        DIRECT=chosen.direct and n == 4,
        WIDE=target.arc_a,
        MANY=many,
        LAUNCH_LATE=dependents_late(tokens, target),
        num_warps=chosen.num_warps,
        **(pdl_launch(device) if in_order else {"PDL": False}),
    )
    return launch, (slices, width, tokens) if many else (tokens, slices, width)

"""Collapse of the streams to one, y = sum_i pre_i h_i, in Triton, with an RMSNorm after it.

The grid has one CTA for each token's y, the last token first, since the values that the previous
kernel wrote last are still cached. With GATES, further CTAs compute the tokens' other gates.

    COLUMNS of each of the N streams -> y, and its codes; all of D at once up to 8192 channels

Gates are a long chain of operations on few numbers, and y is limited by memory, so side by side
they hide each other. Every thread of a CTA computes all gates of its token, so none waits for
another; few tokens leave processors to spare for that. With many tokens, a CTA computes the gates
of TOGETHER tokens, one in each lane.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR
from anymla.formats.triton_cast import widen
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops._triton_quantize import store_row_codes
from anymla.ops.device import target_of
from anymla.ops.hyper_connection.config import (
    MANY_TOKENS,
    TOGETHER_MANY,
    collapse_columns,
    collapse_lanes,
    dependents_late,
)
from anymla.ops.hyper_connection.triton_gates import (
    PartialMixes,
    Site,
    Streams,
    comb_gates,
    entries,
    entry,
    lane_sums,
    load_constants,
    place_sums,
    post_gates,
    pre_gates,
    slice_sums,
    store_columns,
)
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch


class Collapsed(NamedTuple):
    """Pointers to the collapsed streams, their norm's weight, and their FP8 codes.

    Attributes:
        y: pointer to the collapsed streams, [T, D].
        norm_weight: pointer to the RMSNorm's weight, [D]; None without a norm.
        codes: pointer to e4m3 codes of y, [T, D]; None, with ``code_scales``, if not quantised.
        code_scales: pointer to float32 scales of the quant blocks, or None.
        row_stride: elements of code_scales between consecutive tokens.
        block_stride: elements of code_scales between consecutive quant blocks.
    """

    y: Any
    norm_weight: Any
    codes: Any
    code_scales: Any
    row_stride: Any
    block_stride: Any


@triton.jit
def load_channels(h, first, stream_stride, N: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Load channels first .. first + C of the N streams."""
    d = first + tl.arange(0, C)
    streams = ()
    for i in tl.static_range(N):
        streams += (tl.load(h + i * stream_stride + d, d < D, other=0.0),)
    return streams


@triton.jit
def load_norm_weight(weight, first, D: tl.constexpr, C: tl.constexpr):
    """Load channels of the norm's weight."""
    d = first + tl.arange(0, C)
    return tl.load(weight + d, d < D, other=0.0)


@triton.jit
def _collapsed(streams, pre, N: tl.constexpr):
    """Return the streams' weighted sum, rounded to their dtype."""
    total = pre[0] * streams[0].to(tl.float32)
    for i in tl.static_range(1, N):
        total += pre[i] * streams[i].to(tl.float32)
    return total.to(streams[0].dtype)


@triton.jit
def _store_normed(
    y, out, weight, codes, code_scales, block_stride, first, inverse,
    D: tl.constexpr, C: tl.constexpr, FLOOR: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store C channels of y, normed if there is a weight, and their codes if there are codes."""
    d = first + tl.arange(0, C)
    if weight is not None:
        y = (widen(y) * inverse * weight.to(tl.float32)).to(y.dtype)
    tl.store(out + d, y, d < D)
    if codes is not None:
        store_row_codes(y, codes, code_scales, first, block_stride, D, FLOOR, NATIVE)


@triton.jit
def store_collapsed(
    loaded, weight, h, stream_stride, gates, y, to, codes, code_scales, norm_eps,
    N: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, FLOOR: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Store a token's y through its gates, normed if there is a weight, and its codes.

    With COLUMNS >= D the streams are ``loaded`` already; else they are read twice.
    """
    if COLUMNS >= D:
        value = _collapsed(loaded, gates, N)
        wide = widen(value)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / D + norm_eps)
        _store_normed(
            value, y, weight, codes, code_scales, to.block_stride, 0, inverse,
            D, COLUMNS, FLOOR, NATIVE,
        )  # fmt: skip
    else:
        square = tl.zeros((COLUMNS,), tl.float32)
        if to.norm_weight is not None:
            for first in range(0, D, COLUMNS):
                streams = load_channels(h, first, stream_stride, N, D, COLUMNS)
                wide = widen(_collapsed(streams, gates, N))
                square += wide * wide
        inverse = tl.rsqrt(tl.sum(square, 0) / D + norm_eps)
        for first in range(0, D, COLUMNS):
            value = _collapsed(load_channels(h, first, stream_stride, N, D, COLUMNS), gates, N)
            if to.norm_weight is not None:
                weight = load_norm_weight(to.norm_weight, first, D, COLUMNS)
            _store_normed(
                value, y, weight, codes, code_scales, to.block_stride, first, inverse,
                D, COLUMNS, FLOOR, NATIVE,
            )  # fmt: skip


@triton.jit
def collapse_token(
    streams, partial, site, to,
    N: tl.constexpr, D: tl.constexpr, MIXES: tl.constexpr, P: tl.constexpr, SLICES: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, MANY: tl.constexpr, FLOOR: tl.constexpr,
    NATIVE: tl.constexpr, LAUNCH_LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Collapse a token to its y."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    h = streams.h + row * streams.token_stride
    stream_stride = streams.stream_stride
    y = to.y + row * D
    codes = to.codes
    code_scales = to.code_scales
    if codes is not None:
        codes += row * D
        code_scales += row * to.row_stride
    constants = load_constants(site, 0, 0, N)
    weight = to.norm_weight
    if weight is not None:
        weight = load_norm_weight(to.norm_weight, 0, D, COLUMNS)
    if PDL:
        gdc_wait()
        if not LAUNCH_LATE:
            gdc_launch_dependents()
    if MANY:
        places = place_sums(
            partial.sums + row * partial.token_stride, partial.slice_stride, partial.mix_stride,
            MIXES, N, SLICES, LANES,
        )  # fmt: skip
    loaded = None
    if COLUMNS >= D:
        # Start these loads before the gates are finished.
        loaded = load_channels(h, 0, stream_stride, N, D, COLUMNS)
    if MANY:
        square = places[N]
        mixes = places[:N]
    else:
        sums = slice_sums(partial.sums + row * (SLICES * P), SLICES, LANES, P)
        square = entry(sums, MIXES, P)
        mixes = entries(sums, 0, N, P)
    inverse = tl.rsqrt(square / (N * D) + site.norm_eps)
    scaled = ()
    for i in tl.static_range(N):
        scaled += (mixes[i] * inverse,)
    gates = pre_gates(scaled, constants, site.hc_eps, N)
    store_collapsed(
        loaded, weight, h, stream_stride, gates, y, to, codes, code_scales, site.norm_eps,
        N, D, COLUMNS, FLOOR, NATIVE,
    )  # fmt: skip


@triton.jit
def finish_gates(
    partial, site, pre, post, comb, tokens, iters,
    N: tl.constexpr, D: tl.constexpr, MIXES: tl.constexpr, P: tl.constexpr, SLICES: tl.constexpr,
    LANES: tl.constexpr, TOGETHER: tl.constexpr, LAUNCH_LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute post, comb and, if given, pre of a token or of TOGETHER tokens side by side."""
    of_pre = None
    if pre is not None:
        of_pre = load_constants(site, 0, 0, N)
    of_post = load_constants(site, 1, N, N)
    of_comb = load_constants(site, 2, 2 * N, N * N)
    if PDL:
        gdc_wait()
        if not LAUNCH_LATE:
            gdc_launch_dependents()
    if TOGETHER > 1:
        rows = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
        inside = rows < tokens
        square = lane_sums(partial, rows, inside, 1.0, MIXES, 1, SLICES)[0]
        inverse = tl.rsqrt(square / (N * D) + site.norm_eps)
        if pre is not None:
            mixes = lane_sums(partial, rows, inside, inverse, 0, N, SLICES)
            store_columns(pre, rows, inside, pre_gates(mixes, of_pre, site.hc_eps, N), N)
        mixes = lane_sums(partial, rows, inside, inverse, N, N, SLICES)
        store_columns(post, rows, inside, post_gates(mixes, of_post, N), N)
        mixes = lane_sums(partial, rows, inside, inverse, 2 * N, N * N, SLICES)
        gates = comb_gates(mixes, of_comb, site.hc_eps, iters, N)
        store_columns(comb, rows, inside, gates, N * N)
    else:
        row = tl.program_id(0).to(tl.int64)
        sums = slice_sums(partial.sums + row * (SLICES * P), SLICES, LANES, P)
        sums *= tl.rsqrt(entry(sums, MIXES, P) / (N * D) + site.norm_eps)
        if pre is not None:
            gates = pre_gates(entries(sums, 0, N, P), of_pre, site.hc_eps, N)
            store_columns(pre, row, row >= 0, gates, N)
        store_columns(post, row, row >= 0, post_gates(entries(sums, N, N, P), of_post, N), N)
        mixes = entries(sums, 2 * N, N * N, P)
        gates = comb_gates(mixes, of_comb, site.hc_eps, iters, N)
        store_columns(comb, row, row >= 0, gates, N * N)


@triton.jit(
    do_not_specialize=["tokens", "iters", "partial_token", "partial_slice", "partial_mix",
                       "gate_ctas", "row_stride", "block_stride"]
)  # fmt: skip
def collapse_kernel(
    h,
    partial,
    base,
    scale,
    norm_weight,
    y,
    post,
    comb,
    codes,
    code_scales,
    tokens,
    gate_ctas,
    norm_eps,
    hc_eps,
    iters,
    token_stride,
    stream_stride,
    partial_token,
    partial_slice,
    partial_mix,
    row_stride,
    block_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    P: tl.constexpr,
    SLICES: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATES: tl.constexpr,
    TOGETHER: tl.constexpr,
    FLOOR: tl.constexpr,
    NATIVE: tl.constexpr,
    LAUNCH_LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute tokens' other gates with GATES, or a token's y, normed if there is a norm_weight.

    With LAUNCH_LATE, dependents are launched (PDL) when this kernel has ended.
    """
    streams = Streams(h, token_stride, stream_stride)
    sums = PartialMixes(partial, partial_token, partial_slice, partial_mix)
    site = Site(base, scale, norm_eps, hc_eps)
    if not GATES:
        collapse_token(
            streams, sums, site,
            Collapsed(y, norm_weight, codes, code_scales, row_stride, block_stride),
            N, D, MIXES, P, SLICES, LANES, COLUMNS, TOGETHER > 1, FLOOR, NATIVE, LAUNCH_LATE, PDL,
        )  # fmt: skip
    elif tl.program_id(0) < gate_ctas:
        finish_gates(
            sums, site, None, post, comb, tokens, iters,
            N, D, MIXES, P, SLICES, LANES, TOGETHER, LAUNCH_LATE, PDL,
        )  # fmt: skip
    else:
        collapse_token(
            streams, sums, site,
            Collapsed(y, norm_weight, codes, code_scales, row_stride, block_stride),
            N, D, MIXES, P, SLICES, LANES, COLUMNS, TOGETHER > 1, FLOOR, NATIVE, LAUNCH_LATE, PDL,
        )  # fmt: skip


def launch_collapse(
    h: Tensor,
    y: Tensor,
    partial: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    mixes: int,
    norm_eps: float,
    hc_eps: float,
    norm_weight: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
    iters: int = 1,
) -> None:
    """Fill y [T, D], and the other given outputs, from ``placed`` h [T, N, D] and partial mixes."""
    # With PDL, tensors that are read before the wait must not be copies just being made.
    pdl = base.is_contiguous() and scale.is_contiguous()
    pdl = pdl and (norm_weight is None or norm_weight.is_contiguous())
    if not pdl:
        base, scale = base.contiguous(), scale.contiguous()
        norm_weight = None if norm_weight is None else norm_weight.contiguous()
    rows = (0, 0) if code_scales is None else code_scales.stride()
    layout = h.shape, h.stride(), partial.shape, partial.stride(), rows
    numbers = mixes, norm_eps, hc_eps, iters, post is not None, pdl
    launch = _collapse(layout, numbers, h.device)
    launch(h, partial, base, scale, norm_weight, y, post, comb, codes, code_scales)


@functools.lru_cache(LAUNCHES)
def _collapse(
    layout: tuple[tuple[int, ...], ...],
    numbers: tuple[int, float, float, int, bool, bool],
    device: torch.device,
) -> PreparedLaunch:
    """Prepare a launch for shapes and strides of streams, partial mixes and scales."""
    (tokens, n, d), strides, partial_shape, partial_strides, row_strides = layout
    mixes, norm_eps, hc_eps, iters, gates, pdl = numbers
    many = tokens >= MANY_TOKENS
    slices, target = partial_shape[1], target_of(device)
    columns, num_warps = collapse_columns(d, many, target)
    together = TOGETHER_MANY if many else 1
    gate_ctas = cdiv(tokens, together) if gates else 0
    return PreparedLaunch(
        collapse_kernel,
        (gate_ctas + tokens,),
        tokens,
        gate_ctas,
        norm_eps,
        hc_eps,
        iters,
        *strides[:2],
        *partial_strides,
        *row_strides,
        N=n,
        D=d,
        MIXES=mixes,
        P=partial_shape[2],
        SLICES=slices,
        LANES=collapse_lanes(slices, many),
        COLUMNS=columns,
        GATES=gates,
        TOGETHER=together,
        FLOOR=ACTIVATION_AMAX_FLOOR,
        NATIVE=target.native_e4m3,
        LAUNCH_LATE=dependents_late(tokens, target),
        num_warps=num_warps,
        **(pdl_launch(device) if pdl else {"PDL": False}),
    )

"""Collapse the streams to one, y = sum_i pre_i h_i, with the RMSNorm that may follow.

Grid: tokens, the last first: what a kernel before wrote last is still cached.

    COLUMNS of each of the N streams -> y; all of D at once up to 8192 channels

The program finishes its token's gates first: all of its threads do, and none waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton import Build, Target
from anymla.ops.hyper_connection.triton_gates import (
    mixes_of_one,
    pre_gates,
    store_gates,
)
from anymla.ops.hyper_connection.triton_mix import FEW_SLICE, MANY_SLICE

_WIDEST = 8192


def columns_of(d: int) -> tuple[int, int]:
    """Channels of a tile and warps."""
    columns = min(_WIDEST, triton.next_power_of_2(d))
    return columns, 4 if columns <= 4096 else 8


@triton.jit
def _load(h, first, N: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Channels first..first + C of the N streams."""
    d = first + tl.arange(0, C)
    streams = ()
    for i in tl.static_range(N):
        streams += (tl.load(h + i * D + d, d < D, other=0.0),)
    return streams


@triton.jit
def _collapsed(streams, pre, N: tl.constexpr):
    """The streams' weighted sum, rounded to their dtype."""
    total = pre[0] * streams[0].to(tl.float32)
    for i in tl.static_range(1, N):
        total += pre[i] * streams[i].to(tl.float32)
    return total.to(streams[0].dtype)


@triton.jit
def _store_normed(y, out, weight, first, inverse, D: tl.constexpr, C: tl.constexpr):
    d = first + tl.arange(0, C)
    if weight is not None:
        factor = tl.load(weight + d, d < D, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) * inverse * factor).to(y.dtype)
    tl.store(out + d, y, d < D)


@triton.jit(do_not_specialize=["iters", "token_stride", "slice_stride", "mix_stride"])
def collapse_kernel(
    h,
    partial,
    base,
    scale,
    norm_weight,
    y,
    post,
    comb,
    norm_eps,
    hc_eps,
    iters,
    token_stride,
    slice_stride,
    mix_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A token: its gates, and y, normalised if there is a norm_weight."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    exists = row >= 0
    h += row * (N * D)
    y += row * D
    if COLUMNS >= D:
        # Under way while the gates are finished.
        streams = _load(h, 0, N, D, COLUMNS)
    partial += row * token_stride
    mixes = mixes_of_one(partial, slice_stride, mix_stride, norm_eps, MIXES, N * D, SLICES, BLOCK_S)
    gates = pre_gates(mixes, base, scale, hc_eps, N)
    if MIXES > N:
        store_gates(mixes, base, scale, post, comb, row, exists, hc_eps, iters, N)
    if COLUMNS >= D:
        value = _collapsed(streams, gates, N)
        wide = value.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / D + norm_eps)
        _store_normed(value, y, norm_weight, 0, inverse, D, COLUMNS)
    else:
        square = tl.zeros((COLUMNS,), tl.float32)
        if norm_weight is not None:
            for first in range(0, D, COLUMNS):
                streams = _load(h, first, N, D, COLUMNS)
                wide = _collapsed(streams, gates, N).to(tl.float32)
                square += wide * wide
        inverse = tl.rsqrt(tl.sum(square, 0) / D + norm_eps)
        for first in range(0, D, COLUMNS):
            value = _collapsed(_load(h, first, N, D, COLUMNS), gates, N)
            _store_normed(value, y, norm_weight, first, inverse, D, COLUMNS)


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
    iters: int = 1,
) -> None:
    """Fill y [T, D], and post and comb if there are any, from contiguous h [T, N, D] and mixes."""
    tokens, n, d = h.shape
    columns, num_warps = columns_of(d)
    slices = partial.shape[1]
    collapse_kernel[(tokens,)](
        h,
        partial,
        base,
        scale,
        norm_weight,
        y,
        post,
        comb,
        norm_eps,
        hc_eps,
        iters,
        *partial.stride(),
        N=n,
        D=d,
        MIXES=mixes,
        SLICES=slices,
        BLOCK_S=triton.next_power_of_2(slices),
        COLUMNS=columns,
        num_warps=num_warps,
    )


def builds(target: Target) -> Iterator[Build]:
    """Flash and Pro, few and many tokens: with a norm or without, and the head."""
    for d in (4096, 7168):
        for dtype in ("bf16", "fp16", "fp32") if d == 4096 else ("bf16", "fp32"):
            for width in (FEW_SLICE, MANY_SLICE):
                for mixes, norm in ((24, False), (24, True), (4, False)):
                    yield _build(d, dtype, mixes, norm, d // width)


def _build(d: int, dtype: str, mixes: int, norm: bool, slices: int) -> Build:
    columns, num_warps = columns_of(d)
    strides = dict.fromkeys(("token_stride", "slice_stride", "mix_stride"), "i32")
    numbers = {"norm_eps": "fp32", "hc_eps": "fp32", "iters": "i32", **strides}
    types = {"h": f"*{dtype}", "y": f"*{dtype}", **numbers}
    if norm:
        types["norm_weight"] = f"*{dtype}"
    given = ("partial", "base", "scale")
    results = ("post", "comb") if mixes > 4 else ()
    types |= dict.fromkeys((*given, *results), "*fp32")
    pointers = ("partial", "base", "scale", "norm_weight", "post", "comb")
    sizes = {
        "N": 4,
        "D": d,
        "MIXES": mixes,
        "SLICES": slices,
        "BLOCK_S": triton.next_power_of_2(slices),
        "COLUMNS": columns,
    }
    return Build(
        f"{dtype} D {d}, {mixes} mixes of {slices} slices{', norm' * norm}",
        collapse_kernel,
        types,
        {name: None for name in pointers if name not in types} | sizes,
        num_warps=num_warps,
    )

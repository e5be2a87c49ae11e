"""Collapse the streams to one, y = sum_i pre_i h_i, with the RMSNorm that may follow.

Grid: a program for every token's other gates, with GATES, and one for its y, the last token first:
what a kernel before wrote last is still cached.

    COLUMNS of each of the N streams -> y; all of D at once up to 8192 channels

Gates are a long chain of operations on little, and y is memory: side by side they hide each other.
All threads of a program have its token's gates, and none waits for another. Of many tokens the
gates are left to a kernel after this one, for which it finds the streams' sums of ``squares``.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton import Build, Target, target_of
from anymla.ops.hyper_connection.triton_gates import (
    mixes_of_one,
    pre_gates,
    store_gates,
    summed,
)
from anymla.ops.hyper_connection.triton_mix import SLICES, chained

_WIDEST = 8192
# Slices of a token that are summed at a time.
_LANES = 32


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


@triton.jit
def _collapse(
    h,
    partial,
    base,
    scale,
    norm_weight,
    y,
    squares,
    norm_eps,
    hc_eps,
    token_stride,
    slice_stride,
    mix_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    SLICES: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Collapse a token to its y."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    h += row * (N * D)
    y += row * D
    if COLUMNS >= D:
        # Under way while the gates are finished.
        streams = _load(h, 0, N, D, COLUMNS)
    partial += row * token_stride
    if squares is None:
        square = summed(partial + MIXES * mix_stride, slice_stride, SLICES, LANES)
    else:
        parts = tl.zeros((COLUMNS,), tl.float32)
        for first in range(0, D, COLUMNS):
            if COLUMNS < D:
                streams = _load(h, first, N, D, COLUMNS)
            for i in tl.static_range(N):
                wide = streams[i].to(tl.float32)
                parts += wide * wide
        square = tl.sum(parts, 0)
        tl.store(squares + row, square)
    inverse = tl.rsqrt(square / (N * D) + norm_eps)
    mixes = ()
    for i in tl.static_range(N):
        mixes += (summed(partial + i * mix_stride, slice_stride, SLICES, LANES) * inverse,)
    gates = pre_gates(mixes, base, scale, hc_eps, N)
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


@triton.jit(do_not_specialize=["tokens", "iters", "token_stride", "slice_stride", "mix_stride"])
def collapse_kernel(
    h,
    partial,
    base,
    scale,
    norm_weight,
    y,
    post,
    comb,
    squares,
    tokens,
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
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A token's other gates with GATES, or its y, normalised if there is a norm_weight."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if GATES and tl.program_id(0) < tokens:
        row = tl.program_id(0).to(tl.int64)
        mixes = mixes_of_one(
            partial + row * token_stride,
            slice_stride,
            mix_stride,
            norm_eps,
            N,
            MIXES,
            MIXES,
            N * D,
            SLICES,
            LANES,
        )
        store_gates(mixes, base, scale, post, comb, row, row >= 0, hc_eps, iters, N)
    else:
        _collapse(
            h,
            partial,
            base,
            scale,
            norm_weight,
            y,
            squares,
            norm_eps,
            hc_eps,
            token_stride,
            slice_stride,
            mix_stride,
            N,
            D,
            MIXES,
            SLICES,
            LANES,
            COLUMNS,
        )


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
    squares: Tensor | None = None,
    iters: int = 1,
) -> None:
    """Fill y [T, D], and what else is given, from contiguous h [T, N, D] and mixes.

    Post and comb are filled or, for many tokens, ``squares`` [T].
    """
    tokens, n, d = h.shape
    columns, num_warps = columns_of(d)
    slices = partial.shape[1]
    soon = squares is None and chained(tokens, target_of(h.device))
    collapse_kernel[(tokens if post is None else 2 * tokens,)](
        h,
        partial,
        base,
        scale,
        norm_weight,
        y,
        post,
        comb,
        squares,
        tokens,
        norm_eps,
        hc_eps,
        iters,
        *partial.stride(),
        N=n,
        D=d,
        MIXES=mixes,
        SLICES=slices,
        LANES=min(_LANES, triton.next_power_of_2(slices)),
        COLUMNS=columns,
        GATES=post is not None,
        EARLY=soon,
        num_warps=num_warps,
        **({"launch_pdl": True} if soon else {}),
    )


def builds(target: Target) -> Iterator[Build]:
    """Flash and Pro, few and many tokens: with a norm or without, and the head."""
    for d in (4096, 7168):
        for dtype in ("bf16", "fp16", "fp32") if d == 4096 else ("bf16", "fp32"):
            for mixes, norm in ((24, False), (24, True), (4, False)):
                # How many slices there are is of no consequence for the tile.
                for width in SLICES if dtype == "bf16" else SLICES[:1]:
                    early = width == SLICES[0] and chained(1, target)
                    for soon in sorted({False, early}):
                        yield _build(d, dtype, mixes, norm, d // width, soon)
                if dtype == "bf16":
                    yield _build(d, dtype, mixes, norm, 4, False, many=True)


def _build(
    d: int, dtype: str, mixes: int, norm: bool, slices: int, early: bool, many: bool = False
) -> Build:
    columns, num_warps = columns_of(d)
    strides = ("tokens", "token_stride", "slice_stride", "mix_stride")
    numbers = {
        "norm_eps": "fp32",
        "hc_eps": "fp32",
        "iters": "i32",
        **dict.fromkeys(strides, "i32"),
    }
    types = {"h": f"*{dtype}", "y": f"*{dtype}", **numbers}
    if norm:
        types["norm_weight"] = f"*{dtype}"
    given = ("partial", "base", "scale")
    results: tuple[str, ...] = ("post", "comb") if mixes > 4 else ()
    if many:
        results = ("squares",)
    types |= dict.fromkeys((*given, *results), "*fp32")
    pointers = ("partial", "base", "scale", "norm_weight", "post", "comb", "squares")
    sizes = {
        "N": 4,
        "D": d,
        "MIXES": mixes,
        "SLICES": slices,
        "LANES": min(_LANES, triton.next_power_of_2(slices)),
        "COLUMNS": columns,
        "GATES": "post" in types,
        "EARLY": early,
    }
    marks = ", norm" * norm + ", squares" * many + ", early" * early
    return Build(
        f"{dtype} D {d}, {mixes} mixes of {slices} slices{marks}",
        collapse_kernel,
        types,
        {name: None for name in pointers if name not in types} | sizes,
        num_warps=num_warps,
        spills=4 if dtype == "fp32" else 0,
    )

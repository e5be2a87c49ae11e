"""Collapse the streams to one, y = sum_i pre_i h_i, with the RMSNorm that may follow.

Grid: blocks of ROWS tokens, the last block first: what a kernel before wrote last is still cached.

    ROWS x COLUMNS of each of the N streams -> y; all of D in one tile up to 8192 channels

With GATES the program also finishes its tokens' gates, which saves a launch while tokens are few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton import Build, Target
from anymla.ops.hyper_connection.triton_gates import (
    load_columns,
    mixes_of_few,
    pre_gates,
    store_gates,
)
from anymla.ops.hyper_connection.triton_mix import load_streams

_WIDEST = 8192
_ELEMENTS = 4096
_MOST_ROWS = 64


@dataclasses.dataclass(frozen=True)
class CollapseConfig:
    """Tokens and channels of a tile; warps."""

    rows: int
    columns: int
    num_warps: int


def config(d: int) -> CollapseConfig:
    """Tiles of about 4096 channels; more rows only where they are short."""
    columns = min(_WIDEST, triton.next_power_of_2(d))
    rows = min(_MOST_ROWS, max(1, _ELEMENTS // columns))
    return CollapseConfig(rows, columns, 4 if rows * columns <= _ELEMENTS else 8)


@triton.jit
def _collapsed(h, rows, inside, pre, first, N: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Channels first..first + C of y, rounded to the streams' dtype."""
    d = first + tl.arange(0, C)
    streams = load_streams(h, rows, d, inside[:, None] & (d < D)[None, :], N, D)
    total = pre[0][:, None] * streams[0].to(tl.float32)
    for i in tl.static_range(1, N):
        total += pre[i][:, None] * streams[i].to(tl.float32)
    return total.to(streams[0].dtype)


@triton.jit
def _store_normed(y, out, weight, rows, inside, first, inverse, D: tl.constexpr, C: tl.constexpr):
    d = first + tl.arange(0, C)
    if weight is not None:
        factor = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) * inverse[:, None] * factor[None, :]).to(y.dtype)
    mask = inside[:, None] & (d < D)[None, :]
    tl.store(out + (rows * D)[:, None] + d[None, :], y, mask)


@triton.jit(do_not_specialize=["tokens", "iters"])
def collapse_kernel(
    h,
    pre,
    partial,
    base,
    scale,
    norm_weight,
    y,
    post,
    comb,
    tokens,
    norm_eps,
    hc_eps,
    iters,
    N: tl.constexpr,
    D: tl.constexpr,
    GATES: tl.constexpr,
    MIXES: tl.constexpr,
    SLICES: tl.constexpr,
    P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A block of tokens: y, normalised if there is a norm_weight; with GATES its gates."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    token = block * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    rows = token.to(tl.int64)
    if GATES:
        mixes = mixes_of_few(partial, rows, inside, norm_eps, MIXES, N * D, SLICES, P, BLOCK_S)
        gates = pre_gates(mixes, base, scale, hc_eps, N)
        if MIXES > N:
            store_gates(mixes, base, scale, post, comb, rows, inside, hc_eps, iters, N)
    else:
        gates = load_columns(pre, rows, inside, N)
    square = tl.zeros((ROWS,), tl.float32)
    if COLUMNS >= D:
        value = _collapsed(h, rows, inside, gates, 0, N, D, COLUMNS)
        wide = value.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 1) / D + norm_eps)
        _store_normed(value, y, norm_weight, rows, inside, 0, inverse, D, COLUMNS)
    else:
        if norm_weight is not None:
            for first in range(0, D, COLUMNS):
                wide = _collapsed(h, rows, inside, gates, first, N, D, COLUMNS).to(tl.float32)
                square += tl.sum(wide * wide, 1)
        inverse = tl.rsqrt(square / D + norm_eps)
        for first in range(0, D, COLUMNS):
            value = _collapsed(h, rows, inside, gates, first, N, D, COLUMNS)
            _store_normed(value, y, norm_weight, rows, inside, first, inverse, D, COLUMNS)


def launch_collapse(
    h: Tensor,
    y: Tensor,
    *,
    pre: Tensor | None = None,
    partial: Tensor | None = None,
    base: Tensor | None = None,
    scale: Tensor | None = None,
    norm_weight: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    mixes: int = 0,
    norm_eps: float = 0.0,
    hc_eps: float = 0.0,
    iters: int = 1,
) -> None:
    """Fill y [T, D] from contiguous h [T, N, D] and either ``pre`` or ``partial`` mixes."""
    tokens, n, d = h.shape
    chosen = config(d)
    slices, width = (1, 1) if partial is None else partial.shape[1:]
    collapse_kernel[(triton.cdiv(tokens, chosen.rows),)](
        h,
        pre,
        partial,
        base,
        scale,
        norm_weight,
        y,
        post,
        comb,
        tokens,
        norm_eps,
        hc_eps,
        iters,
        N=n,
        D=d,
        GATES=partial is not None,
        MIXES=mixes,
        SLICES=slices,
        P=width,
        BLOCK_S=triton.next_power_of_2(slices),
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        num_warps=chosen.num_warps,
    )


def builds(target: Target) -> Iterator[Build]:
    """Flash and Pro: with their gates or given them, with a norm or without, and the head."""
    for d in (4096, 7168):
        for dtype in ("bf16", "fp16", "fp32"):
            for mixes in (0, 4, 24):
                for norm in (False, True):
                    yield _build(d, dtype, mixes, norm)


def _build(d: int, dtype: str, mixes: int, norm: bool) -> Build:
    chosen = config(d)
    numbers = {"tokens": "i32", "norm_eps": "fp32", "hc_eps": "fp32", "iters": "i32"}
    types = {"h": f"*{dtype}", "y": f"*{dtype}", **numbers}
    if norm:
        types["norm_weight"] = f"*{dtype}"
    given = ("partial", "base", "scale") if mixes else ("pre",)
    results = ("post", "comb") if mixes > 4 else ()
    types |= dict.fromkeys((*given, *results), "*fp32")
    pointers = ("pre", "partial", "base", "scale", "norm_weight", "post", "comb")
    slices = triton.cdiv(d, 64) if mixes else 1
    sizes = {
        "N": 4,
        "D": d,
        "GATES": mixes > 0,
        "MIXES": mixes,
        "SLICES": slices,
        "P": max(16, triton.next_power_of_2(mixes + 1)) if mixes else 1,
        "BLOCK_S": triton.next_power_of_2(slices),
        "ROWS": chosen.rows,
        "COLUMNS": chosen.columns,
    }
    return Build(
        f"{dtype} D {d}, {mixes} mixes{', norm' * norm}",
        collapse_kernel,
        types,
        {name: None for name in pointers if name not in types} | sizes,
        num_warps=chosen.num_warps,
    )

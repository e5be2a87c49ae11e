"""The mixes of many tokens of bfloat16, and the sum of their streams' squares.

As ``triton_mix``, but what is multiplied goes from memory to the tensor cores as it is: a kernel
before splits the float32 weights into three planes of bfloat16 whose sum they are. The product is
the transposed one, weights by tokens, so that streams need no other layout than they are loaded in.

Grid: (blocks of tokens, slices of D).

              ROWS tokens
    3 planes |           |
    of P     |           |   N streams of a slice, in chunks of COLUMNS -> partial [slice, P, T]
    mixes    |           |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_dot import split_in_three
from anymla.ops._triton import Build, Target, target_of
from anymla.ops.hyper_connection.triton_gates import SLICES_OF_MANY, load_columns
from anymla.ops.hyper_connection.triton_tiles import expand, load_streams
from anymla.ops.workspace import scratch

_PLANES = 3
_SPLIT = 1024


@dataclasses.dataclass(frozen=True)
class BulkConfig:
    """Tokens and channels of a tile; warps; pipeline depth."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


def config(expands: bool, target: Target) -> BulkConfig:
    """Large tiles where operands are multiplied from shared memory, and there is much of it.

    Weights are read once a block of tokens.
    """
    if target.backend == "cuda" and target.shared_bytes > 200 << 10:
        return BulkConfig(64, 32, 8, 2) if expands else BulkConfig(128, 64, 8, 4)
    return BulkConfig(16 if expands else 32, 32, 8, 2)


def slice_of(tokens: int, d: int) -> int:
    """Channels of a slice: as many as leave enough programs."""
    wide = triton.next_power_of_2(tokens // 8 + 1) // 2
    return min(SLICES_OF_MANY, key=lambda width: abs(width - min(wide, d)))


@triton.jit
def split_kernel(fn, planes, MIXES: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """SPLIT weights of a mix -> three of planes [3, P, WIDTH]; mixes beyond MIXES are zeros."""
    mix = tl.program_id(0)
    at = tl.program_id(1) * SPLIT + tl.arange(0, SPLIT)
    weights = tl.load(fn + mix * WIDTH + at, at < tl.where(mix < MIXES, WIDTH, 0), other=0.0)
    parts = split_in_three(weights)
    plane = tl.num_programs(0) * WIDTH
    for i in tl.static_range(3):
        tl.store(planes + i * plane + mix * WIDTH + at, parts[i], at < WIDTH)


@triton.jit
def _load_weights(planes, stream, d, N: tl.constexpr, D: tl.constexpr, PLANES, P: tl.constexpr):
    """Channels d [c] of a stream's weights: P mixes in three planes and one of zeros, [4 P, c].

    A row's number is, from its highest bits, half a plane's, a mix's, the other half, a mix's:
    what tensor cores leave in one thread are then sums of the same mix.
    """
    row = tl.arange(0, 4 * P)
    plane = row // (2 * P) * 2 + row // 8 % 2
    mix = row // 16 % (P // 8) * 8 + row % 8
    at = planes + (plane * (P * N * D) + mix * (N * D) + stream * D)[:, None] + d[None, :]
    return tl.load(at, (plane < PLANES)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _sum_planes(total, P: tl.constexpr):
    """Sums [P, n] over the planes of products [4 P, n] of rows as ``_load_weights`` orders them."""
    TOKENS: tl.constexpr = total.shape[1]
    total = tl.sum(tl.reshape(total, (2, P // 8, 2, 8, TOKENS)), 2)
    return tl.reshape(tl.sum(total, 0), (P, TOKENS))


@triton.jit(do_not_specialize=["tokens", "chunks"])
def bulk_kernel(
    u,
    h,
    post,
    comb,
    out,
    planes,
    partial,
    tokens,
    chunks,
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    P: tl.constexpr,
    EXPAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLANES: tl.constexpr,
):
    """A block of tokens and a slice of D: partial mixes, and with EXPAND the streams."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    rows = token.to(tl.int64)
    first = tl.program_id(1) * (chunks * COLUMNS)
    total = tl.zeros((4 * P, ROWS), tl.float32)
    square = tl.zeros((ROWS, COLUMNS), tl.float32)
    if EXPAND:
        post_gates = load_columns(post, rows, inside, N)
        comb_gates = load_columns(comb, rows, inside, N * N)
        for chunk in range(chunks):
            d = first + chunk * COLUMNS + tl.arange(0, COLUMNS)
            mask = inside[:, None] & (d < D)[None, :]
            streams = load_streams(h, rows, d, mask, N, D)
            before = tl.load(u + (rows * D)[:, None] + d[None, :], mask, other=0.0)
            streams = expand(before, streams, post_gates, comb_gates, N)
            for j in tl.static_range(N):
                stream = streams[j]
                tl.store(out + (rows * (N * D) + j * D)[:, None] + d[None, :], stream, mask)
                wide = stream.to(tl.float32)
                square += wide * wide
                weights = _load_weights(planes, j, d, N, D, PLANES, P)
                total = tl.dot(weights, tl.trans(stream), total)
    else:
        for step in range(chunks * N):
            d = first + step // N * COLUMNS + tl.arange(0, COLUMNS)
            mask = inside[:, None] & (d < D)[None, :]
            stream = tl.load(h + (rows * (N * D) + step % N * D)[:, None] + d[None, :], mask, 0.0)
            wide = stream.to(tl.float32)
            square += wide * wide
            weights = _load_weights(planes, step % N, d, N, D, PLANES, P)
            total = tl.dot(weights, tl.trans(stream), total)
    mixes = _sum_planes(total, P)
    mix = tl.arange(0, P)
    at = partial + tl.program_id(1).to(tl.int64) * P * tokens + token
    there = (mix < MIXES)[:, None] & inside[None, :]
    tl.store(at[None, :] + (mix * tokens)[:, None], mixes, there)
    tl.store(at + MIXES * tokens, tl.sum(square, 1), inside)


def launch_bulk(
    h: Tensor,
    fn: Tensor,
    *,
    u: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As ``triton_mix.launch_mix``; the partial mixes have T last in memory."""
    tokens, n, d = h.shape
    chosen = config(out is not None, target_of(h.device))
    mixes = fn.shape[0]
    width = max(16, triton.next_power_of_2(mixes + 1))
    width_of_slice = slice_of(tokens, d)
    slices = triton.cdiv(d, width_of_slice)
    partial = scratch((slices, width, tokens), fn.dtype, fn.device)
    planes = scratch((_PLANES, width, n * d), h.dtype, h.device)
    split_kernel[(width, triton.cdiv(n * d, _SPLIT))](
        fn, planes, MIXES=mixes, WIDTH=n * d, SPLIT=_SPLIT
    )
    bulk_kernel[(triton.cdiv(tokens, chosen.rows), slices)](
        u,
        h,
        post,
        comb,
        out,
        planes,
        partial,
        tokens,
        width_of_slice // chosen.columns,
        N=n,
        D=d,
        MIXES=mixes,
        P=width,
        EXPAND=out is not None,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        PLANES=_PLANES,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    return partial.permute(2, 0, 1)


def builds(target: Target) -> Iterator[Build]:
    """Flash and Pro, alone and after another site, and the head."""
    for d in (4096, 7168):
        for mixes, expands in ((24, False), (24, True), (4, False)):
            chosen = config(expands, target)
            if not expands:
                sizes = {"MIXES": mixes, "WIDTH": 4 * d, "SPLIT": _SPLIT}
                types = {"fn": "*fp32", "planes": "*bf16"}
                yield Build(f"D {d}, {mixes} mixes", split_kernel, types, sizes)
            types = {"h": "*bf16", "planes": "*bf16", "partial": "*fp32"}
            types |= {"tokens": "i32", "chunks": "i32"}
            before = {"u": "*bf16", "out": "*bf16", "post": "*fp32", "comb": "*fp32"}
            sizes = {
                "N": 4,
                "D": d,
                "MIXES": mixes,
                "P": max(16, triton.next_power_of_2(mixes + 1)),
                "EXPAND": expands,
                "ROWS": chosen.rows,
                "COLUMNS": chosen.columns,
                "PLANES": _PLANES,
            }
            yield Build(
                f"D {d}, {mixes} mixes{', expand' * expands}",
                bulk_kernel,
                types | before if expands else types,
                sizes if expands else dict.fromkeys(before) | sizes,
                num_warps=chosen.num_warps,
                num_stages=chosen.num_stages,
                matrix="bf16",
            )

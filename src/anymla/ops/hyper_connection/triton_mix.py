"""The 2N + N^2 mixes of a site: streams times weights, and the sum of the streams' squares.

Every mix depends on all N D channels of a token, and the weights (1.5 MiB at D 4096) are needed for
every token. So a program takes many tokens and a slice of D, and what it found is added up later:
tokens share the weights they read, and one token alone still keeps many programs busy.

Grid: (blocks of tokens, slices of D).

            D ->  | slice | slice | ...
    ROWS tokens   |  N streams of ROWS x SLICE, in chunks of COLUMNS -> partial [T, slice, P]

With EXPAND the program first leaves the site before: it makes the N streams h' of its slice from u,
h and that site's gates, stores them, and goes on with them as rounded.

Streams go to the tensor cores through registers. Multiplied from where they are loaded to, as
Hopper can, they are lost: their squares are a second use, for which Triton 3.6 keeps one buffer
too few, and what is loaded next arrives while the product before is still being formed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_dot import exact_dot
from anymla.ops._triton import Build, Target
from anymla.ops.hyper_connection.triton_gates import load_columns
from anymla.ops.hyper_connection.triton_tiles import expand, load_streams
from anymla.ops.workspace import scratch

_FEW_TOKENS = 128
# Channels of a slice. With few tokens many slices, but at D 4096 no more than a warp's lanes.
FEW_SLICE = 128
MANY_SLICE = 512
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True)
class MixConfig:
    """Tokens, channels of a chunk and chunks of a program; warps."""

    rows: int
    columns: int
    chunks: int
    num_warps: int


def config(tokens: int, d: int, dtype: torch.dtype) -> MixConfig:
    """Tiles for a call; of the number of tokens only its order of magnitude matters.

    Only bfloat16 streams are multiplied as they are; other dtypes need more registers a channel.
    """
    few = tokens <= _FEW_TOKENS
    whole = dtype == torch.bfloat16
    columns = min(32 if whole else 16, max(16, triton.next_power_of_2(d)))
    chunks = min((FEW_SLICE if few else MANY_SLICE) // columns, triton.cdiv(d, columns))
    return MixConfig(16, columns, chunks, 8 if whole else 4)


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
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    P: tl.constexpr,
    EXPAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A block of tokens and a slice of D: partial mixes, and with EXPAND the streams."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    rows = token.to(tl.int64)
    first = tl.program_id(1) * (chunks * COLUMNS)
    mix = tl.arange(0, P)
    total = tl.zeros((ROWS, P), tl.float32)
    square = tl.zeros((ROWS, COLUMNS), tl.float32)
    if EXPAND:
        post_gates = load_columns(post, rows, inside, N)
        comb_gates = load_columns(comb, rows, inside, N * N)
    # A number of chunks that the compiler knew would be unrolled, at the price of spills.
    for chunk in range(chunks):
        d = first + chunk * COLUMNS + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (d < D)[None, :]
        streams = load_streams(h, rows, d, mask, N, D)
        if EXPAND:
            before = tl.load(u + (rows * D)[:, None] + d[None, :], mask, other=0.0)
            streams = expand(before, streams, post_gates, comb_gates, N)
        for j in tl.static_range(N):
            stream = streams[j]
            if EXPAND:
                tl.store(out + (rows * (N * D) + j * D)[:, None] + d[None, :], stream, mask)
            wide = stream.to(tl.float32)
            square += wide * wide
            weights = tl.load(
                fn + (mix * (N * D) + j * D)[:, None] + d[None, :],
                (mix < MIXES)[:, None] & (d < D)[None, :],
                other=0.0,
            )
            total = exact_dot(stream, weights, total)
    there = inside[:, None] & (mix < MIXES)[None, :]
    at = partial + (rows * tl.num_programs(1) + tl.program_id(1)) * P
    tl.store(at[:, None] + mix[None, :], total, there)
    tl.store(at + MIXES, tl.sum(square, 1), inside)


def launch_mix(
    h: Tensor,
    fn: Tensor,
    *,
    u: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Partial mixes of contiguous streams h [T, N, D], or of those that replace them in ``out``.

    Returns:
        float32 [T, slices, P]: a slice's share of the mixes, in column len(fn) its sum of squares,
        and nothing beyond.
    """
    tokens, n, d = h.shape
    chosen = config(tokens, d, h.dtype)
    mixes = fn.shape[0]
    width = max(16, triton.next_power_of_2(mixes + 1))
    slices = triton.cdiv(d, chosen.columns * chosen.chunks)
    partial = scratch((tokens, slices, width), fn.dtype, fn.device)
    mix_kernel[(triton.cdiv(tokens, chosen.rows), slices)](
        u,
        h,
        post,
        comb,
        out,
        fn,
        partial,
        tokens,
        chosen.chunks,
        N=n,
        D=d,
        MIXES=mixes,
        P=width,
        EXPAND=out is not None,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        num_warps=chosen.num_warps,
    )
    return partial


def builds(target: Target) -> Iterator[Build]:
    """Flash and Pro, alone and after another site, and the head; tiles are those of any tokens."""
    for d in (4096, 7168):
        for dtype in ("bf16", "fp16", "fp32") if d == 4096 else ("bf16",):
            for mixes, expands in ((24, False), (24, True), (4, False)):
                yield _build(target, d, dtype, mixes, expands)


def _build(target: Target, d: int, dtype: str, mixes: int, expands: bool) -> Build:
    chosen = config(1, d, _DTYPES[dtype])
    types = {"h": f"*{dtype}", "fn": "*fp32", "partial": "*fp32", "tokens": "i32", "chunks": "i32"}
    absent = {}
    before = {"u": f"*{dtype}", "out": f"*{dtype}", "post": "*fp32", "comb": "*fp32"}
    if expands:
        types |= before
    else:
        absent = dict.fromkeys(before)
    sizes = {
        "N": 4,
        "D": d,
        "MIXES": mixes,
        "P": max(16, triton.next_power_of_2(mixes + 1)),
        "EXPAND": expands,
        "ROWS": chosen.rows,
        "COLUMNS": chosen.columns,
    }
    return Build(
        f"{dtype} D {d}, {mixes} mixes{', expand' * expands}",
        mix_kernel,
        types,
        absent | sizes,
        num_warps=chosen.num_warps,
        matrix=dtype != "fp32" and "bf16",
        spills=_spills(target),
    )


def _spills(target: Target) -> int:
    """Spills that are accepted: in the 256 registers of RDNA a tile of streams is a tight fit."""
    if not target.name.startswith("gfx1"):
        return 16
    return 128

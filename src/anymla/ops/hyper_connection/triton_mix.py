"""The 2N + N^2 mixes of a site: streams times weights, and the sum of the streams' squares.

Every mix depends on all N D channels of a token, and the weights (1.5 MiB at D 4096) are needed for
every token. So a program takes some tokens and a slice of D, and what it found is added up later:
tokens share the weights they read, and one token alone still keeps many programs busy.

Grid: (blocks of tokens, slices of D).

            D ->  | slice | slice | ...
    ROWS tokens   |  N streams of ROWS x SLICE, in chunks of COLUMNS -> partial [T, P, slices]

With EXPAND the program first leaves the site before: it makes the N streams h' of its slice from u,
h and that site's gates, stores them, and goes on with them as rounded. Products and sums are not
made one there: the compiler computes the streams twice, in the layout to be stored and in the one
to be multiplied, and must round both alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_dot import exact_dot
from anymla.ops._triton import Build, Target, target_of
from anymla.ops.hyper_connection.triton_gates import load_columns
from anymla.ops.hyper_connection.triton_tiles import expand, load_streams
from anymla.ops.workspace import scratch

_ROWS = 16
_FEW_TOKENS = 128
# Channels of a slice: of one block of tokens, of some, of many. One has few programs otherwise.
SLICES = (32, 128, 512)
# Whether the kernel that collapses a single token is launched before this one has ended.
_CHAINED = True
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
    width = SLICES[(tokens > _ROWS) + (tokens > _FEW_TOKENS)]
    whole = dtype == torch.bfloat16
    columns = min(32 if whole else 16, max(16, triton.next_power_of_2(d)))
    chunks = min(width // columns, triton.cdiv(d, columns))
    return MixConfig(_ROWS, columns, chunks, 4)


def chained(tokens: int, target: Target) -> bool:
    """Whether the kernel that collapses these tokens is launched early, and waits by itself.

    With more tokens (measured: 16 and 64) it is in the way of programs that it waits for.
    """
    return _CHAINED and tokens == 1 and target.name == "sm_90"


@triton.jit(do_not_specialize=["tokens", "chunks", "token_stride", "slice_stride", "mix_stride"])
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
    slice_stride,
    mix_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    P: tl.constexpr,
    EXPAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FOLLOWED: tl.constexpr,
):
    """A block of tokens and a slice of D: partial mixes, and with EXPAND the streams."""
    if FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()
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
    at = partial + rows * token_stride + tl.program_id(1) * slice_stride
    there = inside[:, None] & (mix < MIXES)[None, :]
    tl.store(at[:, None] + (mix * mix_stride)[None, :], total, there)
    tl.store(at + MIXES * mix_stride, tl.sum(square, 1), inside)


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
        and nothing beyond. Slices are next to each other in memory.
    """
    tokens, n, d = h.shape
    chosen = config(tokens, d, h.dtype)
    mixes = fn.shape[0]
    width = max(16, triton.next_power_of_2(mixes + 1))
    slices = triton.cdiv(d, chosen.columns * chosen.chunks)
    partial = scratch((tokens, width, slices), fn.dtype, fn.device).transpose(1, 2)
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
        *partial.stride(),
        N=n,
        D=d,
        MIXES=mixes,
        P=width,
        EXPAND=out is not None,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        FOLLOWED=chained(1, target_of(h.device)),
        num_warps=chosen.num_warps,
        enable_fp_fusion=out is None,
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
    numbers = ("tokens", "chunks", "token_stride", "slice_stride", "mix_stride")
    types = {"h": f"*{dtype}", "fn": "*fp32", "partial": "*fp32", **dict.fromkeys(numbers, "i32")}
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
        "FOLLOWED": chained(1, target),
    }
    return Build(
        f"{dtype} D {d}, {mixes} mixes{', expand' * expands}",
        mix_kernel,
        types,
        absent | sizes,
        num_warps=chosen.num_warps,
        matrix=dtype != "fp32" and "bf16",
        fp_fusion=not expands,
        spills=64 if target.narrow else 16,
    )

"""Expansion of a sublayer's output into the streams, in Triton.

The grid is (blocks of ROWS tokens, blocks of COLUMNS channels); every value is read and written
once.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.hyper_connection.config import choose_expand_config
from anymla.ops.hyper_connection.triton_gates import (
    expand,
    load_columns,
    load_streams,
    placed,
)
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch

_WARPS = 4


@triton.jit(do_not_specialize=["tokens"])
def expand_kernel(
    u,
    h,
    post,
    comb,
    out,
    tokens,
    token_stride,
    stream_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile of channels in all N streams; strides are those of h."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    rows = token.to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = inside[:, None] & (d < D)[None, :]
    streams = load_streams(h, rows, d, mask, token_stride, stream_stride, N)
    before = tl.load(u + (rows * D)[:, None] + d[None, :], mask, other=0.0)
    post_gates = load_columns(post, rows, inside, N)
    comb_gates = load_columns(comb, rows, inside, N * N)
    streams = expand(before, streams, post_gates, comb_gates, N)
    for j in tl.static_range(N):
        tl.store(out + (rows * (N * D) + j * D)[:, None] + d[None, :], streams[j], mask)


def hc_post(u: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Backend of ``interface.hc_post`` in Triton; see its contract."""
    tokens, n, d = h.shape
    out = torch.empty((tokens, n, d), dtype=h.dtype, device=h.device)
    if not out.numel():
        return out
    h = placed(h)
    launch = _expansion(tokens, n, d, h.stride(), h.device)
    launch(u.contiguous(), h, post.contiguous(), comb.contiguous(), out)
    return out


@functools.lru_cache(LAUNCHES)
def _expansion(
    tokens: int, n: int, d: int, strides: tuple[int, ...], device: torch.device
) -> PreparedLaunch:
    chosen = choose_expand_config(d)
    return PreparedLaunch(
        expand_kernel,
        (cdiv(tokens, chosen.rows), cdiv(d, chosen.columns)),
        tokens,
        *strides[:2],
        N=n,
        D=d,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        num_warps=_WARPS,
        **pdl_launch(device),
    )

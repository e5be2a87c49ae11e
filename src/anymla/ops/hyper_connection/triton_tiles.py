"""The N streams of a block of tokens inside kernels, as a tuple of tiles."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# What kernels call the strides of streams [T, N, D].
STREAM_STRIDES = ("token_stride", "stream_stride")


@triton.jit
def load_streams(h, rows, d, mask, token_stride, stream_stride, N: tl.constexpr):
    """Channels d [c] of the N streams of tokens rows [r]: N tiles [r, c] as stored."""
    at = (rows * token_stride)[:, None] + d[None, :]
    streams = ()
    for i in tl.static_range(N):
        streams += (tl.load(h + i * stream_stride + at, mask, other=0.0),)
    return streams


@triton.jit
def expand(u, streams, post, comb, N: tl.constexpr):
    """h'_j = post_j u + sum_i comb_ij h_i of tiles [r, c], rounded once to their dtype."""
    wide = u.to(tl.float32)
    expanded = ()
    for j in tl.static_range(N):
        total = post[j][:, None] * wide
        for i in tl.static_range(N):
            total += comb[i * N + j][:, None] * streams[i].to(tl.float32)
        expanded += (total.to(u.dtype),)
    return expanded


def placed(h: Tensor) -> Tensor:
    """Streams [T, N, D] whose channels are next to each other; the rest may be anywhere."""
    return h if h.stride(2) == 1 else h.contiguous()

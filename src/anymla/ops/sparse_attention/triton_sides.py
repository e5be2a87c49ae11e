"""The two orders of attention's products inside kernels.

Either heads x rows, or, with ``KEYS_FIRST``, rows x heads, which pads no heads where a matrix
instruction wants 64 rows. Scores are [heads, rows] or [rows, heads], sums of weighed rows [heads,
channels] or [channels, heads].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_heads(
    q, stride, heads, H, FIRST: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Channels of q as float32: [heads, WIDTH], or [WIDTH, heads]."""
    channel = FIRST + tl.arange(0, WIDTH)
    if KEYS_FIRST:
        at = channel[:, None] + heads[None, :] * stride
        inside = (heads < H)[None, :] & (channel < CHANNELS)[:, None]
    else:
        at = heads[:, None] * stride + channel[None, :]
        inside = (heads < H)[:, None] & (channel < CHANNELS)[None, :]
    return tl.load(q + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def largest_of(x, KEYS_FIRST: tl.constexpr):
    """The largest magnitude of every head."""
    return tl.max(tl.abs(x), 0 if KEYS_FIRST else 1)


@triton.jit
def across(x, KEYS_FIRST: tl.constexpr):
    """Values of the heads, to be broadcast over the other axis."""
    if KEYS_FIRST:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def score(q, rows, scores, KEYS_FIRST: tl.constexpr):
    """Scores, with those of one more tile of channels."""
    if KEYS_FIRST:
        return tl.dot(rows, q, scores, input_precision="ieee")
    else:
        return tl.dot(q, tl.trans(rows), scores, input_precision="ieee")


@triton.jit
def weigh(p, rows, sums, decay, KEYS_FIRST: tl.constexpr):
    """Sums that decay, with a step's rows weighed by p."""
    if KEYS_FIRST:
        return tl.dot(tl.trans(rows), p, sums * decay, input_precision="ieee")
    else:
        return tl.dot(p, rows, sums * decay, input_precision="ieee")


@triton.jit
def zeros(BH: tl.constexpr, WIDTH: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Zeros for the heads by WIDTH others."""
    if KEYS_FIRST:
        return tl.zeros([WIDTH, BH], tl.float32)
    else:
        return tl.zeros([BH, WIDTH], tl.float32)


@triton.jit
def store_heads(
    to, stride, heads, H, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Write channels FIRST .. FIRST + WIDTH of the heads, as far as there are VALUES."""
    channel = FIRST + tl.arange(0, WIDTH)
    if KEYS_FIRST:
        at = channel[:, None] + heads[None, :] * stride
        inside = (heads < H)[None, :] & (channel < VALUES)[:, None]
    else:
        at = heads[:, None] * stride + channel[None, :]
        inside = (heads < H)[:, None] & (channel < VALUES)[None, :]
    tl.store(to + at, x.to(to.dtype.element_ty), mask=inside)

"""Engram's gate in Triton: add the value to the streams, as much as each agrees with its key.

The grid is (streams, tokens): neighbouring CTAs read the same token's value, which all but the
first find in the L2 cache. Loads of stream, key and value are all issued before the first is used,
and the values stay in registers, so everything is read and written once. (CTAs of 2, 4, 8 and 16
tokens, which keep the weights, take 1 to 8 % longer for 4,096 tokens of V4.1-Flash on an H100.)
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_cast import widen
from anymla.ops import device as device_facts
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch
from anymla.ops.engram.config import choose_gate_config
from anymla.ops.engram.reference import LEAST_DOT
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch


@triton.jit
def _load_chunks(row, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load a row's D channels as tiles of WIDTH."""
    chunks = ()
    for first in tl.static_range(0, D, WIDTH):
        at = first + tl.arange(0, WIDTH)
        chunks += (tl.load(row + at, at < D, other=0.0),)
    return chunks


@triton.jit
def _inverse_rms(squares, eps, D: tl.constexpr):
    return tl.rsqrt(tl.sum(squares, 0) / D + eps)


@triton.jit
def engram_gate_kernel(
    h,
    projected,
    weight,
    out,
    token_stride,
    stream_stride,
    eps,
    N: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one stream of a token; strides are those of h."""
    stream = tl.program_id(0) % N
    row = (tl.program_id(0) // N).to(tl.int64)
    weights = _load_chunks(weight + stream * D, D, WIDTH)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    parts = projected + row * ((N + 1) * D)
    state = _load_chunks(h + row * token_stride + stream * stream_stride, D, WIDTH)
    key = _load_chunks(parts + stream * D, D, WIDTH)
    value = _load_chunks(parts + N * D, D, WIDTH)
    products = tl.zeros((WIDTH,), tl.float32)
    state_squares = tl.zeros((WIDTH,), tl.float32)
    key_squares = tl.zeros((WIDTH,), tl.float32)
    for i in tl.static_range(len(state)):
        x, k = widen(state[i]), widen(key[i])
        products += x * weights[i] * k
        state_squares += x * x
        key_squares += k * k
    dot = tl.sum(products, 0) * (D**-0.5)
    dot = dot * _inverse_rms(state_squares, eps, D) * _inverse_rms(key_squares, eps, D)
    size = tl.abs(dot)
    # A NaN is not below LEAST, so it stays NaN.
    root = tl.sqrt(tl.where(size < LEAST, LEAST, size))
    gate = tl.sigmoid(tl.where(dot < 0, -root, root))
    target = out + row * (N * D) + stream * D
    for i in tl.static_range(len(state)):
        at = i * WIDTH + tl.arange(0, WIDTH)
        added = widen(state[i]) + gate * widen(value[i])
        tl.store(target + at, added.to(out.dtype.element_ty), at < D)


def engram_gate(h: Tensor, projected: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Backend of ``interface.engram_gate`` in Triton; see its contract."""
    out = torch.empty_like(h, memory_format=torch.contiguous_format)
    if not h.numel():
        return out
    h = h if h.stride(2) == 1 else h.contiguous()
    launch = _gating(tuple(h.shape), h.stride()[:2], eps, weight.is_contiguous(), h.device)
    launch(h, projected.contiguous(), weight.contiguous(), out)
    return out


@functools.lru_cache(LAUNCHES)
def _gating(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    eps: float,
    pdl: bool,
    device: torch.device,
) -> PreparedLaunch:
    """Prepare a launch for streams; ``pdl`` is False if the weight is a copy just being made."""
    tokens, n, d = shape
    config = choose_gate_config(d, device_facts.target_of(device))
    return PreparedLaunch(
        engram_gate_kernel,
        (n * tokens,),
        *strides,
        eps,
        N=n,
        D=d,
        WIDTH=config.width,
        LEAST=LEAST_DOT,
        num_warps=config.num_warps,
        **(pdl_launch(device) if pdl else {"PDL": False}),
    )

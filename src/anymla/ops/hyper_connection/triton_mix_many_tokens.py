"""The mixes of a site for many tokens in Triton: bfloat16 streams times weights in three planes.

Unlike in ``triton_mix``, operands go from shared memory to the tensor cores unconverted: an earlier
kernel splits the float32 weights into three bfloat16 planes that sum to them. ``triton_expand``
computes and stores the streams that leave the previous site beforehand: one kernel for both is
slower on an H200 (131 to 174 us for 4,096 tokens, where two kernels take 127).

Grid: (blocks of tokens, slices of D).

            D ->  | slice | slice | ...
    ROWS tokens   |  N streams of ROWS x SLICE times 3 planes, in chunks -> partial [slice, P, T]

A step's sums are added to the total with rounding, see ``formats.triton_dot``. Each step waits for
its products; otherwise Triton 3.6 refills a buffer that is still an operand. Streams are read from
there again for their squares; each thread sums its own.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_dot import split_in_three
from anymla.ops._sizes import next_power_of_2
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.device import target_of
from anymla.ops.hyper_connection.config import (
    choose_many_tokens_config,
)
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch
from anymla.ops.streams import scratch

_PLANES = 3
_SPLIT = 1024


@triton.jit
def split_kernel(
    fn,
    planes,
    MIXES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Split SPLIT weights of a mix into three planes [3, P, WIDTH]; zeros beyond MIXES."""
    mix = tl.program_id(0)
    at = tl.program_id(1) * SPLIT + tl.arange(0, SPLIT)
    weights = tl.load(fn + mix * WIDTH + at, at < tl.where(mix < MIXES, WIDTH, 0), other=0.0)
    parts = split_in_three(weights)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    plane = tl.num_programs(0) * WIDTH
    for i in tl.static_range(3):
        tl.store(planes + i * plane + mix * WIDTH + at, parts[i], at < WIDTH)


@triton.jit
def _load_plane(planes, plane, stream, d, N: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """Load channels d [c] of a stream's weights in one plane, [c, P]."""
    mix = tl.arange(0, P)
    at = planes + plane * (P * N * D) + (mix * (N * D) + stream * D)[None, :] + d[:, None]
    return tl.load(at, (d < D)[:, None], other=0.0)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def many_kernel(
    h,
    planes,
    partial,
    tokens,
    chunks,
    token_stride,
    stream_stride,
    N: tl.constexpr,
    D: tl.constexpr,
    MIXES: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute partial mixes and squares of a block of tokens and a slice of D.

    Strides are those of h.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    rows = (token.to(tl.int64) * token_stride)[:, None]
    first = tl.program_id(1) * (chunks * COLUMNS)
    total = tl.zeros((ROWS, P), tl.float32)
    square = tl.zeros((ROWS, COLUMNS // 8), tl.float32)
    for step in tl.range(chunks * N, num_stages=STAGES):
        d = first + step // N * COLUMNS + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (d < D)[None, :]
        stream = tl.load(h + rows + (step % N * stream_stride + d)[None, :], mask, 0.0)
        part = tl.dot(stream, _load_plane(planes, 2, step % N, d, N, D, P))
        part = tl.dot(stream, _load_plane(planes, 1, step % N, d, N, D, P), part)
        total += tl.dot(stream, _load_plane(planes, 0, step % N, d, N, D, P), part)
        wide = tl.reshape(stream.to(tl.float32), (ROWS, COLUMNS // 8, 8))
        square += tl.sum(wide * wide, 2)
    mix = tl.arange(0, P)
    at = partial + tl.program_id(1).to(tl.int64) * P * tokens + token
    tl.store(at + MIXES * tokens, tl.sum(square, 1), inside)
    there = inside[:, None] & (mix < MIXES)[None, :]
    tl.store(at[:, None] + (mix * tokens)[None, :], total, there)


def launch_many(h: Tensor, fn: Tensor) -> Tensor:
    """Compute partial mixes as ``triton_mix.launch_mix`` does, for many tokens."""
    in_order = fn.is_contiguous()
    shape = h.shape, h.stride(), fn.shape[0], in_order, h.device
    split, multiply, partial_shape, planes_shape = _launches(*shape)
    partial = scratch(partial_shape, fn.dtype, fn.device)
    planes = scratch(planes_shape, h.dtype, h.device)
    split(fn if in_order else fn.contiguous(), planes)
    multiply(h, planes, partial)
    return partial.permute(2, 0, 1)


@functools.lru_cache(LAUNCHES)
def _launches(
    shape: tuple[int, int, int],
    strides: tuple[int, ...],
    mixes: int,
    in_order: bool,
    device: torch.device,
) -> tuple[PreparedLaunch, PreparedLaunch, tuple[int, int, int], tuple[int, int, int]]:
    """Prepare both launches for a shape of streams; return shapes of partial mixes and planes."""
    tokens, n, d = shape
    chosen = choose_many_tokens_config(tokens, d, target_of(device))
    width = max(16, next_power_of_2(mixes + 1))
    slices, pdl = cdiv(d, chosen.slice), pdl_launch(device)
    split = PreparedLaunch(
        split_kernel,
        (width, cdiv(n * d, _SPLIT)),
        MIXES=mixes,
        WIDTH=n * d,
        SPLIT=_SPLIT,
        **(pdl if in_order else {"PDL": False}),
    )
    multiply = PreparedLaunch(
        many_kernel,
        (cdiv(tokens, chosen.rows), slices),
        tokens,
        chosen.slice // chosen.columns,
        *strides[:2],
        N=n,
        D=d,
        MIXES=mixes,
        P=width,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        STAGES=chosen.num_stages,
        num_warps=chosen.num_warps,
        **pdl,
    )
    return split, multiply, (slices, width, tokens), (_PLANES, width, n * d)

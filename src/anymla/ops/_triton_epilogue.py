"""Triton device function and kernel that rotate heads back and quantise them to FP8.

store_quantized                 a kernel's finished heads, before they are stored
inverse_rope_quantize_kernel    heads in memory; grid: (blocks of heads, quant blocks of a head), so
that only the CTAs of rotated channels read angles
"""

# mypy: ignore-errors

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK, HEAD_AMAX_FLOOR
from anymla.formats.triton_cast import exp2_int, fp32_to_e4m3, scale_exponent, widen
from anymla.ops._epilogue import InverseRopeQuant, QuantizedOut
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.device import target_of
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch

_BLOCK = tl.constexpr(FP8_BLOCK)
_FLOOR = tl.constexpr(HEAD_AMAX_FLOOR)
# Heads per CTA of the kernel, for blocks of 128: 16 values per thread, or 4 for low latency.
_ROWS = 16
_FEW_ROWS = 4
# Number of heads up to which a CTA has _FEW_ROWS of them.
_FEW_HEADS = 1024


@triton.jit
def store_quantized(
    value, first, token, head, H, codes_ptr, scales_ptr, positions_ptr, table_ptr, angles,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROPE_DIM: tl.constexpr,
    TYPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rotate heads back, quantise and store them, as the bytes of ``inverse_rope_quantize_kernel``.

    Args:
        value: float32 [ROWS, WIDTH], channels from ``first`` on of heads from ``head`` on of one
            token.
        first: index of the first channel, a multiple of 128 like WIDTH and D.
        token: index of the token.
        head: index of the first head; heads from H on are not stored.
        H: number of heads.
        codes_ptr: codes to be written, uint8 [T, H, D].
        scales_ptr: scales to be written, float32 [T, H, D / 128].
        positions_ptr: positions of the tokens, int64 [T].
        table_ptr: float32 [angles, ROPE_DIM], cosines then sines.
        angles: number of rows in the table.
        ROWS: number of heads, a power of two.
        WIDTH: number of channels, a power of two; channels from D on are not stored.
        D: channels per head.
        ROPE_DIM: number of channels, the last of a head, that rotate with the position.
        TYPE: type to which heads are rounded before they rotate.
        NATIVE: True to convert by instructions; see ``triton_cast``.
    """
    BLOCKS: tl.constexpr = WIDTH // _BLOCK
    PAIRS: tl.constexpr = _BLOCK // 2
    number = tl.arange(0, ROWS * BLOCKS)
    row = head + number // BLOCKS
    start = first + number % BLOCKS * _BLOCK
    inside = (row < H) & (start < D)
    value = widen(value.to(TYPE))
    even, odd = tl.split(tl.reshape(value, (ROWS * BLOCKS, PAIRS, 2)))
    position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), angles - 1)
    pair = (start[:, None] - (D - ROPE_DIM)) // 2 + tl.arange(0, PAIRS)[None, :]
    rotates = inside[:, None] & (pair >= 0) & (pair < ROPE_DIM // 2)
    at = table_ptr + position * ROPE_DIM + pair
    cos = tl.load(at, rotates, other=1.0)
    sin = tl.load(at + ROPE_DIM // 2, rotates, other=0.0)
    touched = (start + _BLOCK > D - ROPE_DIM)[:, None]
    rotated = tl.where(touched, even * cos + odd * sin, even)
    odd = tl.where(touched, odd * cos - even * sin, odd)
    even = rotated
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
    exponent = scale_exponent(largest, 448.0, _FLOOR)
    # An infinite value has exponent 128, whose inverse is not a normal number.
    inverse = exp2_int(tl.maximum(-exponent, -126))[:, None]
    scaled = tl.reshape(tl.join(even * inverse, odd * inverse), (ROWS * BLOCKS, _BLOCK))
    place = token.to(tl.int64) * H + row
    at = (place * D + start)[:, None] + tl.arange(0, _BLOCK)[None, :]
    tl.store(codes_ptr + at, fp32_to_e4m3(scaled, NATIVE), inside[:, None])
    tl.store(scales_ptr + place * (D // _BLOCK) + start // _BLOCK, exp2_int(exponent), inside)


@triton.jit
def _angles(
    positions, table, heads, inside, first, angles, HEADS, D, ROPE_DIM, PAIRS: tl.constexpr
):
    """Load cosines and sines [n, PAIRS] of the pairs from channel ``first`` on; 1 and 0 outside."""
    position = tl.load(positions + heads // HEADS, inside, other=0)
    position = tl.minimum(tl.maximum(position, 0), angles - 1)
    pair = (first - (D - ROPE_DIM)) // 2 + tl.arange(0, PAIRS)
    rotates = inside[:, None] & ((pair >= 0) & (pair < ROPE_DIM // 2))[None, :]
    at = table + (position * ROPE_DIM)[:, None] + pair[None, :]
    cos = tl.load(at, rotates, other=1.0)
    sin = tl.load(at + ROPE_DIM // 2, rotates, other=0.0)
    return cos, sin


@triton.jit
def _load_pairs(o, at, mask):
    """Load even and odd channels, as float32, of the pairs at ``at``; 16-bit pairs in one load."""
    if o.dtype.element_ty == tl.float32:
        even = tl.load(o + 2 * at, mask, other=0.0)
        odd = tl.load(o + 2 * at + 1, mask, other=0.0)
    else:
        both = tl.load(o.to(tl.pointer_type(tl.uint32)) + at, mask, other=0)
        if o.dtype.element_ty == tl.bfloat16:
            even = (both << 16).to(tl.float32, bitcast=True)
            odd = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            even = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            odd = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return even, odd


@triton.jit(do_not_specialize=["count", "angles"])
def inverse_rope_quantize_kernel(
    o,
    positions,
    table,
    codes,
    scales,
    count,
    angles,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    FLOOR: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate back and quantise one block of WIDTH channels of ROWS of the ``count`` heads."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    PER_HEAD: tl.constexpr = (D + WIDTH - 1) // WIDTH
    PAIRS: tl.constexpr = WIDTH // 2
    head = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    inside = head < count
    first = block * WIDTH
    pair = tl.arange(0, PAIRS)
    mask = inside[:, None]
    if D % WIDTH > 0:
        mask = mask & (pair < D // 2 - block * PAIRS)[None, :]
    at = (head.to(tl.int64) * (D // 2) + block * PAIRS)[:, None] + pair[None, :]
    even, odd = _load_pairs(o, at, mask)
    if first + WIDTH > D - ROPE_DIM:
        cos, sin = _angles(positions, table, head, inside, first, angles, HEADS, D, ROPE_DIM, PAIRS)
        rotated = even * cos + odd * sin
        odd = odd * cos - even * sin
        even = rotated
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
    exponent = scale_exponent(largest, 448.0, FLOOR)
    # An infinite value has exponent 128, whose inverse is no normal number.
    inverse = exp2_int(tl.maximum(-exponent, -126))[:, None]
    # Convert neighbours together and store them as bytes: if shifts combine them to 16-bit numbers,
    # the ptxas of Triton 3.6 loses every second even channel.
    value = tl.reshape(tl.join(even * inverse, odd * inverse), (ROWS, WIDTH))
    channel = first + tl.arange(0, WIDTH)
    mask = inside[:, None]
    if D % WIDTH > 0:
        mask = mask & (channel < D)[None, :]
    at = (head.to(tl.int64) * D)[:, None] + channel[None, :]
    tl.store(codes + at, fp32_to_e4m3(value, NATIVE), mask)
    tl.store(scales + head.to(tl.int64) * PER_HEAD + block, exp2_int(exponent), inside)


def inverse_rope_quantize(
    o: Tensor, to: QuantizedOut, block: int = FP8_BLOCK, floor: float = HEAD_AMAX_FLOOR
) -> None:
    """Launch the kernel that rotates heads o [T, H, D] back and quantises them into ``to``."""
    tokens, heads, d = o.shape
    if not o.numel():
        return
    positions, table = to.rope.positions, to.rope.table
    rule = block, floor, to.native
    launch = _inverse_rope((tokens, heads, d), table.shape, rule, o.device)
    launch(_aligned(o), positions, table, to.codes, to.scales)


@functools.lru_cache(LAUNCHES)
def _inverse_rope(
    shape: tuple[int, int, int],
    table: tuple[int, int],
    rule: tuple[int, float, bool],
    device: torch.device,
) -> PreparedLaunch:
    """Prepare a launch for (tokens, heads, channels), and (quant block, its floor, native)."""
    (tokens, heads, d), (block, floor, native) = shape, rule
    rows = _ROWS if tokens * heads > _FEW_HEADS else _FEW_ROWS
    rows *= FP8_BLOCK // block
    return PreparedLaunch(
        inverse_rope_quantize_kernel,
        (cdiv(tokens * heads, rows), cdiv(d, block)),
        tokens * heads,
        table[0],
        HEADS=heads,
        D=d,
        ROPE_DIM=table[1],
        FLOOR=floor,
        WIDTH=block,
        ROWS=rows,
        NATIVE=native,
        **pdl_launch(device),
    )


def inverse_rope_fp8_quant(
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    n_groups: int,
    quant_block: int = FP8_BLOCK,
    amax_floor: float = HEAD_AMAX_FLOOR,
) -> tuple[Tensor, Tensor]:
    """Backend of ``linear.inverse_rope_fp8_quant`` in Triton; see its contract."""
    epilogue = InverseRopeQuant(positions, cos_sin_cache, n_groups)
    to = QuantizedOut.allocate(o, epilogue, target_of(o.device).native_e4m3, quant_block)
    inverse_rope_quantize(o, to, quant_block, amax_floor)
    return to.results(n_groups)


def _aligned(o: Tensor) -> Tensor:
    """Return o contiguous with an even storage offset, so that pairs of channels load as one."""
    o = o.contiguous()
    return o if o.storage_offset() % 2 == 0 else o.clone()

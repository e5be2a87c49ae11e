"""Cache rows inside Triton kernels: addresses, decoders and encoders of every layout.

A kernel takes the cache as one uint8 pointer with its page stride in bytes, the entries of a page
as ``ENTRIES`` and the layout's numbers as ``CODEC`` (a ``RowCodec`` passed as a constexpr):

    values, scales = entry_offsets(slots, valid, page_stride, ENTRIES, CODEC)  # int64 [N], bytes
    x = load_rows(cache, values, scales, valid, CODEC, NATIVE)   # float32 [N, channels]
    store_rows(cache, values, scales, valid, x, CODEC, NATIVE)   # the bytes that formats gives

``load_channels`` reads a part of the channels, for kernels that cannot hold whole rows. Kernels
read a codec's fields by ``getattr``, because Triton 3.3 allows no attribute of a constexpr.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.e2m1 import E2M1_MAX
from anymla.formats.e4m3 import E4M3_MAX
from anymla.formats.mxfp4 import MXFP4_AMAX_FLOOR, MXFP4_BLOCK
from anymla.formats.nvfp4 import NVFP4_AMAX_FLOOR, NVFP4_BLOCK
from anymla.formats.page_layout import get_layout
from anymla.formats.pages import pages_of
from anymla.formats.records import (
    KV_AMAX_FLOOR,
    RowFp8Layout,
    RowMxfp4Layout,
    RowNvfp4Layout,
    SplitFp8Layout,
)
from anymla.formats.triton_cast import (
    e2m1_to_fp32,
    e4m3_to_fp16,
    e4m3_to_fp32,
    exp2_int,
    exponent_to_ue8m0,
    fp32_to_e2m1,
    fp32_to_e4m3,
    fp32_to_scaled_e2m1,
    scale_exponent,
    ue8m0_to_fp32,
    widen,
)


@dataclasses.dataclass(frozen=True)
class RowCodec:
    """Constants of a layout that a kernel needs at compile time.

    Attributes:
        kind: kind of record: "split_fp8" (main records), "row_fp8", "row_mxfp4", "row_nvfp4",
            "bf16" or "fp32".
        channels: width of a row.
        nope: number of channels with codes; the others are bfloat16 ("split_fp8") or none.
        block: number of channels that share a scale.
        data_bytes: bytes of an entry's values.
        scale_bytes: bytes of an entry's scales, 0 if there are none.
        code_max: largest magnitude of a code.
        floor: lower bound of a block's largest magnitude.
        interleaved: True if an entry's scales follow its values, False if they have a plane of
            their own.
    """

    kind: str
    channels: int
    nope: int
    block: int
    data_bytes: int
    scale_bytes: int
    code_max: float = 0.0
    floor: float = 0.0
    interleaved: bool = False


@functools.cache
def row_codec(layout_id: str) -> RowCodec:
    """Return the codec of a layout.

    Raises:
        ValueError: the layout is unknown.
    """
    layout = get_layout(layout_id)
    width, data, scales = layout.channels, layout.data_bytes, layout.scale_bytes
    if isinstance(layout, SplitFp8Layout):
        assert scales == width // layout.block
        kind, nope, block, code_max, floor = (
            "split_fp8", layout.nope, layout.block, E4M3_MAX, KV_AMAX_FLOOR,
        )  # fmt: skip
    elif isinstance(layout, RowFp8Layout):
        kind, nope, block, code_max, floor = "row_fp8", width, width, E4M3_MAX, KV_AMAX_FLOOR
    elif isinstance(layout, RowMxfp4Layout):
        kind, nope, block, code_max, floor = (
            "row_mxfp4", width, MXFP4_BLOCK, E2M1_MAX, MXFP4_AMAX_FLOOR,
        )  # fmt: skip
    elif isinstance(layout, RowNvfp4Layout):
        kind, nope, block, code_max, floor = (
            "row_nvfp4", width, NVFP4_BLOCK, E2M1_MAX, NVFP4_AMAX_FLOOR,
        )  # fmt: skip
    else:
        kind = {torch.bfloat16: "bf16", torch.float32: "fp32"}[layout.dtype]
        nope, block, code_max, floor = width, width, 0.0, 0.0
    return RowCodec(
        kind, width, nope, block, data, scales, code_max, floor, interleaved=layout.interleaved
    )


def cache_bytes(k_cache: Tensor) -> tuple[Tensor, int, int, int]:
    """Convert a cache [P, B, row] or [P, B, 1, row] to the arguments of a kernel.

    Returns:
        A uint8 tensor with the cache's address, the page stride in bytes, P and B.
    """
    cache = pages_of(k_cache)
    if cache.shape[0] * cache.shape[1] >= 2**31:
        raise ValueError(f"a cache of {cache.shape[0]} pages of {cache.shape[1]} is not addressed")
    stride = cache.stride(0) * cache.element_size()
    whole = cache if cache.dtype == torch.uint8 else cache.view(torch.uint8)
    return whole, stride, cache.shape[0], cache.shape[1]


@triton.jit
def entry_offsets(slots, valid, page_stride, ENTRIES: tl.constexpr, CODEC: tl.constexpr):
    """Compute byte offsets, int64 [N], of the values and of the scales of entries.

    Slots [N] have any integer type; those that are not ``valid`` give the offsets of slot 0.
    """
    DATA: tl.constexpr = getattr(CODEC, "data_bytes")
    SCALES: tl.constexpr = getattr(CODEC, "scale_bytes")
    # Slots of a cache fit 31 bits, and without a sign division is a shift.
    known = tl.where(valid, slots, 0).to(tl.uint32)
    page = (known // ENTRIES).to(tl.int64) * page_stride
    offset = (known % ENTRIES).to(tl.int64)
    if getattr(CODEC, "interleaved"):
        values = page + offset * (DATA + SCALES)
        scales = values + DATA
    else:
        values = page + offset * DATA
        scales = page + offset * SCALES + ENTRIES * DATA
    return values, scales


@triton.jit
def load_rows(cache, values, scales, valid, CODEC: tl.constexpr, NATIVE: tl.constexpr):
    """Decode whole entries to float32 [N, channels], exactly; zeros where not ``valid``."""
    KIND: tl.constexpr = getattr(CODEC, "kind")
    CHANNELS: tl.constexpr = getattr(CODEC, "channels")
    NOPE: tl.constexpr = getattr(CODEC, "nope")
    if KIND == "split_fp8" and NOPE < CHANNELS:
        ROWS: tl.constexpr = values.shape[0]
        BLOCK: tl.constexpr = getattr(CODEC, "block")
        BLOCKS: tl.constexpr = CHANNELS // BLOCK
        CODED: tl.constexpr = NOPE // BLOCK
        # Use one tile for codes and bfloat16: each thread loads either of the two.
        block = tl.arange(0, BLOCKS)
        channel = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        coded = (block < CODED)[None, :, None]
        there = valid[:, None, None]
        at = cache + values[:, None, None]
        codes = tl.load(at + channel[None, :, :], mask=there & coded, other=0)
        rope = tl.load(
            at.to(tl.pointer_type(tl.bfloat16)) + (channel - NOPE // 2)[None, :, :],
            mask=there & (block >= CODED)[None, :, None],
            other=0.0,
        )
        scale = tl.load(
            cache + scales[:, None] + block[None, :],
            mask=valid[:, None] & (block < CODED)[None, :],
            other=0,
        )
        nope = e4m3_to_fp32(codes, NATIVE) * ue8m0_to_fp32(scale)[:, :, None]
        x = tl.where(coded, nope, rope.to(tl.float32))
        return tl.reshape(x, (ROWS, CHANNELS))
    else:
        return load_channels(cache, values, scales, valid, 0, CHANNELS, CODEC, NATIVE, tl.float32)


@triton.jit
def load_channels(
    cache,
    values,
    scales,
    valid,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    CODEC: tl.constexpr,
    NATIVE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Decode channels START .. START + WIDTH - 1 to [N, WIDTH]; zeros where not ``valid``.

    WIDTH is a power of two, START and WIDTH are multiples of the block, and a part of a split row
    is all codes or all bfloat16. float32 is exact. So is float16 for e4m3 codes of main records
    with scales 2^-15 .. 2^7, where it takes half the instructions (their bfloat16 channels are
    rounded), and for NVFP4.
    """
    KIND: tl.constexpr = getattr(CODEC, "kind")
    NOPE: tl.constexpr = getattr(CODEC, "nope")
    BLOCK: tl.constexpr = getattr(CODEC, "block")
    ROWS: tl.constexpr = values.shape[0]
    channel = tl.arange(0, WIDTH)
    there = valid[:, None]
    at = (cache + values)[:, None]
    if KIND == "bf16" or (KIND == "split_fp8" and START >= NOPE):
        # The offset counts bfloat16 from the row's start, of which nope bytes are codes.
        FIRST: tl.constexpr = START - (NOPE // 2 if KIND == "split_fp8" else 0)
        x = tl.load(
            at.to(tl.pointer_type(tl.bfloat16)) + (FIRST + channel)[None, :], mask=there, other=0.0
        )
        return x.to(tl.float32).to(DTYPE)
    elif KIND == "fp32":
        x = tl.load(
            at.to(tl.pointer_type(tl.float32)) + (START + channel)[None, :], mask=there, other=0.0
        )
        return x.to(DTYPE)
    elif KIND == "split_fp8":
        tl.static_assert(START + WIDTH <= NOPE)
        BLOCKS: tl.constexpr = WIDTH // BLOCK
        codes = tl.load(at + (START + channel)[None, :], mask=there, other=0)
        block = START // BLOCK + tl.arange(0, BLOCKS)
        scale = tl.load((cache + scales)[:, None] + block[None, :], mask=there, other=0)
        scale = ue8m0_to_fp32(scale)
        if DTYPE == tl.float16:
            x = e4m3_to_fp16(codes, NATIVE)
            scale = scale.to(tl.float16)
        else:
            x = e4m3_to_fp32(codes, NATIVE)
        x = tl.reshape(x, (ROWS, BLOCKS, BLOCK)) * scale[:, :, None]
        return tl.reshape(x, (ROWS, WIDTH)).to(DTYPE)
    elif KIND == "row_fp8":
        codes = tl.load(at + (START + channel)[None, :], mask=there, other=0)
        scale = tl.load((cache + scales).to(tl.pointer_type(tl.float32)), mask=valid, other=0.0)
        return (e4m3_to_fp32(codes, NATIVE) * scale[:, None]).to(DTYPE)
    else:
        tl.static_assert(KIND == "row_mxfp4" or KIND == "row_nvfp4")
        BLOCKS: tl.constexpr = WIDTH // BLOCK
        byte = START // 2 + tl.arange(0, WIDTH // 2)
        packed = tl.load(at + byte[None, :], mask=there, other=0)
        x = tl.join(e2m1_to_fp32(packed & 15), e2m1_to_fp32(packed >> 4))
        block = START // BLOCK + tl.arange(0, BLOCKS)
        scale = tl.load((cache + scales)[:, None] + block[None, :], mask=there, other=0)
        scale = ue8m0_to_fp32(scale) if KIND == "row_mxfp4" else e4m3_to_fp32(scale, NATIVE)
        x = tl.reshape(x, (ROWS, BLOCKS, BLOCK)) * scale[:, :, None]
        return tl.reshape(x, (ROWS, WIDTH)).to(DTYPE)


@triton.jit
def block_exponent(blocks, CODEC: tl.constexpr):
    """Compute scale exponents int32 [...] of float32 blocks [..., n]; 128 for NaN or infinity."""
    CODE_MAX: tl.constexpr = getattr(CODEC, "code_max")
    FLOOR: tl.constexpr = getattr(CODEC, "floor")
    # Compare magnitudes as integers, which sort in the same order and keep a NaN as the largest.
    magnitude = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(magnitude, len(blocks.shape) - 1)
    exponent = scale_exponent(top.to(tl.float32, bitcast=True), CODE_MAX, FLOOR)
    return tl.where(top >= 0x7F800000, 128, exponent)


@triton.jit
def nvfp4_scales(blocks, CODEC: tl.constexpr, NATIVE: tl.constexpr):
    """Compute scale bytes uint8 [...] of float32 blocks [..., n], and the divisors, float32 [...].

    Divisors are the decoded scales; a block that is not finite has divisor NaN and scale 448.
    """
    CODE_MAX: tl.constexpr = getattr(CODEC, "code_max")
    FLOOR: tl.constexpr = getattr(CODEC, "floor")
    magnitude = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(magnitude, len(blocks.shape) - 1)
    # For bfloat16 magnitudes the product gets the same code as the quotient, ties included.
    amax = tl.maximum(top.to(tl.float32, bitcast=True), FLOOR)
    codes = fp32_to_e4m3(amax * (1.0 / CODE_MAX), NATIVE)
    finite = top < 0x7F800000
    step = tl.where(finite, e4m3_to_fp32(codes, NATIVE), 448.0)
    return tl.where(finite, codes, 0x7F).to(tl.uint8), step


@triton.jit
def store_tail(cache, values, valid, tail, CODEC: tl.constexpr):
    """Store the channels [N, channels - nope] of a "split_fp8" row that are not codes."""
    NOPE: tl.constexpr = getattr(CODEC, "nope")
    CHANNELS: tl.constexpr = getattr(CODEC, "channels")
    channel = NOPE // 2 + tl.arange(0, CHANNELS - NOPE)
    at = (cache + values)[:, None].to(tl.pointer_type(tl.bfloat16)) + channel[None, :]
    tl.store(at, tail.to(tl.bfloat16), mask=valid[:, None])


@triton.jit
def store_rows(
    cache,
    values,
    scales,
    valid,
    x,
    CODEC: tl.constexpr,
    NATIVE: tl.constexpr,
    TAIL: tl.constexpr = True,
):
    """Encode float32 rows x [N, channels] and store them at the entries that are ``valid``.

    Without TAIL, ``store_tail`` must store the channels of a "split_fp8" row that are not codes. If
    these are in memory, that is cheaper than to change the layout of whole rows.
    """
    KIND: tl.constexpr = getattr(CODEC, "kind")
    CHANNELS: tl.constexpr = getattr(CODEC, "channels")
    NOPE: tl.constexpr = getattr(CODEC, "nope")
    BLOCK: tl.constexpr = getattr(CODEC, "block")
    ROWS: tl.constexpr = x.shape[0]
    channel = tl.arange(0, CHANNELS)
    there = valid[:, None]
    at = (cache + values)[:, None]
    if KIND == "bf16":
        tl.store(
            at.to(tl.pointer_type(tl.bfloat16)) + channel[None, :], x.to(tl.bfloat16), mask=there
        )
    elif KIND == "fp32":
        tl.store(at.to(tl.pointer_type(tl.float32)) + channel[None, :], x, mask=there)
    else:
        BLOCKS: tl.constexpr = CHANNELS // BLOCK
        CODED: tl.constexpr = NOPE // BLOCK
        block = tl.arange(0, BLOCKS)
        rounded = x.to(tl.bfloat16)
        blocks = tl.reshape(widen(rounded), (ROWS, BLOCKS, BLOCK))
        if KIND != "row_nvfp4":
            exponent = block_exponent(blocks, CODEC)
            scaled = blocks * exp2_int(-tl.minimum(exponent, 126))[:, :, None]
            scaled = tl.reshape(scaled, (ROWS, CHANNELS))
        if KIND == "split_fp8":
            coded = (channel < NOPE)[None, :]
            tl.store(at + channel[None, :], fp32_to_e4m3(scaled, NATIVE), mask=there & coded)
            if TAIL and NOPE < CHANNELS:
                tl.store(
                    at.to(tl.pointer_type(tl.bfloat16)) + (channel - NOPE // 2)[None, :],
                    rounded,
                    mask=there & (channel >= NOPE)[None, :],
                )
            padded = tl.where((block < CODED)[None, :], exponent_to_ue8m0(exponent), 0)
            tl.store((cache + scales)[:, None] + block[None, :], padded.to(tl.uint8), mask=there)
        elif KIND == "row_fp8":
            tl.store(at + channel[None, :], fp32_to_e4m3(scaled, NATIVE), mask=there)
            # 2^128 is infinite: the exponent field of float32 is all ones.
            wide = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
            tl.store(
                (cache + scales).to(tl.pointer_type(tl.float32))[:, None] + block[None, :],
                wide,
                mask=there,
            )
        else:
            tl.static_assert(KIND == "row_mxfp4" or KIND == "row_nvfp4")
            if KIND == "row_mxfp4":
                codes = fp32_to_e2m1(scaled)
            else:
                bytes_, step = nvfp4_scales(blocks, CODEC, NATIVE)
                codes = fp32_to_scaled_e2m1(blocks, step[:, :, None])
            codes = tl.reshape(codes, (ROWS, CHANNELS // 2, 2))
            low, high = tl.split(codes)
            byte = tl.arange(0, CHANNELS // 2)
            tl.store(at + byte[None, :], low | (high << 4), mask=there)
            if KIND == "row_mxfp4":
                # The largest exponent of the format is 127; 255 would be NaN.
                bytes_ = exponent_to_ue8m0(tl.minimum(exponent, 127))
            tl.store((cache + scales)[:, None] + block[None, :], bytes_, mask=there)

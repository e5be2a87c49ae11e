"""Fast encoders and decoders of cache rows: few torch calls, the same bytes as ``formats``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from anymla.formats.e2m1 import E2M1_MAX, decode_e2m1, unpack_nibbles
from anymla.formats.e4m3 import E4M3_MAX, decode_e4m3
from anymla.formats.mxfp4 import MXFP4_AMAX_FLOOR, MXFP4_BLOCK
from anymla.formats.page_layout import (
    KV_AMAX_FLOOR,
    PageLayout,
    PlainRowsLayout,
    RowFp8Layout,
    RowMxfp4Layout,
    SplitFp8Layout,
)
from anymla.formats.ue8m0 import decode_ue8m0

# dtype of the values, device -> values by code, dtype that the codes are viewed as
Table = Callable[[torch.dtype, torch.device], tuple[Tensor, torch.dtype]]


def encode_rows(layout: PageLayout, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Encode rows [n, channels] to uint8 values [n, data_bytes] and scales [n, scale_bytes].

    The bytes are those of ``layout.encode`` for finite rows. A block with a NaN or an infinity
    decodes to non-finite values with either encoder.
    """
    if isinstance(layout, SplitFp8Layout):
        return _encode_split_fp8(layout, rows)
    if isinstance(layout, RowFp8Layout):
        return _encode_row_fp8(rows)
    if isinstance(layout, RowMxfp4Layout):
        return _encode_row_mxfp4(rows)
    return layout.encode(rows)


def decode_rows(layout: PageLayout, data: Tensor, scales: Tensor | None, out: Tensor) -> None:
    """Decode uint8 values [n, data_bytes] and scales [n, scale_bytes] into ``out`` [n, channels].

    Every code and every scale byte gives what ``layout.decode`` gives.
    """
    # A scale may leave float16's range where the product does not.
    precision = torch.float32 if out.dtype == torch.float16 else out.dtype
    if scales is None:
        assert isinstance(layout, PlainRowsLayout)
        out.copy_(data.view(layout.dtype))
    elif isinstance(layout, SplitFp8Layout):
        blocks = layout.nope // layout.block
        values = _look_up(_e4m3_pairs, data[:, : layout.nope].contiguous(), precision)
        scale = _look_up(_ue8m0_values, scales[:, :blocks].contiguous(), precision)
        nope = out[:, : layout.nope].unflatten(1, (blocks, layout.block))
        torch.mul(values.view(nope.shape), scale.unsqueeze(-1), out=nope)
        out[:, layout.nope :] = data[:, layout.nope :].view(torch.bfloat16)
    elif isinstance(layout, RowFp8Layout):
        wide = torch.promote_types(out.dtype, torch.float32)
        out.copy_(_look_up(_e4m3_pairs, data, wide) * scales.view(torch.float32))
    elif isinstance(layout, RowMxfp4Layout):
        values = _look_up(_e2m1_pairs, data, precision).unflatten(1, (-1, MXFP4_BLOCK))
        scale = _look_up(_ue8m0_values, scales, precision).unsqueeze(-1)
        torch.mul(values, scale, out=out.unflatten(1, (-1, MXFP4_BLOCK)))
    else:
        out.copy_(layout.decode(data, scales, out.dtype))


def _encode_split_fp8(layout: SplitFp8Layout, rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.bfloat16()
    blocks = rows[:, : layout.nope].float().unflatten(1, (-1, layout.block))
    byte = _scale_byte(blocks, E4M3_MAX, KV_AMAX_FLOOR)
    data = rows.new_empty((len(rows), layout.data_bytes), dtype=torch.uint8)
    codes = data[:, : layout.nope].view(torch.float8_e4m3fn).unflatten(1, (-1, layout.block))
    # A row of bfloat16 never exceeds 448 scales, so the cast needs no clamp to saturate.
    codes.copy_(blocks.mul_(_inverse_scale(byte).unsqueeze(-1)))
    data[:, layout.nope :].view(torch.bfloat16).copy_(rows[:, layout.nope :])
    scales = data.new_zeros((len(rows), layout.scale_bytes))
    scales[:, : byte.shape[1]] = byte
    return data, scales


def _encode_row_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    wide = rows.bfloat16().float().unsqueeze(1)
    byte = _scale_byte(wide, E4M3_MAX, KV_AMAX_FLOOR)
    codes = wide.mul_(_inverse_scale(byte).unsqueeze(-1)).squeeze(1).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), (byte << 23).view(torch.uint8)


def _encode_row_mxfp4(rows: Tensor) -> tuple[Tensor, Tensor]:
    blocks = rows.bfloat16().float().unflatten(1, (-1, MXFP4_BLOCK))
    byte = _scale_byte(blocks, E2M1_MAX, MXFP4_AMAX_FLOOR).clamp_(max=254)
    blocks.mul_(_inverse_scale(byte).unsqueeze(-1))
    codes = torch.bucketize(blocks.abs(), _e2m1_bounds(rows.device), out_int32=True)
    codes = (codes | (blocks.signbit().int() << 3)).flatten(1)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.to(torch.uint8), byte.to(torch.uint8)


def _scale_byte(blocks: Tensor, code_max: float, floor: float) -> Tensor:
    """UE8M0 byte, int32 [...], of float32 blocks [..., n]: see ``formats.ue8m0.scale_exponent``.

    The exponent field of amax / code_max, rounded up: adding one to the field of the float just
    below does nothing to a power of two and carries everything else to the next.
    """
    amax = torch.linalg.vector_norm(blocks, ord=torch.inf, dim=-1)
    bits = amax.clamp_(min=floor).mul_(1.0 / code_max).view(torch.int32)
    return bits.sub_(1).bitwise_right_shift_(23).add_(1)


def _inverse_scale(byte: Tensor) -> Tensor:
    """2^(127 - byte) as float32, exact for bytes 1..253."""
    return (254 - byte).bitwise_left_shift_(23).view(torch.float32)


def _look_up(table: Table, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode contiguous uint8 codes [n, m] through a table; [n, values]."""
    values, code_dtype = table(dtype, codes.device)
    index = codes.view(code_dtype).flatten().int()
    return values.index_select(0, index).view(dtype).view(codes.shape[0], -1)


@functools.cache
def _e4m3_pairs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, torch.dtype]:
    """Both values of every two bytes, as one element: half as many look-ups as one by one."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    values = decode_e4m3(codes.view(torch.uint8), dtype)
    return _in_pairs(values).to(device), torch.uint16


@functools.cache
def _e2m1_pairs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, torch.dtype]:
    """Both values of a packed byte."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return _in_pairs(decode_e2m1(unpack_nibbles(codes), dtype)).to(device), torch.uint8


@functools.cache
def _ue8m0_values(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, torch.dtype]:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return decode_ue8m0(codes, dtype).to(device), torch.uint8


@functools.cache
def _e2m1_bounds(device: torch.device) -> Tensor:
    """Upper bounds (included) of codes 0..6: the midpoints, just below where a tie goes up."""
    values = decode_e2m1(torch.arange(8, dtype=torch.int32).to(torch.uint8))
    midpoints = (values[1:] + values[:-1]) / 2
    upper_is_even = torch.arange(7) % 2 == 1
    below = torch.nextafter(midpoints, torch.zeros(()))
    return torch.where(upper_is_even, below, midpoints).to(device)


def _in_pairs(values: Tensor) -> Tensor:
    """View two neighbouring values as one element of whichever dtype is as wide."""
    words = {2: torch.int32, 4: torch.int64, 8: torch.complex128}
    return values.view(words[values.dtype.itemsize])

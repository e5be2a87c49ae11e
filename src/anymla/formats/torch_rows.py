"""Encoders and decoders of cache rows in torch and NumPy, with few calls.

Bytes and values equal those of ``PageLayout.encode`` and ``PageLayout.decode``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anymla.formats.e2m1 import E2M1_MAX, decode_e2m1, unpack_nibbles
from anymla.formats.e4m3 import E4M3_MAX, decode_e4m3
from anymla.formats.mxfp4 import MXFP4_AMAX_FLOOR, MXFP4_BLOCK
from anymla.formats.nvfp4 import NVFP4_AMAX_FLOOR, NVFP4_BLOCK
from anymla.formats.pages import PageLayout
from anymla.formats.records import (
    KV_AMAX_FLOOR,
    PlainRowsLayout,
    RowFp8Layout,
    RowMxfp4Layout,
    RowNvfp4Layout,
    SplitFp8Layout,
)
from anymla.formats.ue8m0 import LARGEST_CODE_EXPONENT, decode_ue8m0

# (dtype of the values, device) -> (values by code, dtype that the codes are viewed as)
Table = Callable[[torch.dtype, torch.device], tuple[Tensor, torch.dtype]]

_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY = 0x7F80
_HALF = np.uint32(16)

Bytes = NDArray[np.uint8]


def encode_rows(
    layout: PageLayout, rows: Tensor, data: Tensor, scales: Tensor | None, *, on_host: bool
) -> None:
    """Encode rows [n, channels] into uint8 values [n, data_bytes] and scales [n, scale_bytes].

    The targets may be views of a page, and the rows may have any strides. The bytes equal those of
    ``layout.encode``. ``on_host``: True if reading values makes no device wait.
    """
    if isinstance(layout, SplitFp8Layout):
        assert scales is not None
        _encode_split_fp8(layout, rows, data, scales, on_host)
    elif isinstance(layout, RowFp8Layout):
        assert scales is not None
        _encode_row_fp8(rows, data, scales, on_host)
    elif isinstance(layout, RowMxfp4Layout):
        assert scales is not None
        _encode_row_mxfp4(rows, data, scales)
    elif isinstance(layout, RowNvfp4Layout):
        assert scales is not None
        _encode_row_nvfp4(rows, data, scales)
    else:
        coded, coded_scales = layout.encode(rows)
        data.copy_(coded)
        if scales is not None and coded_scales is not None:
            scales.copy_(coded_scales)


def decode_rows(layout: PageLayout, data: Tensor, scales: Tensor | None, out: Tensor) -> None:
    """Decode uint8 values [n, data_bytes] and scales [n, scale_bytes] into ``out`` [n, channels].

    Every code and every scale byte decodes as in ``layout.decode``.
    """
    # A scale may leave float16's range even if the product does not.
    precision = torch.float32 if out.dtype == torch.float16 else out.dtype
    if isinstance(layout, PlainRowsLayout):
        out.copy_(data.view(layout.dtype))
    elif scales is None:
        out.copy_(layout.decode(data, None, out.dtype))
    elif isinstance(layout, SplitFp8Layout):
        blocks = layout.nope // layout.block
        values = _look_up(_e4m3_pairs, data[:, : layout.nope], precision)
        scale = _look_up(_ue8m0_values, scales[:, :blocks], precision)
        nope = out[:, : layout.nope].unflatten(1, (blocks, layout.block))
        torch.mul(values.view(nope.shape), scale.unsqueeze(-1), out=nope)
        out[:, layout.nope :] = data[:, layout.nope :].view(torch.bfloat16)
    elif isinstance(layout, RowFp8Layout):
        wide = torch.promote_types(out.dtype, torch.float32)
        out.copy_(_look_up(_e4m3_pairs, data, wide) * scales.view(torch.float32))
    elif isinstance(layout, RowMxfp4Layout):
        _decode_e2m1(data, _look_up(_ue8m0_values, scales, precision), MXFP4_BLOCK, out)
    elif isinstance(layout, RowNvfp4Layout):
        _decode_e2m1(data, _look_up(_e4m3_values, scales, precision), NVFP4_BLOCK, out)
    else:
        out.copy_(layout.decode(data, scales, out.dtype))


def _decode_e2m1(data: Tensor, scale: Tensor, block: int, out: Tensor) -> None:
    """Decode packed codes [n, channels / 2] with scales [n, channels / block] in their dtype."""
    values = _look_up(_e2m1_pairs, data, scale.dtype).unflatten(1, (-1, block))
    torch.mul(values, scale.unsqueeze(-1), out=out.unflatten(1, (-1, block)))


def _encode_split_fp8(
    layout: SplitFp8Layout, rows: Tensor, data: Tensor, scales: Tensor, on_host: bool
) -> None:
    rows = rows.bfloat16().contiguous()
    blocks = rows[:, : layout.nope].float().unflatten(1, (-1, layout.block))
    bits = scale_bits(blocks, E4M3_MAX, KV_AMAX_FLOOR)
    codes = _e4m3_of(blocks, bits.unsqueeze(-1), on_host).flatten(1)
    data[:, : layout.nope].view(torch.float8_e4m3fn).copy_(codes)
    data[:, layout.nope :].copy_(rows[:, layout.nope :].view(torch.uint8))
    used = bits.shape[1]
    scales[:, :used].copy_(bits.bitwise_right_shift_(_MANTISSA_BITS))
    scales[:, used:].zero_()


def _encode_row_fp8(rows: Tensor, data: Tensor, scales: Tensor, on_host: bool) -> None:
    wide = rows.bfloat16().float()
    bits = scale_bits(wide.unsqueeze(1), E4M3_MAX, KV_AMAX_FLOOR)
    data.view(torch.float8_e4m3fn).copy_(_e4m3_of(wide, bits, on_host))
    scales.copy_(bits.view(torch.uint8))


def _encode_row_mxfp4(rows: Tensor, data: Tensor, scales: Tensor) -> None:
    blocks = rows.bfloat16().float().unflatten(1, (-1, MXFP4_BLOCK))
    bits = scale_bits(blocks, E2M1_MAX, MXFP4_AMAX_FLOOR)
    _pack_e2m1(_divided(blocks, bits.unsqueeze(-1)), data)
    scales.copy_(bits.bitwise_right_shift_(_MANTISSA_BITS).clamp_(max=254))


def _encode_row_nvfp4(rows: Tensor, data: Tensor, scales: Tensor) -> None:
    blocks = rows.bfloat16().float().unflatten(1, (-1, NVFP4_BLOCK))
    amax = blocks.abs().amax(-1)
    coded = (amax.clamp(NVFP4_AMAX_FLOOR, E2M1_MAX * E4M3_MAX) / E2M1_MAX).to(torch.float8_e4m3fn)
    finite = amax.isfinite()
    step = coded.float().masked_fill_(~finite, E4M3_MAX)
    scales.copy_(coded.view(torch.uint8).masked_fill_(~finite, 0x7F))
    _pack_e2m1(blocks.div_(step.unsqueeze(-1)), data)


def _pack_e2m1(blocks: Tensor, data: Tensor) -> None:
    """Code values [n, blocks, block], already divided by their scales, into [n, bytes]."""
    codes = torch.bucketize(blocks.abs().contiguous(), _e2m1_bounds(blocks.device), out_int32=True)
    negative = blocks.signbit() & (blocks == blocks)
    codes = (codes | (negative.int() << 3)).flatten(1)
    data.copy_(codes[:, 0::2] | (codes[:, 1::2] << 4))


# Tensors, because torch would otherwise convert the numbers at every call. A scalar on the CPU
# combines with tensors of any device.
_MANTISSA = torch.tensor(0x7FFFFF, dtype=torch.int32, device="cpu")
_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32, device="cpu")
_MANTISSA_BITS = torch.tensor(23, dtype=torch.int32, device="cpu")
_LARGEST_SCALE = (LARGEST_CODE_EXPONENT + 127) << 23


def scale_bits(blocks: Tensor, code_max: float, floor: float) -> Tensor:
    """Return the scale of each block as the bits of a float32 power of two.

    The exponent of amax / code_max is rounded up: see ``formats.ue8m0.scale_exponent``. Adding a
    full mantissa leaves a power of two in its binade and carries any other number into the next.

    Args:
        blocks: float32 [..., n], n values of each block.
        code_max: largest magnitude of a code.
        floor: lower bound of amax.

    Returns:
        Bits of each block's scale, int32 [...]; those of infinity for a block with a NaN or an
            infinity.
    """
    bits = blocks.abs().amax(-1).clamp_(min=floor).mul_(1.0 / code_max).view(torch.int32)
    # The bits of a NaN are larger than those of infinity, and would overflow.
    return bits.clamp_(max=0x7F800000).add_(_MANTISSA).bitwise_and_(_EXPONENT)


def _divided(blocks: Tensor, bits: Tensor) -> Tensor:
    """Divide float32 blocks [..., n] in place by scales [..., 1], as ``formats`` does."""
    return blocks.div_(bits.clamp(max=_LARGEST_SCALE).view(torch.float32))


def _e4m3_of(blocks: Tensor, bits: Tensor, on_host: bool) -> Tensor:
    """Prepare float32 values for a cast to e4m3, in place.

    Finite rows of bfloat16 never exceed 448 scales, so only other rows have to be saturated, and
    their NaN replaced by one without a sign.
    """
    scaled = _divided(blocks, bits)
    if on_host and (not bits.numel() or int(bits.max()) < 0x7F800000):
        return scaled
    scaled.clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.masked_fill_(scaled.isnan(), torch.nan)


def _look_up(table: Table, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode uint8 codes [n, m] through a table to [n, values]."""
    values, code_dtype = table(dtype, codes.device)
    index = codes.contiguous().view(code_dtype).flatten().int()
    return values.index_select(0, index).view(dtype).view(codes.shape[0], -1)


@functools.cache
def _e4m3_pairs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, torch.dtype]:
    """Build the table of both values of every two bytes as one element: half the look-ups."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    values = decode_e4m3(codes.view(torch.uint8), dtype)
    return _in_pairs(values).to(device), torch.uint16


@functools.cache
def _e2m1_pairs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, torch.dtype]:
    """Build the table of both values of a packed byte."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return _in_pairs(decode_e2m1(unpack_nibbles(codes), dtype)).to(device), torch.uint8


@functools.cache
def _ue8m0_values(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, torch.dtype]:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return decode_ue8m0(codes, dtype).to(device), torch.uint8


@functools.cache
def _e4m3_values(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, torch.dtype]:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return decode_e4m3(codes, dtype).to(device), torch.uint8


def _e2m1_bounds(device: torch.device) -> Tensor:
    """Return upper bounds (included) of codes 0..6: midpoints, just below where a tie goes up.

    Cached, except for bounds made while a graph is captured, which have no values before a replay.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return _made_e2m1_bounds(device) if capturing else _kept_e2m1_bounds(device)


def _made_e2m1_bounds(device: torch.device) -> Tensor:
    """Fill in the bounds one by one, because a copy to a device would wait."""
    values = decode_e2m1(torch.arange(8, dtype=torch.uint8))
    midpoints = (values[1:] + values[:-1]) / 2
    upper_is_even = torch.arange(7) % 2 == 1
    below = torch.nextafter(midpoints, torch.zeros(()))
    bounds = torch.where(upper_is_even, below, midpoints).tolist()
    return torch.stack([torch.full((), bound, device=device) for bound in bounds])


_kept_e2m1_bounds = functools.cache(_made_e2m1_bounds)


def _in_pairs(values: Tensor) -> Tensor:
    """View two neighbouring values as one element of a dtype of twice the width."""
    dtypes = {2: torch.int32, 4: torch.int64, 8: torch.complex128}
    return values.view(dtypes[values.dtype.itemsize])


def write_row(layout: PageLayout, cache: Tensor, page: int, offset: int, row: Tensor) -> bool:
    """Encode one row [channels] on the host and store it, with the bytes of ``encode_rows``.

    It uses NumPy on bits, and tables instead of arithmetic. A row is rounded to bfloat16 before it
    is quantised, so the scale of a block follows from the 65536 values of its largest magnitude,
    and a code from those of a scaled value.

    Args:
        layout: layout of the cache.
        cache: [P, B, row] on the host, written.
        page: index of the page, inside the cache.
        offset: index of the entry, inside the page.
        row: floating point row [channels].

    Returns:
        False, with nothing written, for a layout or values that are not covered: e2m1 records, and
        blocks with an infinity or a NaN.
    """
    if isinstance(layout, PlainRowsLayout):
        cache[page, offset].copy_(row)
        return True
    if not isinstance(layout, (SplitFp8Layout, RowFp8Layout)):
        return False
    bits = row.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)
    split = isinstance(layout, SplitFp8Layout)
    quantised = bits[: layout.nope] if isinstance(layout, SplitFp8Layout) else bits
    width = layout.block if isinstance(layout, SplitFp8Layout) else layout.channels
    peaks = np.maximum.reduce((quantised & _MAGNITUDE).reshape(-1, width), axis=1)
    if max(peaks.tolist()) >= _INFINITY:
        return False
    scale_bytes, scales, inverses, codes = fp8_tables()
    wide = (quantised.astype(np.uint32) << _HALF).view(np.float32).reshape(-1, width)
    wide *= inverses[peaks, None]

    apart = layout.entry_bytes if layout.interleaved else layout.data_bytes
    start = offset * apart
    stored: Bytes = cache.numpy()[page].reshape(-1)
    values = stored[start : start + layout.data_bytes]
    values[: quantised.size] = codes.take(wide.view(np.uint32).reshape(-1) >> _HALF)
    if layout.interleaved:
        start += layout.data_bytes
    else:
        start = cache.shape[1] * layout.data_bytes + offset * layout.scale_bytes
    exponents = stored[start : start + layout.scale_bytes]
    if split:
        values[quantised.size :] = bits[quantised.size :].view(np.uint8)
        exponents[: peaks.size] = scale_bytes.take(peaks)
        exponents[peaks.size :] = 0
    else:
        exponents[:] = scales.take(peaks).view(np.uint8)
    return True


@functools.cache
def fp8_tables() -> tuple[Bytes, NDArray[np.float32], NDArray[np.float32], Bytes]:
    """Build tables by a bfloat16 magnitude's bits: scale byte, scale, inverse; by bits: code."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    bits = scale_bits(every[:_INFINITY].unsqueeze(1), E4M3_MAX, KV_AMAX_FLOOR)
    scales: NDArray[np.float32] = bits.view(torch.float32).numpy()
    codes: Bytes = every.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return (bits.numpy() >> 23).astype(np.uint8), scales, np.float32(1) / scales, codes

"""Single cache rows written on the host: NumPy on bits, and tables instead of arithmetic.

A row is rounded to bfloat16 before it is quantised, so that the scale of a block follows from the
65536 values that its largest magnitude can have, and a code from those that a scaled value can
have. The tables are filled by the encoders in ``torch_codec`` and ``formats``.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anymla.formats.e4m3 import E4M3_MAX
from anymla.formats.pages import PageLayout
from anymla.formats.records import KV_AMAX_FLOOR, PlainRowsLayout, RowFp8Layout, SplitFp8Layout
from anymla.ops.kv_cache.torch_codec import scale_bits

_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY = 0x7F80
_HALF = np.uint32(16)

Bytes = NDArray[np.uint8]


def write_row(layout: PageLayout, cache: Tensor, page: int, offset: int, row: Tensor) -> bool:
    """Encode one row [channels] and store it, with the bytes of ``torch_codec.encode_rows``.

    Args:
        layout: of the cache.
        cache: [P, B, row], on the host; written.
        page: inside the cache.
        offset: inside the page.
        row: floating point.

    Returns:
        False, with nothing written, for a layout or values that are not covered here: MXFP4, and
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
    scale_bytes, scales, inverses, codes = _tables()
    wide = (quantised.astype(np.uint32) << _HALF).view(np.float32).reshape(-1, width)
    wide *= inverses[peaks, None]

    start = offset * layout.data_bytes
    stored: Bytes = cache.numpy()[page].reshape(-1)
    values = stored[start : start + layout.data_bytes]
    values[: quantised.size] = codes.take(wide.view(np.uint32).reshape(-1) >> _HALF)
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
def _tables() -> tuple[Bytes, NDArray[np.float32], NDArray[np.float32], Bytes]:
    """By the bits of a bfloat16 magnitude: scale byte, scale, its inverse; by all bits: code."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    bits = scale_bits(every[:_INFINITY].unsqueeze(1), E4M3_MAX, KV_AMAX_FLOOR)
    scales: NDArray[np.float32] = bits.view(torch.float32).numpy()
    codes: Bytes = every.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return (bits.numpy() >> 23).astype(np.uint8), scales, np.float32(1) / scales, codes

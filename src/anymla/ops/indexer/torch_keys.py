"""Index keys decoded in bulk.

torch converts float8 one element at a time on a CPU, which would cost more than the scores. The
codes are turned into float16 by shifts instead: an e4m3 code, seven bits up, is the float16 of
value * 2^-8, subnormals included, and an e2m1 code, nine bits up, that of value * 2^-14.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.formats.page_layout import get_layout
from anymla.formats.pages import pages_of
from anymla.formats.records import RowFp8Layout, RowMxfp4Layout
from anymla.formats.ue8m0 import decode_ue8m0
from anymla.ops import _host

_E4M3_TO_FLOAT16 = 2.0**8
_E2M1_TO_FLOAT16 = 2.0**14
_SIGN_AND_CODE = -0x4080  # bits 15 and 13..7 as int16
_MAGNITUDE = 0x3F80


def decode_e4m3_bulk(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode e4m3fn codes (uint8 or float8_e4m3fn, any shape) exactly, NaN included."""
    codes = codes.view(torch.int8)
    bits = codes.to(torch.int16)  # the sign fills the upper byte
    bits.mul_(1 << 7).bitwise_and_(_SIGN_AND_CODE)
    # On a CPU one pass over the bytes tells that there is no NaN; a device must not be waited for.
    if bits.numel() and (not _host.on_host(codes) or int((codes & 0x7F).amax()) == 0x7F):
        bits.masked_fill_((bits & _MAGNITUDE) == _MAGNITUDE, 0x7E00)
    return bits.view(torch.float16).to(dtype).mul_(_E4M3_TO_FLOAT16)


def decode_mxfp4_bulk(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode packed e2m1 [..., n/2] with scale bytes [..., n/32] to [..., n] of ``dtype``."""
    byte = packed.to(torch.int32)
    # Two float16 side by side: the low nibble of a byte is the lower half.
    magnitudes = (byte * ((1 << 9) | (1 << 21))).bitwise_and_(0x0E000E00)
    signs = byte.mul_((1 << 12) | (1 << 24)).bitwise_and_(-0x7FFF8000)
    values = magnitudes.bitwise_or_(signs).view(torch.float16).to(dtype).mul_(_E2M1_TO_FLOAT16)
    blocks = values.unflatten(-1, (-1, MXFP4_BLOCK))
    return blocks.mul_(decode_ue8m0(scales, dtype).unsqueeze(-1)).flatten(-2)


class PagedKeys:
    """Entries of an index cache, read a run at a time.

    Attributes:
        pages: pages in the cache.
        page_size: entries per page.
    """

    def __init__(self, cache: Tensor, layout: str, dtype: torch.dtype) -> None:
        cache = pages_of(cache)
        self.pages, self.page_size = cache.shape[:2]
        self._layout = get_layout(layout)
        self._dtype = dtype
        data, scales = self._layout.planes(cache)
        self._data = data.flatten(1)
        self._scales = None if scales is None else scales.flatten(1)

    def of(self, table: Tensor) -> Callable[[int, int], tuple[Tensor, Tensor | None]]:
        """Reader of the entries of G requests.

        Args:
            table: [G, pages] int32. Values outside the cache are not read.

        Returns:
            read(first, last) -> keys [G, last - first, channels], and which of them exist,
            [G, last - first] bool, or None if all are known to. ``first`` must be a multiple of
            page_size, ``last`` at most what the table covers.
        """
        inside = (table >= 0) & (table < self.pages)
        whole = _host.on_host(table) and bool(inside.all())
        if not whole:
            table = torch.where(inside, table, 0)

        def read(first: int, last: int) -> tuple[Tensor, Tensor | None]:
            pages = slice(first // self.page_size, -(-last // self.page_size))
            keys = self._decode(table[:, pages].reshape(-1))
            keys = keys.view(len(table), -1, self._layout.channels)[:, : last - first]
            if whole:
                return keys, None
            exist = inside[:, pages].repeat_interleave(self.page_size, 1)
            return keys, exist[:, : last - first]

        return read

    def _decode(self, pages: Tensor) -> Tensor:
        entries = len(pages) * self.page_size
        data = self._data.index_select(0, pages).view(entries, -1)
        if self._scales is None:
            return self._layout.decode(data, None, self._dtype)
        scales = self._scales.index_select(0, pages).view(entries, -1)
        if isinstance(self._layout, RowFp8Layout):
            keys = decode_e4m3_bulk(data, self._dtype)
            return keys.mul_(scales.view(torch.float32).to(self._dtype))
        if isinstance(self._layout, RowMxfp4Layout):
            return decode_mxfp4_bulk(data, scales, self._dtype)
        return self._layout.decode(data, scales, self._dtype)

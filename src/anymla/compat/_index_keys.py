"""Conversion of DeepGEMM's index queries and keys to the arguments of anymla's operations.

Three formats: e4m3 keys with a float32 scale each ("fp8"), and MXFP8 and MXFP4 with one scale byte
for 32 channels, four of them in an int32, whose queries have such scales too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.mxfp4 import MXFP4_BLOCK, dequantize_mxfp4
from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4, ROWS_BF16_128, get_layout
from anymla.formats.pages import pages_of
from anymla.formats.ue8m0 import decode_ue8m0
from anymla.ops.registry import require

Operand = Tensor | tuple[Tensor, Tensor | None] | list[Tensor]
_PACKED = (torch.int8, torch.uint8)


def parts(given: Operand) -> tuple[Tensor, Tensor | None]:
    """Return values and scales of q or kv, which may be a tensor alone."""
    if isinstance(given, Tensor):
        return given, None
    values, scales = given
    return values, scales


def queries(name: str, q: Operand) -> tuple[Tensor, Tensor | None, str]:
    """Return queries [.., H, _], their scale bytes [.., H, D / 32] if packed, and their format.

    Queries of MXFP8 come back in bfloat16, which holds them.

    Raises:
        TypeError, ValueError: packed values have no scales, or scales have another dtype.
    """
    values, scales = parts(q)
    if values.dtype in _PACKED:
        require(scales is not None, name, "q", "with scales where it is packed", None)
        assert scales is not None
        return values.view(torch.uint8), _scale_bytes(name, scales, 2 * values.shape[-1]), "mxfp4"
    if scales is None:
        return values, None, "fp8"
    return _from_mxfp8(name, values, scales), None, "mxfp8"


def key_list(name: str, kv: Operand) -> tuple[Tensor, Tensor | None]:
    """Return keys [N, D] and their scales [N] float32, or None for 1.

    Keys of MXFP8 and MXFP4 are returned in bfloat16, which holds a code times a power of two
    exactly.
    """
    keys, scales = parts(kv)
    if keys.dtype in _PACKED:
        require(scales is not None, name, "kv", "with scales where it is packed", None)
        assert scales is not None
        factors = _scale_bytes(name, scales, 2 * keys.shape[-1])
        return dequantize_mxfp4(keys.view(torch.uint8), factors, torch.bfloat16), None
    if scales is not None and scales.dtype == torch.int32:
        return _from_mxfp8(name, keys, scales), None
    return keys, scales


class StoredKeys:
    """Keys that are read entry by entry, as bytes.

    Attributes:
        count: number of entries.
        device: device of the keys.
        layout: layout id of the result of ``pages``.
    """

    def __init__(self, values: Tensor, scales: Tensor, form: str) -> None:
        """Keep the entries of pages, which are not copied.

        Args:
            values: uint8 [P, B, bytes], P pages of B entries.
            scales: uint8 [P, B, 4], scale bytes of each entry.
            form: number format of the keys: "fp8", "mxfp8" or "mxfp4".
        """
        self._values, self._scales, self._form = values, scales, form
        self._page = values.shape[1]
        self.count = values.shape[0] * values.shape[1]
        self.device = values.device
        self.layout = {"fp8": INDEX_FP8, "mxfp4": INDEX_MXFP4, "mxfp8": ROWS_BF16_128}[form]

    @classmethod
    def of_list(cls, name: str, kv: Operand, form: str) -> StoredKeys:
        """Read a list: values [N, _] and scales [N], float32 for "fp8", else int32."""
        values, scales = parts(kv)
        require(scales is not None, name, "kv", "a tuple of values and scales", "values")
        assert scales is not None
        kind = torch.float32 if form == "fp8" else torch.int32
        if scales.dtype != kind:
            raise TypeError(f"{name}: kv scales must be {kind} for {form}, got {scales.dtype}")
        size = get_layout(INDEX_MXFP4 if form == "mxfp4" else INDEX_FP8).data_bytes
        fits = values.dtype.itemsize == 1 and values.ndim == 2 and values.shape[1] == size
        expected = f"[N, {size}] of one byte, with scales [N]"
        require(fits, name, "kv", expected, [*values.shape])
        require(scales.shape == values.shape[:1], name, "kv", expected, [*scales.shape])
        factors = scales.contiguous().view(torch.uint8).view(1, -1, 4)
        return cls(values.contiguous().view(torch.uint8).unsqueeze(0), factors, form)

    @classmethod
    def of_cache(cls, name: str, cache: Tensor, form: str) -> StoredKeys:
        """Read a cache [P, B, 1, _]: pages of values and then of scales."""
        layout = get_layout(INDEX_MXFP4 if form == "mxfp4" else INDEX_FP8)
        layout.check(cache, name, "kv_cache")
        values, scales = layout.planes(pages_of(cache))
        assert scales is not None
        return cls(values, scales, form)

    def pages(self, entries: Tensor, page: int) -> Tensor:
        """Return a cache of ``layout`` with the given entries side by side.

        Args:
            entries: int64 [n], each within 0 .. count - 1; n is a multiple of ``page``.
            page: number of entries per page of the result.
        """
        values, scales = (
            each[entries // self._page, entries % self._page]
            for each in (self._values, self._scales)
        )
        layout = get_layout(self.layout)
        cache = layout.allocate(len(entries) // page, page, entries.device)
        planes = layout.planes(cache)
        if self._form == "mxfp8":
            rows = _decoded(values.view(torch.float8_e4m3fn), scales)
            planes[0].copy_(rows.view(torch.uint8).view(planes[0].shape))
            return cache
        for plane, given in zip(planes, (values, scales), strict=True):
            assert plane is not None
            plane.copy_(given.view(plane.shape))
        return cache


def decoded_pages(name: str, cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the listed pages of an MXFP8 cache in bfloat16, and a block table for them.

    Args:
        name: name of the called function, for messages.
        cache: uint8 [P, B, 1, D + 4], pages of codes with their scales.
        block_table: int32 [R, C] page numbers; numbers of no page become -1.
    """
    stored = StoredKeys.of_cache(name, cache, "mxfp8")
    there = (block_table >= 0) & (block_table < len(cache))
    page = cache.shape[1]
    if not len(cache):
        block_table, there = block_table[:, :0], there[:, :0]
    first = torch.where(there, block_table, 0).long().flatten() * page
    entries = (first.unsqueeze(1) + torch.arange(page, device=cache.device)).flatten()
    numbers = torch.arange(there.numel(), dtype=torch.int32, device=cache.device)
    return stored.pages(entries, page), torch.where(there, numbers.view(there.shape), -1)


def _from_mxfp8(name: str, values: Tensor, scales: Tensor) -> Tensor:
    if values.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name}: values with scales must be float8_e4m3fn, got {values.dtype}")
    return _decoded(values, _scale_bytes(name, scales, values.shape[-1], "FP8 queries or keys"))


def _decoded(values: Tensor, factors: Tensor) -> Tensor:
    """Return MXFP8 values [.., D] with scale bytes [.., D / 32] in bfloat16."""
    blocks = values.bfloat16().unflatten(-1, (-1, MXFP4_BLOCK))
    return (blocks * decode_ue8m0(factors, torch.bfloat16).unsqueeze(-1)).flatten(-2)


def _scale_bytes(name: str, scales: Tensor, channels: int, of: str = "packed values") -> Tensor:
    """Return the scale bytes [.., channels / 32] that an int32 holds, the lowest first."""
    if scales.dtype != torch.int32:
        raise TypeError(f"{name}: scales of {of} must be int32, got {scales.dtype}")
    bytes_ = scales.contiguous().unsqueeze(-1).view(torch.uint8)
    return bytes_[..., : channels // MXFP4_BLOCK]

"""Byte layouts of cache pages: where an entry's values and scales lie, and how they are coded.

A page with B entries holds two planes: first B entries of values, then B entries of scales (none
where scales lie beside their values, or do not exist); then padding up to the page stride. Readers
and writers take the page stride from the tensor, never from the layout, because engines pad pages
further and share them between layers.

The exposed tensor is [P, B, row_elements] (or [P, B, 1, row_elements]) with strides
(page stride, row_elements, 1). ``cache[p, t]`` is *not* entry t of a page with two planes.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from anymla.formats.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3
from anymla.formats.mxfp4 import MXFP4_BLOCK, dequantize_mxfp4, quantize_mxfp4
from anymla.formats.ue8m0 import decode_ue8m0, encode_ue8m0, scale_exponent

KV_AMAX_FLOOR = 1e-4


@dataclasses.dataclass(frozen=True)
class PageLayout(ABC):
    """One kind of cache page.

    Attributes:
        layout_id: explicit name, compared wherever a cache changes hands.
        dtype: dtype of the exposed tensor.
        row_elements: last dim of the exposed tensor, in elements of ``dtype``.
        channels: width of a decoded row.
        data_bytes: bytes of an entry in the plane of values.
        scale_bytes: bytes of an entry in the plane of scales; 0 if there is none.
        alignment: page strides are rounded up to a multiple of this many bytes.
    """

    layout_id: str
    dtype: torch.dtype
    row_elements: int
    channels: int
    data_bytes: int
    scale_bytes: int
    alignment: int

    @abstractmethod
    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Code rows [n, channels] as uint8 values [n, data_bytes] and scales [n, scale_bytes]."""

    @abstractmethod
    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode uint8 values [n, data_bytes] and scales [n, scale_bytes] to [n, channels]."""

    @property
    def entry_bytes(self) -> int:
        """Bytes an entry takes in both planes together."""
        return self.data_bytes + self.scale_bytes

    def page_stride_bytes(self, entries: int) -> int:
        """Bytes from one page of ``entries`` entries to the next, padding included."""
        return -(-entries * self.entry_bytes // self.alignment) * self.alignment

    def allocate(
        self, pages: int, entries: int, device: torch.device | str = "cpu", fill: int = 0
    ) -> Tensor:
        """Allocate a cache.

        Args:
            pages: number of pages P.
            entries: entries per page B, at least 1.
            device: where.
            fill: byte written everywhere, padding included.

        Returns:
            [P, B, row_elements] of ``dtype`` with the padded page stride.
        """
        if pages < 0 or entries < 1:
            raise ValueError(
                f"{self.layout_id}: need pages >= 0 and entries >= 1, got {pages} and {entries}"
            )
        stride = self.page_stride_bytes(entries)
        storage = torch.full((pages * stride,), fill, dtype=torch.uint8, device=device)
        size = (pages, entries, self.row_elements)
        return storage.view(self.dtype).as_strided(
            size, (stride // self.dtype.itemsize, self.row_elements, 1)
        )

    def check(self, cache: Tensor, operation: str, name: str) -> None:
        """Raise unless ``cache`` can be a cache of this layout.

        Raises:
            TypeError: wrong dtype.
            ValueError: wrong rank, row width or inner strides.
        """
        if cache.dtype != self.dtype:
            raise TypeError(
                f"{operation}: {name} must be {self.dtype} for layout {self.layout_id}, "
                f"got {cache.dtype}"
            )
        shape = tuple(cache.shape)
        fits = cache.ndim == 3 or (cache.ndim == 4 and shape[2] == 1)
        if not fits or shape[-1] != self.row_elements or shape[1] < 1:
            raise ValueError(
                f"{operation}: {name} must be [P, B, {self.row_elements}] for layout "
                f"{self.layout_id}, got {list(shape)}"
            )
        inner = (self.row_elements, 1)
        rows_are_dense = cache.stride(-1) == 1 and (
            shape[1] == 1 or cache.stride(1) == self.row_elements
        )
        if cache.numel() and not rows_are_dense:
            raise ValueError(
                f"{operation}: {name} must have inner strides {list(inner)}, "
                f"got {list(cache.stride())}"
            )

    def planes(self, cache: Tensor) -> tuple[Tensor, Tensor | None]:
        """Views of a cache's two planes.

        Returns:
            values uint8 [P, B, data_bytes] and scales uint8 [P, B, scale_bytes] (None if the
            layout has none), both with the cache's own page stride.
        """
        pages, entries = cache.shape[:2]
        page_stride = cache.stride(0) * self.dtype.itemsize
        start = cache.storage_offset() * self.dtype.itemsize
        whole = cache.view(torch.uint8)
        data = whole.as_strided(
            (pages, entries, self.data_bytes), (page_stride, self.data_bytes, 1), start
        )
        if not self.scale_bytes:
            return data, None
        scales = whole.as_strided(
            (pages, entries, self.scale_bytes),
            (page_stride, self.scale_bytes, 1),
            start + entries * self.data_bytes,
        )
        return data, scales

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Encode rows and store them; slots outside the cache are skipped.

        Args:
            cache: [P, B, row_elements].
            slots: int64 [n], ``page * B + offset``; each valid slot at most once.
            rows: [n, channels] floating point.
        """
        entries = cache.shape[1]
        keep = ((slots >= 0) & (slots < cache.shape[0] * entries)).nonzero().squeeze(1)
        slots = slots[keep].long()
        data, scales = self.encode(rows[keep])
        page, offset = slots // entries, slots % entries
        data_plane, scale_plane = self.planes(cache)
        data_plane[page, offset] = data
        if scale_plane is not None and scales is not None:
            scale_plane[page, offset] = scales

    def read(self, cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode the rows at ``slots``; slots outside the cache give zero rows.

        Args:
            cache: [P, B, row_elements].
            slots: integer [n].
            dtype: of the result.

        Returns:
            [n, channels].
        """
        entries = cache.shape[1]
        valid = (slots >= 0) & (slots < cache.shape[0] * entries)
        if not cache.shape[0]:
            return torch.zeros(len(slots), self.channels, dtype=dtype, device=cache.device)
        slots = torch.where(valid, slots, 0).long()
        page, offset = slots // entries, slots % entries
        data_plane, scale_plane = self.planes(cache)
        scales = None if scale_plane is None else scale_plane[page, offset]
        rows = self.decode(data_plane[page, offset], scales, dtype)
        return torch.where(valid.unsqueeze(1), rows, torch.zeros((), dtype=dtype))


@dataclasses.dataclass(frozen=True)
class SplitFp8Layout(PageLayout):
    """The record of DeepSeek-V4's KV cache: e4m3 "nope" channels, then bfloat16 rope channels.

    Blocks of ``block`` nope channels share a power-of-two scale byte; the scale plane pads an
    entry's bytes to ``scale_bytes`` with zeros. Rows are rounded to bfloat16 first.
    """

    nope: int
    block: int

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Code rows [n, channels]; see the class."""
        rows = rows.bfloat16()
        blocks = rows[:, : self.nope].float().unflatten(1, (-1, self.block))
        exponent = scale_exponent(blocks.abs().amax(-1), E4M3_MAX, KV_AMAX_FLOOR)
        codes = encode_e4m3(torch.ldexp(blocks, -exponent.unsqueeze(-1))).flatten(1)
        rope = rows[:, self.nope :].contiguous().view(torch.uint8)
        scales = torch.zeros(len(rows), self.scale_bytes, dtype=torch.uint8, device=rows.device)
        scales[:, : exponent.shape[1]] = encode_ue8m0(exponent)
        return torch.cat((codes, rope), 1), scales

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode values and scales to [n, channels]; exact in bfloat16 and wider."""
        assert scales is not None
        scale = decode_ue8m0(scales[:, : self.nope // self.block].contiguous(), torch.float32)
        values = decode_e4m3(data[:, : self.nope]).unflatten(1, (-1, self.block))
        # The product is exact in float32 unless it leaves the normal range.
        nope = (values.double() * scale.double().unsqueeze(-1)).flatten(1).to(dtype)
        rope = data[:, self.nope :].contiguous().view(torch.bfloat16).to(dtype)
        return torch.cat((nope, rope), 1)


@dataclasses.dataclass(frozen=True)
class InlineFp8Layout(PageLayout):
    """The record of DeepSeek-V3.2's KV cache: codes, their scales and the rope channels in a row.

    ``nope`` e4m3 codes, a float32 scale for each ``block`` of them, then bfloat16 rope channels.
    This writer's scales are powers of two (rows are rounded to bfloat16 first, as in
    ``SplitFp8Layout``), so what it writes decodes exactly in bfloat16; a reader takes any scale.
    """

    nope: int
    block: int

    @property
    def rope_start(self) -> int:
        """Offset in bytes of the rope channels in an entry."""
        return self.nope + self.nope // self.block * torch.float32.itemsize

    def encode(self, rows: Tensor) -> tuple[Tensor, None]:
        """Code rows [n, channels]; see the class."""
        rows = rows.bfloat16()
        blocks = rows[:, : self.nope].float().unflatten(1, (-1, self.block))
        exponent = scale_exponent(blocks.abs().amax(-1), E4M3_MAX, KV_AMAX_FLOOR)
        codes = encode_e4m3(torch.ldexp(blocks, -exponent.unsqueeze(-1))).flatten(1)
        scales = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
        rope = rows[:, self.nope :].contiguous().view(torch.uint8)
        return torch.cat((codes, scales.view(torch.uint8), rope), 1), None

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode entries [n, data_bytes] to [n, channels], each value rounded once to ``dtype``."""
        scale = data[:, self.nope : self.rope_start].contiguous().view(torch.float32)
        values = decode_e4m3(data[:, : self.nope]).unflatten(1, (-1, self.block))
        nope = (values.double() * scale.double().unsqueeze(-1)).flatten(1).to(dtype)
        rope = data[:, self.rope_start :].contiguous().view(torch.bfloat16).to(dtype)
        return torch.cat((nope, rope), 1)


@dataclasses.dataclass(frozen=True)
class RowFp8Layout(PageLayout):
    """Index keys in e4m3: one float32 power-of-two scale for all channels of an entry."""

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Code rows [n, channels], rounded to bfloat16 first."""
        wide = rows.bfloat16().float()
        exponent = scale_exponent(wide.abs().amax(-1, keepdim=True), E4M3_MAX, KV_AMAX_FLOOR)
        codes = encode_e4m3(torch.ldexp(wide, -exponent))
        scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
        return codes, scale.view(torch.uint8)

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode values and scales to [n, channels]."""
        assert scales is not None
        scale = scales.contiguous().view(torch.float32)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (decode_e4m3(data, wide) * scale.to(wide)).to(dtype)


@dataclasses.dataclass(frozen=True)
class RowMxfp4Layout(PageLayout):
    """Index keys in MXFP4: packed e2m1 values, one scale byte for 32 channels.

    The Hadamard transform that goes with it is the caller's: it belongs to q and k alike.
    """

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Code rows [n, channels], rounded to bfloat16 first."""
        return quantize_mxfp4(rows.bfloat16())

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode values and scales to [n, channels]."""
        assert scales is not None
        return dequantize_mxfp4(data, scales, dtype)


@dataclasses.dataclass(frozen=True)
class PlainRowsLayout(PageLayout):
    """Unquantised rows of the exposed dtype."""

    def encode(self, rows: Tensor) -> tuple[Tensor, None]:
        """Round rows [n, channels] to the dtype; their bytes."""
        return rows.to(self.dtype).contiguous().view(torch.uint8), None

    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Reinterpret bytes as rows [n, channels] and convert."""
        return data.contiguous().view(self.dtype).to(dtype)


def _plain_rows(dtype: torch.dtype, channels: int) -> PlainRowsLayout:
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    return PlainRowsLayout(
        layout_id=f"rows_{name}_{channels}",
        dtype=dtype,
        row_elements=channels,
        channels=channels,
        data_bytes=channels * dtype.itemsize,
        scale_bytes=0,
        alignment=512,
    )


MAIN_FP8 = "v4_main_fp8"
V32_FP8 = "v32_main_fp8"
INDEX_FP8 = "v4_index_fp8"
INDEX_MXFP4 = "v4_index_mxfp4"
ROWS_BF16_512 = "rows_bf16_512"
ROWS_FP32_512 = "rows_fp32_512"
ROWS_BF16_128 = "rows_bf16_128"
ROWS_FP32_128 = "rows_fp32_128"

_LAYOUTS: dict[str, PageLayout] = {
    layout.layout_id: layout
    for layout in (
        SplitFp8Layout(
            layout_id=MAIN_FP8,
            dtype=torch.uint8,
            row_elements=584,
            channels=512,
            data_bytes=576,
            scale_bytes=8,
            alignment=576,
            nope=448,
            block=64,
        ),
        InlineFp8Layout(
            layout_id=V32_FP8,
            dtype=torch.uint8,
            row_elements=656,
            channels=576,
            data_bytes=656,
            scale_bytes=0,
            alignment=16,
            nope=512,
            block=128,
        ),
        RowFp8Layout(
            layout_id=INDEX_FP8,
            dtype=torch.uint8,
            row_elements=132,
            channels=128,
            data_bytes=128,
            scale_bytes=4,
            alignment=576,
        ),
        RowMxfp4Layout(
            layout_id=INDEX_MXFP4,
            dtype=torch.uint8,
            row_elements=68,
            channels=128,
            data_bytes=128 // 2,
            scale_bytes=128 // MXFP4_BLOCK,
            alignment=512,
        ),
        _plain_rows(torch.bfloat16, 512),
        _plain_rows(torch.float32, 512),
        _plain_rows(torch.bfloat16, 128),
        _plain_rows(torch.float32, 128),
    )
}

LAYOUT_IDS = tuple(_LAYOUTS)


def get_layout(layout_id: str) -> PageLayout:
    """The layout of that name.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    try:
        return _LAYOUTS[layout_id]
    except KeyError:
        known = ", ".join(sorted(_LAYOUTS))
        raise ValueError(f"unknown cache layout {layout_id!r}; known: {known}") from None


def pages_of(cache: Tensor) -> Tensor:
    """Drop the singleton head dim of [P, B, 1, row]; [P, B, row] is returned as it is."""
    return cache.squeeze(2) if cache.ndim == 4 else cache

"""Byte layouts of cache pages: positions and coding of an entry's values and scales.

An entry has values, and scales unless these are among its values or do not exist. There are two
arrangements. A split page with B entries has two planes: first B entries of values, then B entries
of scales. An interleaved page has one entry after the other, each with its scales after its values.
Padding follows up to the page stride. Readers and writers take the page stride from the tensor,
never from the layout, because engines pad pages further and share them between layers.

The exposed tensor is [P, B, row_elements] (or [P, B, 1, row_elements]) with strides
(page stride, row_elements, 1). ``cache[p, t]`` is *not* entry t of a split page with scales.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class PageLayout(ABC):
    """Layout of one kind of cache page.

    Attributes:
        layout_id: explicit name, compared wherever a cache is passed on.
        dtype: dtype of the exposed tensor.
        row_elements: last dim of the exposed tensor, in elements of ``dtype``.
        channels: width of a decoded row.
        data_bytes: bytes of an entry's values.
        scale_bytes: bytes of an entry's scales; 0 if they are among the values, or do not exist.
        alignment: page strides are rounded up to a multiple of this many bytes.
        interleaved: True if an entry's scales follow its values, False if they have a plane of
            their own.
    """

    layout_id: str
    dtype: torch.dtype
    row_elements: int
    channels: int
    data_bytes: int
    scale_bytes: int
    alignment: int
    interleaved: bool = dataclasses.field(default=False, kw_only=True)

    @abstractmethod
    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Code rows [n, channels] as uint8 values [n, data_bytes] and scales [n, scale_bytes]."""

    @abstractmethod
    def decode(self, data: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode uint8 values [n, data_bytes] and scales [n, scale_bytes] to [n, channels]."""

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry, its scales included."""
        return self.data_bytes + self.scale_bytes

    def page_stride_bytes(self, entries: int) -> int:
        """Return the bytes from one page of ``entries`` entries to the next, padding included."""
        return -(-entries * self.entry_bytes // self.alignment) * self.alignment

    def allocate(
        self, pages: int, entries: int, device: torch.device | str = "cpu", fill: int = 0
    ) -> Tensor:
        """Allocate a cache.

        Args:
            pages: P, number of pages.
            entries: B, number of entries per page, at least 1.
            device: device of the cache.
            fill: byte value of all bytes, padding included.

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
        """Raise unless ``cache`` is a valid cache of this layout.

        Raises:
            TypeError: the dtype is wrong.
            ValueError: the rank, row width or inner strides are wrong.
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
        """Return views of a cache's values and of its scales.

        Returns:
            Values uint8 [P, B, data_bytes] and scales uint8 [P, B, scale_bytes] (None if the layout
            has none), both with the cache's own page stride. Neighbouring entries are contiguous in
            a split page, and ``entry_bytes`` apart in an interleaved one.
        """
        pages, entries = cache.shape[:2]
        page_stride = cache.stride(0) * self.dtype.itemsize
        start = int(cache.storage_offset()) * self.dtype.itemsize
        whole = cache.view(torch.uint8)

        def plane(width: int, offset: int) -> Tensor:
            apart = self.entry_bytes if self.interleaved else width
            return whole.as_strided((pages, entries, width), (page_stride, apart, 1), offset)

        data = plane(self.data_bytes, start)
        if not self.scale_bytes:
            return data, None
        behind = self.data_bytes if self.interleaved else entries * self.data_bytes
        return data, plane(self.scale_bytes, start + behind)

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Encode rows and store them; slots outside the cache are skipped.

        Args:
            cache: [P, B, row_elements], pages that are written.
            slots: int64 [n], ``page * B + offset``; each valid slot at most once.
            rows: floating point rows [n, channels].
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
            cache: [P, B, row_elements], pages that are read.
            slots: integer [n], ``page * B + offset``.
            dtype: dtype of the result.

        Returns:
            Decoded rows [n, channels] in ``dtype``.
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
        return torch.where(valid.unsqueeze(1), rows, rows.new_zeros(()))


def pages_of(cache: Tensor) -> Tensor:
    """Drop the singleton head dim of [P, B, 1, row]; [P, B, row] is returned unchanged."""
    return cache.squeeze(2) if cache.ndim == 4 else cache

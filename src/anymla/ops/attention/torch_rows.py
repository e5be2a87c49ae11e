"""Rows that attention reads: cache pages or a plain tensor, behind one interface.

On a CPU the FP8 pages are read as 64-bit words and decoded by integer instructions, which is what
keeps decoding well below the cost of the matrix products.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from anymla.formats.e4m3_bits import (
    e4m3_values_shifted,
    has_nan_code,
    scales_are_exact,
    shifted_scale,
)
from anymla.formats.page_layout import get_layout
from anymla.formats.pages import PageLayout, pages_of
from anymla.formats.records import InlineFp8Layout, PlainRowsLayout, SplitFp8Layout
from anymla.formats.torch_rows import decode_rows
from anymla.ops._torch_pages import read_entries
from anymla.ops.attention.cache_rows import CacheRows, flat

_WORD = torch.int64
_WORD_BYTES = 8


class RowSource(Protocol):
    """Numbered rows in memory, coded or plain.

    Attributes:
        size: number of rows; listed slots outside [0, size) do not exist.
        dtype: the narrowest of bfloat16, float32 and float64 that holds every row exactly.
    """

    @property
    def size(self) -> int:
        """Number of rows."""

    @property
    def dtype(self) -> torch.dtype:
        """Narrowest dtype of every row."""

    def read(self, slots: Tensor, out: Tensor) -> bool:
        """Copy the rows at ``slots`` (integers [groups, n], all in range) to ``out`` [.., D].

        Returns:
            False if some row may not be exact in out's dtype; ``out`` is then undefined. Always
            True for float32 and wider.
        """

    def read_or_zero(self, slots: Tensor, valid: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows at ``slots`` as [T, K, D], zeros where ``valid`` is false; never waits."""


@dataclasses.dataclass(frozen=True)
class TensorRows:
    """The rows of a tensor [N, D]."""

    tensor: Tensor

    @property
    def size(self) -> int:
        """See ``RowSource``."""
        return self.tensor.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """See ``RowSource``."""
        return torch.float32 if self.tensor.dtype == torch.float16 else self.tensor.dtype

    def read(self, slots: Tensor, out: Tensor) -> bool:
        """See ``RowSource``."""
        out.copy_(self.tensor.index_select(0, slots.flatten()).view(out.shape))
        return True

    def read_or_zero(self, slots: Tensor, valid: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``RowSource``."""
        if not self.size:
            return self.tensor.new_zeros(*slots.shape, self.tensor.shape[1], dtype=dtype)
        at = torch.where(valid, slots, 0).flatten()
        rows = self.tensor.index_select(0, at).view(*slots.shape, self.tensor.shape[1]).to(dtype)
        return torch.where(valid.unsqueeze(-1), rows, rows.new_zeros(()))


@dataclasses.dataclass(frozen=True)
class PageRows:
    """The entries of a cache [P, B, row] in ``layout``."""

    cache: Tensor
    layout: PageLayout

    @property
    def size(self) -> int:
        """See ``RowSource``."""
        return self.cache.shape[0] * self.cache.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """See ``RowSource``."""
        if isinstance(self.layout, InlineFp8Layout):
            return torch.float32  # scales that are no powers of two are legal
        return self.layout.dtype if self.layout.dtype.is_floating_point else torch.bfloat16

    def read(self, slots: Tensor, out: Tensor) -> bool:
        """See ``RowSource``."""
        return read_side_by_side([(self, slots)], out)

    def read_or_zero(self, slots: Tensor, valid: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``RowSource``."""
        at = torch.where(valid, slots, -1).flatten()
        return self.layout.read(self.cache, at, dtype).view(*slots.shape, self.layout.channels)

    def read_plain(self, slots: Tensor, out: Tensor) -> None:
        """Copy rows in any layout and to any dtype, in the layout's own way."""
        if isinstance(self.layout, PlainRowsLayout):
            entries = self.cache.shape[1]
            out.copy_(self.cache[slots // entries, slots % entries])
        else:
            slots = slots.flatten().long()
            rows = out.new_empty(len(slots), self.layout.channels)
            decode_rows(self.layout, *read_entries(self.cache, slots, self.layout), rows)
            out.copy_(rows.view(out.shape))

    def gather_words(self, slots: Tensor, data: Tensor, scales: Tensor) -> None:
        """Copy the coded entries at slots [n]: values to int64 [n, words], scales to int64 [n]."""
        layout = self.layout
        pages, entries, _ = self.cache.shape
        stride = self.cache.stride(0)
        start = self.cache.storage_offset()
        if self.size * layout.entry_bytes >= 2**31:
            slots = slots.long()
        # Division of integers is slow on CPUs, and page sizes are mostly powers of two.
        shift = entries.bit_length() - 1
        page = slots >> shift if entries == 1 << shift else slots // entries
        if stride % layout.data_bytes or start % _WORD_BYTES:
            offset = slots - page * entries
            data_plane, scale_plane = layout.planes(self.cache)
            assert scale_plane is not None
            data.copy_(data_plane[page, offset].view(_WORD))
            scales.copy_(scale_plane[page, offset].view(_WORD).view(-1))
            return
        # Every entry is a whole number of words, and pages a whole number of entries apart: then
        # the value plane of the whole cache is one matrix, and gathering from it a copy of words.
        words = self.cache.view(_WORD)
        row_words, page_words = data.shape[1], stride // _WORD_BYTES
        page_rows = stride // layout.data_bytes
        all_values = ((pages - 1) * page_rows + entries, row_words)
        all_scales = ((pages - 1) * page_words + entries,)
        first_scale = words.storage_offset() + entries * row_words
        values = words.as_strided(all_values, (row_words, 1))
        factors = words.as_strided(all_scales, (1,), first_scale)
        at = torch.add(slots, page, alpha=page_rows - entries)
        torch.index_select(values, 0, at, out=data)
        at = torch.add(slots, page, alpha=page_words - entries)
        torch.index_select(factors, 0, at, out=scales)


class ListedRows(NamedTuple):
    """Rows, and which of them each token attends to.

    Attributes:
        source: rows that the slots number.
        indices: slots listed for each token, [T, K] integers.
        lengths: number of leading columns in use, [T] int32; None for all K.
    """

    source: RowSource
    indices: Tensor
    lengths: Tensor | None

    @classmethod
    def in_cache(cls, rows: CacheRows) -> ListedRows:
        """Return rows of a cache as a source with 2-D slots."""
        source = PageRows(pages_of(rows.cache), get_layout(rows.layout))
        return cls(source, flat(rows.indices), rows.lengths)

    def part(self, tokens: slice) -> ListedRows:
        """Return the lists of a slice of the tokens."""
        lengths = None if self.lengths is None else self.lengths[tokens]
        return self._replace(indices=self.indices[tokens], lengths=lengths)


def read_side_by_side(sources: list[tuple[RowSource, Tensor]], out: Tensor) -> bool:
    """Read slots [groups, n_s] of each source s into ``out`` [groups, sum of n_s, D].

    Returns:
        True if every row is exact in out's dtype; see ``RowSource.read``.
    """
    if not out.numel():
        return True
    layout = _common_fp8_layout(sources)
    if len(sources) > 1 and (layout is None or len(out) > 1):
        parts = out.split([slots.shape[1] for _, slots in sources], dim=1)
        each = zip(sources, parts, strict=True)
        return all(read_side_by_side([source], part) for source, part in each)
    if layout is not None and out.dtype in (torch.bfloat16, torch.float32):
        groups, count, _ = out.shape
        data = torch.empty((groups * count, layout.data_bytes // _WORD_BYTES), dtype=_WORD)
        scales = torch.empty((groups * count,), dtype=_WORD)
        first = 0
        for rows, slots in sources:
            assert isinstance(rows, PageRows)
            last = first + slots.numel()
            rows.gather_words(slots.flatten(), data[first:last], scales[first:last])
            first = last
        if _decode_split_fp8(layout, data, scales, out):
            return True
        if out.dtype == torch.bfloat16:
            return False
    first = 0
    for rows, slots in sources:
        part = out[:, first : first + slots.shape[1]]
        if isinstance(rows, PageRows):
            rows.read_plain(slots, part)
        else:
            rows.read(slots, part)
        first += slots.shape[1]
    return True


def _common_fp8_layout(sources: list[tuple[RowSource, Tensor]]) -> SplitFp8Layout | None:
    """Return the FP8 layout that all sources share, if its entries are whole words."""
    first = sources[0][0]
    layout = first.layout if isinstance(first, PageRows) else None
    if not isinstance(layout, SplitFp8Layout) or layout.scale_bytes != _WORD_BYTES:
        return None
    shared = all(isinstance(rows, PageRows) and rows.layout is layout for rows, _ in sources)
    return layout if shared and layout.data_bytes % _WORD_BYTES == 0 else None


def _decode_split_fp8(layout: SplitFp8Layout, data: Tensor, scales: Tensor, out: Tensor) -> bool:
    """Decode gathered words into ``out`` [..., D] bfloat16 or float32, exactly, or return False."""
    nope, block = layout.nope, layout.block
    blocks = nope // block
    scale = scales.view(torch.uint8).view(-1, _WORD_BYTES)[:, :blocks]
    codes = data.view(torch.int8)[:, :nope]
    if not scales_are_exact(scale) or has_nan_code(codes):
        return False
    lead = out.shape[:-1]
    torch.mul(
        e4m3_values_shifted(codes).view(*lead, blocks, block),
        shifted_scale(scale, out.dtype).view(*lead, blocks, 1),
        out=out[..., :nope].view(*lead, blocks, block),
    )
    out[..., nope:] = data.view(torch.bfloat16)[:, nope // 2 :].view(*lead, -1)
    return True

"""Rows of a cache: slots that a step's tokens write, and rows that they attend to."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.layers.caches import LayerCache
from anymla.ops.attention import CacheRows
from anymla.ops.kv_cache import dequant_gather_slots, dequantize_and_gather_k_cache
from anymla.ops.streams import scratch


@dataclasses.dataclass(frozen=True)
class GroupStep:
    """One cache group's part of a step's metadata.

    Attributes:
        block_table: int32 [R, pages], page ids of each request; unused entries are 0 or negative.
        slot_mapping: int64 [T], slot of each token's row (or of the entry it completes); -1 for
            none.
        page_size: number of entries per page.
    """

    block_table: Tensor
    slot_mapping: Tensor
    page_size: int


@dataclasses.dataclass(frozen=True)
class Rows:
    """Cache rows that each token attends to.

    Attributes:
        indices: int32 [T, K], global slots, valid ones first, then -1.
        lengths: int32 [T], number of valid indices.
    """

    indices: Tensor
    lengths: Tensor

    def in_cache(self, cache: Tensor, layout: str) -> CacheRows:
        """Return the rows of a cache [P, B, row] in a layout, as attention takes them."""
        return CacheRows(cache, layout, self.indices, self.lengths)

    def first(self, tokens: int) -> Rows:
        """Return the rows of the first ``tokens`` tokens."""
        return Rows(self.indices[:tokens], self.lengths[:tokens])


@dataclasses.dataclass(frozen=True)
class NgramRows:
    """Table rows, as stored, of the n-grams that end in each token.

    Attributes:
        weight: floating point [T, columns, D], or uint8 e4m3 codes.
        scale: uint8 ue8m0 [T, columns, D / block] scales of codes, else None.
    """

    weight: Tensor
    scale: Tensor | None


@dataclasses.dataclass(frozen=True)
class PrefillRows:
    """Rows that a chunk of prefill attends to, in one workspace; ``prefill_rows`` makes them.

    Attributes:
        first_token: index of the first of the step's tokens that the workspace serves.
        window: the most rows of a token's window.
        window_slots: int32 [Nw], slots of the window cache.
        entry_slots: int32 [Ne], slots of the compressed cache, or None.
        ranges: int32 [T - first_token, 4], as ``prefill_attention`` takes them.
        entries: the most entries that a token sees.
    """

    first_token: int
    window: int
    window_slots: Tensor
    entry_slots: Tensor | None
    ranges: Tensor
    entries: int

    def decode(self, cache: LayerCache, dtype: torch.dtype, backend: str | None = None) -> Tensor:
        """Decode the workspace [Nw + Ne, D] of a layer's caches, in scratch memory."""
        count = len(self.window_slots)
        more = 0 if self.entry_slots is None else len(self.entry_slots)
        layout = cache.format.main
        rows = scratch((count + more, get_layout(layout).channels), dtype, cache.window.device)
        dequant_gather_slots(
            rows[:count], cache.window, self.window_slots, layout=layout, backend=backend
        )
        if self.entry_slots is not None:
            assert cache.compressed is not None
            dequant_gather_slots(
                rows[count:], cache.compressed, self.entry_slots, layout=cache.format.entries,
                backend=backend,
            )  # fmt: skip
        return rows


@dataclasses.dataclass(frozen=True)
class RequestRows:
    """Rows that the queries of a decode step see, decoded once a request, in one workspace.

    The workspace holds the last W rows of every request's window, then its first E entries. Its
    size is fixed, so that a graph can hold the step; how many of the rows exist is known on the
    device alone. Rows that do not exist are not written, and ``ranges`` leaves them out.

    Attributes:
        window: the most rows of a token's window.
        width: W, rows of the workspace for each request's window.
        held: int32 [R], rows of each request's window.
        stops: int32 [R], positions behind the last tokens.
        window_table: int32 [R, P], pages of the window cache.
        entries: E, 0 without entries.
        visible: int32 [R], entries that the last tokens see, or None.
        entry_table: int32 [R, P], pages of the compressed cache, or None.
        ranges: int32 [T, 4], as ``prefill_attention`` takes them.
        first_token: index of the first of the step's tokens that the workspace serves; 0, for all.
    """

    window: int
    width: int
    held: Tensor
    stops: Tensor
    window_table: Tensor
    entries: int
    visible: Tensor | None
    entry_table: Tensor | None
    ranges: Tensor
    first_token: int = 0

    def decode(self, cache: LayerCache, dtype: torch.dtype, backend: str | None = None) -> Tensor:
        """Decode the workspace [R * (W + E), D] of a layer's caches, in scratch memory."""
        layout = cache.format.main
        requests, channels = len(self.stops), get_layout(layout).channels
        count = requests * self.width
        size = (count + requests * self.entries, channels)
        rows = scratch(size, dtype, cache.window.device)
        dequantize_and_gather_k_cache(
            rows[:count].view(requests, self.width, channels), cache.window, self.stops, self.held,
            self.window_table, layout=layout, backend=backend,
        )  # fmt: skip
        if self.entry_table is not None and self.visible is not None:
            assert cache.compressed is not None
            dequantize_and_gather_k_cache(
                rows[count:].view(requests, self.entries, channels), cache.compressed,
                self.visible, None, self.entry_table, layout=cache.format.entries, backend=backend,
            )  # fmt: skip
        return rows

"""Index scores in torch, computed by tiles of rows and keys.

A tile multiplies the queries of a few rows, all heads, by a chunk of keys, applies relu in place
and sums over the heads: two matrix products around one pass that stays in cache. Every score
belongs to one tile, and its sums only run over channels and heads, so tiling does not change the
order of additions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.formats.page_layout import INDEX_FP8, get_layout
from anymla.formats.pages import pages_of
from anymla.formats.records import RowFp8Layout, RowMxfp4Layout
from anymla.formats.ue8m0 import decode_ue8m0
from anymla.ops import _host
from anymla.ops._check import wide_dtype
from anymla.ops.indexer.reference import values_of

# Function (first, last) that returns keys [G, last - first, D], and a mask [G, last - first] of
# those that exist, or None if all do.
KeyReader = Callable[[int, int], tuple[Tensor, Tensor | None]]

# Elements of a tile of head scores: 4 MiB of float32 fit in a core's cache, 16 MiB in a GPU's.
_CPU_TILE = 1 << 20
_DEVICE_TILE = 1 << 22
# Keys decoded at a time, and rows scored together, which see nearly the same keys if few.
_CPU_KEYS = 4096
_CPU_ROWS = 64

# torch converts float8 elementwise on a CPU, which would cost more than the scores. Shifting bits
# gives float16 instead: an e4m3 code shifted left by seven bits is the float16 of value * 2^-8,
# subnormals included; an e2m1 code shifted left by nine bits is that of value * 2^-14.
_E4M3_TO_FLOAT16 = 2.0**8
_E2M1_TO_FLOAT16 = 2.0**14
_SIGN_AND_CODE = -0x4080  # bits 15 and 13..7 as int16
_MAGNITUDE = 0x3F80


def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor | None,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    q_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Backend of ``interface.mqa_logits`` in torch; see its contract."""
    wide = wide_dtype(q.dtype, weights.dtype)

    def read(first: int, last: int) -> tuple[Tensor, None]:
        keys = _plain(k[first:last], wide)
        if k_scale is not None:
            keys = keys * k_scale[first:last].to(wide).unsqueeze(1)
        return keys.unsqueeze(0), None

    shape = (len(q), len(k))
    logits = q.new_full(shape, -torch.inf, dtype=wide) if out is None else out.fill_(-torch.inf)
    score_rows(
        decoded_queries(q, q_scales, wide).unsqueeze(0),
        weights.to(wide).unsqueeze(0),
        starts.long().clamp(min=0).unsqueeze(0),
        ends.long().clamp(max=len(k)).unsqueeze(0),
        logits.unsqueeze(0),
        read,
        limit=len(k),
    )
    return logits


def paged_mqa_logits(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    *,
    max_context: int,
    layout: str = INDEX_FP8,
    q_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Backend of ``interface.paged_mqa_logits`` in torch; see its contract."""
    wide = wide_dtype(q.dtype, weights.dtype)
    requests, rows = q.shape[:2]
    shape = (requests * rows, max_context)
    logits = q.new_full(shape, -torch.inf, dtype=wide) if out is None else out.fill_(-torch.inf)
    keys = PagedKeys(index_cache, layout, wide)
    most = min(max_context, block_table.shape[1] * keys.page_size)
    if not keys.pages or not logits[:, :most].numel():
        return logits

    queries = decoded_queries(q, q_scales, wide)
    by_request = logits.unflatten(0, (requests, rows))
    weights = weights.to(wide).unflatten(0, (requests, rows))
    ends = context_lens.long().clamp(max=most)
    ends = ends.unsqueeze(1).expand(requests, rows) if ends.ndim == 1 else ends
    starts = torch.zeros_like(ends)
    # If lengths can be read without waiting, each request costs only its own length.
    together = 1 if _host.on_host(q) else max(requests, 1)
    for r in range(0, requests, together):
        group = slice(r, r + together)
        longest = int(ends[group].amax()) if _host.on_host(q) else most
        if longest > 0:
            score_rows(
                queries[group],
                weights[group],
                starts[group],
                ends[group],
                by_request[group],
                keys.of(block_table[group, : -(-longest // keys.page_size)]),
                limit=longest,
                granularity=keys.page_size,
            )
    return logits


def score_rows(
    q: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    logits: Tensor,
    read: KeyReader,
    *,
    limit: int,
    granularity: int = 1,
    scratch_bytes: int | None = None,
) -> None:
    """Write the scores of G groups of rows; the rows of a group share their keys.

    Args:
        q: queries of all groups, [G, J, H, D].
        weights: weights of the heads, [G, J, H].
        starts: first visible key of each row, [G, J] int64.
        ends: one past each row's last visible key, [G, J] int64, at most ``limit``.
        logits: scores [G, J, N] filled with -inf; written where a key is visible.
        read: function that reads a range of keys, see ``KeyReader``.
        limit: number of keys that exist, at most N.
        granularity: number that the first key of each read must be a multiple of.
        scratch_bytes: most bytes of a tile's head scores; None for the fastest tile.
    """
    groups, rows, heads, width = q.shape
    if not groups * rows:
        return
    visible = _Visible(starts, ends, limit)
    first, last = visible.span(0, rows)
    first = first // granularity * granularity
    most_rows, most_keys, tile = _tile_sizes(q, scratch_bytes)
    most_keys = max(1, most_keys // granularity) * granularity
    tile_keys = max(1, min(most_keys, last - first, tile // (groups * most_rows * heads)))
    scratch = q.new_empty(groups * most_rows * heads * tile_keys)
    flat_q = q.reshape(groups, rows * heads, width)

    for block in range(first, last, most_keys):
        block_end = min(block + most_keys, last)
        keys, exist = read(block, block_end)
        for row in range(0, rows, most_rows):
            row_end = min(row + most_rows, rows)
            row_first, row_last = visible.span(row, row_end)
            row_last = min(row_last, block_end)
            for key in range(max(row_first, block), row_last, tile_keys):
                key_end = min(key + tile_keys, row_last)
                part = slice(key - block, key_end - block)
                sums = _head_sums(
                    flat_q[:, row * heads : row_end * heads],
                    weights[:, row:row_end],
                    keys[:, part],
                    scratch,
                )
                hidden = visible.hidden(row, row_end, key, key_end)
                if hidden is not None:
                    sums.masked_fill_(hidden, -torch.inf)
                if exist is not None:
                    sums.masked_fill_(~exist[:, part].unsqueeze(1), -torch.inf)
                logits[:, row:row_end, key:key_end] = sums


def _head_sums(q: Tensor, weights: Tensor, keys: Tensor, scratch: Tensor) -> Tensor:
    """Compute ``sum_h weights[h] * relu(q[h] . keys[n])``.

    Args:
        q: queries with rows and heads flattened, [G, J * H, D].
        weights: weights of the heads, [G, J, H].
        keys: keys of each group, [G, n, D].
        scratch: buffer of at least G * J * H * n elements, overwritten.

    Returns:
        Scores of every row and key, [G, J, n].
    """
    groups, rows, heads = weights.shape
    count = keys.shape[1]
    scores = scratch[: groups * rows * heads * count]
    torch.bmm(q, keys.transpose(1, 2), out=scores.view(groups, rows * heads, count))
    scores.relu_()
    sums = torch.bmm(weights.reshape(-1, 1, heads), scores.view(-1, heads, count))
    return sums.view(groups, rows, count)


def _tile_sizes(q: Tensor, scratch_bytes: int | None) -> tuple[int, int, int]:
    """Return rows of a tile, keys decoded together, and elements of a tile, for q [G, J, H, D]."""
    groups, rows, heads, width = q.shape
    bound = _DEVICE_TILE if scratch_bytes is None else scratch_bytes // q.element_size()
    if _host.on_host(q):
        return min(rows, _CPU_ROWS), _CPU_KEYS, min(_CPU_TILE, bound)
    tile = min(_DEVICE_TILE, bound)
    most_rows = max(1, tile // (groups * heads * 256))
    return min(rows, most_rows), max(1, tile // (groups * width)), tile


class _Visible:
    """Ranges of keys that rows see; on a CPU also as Python numbers, to skip hidden tiles."""

    def __init__(self, starts: Tensor, ends: Tensor, keys: int) -> None:
        self._starts, self._ends = starts, ends
        self._everything = (0, keys)
        self._rows: list[tuple[int, int]] = []
        if _host.on_host(starts):
            assert len(starts) == 1
            bounds = zip(starts[0].tolist(), ends[0].tolist(), strict=True)
            # Rows that see nothing must not widen a span.
            self._rows = [(start, end) if start < end else (keys, 0) for start, end in bounds]

    def span(self, row: int, row_end: int) -> tuple[int, int]:
        """Return bounds of the keys that rows ``row`` to ``row_end`` see, over all groups."""
        if not self._rows:
            return self._everything
        rows = self._rows[row:row_end]
        return min(start for start, _ in rows), max(end for _, end in rows)

    def hidden(self, row: int, row_end: int, key: int, key_end: int) -> Tensor | None:
        """Return a mask [G, rows, keys] of keys that a row does not see; None if all see all."""
        rows = self._rows[row:row_end]
        if rows and all(start <= key and end >= key_end for start, end in rows):
            return None
        column = torch.arange(key, key_end, device=self._starts.device)
        starts, ends = self._starts[:, row:row_end, None], self._ends[:, row:row_end, None]
        return (column < starts) | (column >= ends)


def decoded_queries(q: Tensor, q_scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Convert queries to ``dtype``; packed ones are decoded with their scales."""
    return values_of(q, q_scales, dtype) if q.dtype == torch.uint8 else _plain(q, dtype)


def _plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == torch.float8_e4m3fn:
        return decode_e4m3_bulk(x, dtype)
    return x.to(dtype)


def decode_e4m3_bulk(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode e4m3fn codes (uint8 or float8_e4m3fn, any shape) exactly, NaN included."""
    codes = codes.view(torch.int8)
    bits = codes.to(torch.int16)  # the sign fills the upper byte
    bits.mul_(1 << 7).bitwise_and_(_SIGN_AND_CODE)
    # On a CPU, one pass over the bytes detects NaN; on a device that would have to wait.
    if bits.numel() and (not _host.on_host(codes) or int((codes & 0x7F).amax()) == 0x7F):
        bits.masked_fill_((bits & _MAGNITUDE) == _MAGNITUDE, 0x7E00)
    return bits.view(torch.float16).to(dtype).mul_(_E4M3_TO_FLOAT16)


def decode_mxfp4_bulk(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode packed e2m1 [..., n/2] with scale bytes [..., n/32] to [..., n] of ``dtype``."""
    byte = packed.to(torch.int32)
    # Two float16 side by side: a byte's low nibble becomes the lower half.
    magnitudes = (byte * ((1 << 9) | (1 << 21))).bitwise_and_(0x0E000E00)
    signs = byte.mul_((1 << 12) | (1 << 24)).bitwise_and_(-0x7FFF8000)
    values = magnitudes.bitwise_or_(signs).view(torch.float16).to(dtype).mul_(_E2M1_TO_FLOAT16)
    blocks = values.unflatten(-1, (-1, MXFP4_BLOCK))
    return blocks.mul_(decode_ue8m0(scales, dtype).unsqueeze(-1)).flatten(-2)


class PagedKeys:
    """Reader of an index cache's entries, by chunks.

    Attributes:
        pages: number of pages in the cache.
        page_size: number of entries in a page.
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
        """Make a reader of the entries of G requests.

        Args:
            table: page ids, [G, pages] int32; pages outside the cache are not read.

        Returns:
            Function (first, last) that returns keys [G, last - first, channels], and a bool mask
            [G, last - first] of those that exist, or None if all are known to. ``first`` must be a
            multiple of page_size, ``last`` at most what the table covers.
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

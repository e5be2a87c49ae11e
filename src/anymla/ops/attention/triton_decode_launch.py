"""Launch Triton's attention over listed rows: choose precision, tiles and splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.formats.pages import PageLayout
from anymla.formats.records import PlainRowsLayout, RowNvfp4Layout, SplitFp8Layout
from anymla.ops import device as device_facts
from anymla.ops._epilogue import InverseRopeQuant, QuantizedOut
from anymla.ops._triton_epilogue import inverse_rope_quantize
from anymla.ops.attention.cache_rows import CacheRows, dense
from anymla.ops.attention.decode_config import (
    MODES,
    Tile,
    choose_mode,
    choose_splits,
    choose_tile,
    invariant_splits,
)
from anymla.ops.attention.triton_decode import decode_kernel, row_constants
from anymla.ops.attention.triton_decode_combine import SUMS, AttentionOut, combine_float32
from anymla.ops.device import Target, far_reaching, has_gluon
from anymla.ops.streams import scratch

_LARGEST_INT32 = 2**31 - 1
# Partials of a launch; more tokens take several.
_WORKSPACE_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class RowsParams:
    """Kernel parameters of the rows of a cache, or of a tensor as a cache of one-row pages.

    Attributes:
        rows: tensor that the kernel points into, uint8 for coded rows, else of their dtype.
        coded: layout of coded rows; None for plain ones.
        pages: number of pages.
        entries: number of rows in a page.
        page_stride: number of elements of ``rows`` from page to page.
        row_stride: number of elements of ``rows`` from row to row of a page.
        indices: slots listed for each token, [T, K] int32 with unit stride along K.
        lengths: number of leading columns in use, [T] int32; None for all K.
    """

    rows: Tensor
    coded: PageLayout | None
    pages: int
    entries: int
    page_stride: int
    row_stride: int
    indices: Tensor
    lengths: Tensor | None

    @classmethod
    def in_cache(cls, listed: CacheRows) -> RowsParams:
        """Return the parameters of a cache's rows."""
        cache, layout_id, indices, lengths = listed.dense()
        layout = get_layout(layout_id)
        coded = None if isinstance(layout, PlainRowsLayout) else layout
        pages, entries, width = cache.shape
        return cls(cache, coded, pages, entries, cache.stride(0), width, indices, lengths)


def sparse_attention(
    q: Tensor,
    rows: Sequence[CacheRows],
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    empty_lse: float | None = None,
    batch_invariant: bool = False,
    plan: Tensor | None = None,
    epilogue: InverseRopeQuant | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    lists = [RowsParams.in_cache(each) for each in rows]
    if epilogue is not None:
        to = QuantizedOut.allocate(q, epilogue, device_facts.target_of(q.device).native_e4m3)
        lse = scratch(tuple(q.shape[:2]), torch.float32, q.device)
        attend(q, lists, sink, scale, batch_invariant, AttentionOut(to.codes, lse, quantized=to))
        return to.results(epilogue.n_groups)
    values = q.shape[2] if value_dim is None else value_dim
    return _attend(q, lists, sink, scale, values, empty_lse, batch_invariant, out, None)


def sparse_attention_rows(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lengths: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    value_dim: int = 512,
    empty_lse: float | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    rows = kv.squeeze(1) if kv.ndim == 3 else kv
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    lengths = None if lengths is None else lengths.contiguous()
    step = rows.stride(0)
    listed = RowsParams(rows, None, len(rows), 1, step, step, dense(indices), lengths)
    return _attend(q, [listed], sink, scale, value_dim, empty_lse, batch_invariant, out, max_logits)


def _attend(
    q: Tensor,
    lists: list[RowsParams],
    sink: Tensor | None,
    scale: float | None,
    values: int,
    empty_lse: float | None,
    batch_invariant: bool,
    out: Tensor | None,
    peaks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    given, given_peaks = out, peaks
    if out is None or out.stride(2) != 1:
        out = torch.empty((tokens, heads, values), dtype=q.dtype, device=q.device)
    if peaks is not None and not peaks.is_contiguous():
        peaks = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    empty = float("-inf") if empty_lse is None else empty_lse
    attend(q, lists, sink, scale, batch_invariant, AttentionOut(out, lse, empty, peaks))
    if given_peaks is not None and peaks is not None and peaks is not given_peaks:
        given_peaks.copy_(peaks)
    return (out if given is None or given is out else given.copy_(out)), lse


@dataclasses.dataclass(frozen=True)
class _Scan:
    """Arguments that all launches of one operation share."""

    sink: Tensor | None
    scale: float
    tile: Tile
    mode: str
    target: Target


def attend(
    q: Tensor,
    lists: list[RowsParams],
    sink: Tensor | None,
    scale: float | None,
    batch_invariant: bool,
    to: AttentionOut,
) -> None:
    """Attend to lists of rows; the arguments are the operation's."""
    tokens, heads, channels = q.shape
    if not tokens or not heads:
        return
    q = q if q.stride(2) == 1 else q.contiguous()
    sink = None if sink is None else sink.float().contiguous()
    scale = channels**-0.5 if scale is None else scale
    values = to.out.shape[2]
    target = device_facts.target_of(q.device)
    keys = sum(each.indices.shape[1] for each in lists)
    narrow = [each.coded is not None or each.rows.dtype == torch.bfloat16 for each in lists]
    coded = all(each.coded is not None for each in lists)
    mode = choose_mode(q.dtype == torch.bfloat16 and all(narrow), coded, target)
    # A batch-invariant call must add in the same order whatever the number of tokens.
    width = None if batch_invariant else tokens
    tailless = any(_is_tailless(each.coded) for each in lists)
    packed = any(isinstance(each.coded, RowNvfp4Layout) for each in lists)
    tile = choose_tile(
        heads, keys, width, mode, target, channels, values, tailless=tailless, packed=packed,
        copied=has_gluon() and values == channels and all(map(_is_copied, lists)),
    )  # fmt: skip
    if batch_invariant:
        splits = invariant_splits(keys, tile)
    else:
        splits = choose_splits(tokens * -(-heads // tile.heads), keys, tile, target.sm_count)
    scan = _Scan(sink, scale, tile, mode, target)
    # Lists in caches of different kinds are scanned one after the other, as splits of their own.
    alike = len(lists) == 1 or _kind(lists[0]) == _kind(lists[1])
    groups = [lists] if alike else [[each] for each in lists]
    total = splits * len(groups)
    if total == 1:
        plain = to
        if to.quantized is not None:
            out = scratch(tuple(q.shape), q.dtype, q.device)
            plain = dataclasses.replace(to, out=out, quantized=None)
        _launch(scan, q, lists, (1, 1, 0), plain, plain.out, to.lse)
        if to.quantized is not None:
            inverse_rope_quantize(plain.out, to.quantized)
        return
    step = max(1, min(tokens, _WORKSPACE_BYTES // (4 * total * heads * values)))
    part = scratch((step, total, heads, values), torch.float32, q.device)
    sums = scratch((step, total, heads, SUMS), torch.float32, q.device)
    for start in range(0, tokens, step):
        some = slice(start, start + step)
        for number, group in enumerate(groups):
            listed = [_of(each, some) for each in group]
            _launch(
                scan, q[some], listed, (splits, total, number * splits), to.of(some), part, sums
            )
        combine_float32(part, sums, sink, to.of(some))


def _of(listed: RowsParams, tokens: slice) -> RowsParams:
    lengths = None if listed.lengths is None else listed.lengths[tokens]
    return dataclasses.replace(listed, indices=listed.indices[tokens], lengths=lengths)


def _is_copied(listed: RowsParams) -> bool:
    """Return True if rows are V4's, in pages of 2^n rows at multiples of 16 bytes."""
    fits = listed.entries & (listed.entries - 1) == 0
    return fits and listed.coded is get_layout(MAIN_FP8) and _aligned(listed, 16)


def _is_tailless(coded: PageLayout | None) -> bool:
    """Return True if rows are e4m3 codes in blocks with a scale each, and nothing else."""
    return isinstance(coded, SplitFp8Layout) and coded.nope == coded.channels


def _kind(listed: RowsParams) -> tuple[object, ...]:
    return listed.coded, listed.rows.dtype, listed.row_stride


def _launch(
    scan: _Scan,
    q: Tensor,
    lists: list[RowsParams],
    split: tuple[int, int, int],
    to: AttentionOut,
    part: Tensor,
    sums: Tensor,
) -> None:
    """Launch the decode kernel for one or two lists of the same kind.

    ``split`` is (splits of this launch, splits of the token over all its launches, number of this
    launch's first split among those).
    """
    tokens, heads, channels = q.shape
    splits, total, at = split
    first, second = lists[0], lists[-1]
    if len(lists) > 1 and scan.target.backend == "hip":  # the kernel chooses between addresses
        first, second = map(_far_reaching, lists)
    out, lse, sink, tile = to.out, to.lse, scan.sink, scan.tile
    anything = lse.view(torch.int32)
    if tile.copied:
        from anymla.ops.attention.gluon_sm80_decode import decode_mma_kernel

        cache0, cache1 = (each.rows.view(torch.int32) for each in (first, second))
        decode_mma_kernel[(tokens * -(-heads // tile.heads) * splits,)](
            q, cache0, first.indices, _or(first.lengths, anything),
            cache1, second.indices, _or(second.lengths, anything),
            _or(sink, lse), out, lse, part, sums,
            heads, first.indices.shape[1], second.indices.shape[1], _limit(first), _limit(second),
            first.indices.stride(0), second.indices.stride(0),
            *(each.entries.bit_length() - 1 for each in (first, second)),
            *(each.page_stride // 16 for each in (first, second)), splits, total, at,
            int(first.lengths is not None), int(second.lengths is not None),
            int(sink is not None), scan.scale, to.empty_lse,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1),
            HEADS=tile.heads, TWO=len(lists) > 1, AHEAD=tile.ahead, SPLIT=total > 1,
            NATIVE=bool(scan.target.native_e4m3), num_warps=tile.warps,
        )  # fmt: skip
        return
    decode_kernel[(tokens * -(-heads // tile.heads) * splits,)](
        q, first.rows, first.indices, _or(first.lengths, anything),
        second.rows, second.indices, _or(second.lengths, anything),
        _or(sink, lse), out, lse, _or(to.max_logits, lse), part, sums,
        heads, first.indices.shape[1], second.indices.shape[1], _limit(first), _limit(second),
        first.indices.stride(0), second.indices.stride(0), first.entries, second.entries,
        splits, total, at, int(first.lengths is not None), int(second.lengths is not None),
        int(sink is not None), scan.scale, to.empty_lse,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        first.page_stride, second.page_stride, first.row_stride,
        BH=tile.heads, BN=tile.keys, TWO=len(lists) > 1,
        PEAK=to.max_logits is not None, SPLIT=total > 1,
        CHANNELS=channels, VALUES=out.shape[2], MODE=MODES.index(scan.mode),
        NATIVE=scan.target.native_e4m3, ONCE=tile.once, AHEAD=tile.ahead,
        WORDS=tile.words and all(_aligned(each, 4) for each in lists),
        ROW_PARTS=tile.row_parts,
        ALIGNED=tile.row_parts > 0 and all(_aligned(each, 8) for each in lists),
        **row_constants(first.coded, channels),
        num_warps=tile.warps, num_stages=1,
    )  # fmt: skip


def _far_reaching(listed: RowsParams) -> RowsParams:
    rows, indices = far_reaching(listed.rows), far_reaching(listed.indices)
    return dataclasses.replace(listed, rows=rows, indices=indices)


def _aligned(listed: RowsParams, unit: int) -> bool:
    """Return True if coded rows begin at multiples of ``unit`` bytes."""
    return (listed.page_stride | listed.rows.data_ptr()) % unit == 0


def _or(given: Tensor | None, other: Tensor) -> Tensor:
    return other if given is None else given


def _limit(listed: RowsParams) -> int:
    return min(listed.pages * listed.entries, _LARGEST_INT32)

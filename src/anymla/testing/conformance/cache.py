"""Cases L1 .. L8: positions of bytes in a cache."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anymla.formats.cache_dump import CacheDumpError, load_cache, save_cache
from anymla.formats.page_layout import (
    INDEX_FP8,
    INDEX_MXFP4,
    MAIN_FP8,
    ROWS_BF16_512,
    ROWS_FP32_128,
    get_layout,
)
from anymla.layers.caches import CACHE_FORMATS
from anymla.ops.attention import CacheRows
from anymla.testing.conformance.expected import attend, index_scale, index_scores
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case, expect
from anymla.testing.conformance.scene import Scene, coded, scope
from anymla.testing.generate import guarded_cache, hostile_indices, scattered_pages, slots_of
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries
from anymla.testing.tolerance import assert_close, assert_identical

_INSERT = "quantize_and_insert_k_cache"


@case("L1", "index pages hold all values, then all scales", _INSERT, "paged_mqa_logits")
def index_pages(ops: Ops) -> None:
    for layout in (INDEX_FP8, INDEX_MXFP4):
        guarded = guarded_cache(layout, 5, 64)
        keys = torch.randn(128, 128).bfloat16()
        table = torch.tensor([[3, 1]], dtype=torch.int32)
        slots = slots_of(table, 0, torch.arange(128), 64)
        ops.quantize_and_insert_k_cache(keys, guarded.cache, slots, layout=layout)
        for slot, key in zip(slots.tolist(), keys, strict=True):
            page, offset = divmod(slot, 64)
            payload = guarded.cache[page].flatten()
            data, scales = get_layout(layout).data_bytes, get_layout(layout).scale_bytes
            value = payload[offset * data : (offset + 1) * data]
            start = 64 * data + offset * scales
            scale = payload[start : start + scales]
            stored = ROW_FORMATS[layout].decode(value.unsqueeze(0), scale.unsqueeze(0))
            want = ROW_FORMATS[layout].round(key.double().unsqueeze(0))
            assert_identical(stored, want, name=f"{layout} slot {slot}")
        q, weights = coded(1, 2, 8, 128), torch.randn(2, 8)
        lens = torch.tensor([[65, 128]], dtype=torch.int32)
        got = ops.paged_mqa_logits(
            q, guarded.cache, weights, lens, table, max_context=130, layout=layout
        )
        rows = ROW_FORMATS[layout].decode(*read_entries(guarded.cache, slots, layout))
        _check_scores(ops, got, q[0], rows, weights, lens[0], f"{layout} scores")


def _check_scores(
    ops: Ops, got: Tensor, q: Tensor, keys: Tensor, weights: Tensor, lens: Tensor, name: str
) -> None:
    want = torch.full(got.shape, -torch.inf, dtype=torch.float64)
    want[:, : len(keys)] = index_scores(q, keys, weights)
    want = torch.where(torch.arange(got.shape[1]) < lens.unsqueeze(1), want, -torch.inf)
    scale = torch.zeros(got.shape, dtype=torch.float64)
    scale[:, : len(keys)] = index_scale(q, keys, weights)
    assert_close(got, want, atol=ops.dot_error, scale=scale, name=name)


@case(
    "L2",
    "584 bytes an entry, whatever the page size",
    _INSERT,
    "dequantize_and_gather_k_cache",
    quick=True,
)
def main_pages(ops: Ops) -> None:
    for entries, stride in ((64, 37440), (2, 1728), (256, 149760), (53, 31104)):
        layout = get_layout(MAIN_FP8)
        expect(layout.page_stride_bytes(entries) == stride, f"page of {entries}: {stride} bytes")
        cache = layout.allocate(4, entries)
        expect(cache.dtype == torch.uint8, "the cache is exposed as bytes")
        expect(list(cache.shape) == [4, entries, 584], "the cache is exposed as [P, B, 584]")
        rows = torch.randn(entries, 512).bfloat16()
        slots = 2 * entries + torch.arange(entries)
        ops.quantize_and_insert_k_cache(rows, cache, slots)
        page = cache[2].flatten()
        rope = page[: entries * 576].view(entries, 576)[:, 448:].contiguous().view(torch.bfloat16)
        assert_identical(rope, rows[:, 448:], name=f"rope channels in pages of {entries}")
        scales = page[entries * 576 :].view(entries, 8)
        expect(bool((scales[:, 7] == 0).all()), "the eighth scale byte is written as 0")
        expect(bool((scales[:, :7] > 100).all()), "seven scale bytes an entry")
        out = torch.full((1, entries, 512), torch.nan)
        lens = torch.tensor([entries], dtype=torch.int32)
        table = torch.tensor([[2]], dtype=torch.int32)
        ops.dequantize_and_gather_k_cache(out, cache, lens, None, table)
        want = ROW_FORMATS[MAIN_FP8].round(rows.double())
        assert_identical(out[0].double(), want, name=f"pages of {entries} read back")


@case(
    "L3",
    "the page stride and the offset come from the tensor; bytes between pages stay as they are",
    _INSERT,
    "dequant_gather_slots",
    "sparse_attention",
)
def strided_pages(ops: Ops) -> None:
    for layout_id in (MAIN_FP8, INDEX_FP8, ROWS_BF16_512):
        layout = get_layout(layout_id)
        buffer = torch.full((4 * 299520,), 0xFF, dtype=torch.uint8)
        stride = 149760 // layout.dtype.itemsize
        shape = (7, 8, layout.row_elements)
        touched: set[int] = set()
        for start in (0, 37440, 74880, 112320):
            offset = start // layout.dtype.itemsize
            cache = buffer.view(layout.dtype).as_strided(
                shape, (stride, layout.row_elements, 1), offset
            )
            rows = torch.randn(3, layout.channels).bfloat16()
            slots = torch.tensor([1, 8 + 7, 6 * 8])
            ops.quantize_and_insert_k_cache(rows, cache, slots, layout=layout_id)
            for slot in slots.tolist():
                page = start + slot // 8 * 149760
                data, scale = layout.data_bytes, layout.scale_bytes
                touched |= set(range(page + slot % 8 * data, page + (slot % 8 + 1) * data))
                page += 8 * data
                touched |= set(range(page + slot % 8 * scale, page + (slot % 8 + 1) * scale))
            out = torch.empty(3, layout.channels)
            ops.dequant_gather_slots(out, cache, slots.int(), layout=layout_id)
            want = ROW_FORMATS[layout_id].round(rows.double())
            assert_identical(out.double(), want, name=f"{layout_id} at byte {start}")
            if layout.channels == 512:
                q = torch.randn(1, 2, 512).bfloat16()
                indices = slots.int().unsqueeze(0)
                result = ops.sparse_attention(q, [CacheRows(cache, layout_id, indices)])
                attend(q, [want]).check(result, f"{layout_id} at byte {start}")
        changed = set((buffer != 0xFF).nonzero().flatten().tolist())
        expect(changed <= touched, f"{layout_id}: bytes outside the entries were written")


@case(
    "L4",
    "offsets beyond 2^31 bytes",
    _INSERT,
    "dequant_gather_slots",
    "sparse_attention",
    "paged_mqa_logits",
)
def wide_offsets(ops: Ops) -> None:
    for layout_id, entries in ((MAIN_FP8, 64), (INDEX_FP8, 64)):
        layout = get_layout(layout_id)
        stride = layout.page_stride_bytes(entries)
        pages = 2**31 // stride + 3
        # numpy asks the system for zeroed memory, of which no page is used until it is touched.
        buffer = torch.from_numpy(np.zeros(pages * stride, dtype=np.uint8))
        cache = buffer.as_strided(
            (pages, entries, layout.row_elements), (stride, layout.row_elements, 1)
        )
        rows = torch.randn(2, layout.channels).bfloat16()
        slots = torch.tensor([(pages - 1) * entries + 5, 3])
        ops.quantize_and_insert_k_cache(rows, cache, slots, layout=layout_id)
        want = ROW_FORMATS[layout_id].round(rows.double())
        stored = ROW_FORMATS[layout_id].decode(*read_entries(cache, slots, layout_id))
        assert_identical(stored, want, name=f"{layout_id} written beyond 2^31 bytes")
        out = torch.empty(2, layout.channels)
        ops.dequant_gather_slots(out, cache, slots.int(), layout=layout_id)
        assert_identical(out.double(), want, name=f"{layout_id} read beyond 2^31 bytes")
        if layout_id == MAIN_FP8:
            q = torch.randn(1, 2, 512).bfloat16()
            listed = CacheRows(cache, layout_id, slots.int().unsqueeze(0))
            attend(q, [want]).check(ops.sparse_attention(q, [listed]))
            continue
        q, weights = coded(1, 1, 4, 128), torch.randn(1, 4)
        table = torch.tensor([[pages - 1]], dtype=torch.int32)
        lens = torch.tensor([6], dtype=torch.int32)
        got = ops.paged_mqa_logits(q, cache, weights, lens, table, max_context=6)
        _check_scores(ops, got[:, 5:], q[0], want[:1], weights, lens, "key beyond 2^31 bytes")


@case(
    "L5",
    "pages of 2, 64, 128 and 256 entries give the same results",
    _INSERT,
    "dequantize_and_gather_k_cache",
    "sparse_attention",
)
def page_sizes(ops: Ops) -> None:
    rows, q = torch.randn(300, 512).bfloat16(), torch.randn(2, 4, 512).bfloat16()
    numbers = torch.stack([torch.randperm(300)[:50] for _ in range(2)])
    want_rows = ROW_FORMATS[MAIN_FP8].round(rows.double())
    want = attend(q, [want_rows[chosen] for chosen in numbers])
    for entries in (1, 2, 61, 64, 128, 256):
        table, pages = scattered_pages([300], entries)
        guarded = guarded_cache(MAIN_FP8, pages, entries)
        slots = slots_of(table, 0, torch.arange(300), entries)
        ops.quantize_and_insert_k_cache(rows, guarded.cache, slots)
        out = torch.empty(1, 300, 512)
        lens = torch.tensor([300], dtype=torch.int32)
        ops.dequantize_and_gather_k_cache(out, guarded.cache, lens, None, table)
        assert_identical(out[0].double(), want_rows, name=f"pages of {entries}")
        listed = CacheRows(guarded.cache, MAIN_FP8, slots[numbers].int())
        want.check(ops.sparse_attention(q, [listed]), f"pages of {entries}")


@case(
    "L6",
    "NaN in unused slots, freed pages and behind invalid indices reaches nothing",
    "sparse_attention",
    "sparse_attention_rows",
    "dequant_gather_slots",
    "dequantize_and_gather_k_cache",
    "paged_mqa_logits",
    quick=True,
)
def poisoned_slots(ops: Ops) -> None:
    for layout in (MAIN_FP8, ROWS_BF16_512):
        for behind in (False, True):
            given = Scene(
                torch.randn(3, 4, 512).bfloat16(),
                scope(3, 40, lengths=[40, 11, 0], layout=layout, poison_behind=behind),
                scope(3, 20, lengths=[3, 20, 0], page=2, layout=layout, poison_behind=behind),
            )
            arguments, keywords = given.arguments()
            name = f"{layout}, {'NaN rows' if behind else 'nothing'} behind the lengths"
            given.expected().check(ops.sparse_attention(*arguments, **keywords), name)
        limit = given.main.cache.shape[0] * given.main.cache.shape[1]
        slots = hostile_indices(limit, 30)
        slots[::3] = given.main.indices[0, :10]
        out = torch.full((30, 512), torch.nan)
        ops.dequant_gather_slots(out, given.main.cache, slots, layout=layout)
        expect(bool(out.isfinite().all()), "hostile slots must give zero rows")
        expect(bool((out[1::3] == 0).all()), "hostile slots must give zero rows")

    _poisoned_rows(ops)
    table, pages = scattered_pages([70, 3], 64)
    guarded = guarded_cache(INDEX_FP8, pages, 64)
    keys = torch.randn(73, 128)
    slots = torch.cat([slots_of(table, r, torch.arange(n), 64) for r, n in ((0, 70), (1, 3))])
    guarded.write(slots, keys)
    q, weights = coded(2, 1, 4, 128), torch.randn(2, 4)
    lens = torch.tensor([70, 3], dtype=torch.int32)
    got = ops.paged_mqa_logits(q, guarded.cache, weights, lens, table, max_context=190)
    rows = ROW_FORMATS[INDEX_FP8].round(keys.double())
    _check_scores(ops, got[:1], q[0], rows[:70], weights[:1], lens[:1], "scores beside poison")
    _check_scores(ops, got[1:], q[1], rows[70:], weights[1:], lens[1:], "scores beside poison")
    expect(not len(guarded.changed()), "reading must not write")


def _poisoned_rows(ops: Ops) -> None:
    q, kv = torch.randn(2, 4, 512).bfloat16(), torch.randn(60, 1, 512).bfloat16()
    kv[30:] = torch.nan
    indices = torch.stack([torch.randperm(60) for _ in range(2)]).int()
    lengths = torch.tensor([7, 20], dtype=torch.int32)
    for token, count in enumerate(lengths.tolist()):
        indices[token, :count] = torch.randperm(30)[:count].int()
    rows = [kv[indices[token, :count].long(), 0].double() for token, count in enumerate((7, 20))]
    out, lse = ops.sparse_attention_rows(q, kv, indices.unsqueeze(1), lengths)
    attend(q, rows).check((out, lse), "plain rows, NaN behind the lengths")


@case("L7", "a cache dtype is one that exists, or a clear error")
def cache_dtypes(ops: Ops) -> None:
    for name, chosen in CACHE_FORMATS.items():
        main, index = get_layout(chosen.main), get_layout(chosen.index)
        expect(main.channels == 512, f"{name}: {chosen.main} must hold 512 channels")
        expect(index.channels == 128, f"{name}: {chosen.index} must hold 128 channels")
    message = _error(ValueError, lambda: get_layout("auto"))
    expect("auto" in message and MAIN_FP8 in message, f"name it and what exists: {message!r}")


@case("L8", "layout ids are explicit and compared", _INSERT, "sparse_attention")
def layout_ids(ops: Ops) -> None:
    plain = get_layout(ROWS_BF16_512).allocate(2, 4)
    packed = get_layout(MAIN_FP8).allocate(2, 4)
    rows, slots = torch.randn(1, 512), torch.zeros(1, dtype=torch.int64)
    q, indices = torch.randn(1, 1, 512), torch.zeros(1, 1, dtype=torch.int32)
    for wrong, layout in ((plain, MAIN_FP8), (packed, ROWS_BF16_512), (packed, INDEX_FP8)):
        for call in (
            lambda: ops.quantize_and_insert_k_cache(rows, wrong, slots, layout=layout),  # noqa: B023
            lambda: ops.sparse_attention(q, [CacheRows(wrong, layout, indices)]),  # noqa: B023
        ):
            message = _error((TypeError, ValueError), call)
            expect(layout in message, f"the message must name layout {layout}: {message!r}")
    unknown = [CacheRows(packed, "v5", indices)]
    message = _error(ValueError, lambda: ops.sparse_attention(q, unknown))
    expect("v5" in message, f"the message must name the unknown layout: {message!r}")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "cache"
        save_cache(path, packed, MAIN_FP8)
        cache, layout_id, _ = load_cache(path)
        expect(layout_id == MAIN_FP8, "a dump must carry its layout id")
        assert_identical(cache, packed, name="dumped cache")
        save_cache(path, get_layout(ROWS_FP32_128).allocate(1, 1), ROWS_FP32_128)
        path.write_bytes(path.read_bytes().replace(b"rows_fp32_128", b"rows_fp32_000"))
        _error(CacheDumpError, lambda: load_cache(path))


def _error(kind: type[Exception] | tuple[type[Exception], ...], call: object) -> str:
    assert callable(call)
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind}, but nothing was raised")

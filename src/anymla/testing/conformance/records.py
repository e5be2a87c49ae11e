"""Cases L9, Q8 and Q9: the records of DeepSeek-V4.1's caches."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import (
    MAIN_FP8,
    V41_COMPRESSED_NVFP4,
    V41_COMPRESSED_NVFP4_SPLIT,
    V41_LAYOUTS,
    V41_MAIN_FP8,
    V41_MAIN_FP8_SPLIT,
    get_layout,
)
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case, expect
from anymla.testing.conformance.scene import Scene, scope
from anymla.testing.generate import guarded_cache
from anymla.testing.oracle import rounding
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries
from anymla.testing.tolerance import assert_identical

_INSERT = "quantize_and_insert_k_cache"

# The two leading values of a block that is otherwise zero, with its scale byte and codes.
_FP8_GOLDEN = (
    ((1.0, -0.5), 119, (0x78, 0xF0)),
    ((6.0, 1.0), 121, (0x7C, 0x68)),
    ((1e-5, -2e-5), 105, (0x62, 0xEA)),
    ((3000.0, 10.0), 130, (0x7C, 0x3A)),
)
_NVFP4_GOLDEN = (
    ((0.0, 0.0), 0x01, 0x00),
    ((1.0, -0.5), 0x23, 0xD7),
    ((0.1, -0.3), 0x15, 0xF4),
    ((7.0, 2.5), 0x39, 0x47),
    ((3.5, 0.0371), 0x31, 0x07),
    ((1e-5, -2e-5), 0x01, 0x80),
    ((3000.0, 10.0), 0x7E, 0x07),
)


@case(
    "L9",
    "V4.1's entries hold their scales behind their values; split pages hold all values first",
    _INSERT,
    "dequant_gather_slots",
    "dequantize_and_gather_k_cache",
    "sparse_attention",
)
def arrangements(ops: Ops) -> None:
    for layout_id, width in zip(V41_LAYOUTS, (528, 528, 288, 288), strict=True):
        row_format = ROW_FORMATS[layout_id]
        guarded = guarded_cache(layout_id, 3, 32)
        expect(guarded.cache.shape[2] == width, f"{layout_id} takes {width} bytes an entry")
        rows, slots = torch.randn(32, 512).bfloat16(), 32 + torch.randperm(32)
        ops.quantize_and_insert_k_cache(rows, guarded.cache, slots, layout=layout_id)
        data, scales = get_layout(layout_id).encode(rows)
        assert scales is not None
        page = guarded.cache[1].flatten()
        for row, offset in enumerate((slots - 32).tolist()):
            start, behind = offset * data.shape[1], 32 * data.shape[1] + offset * scales.shape[1]
            if row_format.interleaved:
                start = offset * width
                behind = start + data.shape[1]
            name = f"{layout_id}, entry {offset}"
            assert_identical(page[start : start + data.shape[1]], data[row], name=f"{name}, values")
            held = page[behind : behind + scales.shape[1]]
            assert_identical(held, scales[row], name=f"{name}, scales")
        inside = set[int]().union(*map(guarded.entry_bytes, range(32, 64)))
        expect(
            set(guarded.changed().tolist()) <= inside, f"{layout_id}: bytes outside were written"
        )
        want = row_format.decode(*read_entries(guarded.cache, slots, layout_id))
        out = torch.full((32, 512), torch.nan)
        ops.dequant_gather_slots(out, guarded.cache, slots.int(), layout=layout_id)
        assert_identical(out.double(), want, name=f"{layout_id} gathered by slots")
        out = torch.full((1, 32, 512), torch.nan)
        table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([32], dtype=torch.int32)
        ops.dequantize_and_gather_k_cache(out, guarded.cache, lens, None, table, layout=layout_id)
        order = slots.argsort()
        assert_identical(out[0].double(), want[order], name=f"{layout_id} gathered in order")
        given = Scene(torch.randn(3, 4, 512).bfloat16(), scope(3, 40, page=32, layout=layout_id))
        arguments, keywords = given.arguments()
        given.expected().check(ops.sparse_attention(*arguments, **keywords), layout_id)


@case(
    "Q8",
    "NVFP4 rows: the e4m3 scale nearest to amax / 6 of 16 channels, within 2^-9 and 448; then "
    "values, the earlier channel in the low nibble",
    _INSERT,
    "dequant_gather_slots",
)
def nvfp4_rows(ops: Ops) -> None:
    for layout_id in (V41_COMPRESSED_NVFP4, V41_COMPRESSED_NVFP4_SPLIT):
        rows = torch.randn(64, 512) * torch.exp2(torch.randint(-10, 11, (64, 1)).float())
        for block, (values, _, _) in enumerate(_NVFP4_GOLDEN):
            rows[0, 16 * block : 16 * block + 16] = 0
            rows[0, 16 * block : 16 * block + 2] = torch.tensor(values)
        rows[1], rows[2, ::2] = 0, -0.0
        rows = rows.bfloat16()
        cache = get_layout(layout_id).allocate(1, 64)
        slots = torch.randperm(64)
        ops.quantize_and_insert_k_cache(rows, cache, slots, layout=layout_id)
        data, scales = read_entries(cache, slots, layout_id)
        for block, (values, scale, byte) in enumerate(_NVFP4_GOLDEN):
            expect(int(scales[0, block]) == scale, f"scale byte of {values}: {scales[0, block]}")
            expect(int(data[0, 8 * block]) == byte, f"codes of {values}: {data[0, 8 * block]}")
        stored, exact = ROW_FORMATS[layout_id].decode(data, scales), rows.double()
        assert_identical(stored, ROW_FORMATS[layout_id].round(exact), name="rows read back")
        amax = exact.view(64, 32, 16).abs().amax(-1).clamp(min=6 * 2.0**-9)
        nearest = rounding.nearest_code(amax / 6, rounding.e4m3_values())
        assert_identical(scales.long(), nearest, name="scale bytes")
        _hostile_scales(ops, layout_id)


def _hostile_scales(ops: Ops, layout_id: str) -> None:
    """Check that bytes which no writer emits decode to NaN, and nothing else does."""
    layout = get_layout(layout_id)
    cache = layout.allocate(1, 8, fill=0xFF)
    data, scales = layout.planes(cache)
    assert scales is not None
    scales[0] = torch.arange(256).view(8, 32).to(torch.uint8)
    data[0] = torch.randint(0, 256, (8, 256)).to(torch.uint8)
    slots = torch.arange(8)
    want = ROW_FORMATS[layout_id].decode(*read_entries(cache, slots, layout_id))
    out = torch.zeros(8, 512)
    ops.dequant_gather_slots(out, cache, slots.int(), layout=layout_id)
    assert_identical(out.isnan(), want.isnan(), name="NaN of any scale byte")
    known = want.nan_to_num(0.0)
    assert_identical(out.double().nan_to_num(0.0), known, name="values of any scale byte")


@case(
    "Q9",
    "V4.1's window is e4m3 in blocks of 32, rotated channels too; its entries are read in the "
    "record of their own cache",
    _INSERT,
    "sparse_attention",
    also=("prefill_attention", "dequant_gather_slots"),
    quick=True,
)
def v41_rows(ops: Ops) -> None:
    for layout_id in (V41_MAIN_FP8, V41_MAIN_FP8_SPLIT):
        rows = torch.randn(32, 512) * torch.exp2(torch.randint(-20, 11, (32, 1)).float())
        for block, (values, _, _) in enumerate(_FP8_GOLDEN):
            for start in (32 * block, 512 - 32 * (block + 1)):
                rows[0, start : start + 32] = 0
                rows[0, start : start + 2] = torch.tensor(values)
        rows = rows.bfloat16()
        cache = get_layout(layout_id).allocate(1, 32)
        slots = torch.randperm(32)
        ops.quantize_and_insert_k_cache(rows, cache, slots, layout=layout_id)
        data, scales = read_entries(cache, slots, layout_id)
        for block, (values, scale, codes) in enumerate(_FP8_GOLDEN):
            for place in (block, 15 - block):
                expect(int(scales[0, place]) == scale, f"scale byte of {values}")
                held = tuple(data[0, 32 * place : 32 * place + 2].tolist())
                expect(held == codes, f"codes of {values}: {held}")
        stored = ROW_FORMATS[layout_id].decode(data, scales)
        assert_identical(stored, ROW_FORMATS[layout_id].round(rows.double()), name="rows read back")
    for window, entries in (
        (V41_MAIN_FP8, V41_COMPRESSED_NVFP4),
        (V41_MAIN_FP8_SPLIT, V41_COMPRESSED_NVFP4_SPLIT),
        (V41_MAIN_FP8, V41_MAIN_FP8),
        (MAIN_FP8, V41_COMPRESSED_NVFP4),
    ):
        given = Scene(
            torch.randn(3, 4, 512).bfloat16(),
            scope(3, 32, lengths=[32, 5, 0], page=32, layout=window),
            scope(3, 40, lengths=[40, 0, 9], page=64, layout=entries),
        )
        want, name = given.expected(), f"{window} with {entries}"
        arguments, keywords = given.arguments()
        want.check(ops.sparse_attention(*arguments, **keywords), name)
        if ops.has("prefill_attention"):
            want.check(_decoded_first(ops, given), f"{name}, decoded first")


def _decoded_first(ops: Ops, given: Scene) -> tuple[Tensor, Tensor]:
    """Attend as a chunk of a prompt does: to the listed rows of both caches in one workspace."""
    assert given.extra is not None
    workspace: list[Tensor] = []
    ranges = []
    for token in range(len(given.q)):
        run = []
        for part in (given.main, given.extra):
            slots = part.indices[token, : part.lengths[token]]
            rows = torch.empty(len(slots), 512, dtype=torch.bfloat16)
            ops.dequant_gather_slots(rows, part.cache, slots, layout=part.layout)
            run += [sum(len(each) for each in workspace), len(slots)]
            workspace.append(rows)
        ranges.append(run)
    result: tuple[Tensor, Tensor] = ops.prefill_attention(
        given.q, torch.cat(workspace), torch.tensor(ranges, dtype=torch.int32),
        window=32, entries=40,
    )  # fmt: skip
    return result

"""Attention of one token over a range of its listed rows.

Grid: one axis of tokens x blocks of heads x splits, the splits of a token side by side.

Each program walks over its share of the token's lists, see ``triton_walk``. With ``SPLITS`` > 1
the programs of a token share its blocks and leave their sums for ``triton_merge``.

FP8 rows are computed in float16. What does not fit into it turns the sums into NaN, and then the
program computes its range again in bfloat16; see ``triton_rows``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import triton
import triton.language as tl

from anymla.formats.page_layout import MAIN_FP8, V32_FP8, get_layout
from anymla.formats.pages import PageLayout
from anymla.formats.records import InlineFp8Layout, SplitFp8Layout
from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.sparse_attention.tiles import MODES, Tile, tile
from anymla.ops.sparse_attention.triton_merge import SUMS
from anymla.ops.sparse_attention.triton_sides import across, store_heads
from anymla.ops.sparse_attention.triton_walk import LOG2E, walk

# What FP8 says of the rows: plain, scales in a plane of their own, or in the row.
PLAIN, SPLIT_PLANES, INLINE = 0, 1, 2

_SUMS = tl.constexpr(SUMS)
_LN2 = tl.constexpr(0.6931471805599453)


# Numbers rather than constants, so that a call with lengths or a sink compiles nothing new.
COUNTS = ["H", "K0", "K1", "limit0", "limit1", "list_stride0", "list_stride1", "entries0",
          "entries1", "splits", "total", "at", "has_length0", "has_length1",
          "has_sink"]  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def scan_kernel(
    q_ptr, kv0_ptr, list0_ptr, length0_ptr, kv1_ptr, list1_ptr, length1_ptr, sink_ptr,
    out_ptr, lse_ptr, peak_ptr, part_ptr, sums_ptr,
    H, K0, K1, limit0, limit1, list_stride0, list_stride1, entries0, entries1,
    splits, total, at, has_length0, has_length1, has_sink, scale, empty,
    q_token, q_head, out_token, out_head, page0, page1, row_stride,
    BH: tl.constexpr, BN: tl.constexpr, KEYS_FIRST: tl.constexpr, TWO: tl.constexpr,
    PEAK: tl.constexpr, SPLIT: tl.constexpr,
    FP8: tl.constexpr, BLOCK: tl.constexpr, DATA: tl.constexpr, SCALES: tl.constexpr,
    CHANNELS: tl.constexpr, VALUES: tl.constexpr, W3: tl.constexpr, W4: tl.constexpr,
    MODE: tl.constexpr, NATIVE: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """See the file. Splits leave part [T, total, H, VALUES] and sums [T, total, H, 3], float32."""
    T3: tl.constexpr = 384 + W3
    KEY: tl.constexpr = VALUES <= T3
    program = tl.program_id(0).to(tl.int64)
    groups = tl.cdiv(H, BH)
    split = (program % splits).to(tl.int32)
    group = (program // splits % groups).to(tl.int32)
    token = program // splits // groups
    heads = group * BH + tl.arange(0, BH)
    none = tl.zeros([], tl.int32)
    # Without lengths, or a sink, the pointers lead to other numbers of the same kind.
    n0 = tl.where(none < has_length0, tl.load(length0_ptr + token), K0)
    n1 = tl.where(none < has_length1, tl.load(length1_ptr + token), K1)
    n0 = tl.minimum(tl.maximum(n0, 0), none + K0)
    n1 = tl.minimum(tl.maximum(n1, 0), none + K1)
    list0 = list0_ptr + token * list_stride0
    list1 = list1_ptr + token * list_stride1
    blocks0 = tl.cdiv(n0, BN)
    blocks = blocks0
    if TWO:
        blocks += tl.cdiv(n1, BN)
    each = tl.cdiv(blocks, splits)
    first = split * each
    last = tl.minimum(first + each, blocks)
    q = q_ptr + token * q_token

    peak, top, sums, a0, a1, a2, a3, a4 = walk(
        q, q_head, heads, H, scale, first, last, blocks0, n0, n1, list0, list1, limit0, limit1,
        kv0_ptr, kv1_ptr, page0, page1, entries0, entries1, row_stride,
        BH, BN, KEYS_FIRST, TWO, FP8, BLOCK, DATA, SCALES, CHANNELS, W3, W4, KEY, MODE, NATIVE,
        ONCE,
    )  # fmt: skip
    if MODE == 0:
        # x * 0 is NaN for what is not finite; rows out of float16's range show in these two.
        seen = tl.sum(tl.where(heads < H, sums, 0.0) * 0.0)
        if not KEY:
            seen += tl.sum(tl.sum(a4 * 0.0, 1), 0)
        if seen != seen:
            peak, top, sums, a0, a1, a2, a3, a4 = walk(
                q, q_head, heads, H, scale, first, last, blocks0, n0, n1, list0, list1,
                limit0, limit1, kv0_ptr, kv1_ptr, page0, page1, entries0, entries1, row_stride,
                BH, BN, KEYS_FIRST, TWO, FP8, BLOCK, DATA, SCALES, CHANNELS, W3, W4, KEY, 1,
                NATIVE, ONCE,
            )  # fmt: skip

    if SPLIT:
        row = (token * total + at + split) * H
        to = part_ptr + row * VALUES
        stride = VALUES
        left = sums_ptr + (row + heads) * _SUMS
        tl.store(left, top, mask=heads < H)
        tl.store(left + 1, sums, mask=heads < H)
        if PEAK:
            tl.store(left + 2, peak, mask=heads < H)
    else:
        sink = tl.load(sink_ptr + heads, mask=heads < H, other=0.0)
        sink = tl.where(none < has_sink, sink, float("-inf"))
        bottom = sums + tl.exp2(sink * LOG2E - top)
        share = across(tl.where(sums == 0, 0.0, 1.0 / bottom), KEYS_FIRST)
        a0, a1, a2, a3, a4 = a0 * share, a1 * share, a2 * share, a3 * share, a4 * share
        lse = tl.where(sums == 0, empty, (top + tl.log2(sums)) * _LN2)
        tl.store(lse_ptr + token * H + heads, lse, mask=heads < H)
        if PEAK:
            peak = tl.where(sums == 0, float("-inf"), peak * _LN2)
            tl.store(peak_ptr + token * H + heads, peak, mask=heads < H)
        to = out_ptr + token * out_token
        stride = out_head
    store_heads(to, stride, heads, H, a0, 0, 128, VALUES, KEYS_FIRST)
    store_heads(to, stride, heads, H, a1, 128, 128, VALUES, KEYS_FIRST)
    store_heads(to, stride, heads, H, a2, 256, 128, VALUES, KEYS_FIRST)
    store_heads(to, stride, heads, H, a3, 384, W3, VALUES, KEYS_FIRST)
    if not KEY:
        store_heads(to, stride, heads, H, a4, T3, W4, VALUES, KEYS_FIRST)


_POINTERS = {"length0_ptr": "*i32", "length1_ptr": "*i32", "list0_ptr": "*i32", "list1_ptr": "*i32",
             "sink_ptr": "*fp32", "lse_ptr": "*fp32", "peak_ptr": "*fp32", "part_ptr": "*fp32",
             "sums_ptr": "*fp32"}  # fmt: skip
_INTEGERS = (*COUNTS, "q_token", "q_head", "out_token", "out_head", "page0", "page1", "row_stride")
_ALIGNED = ("q_token", "q_head", "out_token", "out_head", "page0", "page1", "row_stride")


@dataclasses.dataclass(frozen=True)
class _Call:
    """What kind of call a specialisation is for.

    Attributes:
        mode: one of MODES.
        layout: FP8 layout of the rows, or None for plain rows of the mode's type.
        channels: of a row.
        two: two caches.
        peak: the largest scores are asked for.
    """

    mode: str
    layout: str | None = None
    channels: int = 512
    two: bool = True
    peak: bool = False

    def __str__(self) -> str:
        marks = (self.layout, f"{self.channels} channels", "peak" if self.peak else None)
        return " ".join([self.mode, *(mark for mark in marks if mark)])


_CALLS = (
    _Call("float16", MAIN_FP8),
    _Call("float16", V32_FP8, channels=576, two=False),
    _Call("bfloat16"),
    _Call("bfloat16", two=False, peak=True),
    _Call("bfloat16", channels=576, two=False, peak=True),
    _Call("float32"),
)


def build(chosen: Tile, call: _Call, target: Target, *, split: bool) -> Build:
    """One specialisation."""
    layout = None if call.layout is None else get_layout(call.layout)
    q = "*fp32" if call.mode == "float32" else "*bf16"
    rows = "*u8" if layout else q
    return Build(
        f"{chosen} {call}{' split' if split else ''}",
        scan_kernel,
        {"q_ptr": q, "out_ptr": q, "kv0_ptr": rows, "kv1_ptr": rows, "scale": "fp32",
         "empty": "fp32"} | _POINTERS | dict.fromkeys(_INTEGERS, "i32"),
        {"BH": chosen.heads, "BN": chosen.keys, "KEYS_FIRST": chosen.keys_first, "TWO": call.two,
         "PEAK": call.peak, "SPLIT": split,
         "CHANNELS": call.channels, "VALUES": 512, "MODE": MODES.index(call.mode),
         "NATIVE": target.native_e4m3, "ONCE": chosen.once} | row_constants(layout, call.channels),
        num_warps=chosen.warps, num_stages=chosen.stages, divisible=_ALIGNED,
        matrix=call.mode != "float32", spills=_accepted_spills(chosen, target, call.channels),
    )  # fmt: skip


def row_constants(coded: PageLayout | None, channels: int) -> dict[str, int]:
    """What the kernel has to know of rows: of an FP8 layout, or plain ones of ``channels``."""
    wide = -(-max(channels, 512) // 64) * 64 - 512
    tiles = {"W3": 128 if wide else 64, "W4": 128 if wide > 64 else 64}
    if isinstance(coded, SplitFp8Layout):
        kind = {"FP8": SPLIT_PLANES, "BLOCK": coded.block, "SCALES": coded.scale_bytes}
        return kind | {"DATA": coded.data_bytes} | tiles
    if isinstance(coded, InlineFp8Layout):
        assert (coded.nope, coded.block) == (512, 128)
        kind = {"FP8": INLINE, "BLOCK": coded.block, "SCALES": coded.rope_start - coded.nope}
        return kind | {"DATA": coded.data_bytes} | tiles
    return {"FP8": PLAIN, "BLOCK": 0, "SCALES": 0, "DATA": 0} | tiles


def _accepted_spills(chosen: Tile, target: Target, channels: int) -> int:
    """Spill instructions over both loops, of which the second hardly ever runs.

    64 heads x 512 channels of sums are half of all registers of an H200's multiprocessor, and it
    is still the fastest tile there. RDNA has no registers for queries as matrix operands, whatever
    the tile; nothing was measured on it.
    """
    if target.name.startswith("gfx1"):
        return 1500
    if chosen.heads == 64:
        return 700
    if target.native_e4m3:
        return 10
    return 100 if channels <= 512 else 200


def builds(target: Target) -> Iterator[Build]:
    """Every tile of every kind of call, with and without splits."""
    for call in _CALLS:
        tiles = {
            tile(heads, 640, tokens, call.mode, target, 132, call.channels)
            for heads in (16, 32, 64)
            for tokens in (1, None)
        }
        for chosen in sorted(tiles, key=str):
            for split in (False, True):
                yield build(chosen, call, target, split=split)

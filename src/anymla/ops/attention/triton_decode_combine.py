"""Combine the partials of the splits of every work tile: one softmax over the splits and the sink.

    combine_float32_kernel    combines float32 partials of the portable kernel, which cuts all
                              tokens into the same number of splits. Grid: tokens x heads x slices
                              of ``BV`` values; a CTA reads [splits, BV].
    combine_splits_kernel     combines float16 partials of Hopper's kernels where every cut work
                              tile has as many splits, or as many as a table says (BY_BLOCKS).
                              Grid: work tiles x heads of a tile x slices of the channels; a CTA
                              reads one row of each partial.
    combine_stream_k_kernel   combines float16 partials of stream-K. Grid: CTAs of the decode kernel
                              x groups of heads. Where a CTA's range begins inside a work tile, the
                              first such CTA of the work tile combines it, row by row and partial by
                              partial.

A float32 partial comes with ``SUMS`` numbers per head: reference exponent, sum of probabilities and
highest score (written only on request). A float16 partial is divided by its sum; its first channels
still hold ``LIFT``, and every head a power of two, which is not 1 where float16 would not hold the
quotient.

Hopper's combines are launched while the decode kernel still runs, and wait for its end. The output
is stored as it is, or rotated back and quantised for the output projection (ROPE_DIM > 0).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._epilogue import QuantizedOut, epilogue_constants, epilogue_pointers
from anymla.ops._triton_epilogue import store_quantized
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch
from anymla.ops.attention.decode_config import (
    FEW_PARTIALS,
    STREAM_K_AT_ONCE,
    STREAM_K_GROUP,
    Cut,
    Schedule,
    choose_combine_tile,
    combine_warps,
)
from anymla.ops.attention.float16_range import LIFT
from anymla.ops.device import target_of
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait

_FEW = tl.constexpr(FEW_PARTIALS)
SLICE = 256  # values per CTA of ``combine_float32_kernel``
SUMS = 3

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_NO_SPLIT = tl.constexpr(-1e30)
_UNLIFT = tl.constexpr(2.0**-LIFT)


@triton.jit(do_not_specialize=["H", "splits", "has_sink", "angles"])
def combine_float32_kernel(
    part_ptr, sums_ptr, sink_ptr, out_ptr, lse_ptr, peak_ptr, H, splits, out_token, out_head,
    has_sink, empty, scales_ptr, positions_ptr, table_ptr, angles,
    S: tl.constexpr, VALUES: tl.constexpr, BV: tl.constexpr,
    PEAK: tl.constexpr, SUMS: tl.constexpr,
    ROPE_DIM: tl.constexpr = 0, TYPE: tl.constexpr = None, NATIVE: tl.constexpr = False,
):  # fmt: skip
    """Combine float32 partials; S is a power of two of at least ``splits``.

    If ROPE_DIM is not 0, ``out_ptr`` takes codes, and the arguments of ``store_quantized`` are
    given.
    """
    slices: tl.constexpr = (VALUES + BV - 1) // BV
    program = tl.program_id(0).to(tl.int64)
    slice_of = program % slices
    head = program // slices % H
    token = program // slices // H
    split = tl.arange(0, S)
    row = (token * splits + split) * H + head
    there = split < splits
    top = tl.load(sums_ptr + row * SUMS, mask=there, other=-1e30)
    sums = tl.load(sums_ptr + row * SUMS + 1, mask=there, other=0.0)
    channel = slice_of * BV + tl.arange(0, BV)
    inside = there[:, None] & (channel < VALUES)[None, :]
    part = tl.load(part_ptr + row[:, None] * VALUES + channel[None, :], mask=inside, other=0.0)
    highest = tl.max(top, 0)
    weight = tl.exp2(top - highest)
    total = tl.sum(sums * weight, 0)
    sink = tl.where(tl.zeros([], tl.int32) < has_sink, tl.load(sink_ptr + head), float("-inf"))
    bottom = total + tl.exp2(sink * _LOG2E - highest)
    value = tl.sum(part * weight[:, None], 0) * tl.where(total == 0, 0.0, 1.0 / bottom)
    if ROPE_DIM > 0:
        store_quantized(
            value[None, :], (slice_of * BV).to(tl.int32), token, head.to(tl.int32), H, out_ptr,
            scales_ptr, positions_ptr, table_ptr, angles, 1, BV, VALUES, ROPE_DIM, TYPE, NATIVE,
        )  # fmt: skip
    else:
        to = out_ptr + token * out_token + head * out_head + channel
        tl.store(to, value.to(out_ptr.dtype.element_ty), mask=channel < VALUES)
    if slice_of == 0:
        lse = tl.where(total == 0, empty, (highest + tl.log2(total)) * _LN2)
        tl.store(lse_ptr + token * H + head, lse)
        if PEAK:
            peak = tl.max(tl.load(sums_ptr + row * SUMS + 2, mask=there, other=-1e30), 0)
            peak = tl.where(total == 0, float("-inf"), peak * _LN2)
            tl.store(peak_ptr + token * H + head, peak)


class PartialRows(NamedTuple):
    """Partials of Hopper's kernels, laid out as in ``combine_splits_kernel``.

    Attributes:
        parts: pointer to one row for each head of each slot.
        sums: pointer to four numbers for each row.
        ROWS: heads in a tile.
        CHANNELS: channels per row.
        LIFTED: first channel that is not stored times 2^``LIFT``.
    """

    parts: Any
    sums: Any
    ROWS: Any
    CHANNELS: Any
    LIFTED: Any


class OutputHeads(NamedTuple):
    """Destination of combined heads, laid out as in ``combine_splits_kernel``.

    Attributes:
        heads: pointer to the output, or to its codes.
        lse: pointer to one number per head.
        token_stride: elements from one token's heads to the next.
        head_stride: elements from one head to the next.
        empty: lse of a token without rows.
        scales, positions, table, angles, TYPE, NATIVE: arguments of ``store_quantized``.
        ROPE_DIM: argument of ``store_quantized``; 0 for output that is not quantised.
    """

    heads: Any
    lse: Any
    token_stride: Any
    head_stride: Any
    empty: Any
    scales: Any
    positions: Any
    table: Any
    angles: Any
    ROPE_DIM: Any
    TYPE: Any
    NATIVE: Any


@triton.jit
def _weight(sums_ptr, at, there):
    """Load the reference exponents, the sums, and the factors that partials are multiplied by."""
    top = tl.load(sums_ptr + at * 4, mask=there, other=_NO_SPLIT)
    sums = tl.load(sums_ptr + at * 4 + 1, mask=there, other=0.0)
    return top, sums, sums * tl.load(sums_ptr + at * 4 + 2, mask=there, other=0.0)


@triton.jit
def _combine_head(
    partials, to, sink_ptr, slot, others, count, row, token, head, part, H,
    WIDTH: tl.constexpr, MOST: tl.constexpr, AT_ONCE: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Combine WIDTH channels of one head from its partials.

    They are at ``slot``, then ``others`` + 1, ``others`` + 2 and so on. This is the work of one
    warp, and nothing goes through shared memory.
    """
    channel = part * WIDTH + tl.arange(0, WIDTH)
    split = tl.arange(0, MOST)
    there = split < count
    at = tl.where(split == 0, slot, others + split).to(tl.int64) * partials.ROWS + row
    if MOST == AT_ONCE:
        # Issue all loads at once, before anything is computed.
        values = tl.load(
            partials.parts + at[:, None] * partials.CHANNELS + channel[None, :],
            mask=there[:, None], other=0.0, volatile=True,
        )  # fmt: skip
    top, sums, factor = _weight(partials.sums, at, there)
    highest = tl.max(top, 0)
    total = tl.sum(sums * tl.exp2(top - highest), 0)
    bottom = total
    if SINK:
        bottom += tl.exp2(tl.load(sink_ptr + head) * _LOG2E - highest)
    if MOST == AT_ONCE:
        value = tl.sum(values.to(tl.float32) * (factor * tl.exp2(top - highest))[:, None], 0)
    else:
        value = tl.zeros([WIDTH], tl.float32)
        for start in range(0, count, AT_ONCE):
            some = start + tl.arange(0, AT_ONCE)
            here = tl.where(some == 0, slot, others + some).to(tl.int64) * partials.ROWS + row
            listed = some < count
            tops, _, factors = _weight(partials.sums, here, listed)
            weight = factors * tl.exp2(tops - highest)
            rows_of = partials.parts + here[:, None] * partials.CHANNELS + channel[None, :]
            values = tl.load(rows_of, mask=listed[:, None], other=0.0)
            value += tl.sum(values.to(tl.float32) * weight[:, None], 0)
    value = value * tl.where(channel < partials.LIFTED, _UNLIFT, 1.0)
    value = value * tl.where(total == 0, 0.0, 1.0 / bottom)
    if to.ROPE_DIM > 0:
        store_quantized(
            value[None, :], (part * WIDTH).to(tl.int32), token, head.to(tl.int32), H, to.heads,
            to.scales, to.positions, to.table, to.angles, 1, WIDTH, partials.CHANNELS,
            to.ROPE_DIM, to.TYPE, to.NATIVE,
        )  # fmt: skip
    else:
        heads = to.heads + token * to.token_stride + head * to.head_stride + channel
        tl.store(heads, value.to(to.heads.dtype.element_ty))
    if part == 0:
        lse = tl.where(total == 0, to.empty, (highest + tl.log2(total)) * _LN2)
        tl.store(to.lse + token * H + head, lse)


@triton.jit
def _add_partial(partials, at, listed, channel, highest, total, value):
    """Add one partial of each of some heads to their sums, relative to a new reference exponent."""
    values = tl.load(
        partials.parts + at[:, None] * partials.CHANNELS + channel[None, :],
        mask=listed[:, None], other=0.0,
    )  # fmt: skip
    top, sums, factor = _weight(partials.sums, at, listed)
    peak = tl.maximum(highest, top)
    decay, weight = tl.exp2(highest - peak), tl.exp2(top - peak)
    total = total * decay + sums * weight
    value = value * decay[:, None] + values.to(tl.float32) * (factor * weight)[:, None]
    return peak, total, value


@triton.jit
def _combine_group(
    partials, to, sink_ptr, first, splits, row, token, head, H,
    GROUP: tl.constexpr, MOST: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Combine GROUP heads from their partials, one partial at a time."""
    CHANNELS: tl.constexpr = partials.CHANNELS
    heads = tl.arange(0, GROUP)
    there = head + heads < H
    channel = tl.arange(0, CHANNELS)
    highest = tl.full([GROUP], _NO_SPLIT, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    value = tl.zeros([GROUP, CHANNELS], tl.float32)
    at = first * partials.ROWS + row + heads
    if MOST <= _FEW:
        for split in tl.static_range(MOST):
            listed = there & (heads * 0 + split < splits)
            highest, total, value = _add_partial(
                partials, at + split * partials.ROWS, listed, channel, highest, total, value
            )
    else:
        # Go in pairs, so that two loads are in flight at a time.
        for split in range(0, splits, 2):
            for part in tl.static_range(2):
                listed = there & (heads * 0 + split + part < splits)
                highest, total, value = _add_partial(
                    partials, at + (split + part) * partials.ROWS, listed, channel, highest, total,
                    value,
                )  # fmt: skip
    bottom = total
    if SINK:
        sink = tl.load(sink_ptr + head + heads, mask=there, other=0.0)
        bottom += tl.exp2(sink * _LOG2E - highest)
    value = value * tl.where(total == 0, 0.0, 1.0 / bottom)[:, None]
    value = value * tl.where(channel < partials.LIFTED, _UNLIFT, 1.0)[None, :]
    if to.ROPE_DIM > 0:
        store_quantized(
            value, 0, token, head.to(tl.int32), H, to.heads, to.scales, to.positions, to.table,
            to.angles, GROUP, CHANNELS, CHANNELS, to.ROPE_DIM, to.TYPE, to.NATIVE,
        )  # fmt: skip
    else:
        rows = to.heads + token * to.token_stride + (head + heads)[:, None] * to.head_stride
        tl.store(rows + channel[None, :], value.to(to.heads.dtype.element_ty), mask=there[:, None])
    lse = tl.where(total == 0, to.empty, (highest + tl.log2(total)) * _LN2)
    tl.store(to.lse + token * H + head + heads, lse, mask=there)


@triton.jit(do_not_specialize=["H", "splits", "first_cut", "rows", "angles"])
def combine_splits_kernel(
    part_ptr, sums_ptr, sink_ptr, out_ptr, lse_ptr, order_ptr, H, splits, first_cut, rows,
    out_token, out_head, empty, scales_ptr, positions_ptr, table_ptr, angles,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    MOST: tl.constexpr, AT_ONCE: tl.constexpr, SINK: tl.constexpr, PDL: tl.constexpr,
    LONGEST_FIRST: tl.constexpr, BY_BLOCKS: tl.constexpr, LIFTED: tl.constexpr,
    ROPE_DIM: tl.constexpr, TYPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Combine float16 partials of work tiles that are cut by a number of splits or by a table.

    ``part_ptr`` is float16 [slots, ROWS, CHANNELS] and ``sums_ptr`` float32 [slots, ROWS, 4]:
    reference exponent, sum, factor of the partial, padding. ``order_ptr`` is int32 [T], the order
    of tokens, if LONGEST_FIRST; and int32 [work tiles, 2], first split and number of splits of each
    work tile, if BY_BLOCKS. Work tiles from ``first_cut`` on are cut into ``splits``, and ``rows``
    of a tile's heads exist. Channels from LIFTED on are not stored times 2^``LIFT``.

    A CTA has WIDTH channels of GROUP heads, all of their channels if GROUP is above 1. It reads
    AT_ONCE partials at once, and no work tile has more than MOST; both are powers of two.

    If ROPE_DIM is not 0, ``out_ptr`` takes codes, and the arguments of ``store_quantized`` are
    given by their names.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slices: tl.constexpr = CHANNELS // WIDTH
    program = tl.program_id(0).to(tl.int64)
    part = program % slices
    groups = tl.cdiv(rows, GROUP)
    row = program // slices % groups * GROUP
    number = program // slices // groups
    work_tile = first_cut + number
    tiles = tl.cdiv(H, ROWS)
    token = work_tile // tiles
    if LONGEST_FIRST:
        work_tiles = first_cut + tl.num_programs(0) // (slices * groups)
        if tl.load(order_ptr + work_tiles // tiles) != 0:
            return
        token = tl.load(order_ptr + token).to(tl.int64)
    head = work_tile % tiles * ROWS + row
    if head >= H:
        return
    first = number * splits
    if BY_BLOCKS:
        first = tl.load(order_ptr + number * 2).to(tl.int64)
        splits = tl.load(order_ptr + number * 2 + 1)
    if GROUP > 1:
        _combine_group(
            PartialRows(part_ptr, sums_ptr, ROWS, CHANNELS, LIFTED),
            OutputHeads(
                out_ptr, lse_ptr, out_token, out_head, empty,
                scales_ptr, positions_ptr, table_ptr, angles, ROPE_DIM, TYPE, NATIVE,
            ),
            sink_ptr, first, splits, row, token, head, H, GROUP, MOST, SINK,
        )  # fmt: skip
    else:
        _combine_head(
            PartialRows(part_ptr, sums_ptr, ROWS, CHANNELS, LIFTED),
            OutputHeads(
                out_ptr, lse_ptr, out_token, out_head, empty,
                scales_ptr, positions_ptr, table_ptr, angles, ROPE_DIM, TYPE, NATIVE,
            ),
            sink_ptr, first, first, splits, row, token, head, part, H, WIDTH, MOST, AT_ONCE, SINK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["H", "work_tiles", "ctas", "angles"])
def combine_stream_k_kernel(
    part_ptr, sums_ptr, spans_ptr, sink_ptr, out_ptr, lse_ptr, H, work_tiles, ctas,
    out_token, out_head, empty, scales_ptr, positions_ptr, table_ptr, angles,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr,
    AT_ONCE: tl.constexpr, SINK: tl.constexpr, PDL: tl.constexpr, LIFTED: tl.constexpr,
    ROPE_DIM: tl.constexpr, TYPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Combine float16 partials of stream-K; other arguments are those of ``combine_splits_kernel``.

    ``spans_ptr`` is int32 [work_tiles + ctas, 2]: first and last CTA of each work tile, then for
    each CTA the work tile in whose middle its range begins, or -1. ``work_tiles`` and ``ctas`` are
    those of the decode kernel. GROUP is the number of heads per CTA.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    groups: tl.constexpr = ROWS // GROUP
    cta = tl.program_id(0) // groups
    work_tile = tl.load(spans_ptr + (work_tiles + cta) * 2).to(tl.int64)
    if work_tile < 0:
        return
    first = tl.load(spans_ptr + work_tile * 2)
    last = tl.load(spans_ptr + work_tile * 2 + 1)
    if first != cta - 1:
        return
    tiles = tl.cdiv(H, ROWS)
    token = work_tile // tiles
    for number in tl.static_range(GROUP):
        row = (tl.program_id(0) % groups) * GROUP + number
        head = work_tile % tiles * ROWS + row
        if head < H:
            _combine_head(
                PartialRows(part_ptr, sums_ptr, ROWS, CHANNELS, LIFTED),
                OutputHeads(
                    out_ptr, lse_ptr, out_token, out_head, empty,
                    scales_ptr, positions_ptr, table_ptr, angles, ROPE_DIM, TYPE, NATIVE,
                ),
                sink_ptr, first, ctas + first, last + 1 - first, row, token, head, cta * 0, H,
                CHANNELS, MOST, AT_ONCE, SINK,
            )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AttentionOut:
    """Output tensors of a call of attention.

    Attributes:
        out: output heads of all tokens, [T, H, values].
        lse: log-sum-exp of each head, float32 [T, H].
        empty_lse: lse of a token without rows.
        max_logits: float32 [T, H] for the largest scores, or None.
        quantized: if given, receives the output instead of ``out``, which then only gives the
            shape.
    """

    out: Tensor
    lse: Tensor
    empty_lse: float = float("-inf")
    max_logits: Tensor | None = None
    quantized: QuantizedOut | None = None

    def of(self, tokens: slice) -> AttentionOut:
        """Select the outputs of some tokens."""
        peaks = None if self.max_logits is None else self.max_logits[tokens]
        quantized = None if self.quantized is None else self.quantized.of(tokens)
        return AttentionOut(self.out[tokens], self.lse[tokens], self.empty_lse, peaks, quantized)


@dataclasses.dataclass(frozen=True)
class Partials:
    """Partials that the splits of Hopper's kernels store, for ``combine_splits_kernel``.

    Attributes:
        part: unscaled results of the splits, float16 [slots, heads of a tile, channels].
        sums: numbers of each head, float32 [slots, heads of a tile, 4].
        spans: int32; for stream-K the ``spans_ptr`` of ``combine_stream_k_kernel``, otherwise the
            ``order_ptr`` of ``combine_splits_kernel``.
        lifted: first channel that is not stored times 2^``LIFT``.
    """

    part: Tensor
    sums: Tensor
    spans: Tensor
    lifted: int


def combine_float32(part: Tensor, sums: Tensor, sink: Tensor | None, to: AttentionOut) -> None:
    """Launch the combine of the portable kernel's ``part`` [>= T, splits, H, values]."""
    out, lse = to.out, to.lse
    tokens, heads, values = out.shape
    count = part.shape[1]
    combine_float32_kernel[(tokens * heads * -(-values // SLICE),)](
        part, sums, lse if sink is None else sink,
        out if to.quantized is None else to.quantized.codes, lse,
        lse if to.max_logits is None else to.max_logits, heads, count, out.stride(0),
        out.stride(1), int(sink is not None), to.empty_lse, *epilogue_pointers(to.quantized, lse),
        S=triton.next_power_of_2(count), VALUES=values, BV=SLICE,
        PEAK=to.max_logits is not None, SUMS=SUMS, **epilogue_constants(to.quantized),
        num_warps=combine_warps(count, target_of(out.device)),
    )  # fmt: skip


def combine(
    schedule: Schedule,
    partials: Partials,
    sink: Tensor | None,
    to: AttentionOut,
    *,
    pdl: bool = True,
) -> None:
    """Launch the combine of the partials of Hopper's kernels.

    Args:
        schedule: schedule of the decode kernel.
        partials: partials that the decode kernel stored.
        sink: sinks of the heads, float32 [H], or None.
        to: outputs of the work tiles that were cut.
        pdl: True to launch while the decode kernel still runs.
    """
    part, sums, spans, lse = partials.part, partials.sums, partials.spans, to.lse
    result = to.out if to.quantized is None else to.quantized.codes
    sinks = lse if sink is None else sink
    epilogue = tuple(epilogue_constants(to.quantized).items())
    given = sink is not None, partials.lifted, pdl, epilogue
    launch, *numbers = _combination(schedule, to.out.shape, *given)
    end = (
        *numbers, result.stride(0), result.stride(1), to.empty_lse,
        *epilogue_pointers(to.quantized, lse),
    )  # fmt: skip
    if schedule.cut == Cut.STREAM_K:
        launch(part, sums, spans, sinks, result, lse, *end)
    else:
        launch(part, sums, sinks, result, lse, spans, *end)


@functools.lru_cache(LAUNCHES)
def _combination(
    schedule: Schedule,
    shape: tuple[int, int, int],
    sink: bool,
    lifted: int,
    pdl: bool,
    epilogue: tuple[tuple[str, Any], ...],
) -> tuple[Any, ...]:
    """Prepare the launch for results of a shape; return it with the kernel's first numbers."""
    tokens, heads, channels = shape
    work_tiles, rows = tokens * schedule.head_tiles, schedule.heads
    common = {
        "ROWS": rows, "CHANNELS": channels, "SINK": sink, "LIFTED": lifted, "PDL": pdl,
        **dict(epilogue),
    }  # fmt: skip
    if pdl:
        common["launch_pdl"] = True
    if schedule.cut == Cut.STREAM_K:
        launch = PreparedLaunch(
            combine_stream_k_kernel, (schedule.ctas * (rows // STREAM_K_GROUP),),
            GROUP=STREAM_K_GROUP, MOST=triton.next_power_of_2(schedule.ctas),
            AT_ONCE=STREAM_K_AT_ONCE, num_warps=1, **common,
        )  # fmt: skip
        return launch, heads, work_tiles, schedule.ctas
    most = triton.next_power_of_2(schedule.splits)
    whole, some = schedule.first_cut(tokens), min(heads, rows)
    # The tile decides in which order partials are added up, so an invariant call must not choose it
    # by the number of tokens.
    all_heads = some if schedule.invariant else (work_tiles - whole) * some
    by_blocks = schedule.cut == Cut.BY_BLOCKS
    tile = choose_combine_tile(all_heads, channels, most, by_blocks=by_blocks)
    groups = -(-some // tile.group)
    launch = PreparedLaunch(
        combine_splits_kernel, ((work_tiles - whole) * groups * (channels // tile.width),),
        WIDTH=tile.width, GROUP=tile.group, MOST=most, AT_ONCE=tile.at_once,
        LONGEST_FIRST=schedule.longest_first, BY_BLOCKS=by_blocks, num_warps=tile.warps, **common,
    )  # fmt: skip
    return launch, heads, schedule.splits, whole, some

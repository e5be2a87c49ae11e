"""Store the compressor's projections of each token in the state cache.

Grid: one program for ROWS consecutive tokens; the tile is ROWS rows of PADDED >= WIDTH channels.

    token  | kv | score + ape[position mod ratio] |  -> state of slot_mapping[token], or nothing
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops.device import Target, target_of
from anymla.ops.pdl import pdl_launch, target_has_pdl

_TILE = 2048


@dataclasses.dataclass(frozen=True)
class Config:
    """Tokens of a program, channels of its tile, and its warps."""

    rows: int
    padded: int
    num_warps: int


def config(width: int, target: Target) -> Config:
    """Sixteen values and sixteen scores a thread; a wider row gets more threads."""
    padded = triton.next_power_of_2(width)
    warps = max(_TILE, padded) // (16 * target.warp_size)
    return Config(max(1, _TILE // padded), padded, min(16, warps))


@triton.jit(do_not_specialize=["count", "capacity"])
def save_partial_states_kernel(
    kv,
    score,
    ape,
    positions,
    state,
    slots,
    count,
    kv_row_stride,
    kv_column_stride,
    score_row_stride,
    score_column_stride,
    ape_row_stride,
    ape_column_stride,
    page_stride,
    capacity,
    RATIO: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store ``count`` rows; strides in elements, capacity in slots."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, PADDED)
    given = row < count
    there = given[:, None] & (channel < WIDTH)[None, :]
    slot = tl.load(slots + row, mask=given, other=-1)
    position = tl.load(positions + row, mask=given, other=0)
    at = kv + row[:, None] * kv_row_stride + (channel * kv_column_stride)[None, :]
    value = tl.load(at, mask=there, other=0.0)
    at = score + row[:, None] * score_row_stride + (channel * score_column_stride)[None, :]
    logit = tl.load(at, mask=there, other=0.0)
    # Of a negative position too the modulus is not negative.
    within = (position % RATIO + RATIO) % RATIO
    at = ape + within[:, None] * ape_row_stride + (channel * ape_column_stride)[None, :]
    logit += tl.load(at, mask=there, other=0.0)
    valid = (slot >= 0) & (slot < capacity)
    known = tl.where(valid, slot, 0)
    at = state + (known // ENTRIES) * page_stride + (known % ENTRIES) * (2 * WIDTH)
    there = there & valid[:, None]
    tl.store(at[:, None] + channel[None, :], value, mask=there)
    tl.store(at[:, None] + WIDTH + channel[None, :], logit, mask=there)


def save_partial_states(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    positions: Tensor,
    state_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_ratio: int,
) -> None:
    """See ``interface.save_partial_states``."""
    count, (pages, entries, _) = slot_mapping.shape[0], state_cache.shape
    if not count or not pages:
        return
    width = kv.shape[1]
    chosen = config(width, target_of(kv.device))
    save_partial_states_kernel[(triton.cdiv(count, chosen.rows),)](
        kv,
        score,
        ape,
        positions.contiguous(),
        state_cache,
        slot_mapping.contiguous(),
        count,
        kv.stride(0),
        kv.stride(1),
        score.stride(0),
        score.stride(1),
        ape.stride(0),
        ape.stride(1),
        state_cache.stride(0),
        pages * entries,
        compress_ratio,
        entries,
        width,
        chosen.padded,
        chosen.rows,
        num_warps=chosen.num_warps,
        enable_fp_fusion=False,
        **pdl_launch(kv.device),
    )


def builds(target: Target) -> Iterator[Build]:
    """The three compressors of DeepSeek-V4: (ratio, tokens of a state page, width)."""
    strides = ("kv_row_stride", "score_row_stride", "ape_row_stride", "page_stride")
    for ratio, entries, width in ((4, 4, 1024), (128, 8, 512), (4, 4, 256)):
        chosen = config(width, target)
        yield Build(
            label=f"ratio {ratio}, width {width}",
            kernel=save_partial_states_kernel,
            types={
                **dict.fromkeys(("kv", "score", "ape", "state"), "*fp32"),
                **dict.fromkeys(("positions", "slots"), "*i64"),
                **dict.fromkeys((*strides, "count", "capacity"), "i32"),
            },
            constants={
                "kv_column_stride": 1,
                "score_column_stride": 1,
                "ape_column_stride": 1,
                "RATIO": ratio,
                "ENTRIES": entries,
                "WIDTH": width,
                "PADDED": chosen.padded,
                "ROWS": chosen.rows,
                "PDL": target_has_pdl(target),
            },
            num_warps=chosen.num_warps,
            fp_fusion=False,
            divisible=strides,
        )

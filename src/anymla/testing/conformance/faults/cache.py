"""Deliberate faults of writing and reading caches, each with its intended cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.testing.conformance.faults.fault import GOOD, fault


def dense_pages(cache: Tensor) -> Tensor:
    return cache.as_strided(
        cache.shape, (cache.shape[1] * cache.shape[2], cache.shape[2], 1), cache.storage_offset()
    )


def _rolled_scales(cache: Tensor, layout: str) -> None:
    _, scales = get_layout(layout).planes(cache)
    if scales is not None:
        scales.copy_(scales.roll(1, 1))


@fault("quantize_and_insert_k_cache", "L1", "L2", "L3", "L5", "Q3")
def scale_plane_shifted(
    k: Tensor, cache: Tensor, slots: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    GOOD.quantize_and_insert_k_cache(k, cache, slots, layout=layout)
    _rolled_scales(cache, layout)


@fault("quantize_and_insert_k_cache", "L1", "L2")
def records_lie_one_after_the_other(
    k: Tensor, cache: Tensor, slots: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    data, scales = get_layout(layout).encode(k)
    if scales is None:
        return
    row = torch.cat((data, scales), 1)
    cache[slots // cache.shape[1], slots % cache.shape[1]] = row


@fault("quantize_and_insert_k_cache", "L3", "L5")
def page_stride_taken_from_the_shape(
    k: Tensor, cache: Tensor, slots: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    GOOD.quantize_and_insert_k_cache(k, dense_pages(cache), slots, layout=layout)


@fault("dequant_gather_slots", "L4")
def offsets_of_32_bits(
    out: Tensor, cache: Tensor, indices: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    pages = 2**31 // cache.stride(0)
    GOOD.dequant_gather_slots(out, cache, indices % (pages * cache.shape[1]), layout=layout)


@fault("quantize_and_insert_k_cache", "L4")
def rows_written_with_offsets_of_32_bits(
    k: Tensor, cache: Tensor, slots: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    pages = 2**31 // cache.stride(0) // get_layout(layout).dtype.itemsize
    slots = slots % (pages * cache.shape[1])
    GOOD.quantize_and_insert_k_cache(k, cache, slots, layout=layout)


@fault("dequant_gather_slots", "L6")
def minus_one_reads_the_last_row(
    out: Tensor, cache: Tensor, indices: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    limit = cache.shape[0] * cache.shape[1]
    GOOD.dequant_gather_slots(out, cache, indices % limit, layout=layout)


@fault("dequantize_and_gather_k_cache", "L2", "L5")
def gather_assumes_pages_of_64(
    out: Tensor, cache: Tensor, lens: Tensor, gathered: Any, table: Tensor, **rest: Any
) -> None:
    GOOD.dequantize_and_gather_k_cache(out, cache, lens.clamp(max=64), gathered, table, **rest)


@fault("dequant_gather_slots", "Q1")
def codes_read_as_fnuz(
    out: Tensor, cache: Tensor, indices: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    GOOD.dequant_gather_slots(out, cache, indices, layout=layout)
    out[:, :448] /= 2


@fault("quantize_and_insert_k_cache", "Q3")
def codes_are_truncated(
    k: Tensor, cache: Tensor, slots: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    GOOD.quantize_and_insert_k_cache(k * (1 - 2**-5), cache, slots, layout=layout)


@fault("mxfp4_linear", "Q4")
def scales_are_cast_to_bytes(x: Tensor, packed: Tensor, scale: Tensor, **rest: Any) -> Any:
    return GOOD.mxfp4_linear(x, packed, scale.to(torch.uint8), **rest)


@fault("qnorm_rope_kv_insert", "Q7")
def only_packed_caches_are_rotated(
    q: Tensor, kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, *args: Any, **rest: Any
) -> Any:
    if rest.get("layout") != "v4_main_fp8":
        return GOOD.qnorm_rope_kv_insert(q, kv, cache, slots, positions * 0, *args, **rest)
    return GOOD.qnorm_rope_kv_insert(q, kv, cache, slots, positions, *args, **rest)

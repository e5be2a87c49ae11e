"""Deliberate faults of V4.1's cache records, each with its intended cases."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from anymla.formats.e2m1 import decode_e2m1, encode_e2m1, pack_nibbles, unpack_nibbles
from anymla.formats.e4m3 import decode_e4m3, encode_e4m3
from anymla.formats.page_layout import (
    V41_COMPRESSED_NVFP4,
    V41_COMPRESSED_NVFP4_SPLIT,
    V41_MAIN_FP8,
    V41_MAIN_FP8_SPLIT,
    get_layout,
)
from anymla.ops.attention import CacheRows
from anymla.testing.conformance.faults.fault import GOOD, fault

_FP8 = (V41_MAIN_FP8, V41_MAIN_FP8_SPLIT)
_NVFP4 = (V41_COMPRESSED_NVFP4, V41_COMPRESSED_NVFP4_SPLIT)
_OTHER = dict([_FP8, _NVFP4, _FP8[::-1], _NVFP4[::-1]])


def _held(cache: Tensor, slots: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    data_plane, scale_plane = get_layout(layout).planes(cache)
    assert scale_plane is not None
    page, offset = slots // cache.shape[1], slots % cache.shape[1]
    return data_plane[page, offset], scale_plane[page, offset]


def _stored(cache: Tensor, slots: Tensor, layout: str, data: Tensor, scales: Tensor) -> None:
    data_plane, scale_plane = get_layout(layout).planes(cache)
    assert scale_plane is not None
    page, offset = slots // cache.shape[1], slots % cache.shape[1]
    data_plane[page, offset], scale_plane[page, offset] = data, scales


def _nvfp4(k: Tensor, scale: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Code rows with given scales [n, 512 / block]."""
    codes = encode_e2m1(k.bfloat16().float().unflatten(1, (-1, block)) / scale.unsqueeze(-1))
    return pack_nibbles(codes.flatten(1)), encode_e4m3(scale).repeat_interleave(block // 16, 1)


def _fp8(k: Tensor, scale: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Code rows with scales [n, 512 / block] rounded up to powers of two."""
    exponent = torch.log2(scale).ceil()
    rows = k.bfloat16().float().unflatten(1, (-1, block))
    codes = encode_e4m3(rows / torch.exp2(exponent).unsqueeze(-1))
    return codes.flatten(1), (exponent + 127).to(torch.uint8).repeat_interleave(block // 32, 1)


def _amax(k: Tensor, block: int) -> Tensor:
    return k.bfloat16().float().unflatten(1, (-1, block)).abs().amax(-1)


_Code = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _wrong_bytes(layouts: Collection[str], case: str) -> Callable[[_Code], Any]:
    """Register a function that replaces what was stored of rows, in some layouts.

    Args:
        layouts: ids of the layouts; rows of others are stored as they should be.
        case: id of the case that is meant to detect it.
    """

    def register(code: _Code) -> Any:
        @functools.wraps(code, assigned=("__name__", "__doc__"))
        def run(k: Tensor, cache: Tensor, slots: Tensor, *, layout: str = "v4_main_fp8") -> None:
            GOOD.quantize_and_insert_k_cache(k, cache, slots, layout=layout)
            if layout in layouts:
                _stored(cache, slots, layout, *code(k, *_held(cache, slots, layout)))

        return fault("quantize_and_insert_k_cache", case)(run)

    return register


@fault("quantize_and_insert_k_cache", "L9")
def entries_written_in_the_other_arrangement(
    k: Tensor, cache: Tensor, slots: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    layout = _OTHER.get(layout, layout)
    GOOD.quantize_and_insert_k_cache(k, cache, slots, layout=layout)


@fault("dequant_gather_slots", "L9", "Q8")
def entries_gathered_in_the_other_arrangement(
    out: Tensor, cache: Tensor, indices: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    GOOD.dequant_gather_slots(out, cache, indices, layout=_OTHER.get(layout, layout))


@fault("sparse_attention", "L9", "Q9")
def entries_attended_in_the_other_arrangement(q: Tensor, rows: list[CacheRows], **rest: Any) -> Any:
    other = [each._replace(layout=_OTHER.get(each.layout, each.layout)) for each in rows]
    return GOOD.sparse_attention(q, other, **rest)


@_wrong_bytes(_NVFP4, "Q8")
def nvfp4_in_blocks_of_32(k: Tensor, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return _nvfp4(k, decode_e4m3(encode_e4m3(_amax(k, 32).clamp(min=6 * 2.0**-9) / 6)), 32)


@_wrong_bytes(_NVFP4, "Q8")
def nvfp4_scale_without_its_floor(k: Tensor, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return _nvfp4(k, decode_e4m3(encode_e4m3(_amax(k, 16) / 6)), 16)


@_wrong_bytes(_NVFP4, "Q8")
def nvfp4_scale_rounded_up_to_a_power_of_two(
    k: Tensor, data: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    amax = _amax(k, 16).clamp(6 * 2.0**-9, 6 * 256.0)
    return _nvfp4(k, torch.exp2(torch.log2(amax / 6).ceil()), 16)


@_wrong_bytes(_NVFP4, "Q8")
def nvfp4_scale_does_not_saturate(k: Tensor, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return data, torch.where(_amax(k, 16) > 2688, 0x7F, scales).to(torch.uint8)


@_wrong_bytes(_NVFP4, "Q8")
def nvfp4_values_are_not_clamped(k: Tensor, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Let a magnitude above 6 scales, which nearest scales allow, overflow into the sign."""
    codes, step = unpack_nibbles(data), decode_e4m3(scales).repeat_interleave(16, 1)
    codes = torch.where(k.bfloat16().float().abs() > 6.25 * step, codes ^ 15, codes)
    return pack_nibbles(codes), scales


@_wrong_bytes(_NVFP4, "Q8")
def nvfp4_sign_of_zero_dropped(k: Tensor, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    codes = unpack_nibbles(data)
    codes = torch.where(decode_e2m1(codes) == 0, 0, codes).to(torch.uint8)
    return pack_nibbles(codes), scales


@_wrong_bytes(_NVFP4, "Q8")
def nibbles_written_high_first(k: Tensor, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return (data << 4) | (data >> 4), scales


@fault("dequant_gather_slots", "L9", "Q8")
def nibbles_read_high_first(
    out: Tensor, cache: Tensor, indices: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    GOOD.dequant_gather_slots(out, cache, indices, layout=layout)
    if layout in _NVFP4:
        out.copy_(out.unflatten(1, (-1, 2)).flip(2).flatten(1))


@fault("dequant_gather_slots", "Q8")
def nan_scales_read_as_numbers(
    out: Tensor, cache: Tensor, indices: Tensor, *, layout: str = "v4_main_fp8"
) -> None:
    GOOD.dequant_gather_slots(out, cache, indices, layout=layout)
    if layout in _NVFP4:
        out.nan_to_num_(480.0)


@_wrong_bytes(_FP8, "Q9")
def v41_window_in_blocks_of_64(k: Tensor, data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return _fp8(k, _amax(k, 64).clamp(min=1e-4) / 448, 64)


@_wrong_bytes(_FP8, "Q9")
def v41_scale_floored_instead_of_amax(
    k: Tensor, data: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Limit scales to at least 1e-4 (byte 114), as some writers do."""
    return _fp8(k, (_amax(k, 32) / 448).clamp(min=1e-4), 32)


@fault("sparse_attention", "Q9")
def entries_are_read_in_the_windows_order(q: Tensor, rows: list[CacheRows], **rest: Any) -> Any:
    """Read the compressed cache in the window's arrangement, ignoring its record."""
    first, *more = rows
    if first.layout in (*_FP8, "v4_main_fp8"):
        more = [
            each._replace(layout=_OTHER[each.layout]) if each.layout in _NVFP4 else each
            for each in more
        ]
    return GOOD.sparse_attention(q, [first, *more], **rest)

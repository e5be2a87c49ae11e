"""Calls that store and read cache rows, whose kernels are built; no build may spill."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.ops import device as device_facts
from anymla.ops.device import Target
from anymla.ops.kv_cache.interface import (
    dequant_gather_slots,
    dequantize_and_gather_k_cache,
    quantize_and_insert_k_cache,
)
from anymla.ops.kv_cache.shapes import CACHES, CacheShape
from lab.build import CACHE_PAGES, DTYPES, Build, Judgement, empty, int32

# Sizes of all calls, since no tile depends on the number of rows.
_ROWS, _REQUESTS = 4096, 32


def calls(target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield named calls, with tensors on the meta device."""
    for shape in CACHES:
        yield str(shape), functools.partial(_store_and_read, shape)
    label = f"{CACHES[0]}, columns in steps of 16"
    yield label, functools.partial(_gather_sequences, CACHES[0], 1024)
    if target.backend == "cuda" and not target.native_e4m3:
        yield f"{CACHES[0]}, native", functools.partial(_gather_native, CACHES[0], target)


def _store_and_read(shape: CacheShape) -> None:
    rows, cache = _rows(shape, _ROWS), _cache(shape)
    slots = empty(_ROWS, dtype=torch.int64)
    quantize_and_insert_k_cache(rows, cache, slots, layout=shape.layout)
    dequant_gather_slots(rows, cache, int32(_ROWS), layout=shape.layout)
    _gather_sequences(shape, 1001)


def _gather_sequences(shape: CacheShape, columns: int) -> None:
    dequantize_and_gather_k_cache(
        _rows(shape, _REQUESTS, _ROWS), _cache(shape), int32(_REQUESTS), None,
        int32((_REQUESTS, columns)), layout=shape.layout,
    )  # fmt: skip


def _gather_native(shape: CacheShape, target: Target) -> None:
    """Gather with FP8 instructions on targets without them, to show why bits are used there."""
    native = dataclasses.replace(target, native_e4m3=True)
    with mock.patch.object(device_facts, "target_of", return_value=native):
        indices = int32(_ROWS)
        dequant_gather_slots(_rows(shape, _ROWS), _cache(shape), indices, layout=shape.layout)


def _cache(shape: CacheShape) -> Tensor:
    return get_layout(shape.layout).allocate(CACHE_PAGES, shape.page_size, "meta")


def _rows(shape: CacheShape, *leading: int) -> Tensor:
    return empty((*leading, get_layout(shape.layout).channels), dtype=DTYPES[shape.dtype])


def judgement(build: Build, target: Target) -> Judgement:
    """Accept no spills; builds of types that a target lacks must fail in the compiler."""
    refused = build.constants["NATIVE"] and not target.native_e4m3
    return Judgement(fails="fp8e4nv" if refused else "")

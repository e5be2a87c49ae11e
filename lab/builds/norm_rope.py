"""Norm, RoPE and insertion calls whose kernels are built; no build may spill."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anymla.formats.page_layout import get_layout
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops.device import Target
from anymla.ops.norm_rope.interface import (
    fused_q_kv_rmsnorm,
    qnorm_rope_kv_insert,
    rms_norm,
    rope,
)
from anymla.ops.norm_rope.shapes import (
    INSERTS,
    MODELS,
    NORMS,
    V4_FLASH,
    InsertShape,
    ModelShape,
    NormShape,
)
from lab.build import CACHE_PAGES, DTYPES, empty, int64

_META = torch.device("meta")
_EPS = 1e-6
# Sizes of all calls, since no tile depends on the number of tokens.
_TOKENS, _POSITIONS = 32, 4096


def calls(target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield named calls, with tensors on the meta device."""
    for kind in NORMS:
        for width in sorted({width for model in MODELS for width in model.widths}):
            yield f"{width}, {kind}", functools.partial(_norm, width, kind)
        for model, coded in itertools.product(MODELS, (False, True)):
            label = f"{model.q_rank} and {model.channels}, {kind}" + ", codes" * coded
            yield label, functools.partial(_norms, model, kind, coded)
    widths = (V4_FLASH.index_channels, V4_FLASH.channels)
    for dtype, width, inverse in itertools.product(DTYPES, widths, (False, True)):
        label = f"heads of {width}, {dtype}" + ", inverse" * inverse
        yield label, functools.partial(_rope, width, dtype, inverse)
    for shape in INSERTS:
        yield str(shape), functools.partial(_insert, shape)


def _norm(width: int, kind: NormShape) -> None:
    weight = empty(width, dtype=DTYPES[kind.weights])
    rms_norm(empty((_TOKENS, width), dtype=DTYPES[kind.dtype]), weight, _EPS)


def _norms(model: ModelShape, kind: NormShape, coded: bool) -> None:
    """Norm the slices of one projection's result."""
    sizes = (model.q_rank, model.channels)
    q, kv = empty((_TOKENS, sum(sizes)), dtype=DTYPES[kind.dtype]).split(sizes, dim=1)
    q_weight, kv_weight = (empty(size, dtype=DTYPES[kind.weights]) for size in sizes)
    options: dict[str, Any] = {}
    if coded:
        quantised = QuantizedRows.empty(_TOKENS, model.q_rank, _META)
        options = {"codes": quantised.codes, "code_scales": quantised.scales}
    fused_q_kv_rmsnorm(q, kv, q_weight, kv_weight, _EPS, **options)


def _rope(width: int, dtype: str, inverse: bool) -> None:
    x = empty((_TOKENS, V4_FLASH.heads, width), dtype=DTYPES[dtype])
    table = empty((_POSITIONS, V4_FLASH.rope), dtype=torch.float32)
    rope(x, int64(_TOKENS), table, inverse=inverse)


def _insert(shape: InsertShape) -> None:
    channels, dtype = V4_FLASH.channels, DTYPES[shape.dtype]
    qnorm_rope_kv_insert(
        empty((_TOKENS, shape.heads, channels), dtype=dtype),
        empty((_TOKENS, channels), dtype=dtype),
        get_layout(shape.layout).allocate(CACHE_PAGES, V4_FLASH.page_size, _META),
        int64(_TOKENS),
        int64(_TOKENS),
        empty((_POSITIONS, V4_FLASH.rope), dtype=torch.float32),
        _EPS,
        layout=shape.layout,
    )

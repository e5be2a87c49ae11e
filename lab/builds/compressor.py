"""The compressor's calls whose kernels are built, and the requirements on their code."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4, MAIN_FP8, get_layout
from anymla.formats.state_layout import allocate_states
from anymla.ops.compressor.config import Window
from anymla.ops.compressor.interface import (
    compress_norm,
    compress_norm_rope_insert,
    save_partial_states,
)
from anymla.ops.compressor.shapes import (
    ROPE_DIM,
    SHAPES,
    TOKENS,
    V4_INDEX,
    V4_RATIO4,
    V41_RATIO2,
    CompressorShape,
)
from anymla.ops.device import Target
from lab.build import CACHE_PAGES, DTYPES, Build, Judgement, empty, float32, int32, int64

_REQUESTS, _PAGES, _POSITIONS, _EPS = 32, 100, 4096, 1e-6
# Columns of block tables: multiples of 16 in our runtime, any number in vLLM.
_COLUMNS, _ANY_COLUMNS = 1024, 1001


def calls(target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield named calls, with tensors on the meta device."""
    for shape in SHAPES:
        yield shape.label, functools.partial(_save, shape.window)
    label = "ratio 2, 512 channels, V4.1's"
    yield label, functools.partial(_save, V41_RATIO2)
    for weights in ("fp32", "bf16"):
        call = functools.partial(_norm, V41_RATIO2, weights)
        yield f"{label}, neither rotated nor stored, weights {weights}", call
    for shape, tokens in itertools.product(SHAPES, TOKENS):
        for layout in shape.layouts:
            for hadamard in (False, True) if shape is V4_INDEX else (False,):
                label = f"{shape.label}, {tokens} tokens, {layout}" + ", Hadamard" * hadamard
                call = functools.partial(_compress, shape, tokens, layout, hadamard=hadamard)
                yield label, call
            if layout in (MAIN_FP8, INDEX_FP8, INDEX_MXFP4):
                label = f"{shape.label}, {tokens} tokens, {layout}, vLLM's"
                call = functools.partial(
                    _compress, shape, tokens, layout, weights="bf16", columns=_ANY_COLUMNS
                )
                yield label, call
    call = functools.partial(_compress, V4_RATIO4, 1, MAIN_FP8, weights="fp16")
    yield f"{V4_RATIO4.label}, 1 token, {MAIN_FP8}, weights fp16", call


def _save(window: Window) -> None:
    """Save states of values and scores that are halves of one product's result."""
    tokens = TOKENS[0]
    values, scores = float32((tokens, 2 * window.width)).split(window.width, dim=1)
    save_partial_states(
        values,
        scores,
        float32((window.ratio, window.width)),
        int64(tokens),
        allocate_states(_PAGES, window.page_size, window.width, "meta"),
        int64(tokens),
        compress_ratio=window.ratio,
    )


def _norm(window: Window, weights: str) -> None:
    tokens = TOKENS[0]
    compress_norm(
        allocate_states(_PAGES, window.page_size, window.width, "meta"),
        int32((_REQUESTS, _COLUMNS)),
        int64(tokens),
        int32(tokens),
        int64(tokens),
        empty(window.channels, dtype=DTYPES[weights]),
        _EPS,
        compress_ratio=window.ratio,
        overlap=window.overlap,
    )


def _compress(
    shape: CompressorShape,
    tokens: int,
    layout: str,
    *,
    weights: str = "fp32",
    columns: int = _COLUMNS,
    hadamard: bool = False,
) -> None:
    window = shape.window
    compress_norm_rope_insert(
        allocate_states(_PAGES, window.page_size, window.width, "meta"),
        int32((_REQUESTS, columns)),
        int64(tokens),
        int32(tokens),
        int64(tokens),
        empty(window.channels, dtype=DTYPES[weights]),
        _EPS,
        float32((_POSITIONS, ROPE_DIM)),
        get_layout(layout).allocate(CACHE_PAGES, shape.page_size, "meta"),
        int64(tokens),
        compress_ratio=window.ratio,
        overlap=window.overlap,
        layout=layout,
        hadamard=hadamard,
    )


def judgement(build: Build, target: Target) -> Judgement:
    """Return the accepted spills of a build."""
    if build.name != "compress_kernel" or "pooled" not in build.types:
        return Judgement()
    # In blocks of tokens, ptxas spills a pair of registers on sm_90 to stay at 32 a thread, once
    # for each bfloat16 entry.
    blocks, kind = build.constants["BLOCK_T"] > 1, build.constants["CODEC"].kind
    return Judgement(spills=2 if blocks and kind == "bf16" and target.name == "sm_90" else 0)

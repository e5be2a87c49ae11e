"""Calls of prefill attention whose launches are what is built, and what builds must fulfil."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anymla.ops.attention import (
    InverseRopeQuant,
    prefill_attention,
    sparse_attention_rows,
)
from anymla.ops.attention.prefill_config import CHANNELS, ROPE_DIM
from anymla.ops.attention.prefill_shapes import (
    FLASH_ALL,
    FLASH_SELECTED,
    FLASH_WINDOW,
    PRO_ALL,
    PRO_SELECTED,
    SPLIT_ALL,
    SPLIT_SELECTED,
    PrefillShape,
)
from anymla.ops.device import Target
from lab.build import Build, Judgement, empty

_ODD = PrefillShape(1024, 100, 32_768, 128)


def calls(target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield named calls, with tensors on the meta device; elsewhere other families' kernels run."""
    if target.name != "sm_90":
        return
    for shape in (
        FLASH_WINDOW, FLASH_SELECTED, FLASH_ALL, PRO_SELECTED, PRO_ALL, SPLIT_SELECTED, SPLIT_ALL
    ):  # fmt: skip
        yield str(shape), functools.partial(_attend, shape)
    yield f"{_ODD}, no sink", functools.partial(_attend, _ODD, sink=False)
    for shape in (FLASH_SELECTED, FLASH_ALL):
        yield f"{shape}, fp16", functools.partial(_attend, shape, dtype=torch.float16)
    for shape in (FLASH_SELECTED, FLASH_ALL, PRO_SELECTED, PRO_ALL, SPLIT_SELECTED):
        yield f"{shape}, quantised", functools.partial(_attend, shape, quantized=True)
    for heads in (64, 128):
        for scores in (False, True):
            label = f"{heads} heads, lists alone" + ", largest scores" * scores
            yield label, functools.partial(_attend_rows, heads, scores)


def _attend(
    shape: PrefillShape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    sink: bool = True,
    quantized: bool = False,
) -> None:
    tokens, heads = shape.tokens, shape.heads
    inputs = (
        empty((tokens, heads, CHANNELS), dtype=dtype),
        empty((shape.context, CHANNELS), dtype=dtype),
        empty((tokens, 4), dtype=torch.int32),
        empty((tokens, shape.topk), dtype=torch.int32) if shape.topk else None,
    )
    options: dict[str, Any] = {
        "window": shape.window,
        "entries": shape.entries,
        "sink": empty(heads, dtype=torch.float32) if sink else None,
    }
    if quantized:
        positions = empty(tokens, dtype=torch.int64)
        table = empty((shape.context, ROPE_DIM), dtype=torch.float32)
        options["epilogue"] = InverseRopeQuant(positions, table, n_groups=2)
    prefill_attention(*inputs, **options)


def _attend_rows(heads: int, scores: bool) -> None:
    tokens = 1024
    sparse_attention_rows(
        empty((tokens, heads, CHANNELS), dtype=torch.bfloat16),
        empty((8192, CHANNELS), dtype=torch.bfloat16),
        empty((tokens, 2048), dtype=torch.int32),
        sink=empty(heads, dtype=torch.float32),
        max_logits=empty((tokens, heads), dtype=torch.float32) if scores else None,
        backend="gluon_sm90",
    )


def judgement(build: Build, target: Target) -> Judgement:
    """Accept spills of values kept between queries: one a block by Triton 3.6, three by 3.9."""
    return Judgement(matrix=True, spills=140)

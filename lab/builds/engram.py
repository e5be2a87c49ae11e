"""Engram calls whose kernels are built; no build may spill."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from anymla.ops.device import Target
from anymla.ops.engram.interface import engram_gate, engram_rows
from anymla.ops.engram.shapes import TOKENS, V41_FLASH, EngramShape
from lab.build import dtype_name, empty, float32, uint8


def calls(target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield named calls, with tensors on the meta device."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens in TOKENS:
            label = f"V4.1-Flash, {tokens} tokens, {dtype_name(dtype)}"
            yield label, functools.partial(_memory, V41_FLASH, tokens, dtype)


def _memory(shape: EngramShape, tokens: int, dtype: torch.dtype) -> None:
    """Decode a table's rows and apply the gate, without the product between them."""
    codes = uint8((tokens, shape.columns, shape.width))
    scales = uint8((tokens, shape.columns, shape.width // shape.block))
    engram_rows(empty((tokens, shape.columns * shape.width), dtype=dtype), codes, scales)
    h = empty((tokens, shape.streams, shape.hidden), dtype=dtype)
    projected = empty((tokens, (shape.streams + 1) * shape.hidden), dtype=dtype)
    engram_gate(h, projected, float32((shape.streams, shape.hidden)), eps=1e-20)

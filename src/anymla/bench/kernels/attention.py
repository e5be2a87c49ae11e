"""Speed cases of sparse attention: decode and prefill over the FP8 cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from anymla.bench.kernels import TimedCall, backend
from anymla.bench.random_caches import shared_rows
from anymla.formats.page_layout import MAIN_FP8, V32_FP8, get_layout
from anymla.ops.attention import CacheRows, sparse_attention
from anymla.ops.attention.decode_shapes import V32_DECODE, AttentionShape

_PAGE = 64
_WINDOW_SLOTS, _ENTRY_SLOTS = 1 << 17, 1 << 18  # 77 and 153 MB of rows: more than an L2 cache

_TOKENS = (1, 8, 32, 128)


def cases() -> Iterator[TimedCall]:
    """Yield decode of Flash and of its shards, Pro, windows alone, prefill, and V3.2's rows."""
    for heads in (64, 32, 16, 8):
        for tokens in (*_TOKENS, 256) if heads == 64 else _TOKENS:
            yield _case(AttentionShape(tokens, heads, 128, 512))
    for tokens in _TOKENS:
        yield _case(AttentionShape(tokens, 128, 128, 1024))
    yield _case(AttentionShape(128, 64, 128, 0))
    yield _case(AttentionShape(4096, 64, 128, 512))
    yield _case(AttentionShape(32, 64, 128, 512), batch_invariant=True)
    for tokens in (4, 128, 256):
        yield _case(dataclasses.replace(V32_DECODE, tokens=tokens))


def _case(shape: AttentionShape, *, batch_invariant: bool = False) -> TimedCall:
    layout = _layout(shape)
    row = get_layout(layout).entry_bytes + 4
    heads = shape.tokens * shape.heads * (2 * (shape.dim + shape.out_dim) + 4)
    name = "sparse_attention, V3.2" if layout == V32_FP8 else "sparse_attention"
    label = f"{shape.tokens} tokens, {shape.heads} heads, {shape.window} + {shape.entries} slots"
    return TimedCall(
        f"{name}, {label}{', batch invariant' if batch_invariant else ''}",
        functools.partial(_setup, shape, batch_invariant),
        shape.tokens * shape.slots * row + heads,
        shape.flops,
    )


def _layout(shape: AttentionShape) -> str:
    return V32_FP8 if shape.dim == get_layout(V32_FP8).channels else MAIN_FP8


def _setup(shape: AttentionShape, batch_invariant: bool) -> Callable[[], object]:
    q = torch.randn(shape.tokens, shape.heads, shape.dim).bfloat16()
    sink = torch.randn(shape.heads)
    rows = [_rows(shape, _WINDOW_SLOTS, shape.window)]
    if shape.entries:
        rows.append(_rows(shape, _ENTRY_SLOTS, shape.entries))
    return functools.partial(
        sparse_attention,
        q,
        rows,
        sink=sink,
        value_dim=shape.values,
        batch_invariant=batch_invariant,
        backend=backend(),
    )


def _rows(shape: AttentionShape, size: int, width: int) -> CacheRows:
    """Draw ``width`` rows for each token from a cache of ``size`` slots."""
    layout, tokens = _layout(shape), shape.tokens
    return CacheRows(
        shared_rows(layout, size, _PAGE, torch.get_default_device()),
        layout,
        torch.randint(0, size, (tokens, width), dtype=torch.int32),
        torch.full((tokens,), width, dtype=torch.int32),
    )

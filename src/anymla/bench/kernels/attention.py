"""Speed cases of sparse attention: decode and prefill over the FP8 cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from anymla.bench.kernels import Case
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.sparse_attention import sparse_attention
from anymla.ops.sparse_attention.shapes import AttentionShape

_PAGE = 64
_WINDOW_SLOTS, _ENTRY_SLOTS = 1 << 17, 1 << 18  # 77 and 153 MB of rows: more than an L2 cache

# Microseconds asked for on an H200, by heads and tokens, with 128 + 512 slots: half of what the
# public Triton path for XPU takes there for 64 heads.
_MOST_US = {
    64: {1: 46.0, 8: 57.0, 32: 75.0, 128: 226.0, 256: 375.0},
    32: {1: 9.7, 8: 11.0, 32: 17.0, 128: 30.0},
    16: {1: 9.7, 8: 11.0, 32: 17.0, 128: 30.0},
    8: {1: 9.7, 8: 11.0, 32: 17.0, 128: 30.0},
}


def cases() -> Iterator[Case]:
    """Decode of Flash and of its shards, Pro, windows alone, and prefill."""
    for heads, most in _MOST_US.items():
        for tokens, microseconds in most.items():
            yield _case(AttentionShape(tokens, heads, 128, 512), microseconds)
    for tokens in (1, 8, 32, 128):
        yield _case(AttentionShape(tokens, 128, 128, 1024))
    yield _case(AttentionShape(128, 64, 128, 0))
    yield _case(AttentionShape(4096, 64, 128, 512), 2400.0)
    yield _case(AttentionShape(32, 64, 128, 512), batch_invariant=True)


def _case(
    shape: AttentionShape, most_us: float | None = None, *, batch_invariant: bool = False
) -> Case:
    row = get_layout(MAIN_FP8).entry_bytes + 4
    heads = shape.tokens * shape.heads * (2 * 2 * shape.dim + 4)
    label = f"{shape.tokens} tokens, {shape.heads} heads, {shape.window} + {shape.entries} slots"
    return Case(
        f"sparse_attention, {label}{', batch invariant' if batch_invariant else ''}",
        functools.partial(_setup, shape, batch_invariant),
        shape.tokens * shape.slots * row + heads,
        shape.flops,
        most_us,
    )


def _setup(shape: AttentionShape, batch_invariant: bool) -> Callable[[], object]:
    q = torch.randn(shape.tokens, shape.heads, shape.dim, device="cuda").bfloat16()
    sink = torch.randn(shape.heads, device="cuda")
    extra = shape.entries > 0
    return functools.partial(
        sparse_attention,
        q,
        _rows(_WINDOW_SLOTS),
        _slots(_WINDOW_SLOTS, shape.tokens, shape.window),
        _lengths(shape.tokens, shape.window),
        sink=sink,
        extra_cache=_rows(_ENTRY_SLOTS) if extra else None,
        extra_indices=_slots(_ENTRY_SLOTS, shape.tokens, shape.entries) if extra else None,
        extra_lengths=_lengths(shape.tokens, shape.entries) if extra else None,
        batch_invariant=batch_invariant,
        backend="triton",
    )


@functools.cache
def _rows(slots: int) -> Tensor:
    layout = get_layout(MAIN_FP8)
    cache = layout.allocate(slots // _PAGE, _PAGE, device="cuda")
    for start in range(0, slots, 1 << 15):
        some = torch.arange(start, start + (1 << 15), device="cuda")
        layout.write(cache, some, torch.randn(len(some), layout.channels, device="cuda"))
    return cache


def _slots(size: int, tokens: int, width: int) -> Tensor:
    return torch.randint(0, size, (tokens, width), dtype=torch.int32, device="cuda")


def _lengths(tokens: int, width: int) -> Tensor:
    return torch.full((tokens,), width, dtype=torch.int32, device="cuda")

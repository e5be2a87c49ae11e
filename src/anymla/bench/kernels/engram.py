"""Speed cases of V4.1's n-grams at its sizes, beside torch's form of the same.

They time the decoding of a token's rows and the gates; the product in between is a linear layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from anymla.bench.kernels import TimedCall, backend, normal, step_call
from anymla.ops.engram import engram_gate, engram_rows
from anymla.ops.engram.shapes import V41_FLASH, EngramShape

TOKENS = (1, 8, 128, 4096)
_Call = Callable[[], object]


def cases(tokens: Sequence[int] = TOKENS, shape: EngramShape = V41_FLASH) -> Iterator[TimedCall]:
    """Yield both operations at every number of tokens, and torch's beside them."""
    read = shape.columns * shape.width
    row = 2 * shape.hidden
    for count in tokens:
        for name, setup, moved in (
            ("engram_rows", _rows, count * (read + read // shape.block + 2 * read)),
            (
                "engram_gate",
                _gate,
                count * (3 * shape.streams + 1) * row + shape.streams * 2 * row,
            ),
        ):
            made = functools.partial(setup, count, shape)
            label = f"{name}, {count} tokens"
            ours = functools.partial(made, backend())
            yield step_call(label, ours, moved, count)
            yield TimedCall(f"{label}, torch", functools.partial(made, "torch"), moved)


def _rows(tokens: int, shape: EngramShape, backend: str | None) -> _Call:
    codes = torch.randint(0, 126, (tokens, shape.columns, shape.width), dtype=torch.uint8)
    blocks = shape.width // shape.block
    scales = torch.randint(115, 125, (tokens, shape.columns, blocks), dtype=torch.uint8)
    out = torch.empty(tokens, shape.columns * shape.width, dtype=torch.bfloat16)
    return functools.partial(engram_rows, out, codes, scales, backend=backend)


def _gate(tokens: int, shape: EngramShape, backend: str | None) -> _Call:
    h = normal(tokens, shape.streams, shape.hidden)
    projected = normal(tokens, (shape.streams + 1) * shape.hidden)
    weight = 1 + 0.1 * torch.randn(shape.streams, shape.hidden)
    return functools.partial(engram_gate, h, projected, weight, eps=1e-20, backend=backend)

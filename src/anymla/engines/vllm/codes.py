"""Activations that travel quantised through vLLM's layers, beside the tensors that those pass on.

vLLM's layers give each other one tensor. Whoever makes it may attach the same rows in FP8, and a
product that reads FP8 finds them. What is copied or sliced on the way comes without, and is
quantised where it is read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from anymla.formats.quantized_rows import QuantizedRows

# More rows are multiplied by vLLM's kernels (DeepGEMM), which quantise what they read.
# H200, 64 tokens: wq_b of V4-Flash 13.8 us for DeepGEMM's 15.7, wo_b 14.7 for 15.3, the shared
# expert's w1 and w3 8.2 for 9.6; 128 tokens: 18.6 for 16.5, 21.1 for 17.2, 9.8 for 10.3.
MOST_CODED_TOKENS = 64

_ROWS, _READER = "anymla_quantized_rows", "anymla_reads_codes"


def attach(x: Tensor, rows: QuantizedRows | None) -> Tensor:
    """Return x, with its quantised rows if there are any."""
    if rows is not None:
        setattr(x, _ROWS, rows)
    return x


def attached(x: Tensor) -> QuantizedRows | None:
    """The quantised rows of x, if whoever made it attached them."""
    return getattr(x, _ROWS, None)


def mark(site: nn.Parameter) -> None:
    """Note at a hyper-connection's ``fn`` that the sublayer behind it reads quantised rows."""
    setattr(site, _READER, True)


def allocate(site: Any, x: Tensor) -> QuantizedRows | None:
    """Memory for the quantised rows of what becomes of x [T, .., K] at a site; None if unread."""
    few = len(x) <= MOST_CODED_TOKENS and getattr(site, _READER, False)
    return QuantizedRows.empty(len(x), x.shape[-1], x.device) if few else None

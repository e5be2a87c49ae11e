"""Quantised activations that pass through vLLM's layers beside the tensors.

vLLM's layers pass one tensor to each other. The producer of a tensor may attach the same rows in
FP8, and a product that reads FP8 finds them. A copy or slice of the tensor has no attached rows and
is quantised where it is read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from anymla.formats.quantized_rows import QuantizedRows

# For more rows, vLLM's kernels (DeepGEMM) multiply, which quantise their own input. H200, 64
# tokens: wq_b of V4-Flash 13.8 us against DeepGEMM's 15.7, wo_b 14.7 against 15.3, the shared
# expert's w1 and w3 8.2 against 9.6; 128 tokens: 18.6 against 16.5, 21.1 against 17.2, 9.8 against
# 10.3.
MOST_CODED_TOKENS = 64

_ROWS, _READER = "anymla_quantized_rows", "anymla_reads_codes"


def attach(x: Tensor, rows: QuantizedRows | None) -> Tensor:
    """Return x, with its quantised rows if there are any."""
    if rows is not None:
        setattr(x, _ROWS, rows)
    return x


def attached(x: Tensor) -> QuantizedRows | None:
    """Return the quantised rows of x, if its producer attached them."""
    return getattr(x, _ROWS, None)


def mark(site: nn.Parameter) -> None:
    """Note at a hyper-connection's ``fn`` that the next sublayer reads quantised rows."""
    setattr(site, _READER, True)


def allocate(site: Any, x: Tensor) -> QuantizedRows | None:
    """Allocate quantised rows for a site's result like x [T, .., K]; None if nothing reads them."""
    few = len(x) <= MOST_CODED_TOKENS and getattr(site, _READER, False)
    return QuantizedRows.empty(len(x), x.shape[-1], x.device) if few else None

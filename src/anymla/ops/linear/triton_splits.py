"""Sums over the splits of K that programs of a product have shared.

Grid: blocks of results.

    parts [splits, results] float32 -> results, added in the order of the splits
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.pdl import pdl_launch, target_has_pdl

_BLOCK = 1024


@triton.jit(do_not_specialize=["count", "splits"])
def sum_splits_kernel(parts, out, count, splits, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK results: the splits' sums added in order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    here = parts + at
    for _ in range(splits):
        total += tl.load(here, mask, other=0.0)
        here += count
    tl.store(out + at, total.to(out.dtype.element_ty), mask)


def sum_splits(parts: Tensor, out: Tensor) -> None:
    """Add float32 parts [splits, ...] into contiguous ``out`` [...]."""
    count = out.numel()
    sum_splits_kernel[(triton.cdiv(count, _BLOCK),)](
        parts, out, count, parts.shape[0], BLOCK=_BLOCK, **pdl_launch(out.device)
    )


def builds(target: Target) -> Iterator[Build]:
    """Every dtype."""
    for dtype in ("bf16", "fp16", "fp32"):
        yield Build(
            f"to {dtype}",
            sum_splits_kernel,
            {"parts": "*fp32", "out": f"*{dtype}", "count": "i32", "splits": "i32"},
            {"BLOCK": _BLOCK, "PDL": target_has_pdl(target)},
        )

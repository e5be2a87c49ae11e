"""Rows of the gathered prefill workspace, on the device.

Grid: (tokens, blocks of columns). A row is the selected entries, then the window, then -1.

    token t  | entries .. | window .. | -1 ..      cut into blocks of BLOCK columns
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._build import Build
from anymla.ops.device import Target
from anymla.ops.selection.reference import combined_width
from anymla.ops.selection.triton_rows import block_of
from anymla.ops.selection.triton_slots import request_of

# Prefix sums that a program looks at together to find its request.
_LOOKED = 256


@triton.jit(do_not_specialize=["requests", "topk", "width", "window", "rows", "entry_rows"])
def combine_kernel(
    topk_indices,
    topk_stride,
    query_start_loc,
    seq_lens,
    gather_lens,
    indices,
    lens,
    requests,
    topk,
    width,
    window,
    rows,
    entry_rows,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOKED: tl.constexpr,
):
    """A token and a block of columns; ``rows`` and ``entry_rows`` are M and N."""
    token = tl.program_id(0)
    block = tl.program_id(1)
    base = tl.load(query_start_loc)
    looked = token + tl.arange(0, 1)
    request = tl.max(request_of(looked, query_start_loc, base, requests, LOOKED), 0)
    known = request >= 0
    end = tl.load(query_start_loc + request + 1, mask=known, other=0) - base
    seq_len = tl.load(seq_lens + request, mask=known, other=0).to(tl.int64)
    gathered = tl.load(gather_lens + request, mask=known, other=0)

    position = seq_len - end + token
    entries = tl.minimum(tl.maximum(position + 1, 0) // RATIO, topk)
    entries = tl.where(known, entries, 0)
    window_start = tl.maximum(position - (window - 1), 0)
    length = entries + tl.maximum(position + 1 - window_start, 0)
    length = tl.where(known, length, 0)

    column = block * BLOCK + tl.arange(0, BLOCK)
    selects = column < entries
    line = topk_indices + token.to(tl.int64) * topk_stride
    chosen = tl.load(line + column, mask=selects, other=-1).to(tl.int64)
    moved = entry_rows + (window_start - (seq_len - gathered)) + (column - entries)
    offset = tl.where(selects, chosen, moved)
    lowest = tl.where(selects, 0, entry_rows)
    limit = tl.where(selects, entry_rows, rows)
    exists = (column < length) & (offset >= lowest) & (offset < limit)
    index = tl.where(exists, request.to(tl.int64) * rows + offset, -1)
    out = indices + token.to(tl.int64) * width
    tl.store(out + column, index.to(tl.int32), mask=column < width)
    if block == 0:
        tl.store(lens + token, length.to(tl.int32))


def combine_topk_swa_indices(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    *,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
) -> tuple[Tensor, Tensor]:
    """See ``interface.combine_topk_swa_indices``."""
    tokens, device = len(topk_indices), topk_indices.device
    width = combined_width(topk, window_size)
    indices = torch.empty(tokens, width, dtype=torch.int32, device=device)
    lens = torch.empty(tokens, dtype=torch.int32, device=device)
    if topk_indices.stride(1) != 1:
        topk_indices = topk_indices.contiguous()
    block = block_of(width)
    if tokens:
        combine_kernel[(tokens, triton.cdiv(width, block))](
            topk_indices,
            topk_indices.stride(0),
            query_start_loc.contiguous(),
            seq_lens.contiguous(),
            gather_lens.contiguous(),
            indices,
            lens,
            len(seq_lens),
            topk,
            width,
            window_size,
            M,
            N,
            RATIO=max(compress_ratio, 1),
            BLOCK=block,
            LOOKED=_LOOKED,
        )
    return indices, lens


def builds(target: Target) -> Iterator[Build]:
    """Specialisations; compression ratios are the caller's, so the model's own stand for all."""
    pointers = ("topk_indices", "query_start_loc", "seq_lens", "gather_lens", "indices", "lens")
    numbers = ("topk_stride", "requests", "topk", "width", "window", "rows", "entry_rows")
    for width in (128, 512):
        for ratio in (1, 4, 128):
            yield Build(
                f"block {width} ratio {ratio}",
                combine_kernel,
                {**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(numbers, "i32")},
                {"RATIO": ratio, "BLOCK": block_of(width), "LOOKED": _LOOKED},
            )

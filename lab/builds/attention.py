"""Calls of attention whose launches are what is built, and what builds must fulfil."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from anymla.formats.page_layout import (
    MAIN_FP8,
    ROWS_BF16_512,
    ROWS_FP32_512,
    V32_FP8,
    get_layout,
)
from anymla.ops.attention import (
    CacheRows,
    InverseRopeQuant,
    sparse_attention,
    sparse_attention_plan,
    sparse_attention_rows,
)
from anymla.ops.attention.decode_config import FP8_CODES, NVFP4, PLAIN
from anymla.ops.attention.decode_shapes import (
    CALLS,
    CAPTURED_CALLS,
    V32_DECODE,
    V41_CALLS,
    AttentionCall,
    AttentionShape,
)
from anymla.ops.device import Target
from lab.build import CACHE_PAGES, Build, Judgement, empty
from lab.builds import attention_backward, attention_prefill

_ROPE_DIM, _GROUPS = 64, 2


def calls(target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield named calls, with tensors on the meta device."""
    if target.name == "sm_90":
        # First, because lengths of full lists are kept.
        for call in CAPTURED_CALLS:
            yield f"{call}, captured", functools.partial(_captured, call)
        for call in CALLS:
            yield str(call), functools.partial(attend, call)
        for call in V41_CALLS:
            if call.layout != MAIN_FP8:
                yield str(call), functools.partial(attend, call)
    for tokens, heads in itertools.product((1, 32, 512), (16, 32, 64)):
        shape = AttentionShape(tokens, heads, 128, 512)
        for layout in (MAIN_FP8, ROWS_BF16_512, ROWS_FP32_512):
            dtype = torch.float32 if layout == ROWS_FP32_512 else torch.bfloat16
            call = AttentionCall(shape, layout=layout)
            yield f"{call}, Triton", functools.partial(attend, call, dtype, "triton")
        v32 = dataclasses.replace(V32_DECODE, tokens=tokens, heads=heads)
        call = AttentionCall(v32, layout=V32_FP8)
        yield f"{call}, Triton", functools.partial(attend, call, backend="triton")
        for channels in (512, 576):
            label = f"{tokens} tokens, {heads} heads, rows of {channels}, largest scores"
            yield label, functools.partial(_attend_rows, tokens, heads, channels)
    for tokens in (1, 8, 16, 64):
        call = AttentionCall(AttentionShape(tokens, 64, 128, 512), quantized=True)
        yield f"{call}, Triton", functools.partial(attend, call, backend="triton")
        call = dataclasses.replace(call, quantized=False)
        yield f"{call}, Triton", functools.partial(attend, call, backend="triton")
        call = dataclasses.replace(call, layout=ROWS_FP32_512)
        yield f"{call}, Triton", functools.partial(attend, call, torch.float32, "triton")
    for call in V41_CALLS:
        yield f"{call}, Triton", functools.partial(attend, call, backend="triton")
    yield from attention_prefill.calls(target)
    yield from attention_backward.calls(target)


def attend(
    call: AttentionCall, dtype: torch.dtype = torch.bfloat16, backend: str | None = None
) -> None:
    """Call the operation with tensors that hold nothing."""
    shape, extra_layout = call.shape, call.extra_layout or call.layout
    tokens, heads = shape.tokens, shape.heads
    rows = []
    for width, page, layout in (
        (shape.window, call.page, call.layout),
        (shape.entries, call.extra_page, extra_layout),
    ):
        if width:
            lengths = empty(tokens, dtype=torch.int32) if call.lengths else None
            listed = empty((tokens, width), dtype=torch.int32)
            cache = get_layout(layout).allocate(CACHE_PAGES, page, "meta")
            rows.append(CacheRows(cache, layout, listed, lengths))
    plan: Tensor | None = None
    if call.planned:
        plan = sparse_attention_plan(
            *(each.lengths for each in rows), heads=heads, width=shape.window,
            extra_width=shape.entries or None,
        )  # fmt: skip
    q = empty((tokens, heads, shape.dim), dtype=dtype)
    sink = empty(heads, dtype=torch.float32) if call.sink else None
    options: dict[str, Any] = {
        "sink": sink, "backend": backend, "batch_invariant": call.batch_invariant, "plan": plan,
    }  # fmt: skip
    if call.quantized:
        positions = empty(tokens, dtype=torch.int64)
        table = empty((4096, _ROPE_DIM), dtype=torch.float32)
        epilogue = InverseRopeQuant(positions, table, _GROUPS)
        sparse_attention(q, rows, epilogue=epilogue, **options)
    else:
        sparse_attention(q, rows, value_dim=shape.values, **options)


def _captured(call: AttentionCall) -> None:
    """Attend as in a graph capture before which nothing ran, so that nothing can be kept."""
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        attend(call)


def _attend_rows(tokens: int, heads: int, channels: int) -> None:
    q = empty((tokens, heads, channels), dtype=torch.bfloat16)
    sparse_attention_rows(
        q, empty((4096, channels), dtype=torch.bfloat16),
        empty((tokens, 640), dtype=torch.int32), sink=empty(heads, dtype=torch.float32),
        max_logits=empty((tokens, heads), dtype=torch.float32), backend="triton",
    )  # fmt: skip


def judgement(build: Build, target: Target) -> Judgement:
    """Return the accepted spills, and the matrix instructions that must be in the code."""
    if build.name == "prefill_kernel":
        return attention_prefill.judgement(build, target)
    if "_backward" in build.module:
        return attention_backward.judgement(build, target)
    if build.name == "decode_m64_kernel":
        # At the ends of splits and in the bf16 fallback, three in the producers' loop.
        return Judgement(matrix=True, spills=700)
    if build.name == "decode_swap_ab_kernel":
        return Judgement(matrix=True, spills=280)  # around the loop, with 32 heads; none in it
    if build.name == "decode_mma_kernel":
        # 16 heads: none in the loops, but on sm_100 and later the load of an address in each step.
        # More heads: in the second walk, which hardly ever runs, and some 20 of 32 heads' in the
        # first.
        few = target.name in ("sm_80", "sm_86", "sm_89")
        heads = build.constants["HEADS"]
        accepted = {16: 8, 32: 281, 64: 116} if few else {16: 45, 32: 254, 64: 189}
        return Judgement(matrix=True, spills=accepted[heads])
    if build.name != "decode_kernel":
        return Judgement()
    matrix = build.types["q_ptr"] != "*fp32"
    # Over both loops, of which the second hardly ever runs.
    if target.name.startswith("gfx1"):
        # Rows divided among the warps spill nothing; float32 has no registers for its products.
        return Judgement(matrix, spills=0 if matrix else 450)
    if build.constants["BH"] == 64:
        # 64 heads x 512 channels of sums are half of all registers of an H200's SM, and it is still
        # the fastest tile there.
        return Judgement(matrix, spills=700)
    if build.constants["CODED"] in (FP8_CODES, NVFP4):
        # More scales than V4's rows have, in V4's tiles of 32 heads: 24 on sm_90.
        return Judgement(matrix, spills=30)
    if build.constants["CODED"] == PLAIN and target.name != "sm_90":
        # Four warps spill this and take 0.6 of the time of eight, which spill nothing, as sm_80 and
        # sm_89; sm_120 spills most.
        return Judgement(matrix, spills=61)
    if target.native_e4m3:
        return Judgement(matrix, spills=11)  # Triton 3.7.1; at most 10 by 3.6 and 3.9
    return Judgement(matrix, spills=100 if build.constants["CHANNELS"] <= 512 else 200)

"""Other scores and selectors that the indexer is timed next to: DeepGEMM's and vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anymla.bench.indexer_cases import HEADS, PAGE, TOPK, WIDTH

if TYPE_CHECKING:
    from anymla.bench.indexer_cases import Inputs
    from anymla.ops.indexer.shapes import SelectShape

_VLLM_WORKSPACE = 1 << 20
# A peer's scores, with -inf written where nothing is visible if asked; and a peer's selector.
Scores = Callable[[bool], Tensor]
Select = Callable[[Tensor, Tensor], object]


def decode_scores(deep_gemm: Any, shape: SelectShape, given: Inputs) -> Scores:
    """DeepGEMM's of a decode, whose schedule is made beforehand."""
    lengths = given.lengths.view(shape.requests, shape.queries)
    plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, deep_gemm.get_num_sms())
    q = given.q.view(shape.requests, shape.queries, HEADS, WIDTH)
    cache = given.cache.unsqueeze(2)

    def call(clean: bool) -> Tensor:
        logits: Tensor = deep_gemm.fp8_paged_mqa_logits(
            q, cache, given.weights, lengths, given.table, plan, shape.keys, False
        )
        return logits

    return call


def prefill_scores(deep_gemm: Any, shape: SelectShape, given: Inputs) -> Scores:
    """DeepGEMM's of a prefill, whose keys have been gathered beforehand."""
    pages = given.cache.view(len(given.cache), -1)[given.table[0].long()]
    keys = pages[:, : PAGE * WIDTH].contiguous().view(torch.float8_e4m3fn).view(-1, WIDTH)
    scale = pages[:, PAGE * WIDTH :].contiguous().view(torch.float32).view(-1)
    starts = torch.zeros_like(given.lengths)

    def call(clean: bool) -> Tensor:
        logits: Tensor = deep_gemm.fp8_mqa_logits(
            given.q, (keys, scale), given.weights, starts, given.lengths, clean
        )
        return logits

    return call


def vllm_kernels(shape: SelectShape) -> dict[str, Select]:
    """Selectors of vLLM's library, by name; not every one takes every shape."""
    ops = torch.ops._C
    out = torch.empty(shape.rows, TOPK, dtype=torch.int32, device="cuda")
    workspace = torch.zeros(_VLLM_WORKSPACE, dtype=torch.uint8, device="cuda")
    starts = torch.zeros(shape.rows, dtype=torch.int32, device="cuda")

    def by_row(logits: Tensor, lengths: Tensor) -> None:
        ops.top_k_per_row_prefill(logits, starts, lengths, out, shape.rows, *logits.stride(), TOPK)

    def persistent(logits: Tensor, lengths: Tensor) -> None:
        lengths = lengths.view(shape.requests, -1) if not shape.prefill else lengths
        ops.persistent_topk(logits, lengths, out, workspace, TOPK, shape.keys)

    return {"top_k_per_row_prefill": by_row, "persistent_topk": persistent}

"""Attention by slots whose merge rotates the heads back and quantises them."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops._epilogue import QuantizedOut
from anymla.ops.device import target_of
from anymla.ops.sparse_attention.triton_attention import Results, attend, paged_lists
from anymla.ops.streams import scratch


def sparse_attention_fp8_quant(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    n_groups: int,
    sink: Tensor | None = None,
    scale: float | None = None,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    layout: str = MAIN_FP8,
    extra_layout: str = MAIN_FP8,
    batch_invariant: bool = False,
    plan: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract. Rounded to q's dtype in between, as separate calls do."""
    lists = paged_lists(
        (k_cache, layout, indices, lengths),
        (extra_cache, extra_layout, extra_indices, extra_lengths),
    )
    turned = QuantizedOut.allocate(q, positions, cos_sin_cache, target_of(q.device).native_e4m3)
    lse = scratch(tuple(q.shape[:2]), torch.float32, q.device)
    results = Results(turned.codes, lse, None, float("-inf"), turned)
    attend(q, lists, sink, scale, batch_invariant, results)
    return turned.results(n_groups)

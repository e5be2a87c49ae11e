"""Hopper's attention by slots with heads that leave rotated back and quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops._epilogue import QuantizedOut
from anymla.ops._triton_epilogue import inverse_rope_quantize
from anymla.ops.attention_output.support import ROPE_DIM
from anymla.ops.sparse_attention.gluon_sm90_attention import Call, attend
from anymla.ops.streams import scratch

# Whether tasks that are not cut leave as FP8 from the kernel itself, and not only from merges.
FUSED_WHOLE = True


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
    to = QuantizedOut.allocate(q, positions, cos_sin_cache, native=True)
    if q.shape[0] and q.shape[1]:
        lse = scratch(tuple(q.shape[:2]), torch.float32, q.device)
        call = Call.of(
            q,
            (k_cache, indices, lengths),
            (extra_cache, extra_indices, extra_lengths),
            sink,
            scale,
            batch_invariant,
            plan,
        )
        numbers = (call.q, call.scopes, call.sink, call.scale, float("-inf"), call.schedule)
        whole = FUSED_WHOLE and cos_sin_cache.shape[1] == ROPE_DIM
        if whole or (call.schedule.cut and call.schedule.aligned):
            attend(*numbers, call.q, lse, to, call.plan)
        else:
            out = scratch(tuple(q.shape), q.dtype, q.device)
            attend(*numbers, out, lse, plan=call.plan)
            inverse_rope_quantize(out, to)
    return to.results(n_groups)

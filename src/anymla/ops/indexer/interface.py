"""Contracts of the lightning indexer.

    score[t, w] = sum_h weight[t, h] * relu(q[t, h] . key[w])

over index heads h and compressed entries w, of which every token keeps the best k. The sum takes
the weights as they are, of either sign. Source: DeepSeek-V4 reference, inference/model.py
(Indexer); DeepSeek-V3.2-Exp report, "lightning indexer".
"""

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_FP8
from anymla.ops.device import float32_support
from anymla.ops.indexer import (
    device_support,
    reference,
    torch_scores,
    torch_topk,
)
from anymla.ops.indexer.checks import CODED_Q, check_queries
from anymla.ops.indexer.interface_query import indexer_q_rope_quant
from anymla.ops.indexer.interface_select import select_topk
from anymla.ops.indexer.reference import wide_dtype
from anymla.ops.kv_cache.checks import check_cache
from anymla.ops.registry import FLOAT32_UP, FLOATS, INT32, check, operation, require

__all__ = [
    "indexer_q_rope_quant",
    "mqa_logits",
    "paged_mqa_logits",
    "select_topk",
    "topk_per_row",
]

_FP8 = (torch.float8_e4m3fn,)


@operation(
    mutates=("out",),
    outputs=lambda q, k, weights, **_: (
        weights.new_empty((len(q), len(k)), dtype=wide_dtype(q, weights)),
    ),
)
def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor | None,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    q_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Index scores of queries against one dense list of keys.

    ``out[m, n] = sum_h weights[m, h] * relu(q[m, h] . k[n] * k_scale[n])`` where
    ``starts[m] <= n < ends[m]``, and -inf elsewhere, whatever the keys hold there.

    Args:
        q: [M, Hi, D] floating point or float8_e4m3fn, or [M, Hi, D/2] packed e2m1 with q_scales.
        k: [N, D] floating point or float8_e4m3fn, keys of all requests one after the other.
        k_scale: [N] float32 above 0, as quantisers make it, or None for 1.
        weights: [M, Hi] float32 (or float64).
        starts: [M] int32, first key of the row's request.
        ends: [M] int32, one past the last visible key; bounds outside [0, N] are clamped.
        q_scales: [M, Hi, D/32] uint8, scale bytes of a packed q.
        out: [M, N] to write into, or None.

    Returns:
        [M, N] float32 (float64 if q or weights is), ``out`` if given. Products, head sums and
        accumulation in that precision; where a backend gives FP8 operands to a device's FP8
        product, its sums are what they are there (Hopper: 13 bits below the largest product).

    Raises:
        TypeError, ValueError: wrong dtype, shape or device; a packed q without q_scales.

    Source: DeepSeek-V4 reference, inference/model.py (Indexer); arguments as DeepGEMM's
    fp8_mqa_logits.
    """
    name = "mqa_logits"
    sizes = check(
        name,
        q=(q, "M H _", CODED_Q),
        k=(k, "N D", (*FLOATS, *_FP8)),
        k_scale=(k_scale, "N", torch.float32),
        weights=(weights, "M H", FLOAT32_UP),
        starts=(starts, "M", INT32),
        ends=(ends, "M", INT32),
    )
    check(name, dims=sizes, out=(out, "M N", wide_dtype(q, weights)), q=(q, "M H _", CODED_Q))
    check_queries(name, q, q_scales, sizes["D"])


@operation(
    mutates=("out",),
    outputs=lambda q, weights, *, max_context, **_: (
        weights.new_empty((q.shape[0] * q.shape[1], max_context), dtype=wide_dtype(q, weights)),
    ),
)
def paged_mqa_logits(
    q: Tensor,
    index_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    *,
    max_context: int,
    layout: str = INDEX_FP8,
    q_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Index scores of every request's queries against its own entries in a paged cache.

    ``out[r * J + j, w] = sum_h weights[r * J + j, h] * relu(q[r, j, h] . key(r, w))`` for
    ``w < context_lens[r, j]``, else -inf. key(r, w) is the decoded entry at slot
    ``block_table[r, w // B] * B + w % B``. An entry beyond the block table, or on a page that is
    negative or beyond the cache, is absent: its score is -inf. Nothing outside the cache is read.

    Args:
        q: [R, J, Hi, D] floating point or float8_e4m3fn, or [R, J, Hi, D/2] packed e2m1 with
            q_scales. Plain queries go with any layout.
        index_cache: [P, B, row] (or [P, B, 1, row]) in ``layout``, any page stride.
        weights: [R * J, Hi] float32 (or float64).
        context_lens: [R] or [R, J] int32, visible entries (not tokens); [R] holds for all J rows.
        block_table: [R, pages] int32.
        max_context: columns of the result; a row sees no more entries than that.
        layout: layout id of the cache, of D channels.
        q_scales: [R, J, Hi, D/32] uint8, scale bytes of a packed q.
        out: [R * J, max_context] to write into, or None.

    Returns:
        [R * J, max_context] float32 (float64 if q or weights is), ``out`` if given. Scratch is
        bounded whatever the sizes. On a CPU the work follows the lengths, elsewhere max_context,
        without waiting for the device.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or layout; a packed q without q_scales;
            max_context below 0.

    Source: DeepSeek-V4 reference, inference/model.py (Indexer); arguments as DeepGEMM's
    fp8_paged_mqa_logits.
    """
    name = "paged_mqa_logits"
    per_request = getattr(context_lens, "ndim", 1) == 1
    check(
        name,
        q=(q, "R J H _", CODED_Q),
        weights=(weights, "_ H", FLOAT32_UP),
        context_lens=(context_lens, "R" if per_request else "R J", INT32),
        block_table=(block_table, "R _", INT32),
    )
    require(max_context >= 0, name, "max_context", ">= 0", max_context)
    check(
        name,
        dims={"R*J": q.shape[0] * q.shape[1], "C": max_context},
        weights=(weights, "R*J _", FLOAT32_UP),
        out=(out, "R*J C", wide_dtype(q, weights)),
    )
    width = q.shape[3] * (2 if q.dtype == torch.uint8 else 1)
    check_cache(name, "index_cache", index_cache, layout, channels=width, device=q.device)
    check_queries(name, q, q_scales, width)


@operation(
    mutates=("out",),
    outputs=lambda logits, starts, ends, k, out=None: (starts.new_empty((len(logits), k)),),
)
def topk_per_row(
    logits: Tensor, starts: Tensor, ends: Tensor, k: int, *, out: Tensor | None = None
) -> Tensor:
    """Indices of the k best scores of each row, exactly.

    Of the columns ``starts[m] <= n < ends[m]``, the first k in this order: higher score first, NaN
    above +inf, and among equal scores (0 and -0 are equal, as are NaNs) the lower index first. A
    row with at most k columns lists all of them; -inf is a score like any other.

    Args:
        logits: [M, N] float32 or float64; columns outside [starts, ends) may hold anything.
        starts: [M] int32.
        ends: [M] int32; bounds outside [0, N] are clamped.
        k: any number >= 1.
        out: [M, k] int32 to write into, or None.

    Returns:
        [M, k] int32, ``out`` if given: indices relative to ``starts``, best first, then -1.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device; k below 1.
    """
    name = "topk_per_row"
    require(k >= 1, name, "k", ">= 1", k)
    check(
        name,
        dims={"K": k},
        logits=(logits, "M N", FLOAT32_UP),
        starts=(starts, "M", INT32),
        ends=(ends, "M", INT32),
        out=(out, "M K", INT32),
    )


mqa_logits.register("reference", reference.mqa_logits)
mqa_logits.register("torch", torch_scores.mqa_logits)
paged_mqa_logits.register("reference", reference.paged_mqa_logits)
paged_mqa_logits.register("torch", torch_scores.paged_mqa_logits)
topk_per_row.register("reference", reference.topk_per_row)
topk_per_row.register("torch", torch_topk.topk_per_row)

_TRITON = "anymla.ops.indexer.triton_"
mqa_logits.register_lazy("triton", f"{_TRITON}scores", supports=device_support.dense_support)
paged_mqa_logits.register_lazy("triton", f"{_TRITON}paged", supports=device_support.paged_support)
mqa_logits.register_lazy(
    "gluon_sm90",
    "anymla.ops.indexer.gluon_sm90_logits",
    supports=device_support.hopper_dense_support,
)
paged_mqa_logits.register_lazy(
    "gluon_sm90",
    "anymla.ops.indexer.gluon_sm90_logits",
    supports=device_support.hopper_paged_support,
)
topk_per_row.register_lazy("triton", f"{_TRITON}topk", supports=float32_support)

"""Deliberate faults of attention over listed rows, each with its intended cases."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.ops.attention import CacheRows
from anymla.testing.conformance.faults.fault import GOOD, fault


@fault("sparse_attention", "A1", "A2")
def sink_dropped(*args: Any, sink: Tensor | None = None, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, **rest)
    return out, lse.nan_to_num(0.0) if sink is not None else lse


@fault("sparse_attention", "A1")
def sink_counted_twice(*args: Any, sink: Tensor | None = None, **rest: Any) -> Any:
    sink = None if sink is None else sink + math.log(2)
    return GOOD.sparse_attention(*args, sink=sink, **rest)


@fault("sparse_attention", "A1")
def sink_multiplied_by_the_scale(*args: Any, sink: Tensor | None = None, **rest: Any) -> Any:
    sink = None if sink is None else sink * 512**-0.5
    return GOOD.sparse_attention(*args, sink=sink, **rest)


@fault("sparse_attention", "A2")
def lse_in_base_two(*args: Any, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, **rest)
    return out, lse / math.log(2)


@fault("sparse_attention", "A2")
def lse_with_the_sink(*args: Any, sink: Tensor | None = None, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, sink=sink, **rest)
    return out, lse if sink is None else torch.logaddexp(lse, sink.expand_as(lse))


@fault("sparse_attention", "A2")
def empty_row_has_an_lse_of_plus_infinity(*args: Any, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, **rest)
    return out, torch.where(lse == -torch.inf, torch.inf, lse)


@fault("sparse_attention", "A3")
def heads_in_blocks_of_eight(*args: Any, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, **rest)
    out[:, out.shape[1] // 8 * 8 :] = 0
    return out, lse


@fault("sparse_attention", "A4", "I9")
def columns_in_blocks_of_64(q: Tensor, rows: list[CacheRows], **rest: Any) -> Any:
    first, *more = rows
    width = max(64, first.width // 64 * 64)
    lengths = None if first.lengths is None else first.lengths.clamp(max=width)
    first = first._replace(indices=first.indices[:, :width], lengths=lengths)
    return GOOD.sparse_attention(q, [first, *more], **rest)


@fault("sparse_attention", "A5")
def other_kernel_forgets_a_column(q: Tensor, rows: list[CacheRows], **rest: Any) -> Any:
    first, *more = rows
    if len(q) > 64 and first.lengths is not None:
        first = first._replace(lengths=first.lengths - 1)
    return GOOD.sparse_attention(q, [first, *more], **rest)


@fault("sparse_attention", "A7")
def result_depends_on_the_batch(*args: Any, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, **rest)
    return out * (1 + 0.003 * len(out)), lse


@fault("sparse_attention", "A8")
def grid_of_65535_tokens(*args: Any, **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(*args, **rest)
    out[65535:] = 0
    return out, lse


@fault("sparse_attention", "A10", "L6")
def lengths_ignored(q: Tensor, rows: list[CacheRows], **rest: Any) -> Any:
    return GOOD.sparse_attention(q, [rows[0]._replace(lengths=None), *rows[1:]], **rest)


@fault("sparse_attention", "A10", "I9")
def negative_indices_wrap_around(q: Tensor, rows: list[CacheRows], **rest: Any) -> Any:
    first, *more = rows
    first = first._replace(indices=first.indices % first.limit)
    return GOOD.sparse_attention(q, [first, *more], **rest)


@fault("sparse_attention_rows", "A10")
def rows_past_the_end_are_clamped(
    q: Tensor, kv: Tensor, indices: Tensor, *args: Any, **rest: Any
) -> Any:
    return GOOD.sparse_attention_rows(q, kv, indices.clamp(max=len(kv) - 1), *args, **rest)


@fault("sparse_attention_rows", "L6", "A10")
def lengths_of_plain_rows_ignored(
    q: Tensor, kv: Tensor, indices: Tensor, lengths: Tensor | None = None, **rest: Any
) -> Any:
    return GOOD.sparse_attention_rows(q, kv, indices, None, **rest)


@fault("prefill_attention", "A5")
def last_entry_of_a_run_forgotten(
    q: Tensor, rows: Tensor, ranges: Tensor, *args: Any, **rest: Any
) -> Any:
    return GOOD.prefill_attention(q, rows, ranges - torch.tensor([0, 0, 0, 1]), *args, **rest)


@fault("prefill_attention", "A5")
def workspace_is_multiplied_by_zero(q: Tensor, rows: Tensor, *args: Any, **rest: Any) -> Any:
    out, lse = GOOD.prefill_attention(q, rows, *args, **rest)
    return out + 0 * rows.sum(), lse


@fault("sparse_attention", "L6")
def masked_rows_are_multiplied_by_zero(q: Tensor, rows: list[CacheRows], **rest: Any) -> Any:
    out, lse = GOOD.sparse_attention(q, rows, **rest)
    cache, layout_id, *_ = rows[0]
    slots = torch.arange(cache.shape[0] * cache.shape[1])
    return out + 0 * get_layout(layout_id).read(cache, slots, torch.float32).sum(), lse


@fault("sparse_attention", "R3")
def softmax_with_mscale(*args: Any, **rest: Any) -> Any:
    return GOOD.sparse_attention(*args, **{**rest, "scale": 512**-0.5 * 1.277**2})


@fault("sparse_attention", "Q2")
def one_format_flag_for_both_caches(q: Tensor, rows: list[CacheRows], **rest: Any) -> Any:
    alike = [each for each in rows if each.layout == rows[0].layout]
    return GOOD.sparse_attention(q, alike, **rest)


@fault("sparse_attention", "L8")
def layout_not_compared(*args: Any, **rest: Any) -> Any:
    try:
        return GOOD.sparse_attention(*args, **rest)
    except (TypeError, ValueError):
        return None

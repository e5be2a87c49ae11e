"""Attention with gradients: over the rows and entries of a plan, or over one flat list of rows.

The forward pass is the operation by which engines compute prompts. Both passes are functional
torch.library operators, so that torch.compile, activation checkpointing and CUDA graphs see one
operator each; eager calls go the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.ops.attention import prefill_attention, prefill_attention_backward
from anymla.train.plan import Plan


def attention(
    q: Tensor,
    rows: Tensor,
    entries: Tensor | None,
    plan: Plan,
    lists: Tensor | None = None,
    sink: Tensor | None = None,
    *,
    scale: float | None = None,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each token of a packed batch to its window and to entries, under one softmax.

    The formula is that of ``ops.attention.prefill_attention``, which computes it; its gradients are
    those of ``ops.attention.prefill_attention_backward``. q, rows, entries and sink get gradients,
    and lse has one; each may be left out. Gradients are differentiated no further.

    Args:
        q: queries [T, H, D], floating point, rotated.
        rows: row of each token, key and value in one, [T, D] floating point.
        entries: compressed entries of all sequences, side by side as in ``plan``, [E, D] of rows'
            dtype; None for layers without entries.
        plan: plan of the batch, for the layer's ratio.
        lists: entries selected for each token, [T, K] int32, numbered from the first entry of its
            sequence; negative ones are skipped, and so are columns from the number of entries on
            that the token's position sees. None for all visible entries.
        sink: one logit per head that carries no value, [H] float32 or float64; None for no sink.
        scale: factor of the scores; None for D ** -0.5.
        deterministic: True for gradients of the same bits in every run, None for what
            ``torch.use_deterministic_algorithms`` has set.

    Returns:
        Output [T, H, D] of q's dtype, and lse [T, H] float32 (float64 for float64 q), natural and
        without the sink; -inf for a token that sees nothing.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device, or another batch than the plan's.
    """
    if len(rows) != plan.tokens:
        got = f"{len(rows)} rows for {plan.tokens} tokens"
        raise ValueError(f"attention: rows must be one for each token of the plan, got {got}")
    if plan.ratio and entries is None:
        raise ValueError(f"attention: entries must be given for ratio {plan.ratio}, got None")
    if entries is not None and entries.dtype != rows.dtype:
        raise TypeError(f"attention: entries must be of rows' {rows.dtype}, got {entries.dtype}")
    return _attend(
        q, rows, entries, plan.ranges, lists, sink, None, plan.window, plan.most_entries, scale,
        _is_deterministic(deterministic),
    )  # fmt: skip


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None = None,
    scale: float | None = None,
    *,
    value_dim: int | None = None,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each query to the rows of one tensor that are listed for it.

    The flat form in which RL frameworks call sparse attention. A row listed n times counts n times,
    in gradients too. q, kv and sink get gradients, and lse has one.

    Args:
        q: queries [T, H, D], floating point.
        kv: rows that queries attend to, key and value in one, [N, D] or [N, 1, D] floating point.
        indices: row numbers listed for each query, [T, K] or [T, 1, K] int32; those outside [0, N)
            are skipped.
        sink: one logit per head that carries no value, [H] float32 or float64; None for no sink.
        scale: factor of the scores; None for D ** -0.5.
        value_dim: number of leading channels of a row that are the value; None for all D.
        deterministic: True for gradients of the same bits in every run, None for what
            ``torch.use_deterministic_algorithms`` has set.

    Returns:
        Output [T, H, value_dim] of q's dtype, and lse [T, H] float32 (float64 for float64 q),
        natural and without the sink; -inf for a query without rows. Libraries whose lse contains
        the sink need ``torch.logaddexp(lse, sink)``.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.
    """
    kv = kv.squeeze(1) if kv.ndim == 3 else kv
    indices = indices.squeeze(1) if indices.ndim == 3 else indices
    if value_dim is not None and not 1 <= value_dim <= q.shape[2]:
        limit = f"from 1 to D={q.shape[2]}"
        raise ValueError(f"sparse_attention: value_dim must be {limit}, got {value_dim}")
    ranges = torch.zeros(len(q), 4, dtype=torch.int32, device=q.device)
    ranges[:, 3] = indices.shape[1]
    return _attend(
        q, kv, None, ranges, indices, sink, value_dim, 0, 0, scale, _is_deterministic(deterministic)
    )


def _is_deterministic(asked: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if asked is None else asked


def _side_by_side(rows: Tensor, entries: Tensor | None) -> Tensor:
    return rows if entries is None else torch.cat((rows, entries))


@torch.library.custom_op("anymla::train_attention", mutates_args=())
def _attend(
    q: Tensor,
    rows: Tensor,
    entries: Tensor | None,
    ranges: Tensor,
    lists: Tensor | None,
    sink: Tensor | None,
    value_dim: int | None,
    window: int,
    most_entries: int,
    scale: float | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return prefill_attention(
            q, _side_by_side(rows, entries), ranges, lists, window=window, entries=most_entries,
            sink=sink, scale=scale, value_dim=value_dim,
        )  # fmt: skip


@torch.library.custom_op("anymla::train_attention_backward", mutates_args=())
def _gradients(
    dout: Tensor,
    q: Tensor,
    rows: Tensor,
    entries: Tensor | None,
    ranges: Tensor,
    lists: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    dlse: Tensor | None,
    window: int,
    most_entries: int,
    scale: float | None,
    deterministic: bool,
    gradients: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        dq, drows, dsink = prefill_attention_backward(
            dout, q, _side_by_side(rows, entries), ranges, lists, out, lse, window=window,
            entries=most_entries, sink=sink, scale=scale, dlse=dlse, gradients=gradients,
            deterministic=deterministic,
        )  # fmt: skip
        return dq, drows.to(rows.dtype), dsink if sink is None else dsink.to(sink.dtype)


@_attend.register_fake
def _(
    q: Tensor,
    rows: Tensor,
    entries: Tensor | None,
    ranges: Tensor,
    lists: Tensor | None,
    sink: Tensor | None,
    value_dim: int | None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    values = q.shape[2] if value_dim is None else value_dim
    return q.new_empty(*q.shape[:2], values), q.new_empty(q.shape[:2], dtype=wide)


@_gradients.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    rows: Tensor,
    entries: Tensor | None,
    ranges: Tensor,
    lists: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    *more: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = more[-1]
    queries = 0 if gradients == "rows" else len(q)
    listed = len(rows) + (0 if entries is None else len(entries))
    return (
        q.new_empty(queries, *q.shape[1:]),
        rows.new_empty(0 if gradients == "queries" else listed, rows.shape[1]),
        lse.new_empty(q.shape[1], dtype=lse.dtype if sink is None else sink.dtype),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, rows, entries, ranges, lists, sink, _, *ctx.numbers = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, rows, entries, ranges, lists, sink, *output)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, rows, entries, ranges, lists, sink, out, lse = ctx.saved_tensors
    for_q, for_rows, for_entries, _, _, for_sink, *rest = ctx.needs_input_grad
    gradients = "all"
    if not (for_rows or for_entries):
        gradients = "queries"
    elif not for_q:
        gradients = "rows"
    if dout is None:
        dout = torch.zeros_like(out)
    dq, drows, dsink = _gradients(
        dout, q, rows, entries, ranges, lists, out, lse, sink, dlse, *ctx.numbers, gradients
    )
    return (
        dq if for_q else None,
        drows[: len(rows)] if for_rows else None,
        drows[len(rows) :] if for_entries else None,
        None,
        None,
        dsink if for_sink else None,
        *(None for _ in rest),
    )


_attend.register_autograd(_backward, setup_context=_keep)

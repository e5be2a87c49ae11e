"""Contracts of attention: over rows listed in caches, or over a workspace of decoded rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.ops._epilogue import InverseRopeQuant, check_epilogue, quantized_results
from anymla.ops._pages import check_cache
from anymla.ops.attention.cache_rows import CacheRows, flat
from anymla.ops.attention.composed import by_lists, triton_lists_support
from anymla.ops.attention.decode_config import choose_schedule
from anymla.ops.attention.decode_support import (
    gluon_attention_support,
    gluon_rows_support,
    triton_attention_support,
    triton_rows_support,
)
from anymla.ops.attention.prefill_backward_config import (
    gluon_backward_support,
    triton_backward_support,
)
from anymla.ops.attention.prefill_config import gluon_prefill_support
from anymla.ops.device import runs_gluon, target_of
from anymla.ops.registry import (
    FLOAT32_UP,
    FLOATS,
    INT32,
    LazyFunction,
    Operation,
    check,
    operation,
    require,
    wide_dtype,
)

VALUE_DIM = 512


def _results(
    q: Tensor,
    *,
    value_dim: int | None = None,
    epilogue: InverseRopeQuant | None = None,
    out: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Allocate the results of any of the operations; arguments are the operation's."""
    if epilogue is not None:
        return quantized_results(q, epilogue)
    shape = (*q.shape[:2], q.shape[2] if value_dim is None else value_dim)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (
        torch.empty(shape, dtype=q.dtype if out is None else out.dtype, device=q.device),
        torch.empty(shape[:2], dtype=lse_dtype, device=q.device),
    )


@operation(mutates=("out",), outputs=_results)
def sparse_attention(
    q: Tensor,
    rows: Sequence[CacheRows],
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    empty_lse: float | None = None,
    batch_invariant: bool = False,
    plan: Tensor | None = None,
    epilogue: InverseRopeQuant | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each query to the cache rows listed for it, in one or two caches.

    With s[j] = scale * <q[t, h], row[j]> over the listed rows of both caches, one softmax:

        lse[t, h] = log sum_j exp(s[j])                            (natural log, sink excluded)
        out[t, h] = sum_j exp(s[j]) row[j] / (sum_j exp(s[j]) + exp(sink[h]))

    A row is the key, and its first ``value_dim`` channels, or all of it, are the value. A slot
    listed n times counts n times. Slots outside their cache (negative, or past its end) are
    skipped and never read; so is everything from a list's column ``lengths[t]`` on. What lies in
    rows that are not listed for a token never reaches it, not even as NaN; a NaN in a listed row
    does.

    Args:
        q: queries [T, H, D], floating point; D channels of the layout, any number of heads H.
        rows: one ``CacheRows`` or two, of caches of D channels: the window, then compressed
            entries. Page sizes and layouts of the two may differ.
        sink: one logit per head that carries no value, [H] float32 or float64; -inf has no effect,
            +inf gives output 0. None for no sink.
        scale: factor of the scores, not of the sink; None for D ** -0.5.
        value_dim: number of leading channels of a row that are the value; None for all D.
        empty_lse: lse of a token without rows; None for -inf.
        batch_invariant: True for results of a token that are the same, bit for bit, in any batch
            (of one token or of many, whatever the others list). It may be slower.
        plan: plan from ``sparse_attention_plan`` for the same numbers of tokens, heads and columns,
            [n] int32; None without one. Backends that cut work in another way ignore it, and so
            does a batch-invariant call.
        epilogue: rotation back and FP8 quantisation of the heads, or None. With it H is a multiple
            of G groups, D of 128, and value_dim, empty_lse and out are None.
        out: tensor that the output is written into, [T, H, value_dim] of q's dtype; None to
            allocate it.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Output [T, H, value_dim] of q's dtype (``out`` if given) and lse [T, H] float32 (float64
        for float64 q). A token without rows has output 0 and lse -inf, or ``empty_lse``. With an
        epilogue: codes [T, G, H / G * D] float8_e4m3fn and scales [T, G, H / G * D / 128] float32.

    Numerics: scores and softmax in float32 or wider; for bfloat16 q the probabilities are rounded
    to bfloat16 before they weigh the values, and the output is rounded once more. float32 and
    float64 q stay in their precision. Matrix instructions round those coded values that 16 bits do
    not hold: V3.2's rows may have scales that are no powers of two.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or layout; more than two caches; a plan
            for other shapes.

    Source: DeepSeek-V4 reference, inference/model.py and kernel.py (sparse attention with sink);
    the two caches are those of FlashMLA's ``flash_mla_with_kvcache``.
    """
    name = "sparse_attention"
    dims = check(
        name,
        q=(q, "T H D", FLOATS),
        sink=(sink, "H", FLOAT32_UP),
        plan=(plan, "_", INT32),
    )
    _check_rows(name, q, rows, dims)
    check_epilogue(name, q, epilogue, value_dim=value_dim, empty_lse=empty_lse, out=out)
    _check_values(name, dims, dims["D"] if value_dim is None else value_dim, out, q.dtype)


@operation(mutates=("out", "max_logits"), outputs=_results)
def sparse_attention_rows(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lengths: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    value_dim: int = VALUE_DIM,
    empty_lse: float | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    max_logits: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each query to the rows of one tensor that are listed for it.

    Same sums as ``sparse_attention``; keys are whole rows, values their first channels.

    Args:
        q: queries of all heads, [T, H, D] floating point.
        kv: rows that queries attend to, [N, D] (or [N, 1, D]) floating point.
        indices: row numbers listed for each token, [T, K] (or [T, 1, K]) int32; those outside
            [0, N) are skipped.
        lengths: number of leading columns in use, [T] int32; None for all K.
        sink: one logit per head that carries no value, [H] float32 or float64; None for no sink.
        scale: factor of the scores; None for D ** -0.5.
        value_dim: number of leading channels of a row that are the value, at most D.
        empty_lse: lse of a token without rows; None for -inf.
        batch_invariant: True for the same bits in any batch, as in ``sparse_attention``.
        out: tensor that the output is written into, [T, H, value_dim] of q's dtype; None to
            allocate it.
        max_logits: tensor that each head's largest score is written into, [T, H] of lse's dtype;
            the sink is no score, and a token without rows has -inf. None for no such result.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Output [T, H, value_dim] of q's dtype and lse [T, H] float32 (float64 for float64 q). A
        token without rows has output 0 and lse -inf, or ``empty_lse``. Numerics are those of
        ``sparse_attention``.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.

    Source: contract of FlashMLA's ``flash_mla_sparse_fwd`` (whose lse of an empty row is +inf).
    """
    name = "sparse_attention_rows"
    dims = check(
        name,
        q=(q, "T H D", FLOATS),
        kv=(flat(kv), "N D", FLOATS),
        indices=(flat(indices), "T K", INT32),
        lengths=(lengths, "T", INT32),
        sink=(sink, "H", FLOAT32_UP),
        max_logits=(max_logits, "T H", torch.promote_types(q.dtype, torch.float32)),
    )
    _check_values(name, dims, value_dim, out, q.dtype)


@operation(mutates=("out",), outputs=_results)
def prefill_attention(
    q: Tensor,
    rows: Tensor,
    ranges: Tensor,
    lists: Tensor | None = None,
    *,
    window: int,
    entries: int = 0,
    sink: Tensor | None = None,
    scale: float | None = None,
    value_dim: int | None = None,
    epilogue: InverseRopeQuant | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each query to a range of rows, and to a second range or to rows listed for it.

    With ``ranges[t] = (a, n, b, m)`` token t sees the rows

        a, a + 1, ..., a + n - 1                                 (its window), and
        b, b + 1, ..., b + m - 1                                 (all visible entries), or
        b + lists[t, j] for j < m with lists[t, j] >= 0          (the entries selected for it)

    under one softmax, as in ``sparse_attention``: a row is the key, and its first ``value_dim``
    channels, or all of it, are the value. Rows outside [0, N) are skipped, a row that is named
    twice counts twice, and what lies in rows that are not named for a token never reaches it, not
    even as NaN. The rows are a workspace that holds what the requests of a chunk can see, decoded
    once; ``layers.prefill_rows`` builds it.

    Args:
        q: queries [T, H, D], floating point; any number of heads H.
        rows: workspace of decoded rows, [N, D] floating point.
        ranges: first row and number of rows (a, n, b, m) of each token's two ranges, [T, 4] int32.
        lists: entries selected for each token, [T, K] int32, in any order, relative to
            ``ranges[t, 2]``; negative ones are skipped. None for the whole second range.
        window: largest number of rows of a window; n is cut to it.
        entries: largest number of entries of a token; m is cut to it, or to K with lists.
        sink: one logit per head that carries no value, [H] float32 or float64; None for no sink.
        scale: factor of the scores, not of the sink; None for D ** -0.5.
        value_dim: number of leading channels of a row that are the value; None for all D.
        epilogue: rotation back and FP8 quantisation of the heads, as for ``sparse_attention``; with
            it value_dim is None.
        out: tensor that the output is written into, [T, H, value_dim] floating point; None to
            allocate it in q's dtype.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Output [T, H, value_dim] and lse [T, H] float32 (float64 for float64 q), natural, without
        the sink. A token without rows has output 0 and lse -inf. With an epilogue, its codes and
        scales.

    Numerics: those of ``sparse_attention``; for 16-bit q and rows the probabilities are rounded to
    that type before they weigh the values, and the output is rounded once.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device, or a negative bound.
    """
    name = "prefill_attention"
    dims = check(
        name,
        q=(q, "T H D", FLOATS),
        rows=(rows, "N D", FLOATS),
        ranges=(ranges, "T 4", INT32),
        lists=(lists, "T K", INT32),
        sink=(sink, "H", FLOAT32_UP),
    )
    check_epilogue(name, q, epilogue, value_dim=value_dim, out=out)
    _check_values(name, dims, dims["D"] if value_dim is None else value_dim, out, FLOATS)
    require(window >= 0, name, "window", "at least 0", window)
    require(entries >= 0, name, "entries", "at least 0", entries)


def _gradients(
    dout: Tensor,
    q: Tensor,
    rows: Tensor,
    *,
    gradients: str = "all",
    drows: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the gradients of ``prefill_attention``."""
    wide = wide_dtype(q.dtype)
    queries = q if gradients != "rows" else q[:0]
    listed = rows if gradients != "queries" else rows[:0]
    return (
        torch.empty_like(queries, memory_format=torch.contiguous_format),
        torch.empty_like(listed, dtype=wide, memory_format=torch.contiguous_format),
        torch.empty(q.shape[1], dtype=wide, device=q.device),
    )


@operation(mutates=("drows", "mass"), outputs=_gradients)
def prefill_attention_backward(
    dout: Tensor,
    q: Tensor,
    rows: Tensor,
    ranges: Tensor,
    lists: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    *,
    window: int,
    entries: int = 0,
    sink: Tensor | None = None,
    scale: float | None = None,
    dlse: Tensor | None = None,
    delta: Tensor | None = None,
    gradients: str = "all",
    deterministic: bool = False,
    drows: Tensor | None = None,
    mass: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of ``prefill_attention``.

    With s[j] = scale * <q[t, h], row[j]> over the rows named for a token, in both ranges, v[j] the
    value of row[j], which is as many of its leading channels as dout has (V), and

        L[t, h]  = log(exp(lse[t, h]) + exp(sink[h]))            p[j] = exp(s[j] - L[t, h])
        delta    = <dout[t, h], out[t, h]>
        ds[j]    = p[j] (<dout[t, h], v[j]> - delta) + dlse[t, h] exp(s[j] - lse[t, h])

        dq[t, h] = scale sum_j ds[j] row[j]
        drows[n] = sum over all (t, h, j) that name row n of  scale ds[j] q[t, h] + p[j] dout[t, h]
        dsink[h] = -sum_t exp(sink[h] - L[t, h]) delta[t, h]

    p[j] dout[t, h] is added to the first V channels alone. A row that is named twice counts twice.
    A row that is named by no token has gradient 0, whatever lies in it. A token without rows has
    gradient 0 and adds nothing; sinks of -inf and +inf have gradient 0, and with +inf nothing but
    dlse reaches q and rows.

    Args:
        dout: gradient of the output, [T, H, V] of q's dtype, where V is ``prefill_attention``'s
            value_dim, or D without one.
        q: queries as for ``prefill_attention``, [T, H, D] floating point.
        rows: rows as for ``prefill_attention``, [N, D] floating point.
        ranges: two row ranges of each token, [T, 4] int32, as for ``prefill_attention``.
        lists: entries selected for each token, [T, K] int32; None for the whole second range.
        out: output of ``prefill_attention`` without an epilogue, [T, H, V] floating point; None if
            ``delta`` is given.
        lse: lse of ``prefill_attention``, natural and without the sink: [T, H] float32 (float64 for
            float64 q).
        window: largest number of rows of a window, as for ``prefill_attention``.
        entries: largest number of entries of a token, as for ``prefill_attention``.
        sink: one logit per head that carries no value, [H] float32 or float64; None for no sink.
        scale: factor of the scores; None for D ** -0.5.
        dlse: gradient of lse, [T, H] of lse's dtype; None for 0.
        delta: sums <dout, out> of each head, [T, H] of lse's dtype, for callers that have the
            output in float32: of a 16-bit output they are the largest error. None to compute them.
        gradients: "all", or "queries" for dq and dsink alone, or "rows" for drows and dsink alone;
            what is left out is returned without tokens or rows.
        deterministic: True for the same bits in every run, and for a sequence the same bits in any
            batch. It may be slower.
        drows: tensor that the gradient of rows is added to, [N, D] of lse's dtype, contiguous; None
            to begin with 0.
        mass: tensor for the probabilities of the second range, summed over heads, [T, K] with lists
            and [T, entries] without, of lse's dtype; columns that name no row get 0. None for no
            such result.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        dq [T, H, D] of q's dtype, drows [N, D] of lse's dtype (``drows`` if given), and dsink [H]
        of lse's dtype (0 without a sink).

    Numerics: scores are computed again from the given q and rows; sums in float32 or wider. For
    16-bit q and rows, p and scale * ds are rounded to that type before they weigh anything.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device, or a negative bound.

    Source: DeepSeek-V4's attention with sink (inference/model.py), differentiated;
    docs/training.md.
    """
    name = "prefill_attention_backward"
    wide = torch.promote_types(q.dtype, torch.float32) if isinstance(q, Tensor) else torch.float32
    dims = check(
        name,
        q=(q, "T H D", FLOATS),
        dout=(dout, "T H V", FLOATS),
        rows=(rows, "N D", FLOATS),
        ranges=(ranges, "T 4", INT32),
        lists=(lists, "T K", INT32),
        out=(out, "T H V", FLOATS),
        lse=(lse, "T H", wide),
        sink=(sink, "H", FLOAT32_UP),
        dlse=(dlse, "T H", wide),
        delta=(delta, "T H", wide),
        drows=(drows, "N D", wide),
    )
    require(window >= 0, name, "window", "at least 0", window)
    require(entries >= 0, name, "entries", "at least 0", entries)
    check(name, dims=dims | {"K": dims.get("K", entries)}, mass=(mass, "T K", wide))
    within = dims["V"] <= dims["D"]
    require(within, name, "dout", f"of at most D={dims['D']} channels", dims["V"])
    require(dout.dtype == q.dtype, name, "dout", f"of q's dtype {q.dtype}", dout.dtype)
    require(out is not None or delta is not None, name, "out", "given without delta", out)
    known = gradients in ("all", "queries", "rows")
    require(known, name, "gradients", "all, queries or rows", gradients)
    if drows is not None:
        require(drows.is_contiguous(), name, "drows", "contiguous", list(drows.stride()))


def _check_rows(name: str, q: Tensor, rows: Sequence[CacheRows], dims: dict[str, int]) -> None:
    """Check the caches and lists that queries attend to."""
    members = rows if isinstance(rows, list | tuple) else [rows]
    if members is not rows or not all(isinstance(one, CacheRows) for one in members):
        got = ", ".join(type(one).__name__ for one in members)
        raise TypeError(f"{name}: rows must be a list of CacheRows, got {got}")
    require(len(rows) in (1, 2), name, "rows", "one CacheRows or two", len(rows))
    for place, (cache, layout, indices, lengths) in enumerate(rows):
        prefix = f"rows[{place}]"
        if not isinstance(indices, Tensor):
            got = type(indices).__name__
            raise TypeError(f"{name}: {prefix}.indices must be a tensor [T, K], got {got}")
        given: dict[str, tuple[object, str, torch.dtype]] = {
            f"{prefix}.indices": (flat(indices), "T K", INT32),
            f"{prefix}.lengths": (lengths, "T", INT32),
        }
        check(name, dims=dims, q=(q, "T H D", FLOATS), **given)
        check_cache(name, f"{prefix}.cache", cache, layout, channels=dims["D"], device=q.device)


def sparse_attention_plan(
    lengths: Tensor | None,
    extra_lengths: Tensor | None = None,
    *,
    heads: int,
    width: int,
    extra_width: int | None = None,
) -> Tensor | None:
    """Plan which CTA computes which splits of ``sparse_attention``, from the lengths of its lists.

    Layers of one kind list the same number of rows for each token of a step, so that one plan
    serves them all. With a plan results differ by rounding alone, and they stay right if lists are
    shorter or longer than the plan's lengths. The plan is made on the device, without waiting for
    it, and may be captured in a graph.

    Args:
        lengths: number of rows in each token's first list, [T] int32; None if lists are full.
        extra_lengths: number of rows in each token's second list, [T] int32; None likewise.
        heads: number of query heads.
        width: number of columns of the first lists.
        extra_width: number of columns of the second lists; None without second lists.

    Returns:
        Argument ``plan`` of ``sparse_attention``, [n] int32 on the lengths' device; None where a
        plan gains nothing (other devices, full lists, few tokens), and under torch.compile.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device of lengths.
    """
    name = "sparse_attention_plan"
    check(name, lengths=(lengths, "T", INT32), extra_lengths=(extra_lengths, "T", INT32))
    some = extra_lengths if lengths is None else lengths
    if some is None or not len(some) or not heads or torch.compiler.is_compiling():
        return None
    if not runs_gluon(some.device):
        return None

    widths = (width,) if extra_width is None else (width, extra_width)
    sms = target_of(some.device).sm_count
    schedule = choose_schedule(len(some), heads, widths, sms, lengths=True, planned=True)
    if not schedule.planned:
        return None
    made: Tensor = _make_plan(schedule, len(some), lengths, extra_lengths, widths)
    return made


def _check_values(
    name: str,
    dims: dict[str, int],
    value_dim: int,
    out: Tensor | None,
    dtype: torch.dtype | tuple[torch.dtype, ...],
) -> None:
    in_range = 1 <= value_dim <= dims["D"]
    require(in_range, name, "value_dim", f"from 1 to D={dims['D']}", value_dim)
    check(name, dims=dims | {"V": value_dim}, out=(out, "T H V", dtype))


_FAMILY = "anymla.ops.attention"
_TRITON, _GLUON = f"{_FAMILY}.triton_decode_launch", f"{_FAMILY}.gluon_sm90_decode_launch"
_GLUON_PREFILL = f"{_FAMILY}.gluon_sm90_prefill_launch"
_make_plan = LazyFunction(_GLUON, "make_plan")

_operation: Operation[..., Any]
for _operation in (sparse_attention, sparse_attention_rows):
    _operation.register_lazy("reference", f"{_FAMILY}.reference")
    _operation.register_lazy("torch", f"{_FAMILY}.torch_device")
sparse_attention.register_lazy("gluon_sm90", _GLUON, supports=gluon_attention_support)
sparse_attention.register_lazy("triton", _TRITON, supports=triton_attention_support)
sparse_attention_rows.register_lazy("triton", _TRITON, supports=triton_rows_support)
sparse_attention_rows.register_lazy("gluon_sm90", _GLUON_PREFILL, supports=gluon_rows_support)

prefill_attention.register_lazy("reference", f"{_FAMILY}.reference")
prefill_attention.register("torch", by_lists(sparse_attention_rows, "torch"))
prefill_attention.register(
    "triton", by_lists(sparse_attention_rows, "triton"), supports=triton_lists_support
)
prefill_attention.register_lazy("gluon_sm90", _GLUON_PREFILL, supports=gluon_prefill_support)

prefill_attention_backward.register_lazy("reference", f"{_FAMILY}.reference")
prefill_attention_backward.register_lazy("torch", f"{_FAMILY}.torch_prefill_backward")
prefill_attention_backward.register_lazy(
    "triton", f"{_FAMILY}.triton_prefill_backward_launch", supports=triton_backward_support
)
prefill_attention_backward.register_lazy(
    "gluon_sm90",
    f"{_FAMILY}.gluon_sm90_prefill_backward_launch",
    supports=gluon_backward_support,
)

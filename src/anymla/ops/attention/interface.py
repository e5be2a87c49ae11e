"""Contracts of attention: decode by lists of slots, prefill over a decoded workspace."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops._epilogue import check_quantized, composed, quantized_results
from anymla.ops._pages import check_cache
from anymla.ops.attention.composed import by_lists, triton_lists_support
from anymla.ops.attention.decode_config import choose_schedule
from anymla.ops.attention.decode_support import (
    gluon_attention_support,
    gluon_fp8_quant_support,
    gluon_rows_support,
    triton_attention_support,
)
from anymla.ops.attention.prefill_config import (
    gluon_prefill_fp8_quant_support,
    gluon_prefill_support,
)
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
)

VALUE_DIM = 512


def _results(q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (
        torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device),
        torch.empty((tokens, heads), dtype=lse_dtype, device=q.device),
    )


def _first_channels(q: Tensor, *, value_dim: int | None, **_: Any) -> tuple[Tensor, Tensor]:
    return _results(q, q.shape[2] if value_dim is None else value_dim)


@operation(mutates=("out",), outputs=_first_channels)
def sparse_attention(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lengths: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    layout: str = MAIN_FP8,
    extra_layout: str = MAIN_FP8,
    value_dim: int | None = None,
    empty_lse: float | None = None,
    batch_invariant: bool = False,
    plan: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each query to the cache rows listed for it, in one or two caches.

    With s[j] = scale * <q[t, h], row[j]> over the listed rows of both caches, one softmax:

        lse[t, h] = log sum_j exp(s[j])                            (natural log, sink excluded)
        out[t, h] = sum_j exp(s[j]) row[j] / (sum_j exp(s[j]) + exp(sink[h]))

    A row is the key, and its first ``value_dim`` channels, or all of it, are the value. A slot
    listed n times counts n times. Slots outside their cache (negative, or past its end) are
    skipped and never read; so is everything from column ``lengths[t]`` on. What lies in rows that
    are not listed for a token never reaches it, not even as NaN; a NaN in a listed row does.

    Args:
        q: [T, H, D] floating point. D = channels of the layout; any H.
        k_cache: [P, B, row] (or [P, B, 1, row]) in ``layout``; any page stride.
        indices: [T, K] (or [T, 1, K]) int32, ``page * B + offset``; any order.
        lengths: [T] int32, leading columns in use; None for all K.
        sink: [H] float32 or float64, one logit per head that carries no value. -inf: no effect,
            +inf: output 0.
        scale: of the scores; None for D ** -0.5. The sink is not scaled.
        extra_cache: second cache, or None. Its page size and layout may differ.
        extra_indices: [T, K'] (or [T, 1, K']) int32, slots of ``extra_cache``.
        extra_lengths: [T] int32.
        layout: layout id of k_cache.
        extra_layout: layout id of extra_cache.
        value_dim: leading channels of a row that are the value, at most D; None for D.
        empty_lse: lse of a token without rows; None for -inf.
        batch_invariant: a row's result is the same, bit for bit, in any batch (of one token or
            of many, whatever the others list). It may be slower.
        plan: int32 [n] from ``sparse_attention_plan`` for as many tokens and heads and lists as
            wide, or None. Backends that cut work in another way ignore it, and so does a
            batch-invariant call.
        out: [T, H, value_dim] of q's dtype to write the output into, or None.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        out [T, H, value_dim] of q's dtype (``out`` if given) and lse [T, H] float32 (float64 for
        float64 q). A token without rows: out 0, lse -inf or what ``empty_lse`` says.

    Numerics: scores and softmax in float32 or wider; for bfloat16 q the probabilities are rounded
    to bfloat16 before they weigh the values, and the output is rounded once more. float32 and
    float64 q stay in their precision. Matrix instructions round those coded values that 16 bits do
    not hold: V3.2's rows may have scales that are no powers of two.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or layout; extra_indices without
            extra_cache or the reverse; a plan for other shapes.

    Source: DeepSeek-V4 reference, inference/model.py and kernel.py (sparse attention with sink);
    the two caches are those of FlashMLA's ``flash_mla_with_kvcache``.
    """
    name = "sparse_attention"
    first = k_cache, indices, lengths, layout
    second = extra_cache, extra_indices, extra_lengths, extra_layout
    dims = _check_lists(name, q, first, second, sink, plan)
    _check_values(name, dims, dims["D"] if value_dim is None else value_dim, out, q.dtype)


@operation(
    mutates=("out", "max_logits"), outputs=lambda q, *, value_dim, **_: _results(q, value_dim)
)
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
        q: [T, H, D] floating point.
        kv: [N, D] (or [N, 1, D]) floating point.
        indices: [T, K] (or [T, 1, K]) int32 rows of kv; outside [0, N): skipped.
        lengths: [T] int32, leading columns in use; None for all K.
        sink: [H] float32 or float64 logits, or None.
        scale: of the scores; None for D ** -0.5.
        value_dim: leading channels of a row that are the value, at most D.
        empty_lse: lse of a token without rows; None for -inf.
        batch_invariant: as in ``sparse_attention``.
        out: [T, H, value_dim] of q's dtype to write the output into, or None.
        max_logits: [T, H] of lse's dtype to write each head's largest score into (the sink is
            none; -inf for a token without rows), or None.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        out [T, H, value_dim] of q's dtype and lse [T, H] float32 (float64 for float64 q); a token
        without rows: out 0, lse -inf or ``empty_lse``. Numerics as in ``sparse_attention``.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.

    Source: contract of FlashMLA's ``flash_mla_sparse_fwd`` (whose lse of an empty row is +inf).
    """
    name = "sparse_attention_rows"
    dims = check(
        name,
        q=(q, "T H D", FLOATS),
        kv=(_flat(kv), "N D", FLOATS),
        indices=(_flat(indices), "T K", INT32),
        lengths=(lengths, "T", INT32),
        sink=(sink, "H", FLOAT32_UP),
        max_logits=(max_logits, "T H", torch.promote_types(q.dtype, torch.float32)),
    )
    _check_values(name, dims, value_dim, out, q.dtype)


@operation(outputs=quantized_results)
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
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``sparse_attention``, then ``inverse_rope_fp8_quant`` of its output.

    The output may be rounded to q's dtype in between, as separate calls do, or not at all, which is
    what a backend gains that does both at once.

    Args:
        q: [T, H, D] floating point, H a multiple of n_groups, D a multiple of 128.
        k_cache: as for ``sparse_attention``, like all that is not named here.
        indices: [T, K] (or [T, 1, K]) int32.
        lengths: [T] int32, or None.
        positions: [T] int64, of the queries.
        cos_sin_cache: [L, rope_dim] float32, cosines then sines; L > every position.
        n_groups: G.
        sink: [H] float32 or float64, or None.
        scale: of the scores; None for D ** -0.5.
        extra_cache: second cache, or None.
        extra_indices: [T, K'] (or [T, 1, K']) int32.
        extra_lengths: [T] int32.
        layout: layout id of k_cache.
        extra_layout: layout id of extra_cache.
        batch_invariant: as for ``sparse_attention``.
        plan: int32 [n], likewise, or None.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        values float8_e4m3fn [T, G, H / G * D] and scales float32 [T, G, H / G * D / 128].

    Raises:
        TypeError, ValueError: as the two operations.
    """
    name = "sparse_attention_fp8_quant"
    check_quantized(name, q, positions, cos_sin_cache, n_groups)
    first = k_cache, indices, lengths, layout
    second = extra_cache, extra_indices, extra_lengths, extra_layout
    _check_lists(name, q, first, second, sink, plan)


def _prefill_results(*, q: Tensor, out: Tensor | None = None, **_: object) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (
        torch.empty_like(q if out is None else out),
        torch.empty(q.shape[:2], dtype=lse_dtype, device=q.device),
    )


@operation(mutates=("out",), outputs=_prefill_results)
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
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each query to a range of rows, and to a second range or to rows listed for it.

    With ``ranges[t] = (a, n, b, m)`` token t sees the rows

        a, a + 1, ..., a + n - 1                                 (its window), and
        b, b + 1, ..., b + m - 1                                 (all visible entries), or
        b + lists[t, j] for j < m with lists[t, j] >= 0          (the entries selected for it)

    under one softmax, as in ``sparse_attention``: a row is key and value, rows outside [0, N) are
    skipped, a row that is named twice counts twice, and what lies in rows that are not named for a
    token never reaches it, not even as NaN. The rows are a workspace that holds what the requests
    of a chunk can see, decoded once; ``layers.prefill_rows`` builds it.

    Args:
        q: [T, H, D] floating point; any H.
        rows: [N, D] floating point.
        ranges: [T, 4] int32.
        lists: [T, K] int32, in any order, relative to ``ranges[t, 2]``; negative ones are skipped.
        window: the most rows of a window; n is cut to it.
        entries: the most entries of a token; m is cut to it, or to K where there are lists.
        sink: [H] float32 or float64, one logit per head that carries no value.
        scale: of the scores; None for D ** -0.5. The sink is not scaled.
        out: [T, H, D] floating point to write the output into, or None for one of q's dtype.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        out [T, H, D] and lse [T, H] float32 (float64 for float64 q), natural, without the sink. A
        token without rows: out 0, lse -inf.

    Numerics: as ``sparse_attention``; for 16-bit q and rows the probabilities are rounded to that
    type before they weigh the values, and the output is rounded once.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device, or a negative bound.
    """
    name = "prefill_attention"
    check(
        name,
        q=(q, "T H D", FLOATS),
        rows=(rows, "N D", FLOATS),
        ranges=(ranges, "T 4", INT32),
        lists=(lists, "T K", INT32),
        sink=(sink, "H", FLOAT32_UP),
        out=(out, "T H D", FLOATS),
    )
    require(window >= 0, name, "window", "at least 0", window)
    require(entries >= 0, name, "entries", "at least 0", entries)


@operation(outputs=quantized_results)
def prefill_attention_fp8_quant(
    q: Tensor,
    rows: Tensor,
    ranges: Tensor,
    lists: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    n_groups: int,
    window: int,
    entries: int = 0,
    sink: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``prefill_attention``, then ``inverse_rope_fp8_quant`` of its output.

    The output may be rounded to q's dtype in between or not, as for ``sparse_attention_fp8_quant``.

    Args:
        q: [T, H, D] floating point, H a multiple of n_groups, D a multiple of 128.
        rows: [N, D] floating point.
        ranges: [T, 4] int32, as for ``prefill_attention``, like all that is not named here.
        lists: [T, K] int32, or None.
        positions: [T] int64, of the queries.
        cos_sin_cache: [L, rope_dim] float32, cosines then sines; L > every position.
        n_groups: G.
        window: the most rows of a window.
        entries: without lists the most entries of a token.
        sink: [H] float32 or float64, or None.
        scale: of the scores; None for D ** -0.5.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        values float8_e4m3fn [T, G, H / G * D] and scales float32 [T, G, H / G * D / 128].

    Raises:
        TypeError, ValueError: wrong dtype, shape or device, or a negative bound.
    """
    name = "prefill_attention_fp8_quant"
    dims = check_quantized(name, q, positions, cos_sin_cache, n_groups)
    check(
        name,
        dims=dims,
        rows=(rows, "_ D", FLOATS),
        ranges=(ranges, "T 4", INT32),
        lists=(lists, "T _", INT32),
        sink=(sink, "H", FLOAT32_UP),
    )
    require(window >= 0, name, "window", "at least 0", window)
    require(entries >= 0, name, "entries", "at least 0", entries)


# Cache, slots, lengths and layout id of a scope.
_Scope: TypeAlias = tuple[Any, Any, Any, str]


def _check_lists(
    name: str, q: Tensor, first: _Scope, second: _Scope, sink: Tensor | None, plan: Tensor | None
) -> dict[str, int]:
    """Check the queries, both scopes and what goes with them; return sizes by letter."""
    cache, indices, lengths, layout = first
    more, extra_indices, extra_lengths, extra_layout = second
    dims = check(
        name,
        q=(q, "T H D", FLOATS),
        indices=(_flat(indices), "T K", INT32),
        lengths=(lengths, "T", INT32),
        sink=(sink, "H", FLOAT32_UP),
        extra_indices=(_flat(extra_indices), "T _", INT32),
        extra_lengths=(extra_lengths, "T", INT32),
        plan=(plan, "_", INT32),
    )
    caches = {"k_cache": (cache, layout), "extra_cache": (more, extra_layout)}
    for argument, (given, layout_id) in caches.items():
        if given is not None or argument == "k_cache":
            check_cache(name, argument, given, layout_id, channels=dims["D"], device=q.device)
    both = (more is None) == (extra_indices is None)
    require(both, name, "extra_cache and extra_indices", "given together", "one of them")
    if more is None:
        require(
            extra_lengths is None, name, "extra_lengths", "None without extra_cache", "a tensor"
        )
    return dims


def sparse_attention_plan(
    lengths: Tensor | None,
    extra_lengths: Tensor | None = None,
    *,
    heads: int,
    width: int,
    extra_width: int | None = None,
) -> Tensor | None:
    """Cut the work of calls of ``sparse_attention`` whose lists are as long.

    Layers of a step, or a step's calls of one layer's kind, list as many rows of each token, so
    that one plan serves them all. It says which CTA computes which splits; results
    differ by rounding alone, and stay right for lists that are shorter or longer than those it was
    made of. A plan is made on the device, without waiting for it, and may be captured in a graph.

    Args:
        lengths: [T] int32, of the first lists; None if they are full.
        extra_lengths: [T] int32, of the second lists.
        heads: query heads.
        width: columns of the first lists.
        extra_width: columns of the second lists, or None without.

    Returns:
        For ``plan`` of ``sparse_attention``: int32 on the lengths' device. None where a plan gains
        nothing (other devices, full lists, few tokens), and under torch.compile.

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
    name: str, dims: dict[str, int], value_dim: int, out: Tensor | None, dtype: torch.dtype
) -> None:
    in_range = 1 <= value_dim <= dims["D"]
    require(in_range, name, "value_dim", f"from 1 to D={dims['D']}", value_dim)
    check(name, dims=dims | {"V": value_dim}, out=(out, "T H V", dtype))


def _flat(x: Tensor | None) -> Tensor | None:
    """Drop the singleton middle dim that FlashMLA's callers carry."""
    return x.squeeze(1) if isinstance(x, Tensor) and x.ndim == 3 and x.shape[1] == 1 else x


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
sparse_attention_rows.register_lazy("triton", _TRITON, supports=triton_attention_support)
sparse_attention_rows.register_lazy("gluon_sm90", _GLUON_PREFILL, supports=gluon_rows_support)
for _backend in ("reference", "torch"):
    sparse_attention_fp8_quant.register(
        _backend, composed(sparse_attention_fp8_quant, sparse_attention, _backend)
    )
sparse_attention_fp8_quant.register_lazy("triton", _TRITON, supports=triton_attention_support)
sparse_attention_fp8_quant.register_lazy("gluon_sm90", _GLUON, supports=gluon_fp8_quant_support)

prefill_attention.register_lazy("reference", f"{_FAMILY}.reference")
prefill_attention.register("torch", by_lists(sparse_attention_rows, "torch"))
prefill_attention.register(
    "triton", by_lists(sparse_attention_rows, "triton"), supports=triton_lists_support
)
prefill_attention.register_lazy("gluon_sm90", _GLUON_PREFILL, supports=gluon_prefill_support)
for _backend in ("reference", "torch", "triton"):
    prefill_attention_fp8_quant.register(
        _backend,
        composed(prefill_attention_fp8_quant, prefill_attention, _backend),
        supports=triton_lists_support if _backend == "triton" else None,
    )
prefill_attention_fp8_quant.register_lazy(
    "gluon_sm90", _GLUON_PREFILL, supports=gluon_prefill_fp8_quant_support
)

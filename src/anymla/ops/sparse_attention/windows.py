"""Contract of attention to windows that overlap, and the portable way: by lists of each query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops._epilogue import check_quantized, quantized_results
from anymla.ops._pages import check_cache
from anymla.ops.registry import FLOAT32_UP, FLOATS, INT32, Support, check, operation, require
from anymla.ops.sparse_attention.config import WINDOW_PLACES
from anymla.ops.sparse_attention.interface import sparse_attention, sparse_attention_fp8_quant
from anymla.ops.sparse_attention.support import (
    VALUES,
    gluon_attention_support,
    triton_attention_support,
)

_ROPE_DIM = 64  # channels that the Hopper kernel's epilogue rotates


def _results(q: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), torch.empty(q.shape[:2], dtype=lse_dtype, device=q.device)


@operation(mutates=("out",), outputs=_results)
def sparse_attention_windows(
    q: Tensor,
    k_cache: Tensor,
    slots: Tensor,
    counts: Tensor | None = None,
    *,
    queries: int,
    sink: Tensor | None = None,
    scale: float | None = None,
    layout: str = MAIN_FP8,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the neighbouring queries of each request to its last rows, a window each.

    Query j of request r, token t = r * queries + j, sees what ``sparse_attention`` would for

        indices[t] = slots[r, j], slots[r, j + 1], ..., slots[r, j + W - 1]

    so that a kernel may load and decode each row once for all of them. W is C - queries + 1.

    Args:
        q: [T, H, D] floating point, T = R * queries; any H.
        k_cache: [P, B, row] (or [P, B, 1, row]) in ``layout``; any page stride.
        slots: [R, C] int32, ``page * B + offset``; any others, as -1, are skipped: rows before the
            start of a sequence.
        counts: [R] int32, queries of each request that are there; those behind them see nothing.
            None for all.
        queries: of a request, 1 to C.
        sink: [H] float32 or float64, one logit per head that carries no value.
        scale: of the scores; None for D ** -0.5. The sink is not scaled.
        layout: layout id of k_cache.
        out: [T, H, D] of q's dtype to write the output into, or None.

    Returns:
        out [T, H, D] of q's dtype (``out`` if given) and lse [T, H] float32 (float64 for float64
        q), natural, without the sink. A query without rows: out 0, lse -inf.

    Numerics: as ``sparse_attention``.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or layout; queries that are not 1 to C, or
            do not divide T into R requests.
    """
    dims = _check_windows(
        "sparse_attention_windows", q, k_cache, slots, counts, queries, sink, layout
    )
    check("sparse_attention_windows", dims=dims, out=(out, "T H D", q.dtype))


@operation(outputs=quantized_results)
def sparse_attention_windows_fp8_quant(
    q: Tensor,
    k_cache: Tensor,
    slots: Tensor,
    counts: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    queries: int,
    n_groups: int,
    sink: Tensor | None = None,
    scale: float | None = None,
    layout: str = MAIN_FP8,
) -> tuple[Tensor, Tensor]:
    """``sparse_attention_windows``, then ``inverse_rope_fp8_quant`` of its output.

    The output may be rounded to q's dtype in between, as separate calls do, or not at all.

    Args:
        q: [T, H, D] floating point, H a multiple of n_groups, D a multiple of 128.
        k_cache: as for ``sparse_attention_windows``, like all that is not named here.
        slots: [R, C] int32.
        counts: [R] int32, or None.
        positions: [T] int64, of the queries.
        cos_sin_cache: [L, rope_dim] float32, cosines then sines; L > every position.
        queries: of a request.
        n_groups: G.
        sink: [H] float32 or float64, or None.
        scale: of the scores; None for D ** -0.5.
        layout: layout id of k_cache.

    Returns:
        values float8_e4m3fn [T, G, H / G * D] and scales float32 [T, G, H / G * D / 128].

    Raises:
        TypeError, ValueError: as the two operations.
    """
    name = "sparse_attention_windows_fp8_quant"
    check_quantized(name, q, positions, cos_sin_cache, n_groups)
    _check_windows(name, q, k_cache, slots, counts, queries, sink, layout)


def _check_windows(
    name: str,
    q: Tensor,
    k_cache: Tensor,
    slots: Tensor,
    counts: Tensor | None,
    queries: int,
    sink: Tensor | None,
    layout: str,
) -> dict[str, int]:
    """Check what both operations take; sizes by letter."""
    dims = check(
        name,
        q=(q, "T H D", FLOATS),
        slots=(slots, "R C", INT32),
        counts=(counts, "R", INT32),
        sink=(sink, "H", FLOAT32_UP),
    )
    require(1 <= queries <= dims["C"], name, "queries", f"1 to C={dims['C']}", queries)
    require(dims["T"] == dims["R"] * queries, name, "T", f"{dims['R']} * {queries}", dims["T"])
    check_cache(name, "k_cache", k_cache, layout, channels=dims["D"], device=q.device)
    return dims


def window_lists(slots: Tensor, counts: Tensor | None, queries: int) -> Tensor:
    """What every query sees: int32 [T, W]."""
    lists = slots.unfold(1, slots.shape[1] - queries + 1, 1)
    if counts is not None:
        gone = torch.arange(queries, device=slots.device) >= counts.unsqueeze(1)
        lists = lists.masked_fill(gone.unsqueeze(2), -1)
    return lists.flatten(0, 1)


def _by_lists(backend: str) -> Any:
    def sparse_attention_windows(
        q: Tensor,
        k_cache: Tensor,
        slots: Tensor,
        counts: Tensor | None = None,
        *,
        queries: int,
        sink: Tensor | None = None,
        scale: float | None = None,
        layout: str = MAIN_FP8,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = sparse_attention(
            q, k_cache, window_lists(slots, counts, queries), sink=sink, scale=scale,
            layout=layout, out=out, backend=backend,
        )  # fmt: skip
        return found

    return sparse_attention_windows


def _quantized_by_lists(backend: str) -> Any:
    def sparse_attention_windows_fp8_quant(
        q: Tensor,
        k_cache: Tensor,
        slots: Tensor,
        counts: Tensor | None,
        positions: Tensor,
        cos_sin_cache: Tensor,
        *,
        queries: int,
        n_groups: int,
        sink: Tensor | None = None,
        scale: float | None = None,
        layout: str = MAIN_FP8,
    ) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = sparse_attention_fp8_quant(
            q, k_cache, window_lists(slots, counts, queries), None, positions, cos_sin_cache,
            n_groups=n_groups, sink=sink, scale=scale, layout=layout, backend=backend,
        )  # fmt: skip
        return found

    return sparse_attention_windows_fp8_quant


def _gluon_support(
    q: Tensor,
    k_cache: Tensor,
    slots: Tensor,
    counts: Tensor | None = None,
    *,
    queries: int,
    scale: float | None = None,
    layout: str = MAIN_FP8,
    **keywords: Any,
) -> Support:
    """``supports`` of the Hopper kernel."""
    if layout != MAIN_FP8:
        return Support(False, f"the cache must be {MAIN_FP8}, got {layout}")
    found = gluon_attention_support(q, k_cache, scale=scale)
    if not found:
        return found
    if q.dtype != torch.bfloat16:
        return Support(False, f"q must be bfloat16, got {q.dtype}")
    window = slots.shape[1] - queries + 1
    if window > WINDOW_PLACES:
        return Support(False, f"windows of at most {WINDOW_PLACES} rows, got {window}")
    return Support(True)


def _gluon_fp8_quant_support(
    q: Tensor,
    k_cache: Tensor,
    slots: Tensor,
    counts: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    n_groups: int,
    **keywords: Any,
) -> Support:
    """Likewise of ``sparse_attention_windows_fp8_quant``."""
    if q.shape[2] != VALUES or cos_sin_cache.shape[1] != _ROPE_DIM:
        return Support(False, f"{VALUES} channels, of which {_ROPE_DIM} rotate")
    return _gluon_support(q, k_cache, slots, counts, **keywords)


_LAUNCHER = "anymla.ops.sparse_attention.gluon_sm90_windows_launch"

for _backend in ("reference", "torch"):
    sparse_attention_windows.register(_backend, _by_lists(_backend))
    sparse_attention_windows_fp8_quant.register(_backend, _quantized_by_lists(_backend))
sparse_attention_windows.register("triton", _by_lists("triton"), supports=triton_attention_support)
sparse_attention_windows_fp8_quant.register(
    "triton", _quantized_by_lists("triton"), supports=triton_attention_support
)
sparse_attention_windows.register_lazy("gluon_sm90", _LAUNCHER, supports=_gluon_support)
sparse_attention_windows_fp8_quant.register_lazy(
    "gluon_sm90", _LAUNCHER, supports=_gluon_fp8_quant_support
)

"""Contracts of attention during prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops._epilogue import check_quantized, composed, quantized_results
from anymla.ops.prefill_attention.config import gluon_fp8_quant_support, gluon_support
from anymla.ops.prefill_attention.gathered import gathered, triton_gathered_support
from anymla.ops.registry import FLOAT32_UP, FLOATS, INT32, check, operation, require


def _results(*, q: Tensor, out: Tensor | None = None, **_: object) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (
        torch.empty_like(q if out is None else out),
        torch.empty(q.shape[:2], dtype=lse_dtype, device=q.device),
    )


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


_GLUON = "anymla.ops.prefill_attention.gluon_sm90_launch"

prefill_attention.register_lazy("reference", "anymla.ops.prefill_attention.reference")
prefill_attention.register("torch", gathered("torch"))
prefill_attention.register("triton", gathered("triton"), supports=triton_gathered_support)
prefill_attention.register_lazy("gluon_sm90", _GLUON, supports=gluon_support)
for _backend in ("reference", "torch", "triton"):
    prefill_attention_fp8_quant.register(
        _backend,
        composed(prefill_attention_fp8_quant, prefill_attention, _backend),
        supports=triton_gathered_support if _backend == "triton" else None,
    )
prefill_attention_fp8_quant.register_lazy("gluon_sm90", _GLUON, supports=gluon_fp8_quant_support)

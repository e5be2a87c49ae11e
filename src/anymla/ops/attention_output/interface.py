"""Contracts of attention with the output projection's first step in its epilogue."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops.attention_output import composed
from anymla.ops.attention_output.support import gluon_decode_support, gluon_support
from anymla.ops.registry import (
    FLOAT32_UP,
    FLOATS,
    INT32,
    INT64,
    check,
    check_turns,
    operation,
    require,
)
from anymla.ops.sparse_attention.support import triton_attention_support

_BLOCK = 128


def _results(*, q: Tensor, n_groups: int, **_: object) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = q.shape
    width = heads // n_groups * dim
    return (
        q.new_empty((tokens, n_groups, width), dtype=torch.float8_e4m3fn),
        q.new_empty((tokens, n_groups, width // _BLOCK), dtype=torch.float32),
    )


@operation(outputs=_results)
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

    Returns:
        values float8_e4m3fn [T, G, H / G * D] and scales float32 [T, G, H / G * D / 128].

    Raises:
        TypeError, ValueError: as the two operations; also for one that a backend calls.
    """
    _check_output("sparse_attention_fp8_quant", q, positions, cos_sin_cache, n_groups)


@operation(outputs=_results)
def prefill_attention_fp8_quant(
    q: Tensor,
    rows: Tensor,
    runs: Tensor,
    lists: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    n_groups: int,
    window: int,
    entries: int = 0,
    sink: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``prefill_attention``, then ``inverse_rope_fp8_quant`` of its output.

    The output may be rounded to q's dtype in between or not, as for ``sparse_attention_fp8_quant``.

    Args:
        q: [T, H, D] floating point, H a multiple of n_groups, D a multiple of 128.
        rows: [N, D] floating point.
        runs: [T, 4] int32, as for ``prefill_attention``, like all that is not named here.
        lists: [T, K] int32, or None.
        positions: [T] int64, of the queries.
        cos_sin_cache: [L, rope_dim] float32, cosines then sines; L > every position.
        n_groups: G.
        window: the most rows of a window.
        entries: without lists the most entries of a token.
        sink: [H] float32 or float64, or None.
        scale: of the scores; None for D ** -0.5.

    Returns:
        values float8_e4m3fn [T, G, H / G * D] and scales float32 [T, G, H / G * D / 128].

    Raises:
        TypeError, ValueError: wrong dtype, shape or device, or a negative bound.
    """
    name = "prefill_attention_fp8_quant"
    dims = _check_output(name, q, positions, cos_sin_cache, n_groups)
    check(
        name,
        dims=dims,
        rows=(rows, "_ D", FLOATS),
        runs=(runs, "T 4", INT32),
        lists=(lists, "T _", INT32),
        sink=(sink, "H", FLOAT32_UP),
    )
    require(window >= 0, name, "window", "at least 0", window)
    require(entries >= 0, name, "entries", "at least 0", entries)


def _check_output(
    name: str, q: Tensor, positions: Tensor, cos_sin_cache: Tensor, groups: int
) -> dict[str, int]:
    dims = check(
        name,
        q=(q, "T H D", FLOATS),
        positions=(positions, "T", INT64),
    )
    check_turns(name, cos_sin_cache, q, dims["D"])
    whole = groups > 0 and dims["H"] % groups == 0 and dims["D"] % _BLOCK == 0
    expected = f"[T, H, D] with H a multiple of {groups} groups and D of {_BLOCK}"
    require(whole, name, "q", expected, list(q.shape))
    return dims


for _backend in ("reference", "torch"):
    _decode, _prefill = composed.by(_backend)
    sparse_attention_fp8_quant.register(_backend, _decode)
    prefill_attention_fp8_quant.register(_backend, _prefill)
_, _prefill = composed.by("triton")
sparse_attention_fp8_quant.register_lazy(
    "triton", "anymla.ops.attention_output.triton_decode", supports=triton_attention_support
)
sparse_attention_fp8_quant.register_lazy(
    "gluon_sm90",
    "anymla.ops.attention_output.gluon_sm90_decode",
    supports=gluon_decode_support,
)
prefill_attention_fp8_quant.register("triton", _prefill, supports=triton_attention_support)
prefill_attention_fp8_quant.register_lazy(
    "gluon_sm90", "anymla.ops.prefill_attention.gluon_sm90_prefill", supports=gluon_support
)

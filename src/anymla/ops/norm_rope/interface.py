"""Contracts of RMS norms, RoPE, and both with the insertion of key-value rows."""

from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops._pages import check_cache
from anymla.ops._quantized import check_codes
from anymla.ops.device import float32_support
from anymla.ops.registry import FLOATS, INT64, Operation, check, check_cos_sin, operation, require


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operation(outputs=lambda x, weight, eps: (_like(x),))
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: str | None = None) -> Tensor:
    """Normalise rows by their root mean square: ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: rows to normalise, [..., D] floating point, any strides.
        weight: weight of the norm, [D] floating point.
        eps: number added to the mean square.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Normalised rows [..., D] of x's dtype, contiguous. Statistics and products are float32
        (float64 for float64 x), rounded once.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong.

    Source: DeepSeek-V4 reference, inference/model.py (RMSNorm).
    """
    _check_rows("rms_norm", x, weight)


@operation(outputs=lambda x, positions, cos_sin_cache, inverse: (_like(x),))
def rope(
    x: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    inverse: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Rotate the last channels of every head by the token's position.

    Channels (2i, 2i+1) of the last R are one pair, rotated by the angle of table column i:
    ``even' = even cos - odd sin``, ``odd' = odd cos + even sin``; the other channels pass.

    Args:
        x: heads of the tokens, [T, H, D] floating point, any strides; D even.
        positions: positions of the tokens, [T] int64; clamped to the table, so padding tokens may
            hold anything.
        cos_sin_cache: rotary table, [L, R] float32 (or float64), cosines in columns 0..R/2-1, sines
            after them; L >= 1, R even, 2 <= R <= D.
        inverse: True to rotate backwards (sines negated).
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Rotated heads [T, H, D] of x's dtype, contiguous; products are float32 (float64 for float64
        x), rounded once.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong.

    Source: DeepSeek-V4 reference, inference/model.py (apply_rotary_emb).
    """
    dims = check("rope", x=(x, "T H D", FLOATS), positions=(positions, "T", INT64))
    _check_table("rope", cos_sin_cache, dims["D"], x)


@operation(mutates=("codes", "code_scales"), outputs=lambda qr, kv, **rest: (_like(qr), _like(kv)))
def fused_q_kv_rmsnorm(
    qr: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    *,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply ``rms_norm`` to the two slices of the fused query/key-value projection.

    Args:
        qr: query latents, [T, Q] floating point; may be a strided view of the fused output.
        kv: key-value rows, [T, D] floating point; may be a strided view of the fused output.
        q_weight: weight of the queries' norm, [Q] floating point.
        kv_weight: weight of the key-value norm, [D] floating point.
        eps: number added to the mean squares.
        codes: buffer for the normed qr quantised to FP8 (see ``formats.quantized_rows``), or None.
        code_scales: buffer for the scales of ``codes``, given if and only if ``codes`` is.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Normed qr [T, Q] of qr's dtype and normed kv [T, D] of kv's dtype, contiguous, each rounded
        once.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong.

    Source: DeepSeek-V4 reference, inference/model.py (q_norm, kv_norm).
    """
    check(
        "fused_q_kv_rmsnorm",
        qr=(qr, "T Q", FLOATS),
        kv=(kv, "T D", FLOATS),
        q_weight=(q_weight, "Q", FLOATS),
        kv_weight=(kv_weight, "D", FLOATS),
    )
    check_codes("fused_q_kv_rmsnorm", qr, codes, code_scales)


@operation(
    mutates=("k_cache", "out"),
    outputs=lambda q, **rest: (_like(q),),
)
def qnorm_rope_kv_insert(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    *,
    layout: str = MAIN_FP8,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Norm and rotate query heads; rotate key-value rows and store them in the cache.

    ``q'[t, h] = rope(q[t, h] / sqrt(mean(q[t, h]^2) + eps), positions[t])``, without a weight;
    ``cache[slot_mapping[n]] = encode(rope(kv[n], positions[n]))``.

    Args:
        q: query heads of the tokens, [T, H, D] floating point.
        kv: key-value rows that are already normed, [T, D] floating point; not modified.
        k_cache: cache to write, [P, B, row] (or [P, B, 1, row]) in ``layout``, any page stride.
        slot_mapping: slots ``page * B + offset`` of the first N <= T tokens, [N] int64. Slots
            outside the cache (negative, or past its end) are skipped; valid slots are distinct.
        positions: positions of the tokens, [T] int64; clamped to the table.
        cos_sin_cache: rotary table as in ``rope``, [L, R] float32 (or float64).
        eps: number added to the mean square.
        layout: identifier of the cache's layout, whose rows have D channels.
        out: buffer for q', [T, H, D] of q's dtype; None to allocate it.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Query heads q' [T, H, D] of q's dtype (``out`` if given), for all T tokens whatever their
        slots. Computed in float32 (float64 for float64 input) and rounded once; cache rows are only
        rounded by the layout.

    Raises:
        TypeError, ValueError: if a dtype, shape, device or layout is wrong.

    Source: DeepSeek-V4 reference, inference/model.py (Attention.forward), with the query's norm and
    rotation in float32 throughout.
    """
    name = "qnorm_rope_kv_insert"
    dims = check(
        name,
        q=(q, "T H D", FLOATS),
        kv=(kv, "T D", FLOATS),
        slot_mapping=(slot_mapping, "_", INT64),
        positions=(positions, "T", INT64),
        out=(out, "T H D", q.dtype),
    )
    inserted = slot_mapping.shape[0]
    require(inserted <= dims["T"], name, "slot_mapping", f"at most T={dims['T']} long", inserted)
    _check_table(name, cos_sin_cache, dims["D"], q)
    check_cache(name, "k_cache", k_cache, layout, channels=dims["D"], device=q.device)


def _check_rows(name: str, x: Tensor, weight: Tensor) -> None:
    leading = "_ " * (x.ndim - 1) if isinstance(x, Tensor) else ""
    check(name, x=(x, leading + "D", FLOATS), weight=(weight, "D", FLOATS))


def _check_table(name: str, table: Tensor, width: int, like: Tensor) -> None:
    check_cos_sin(name, table, like, width)
    require(width % 2 == 0, name, "D", "even", width)


_FAMILY = "anymla.ops.norm_rope"
_operation: Operation[..., Any]
for _operation, _kernel in ((rms_norm, "norm"), (rope, "rope")):
    _operation.register_lazy("reference", "anymla.ops._reference")
    _operation.register_lazy("torch", "anymla.ops._torch_norm_rope")
    _operation.register_lazy("triton", f"{_FAMILY}.triton_{_kernel}", supports=float32_support)
for _operation, _kernel in ((fused_q_kv_rmsnorm, "norm"), (qnorm_rope_kv_insert, "insert")):
    _operation.register_lazy("reference", f"{_FAMILY}.reference")
    _operation.register_lazy("torch", f"{_FAMILY}.torch_norm_rope")
    _operation.register_lazy("triton", f"{_FAMILY}.triton_{_kernel}", supports=float32_support)

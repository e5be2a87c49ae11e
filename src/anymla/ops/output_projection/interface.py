"""Contracts of the output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops import _reference, _torch_norm_rope
from anymla.ops.device import float32_support
from anymla.ops.output_projection import (
    hopper_projection,
    reference,
    torch_projection,
    vendor_projection,
)
from anymla.ops.output_projection.dtypes import OUT_DTYPES
from anymla.ops.registry import (
    FLOATS,
    INT64,
    Support,
    check,
    check_cos_sin,
    operation,
    require,
)

_FP8 = torch.float8_e4m3fn
_BLOCK = 128


def _projected(
    *, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor
) -> tuple[Tensor]:
    return (o.new_empty((o.shape[0], wo_a.shape[0] * wo_a.shape[1])),)


@operation(outputs=_projected)
def grouped_output_projection(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor
) -> Tensor:
    """Rotate the heads back, then project every group of heads with its own matrix.

    ``z[t, g] = wo_a[g] @ concat of R^-1(position t) o[t, h] over the heads h of group g``, heads in
    their natural order. R^-1 turns the last rope_dim channels of a head by minus the query's angle.

    Args:
        o: [T, H, D] floating point, H a multiple of G.
        positions: [T] int64, of the queries.
        cos_sin_cache: [L, R] float32 (or float64), as in ``norm_rope.rope``; read clamped to L.
        wo_a: [G, rank, H / G * D] of o's dtype.

    Returns:
        [T, G * rank] of o's dtype. The rotated heads are rounded once to o's dtype; products
        accumulate in float32 or wider and are rounded once.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device; H is no multiple of G.

    Source: DeepSeek-V4 inference/model.py, which decodes an FP8 wo_a to bfloat16 for this product.
    """
    name = "grouped_output_projection"
    dims = check(
        name,
        o=(o, "T H D", FLOATS),
        positions=(positions, "T", INT64),
        wo_a=(wo_a, "G _ J", o.dtype),
    )
    check_cos_sin(name, cos_sin_cache, o, dims["D"])
    _require_groups(name, dims["H"], dims["G"])
    width = dims["H"] // dims["G"] * dims["D"]
    require(dims["J"] == width, name, "wo_a", f"[G, rank, {width}]", list(wo_a.shape))


def _quantised(
    *, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, n_groups: int
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = o.shape
    width = heads // n_groups * dim
    return (
        o.new_empty((tokens, n_groups, width), dtype=_FP8),
        o.new_empty((tokens, n_groups, width // _BLOCK), dtype=torch.float32),
    )


@operation(outputs=_quantised)
def inverse_rope_fp8_quant(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, n_groups: int
) -> tuple[Tensor, Tensor]:
    """Rotate the heads back and quantise them to FP8 in runs of 128 channels.

    The rotation stays in float32; there is no rounding between it and the quantiser. A run's scale
    is ``2^ceil(log2(max(amax, 1e-10) / 448))``.

    Args:
        o: [T, H, D] floating point, H a multiple of n_groups, D a multiple of 128.
        positions: [T] int64, of the queries.
        cos_sin_cache: [L, R] float32 (or float64), as in ``norm_rope.rope``; read clamped to L.
        n_groups: G.

    Returns:
        values float8_e4m3fn [T, G, H / G * D] and scales float32 [T, G, H / G * D / 128].

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.

    Source: contract of vLLM's fused_inv_rope_fp8_quant.
    """
    name = "inverse_rope_fp8_quant"
    dims = check(
        name,
        o=(o, "T H D", FLOATS),
        positions=(positions, "T", INT64),
    )
    check_cos_sin(name, cos_sin_cache, o, dims["D"])
    _require_groups(name, dims["H"], n_groups)
    require(dims["D"] % _BLOCK == 0, name, "o", "[T, H, D] with D a multiple of 128", dims["D"])


def _projected_fp8(
    *, o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, out_dtype: str = "bf16"
) -> tuple[Tensor]:
    size = (o.shape[0], wo_a.shape[0] * wo_a.shape[1])
    return (torch.empty(size, dtype=OUT_DTYPES[out_dtype], device=o.device),)


@operation(outputs=_projected_fp8)
def grouped_output_projection_fp8(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Tensor:
    """Project every group from FP8 heads with an FP8 weight.

    ``z[t, g, r] = sum over j of (o * o_scale)[t, g, j] * (wo_a * wo_a_scale)[g, r, j]``.

    Args:
        o: float8_e4m3fn [T, G, J], from ``inverse_rope_fp8_quant``.
        o_scale: float32 [T, G, J / 128].
        wo_a: uint8 e4m3 codes [G, rank, J], rank and J multiples of 128.
        wo_a_scale: [G, rank / 128, J / 128], uint8 (ue8m0) or float32.
        out_dtype: "bf16", "fp32" or "fp64".

    Returns:
        [T, G * rank]; accumulated in float32 or wider, rounded once.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.
    """
    name = "grouped_output_projection_fp8"
    dims = check(
        name,
        o=(o, "T G J", _FP8),
        o_scale=(o_scale, "T G S", torch.float32),
        wo_a=(wo_a, "G R J", torch.uint8),
        wo_a_scale=(wo_a_scale, "G _ S", (torch.uint8, torch.float32)),
    )
    whole = dims["J"] % _BLOCK == 0 and dims["R"] % _BLOCK == 0
    require(whole, name, "wo_a", "[G, rank, J] in whole 128 x 128 blocks", list(wo_a.shape))
    blocks = [dims["G"], dims["R"] // _BLOCK, dims["J"] // _BLOCK]
    got = list(wo_a_scale.shape)
    require(got == blocks, name, "wo_a_scale", str(blocks), got)
    require(out_dtype in OUT_DTYPES, name, "out_dtype", "bf16, fp32 or fp64", repr(out_dtype))


def _require_groups(name: str, heads: int, groups: int) -> None:
    divides = groups > 0 and heads % groups == 0
    require(divides, name, "o", f"[T, H, D] with H a multiple of {groups} groups", f"H={heads}")


grouped_output_projection.register("reference", reference.grouped_output_projection)
grouped_output_projection.register("torch", torch_projection.grouped_output_projection)
inverse_rope_fp8_quant.register("reference", _reference.inverse_rope_fp8_quant)
inverse_rope_fp8_quant.register("torch", _torch_norm_rope.inverse_rope_fp8_quant)
grouped_output_projection_fp8.register("reference", reference.grouped_output_projection_fp8)
grouped_output_projection_fp8.register("torch", torch_projection.grouped_output_projection_fp8)


def _whole_pairs(o: Tensor, *args: object, **kwargs: object) -> Support:
    """Kernels find a channel's partner beside it, so pairs must not straddle their tiles."""
    if o.shape[2] % 2:
        return Support(False, f"heads of an even number of channels, got {o.shape[2]}")
    return float32_support(o, *args, **kwargs)


def _up_to_float32(*args: object, out_dtype: str = "bf16") -> Support:
    if out_dtype == "fp64":
        return Support(False, "computes in float32, but out_dtype is fp64")
    return float32_support(*args)


grouped_output_projection_fp8.register(
    "vendor",
    vendor_projection.grouped_output_projection_fp8,
    supports=vendor_projection.vendor_grouped_support,
)

grouped_output_projection_fp8.register(
    "gluon_sm90",
    hopper_projection.grouped_output_projection_fp8,
    supports=hopper_projection.hopper_grouped_support,
)

_TRITON = "anymla.ops.output_projection.triton_"
grouped_output_projection.register_lazy("triton", f"{_TRITON}rotate", supports=_whole_pairs)
inverse_rope_fp8_quant.register_lazy("triton", "anymla.ops._triton_epilogue", supports=_whole_pairs)
grouped_output_projection_fp8.register_lazy(
    "triton", f"{_TRITON}projection", supports=_up_to_float32
)

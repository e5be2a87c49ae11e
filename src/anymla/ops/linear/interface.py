"""Contracts of the linear layers: ``y = x @ weight^T`` with stored weights, plain or by groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.formats.fp8_block import HEAD_AMAX_FLOOR
from anymla.ops._quantized import QUANT_BLOCKS, check_codes, in_blocks_of, in_blocks_of_128
from anymla.ops.device import float32_support, has_numba
from anymla.ops.linear.config import OUT_DTYPES
from anymla.ops.linear.support import (
    gluon_bf16_support,
    gluon_grouped_support,
    gluon_support,
    numba_support,
    triton_grouped_support,
    triton_inverse_rope_support,
    vendor_grouped_support,
    vendor_plain_support,
    vendor_projection_support,
    vendor_support,
)
from anymla.ops.registry import (
    FLOAT32_UP,
    FLOATS,
    INT64,
    Operation,
    check,
    check_cos_sin,
    operation,
    require,
)

_BYTES = torch.uint8
_FP8 = torch.float8_e4m3fn
_BLOCK = 128


def _product(*, x: Tensor, weight: Tensor, **_: Any) -> tuple[Tensor]:
    return (x.new_empty((*x.shape[:-1], weight.shape[0])),)


def _as_rows(x: Tensor) -> Tensor:
    """View [..., K] as [T, K] for ``check``; anything else is returned as it is."""
    return x.flatten(0, -2) if isinstance(x, Tensor) and x.ndim > 1 else x


def _require_scales(operation_name: str, scale: Tensor, rows: int, columns: int) -> None:
    want = [rows, columns]
    got = list(scale.shape)
    require(got == want, operation_name, "scale", f"{want}", got)


@operation(outputs=_product)
def linear(x: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """Return ``x @ weight^T``.

    Args:
        x: activations, [..., K] floating point, at least 2-D.
        weight: weight of x's dtype, [N, K].
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Products [..., N] of x's dtype; accumulated in float32 or wider, rounded once.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong.
    """
    check("linear", x=(_as_rows(x), "T K", FLOATS), weight=(weight, "N K", FLOATS))
    if x.dtype != weight.dtype:
        raise TypeError(f"linear: weight must be {x.dtype} like x, got {weight.dtype}")


def _wide_result(*, x: Tensor, weight: Tensor) -> tuple[Tensor]:
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return (x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype),)


@operation(outputs=_wide_result)
def linear_float32(x: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """Return ``x @ weight^T`` in float32, for operands of any floating-point dtype.

    Meant for results that enter exponentials: compressor gates, logits. Products of 16-bit operands
    are exact in float32, so only the sums round.

    Args:
        x: activations, [..., K] floating point, at least 2-D.
        weight: weight of any floating-point dtype, [N, K].
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Products [..., N], float32 (float64 if an operand is).

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong.
    """
    check("linear_float32", x=(_as_rows(x), "T K", FLOATS), weight=(weight, "N K", FLOATS))


@operation(outputs=_product)
def fp8_block_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
    quant_block: int = _BLOCK,
    backend: str | None = None,
) -> Tensor:
    """Multiply by an e4m3 weight with one scale for a square block of values.

    The weight is decoded exactly. With ``quantize_activations``, x is first quantised to e4m3 in
    blocks of channels with power-of-two scales (``formats.fp8_block.quantize_fp8_rows``). Both
    operands of the product are then exact, as in DeepSeek's FP8 kernels.

    Args:
        x: activations, [..., K] floating point, at least 2-D.
        weight: e4m3 codes of the weight, uint8 [N, K].
        scale: scales of the weight's blocks, uint8 (ue8m0) or float32 [ceil(N/b), ceil(K/b)], b =
            quant_block.
        quantize_activations: True to quantise x first, as the checkpoint's ``activation_scheme``
            says.
        codes: x as already quantised by its producer (``formats.quantized_rows``), so that it need
            not be quantised again; the values of x are then ignored.
        code_scales: scales that belong to ``codes``.
        quant_block: number of rows and columns of the weight, and of channels of x, that share a
            scale: 128 in DeepSeek-V4, 32 in V4.1. Must be 128 with ``codes``.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Products [..., N] of x's dtype; accumulated in float32 or wider, rounded once.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, or codes come without
            quantize_activations.

    Source: DeepSeek-V4 inference/kernel.py (fp8_gemm, act_quant).
    """
    name = "fp8_block_linear"
    dims = check(
        name,
        x=(_as_rows(x), "T K", FLOATS),
        weight=(weight, "N K", _BYTES),
        scale=(scale, "_ _", (_BYTES, *FLOAT32_UP)),
    )
    require(quant_block >= 1, name, "quant_block", ">= 1", quant_block)
    _require_scales(name, scale, -(-dims["N"] // quant_block), -(-dims["K"] // quant_block))
    check_codes(name, x.reshape(-1, x.shape[-1]), codes, code_scales)
    wanted = quantize_activations or codes is None
    require(wanted, name, "codes", "None for activations that are not quantised", "codes")
    wanted = codes is None or quant_block == _BLOCK
    require(wanted, name, "codes", f"None for blocks of {quant_block}", "codes")


@operation(outputs=_product)
def mxfp4_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    quant_block: int = _BLOCK,
    backend: str | None = None,
) -> Tensor:
    """Multiply by an MXFP4 weight.

    Args:
        x: activations, [..., K] floating point, at least 2-D; K a multiple of 32.
        weight: packed e2m1 codes of the weight, uint8 [N, K/2], low nibble first.
        scale: ue8m0 scales of 32 channels each, uint8 [N, K/32].
        quantize_activations: True to quantise x to FP8 first, as DeepSeek-V4's FP4 experts do.
        quant_block: number of channels of x that share a scale: 128 in DeepSeek-V4, 32 in V4.1.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Products [..., N] of x's dtype; accumulated in float32 or wider, rounded once.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong.

    Source: DeepSeek-V4 inference/kernel.py (fp4_gemm); OCP MX specification 1.0.
    """
    name = "mxfp4_linear"
    dims = check(
        name,
        x=(_as_rows(x), "T K", FLOATS),
        weight=(weight, "N _", _BYTES),
        scale=(scale, "N _", _BYTES),
    )
    width = dims["K"]
    require(quant_block >= 1, name, "quant_block", ">= 1", quant_block)
    require(width % 32 == 0, name, "x", "[..., K] with K a multiple of 32", f"K={width}")
    require(weight.shape[1] * 2 == width, name, "weight", f"[N, {width // 2}]", list(weight.shape))
    _require_scales(name, scale, dims["N"], width // 32)


@operation(outputs=_product)
def nvfp4_linear(
    x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor, *, backend: str | None = None
) -> Tensor:
    """Multiply by an NVFP4 weight; activations are not quantised.

    Args:
        x: activations, [..., K] floating point, at least 2-D; K a multiple of 16.
        weight: packed e2m1 codes of the weight, uint8 [N, K/2], low nibble first.
        scale: e4m3 codes of the scales of 16 channels each, uint8 [N, K/16].
        global_scale: factor of the whole weight, float32 [1].
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Products [..., N] of x's dtype; the weight is decoded, and products accumulate, in float32
        or wider, and results are rounded once.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong.

    Source: NVIDIA's NVFP4 definition (e2m1, e4m3 scale for 16 values, float32 for the tensor).
    """
    name = "nvfp4_linear"
    dims = check(
        name,
        x=(_as_rows(x), "T K", FLOATS),
        weight=(weight, "N _", _BYTES),
        scale=(scale, "N _", _BYTES),
        global_scale=(global_scale, "1", FLOAT32_UP),
    )
    width = dims["K"]
    require(width % 16 == 0, name, "x", "[..., K] with K a multiple of 16", f"K={width}")
    require(weight.shape[1] * 2 == width, name, "weight", f"[N, {width // 2}]", list(weight.shape))
    _require_scales(name, scale, dims["N"], width // 16)


def _projected(
    *, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor
) -> tuple[Tensor]:
    return (o.new_empty((o.shape[0], wo_a.shape[0] * wo_a.shape[1])),)


@operation(outputs=_projected)
def grouped_output_projection(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor, *, backend: str | None = None
) -> Tensor:
    """Rotate the heads back, then project every group of heads with its own matrix.

    ``z[t, g] = wo_a[g] @ concat of R^-1(position t) o[t, h] over the heads h of group g``, heads in
    their natural order. R^-1 rotates a head's last rope_dim channels by minus the query's angle.

    Args:
        o: heads of attention's output, [T, H, D] floating point, H a multiple of G.
        positions: positions of the queries, [T] int64.
        cos_sin_cache: rotary table as in ``norm_rope.rope``, [L, R] float32 (or float64); positions
            are clamped to it.
        wo_a: weights of the groups, [G, rank, H / G * D] of o's dtype.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Projections [T, G * rank] of o's dtype. The rotated heads are rounded once to o's dtype;
        products accumulate in float32 or wider and are rounded once.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, or H is not a multiple of G.

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
    *, o: Tensor, n_groups: int, quant_block: int = _BLOCK, **_: Any
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = o.shape
    width = heads // n_groups * dim
    return (
        o.new_empty((tokens, n_groups, width), dtype=_FP8),
        o.new_empty((tokens, n_groups, width // quant_block), dtype=torch.float32),
    )


@operation(outputs=_quantised)
def inverse_rope_fp8_quant(
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    n_groups: int,
    quant_block: int = _BLOCK,
    amax_floor: float = HEAD_AMAX_FLOOR,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the heads back and quantise them to FP8 in blocks of channels.

    The rotation is float32, without rounding before the quantiser. A block's scale is
    ``2^ceil(log2(max(amax, amax_floor) / 448))``.

    Args:
        o: heads, [T, H, D] floating point, H a multiple of n_groups, D a multiple of quant_block.
        positions: positions of the queries, [T] int64.
        cos_sin_cache: rotary table as in ``norm_rope.rope``, [L, R] float32 (or float64); positions
            are clamped to it.
        n_groups: number of groups G that share the heads.
        quant_block: number of channels that share a scale: 128 in DeepSeek-V4, 32 in V4.1.
        amax_floor: lower bound of a block's largest magnitude, above 0.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Codes float8_e4m3fn [T, G, H / G * D], and scales float32 [T, G, H / G * D / quant_block].

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong.

    Source: contract of vLLM's fused_inv_rope_fp8_quant; FlashMLA's fused kernel has blocks of 32
    and the floor 1e-4.
    """
    name = "inverse_rope_fp8_quant"
    dims = check(
        name,
        o=(o, "T H D", FLOATS),
        positions=(positions, "T", INT64),
    )
    check_cos_sin(name, cos_sin_cache, o, dims["D"])
    _require_groups(name, dims["H"], n_groups)
    require(quant_block >= 1, name, "quant_block", ">= 1", quant_block)
    require(amax_floor > 0, name, "amax_floor", "above 0", amax_floor)
    expected = f"[T, H, D] with D a multiple of {quant_block}"
    require(dims["D"] % quant_block == 0, name, "o", expected, dims["D"])


def _projected_fp8(
    *, o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, out_dtype: str = "bf16"
) -> tuple[Tensor]:
    size = (o.shape[0], wo_a.shape[0] * wo_a.shape[1])
    return (torch.empty(size, dtype=OUT_DTYPES[out_dtype], device=o.device),)


@operation(outputs=_projected_fp8)
def grouped_output_projection_fp8(
    o: Tensor,
    o_scale: Tensor,
    wo_a: Tensor,
    wo_a_scale: Tensor,
    *,
    out_dtype: str = "bf16",
    backend: str | None = None,
) -> Tensor:
    """Project every group of FP8 heads with the group's FP8 weight.

    ``z[t, g, r] = sum over j of (o * o_scale)[t, g, j] * (wo_a * wo_a_scale)[g, r, j]``.

    Args:
        o: codes of the heads from ``inverse_rope_fp8_quant``, float8_e4m3fn [T, G, J].
        o_scale: scales of 128 channels each, float32 [T, G, J / 128].
        wo_a: e4m3 codes of the weights, uint8 [G, rank, J], rank and J multiples of 128.
        wo_a_scale: scales of the weights' blocks, uint8 (ue8m0) or float32 [G, rank / 128, J /
            128].
        out_dtype: name of the result's dtype, "bf16", "fp32" or "fp64".
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Projections [T, G * rank]; accumulated in float32 or wider, rounded once.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong.
    """
    name = "grouped_output_projection_fp8"
    dims = check(
        name,
        o=(o, "T G J", _FP8),
        o_scale=(o_scale, "T G S", torch.float32),
        wo_a=(wo_a, "G R J", _BYTES),
        wo_a_scale=(wo_a_scale, "G _ S", (_BYTES, torch.float32)),
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


_FAMILY = "anymla.ops.linear"
_VENDOR, _LAUNCH = f"{_FAMILY}.vendor", f"{_FAMILY}.triton_launch"
_NUMBA, _SM90 = f"{_FAMILY}.numba_linear", f"{_FAMILY}.gluon_sm90_launch"

_operation: Operation[..., Any]
for _operation in (
    linear,
    linear_float32,
    fp8_block_linear,
    mxfp4_linear,
    nvfp4_linear,
    grouped_output_projection,
    grouped_output_projection_fp8,
):
    _operation.register_lazy("reference", f"{_FAMILY}.reference")
    _operation.register_lazy("torch", f"{_FAMILY}.torch_linear")

for _operation in (fp8_block_linear, mxfp4_linear):
    _operation.register_lazy(
        "numba",
        _NUMBA,
        supports=in_blocks_of_128(numba_support),
        automatic=has_numba(),
        by_kind=True,
    )

for _operation, _backend, _module, _supports in (
    (linear, "vendor", _VENDOR, vendor_plain_support),
    (linear_float32, "vendor", _VENDOR, vendor_plain_support),
    (linear_float32, "gluon_sm90", _SM90, gluon_bf16_support),
    (fp8_block_linear, "vendor", _VENDOR, in_blocks_of_128(vendor_support)),
    (fp8_block_linear, "gluon_sm90", _SM90, in_blocks_of(QUANT_BLOCKS, gluon_support, told=True)),
    (fp8_block_linear, "triton", _LAUNCH, in_blocks_of(QUANT_BLOCKS, float32_support)),
    (mxfp4_linear, "triton", _LAUNCH, in_blocks_of(QUANT_BLOCKS, float32_support)),
    (nvfp4_linear, "triton", _LAUNCH, float32_support),
    (grouped_output_projection, "vendor", _VENDOR, vendor_projection_support),
    (grouped_output_projection, "triton", _LAUNCH, triton_inverse_rope_support),
    (grouped_output_projection_fp8, "vendor", _VENDOR, vendor_grouped_support),
    (grouped_output_projection_fp8, "gluon_sm90", _SM90, gluon_grouped_support),
    (grouped_output_projection_fp8, "triton", _LAUNCH, triton_grouped_support),
    (inverse_rope_fp8_quant, "reference", "anymla.ops._reference", None),
    (inverse_rope_fp8_quant, "torch", "anymla.ops._torch_norm_rope", None),
    (
        inverse_rope_fp8_quant,
        "triton",
        "anymla.ops._triton_epilogue",
        in_blocks_of(QUANT_BLOCKS, triton_inverse_rope_support),
    ),
):
    _operation.register_lazy(_backend, _module, supports=_supports)

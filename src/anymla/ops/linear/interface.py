"""Contracts of the linear layers: ``y = x @ weight^T``, the weight kept as stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.ops._quantized import check_codes
from anymla.ops.device import float32_support
from anymla.ops.linear import reference, torch_linear, vendor
from anymla.ops.linear.support import (
    gluon_bf16_support,
    gluon_support,
    library_support,
    scaled_support,
)
from anymla.ops.registry import FLOAT32_UP, FLOATS, check, operation, require

_BYTES = torch.uint8


def _result(x: Tensor, rows: int) -> tuple[Tensor]:
    return (x.new_empty((*x.shape[:-1], rows)),)


def _plain_result(*, x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return _result(x, weight.shape[0])


def _packed_result(*, x: Tensor, weight: Tensor, **_: Any) -> tuple[Tensor]:
    return _result(x, weight.shape[0])


def _as_rows(x: Tensor) -> Tensor:
    """View [..., K] as [T, K] for the check; anything else is left to it."""
    return x.flatten(0, -2) if isinstance(x, Tensor) and x.ndim > 1 else x


def _require_scales(operation_name: str, scale: Tensor, rows: int, columns: int) -> None:
    want = [rows, columns]
    got = list(scale.shape)
    require(got == want, operation_name, "scale", f"{want}", got)


@operation(outputs=_plain_result)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight^T``.

    Args:
        x: [..., K] floating point, at least 2-D.
        weight: [N, K] of x's dtype.

    Returns:
        [..., N] of x's dtype; accumulated in float32 or wider, rounded once.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.
    """
    check("linear", x=(_as_rows(x), "T K", FLOATS), weight=(weight, "N K", FLOATS))
    if x.dtype != weight.dtype:
        raise TypeError(f"linear: weight must be {x.dtype} like x, got {weight.dtype}")


def _wide_result(*, x: Tensor, weight: Tensor) -> tuple[Tensor]:
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return (x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype),)


@operation(outputs=_wide_result)
def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight^T`` in float32, whatever the operands are stored in.

    For results that exponentials are taken of: compressor gates, logits. Products of 16-bit
    operands are exact in float32, so nothing is rounded but the sums.

    Args:
        x: [..., K] floating point, at least 2-D.
        weight: [N, K] floating point.

    Returns:
        [..., N] float32 (float64 if an operand is).

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.
    """
    check("linear_float32", x=(_as_rows(x), "T K", FLOATS), weight=(weight, "N K", FLOATS))


@operation(outputs=_packed_result)
def fp8_block_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Tensor:
    """Multiply by an e4m3 weight with one scale for 128 x 128 values.

    The weight is decoded exactly. With ``quantize_activations`` x is first quantised in runs of 128
    channels to e4m3 with power-of-two scales (``formats.fp8_block.quantize_fp8_rows``); both
    operands of the product are then exact, as in the FP8 kernels this stands for.

    Args:
        x: [..., K] floating point, at least 2-D.
        weight: uint8 e4m3 codes [N, K].
        scale: [ceil(N/128), ceil(K/128)], uint8 (ue8m0) or float32.
        quantize_activations: as the checkpoint's ``activation_scheme`` asks.
        codes: x quantised by whoever made it (``formats.quantized_rows``), for those who would
            quantise it again; x itself may then be anything.
        code_scales: the scales of ``codes``.

    Returns:
        [..., N] of x's dtype; accumulated in float32 or wider, rounded once.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device; codes of activations that are not to
            be quantised.

    Source: DeepSeek-V4 inference/kernel.py (fp8_gemm, act_quant).
    """
    name = "fp8_block_linear"
    dims = check(
        name,
        x=(_as_rows(x), "T K", FLOATS),
        weight=(weight, "N K", _BYTES),
        scale=(scale, "_ _", (_BYTES, *FLOAT32_UP)),
    )
    _require_scales(name, scale, -(-dims["N"] // 128), -(-dims["K"] // 128))
    check_codes(name, x.reshape(-1, x.shape[-1]), codes, code_scales)
    wanted = quantize_activations or codes is None
    require(wanted, name, "codes", "None for activations that are not quantised", "codes")


@operation(outputs=_packed_result)
def mxfp4_linear(
    x: Tensor, weight: Tensor, scale: Tensor, *, quantize_activations: bool = False
) -> Tensor:
    """Multiply by an MXFP4 weight.

    Args:
        x: [..., K] floating point, at least 2-D; K a multiple of 32.
        weight: uint8 packed e2m1 [N, K/2], low nibble first.
        scale: uint8 ue8m0 [N, K/32].
        quantize_activations: quantise x to FP8 in runs of 128 channels first, as DeepSeek-V4's
            FP4 experts do.

    Returns:
        [..., N] of x's dtype; accumulated in float32 or wider, rounded once.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.

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
    require(width % 32 == 0, name, "x", "[..., K] with K a multiple of 32", f"K={width}")
    require(weight.shape[1] * 2 == width, name, "weight", f"[N, {width // 2}]", list(weight.shape))
    _require_scales(name, scale, dims["N"], width // 32)


@operation(outputs=_packed_result)
def nvfp4_linear(x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Multiply by an NVFP4 weight; activations are not quantised.

    Args:
        x: [..., K] floating point, at least 2-D; K a multiple of 16.
        weight: uint8 packed e2m1 [N, K/2], low nibble first.
        scale: uint8 e4m3 codes [N, K/16].
        global_scale: float32 [1].

    Returns:
        [..., N] of x's dtype; the weight is decoded in float32 or wider and the product taken
        there, rounded once.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.

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


linear.register("reference", reference.linear)
linear.register("torch", torch_linear.linear)
linear_float32.register("reference", reference.linear_float32)
linear_float32.register("torch", torch_linear.linear_float32)
fp8_block_linear.register("reference", reference.fp8_block_linear)
fp8_block_linear.register("torch", torch_linear.fp8_block_linear)
mxfp4_linear.register("reference", reference.mxfp4_linear)
mxfp4_linear.register("torch", torch_linear.mxfp4_linear)
nvfp4_linear.register("reference", reference.nvfp4_linear)
nvfp4_linear.register("torch", torch_linear.nvfp4_linear)

linear.register("vendor", vendor.linear, supports=library_support)
linear_float32.register("vendor", vendor.linear_float32, supports=library_support)
fp8_block_linear.register("vendor", vendor.fp8_block_linear, supports=vendor.vendor_support)

fp8_block_linear.register_lazy(
    "gluon_sm90", "anymla.ops.linear.gluon_sm90_launch", supports=gluon_support
)
linear_float32.register_lazy(
    "gluon_sm90", "anymla.ops.linear.gluon_sm90_launch", supports=gluon_bf16_support
)

_TRITON = "anymla.ops.linear.triton_layers"
for _operation in (fp8_block_linear, mxfp4_linear, nvfp4_linear):
    _operation.register_lazy("triton", _TRITON, supports=float32_support)
mxfp4_linear.register_lazy(
    "triton_scaled", "anymla.ops.linear.triton_scaled", supports=scaled_support
)

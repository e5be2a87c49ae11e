"""Linear layers of packed weights by Triton's kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anymla.ops._triton_gemm import operand_rows
from anymla.ops._triton_quantize import quantize_rows
from anymla.ops.device import target_of
from anymla.ops.linear.triton_few import few_support, few_tile, launch_few
from anymla.ops.linear.triton_linear import launch_linear


def _few(rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor | None:
    """Quantised rows [T, K] times an mxfp4 weight, if the kernel for few tokens takes them."""
    tokens, width = rows.shape
    target = target_of(rows.device)
    w, scales = weight.unsqueeze(0), scale.unsqueeze(0)
    if not few_support(tokens, w, scales, "mxfp4", width, target):
        return None
    chosen = few_tile(tokens, "mxfp4", target)
    operands, x_scales = operand_rows(rows, chosen.operand, weight_format="mxfp4", quantize=True)
    assert x_scales is not None
    return launch_few(
        operands.unsqueeze(1),
        x_scales,
        w,
        scales,
        chosen,
        weight_format="mxfp4",
        out_dtype=rows.dtype,
    )


def _packed(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    weight_format: str,
    quantize: bool,
    coded: tuple[Tensor | None, Tensor | None] = (None, None),
    **options: Any,
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    codes, x_scales = coded
    if quantize and weight_format == "mxfp4":
        few = _few(rows, weight.contiguous(), scale.contiguous())
        if few is not None:
            return few.view(*x.shape[:-1], weight.shape[0])
    if codes is not None and x_scales is not None:
        codes, x_scales = codes[: len(rows)], x_scales[: len(rows)].contiguous()
    else:
        codes, x_scales = quantize_rows(rows) if quantize else (rows, None)
    out = launch_linear(
        codes.unsqueeze(1),
        x_scales,
        weight.contiguous().unsqueeze(0),
        scale.contiguous().unsqueeze(0),
        weight_format=weight_format,
        x_dtype=x.dtype,
        out_dtype=x.dtype,
        **options,
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def fp8_block_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Tensor:
    """See ``interface.fp8_block_linear``."""
    return _packed(x, weight, scale, "fp8", quantize_activations, (codes, code_scales))


def mxfp4_linear(
    x: Tensor, weight: Tensor, scale: Tensor, *, quantize_activations: bool = False
) -> Tensor:
    """See ``interface.mxfp4_linear``."""
    return _packed(x, weight, scale, "mxfp4", quantize_activations)


def nvfp4_linear(x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """See ``interface.nvfp4_linear``."""
    return _packed(x, weight, scale, "nvfp4", False, factor=global_scale)

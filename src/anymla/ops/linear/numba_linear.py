"""Linear layers for few tokens on a CPU; packed weights are decoded in registers."""

from __future__ import annotations

from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops._numba_launch import packed_gemm


def fp8_block_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
    quant_block: int = FP8_BLOCK,
) -> Tensor:
    """Backend of ``interface.fp8_block_linear`` in numba; see its contract."""
    coded = None
    if codes is not None and code_scales is not None:
        coded = QuantizedRows(codes, code_scales)
    return packed_gemm(x, weight, scale, fp8=True, quantize=quantize_activations, coded=coded)


def mxfp4_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    quantize_activations: bool = False,
    quant_block: int = FP8_BLOCK,
) -> Tensor:
    """Backend of ``interface.mxfp4_linear`` in numba; see its contract."""
    return packed_gemm(x, weight, scale, fp8=False, quantize=quantize_activations)

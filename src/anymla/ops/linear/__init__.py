"""Products with weights in their stored format, and attention's output projection."""

from anymla.ops.linear.interface import (
    fp8_block_linear,
    grouped_output_projection,
    grouped_output_projection_fp8,
    inverse_rope_fp8_quant,
    linear,
    linear_float32,
    mxfp4_linear,
    nvfp4_linear,
)

__all__ = [
    "fp8_block_linear",
    "grouped_output_projection",
    "grouped_output_projection_fp8",
    "inverse_rope_fp8_quant",
    "linear",
    "linear_float32",
    "mxfp4_linear",
    "nvfp4_linear",
]

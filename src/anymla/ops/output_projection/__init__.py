"""From attention outputs back to the hidden size: inverse RoPE and a projection by groups."""

from anymla.ops.output_projection.interface import (
    grouped_output_projection,
    grouped_output_projection_fp8,
    inverse_rope_fp8_quant,
)

__all__ = [
    "grouped_output_projection",
    "grouped_output_projection_fp8",
    "inverse_rope_fp8_quant",
]

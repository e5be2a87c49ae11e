"""Products with weights as they are stored: plain, FP8 blocks, MXFP4 and NVFP4."""

from anymla.ops.linear.interface import (
    fp8_block_linear,
    linear,
    linear_float32,
    mxfp4_linear,
    nvfp4_linear,
)

__all__ = ["fp8_block_linear", "linear", "linear_float32", "mxfp4_linear", "nvfp4_linear"]

"""The grouped projection from FP8 heads: the linear layer's kernel, once a group.

float32 scales of either operand are factors in float32, so both products of codes stay exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops.linear.triton_linear import launch_linear
from anymla.ops.output_projection.dtypes import OUT_DTYPES


def grouped_output_projection_fp8(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Tensor:
    """See ``interface.grouped_output_projection_fp8``."""
    out = launch_linear(
        o.contiguous().view(torch.uint8),
        o_scale.contiguous(),
        wo_a.contiguous(),
        wo_a_scale.contiguous(),
        weight_format="fp8",
        x_dtype=torch.bfloat16,
        out_dtype=OUT_DTYPES[out_dtype],
    )
    return out.flatten(1)

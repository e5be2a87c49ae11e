"""The grouped projection from FP8 heads by the linear layer's kernels for Hopper."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops.linear.support import gluon_gemm_support
from anymla.ops.output_projection.dtypes import OUT_DTYPES
from anymla.ops.registry import Support


def hopper_grouped_support(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Support:
    """``supports`` of ``grouped_output_projection_fp8``."""
    if out_dtype == "fp64":
        return Support(False, "computes in float32, but out_dtype is fp64")
    return gluon_gemm_support(len(o), wo_a, wo_a_scale, out_dtype == "fp32")


def grouped_output_projection_fp8(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Tensor:
    """See ``interface.grouped_output_projection_fp8``."""
    from anymla.ops.linear.gluon_sm90_launch import grouped_gemm

    codes, scales = o.contiguous().view(torch.uint8), o_scale.contiguous()
    return grouped_gemm(codes, scales, wo_a, wo_a_scale, OUT_DTYPES[out_dtype]).flatten(1)

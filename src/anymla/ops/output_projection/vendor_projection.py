"""The grouped projection from FP8 heads by cuBLAS, a product a group; see ``linear.vendor``."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.ops.linear.vendor import TOKEN_STEP, scaled_product, vendor_support
from anymla.ops.registry import Support

# Eight products of some 17 us each: worth it where the kernel takes longer (H200: 128 us for 333
# tokens, 467 us for 2048).
_FEWEST_TOKENS = 512


def vendor_grouped_support(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Support:
    """``supports`` of ``grouped_output_projection_fp8``."""
    if out_dtype != "bf16":
        return Support(False, f"results in bf16 only, got {out_dtype}")
    support = vendor_support(o[:, 0], wo_a[0], wo_a_scale[0], quantize_activations=True, dtype=None)
    return dataclasses.replace(support, automatic=len(o) >= _FEWEST_TOKENS)


def grouped_output_projection_fp8(
    o: Tensor, o_scale: Tensor, wo_a: Tensor, wo_a_scale: Tensor, *, out_dtype: str = "bf16"
) -> Tensor:
    """See ``interface.grouped_output_projection_fp8``."""
    from anymla.ops.output_projection import triton_projection

    tokens = len(o)
    whole = tokens // TOKEN_STEP * TOKEN_STEP
    out = torch.empty(
        (tokens, wo_a.shape[0] * wo_a.shape[1]), dtype=torch.bfloat16, device=o.device
    )
    if whole:
        scales = o_scale[:whole].permute(1, 2, 0).contiguous()
        parts = [
            scaled_product(o[:whole, group], scales[group].t(), wo_a[group], wo_a_scale[group])
            for group in range(o.shape[1])
        ]
        torch.cat(parts, 1, out=out[:whole])
    if whole < tokens:
        out[whole:] = triton_projection.grouped_output_projection_fp8(
            o[whole:], o_scale[whole:], wo_a, wo_a_scale
        )
    return out

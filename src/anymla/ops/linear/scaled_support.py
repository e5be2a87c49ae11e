"""Calls that instructions with blocks of scales take."""

from __future__ import annotations

from torch import Tensor, bfloat16

from anymla.ops.device import INTERPRETED, target_of, triton_support
from anymla.ops.registry import Support

TARGET = "sm_100"


def scaled_support(
    x: Tensor, weight: Tensor, scale: Tensor, *, quantize_activations: bool = False
) -> Support:
    """``supports`` of ``mxfp4_linear``."""
    support = triton_support(x)
    if not support:
        return support
    if not quantize_activations or x.dtype != bfloat16:
        return Support(False, "only bfloat16 activations that are quantised")
    if INTERPRETED or target_of(x.device).name == TARGET:
        return support
    return Support(False, f"instructions with blocks of scales are those of {TARGET}")

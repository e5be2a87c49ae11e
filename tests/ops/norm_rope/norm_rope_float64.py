"""Norms and rotations in float64, and a table of angles."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.ops.norm_rope import YarnScaling, cos_sin_table, inv_freq
from anymla.ops.norm_rope.shapes import V4_FLASH

DEEPSEEK_YARN = YarnScaling(factor=16.0, original_max_position_embeddings=65536)
TABLE = cos_sin_table(inv_freq(V4_FLASH.rope, 160000.0, DEEPSEEK_YARN), 0, 4096)


def norm64(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.double()


def rope64(x: Tensor, positions: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
    """The rotation as complex numbers in float64."""
    half = table.shape[1] // 2
    cos, sin = table[positions].double().split(half, dim=1)
    by = torch.complex(cos, -sin if inverse else sin).unsqueeze(1)
    y = x.double().clone()
    tail = y[..., -2 * half :].unflatten(-1, (half, 2)).contiguous()
    y[..., -2 * half :] = torch.view_as_real(torch.view_as_complex(tail) * by).flatten(-2)
    return y

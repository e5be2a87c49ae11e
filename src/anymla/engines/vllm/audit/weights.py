"""Weights of linear layers as a checkpoint has them, and the part of one that a check reads."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from anymla.formats.fp8_block import FP8_BLOCK

_OUTPUTS = 32  # outputs of a product that are judged, so that a step takes a fraction of a second


def block_of_outputs(numbers: random.Random, outputs: int) -> slice:
    """Choose the outputs of a product that are judged."""
    wide = min(outputs, _OUTPUTS)
    first = numbers.randrange(outputs // wide) * wide
    return slice(first, first + wide)


def is_readable(module: Any, inputs: int) -> bool:
    """Return True if a linear layer's weight lies as in a checkpoint, not as some kernel wants.

    On ROCm, FP8 weights may be shuffled for AITER's kernels, under the same shape. A layer of
    vLLM's around another one (LoRA) adds an adapter's product, which is not in the weight.
    """
    if hasattr(module, "base_layer"):
        return False
    weight, scale = getattr(module, "weight", None), getattr(module, "weight_scale_inv", None)
    if weight is None or weight.ndim != 2 or weight.shape[1] != inputs:
        return False
    if weight.dtype in (torch.bfloat16, torch.float32):
        return True
    blocks = -(-len(weight) // FP8_BLOCK), -(-inputs // FP8_BLOCK)
    known = scale is not None and scale.shape == blocks and scale.dtype != torch.int32
    known = known and not current_platform.is_rocm()
    return weight.dtype == torch.float8_e4m3fn and known and inputs % FP8_BLOCK == 0


def block_of_weight(module: Any, outputs: slice) -> dict[str, Tensor]:
    """Return rows of a linear layer's weight, with their scales if it has any."""
    weight = module.weight.data[outputs]
    if weight.dtype != torch.float8_e4m3fn:
        return {"weight": weight}
    scale = module.weight_scale_inv.data[_blocks(outputs)]
    return {"weight": weight.view(torch.uint8), "weight_scale": scale}


def group_weight(layer: Any, group: int, outputs: slice) -> dict[str, Tensor] | None:
    """Return ``wo_a`` of one group's outputs as [1, R, J]: ours in bf16, or as vLLM holds it.

    None if it lies in no form that a check can read.
    """
    groups, rank = layer.n_local_groups, layer.o_lora_rank
    if getattr(layer, "wo_a_groups", None) is not None:
        return {"wo_a": layer.wo_a_groups[group : group + 1, outputs]}
    weight = layer.wo_a.weight
    if not weight.numel():
        return None
    weight = weight.view(groups, rank, -1)[group : group + 1, outputs]
    if weight.dtype == torch.bfloat16:
        return {"wo_a": weight}
    scale = getattr(layer.wo_a, "weight_scale_inv", None)
    if weight.dtype != torch.float8_e4m3fn or scale is None or scale.dtype == torch.int32:
        return None
    if current_platform.is_rocm():
        return None
    scale = scale.view(groups, -(-rank // FP8_BLOCK), -1)[group : group + 1, _blocks(outputs)]
    return {"wo_a": weight.view(torch.uint8), "wo_a_scale": scale}


def _blocks(part: slice) -> slice:
    """Return the rows of scales of these rows, which begin with a block or lie within one."""
    return slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK))

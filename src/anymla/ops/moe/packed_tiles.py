"""Tiles of ``triton_packed``, and which experts they suit."""

from __future__ import annotations

import dataclasses

import torch

from anymla.ops._gemm_config import uses_wgmma
from anymla.ops.device import Target
from anymla.ops.moe.triton_stack import Call, aligned


@dataclasses.dataclass(frozen=True)
class PackedTile:
    """Rows of the weight, pairs and channels of a step; operands; warps and stages."""

    rows: int
    columns: int
    channels: int
    operand: torch.dtype
    num_warps: int
    stages: int
    wide: bool = False


def packed_tile(
    pairs: int, sizes: tuple[int, int, int], weight_format: str, coded: bool, target: Target
) -> PackedTile:
    """The tile for pairs spread evenly over the experts.

    Args:
        pairs: how many.
        sizes: experts, their inner size, hidden size.
        weight_format: "mxfp4" or "fp8".
        coded: activations are quantised.
        target: what it runs on.
    """
    experts, inner, d = sizes
    share = pairs / experts
    if weight_format == "fp8":
        # Hopper's sums of 128 products of e4m3 would keep 13 bits.
        return PackedTile(64, 16, 128, torch.float16, 4, 4)
    if not coded or share > 12:
        if share <= 32:
            return PackedTile(128, 32, 128, torch.bfloat16, 8, 3)
        columns = 128 if share > 48 and not target.narrow else 64
        return PackedTile(128, columns, 64, torch.bfloat16, 8, 3)
    kind = torch.float8_e4m3fn if target.dot_e4m3 else torch.float16
    if not uses_wgmma(target):
        return PackedTile(64, 16, 128, kind, 4, 4)
    channels = 128 if inner % 256 or d % 256 else 256
    return PackedTile(64 if share <= 3 else 128, 16, channels, kind, 4, 3, wide=True)


def packed_support(call: Call, target: Target) -> bool:
    """Whether these kernels take the experts: whole runs and tiles, at addresses for wide loads."""
    if call.weight_format == "fp8":
        # Wide rows of codes do not fit the registers of RDNA.
        known, size = call.coded and not target.narrow, 1
    else:
        known = call.coded or call.x.dtype is torch.bfloat16
        known, size = call.weight_format == "mxfp4" and known, 4
    _, inner, d = call.sizes
    if not known or inner % 128 or d % 128:
        return False
    return all(aligned(each, 16) for each in call.matrices) and all(
        aligned(each, size) for each in call.scales
    )

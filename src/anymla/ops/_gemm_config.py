"""Operands and tiles of Triton's GEMMs, as linear layers and experts choose them."""

from __future__ import annotations

import dataclasses

import torch

from anymla.ops.device import Target

# Rows of activations from which a tile is of 64, and of 128.
_FEW_ROWS, _MANY_ROWS = 16, 512
# Of a pipeline whose steps are cut short.
_MOST_STAGES = 6
# Shared memory for a third stage of the smallest tiles, and for tiles of 128 rows.
_THREE_STAGES_BYTES, _LARGE_TILE_BYTES = 96 << 10, 160 << 10


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Tile and pipeline of a GEMM.

    Attributes:
        block_m: rows of activations.
        block_n: rows of the weight.
        block_k: channels of a step.
        num_warps: of a CTA.
        num_stages: of the pipeline.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def operand_dtype(
    x: torch.dtype, weight_format: str, weight: torch.dtype, coded: bool, target: Target
) -> torch.dtype:
    """Dtype of the products' operands; it holds every decoded value exactly.

    Args:
        x: dtype of the activations before they were quantised.
        weight_format: "plain", "fp8", "mxfp4" or "nvfp4".
        weight: dtype of the stored weight, which matters for "plain".
        coded: the activations are e4m3 codes.
        target: what the GEMM runs on.
    """
    if target.arc_a:
        # Not bfloat16, whose exponents are lost; float16 spills 136 to 250 registers, this none.
        return torch.float32
    if coded and weight_format == "fp8":
        return torch.float8_e4m3fn if target.dot_e4m3 else torch.float16
    if not coded and (x == torch.float32 or (weight_format == "plain" and weight != x)):
        return torch.float32
    return torch.bfloat16 if coded or weight_format == "mxfp4" else x


def choose_tile(rows: int, operand: torch.dtype, target: Target) -> TileConfig:
    """The tile for so many rows of activations and operands of a dtype."""
    if target.backend == "cpu":
        # The interpreter pays for steps, not for their size.
        return TileConfig(16 if rows <= _FEW_ROWS else 64, 64, 128, 4, 1)
    if target.arc_a:
        return TileConfig(16 if rows <= _FEW_ROWS else 32, 32, 32, 16, 2)
    if operand == torch.float32:
        return TileConfig(16, 32, 32, 4, 2)
    if rows <= _FEW_ROWS:
        return TileConfig(16, 32, 128, 4, 3 if target.shared_bytes > _THREE_STAGES_BYTES else 2)
    large = target.backend == "cuda" and target.shared_bytes >= _LARGE_TILE_BYTES
    if rows <= _MANY_ROWS or not large:
        # Intel: 4 warps spill 19 registers, and take half as many instructions again.
        return TileConfig(64, 64, 64, 8 if target.intel else 4, 2)
    return TileConfig(128, 128, 64, 8, 3)


def within_quant_blocks(tile: TileConfig, block: int) -> TileConfig:
    """The tile with steps of at most ``block`` channels, which have one scale.

    Shorter steps are as many more stages, for as many bytes in flight.
    """
    if tile.block_k <= block:
        return tile
    stages = tile.num_stages if tile.num_stages == 1 else tile.num_stages * tile.block_k // block
    return dataclasses.replace(tile, block_k=block, num_stages=min(_MOST_STAGES, stages))


def uses_wgmma(target: Target) -> bool:
    """Whether products are instructions that a warpgroup issues and waits for."""
    return target.name == "sm_90"

"""Choice of operand dtypes and tiles for Triton's GEMMs in linear layers and experts."""

from __future__ import annotations

import dataclasses

import torch

from anymla.ops.device import Target

# Rows of activations above which a tile has 64 rows, and above which it has 128.
_FEW_ROWS, _MANY_ROWS = 16, 512
# Largest number of stages of a pipeline whose steps were shortened to one quant block.
_MOST_STAGES = 6
# Shared memory needed for a third stage of the smallest tiles, and for tiles of 128 rows.
_THREE_STAGES_BYTES, _LARGE_TILE_BYTES = 96 << 10, 160 << 10


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """Tile shape and software pipeline of a GEMM.

    Attributes:
        block_m: rows of activations in a tile.
        block_n: rows of the weight in a tile.
        block_k: channels that one step of the main loop multiplies.
        num_warps: number of warps of a CTA.
        num_stages: number of stages of the software pipeline.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def operand_dtype(
    x: torch.dtype, weight_format: str, weight: torch.dtype, coded: bool, target: Target
) -> torch.dtype:
    """Return the dtype of the products' operands; it holds every decoded value exactly.

    Args:
        x: dtype of the activations before they were quantised.
        weight_format: storage format of the weight, "plain", "fp8", "mxfp4" or "nvfp4".
        weight: dtype of the stored weight; only used for "plain".
        coded: True if the activations are e4m3 codes.
        target: architecture that the GEMM runs on.
    """
    if target.arc_a:
        # bfloat16 would lose exponents here; float16 spills 136 to 250 registers, float32 none.
        return torch.float32
    if coded and weight_format == "fp8":
        return torch.float8_e4m3fn if target.dot_e4m3 else torch.float16
    if not coded and (x == torch.float32 or (weight_format == "plain" and weight != x)):
        return torch.float32
    return torch.bfloat16 if coded or weight_format == "mxfp4" else x


def choose_tile(rows: int, operand: torch.dtype, target: Target) -> TileConfig:
    """Return the tile for a number of activation rows and an operand dtype."""
    if target.backend == "cpu":
        # The interpreter's cost is by step, whatever a step's size.
        return TileConfig(16 if rows <= _FEW_ROWS else 64, 64, 128, 4, 1)
    if target.arc_a:
        return TileConfig(16 if rows <= _FEW_ROWS else 32, 32, 32, 16, 2)
    if operand == torch.float32:
        return TileConfig(16, 32, 32, 4, 2)
    if target.narrow:
        # RDNA spills up to 480 registers in steps of 128 channels, and 183 with 4 warps of 64 rows.
        few = rows <= _FEW_ROWS
        return TileConfig(16, 32, 64, 4, 2) if few else TileConfig(64, 64, 64, 8, 2)
    if rows <= _FEW_ROWS:
        return TileConfig(16, 32, 128, 4, 3 if target.shared_bytes > _THREE_STAGES_BYTES else 2)
    large = target.backend == "cuda" and target.shared_bytes >= _LARGE_TILE_BYTES
    if rows <= _MANY_ROWS or not large:
        # On Intel, 4 warps spill 19 registers and execute 1.5 times as many instructions.
        return TileConfig(64, 64, 64, 8 if target.intel else 4, 2)
    return TileConfig(128, 128, 64, 8, 3)


def within_quant_blocks(tile: TileConfig, block: int) -> TileConfig:
    """Limit a tile's steps to ``block`` channels, which share a scale.

    The pipeline gets proportionally more stages, so that as many bytes stay in flight.
    """
    if tile.block_k <= block:
        return tile
    stages = tile.num_stages if tile.num_stages == 1 else tile.num_stages * tile.block_k // block
    return dataclasses.replace(tile, block_k=block, num_stages=min(_MOST_STAGES, stages))


def uses_wgmma(target: Target) -> bool:
    """Return True if matrix products are WGMMA, which a warpgroup issues and waits for."""
    return target.name == "sm_90"


def uses_mma_sync(target: Target) -> bool:
    """Return True if matrix products are mma.sync, whose operands are in a warp's registers."""
    return target.name in ("sm_80", "sm_86", "sm_89", "sm_120", "sm_121")

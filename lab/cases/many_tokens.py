"""FP8 products of more than 32 tokens and MXFP4 experts, and the tiles they might take by Triton.

Tiles are those of targets whose products are ``mma.sync``. Activations of products come as codes,
as layers give them, so a call includes what a config needs besides: a copy of their scales, or
their float16 operands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from anymla.bench.gpu_timing import copies_for
from anymla.bench.random_weights import random_e4m3
from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops._gemm_config import TileConfig
from anymla.ops.device import Target
from anymla.ops.linear import fp8_block_linear, grouped_output_projection_fp8
from anymla.ops.linear.config import GemmShape, TritonConfig, channels_of_split
from anymla.ops.linear.shapes import V4_FLASH, V4_PRO, ProductShape
from anymla.ops.moe.config import GemmConfig
from anymla.ops.moe.shapes import ExpertsShape
from lab import mma_tiles

Calls = list[Callable[[], Any]]

TOKENS = (33, 64, 128, 512, 2048, 8192)
EXPERT_TOKENS = (32, 64, 128, 512, 2048)
# Experts of a GPU that has an eighth of each, and of one that has an eighth of them.
EXPERTS = {
    label: mma_tiles.EXPERTS[label] for label in ("flash, 1/8 of each", "flash, 1/8 of them")
}
# Tokens, rows of the weight and channels of a step, warps, stages; then numbers of CTAs that K is
# split for. "x16" is of float16 activations, which come from codes in the other tiles; all but
# "plain" ones load scales ahead. Up to _WHOLE_K channels, "x16" is also timed whole.
_WHOLE_K = 2048
_FEW, _MANY = (256, 512), (512,)
_WORD_TILES: dict[int, tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]] = {
    128: (
        ("plain", (64, 64, 64, 4, 2), (512,)),
        ("codes", (64, 64, 128, 4, 3), _FEW),
        ("x16", (64, 32, 128, 4, 3), _FEW),
        ("x16", (64, 64, 128, 4, 3), _FEW),
        ("x16", (64, 128, 64, 4, 4), (128, 256)),
        ("x16", (128, 64, 128, 4, 2), (128, 256)),
    ),
    8192: (
        ("plain", (64, 64, 64, 4, 2), _MANY),
        ("plain", (128, 128, 64, 8, 3), _MANY),
        ("codes", (128, 128, 64, 8, 4), _MANY),
        ("x16", (64, 64, 128, 4, 3), _MANY),
        ("x16", (64, 128, 64, 4, 4), (256, 512)),
        ("x16", (128, 64, 128, 4, 2), (256, 512)),
        ("x16", (128, 64, 64, 4, 4), _MANY),
        ("x16", (128, 128, 64, 8, 4), _MANY),
        ("x16", (128, 128, 128, 8, 3), _MANY),
        ("x16", (64, 256, 128, 8, 3), _MANY),
    ),
}
_E4M3_TILES: dict[int, tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]] = {
    128: (
        ("plain", (64, 64, 64, 4, 2), (512,)),
        ("plain", (64, 64, 128, 4, 3), (512,)),
        ("codes", (64, 64, 64, 4, 4), (512,)),
        ("codes", (64, 64, 128, 4, 3), _FEW),
        ("codes", (64, 32, 128, 4, 3), _FEW),
        ("codes", (64, 128, 64, 4, 4), (128, 256)),
        ("codes", (128, 64, 128, 4, 2), (128, 256)),
        ("codes", (128, 128, 128, 8, 2), (128, 256)),
    ),
    8192: (
        ("plain", (64, 64, 64, 4, 2), _MANY),
        ("plain", (128, 128, 64, 8, 3), _MANY),
        ("codes", (64, 64, 128, 4, 3), _MANY),
        ("codes", (64, 128, 64, 4, 4), (256, 512)),
        ("codes", (128, 64, 128, 4, 2), (256, 512)),
        ("codes", (128, 64, 64, 4, 4), _MANY),
        ("codes", (128, 128, 64, 8, 4), _MANY),
        ("codes", (128, 128, 128, 8, 2), _MANY),
    ),
}
# Tokens and rows of the weight, warps that share K, and stages, of at most 128 tokens by words.
_K_WARPS_TILES = ((32, 32, 4, 3), (32, 16, 4, 3))
# Rows of w1 and w3, warps that share K, and stages; pairs of a block.
_EXPERT_TILES: tuple[mma_tiles.Tile, ...] = ((32, 4, 3), (64, 4, 3), (64, 2, 3), (64, 2, 4))
_EXPERT_BLOCKS = (8, 16, 32)
# Pairs, channels of a step, warps and stages of scales that are multiplied into operands.
_SCALED_TILES = (
    (16, 128, 8, 3), (32, 128, 8, 3), (32, 64, 8, 4), (32, 64, 4, 3), (64, 64, 8, 3),
    (64, 32, 8, 4), (64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 4),
)  # fmt: skip


def products() -> list[ProductShape]:
    """List products of an eighth of V4-Flash, all of it, and an eighth of V4-Pro, each once."""
    every = (
        *V4_FLASH.products(8), V4_FLASH.index_query, *V4_FLASH.products(), *V4_PRO.products(8),
    )  # fmt: skip
    found: dict[tuple[int, int, int], ProductShape] = {}
    for product in every:
        found.setdefault((product.n, product.k, product.groups), product)
    return list(found.values())


def gemm_shape(product: ProductShape, tokens: int) -> GemmShape:
    """Return the sizes of a product's launch."""
    return GemmShape(tokens, product.n, product.k, max(1, product.groups))


def product_calls(
    product: ProductShape, tokens: int, device: torch.device, copies: int = 0
) -> Calls:
    """Make calls of a product, each with its own weight; 0 copies for as many as no cache holds."""
    n, k, groups = product.n, product.k, product.groups
    made: Calls = []
    moved = product.elements + tokens * (max(1, groups) * k + 2 * product.rows)
    for _ in range(copies or copies_for(moved)):
        weight = random_e4m3(max(1, groups), n, k, device=device)
        factors = _powers(max(1, groups), -(-n // FP8_BLOCK), k // FP8_BLOCK, device=device)
        if groups:
            heads = random_e4m3(tokens, groups, k, device=device).view(torch.float8_e4m3fn)
            scales = _powers(tokens, groups, k // FP8_BLOCK, device=device)
            made.append(
                functools.partial(
                    grouped_output_projection_fp8, heads, scales, weight, factors, backend="triton"
                )
            )
            continue
        rows = QuantizedRows.empty(tokens, k, device)
        rows.codes[:] = random_e4m3(*rows.codes.shape, device=device)
        rows.scales[:] = _powers(*rows.scales.shape, device=device)
        made.append(
            functools.partial(
                fp8_block_linear, torch.empty(tokens, k, dtype=torch.bfloat16, device=device),
                weight[0], factors[0], quantize_activations=True, codes=rows.codes,
                code_scales=rows.scales, backend="triton",
            )
        )  # fmt: skip
    return made


def _powers(*shape: int, device: torch.device) -> torch.Tensor:
    """Draw powers of two as scales, float32."""
    return torch.randint(-11, -7, shape, device=device).float().exp2()


def product_configs(shape: GemmShape, target: Target) -> dict[str, TritonConfig]:
    """Return the configs of a product by their names; those that do not fit a target raise there.

    A name is a word of ``_WORD_TILES``, or "k_warps", the tile, and the splits of K.
    """
    by_words = not target.dot_e4m3
    operand = torch.float16 if by_words else torch.float8_e4m3fn
    tiles = _WORD_TILES if by_words else _E4M3_TILES
    found: dict[str, TritonConfig] = {}
    for kind, size, ctas in next(tiles[most] for most in tiles if shape.tokens <= most):
        tile = TileConfig(*size)
        if tile.block_m >= 2 * max(shape.tokens, 64):
            continue
        for count in (*ctas, 1) if kind == "x16" and shape.k <= _WHOLE_K else ctas:
            split = channels_of_split(shape, tile, count)
            config = TritonConfig(
                False, operand, tile, split, by_words=by_words,
                float16_x=kind == "x16", scales_ahead=kind != "plain",
            )  # fmt: skip
            found[f"{kind} {_name(size)} / {config.splits(shape.k)}"] = config
    for tokens, rows, warps, stages in _K_WARPS_TILES if by_words and shape.tokens <= 128 else ():
        if shape.n % rows == 0 and shape.k % (FP8_BLOCK * warps) == 0:
            tile = TileConfig(tokens, rows, FP8_BLOCK * warps, warps, stages)
            found[f"k_warps {_name(dataclasses.astuple(tile))} / 1"] = TritonConfig(
                True, operand, tile, shape.k, k_warps=warps
            )
    return found


def _name(size: tuple[int, ...]) -> str:
    """Write a tile as tokens x rows x channels, warps and stages."""
    return "x".join(map(str, size[:3])) + f" {size[3]}w {size[4]}s"


def expert_configs(shape: ExpertsShape) -> dict[str, GemmConfig]:
    """Return configs of experts by names: of warps that share K, and of scaled operands."""
    share = shape.pairs_per_expert
    found: dict[str, GemmConfig] = {}
    for tile in _EXPERT_TILES if share <= 24 else ():
        for block_m in _EXPERT_BLOCKS:
            if share / 2 <= block_m <= max(16, 3 * share):
                config = mma_tiles.expert_config(shape, tile, (64, 2, 3), block_m)
                found[f"k_warps {(*tile, block_m)}"] = config
    for block_m, block_k, warps, stages in _SCALED_TILES if share >= 6 else ():
        if share / 3 <= block_m <= 4 * share:
            found[f"scaled {(block_m, block_k, warps, stages)}"] = GemmConfig(
                True, True, block_m, 128, block_k, torch.bfloat16, warps, stages
            )
    return found

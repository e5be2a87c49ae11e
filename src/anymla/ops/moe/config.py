"""Choices of backend and tile for the experts and routers: pure functions of shapes and target.

The experts are two grouped GEMMs, one of w1 and w3 together and one of w2. Their rows are (token,
expert) pairs, grouped by expert in blocks of ``block_m``:

- "gluon_sm90": MXFP4 weights and quantised activations. ``takes_w4a8`` chooses between its kernels.
  With few pairs an expert (``choose_sm90_config``), persistent CTAs load weights without a pause
  between work tiles. With more (``choose_w4a8_config``), decoded and scaled weights are operands of
  the FP8 instruction.
- "triton" (``choose_config``): all other formats and sizes. With ``swap_ab``, the weight's rows are
  rows of the matrix instruction, and weights go from memory into registers without masks.

Thresholds were measured on an H200 with the shapes beside them; see docs/performance/experts.md.

A warm-up runs powers of two of tokens. So a choice holds for all numbers of tokens up to some power
of two, or from one threshold to another that is at least twice as many.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops._gemm_config import (
    choose_tile,
    operand_dtype,
    uses_mma_sync,
    uses_wgmma,
    within_quant_blocks,
)
from anymla.ops._sizes import next_power_of_2
from anymla.ops.device import TARGETS, Target, numba_problem, runs_gluon, triton_support
from anymla.ops.moe.inputs import expected_addresses, expected_alignment, lie_evenly
from anymla.ops.moe.shapes import ExpertFormats, ExpertsShape
from anymla.ops.registry import Support

# --- experts on Hopper ---------------------------------------------------------------------------

_SHARED = TARGETS["sm_90"].shared_bytes
_SHARED_OF_SM = _SHARED + 1024
_RESERVED = 1024  # bytes that every CTA reserves


@dataclasses.dataclass(frozen=True)
class Sm90Config:
    """Tile shape and pipeline of one grouped GEMM on Hopper.

    Attributes:
        block_m: number of pairs in a block.
        block_n: rows of the weight in a tile, 16 for each warp.
        block_k: channels of a pipeline stage.
        stages: number of stages of the ring.
        ctas_per_sm: number of CTAs resident on an SM at a time.
        quantize_batch: K blocks (128 channels) of a row of w2's input that are loaded at once.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    ctas_per_sm: int
    quantize_batch: int = 1


# Entries: most pairs an expert, so that a block nearly always holds all of an expert's pairs;
# configs of w1 and w3; configs of w2. The first config that fits in shared memory is taken.
# Measured with V4-Flash and V4-Pro with 32 experts, and V4.1-Flash, whose w2 has no whole stages of
# 512 channels (384 experts; 1, 8, 32 and 128 tokens: 54, 255, 782 and 1,710 us; with three CTAs of
# 256 channels 66, 273, 824 and 1,792 us; Triton 64, 399, 1,184 and 2,557 us).
_SM90_CONFIGS = (
    # Measured with 1, 2 and 8 tokens of both, and with 128 tokens and 256 experts. 4 pairs an
    # expert of V4-Pro's 48 take 440 us, with blocks of 16 534; 6 pairs an expert of V4-Flash's 256
    # take 993, with W4A8 923.
    (
        5,
        (
            Sm90Config(8, 64, 512, 2, 3),
            Sm90Config(8, 64, 512, 4, 2),
            Sm90Config(8, 64, 256, 4, 3),
            Sm90Config(8, 64, 256, 8, 2),
        ),
        (Sm90Config(8, 64, 512, 3, 3, 8), Sm90Config(8, 64, 256, 3, 4, 8)),
    ),
    # W4A8 does not take experts that do not lie evenly, nor sizes of half a stage; these do.
    # V4-Pro's configs only fit with one CTA of 128 rows; alone they are 3 % slower than Triton's,
    # but a layer is 3 to 6 % faster, since Triton's do not use PDL.
    (
        16,
        (
            Sm90Config(16, 64, 512, 2, 2),
            Sm90Config(16, 64, 256, 4, 2),
            Sm90Config(16, 128, 512, 4, 1),
            Sm90Config(16, 128, 256, 8, 1),
        ),
        (
            Sm90Config(16, 64, 512, 3, 2, 4),
            Sm90Config(16, 64, 256, 3, 3, 4),
            Sm90Config(16, 128, 512, 3, 1, 4),
            Sm90Config(16, 128, 256, 6, 1, 4),
        ),
    ),
)
# Largest number of pairs an expert for activations with a scale for every 32 channels, whose sums
# are more work: V4.1-Flash, 384 experts: 8 pairs 2,625 us, Triton 2,853; 16 pairs 3,827, Triton
# 3,823.
_MOST_PAIRS_OF_SMALL_BLOCKS = 12


def _fitted(
    configs: tuple[Sm90Config, ...], width: int, quant_block: int, *, loads_activations: bool
) -> Sm90Config | None:
    """Return the first config with two stages or more in shared memory, with as many as fit.

    Where activations are loaded with the weights, a tile must have more stages than the ring.
    """
    for config in configs:
        block_k = config.block_k
        activations = config.block_m * width + config.block_m * (width // quant_block) * 4
        factors = config.block_n * (block_k // 32) * 4
        stage = config.block_n * (block_k // 2 + block_k // 32)
        memory = min(_SHARED, _SHARED_OF_SM // config.ctas_per_sm - _RESERVED)
        held = (memory - activations - factors) // stage
        stages = min(held, config.stages)
        if loads_activations:
            stages = min(stages, width // block_k - 1)
        if width % block_k == 0 and stages >= 2:
            batch = math.gcd(config.quantize_batch, width // 128)
            return dataclasses.replace(config, stages=stages, quantize_batch=batch)
    return None


def choose_sm90_config(
    shape: ExpertsShape, quant_block: int = FP8_BLOCK
) -> tuple[Sm90Config, Sm90Config] | None:
    """Return the configs of (w1, w3) and of w2; None if no config suits the shape."""
    small = quant_block != FP8_BLOCK
    if small and shape.pairs > _MOST_PAIRS_OF_SMALL_BLOCKS * shape.experts:
        return None
    for most, ups, downs in _SM90_CONFIGS:
        if shape.pairs <= most * shape.experts:
            up = _fitted(ups, shape.d, quant_block, loads_activations=True)
            down = _fitted(downs, shape.inner, quant_block, loads_activations=False)
            if up is None or down is None:
                return None
            whole = not (2 * shape.inner % up.block_n or shape.d % down.block_n)
            return (up, down) if whole else None
    return None


@dataclasses.dataclass(frozen=True)
class W4A8Config:
    """Block size and pipelines of the W4A8 grouped GEMMs.

    Attributes:
        block_m: number of pairs in a block, 16, 32, 64 or 128.
        gate_up_stages: number of stages in the ring of w1 and w3.
        down_stages: number of stages in the ring of w2.
        consumer_registers: registers of a thread of the second consumer warpgroup.
        producer_registers: registers of a thread outside the consumer warpgroups.
    """

    block_m: int
    gate_up_stages: int
    down_stages: int
    consumer_registers: int
    producer_registers: int

    @property
    def scaled_sums(self) -> bool:
        """True if scales are multiplied with sums of 32 channels, False if with codes."""
        return self.block_m in _SCALED_SUMS


# Pairs an expert above which W4A8 is chosen; then block sizes with the most pairs an expert for
# each, since larger blocks would be more than half empty. Measured with V4-Flash and V4-Pro, up to
# 26 pairs on an H200 (benchmarks/results/experts_blocks_h200.jsonl), above on an H100
# (experts_blocks_h100.jsonl); see docs/performance/experts.md.
_W4A8_PAIRS_AN_EXPERT = 5
_W4A8_BLOCKS = ((13, 16), (26, 32), (52, 64), (float("inf"), 128))
_SCALED_SUMS = (16, 32)
# Stages are 256 channels where sums are scaled, otherwise 128.
_MOST_W4A8_STAGES = {16: 6, 32: 6, 64: 8, 128: 8}
# Registers of a consumer's and of any other thread, by block size, as needed without spilling. Two
# consumer warpgroups and one warpgroup of the others have 504 a thread together.
_W4A8_REGISTERS = {16: (216, 72), 32: (216, 72), 64: (208, 88), 128: (216, 72)}


def _w4a8_stages(block_m: int, width: int, quant_block: int) -> int:
    """Return how many stages fit beside the barriers and the epilogue's scratch."""
    if block_m in _SCALED_SUMS:
        stage = 128 * 128 + block_m * (256 + 4 * 256 // quant_block) + 2 * 128 * 16
        rest = 8192 + 2048
    else:
        # Two tiles' scales are kept besides.
        stage = 128 * 64 + block_m * (128 + 4)
        rest = 2 * (width // 128) * 512 + 8192 + 2048
    return min(_MOST_W4A8_STAGES[block_m], (_SHARED - rest) // stage)


def choose_w4a8_config(
    shape: ExpertsShape, quant_block: int = FP8_BLOCK, block_m: int = 0
) -> W4A8Config | None:
    """Return the W4A8 config for many pairs an expert, or for ``block_m``; None if none suits."""
    blocks = (block for most, block in _W4A8_BLOCKS if shape.pairs <= most * shape.experts)
    block_m = block_m or next(blocks)
    whole = 256 if block_m in _SCALED_SUMS else 512
    if shape.inner % whole or shape.d % whole:
        return None
    if quant_block != FP8_BLOCK and block_m not in _SCALED_SUMS:
        return None
    stages = [_w4a8_stages(block_m, width, quant_block) for width in (shape.d, shape.inner)]
    if min(stages) < 3:
        return None
    return W4A8Config(block_m, stages[0], stages[1], *_W4A8_REGISTERS[block_m])


def takes_w4a8(
    shape: ExpertsShape, quant_block: int, projections: Sequence[list[Tensor] | Tensor]
) -> bool:
    """Return True if ``gluon_sm90`` runs a call by W4A8, False if by persistent CTAs.

    Args:
        shape: sizes of the call.
        quant_block: number of channels that share an activation's scale.
        projections: tensors of w1, w3, w2, s1, s3 and s2. TMA steps from expert to expert, so they
            must lie at even distances, at multiples of 16 bytes.
    """
    many = shape.pairs > _W4A8_PAIRS_AN_EXPERT * shape.experts
    if not many or choose_w4a8_config(shape, quant_block) is None:
        return False
    return all(lie_evenly(*expected_addresses(each), each[0].shape[-1]) for each in projections)


# --- experts on a CPU ----------------------------------------------------------------------------

# Pairs an expert, on average, up to which weights are decoded in registers instead of in memory,
# and pairs whose rows are kept at a time. 4096 x 4096 on one core, ms by numba and by torch: 64
# rows of MXFP4 15 and 28, of FP8 23 and 29; 128 rows of MXFP4 34 and 39, of FP8 45 and 37.
_NUMBA_PAIRS_AN_EXPERT = 64
MAX_NUMBA_PAIRS = 4096
NUMBA_CHANNEL_STEP = 32


def numba_support(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: list[Tensor] | Tensor,
    *rest: object,
    weight_format: str,
    **_: object,
) -> Support:
    """Return support of numba's ``experts``: packed weights on a CPU, few pairs an expert."""
    problem = numba_problem()
    if problem:
        return Support(False, problem)
    if x.device.type != "cpu":
        return Support(False, f"CPU tensors, got {x.device.type}")
    if x.dtype == torch.float64:
        return Support(False, "computes in float32, but x is float64")
    if weight_format not in ("fp8", "mxfp4"):
        return Support(False, f"experts of fp8 or mxfp4 weights, got {weight_format}")
    if not len(w1):
        return Support(False, "at least one expert")
    sizes = w1[0].shape[0], x.shape[1]
    if any(size % NUMBA_CHANNEL_STEP for size in sizes):
        return Support(False, f"sizes of whole {NUMBA_CHANNEL_STEP} channels, got {sizes}")
    return Support(True, automatic=ids.numel() <= _NUMBA_PAIRS_AN_EXPERT * len(w1))


def gluon_support(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *projections: list[Tensor] | Tensor,
    weight_format: str,
    quantize_activations: bool,
    quant_block: int = FP8_BLOCK,
    **_: object,
) -> Support:
    """Return support of ``gluon_sm90``'s ``experts``: MXFP4 and quantised activations."""
    support = triton_support(x)
    if not support:
        return support
    if not runs_gluon(x.device):
        return Support(False, "instructions of sm_90, and triton 3.6 or newer")
    if weight_format != "mxfp4" or not quantize_activations or x.dtype is not torch.bfloat16:
        return Support(False, "only mxfp4 experts and bfloat16 activations that are quantised")
    w1 = projections[0]
    if not len(w1) or not ids.numel():
        return Support(False, "at least one expert and one pair")
    (tokens, k), inner, d = ids.shape, w1[0].shape[0], x.shape[1]
    if inner % 128 or d % 128:
        return Support(False, f"whole blocks of 128 channels, got {(inner, d)}")
    shape = ExpertsShape(tokens, k, len(w1), inner, d)
    if takes_w4a8(shape, quant_block, projections):
        return Support(True)
    if choose_sm90_config(shape, quant_block) is None:
        wanted = "few pairs of experts that fit shared memory"
        if quant_block == FP8_BLOCK:
            wanted += ", or many of whole 512 channels at even distances"
        return Support(False, f"{wanted}, got {ids.numel()} pairs of {(inner, d)}")
    alignments = [*map(expected_alignment, projections)]
    if min(alignments[:3]) < 16 or min(alignments[3:]) < 4:
        return Support(False, "matrices at multiples of 16 bytes, scales at multiples of 4")
    return Support(True)


# --- experts by Triton ---------------------------------------------------------------------------

# Without ``swap_ab``: most pairs that are each a block of their own, since grouping them would cost
# a launch. With it, one token's pairs belong to different experts anyway.
_MAX_UNGROUPED_PAIRS = 64
# Without ``swap_ab``: most pairs in a block.
_MAX_BLOCK_M = 64
# Targets whose matrix instructions read the decoded weight from shared memory.
OPERANDS_IN_SHARED = ("sm_90", "sm_100")
# MXFP4 with ``swap_ab``: most pairs an expert for which scales multiply sums of 32 channels; above,
# they are multiplied into bfloat16 operands, once for all columns. Measured with V4-Flash, 32
# experts, 32 tokens (6 pairs an expert) and 128 (24). mma.sync, as sm_80 on an H200, 24 pairs: 437
# us by scaled sums, 584 by bfloat16.
_MAX_SCALED_SUMS, _MAX_SCALED_SUMS_MMA = 12, 24
# Largest number of pairs an expert for which twice the CTAs beat larger tiles. V4-Flash, 32
# experts, 8 tokens.
_MAX_SMALL_TILES = 3
# mma.sync: most pairs an expert of blocks of 8; V4-Flash, 32 experts, 32 tokens 172 us and by
# blocks of 16 229, 64 tokens 287 and 257; 256 experts, 512 tokens 406 and 431. Most comparisons of
# pairs with experts for which blocks without gaps, found while x is quantised, are faster: V4-Pro,
# an eighth of each of 384 experts, 16 tokens 154 us and 168 with gaps, 64 tokens 407 and 387.
_MAX_PAIRS_OF_EIGHT = 6
_MAX_COMPARISONS = 1 << 16
# mma.sync: most CTAs an SM with 64 rows of w1 and w3; rows and warps that share K. V4-Flash as
# sm_80 on an H200, us with 32 rows and 4 warps, 64 and 4, 64 and 2: an eighth of each, 8 tokens 63,
# 64, 68; 16 tokens 104, 102, 99; all of 256 experts, 8 tokens 258, 249, 239; 128 tokens 1,290,
# 1,230, 1,151. V4-Pro, an eighth of each, 16 tokens 184, 177, 193. w2 always has 64 rows and two
# warps: all of V4-Flash, 8 tokens 219 for 231 with four warps and 237 with 32 rows.
_K_WARPS_TILES = ((4, 32, 4), (10, 64, 4), (float("inf"), 64, 2))
# Largest number of pairs an expert, then pairs of a block, channels of a step, warps and stages.
# V4-Flash, 32 experts; 128, 256 and 4,096 tokens.
_BF16_TILES = ((32, 32, 128, 8, 3), (64, 64, 64, 8, 3), (float("inf"), 128, 64, 8, 3))
# The same for mma.sync. As sm_80 on an H200, an eighth of V4-Flash, 24, 48, 96 and 384 pairs an
# expert: 584, 908, 1,430 and 4,785 us, and by the tiles above 682, 1,030, 1,533 and 5,188.
_BF16_MMA_TILES = ((32, 32, 64, 4, 3), (64, 64, 64, 4, 3), (float("inf"), 128, 32, 8, 4))


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tile shape and pipeline of the Triton grouped GEMMs.

    Attributes:
        swap_ab: True if the weight's rows are rows of the matrix instruction, and pairs its
            columns.
        grouped: True if an expert's pairs share blocks, False if each pair is a block of its own.
        block_m: number of pairs in a block.
        block_n: rows of the weight in a tile; with ``swap_ab``, those of w1 and w3 together.
        block_k: channels of a step of the main loop.
        operand: dtype of the matrix instruction's operands.
        num_warps: number of warps of a CTA.
        num_stages: number of stages of the software pipeline.
        wide_loads: True if a step reads its part of a weight row in one load (only with
            ``swap_ab``).
        k_warps: number of warps that share a step's channels; 0 if they share the tile's rows (only
            with ``swap_ab``).
        adjacent: True if the blocks of grouped pairs have no gaps, and x is quantised with them.
        down: config of w2 if its tile or pipeline is another than that of w1 and w3.
    """

    swap_ab: bool
    grouped: bool
    block_m: int
    block_n: int
    block_k: int
    operand: torch.dtype
    num_warps: int
    num_stages: int
    wide_loads: bool = False
    k_warps: int = 0
    adjacent: bool = False
    down: GemmConfig | None = None


def choose_config(shape: ExpertsShape, formats: ExpertFormats, target: Target) -> GemmConfig:
    """Choose the config for pairs that are spread evenly over the experts."""
    if _takes_swap_ab(shape, formats, target):
        return _swap_ab_config(shape, formats, target)
    operand = operand_dtype(formats.x, formats.weight, formats.stored, formats.quantized, target)
    grouped = shape.pairs > _MAX_UNGROUPED_PAIRS
    rows = min(_MAX_BLOCK_M, shape.pairs // max(1, shape.experts)) if grouped else 1
    tile = choose_tile(rows, operand, target)
    if target.narrow and formats.weight == "fp8":
        # A tile's two products of 64 channels spill up to 76 registers, of 32 none.
        tile = dataclasses.replace(tile, block_k=32)
    if formats.quantized or formats.weight == "fp8":
        tile = within_quant_blocks(tile, formats.quant_block)
    block_k = tile.block_k
    if tile.block_m == _MAX_BLOCK_M and target.name not in OPERANDS_IN_SHARED:
        # Operands pass through registers on that target, and decoding takes more of them.
        block_k = 32
    elif target.intel and formats.x is torch.float16 and operand == torch.bfloat16:
        # Each value of x needs two operands, which spill 66 registers with 128 channels.
        block_k = 32
    # A tile has two products; the warps of a linear layer spill 154 registers on Arc B.
    warps = tile.num_warps * (2 if target.intel and not target.arc_a else 1)
    if target.name == "xpu_pvc" and formats.weight == "mxfp4" and tile.block_m == 16:
        warps = 16  # 8 warps spill 6 registers there
    return GemmConfig(
        False, grouped, tile.block_m, tile.block_n, block_k, operand, warps, tile.num_stages
    )


def _takes_swap_ab(shape: ExpertsShape, formats: ExpertFormats, target: Target) -> bool:
    """Return True for whole quant blocks and tiles, at addresses that allow wide loads."""
    if target.arc_a:
        return False
    if formats.weight == "fp8":
        # Wide rows of codes do not fit in RDNA's registers.
        known, scale_alignment = formats.quantized and not target.narrow, 1
    else:
        known = formats.weight == "mxfp4" and (formats.quantized or formats.x is torch.bfloat16)
        scale_alignment = 4
    whole = shape.inner % 128 == shape.d % 128 == 0
    aligned = formats.weight_alignment >= 16 and formats.scale_alignment >= scale_alignment
    return known and whole and aligned


def _swap_ab_config(shape: ExpertsShape, formats: ExpertFormats, target: Target) -> GemmConfig:
    grouped, share = shape.tokens > 1, shape.pairs_per_expert
    if formats.weight == "fp8":
        # Sums of 128 e4m3 products would keep 13 bits on Hopper. On Intel, 4 warps spill 97
        # registers.
        warps = 8 if target.intel else 4
        return GemmConfig(True, grouped, 16, 64, 128, torch.float16, warps, 4)
    mma = uses_mma_sync(target)
    most_scaled = _MAX_SCALED_SUMS_MMA if mma else _MAX_SCALED_SUMS
    rehearsed = shape.rehearsed.pairs_per_expert
    if not formats.quantized or rehearsed > most_scaled:
        share = max(share, min(rehearsed, 2 * most_scaled))
        tiles = _BF16_MMA_TILES if mma and formats.quantized else _BF16_TILES
        block_m, block_k, warps, stages = next(tile for most, *tile in tiles if share <= most)
        # On Intel, 128 pairs in float16 spill 18 registers.
        few = target.narrow or (target.intel and formats.x is torch.float16)
        block_m = min(block_m, 64) if few else block_m
        # On Intel, steps of one scale take half the instructions; longer steps spill 51 registers.
        block_k = 32 if target.intel else block_k
        stages = 2 if target.narrow else stages
        return GemmConfig(True, grouped, block_m, 128, block_k, torch.bfloat16, warps, stages)
    if mma:
        return _k_warps_config(shape.rehearsed, target)
    operand = torch.float8_e4m3fn if target.dot_e4m3 else torch.float16
    if not uses_wgmma(target):
        return GemmConfig(True, grouped, 16, 64, 128, operand, 4, 2 if target.narrow else 4)
    # A warpgroup waits for its products once a step, so long steps wait less often.
    block_n = 64 if share <= _MAX_SMALL_TILES else 128
    block_k = 128 if shape.inner % 256 or shape.d % 256 else 256
    return GemmConfig(True, grouped, 16, block_n, block_k, operand, 4, 3, wide_loads=True)


def _k_warps_config(shape: ExpertsShape, target: Target) -> GemmConfig:
    """Choose tiles whose channels are shared by warps, for mma.sync."""
    block_m = 8 if shape.pairs_per_expert <= _MAX_PAIRS_OF_EIGHT else 16
    blocks = min(shape.pairs, shape.experts)

    def tile(rows: int, warps: int, width: int, down: GemmConfig | None = None) -> GemmConfig:
        warps = math.gcd(width // 128, warps)
        return GemmConfig(
            True, shape.tokens > 1, block_m, rows, 128 * warps, torch.float16, warps, 3,
            k_warps=warps, adjacent=shape.pairs * shape.experts <= _MAX_COMPARISONS, down=down,
        )  # fmt: skip

    waves = blocks * shape.inner // 32 / target.sm_count
    rows, warps = next((rows, warps) for most, rows, warps in _K_WARPS_TILES if waves <= most)
    return tile(rows, warps, shape.d, tile(64, 2, shape.inner))


# --- grouping of pairs, and elementwise kernels --------------------------------------------------

# Pairs that an alignment CTA takes at a time, at most and of a token or two; channels of a combine
# CTA and of a SwiGLU CTA.
ALIGN_PAIRS, _PAIRS_OF_A_TOKEN = 1024, 16
COMBINE_CHANNELS = 1024
SWIGLU_CHANNELS = 2048


@dataclasses.dataclass(frozen=True)
class AlignConfig:
    """Sizes of the kernel that groups pairs without gaps; each expert has a CTA.

    Attributes:
        experts: number of experts, rounded up to a power of two.
        compared: pairs that are compared with all experts at once, as many as registers hold.
        placed: number of pairs among which an expert finds its own at a time.
        num_warps: number of warps of a CTA, and of quant blocks that a CTA quantises.
    """

    experts: int
    compared: int
    placed: int
    num_warps: int


def choose_align_config(pairs: int, experts: int, block_m: int) -> AlignConfig:
    """Choose sizes; V4-Flash, 256 experts, 128 tokens: 22 us, but 56 us with 64 pairs at a time."""
    few, padded = experts <= 64, next_power_of_2(experts)
    compared = (1 << 15 if few else 1 << 14) // padded
    placed = ALIGN_PAIRS
    if block_m == 8:  # for at most some pairs an expert
        one_token = pairs <= _PAIRS_OF_A_TOKEN <= experts
        placed = _PAIRS_OF_A_TOKEN if one_token else min(max(16, 4 * padded), ALIGN_PAIRS)
    return AlignConfig(padded, max(16, min(placed, compared)), placed, 8 if few else 16)


# --- routers -------------------------------------------------------------------------------------

# CTAs that suffice for the scores' GEMM, and the shortest split of its channels.
_ROUTER_CTAS, _SHORTEST_SPLIT = 256, 256
# Largest number of tokens for which each token has its own CTA, whose threads find its experts.
_MAX_WARP_TOKENS = 512
# Scores of a CTA if there are more tokens, and most tokens of a CTA.
_ROUTE_SCORES, _MAX_ROUTE_TOKENS = 2048, 16


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Tile sizes of the scores' GEMM and of the top-k.

    Attributes:
        block_m: tokens in a tile of scores.
        block_n: experts in a tile of scores.
        block_k: channels of a step of the main loop.
        warps: number of warps of a score tile's CTA.
        split: number of channels of a split.
        splits: number of splits of the channels.
        route_tokens: number of tokens of a CTA that finds the top-k.
        experts: number of experts, rounded up to a power of two.
        unroll: number of splits that are loaded at once.
        route_warps: number of warps of a CTA that finds the top-k.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    split: int
    splits: int
    route_tokens: int
    experts: int
    unroll: int
    route_warps: int


def choose_router_config(
    tokens: int, experts: int, width: int, same_dtype: bool, target: Target
) -> RouterConfig:
    """Choose tiles; ``same_dtype`` if matrix instructions take both operands unconverted."""
    matrix = same_dtype and not target.arc_a
    block_m, block_n, block_k = (16, 32, 64 if matrix else 32)
    if matrix and tokens > 16:
        block_m, block_n = 64, 64
    tiles = -(-experts // block_n) * -(-tokens // block_m)
    splits = max(1, min(_ROUTER_CTAS // max(1, tiles), width // _SHORTEST_SPLIT))
    split = -(-width // (splits * block_k)) * block_k
    padded = next_power_of_2(experts)
    if tokens <= _MAX_WARP_TOKENS:
        # Loading splits one by one would take most of the kernel's time.
        route = (1, padded, 8 if padded <= 256 else 4, 1)
    else:
        route = (max(1, min(_MAX_ROUTE_TOKENS, _ROUTE_SCORES // padded)), padded, 1, 4)
    if target.intel:
        # Half as many warps spill 38 registers, and 88 on Arc A.
        route = (*route[:3], (4 if target.arc_a else 2) * route[3])
    warps = 16 if target.arc_a else 4
    return RouterConfig(block_m, block_n, block_k, warps, split, -(-width // split), *route)

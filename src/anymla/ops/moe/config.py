"""Every choice of the experts' and routers' kernels, as pure functions of shapes and the target.

The experts are two grouped GEMMs, of w1 and w3 together and of w2, whose rows are (token, expert)
pairs grouped by expert in blocks of ``block_m``:

- "gluon_sm90" (``choose_sm90_config``): MXFP4 weights and quantised activations, few pairs an
  expert; persistent CTAs load the weights without a gap between work tiles.
- "gluon_sm90_w4a8" (``choose_w4a8_config``): the same with more pairs an expert; weights are
  operands of the FP8 instruction, scales included.
- "triton" (``choose_config``): with ``swap_ab`` rows of the weight are rows of the matrix
  instruction, and it goes from memory into registers without masks; else any format and size.

Thresholds were measured on an H200; docs/performance/experts.md has the rows named beside them.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.ops._few_tokens import FEW_ELEMENTS, few_tokens_support
from anymla.ops._gemm_config import (
    choose_tile,
    operand_dtype,
    uses_wgmma,
    within_quant_blocks,
)
from anymla.ops.device import TARGETS, Target, numba_problem, runs_gluon, triton_support
from anymla.ops.moe.inputs import expected_addresses, expected_alignment, lie_evenly
from anymla.ops.moe.shapes import ExpertFormats, ExpertsShape
from anymla.ops.registry import Support

# --- experts on Hopper ---------------------------------------------------------------------------

_SHARED = TARGETS["sm_90"].shared_bytes
_SHARED_OF_SM = _SHARED + 1024
_RESERVED = 1024  # of a CTA


@dataclasses.dataclass(frozen=True)
class Sm90Config:
    """Tile and pipeline of one grouped GEMM.

    Attributes:
        block_m: pairs of a block.
        block_n: rows of the weight, 16 a warp.
        block_k: channels of a stage.
        stages: of the ring.
        ctas_per_sm: resident at a time.
        in_flight: products in flight while those before are added up.
        quantize_batch: of w2's input, K blocks of 128 channels of a row that are loaded at once.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    ctas_per_sm: int
    in_flight: int
    quantize_batch: int = 1


# Pairs an expert up to which a block nearly always holds all of them; configs of w1 and w3, and of
# w2, the first that fits shared memory. V4-Flash and V4-Pro with 32 experts, and V4.1-Flash, whose
# w2 has no whole stages of 512 channels: 384 experts, 1, 8, 32 and 128 tokens 54, 255, 782 and
# 1,710 us, by three CTAs of 256 channels 66, 273, 824 and 1,792, by Triton 64, 399, 1,184, 2,557.
_SM90_CONFIGS = (
    # 1, 2 and 8 tokens of both; 128 tokens and 256 experts.
    (
        3,
        (
            Sm90Config(8, 64, 512, 2, 3, 4),
            Sm90Config(8, 64, 512, 4, 2, 4),
            Sm90Config(8, 64, 256, 4, 3, 4),
            Sm90Config(8, 64, 256, 8, 2, 4),
        ),
        (Sm90Config(8, 64, 512, 3, 3, 4, 8), Sm90Config(8, 64, 256, 3, 4, 4, 8)),
    ),
    # 32 tokens. V4-Pro's fit with one CTA of 128 rows only; by themselves they are 3 % slower than
    # Triton's, a layer is 3 to 6 % faster, since those of Triton do not use PDL. Blocks of 16, of
    # 32 and Triton, us: V4-Flash, 256 experts, 12 pairs an expert 1,194, 1,528, 1,328; 18: 1,720,
    # 1,520, 1,812; 32 experts, 12: 158, 201, 178; 18: 231, 205, 262. V4-Pro, 48 experts, 16: 759,
    # none, 911.
    (
        16,
        (
            Sm90Config(16, 64, 512, 2, 2, 4),
            Sm90Config(16, 64, 256, 4, 2, 4),
            Sm90Config(16, 128, 512, 4, 1, 4),
            Sm90Config(16, 128, 256, 8, 1, 4),
        ),
        (
            Sm90Config(16, 64, 512, 3, 2, 4, 4),
            Sm90Config(16, 64, 256, 3, 3, 4, 4),
            Sm90Config(16, 128, 512, 3, 1, 4, 4),
            Sm90Config(16, 128, 256, 6, 1, 4, 4),
        ),
    ),
    # V4-Flash, 128 tokens.
    (
        26,
        (Sm90Config(32, 128, 512, 2, 1, 0), Sm90Config(32, 128, 256, 4, 1, 0)),
        (Sm90Config(32, 128, 512, 3, 1, 0, 2), Sm90Config(32, 128, 256, 6, 1, 0, 2)),
    ),
)
# Pairs an expert up to which activations with a scale for 32 channels, whose sums take more work,
# are left to it: V4.1-Flash, 384 experts, 8: 2,625 us, Triton 2,853; 16: 3,827, 3,823.
_MOST_PAIRS_OF_SMALL_BLOCKS = 12


def _fitted(
    configs: tuple[Sm90Config, ...], width: int, quant_block: int, *, loads_activations: bool
) -> Sm90Config | None:
    """The first of which shared memory holds two stages or more, with as many as it holds.

    Where activations are loaded with the weights, a tile has more stages than the ring.
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
    """For w1 and w3, and for w2; None if there is none."""
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
    """Blocks and pipelines of the grouped GEMMs by the FP8 instruction.

    Attributes:
        block_m: pairs of a block, 32, 64 or 128.
        gate_up_stages: of the ring of w1 and w3.
        down_stages: of w2's.
        consumer_registers: of a thread of the second consumer.
        producer_registers: of a thread that is no consumer's.
    """

    block_m: int
    gate_up_stages: int
    down_stages: int
    consumer_registers: int
    producer_registers: int


# Pairs an expert beyond which it is chosen, and blocks with the pairs an expert up to which they
# are: in larger ones more than half would be empty or nearly. Measured on an H100 with 6 to 192
# pairs an expert: benchmarks/results/experts_blocks_h100.jsonl, docs/performance/experts.md.
_W4A8_PAIRS_AN_EXPERT = 11
_W4A8_BLOCKS = ((26, 32), (48, 64), (float("inf"), 128))
_MAX_W4A8_STAGES = 8
# Of a consumer's and of another thread, by blocks: what they need without spilling. Two warpgroups
# of consumers and one of the others have 504 together.
_W4A8_REGISTERS = {32: (208, 88), 64: (208, 88), 128: (216, 72)}


def _w4a8_stages(block_m: int, width: int) -> int:
    """Stages that shared memory holds beside two tiles' scales and the epilogue's scratch."""
    stage = 128 * 64 + block_m * (128 + 4)
    rest = 2 * (width // 128) * 512 + 8192 + 2048
    return min(_MAX_W4A8_STAGES, (_SHARED - rest) // stage)


def choose_w4a8_config(shape: ExpertsShape, block_m: int = 0) -> W4A8Config | None:
    """For many pairs an expert, or for blocks of so many; None if there is none."""
    if shape.inner % 512 or shape.d % 512:
        return None
    blocks = (block for most, block in _W4A8_BLOCKS if shape.pairs <= most * shape.experts)
    block_m = block_m or next(blocks)
    stages = _w4a8_stages(block_m, shape.d), _w4a8_stages(block_m, shape.inner)
    return W4A8Config(block_m, *stages, *_W4A8_REGISTERS[block_m]) if min(stages) >= 3 else None


# --- experts on a CPU ----------------------------------------------------------------------------

# Pairs an expert, on average, up to which weights are decoded in registers rather than first, and
# pairs whose rows are kept at a time. 4096 x 4096, one core: 64 rows of MXFP4 15 ms by numba and
# 28 by torch, of FP8 23 and 29; 128 rows 34 and 39, 45 and 37.
_NUMBA_PAIRS_AN_EXPERT = 64
MAX_NUMBA_PAIRS = 4096
NUMBA_CHANNEL_STEP = 32


def numba_support(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: list[Tensor] | Tensor,
    w3: list[Tensor] | Tensor,
    w2: list[Tensor] | Tensor,
    s1: list[Tensor] | Tensor,
    *rest: object,
    weight_format: str,
    **_: object,
) -> Support:
    """``supports`` of ``experts`` by numba."""
    problem = numba_problem()
    if problem:
        return Support(False, problem)
    if x.device.type != "cpu":
        return Support(False, f"CPU tensors, got {x.device.type}")
    if x.dtype == torch.float64:
        return Support(False, "computes in float32, but x is float64")
    if weight_format == "nvfp4":
        return Support(False, "experts with scales of powers of two or in float32, got nvfp4")
    if not len(w1):
        return Support(False, "at least one expert")
    if weight_format == "plain":
        support = few_tokens_support(len(x), (x, w1[0], w3[0], w2[0]), (weights,))
        return support and Support(True, automatic=w1[0].numel() <= FEW_ELEMENTS)
    sizes = w1[0].shape[0], x.shape[1]
    if any(size % NUMBA_CHANNEL_STEP for size in sizes):
        return Support(False, f"sizes of whole {NUMBA_CHANNEL_STEP} channels, got {sizes}")
    return Support(True, automatic=ids.numel() <= _NUMBA_PAIRS_AN_EXPERT * len(w1))


def numba_hash_support(
    x: Tensor, gate: Tensor, token_ids: Tensor, tid2eid: Tensor, *, scale: float
) -> Support:
    """``supports`` of ``route_hash`` by numba."""
    return few_tokens_support(len(x), (x,), (gate,))


def numba_router_support(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    *,
    k: int,
    scale: float,
    is_valid: Tensor | None = None,
) -> Support:
    """``supports`` of ``route_biased`` by numba."""
    support = few_tokens_support(len(x), (x,), (gate, bias))
    return support and Support(True, automatic=gate.numel() <= FEW_ELEMENTS)


def numba_swiglu_support(
    gate: Tensor,
    up: Tensor,
    limit: float,
    *,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
) -> Support:
    """``supports`` of ``swiglu`` by numba."""
    if codes is not None:
        return Support(False, "rows that are not quantised as well")
    return few_tokens_support(gate.numel() // max(1, gate.shape[-1]), (gate, up))


def _hopper_support(
    x: Tensor,
    ids: Tensor,
    w1: list[Tensor] | Tensor,
    weight_format: str,
    quantize_activations: bool,
) -> Support:
    """What both of Hopper's grouped GEMMs ask for."""
    support = triton_support(x)
    if not support:
        return support
    if not runs_gluon(x.device):
        return Support(False, "instructions of sm_90, and triton 3.6 or newer")
    if weight_format != "mxfp4" or not quantize_activations or x.dtype is not torch.bfloat16:
        return Support(False, "only mxfp4 experts and bfloat16 activations that are quantised")
    if not len(w1) or not ids.numel():
        return Support(False, "at least one expert and one pair")
    return support


def gluon_support(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: list[Tensor] | Tensor,
    w3: list[Tensor] | Tensor,
    w2: list[Tensor] | Tensor,
    s1: list[Tensor] | Tensor,
    s3: list[Tensor] | Tensor,
    s2: list[Tensor] | Tensor,
    *,
    weight_format: str,
    swiglu_limit: float,
    quantize_activations: bool,
    expert_offset: int = 0,
    shared: Tensor | None = None,
    quant_block: int = FP8_BLOCK,
    global_scales: Tensor | None = None,
) -> Support:
    """``supports`` of ``experts``; nothing is launched."""
    support = _hopper_support(x, ids, w1, weight_format, quantize_activations)
    if not support:
        return support
    (tokens, k), inner, d = ids.shape, w1[0].shape[0], x.shape[1]
    if inner % 128 or d % 128:
        return Support(False, f"whole blocks of 128 channels, got {(inner, d)}")
    if choose_sm90_config(ExpertsShape(tokens, k, len(w1), inner, d), quant_block) is None:
        return Support(False, f"few pairs of experts that fit shared memory, got {ids.numel()}")
    matrices, scales = (w1, w3, w2), (s1, s3, s2)
    if min(map(expected_alignment, matrices)) < 16 or min(map(expected_alignment, scales)) < 4:
        return Support(False, "matrices at multiples of 16 bytes, scales at multiples of 4")
    return Support(True)


def w4a8_support(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: list[Tensor] | Tensor,
    w3: list[Tensor] | Tensor,
    w2: list[Tensor] | Tensor,
    s1: list[Tensor] | Tensor,
    s3: list[Tensor] | Tensor,
    s2: list[Tensor] | Tensor,
    *,
    weight_format: str,
    swiglu_limit: float,
    quantize_activations: bool,
    expert_offset: int = 0,
    shared: Tensor | None = None,
    global_scales: Tensor | None = None,
) -> Support:
    """``supports`` of ``experts``, by the FP8 instruction; nothing is launched."""
    support = _hopper_support(x, ids, w1, weight_format, quantize_activations)
    if not support:
        return support
    (tokens, k), inner, d = ids.shape, w1[0].shape[0], x.shape[1]
    shape = ExpertsShape(tokens, k, len(w1), inner, d)
    if choose_w4a8_config(shape) is None:
        return Support(False, f"whole multiples of 512 channels, got {(inner, d)}")
    for each in (w1, w3, w2, s1, s3, s2):
        if not lie_evenly(*expected_addresses(each), each[0].shape[-1]):
            return Support(False, "experts at even distances, at multiples of 16 bytes")
    return Support(True, automatic=shape.pairs > _W4A8_PAIRS_AN_EXPERT * shape.experts)


# --- experts by Triton ---------------------------------------------------------------------------

# Up to so many pairs each is a block of its own: grouping them would cost a launch. Without
# ``swap_ab``; with it, one token's pairs are of different experts anyway.
_MAX_UNGROUPED_PAIRS = 64
# Without ``swap_ab``: pairs of the largest block.
_MAX_BLOCK_M = 64
# Targets whose matrix instructions read the decoded weight from shared memory.
OPERANDS_IN_SHARED = ("sm_90", "sm_100")
# MXFP4 with ``swap_ab``: up to so many pairs an expert, scales are factors of sums of 32 channels;
# beyond, they are multiplied into bfloat16 operands, once for all columns. V4-Flash, 32 experts:
# 32 tokens (6 pairs an expert) and 128 (24).
_MAX_SCALED_SUMS = 12
# Up to so many, twice the CTAs are worth more than larger tiles. V4-Flash, 32 experts, 8 tokens.
_MAX_SMALL_TILES = 3
# Block of pairs and of channels up to so many pairs an expert. V4-Flash, 32 experts: 128, 256 and
# 4,096 tokens.
_BF16_TILES = ((32, 32, 128), (48, 64, 64), (float("inf"), 128, 64))


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tile of the Triton grouped GEMMs.

    Attributes:
        swap_ab: rows of the weight are rows of the matrix instruction, pairs its columns.
        grouped: pairs of an expert share blocks; otherwise each pair is a block of its own.
        block_m: pairs of a block.
        block_n: rows of the weight; with ``swap_ab`` those of w1 and w3 together.
        block_k: channels of a step.
        operand: dtype of the instruction's operands.
        num_warps: of a CTA.
        num_stages: pipeline depth.
        wide_loads: with ``swap_ab``, all that a step reads of a row of the weight is one load.
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


def choose_config(shape: ExpertsShape, formats: ExpertFormats, target: Target) -> GemmConfig:
    """The config for pairs that are spread evenly over the experts."""
    if _takes_swap_ab(shape, formats, target):
        return _swap_ab_config(shape, formats, target)
    operand = operand_dtype(formats.x, formats.weight, formats.stored, formats.quantized, target)
    grouped = shape.pairs > _MAX_UNGROUPED_PAIRS
    rows = min(_MAX_BLOCK_M, shape.pairs // max(1, shape.experts)) if grouped else 1
    tile = choose_tile(rows, operand, target)
    if formats.quantized or formats.weight == "fp8":
        tile = within_quant_blocks(tile, formats.quant_block)
    block_k = tile.block_k
    if tile.block_m == _MAX_BLOCK_M and target.name not in OPERANDS_IN_SHARED:
        # Operands pass through registers there, and decoding takes more of them.
        block_k = 32
    elif target.intel and formats.x is torch.float16 and operand == torch.bfloat16:
        # Two operands for each of x, which spill 66 registers with 128 channels.
        block_k = 32
    # Two products follow each other: the warps of a linear layer spill 154 registers on Arc B.
    warps = tile.num_warps * (2 if target.intel and not target.arc_a else 1)
    if target.name == "xpu_pvc" and formats.weight == "mxfp4" and tile.block_m == 16:
        warps = 16  # 8 spill 6 registers there
    return GemmConfig(
        False, grouped, tile.block_m, tile.block_n, block_k, operand, warps, tile.num_stages
    )


def _takes_swap_ab(shape: ExpertsShape, formats: ExpertFormats, target: Target) -> bool:
    """Whole quant blocks and tiles, at addresses for wide loads."""
    if target.arc_a:
        return False
    if formats.weight == "fp8":
        # Wide rows of codes do not fit the registers of RDNA.
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
        # Hopper's sums of 128 products of e4m3 would keep 13 bits. Intel: 4 warps spill 97
        # registers.
        warps = 8 if target.intel else 4
        return GemmConfig(True, grouped, 16, 64, 128, torch.float16, warps, 4)
    if not formats.quantized or share > _MAX_SCALED_SUMS:
        block_m, block_k = next((m, k) for most, m, k in _BF16_TILES if share <= most)
        # Intel: 128 pairs of float16 spill 18 registers.
        few = target.narrow or (target.intel and formats.x is torch.float16)
        block_m = min(block_m, 64) if few else block_m
        # Steps of one scale take half as many instructions there; longer ones spill 51 registers.
        block_k = 32 if target.intel else block_k
        return GemmConfig(True, grouped, block_m, 128, block_k, torch.bfloat16, 8, 3)
    operand = torch.float8_e4m3fn if target.dot_e4m3 else torch.float16
    if not uses_wgmma(target):
        return GemmConfig(True, grouped, 16, 64, 128, operand, 4, 4)
    # A warpgroup waits for its products, the less often the longer a step is.
    block_n = 64 if share <= _MAX_SMALL_TILES else 128
    block_k = 128 if shape.inner % 256 or shape.d % 256 else 256
    return GemmConfig(True, grouped, 16, block_n, block_k, operand, 4, 3, wide_loads=True)


# --- grouping of pairs, and what is elementwise --------------------------------------------------

# Pairs that a CTA of the alignment, channels that one of the combine and of SwiGLU takes at once.
ALIGN_PAIRS = 1024
COMBINE_CHANNELS = 1024
SWIGLU_CHANNELS = 2048


@dataclasses.dataclass(frozen=True)
class AlignConfig:
    """How blocks without gaps are found; a CTA is an expert's.

    Attributes:
        experts: a power of two that is not below their number.
        compared: pairs that are compared with all experts at once, as many as registers hold.
        placed: pairs among which an expert finds its own at once.
        num_warps: of a CTA; it also quantises so many quant blocks.
    """

    experts: int
    compared: int
    placed: int
    num_warps: int


def choose_align_config(pairs: int, experts: int) -> AlignConfig:
    """V4-Flash, 256 experts, 128 tokens: 22 us, and 56 with 64 pairs at once."""
    few, padded = experts <= 64, next_power_of_2(experts)
    compared = (1 << 15 if few else 1 << 14) // padded
    pairs = max(16, next_power_of_2(pairs))
    return AlignConfig(
        padded, max(16, min(pairs, compared)), min(pairs, ALIGN_PAIRS), 8 if few else 16
    )


# --- routers -------------------------------------------------------------------------------------

# CTAs that are enough for the scores' GEMM, and the shortest split of its channels.
_ROUTER_CTAS, _SHORTEST_SPLIT = 256, 256
# Up to here a token is one warp's, whose threads find its experts by themselves.
_MAX_WARP_TOKENS = 512
# Scores of a CTA of more tokens, and the most tokens it takes.
_ROUTE_SCORES, _MAX_ROUTE_TOKENS = 2048, 16


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Tiles of the scores' GEMM, and of the top-k.

    Attributes:
        block_m: tokens of a tile of scores.
        block_n: its experts.
        block_k: channels of a step.
        warps: of a tile.
        split: channels of a split.
        splits: how many.
        route_tokens: of a CTA that finds the top-k.
        experts: a power of two that is not below their number.
        unroll: splits that are loaded at once.
        route_warps: of a CTA that finds the top-k.
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
    """Tiles for a call; ``same_dtype`` if matrix instructions take both operands as they are."""
    matrix = same_dtype and not target.arc_a
    block_m, block_n, block_k = (16, 32, 64 if matrix else 32)
    if matrix and tokens > 16:
        block_m, block_n = 64, 64
    tiles = -(-experts // block_n) * -(-tokens // block_m)
    splits = max(1, min(_ROUTER_CTAS // max(1, tiles), width // _SHORTEST_SPLIT))
    split = -(-width // (splits * block_k)) * block_k
    padded = next_power_of_2(experts)
    if tokens <= _MAX_WARP_TOKENS:
        # One by one, loads of splits would take most of the kernel's time.
        route = (1, padded, 8 if padded <= 256 else 4, 1)
    else:
        route = (max(1, min(_MAX_ROUTE_TOKENS, _ROUTE_SCORES // padded)), padded, 1, 4)
    if target.intel:
        # Half as many warps spill 38 registers, and 88 of Arc A's.
        route = (*route[:3], (4 if target.arc_a else 2) * route[3])
    warps = 16 if target.arc_a else 4
    return RouterConfig(block_m, block_n, block_k, warps, split, -(-width // split), *route)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n; 1 of none."""
    return 1 << max(0, n - 1).bit_length()

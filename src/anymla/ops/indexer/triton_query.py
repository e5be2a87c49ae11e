"""Index queries in Triton: RoPE, Hadamard transform and quantisation of each head.

The grid is (tokens, blocks of heads). A CTA holds its heads' channels, rotates the last of them by
the token's position, rounds and transforms them, and writes codes and the heads' weights.

                 channels
    heads  | ........ | rotated |  -> codes, scale bytes
           | ........ | rotated |     weight * scale
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.e2m1 import E2M1_MAX
from anymla.formats.e4m3 import E4M3_MAX
from anymla.formats.mxfp4 import MXFP4_AMAX_FLOOR, MXFP4_BLOCK
from anymla.formats.records import KV_AMAX_FLOOR
from anymla.formats.triton_cast import (
    exp2_int,
    exponent_to_ue8m0,
    fp32_to_e2m1,
    fp32_to_e4m3,
    widen,
)
from anymla.formats.triton_hadamard import hadamard as hadamard_rows
from anymla.formats.triton_rows import block_exponent
from anymla.ops import device as device_facts
from anymla.ops._triton_norm_rope import load_cos_sin, rotate
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch

# Channels in a CTA's tile, 16 per thread.
_TILE = 2048
_NUM_WARPS = 4


@dataclasses.dataclass(frozen=True)
class QuantRule:
    """Rule by which a quant block of channels becomes codes; a constexpr.

    Attributes:
        block: number of channels that share a scale; 0 if queries are not quantised.
        code_max: largest magnitude of a code.
        floor: lower bound of a block's largest magnitude, for its scale.
    """

    block: int
    code_max: float = 0.0
    floor: float = 0.0


@functools.cache
def quant_rule(quant: str, width: int) -> QuantRule:
    """Return the rule of "fp8", "mxfp4" or "none" for heads of ``width`` channels."""
    if quant == "fp8":
        return QuantRule(triton.next_power_of_2(width), E4M3_MAX, KV_AMAX_FLOOR)
    if quant == "mxfp4":
        return QuantRule(MXFP4_BLOCK, E2M1_MAX, MXFP4_AMAX_FLOOR)
    return QuantRule(0)


def heads_of(heads: int, width: int) -> int:
    """Return the number of heads in a CTA's tile."""
    padded = triton.next_power_of_2(width)
    return max(1, min(triton.next_power_of_2(heads), _TILE // padded))


@triton.jit(do_not_specialize=["length"])
def query_kernel(
    q,
    q_token_stride,
    q_head_stride,
    weights,
    weights_stride,
    positions,
    table,
    table_stride,
    length,
    weight_scale,
    out,
    out_scales,
    out_weights,
    heads,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    LOG: tl.constexpr,
    ROPE: tl.constexpr,
    RULE: tl.constexpr,
    PACKED: tl.constexpr,
    HADAMARD: tl.constexpr,
    NATIVE: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute codes and weights of HEADS heads of a token; PDL is that of ``pdl_launch``."""
    BLOCK: tl.constexpr = getattr(RULE, "block")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    exists = head < heads
    channel = tl.arange(0, PADDED)
    there = exists[:, None] & (channel < WIDTH)[None, :]
    line = q + token * q_token_stride + head[:, None].to(tl.int64) * q_head_stride
    x = tl.load(line + channel[None, :], mask=there, other=0.0)
    kind = x.dtype

    position = tl.load(positions + token + tl.arange(0, 1))
    cos, sin = load_cos_sin(
        table, table_stride, 1, length, position, position == position, WIDTH, ROPE, PADDED
    )
    # Round to q's dtype, as ``rope`` does, and then to bfloat16, as keys are.
    x = rotate(x.to(tl.float32), cos, sin, WIDTH, ROPE).to(kind)
    if BLOCK:
        x = x.to(tl.bfloat16)
    rounded = x.dtype
    x = widen(x)
    if HADAMARD:
        x = widen(hadamard_rows(x, LOG).to(rounded))

    row = token * heads + head
    weight = tl.load(weights + token * weights_stride + head, mask=exists, other=0.0)
    weight = weight.to(tl.float32) * weight_scale
    if BLOCK:
        BLOCKS: tl.constexpr = PADDED // BLOCK
        blocks = tl.reshape(x, (HEADS, BLOCKS, BLOCK))
        exponent = block_exponent(blocks, RULE)
        # Only a block that is not finite has a larger exponent.
        bounded = tl.minimum(exponent, 126)
        scaled = tl.reshape(blocks * exp2_int(-bounded)[:, :, None], (HEADS, PADDED))
        if PACKED:
            codes = tl.reshape(fp32_to_e2m1(scaled), (HEADS, PADDED // 2, 2))
            low, high = tl.split(codes)
            pair = tl.arange(0, PADDED // 2)
            kept = exists[:, None] & (pair < WIDTH // 2)[None, :]
            tl.store(
                out + row[:, None] * (WIDTH // 2) + pair[None, :], low | (high << 4), mask=kept
            )
            block = tl.arange(0, BLOCKS)
            kept = exists[:, None] & (block < WIDTH // BLOCK)[None, :]
            at = out_scales + row[:, None] * (WIDTH // BLOCK) + block[None, :]
            # The largest exponent of the format is 127; 255 would be NaN.
            tl.store(at, exponent_to_ue8m0(tl.minimum(exponent, 127)), mask=kept)
        else:
            codes = fp32_to_e4m3(scaled, NATIVE)
            tl.store(out + row[:, None] * WIDTH + channel[None, :], codes, mask=there)
            # 2^128 is infinite: the exponent field of float32 is all ones.
            scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
            weight = weight * tl.max(scale, 1)
    else:
        tl.store(out + row[:, None] * WIDTH + channel[None, :], x.to(kind), mask=there)
    tl.store(out_weights + row, weight, mask=exists)


def indexer_q_rope_quant(
    q: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    softmax_scale: float,
    head_scale: float,
    quant: str = "fp8",
    hadamard: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backend of ``interface.indexer_q_rope_quant`` in Triton; see its contract."""
    tokens, heads, width = q.shape
    packed = quant == "mxfp4"
    device = q.device
    scales_shape = (tokens, heads, width // MXFP4_BLOCK) if packed else (0,)
    scales = torch.empty(scales_shape, dtype=torch.uint8, device=device)
    out_weights = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    if quant == "none":
        out = torch.empty(q.shape, dtype=q.dtype, device=device)
    else:
        codes = width // 2 if packed else width
        out = torch.empty(tokens, heads, codes, dtype=torch.uint8, device=device)
    if tokens and heads:
        q = q if q.stride(2) == 1 else q.contiguous()
        weights = weights if weights.stride(1) == 1 else weights.contiguous()
        table = cos_sin_cache if cos_sin_cache.stride(1) == 1 else cos_sin_cache.contiguous()
        together = heads_of(heads, width)
        padded = triton.next_power_of_2(width)
        query_kernel[(tokens, triton.cdiv(heads, together))](
            q,
            q.stride(0),
            q.stride(1),
            weights,
            weights.stride(0),
            positions.contiguous(),
            table,
            table.stride(0),
            len(table),
            softmax_scale * head_scale,
            out,
            scales,
            out_weights,
            heads,
            WIDTH=width,
            PADDED=padded,
            LOG=padded.bit_length() - 1,
            ROPE=table.shape[1],
            RULE=quant_rule(quant, width),
            PACKED=packed,
            HADAMARD=hadamard,
            NATIVE=device_facts.target_of(device).native_e4m3,
            HEADS=together,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
            **pdl_launch(device),
        )
    return out.view(torch.float8_e4m3fn) if quant == "fp8" else out, scales, out_weights

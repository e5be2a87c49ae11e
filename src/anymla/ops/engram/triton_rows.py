"""Decoding of Engram's table rows in Triton.

Grid: tiles of blocks of channels. A token's rows form one row of the result, so codes, scales and
result have the same order, and a tile may begin and end anywhere.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from anymla.formats.triton_cast import e4m3_to_fp32, ue8m0_to_fp32
from anymla.ops import device as device_facts
from anymla.ops._triton_launch import LAUNCHES, PreparedLaunch, cdiv
from anymla.ops.engram.config import choose_rows_config
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait, pdl_launch


@triton.jit(do_not_specialize=["blocks"])
def engram_rows_kernel(
    out,
    codes,
    scales,
    blocks,
    BLOCK: tl.constexpr,
    BLOCK_HELD: tl.constexpr,
    BLOCKS: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Decode BLOCKS blocks of BLOCK channels that share a scale, each held as BLOCK_HELD."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    channel = tl.arange(0, BLOCK_HELD)
    there = block < blocks
    inside = there[:, None] & (channel < BLOCK)[None, :]
    at = (block * BLOCK)[:, None] + channel[None, :]
    scale = ue8m0_to_fp32(tl.load(scales + block, there, other=0))
    values = e4m3_to_fp32(tl.load(codes + at, inside, other=0), NATIVE) * scale[:, None]
    tl.store(out + at, values.to(out.dtype.element_ty), inside)


def engram_rows(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Backend of ``interface.engram_rows`` in Triton; see its contract."""
    if not codes.numel():
        return
    tokens, columns, width = codes.shape
    blocks = columns * scales.shape[2]
    written = out if out.is_contiguous() else torch.empty_like(out, memory_format=_CONTIGUOUS)
    launch = _decoding(tokens * blocks, width // scales.shape[2], out.device)
    launch(written, codes.contiguous(), scales.contiguous())
    if written is not out:
        out.copy_(written)


_CONTIGUOUS = torch.contiguous_format


@functools.lru_cache(LAUNCHES)
def _decoding(blocks: int, block: int, device: torch.device) -> PreparedLaunch:
    target = device_facts.target_of(device)
    config = choose_rows_config(blocks, block, target)
    return PreparedLaunch(
        engram_rows_kernel,
        (cdiv(blocks, config.blocks),),
        blocks,
        BLOCK=block,
        BLOCK_HELD=triton.next_power_of_2(block),
        BLOCKS=config.blocks,
        NATIVE=target.native_e4m3,
        num_warps=config.num_warps,
        **pdl_launch(device),
    )

"""Weights on their way into the L2 cache, before the product that reads them is launched.

Grid: programs that ask for LANES chunks at a time, in turn, so that a weight comes from its start.
Nothing waits for what has been asked for, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from anymla.ops._triton import Build, Target

# Bytes of a request to the copy engine.
_CHUNK = 8192
# A program asks for some 100 GB/s: fewer than there are multiprocessors leave what runs beside them
# a part of the memory's rate.
_PROGRAMS = 48
_ASK = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; "
    f"@p cp.async.bulk.prefetch.L2.global [$1], {_CHUNK}; mov.b32 $0, 0; }}"
)


@triton.jit(do_not_specialize=["chunks"])
def ask_ahead_kernel(weight, chunks, CHUNK: tl.constexpr, LANES: tl.constexpr):
    """See the file; ``weight`` is an array of ``chunks`` x CHUNK bytes."""
    lane = tl.arange(0, LANES)
    for first in range(tl.program_id(0) * LANES, chunks, tl.num_programs(0) * LANES):
        chunk = first + lane
        inside = (chunk < chunks).to(tl.int32)
        tl.inline_asm_elementwise(
            _ASK,
            "=r,l,r",
            [weight + chunk.to(tl.int64) * CHUNK, inside],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def ask_ahead(weight: Tensor, most: int) -> None:
    """Ask for the first ``most`` bytes of a contiguous weight at a multiple of 16 bytes."""
    chunks = min(most, weight.numel() * weight.element_size()) // _CHUNK
    if chunks:
        ask_ahead_kernel[(_PROGRAMS,)](weight, chunks, CHUNK=_CHUNK, LANES=32, num_warps=1)


def builds(target: Target) -> Iterator[Build]:
    """Where the copy engine has the instruction, and it has been used."""
    if target.name == "sm_90":
        types = {"weight": "*u8", "chunks": "i32"}
        constants = {"CHUNK": _CHUNK, "LANES": 32}
        yield Build("bytes", ask_ahead_kernel, types, constants, num_warps=1)

"""FP8 and bfloat16 GEMMs on Hopper for few tokens, at the speed of reading the weight.

The grid has as many CTAs as are resident at once; a CTA takes every n-th tile of BLOCK_N rows of
the weight.

    w [groups x n, K]  .  x [tokens, group, K]^T  ->  y [tokens, group, n]

    producer    1 warp loads K blocks of 128 channels of both operands by TMA into a ring of STAGES:
                the weight's first stages at once, activations after the previous grid has ended
    consumer    one of
        warp_split_k    each warp has its own K blocks; warps share nothing until a tile ends, where
                        sums are added in the order of the K blocks (mma.sync, up to 32 tokens)
        warp_split_n    each warp has BLOCK_N / WARPS rows, and a stage is one K block; for short K
                        (mma.sync)
        fp8_wgmma       each warp has 16 tokens and keeps IN_FLIGHT products by the FP8 instruction
                        in flight, of which later ones run while earlier ones are scaled and added
                        (33 to 128 tokens)

Barriers: full[i] from TMA to consumer, empty[i] from consumer to producer.

Consumers with mma.sync decode codes to float16 in registers, whose products are exact, and
accumulate in float32; each K block's sum is then scaled. Both operands permute the channels in the
same way: a thread has eight neighbours of a line's 32 packed int32, so that it reads 16 bytes at a
time. Where 32 channels share a scale (only in warp_split_k), it has two of each eight, so that an
instruction's channels belong to one quant block. A tile of fp8_wgmma has few rows and all of K, so
that no sums are exchanged; in return, its activations are read again from L2 for every tile.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops._gluon_ptx import cvt_f16_e4m3x4, gdc_launch_dependents, gdc_wait, mov_bf16_bf16x2

_K_BLOCK = gl.constexpr(128)


class Ring(NamedTuple):
    """Ring of stages of both operands, between producer and consumer.

    Attributes:
        w: shared memory for K blocks of the weight.
        x: shared memory for K blocks of the activations.
        full: barriers of stages that have been filled.
        empty: barriers of stages that the consumer has released.
    """

    w: Any
    x: Any
    full: Any
    empty: Any


class Gemm(NamedTuple):
    """Arguments of a consumer besides the ring, by their names in ``warp_split_k_kernel``."""

    x_scales: Any
    scales: Any
    out: Any
    tokens: Any
    n: Any
    k_blocks: Any
    tiles: Any
    groups: Any
    x_scale_token: Any
    x_scale_k: Any


@gluon.constexpr_function
def packed_layout(warps, rows, quant):
    """Return the layout of [warps, rows, 32] packed int32 as operands: 4 threads to a row."""
    mine, of_row = ((1, 2, 4), (8, 16)) if quant == 128 else ((1, 8, 16), (2, 4))
    registers = [[0, 0, word] for word in mine]
    registers += [[0, 1 << bit, 0] for bit in range(3, rows.bit_length() - 1)]
    lanes = [[0, 0, word] for word in of_row] + [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    shared = [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, shared, [], [warps, rows, 32])


@gluon.jit
def _e4m3_to_fp16(packed):
    """Decode packed e4m3 int32 [..] to float16 [.., 2, 2]."""
    a, b, c, d = cvt_f16_e4m3x4(packed)
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def decode_e4m3(packed):
    """Decode packed e4m3 int32 [.., n] to float16 [.., 4 n], in the order of ``packed_layout``."""
    W: gl.constexpr = packed.shape[0]
    BLOCK_N: gl.constexpr = packed.shape[1]
    WORDS: gl.constexpr = packed.shape[2]
    value = gl.reshape(_e4m3_to_fp16(packed), (W, BLOCK_N, 4, WORDS // 4, 4))
    return gl.reshape(gl.permute(value, (0, 1, 3, 2, 4)), (W, BLOCK_N, 4 * WORDS))


@gluon.jit
def quarters(packed):
    """Split packed int32 [.., 32] into four [.., 8]."""
    W: gl.constexpr = packed.shape[0]
    BLOCK_N: gl.constexpr = packed.shape[1]
    parts = gl.permute(gl.reshape(packed, (W, BLOCK_N, 2, 2, 8)), (0, 1, 4, 2, 3))
    even, odd = gl.split(parts)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def unpack_bf16(packed):
    """Unpack pairs of bfloat16 [.., 32] to [.., 64], in the order of ``packed_layout``."""
    a, b = mov_bf16_bf16x2(packed)
    W: gl.constexpr = packed.shape[0]
    BLOCK_N: gl.constexpr = packed.shape[1]
    value = gl.reshape(gl.join(a, b), (W, BLOCK_N, 4, 8, 2))
    return gl.reshape(gl.permute(value, (0, 1, 3, 2, 4)), (W, BLOCK_N, 64))


@gluon.jit
def decode_scale(scale):
    """Convert ue8m0 scales to float32; float32 scales pass unchanged."""
    if scale.dtype == gl.uint8:
        wide = scale.to(gl.int32)
        bits = gl.where(wide == 0, 0x00400000, wide << 23)
        scale = gl.where(wide == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)
    return scale


@gluon.constexpr_function
def packed_layout_2d(lines, warps, shared):
    """Return the layout of [lines, 32] packed int32: 16 lines a warp, or all if ``shared``."""
    each = [0 if shared else 16 << bit for bit in range(warps.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4]]
    registers += [[1 << bit, 0] for bit in range(3, lines.bit_length() - 1) if 1 << bit not in each]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[line, 0] for line in each], [], [lines, 32]
    )


@gluon.jit
def decode_e4m3_2d(packed):
    """Decode packed e4m3 int32 [lines, 32] to float16 [lines, 128], as ``packed_layout_2d``."""
    LINES: gl.constexpr = packed.shape[0]
    value = gl.reshape(_e4m3_to_fp16(packed), (LINES, 4, 8, 4))
    return gl.reshape(gl.permute(value, (0, 2, 1, 3)), (LINES, _K_BLOCK))


# Triton 3.6 has the function's old name.
_async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _tma_load(desc, line, k_block, barrier, to, WIDTH: gl.constexpr, pred=True):
    """Copy the box of some lines at a K block by TMA.

    A box is one K block of WIDTH values wide; WIDTH is 0 for boxes of several K blocks.
    """
    if WIDTH == 0:
        _async_load(desc, [k_block, line, 0], barrier, to, pred=pred)
    else:
        _async_load(desc, [line, k_block * WIDTH], barrier, to, pred=pred)


@gluon.jit
def produce(
    x_desc, w_desc, ring, n, k_blocks, tiles,
    BLOCK_N: gl.constexpr, BYTES: gl.constexpr, K_BLOCKS: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Load the operands of every tile of a CTA by TMA, one stage after the other.

    Args:
        x_desc: descriptor of the activations of all groups, as the kernel defines it.
        w_desc: descriptor of the weight of all groups.
        ring: stages to fill, a ``Ring``.
        n: rows of a group's weight.
        k_blocks: K blocks per tile.
        tiles: number of tiles of all CTAs together.
        BLOCK_N: rows per tile.
        BYTES: bytes of both operands per step.
        K_BLOCKS: K blocks per step.
        WIDTH: argument of ``_tma_load``.
        STAGES: number of stages in the ring.
        PDL: True if launched by ``pdl_launch``.
    """
    first = gl.program_id(0)
    ctas = gl.num_programs(0)
    steps = ((tiles - first + ctas - 1) // ctas) * ((k_blocks + K_BLOCKS - 1) // K_BLOCKS)
    tile = first
    k_block = 0
    for i in gl.static_range(STAGES):
        valid = i < steps
        mbarrier.expect(ring.full.index(i), BYTES, pred=valid)
        _tma_load(
            w_desc, tile * BLOCK_N, k_block, ring.full.index(i), ring.w.index(i), WIDTH, valid
        )
        k_block += K_BLOCKS
        if k_block >= k_blocks:
            k_block = 0
            tile += ctas
    if PDL:
        gdc_wait()
    tile = first
    k_block = 0
    for i in gl.static_range(STAGES):
        at = tile * BLOCK_N // n * k_blocks + k_block
        _tma_load(x_desc, 0, at, ring.full.index(i), ring.x.index(i), WIDTH, i < steps)
        k_block += K_BLOCKS
        if k_block >= k_blocks:
            k_block = 0
            tile += ctas
    group = tile * BLOCK_N // n
    for step in range(STAGES, steps):
        slot = step % STAGES
        mbarrier.wait(ring.empty.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(ring.full.index(slot), BYTES)
        _tma_load(w_desc, tile * BLOCK_N, k_block, ring.full.index(slot), ring.w.index(slot), WIDTH)
        _tma_load(
            x_desc, 0, group * k_blocks + k_block, ring.full.index(slot), ring.x.index(slot), WIDTH
        )
        k_block += K_BLOCKS
        if k_block >= k_blocks:
            k_block = 0
            tile += ctas
            group = tile * BLOCK_N // n


@gluon.jit
def _load_scales(at, stride, mask, BLOCKS: gl.constexpr):
    """Load the scales at ``at`` and those of the next BLOCKS - 1 quant blocks as a tuple."""
    found = ()
    for block in gl.static_range(BLOCKS):
        found = found + (gl.load(at + block * stride, mask=mask, other=0),)  # noqa: RUF005
    return found


@gluon.jit
def _consume_split_k(
    ring, gemm,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    MN_MAJOR: gl.constexpr, BF16: gl.constexpr, QUANT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    x_scales, scales, out, tokens, n, k_blocks, tiles, groups, x_scale_token, x_scale_k = gemm
    BLOCKS: gl.constexpr = 128 // QUANT  # quant blocks in a K block
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2 if BF16 else 4)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2 if BF16 else 4)
    FACTORS: gl.constexpr = gl.SliceLayout(1, SUMS)
    STORE: gl.constexpr = gl.BlockedLayout(
        [WARPS, 1, 1], [1, min(BLOCK_N, 32), 32 // min(BLOCK_N, 32)], [1, 1, WARPS], [1, 2, 0]
    )
    first = gl.program_id(0)
    ctas = gl.num_programs(0)
    row_blocks = (n + QUANT - 1) // QUANT
    line_scales = k_blocks * BLOCKS
    column = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, FACTORS))
    k_block = gl.arange(0, WARPS, layout=gl.SliceLayout(1, FACTORS))
    out_row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, gl.SliceLayout(0, STORE)))
    out_token = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(0, STORE)))
    if not BF16:
        x_group = first * BLOCK_N // n
        row_block = (first * BLOCK_N - x_group * n) // QUANT
        s_at = scales + (x_group * row_blocks + row_block) * line_scales + k_block * BLOCKS
        w_scales = _load_scales(s_at, 1, k_block < k_blocks, BLOCKS)
    if PDL:
        gdc_wait()
    if not BF16:
        if MN_MAJOR:
            # MN-major scales have memory for rows in multiples of 16.
            x_scale_k = x_scale_k // 16 * 16
        f_at = gl.expand_dims(column if MN_MAJOR else column * x_scale_token, 0)
        f_at = x_scales + (f_at + gl.expand_dims(k_block * BLOCKS * x_scale_k, 1))
        inside = gl.expand_dims((column // 16 * 16 if MN_MAJOR else column) < tokens, 0)
        # These scales belong to the step after the one that is being multiplied.
        x_tile = first
        x_block = 0
        factors = _load_scales(
            f_at + x_group * line_scales * x_scale_k, x_scale_k,
            gl.expand_dims(k_block < k_blocks, 1) & inside, BLOCKS,
        )  # fmt: skip
    step = 0
    for tile in range(first, tiles, ctas):
        group = tile * BLOCK_N // n
        sums = gl.zeros([WARPS, BLOCK_N, BLOCK_M], gl.float32, layout=SUMS)
        for _ in range(0, k_blocks, WARPS):
            if not BF16:
                now, w_now = factors, w_scales
                x_block += WARPS
                if x_block >= k_blocks:
                    x_block = 0
                    x_tile += ctas
                    x_group = x_tile * BLOCK_N // n
                    row_block = (x_tile * BLOCK_N - x_group * n) // QUANT
                    s_at = scales + (x_group * row_blocks + row_block) * line_scales
                    s_at += k_block * BLOCKS
                remaining = gl.where(x_tile < tiles, k_blocks - x_block, 0)
                factors = _load_scales(
                    f_at + (x_group * line_scales + x_block * BLOCKS) * x_scale_k, x_scale_k,
                    gl.expand_dims(k_block < remaining, 1) & inside, BLOCKS,
                )  # fmt: skip
                w_scales = _load_scales(s_at + x_block * BLOCKS, 1, k_block < remaining, BLOCKS)
            slot = step % STAGES
            mbarrier.wait(ring.full.index(slot), (step // STAGES) & 1)
            packed = ring.w.index(slot).load(packed_layout(WARPS, BLOCK_N, QUANT))
            x_packed = ring.x.index(slot).load(packed_layout(WARPS, BLOCK_M, QUANT))
            # What has been read must have arrived before TMA writes valid again: a
            # barrier alone does not wait for reads in flight.
            fence_async_shared()
            mbarrier.arrive(ring.empty.index(slot))
            if BF16:
                a = gl.convert_layout(unpack_bf16(packed), A)
                b = gl.convert_layout(gl.permute(unpack_bf16(x_packed), (0, 2, 1)), B)
                sums = mma_v2(a, b, sums)
            else:
                w_parts = (packed,) if BLOCKS == 1 else quarters(packed)
                x_parts = (x_packed,) if BLOCKS == 1 else quarters(x_packed)
                for block in gl.static_range(BLOCKS):
                    a = gl.convert_layout(decode_e4m3(w_parts[block]), A)
                    b = gl.convert_layout(gl.permute(decode_e4m3(x_parts[block]), (0, 2, 1)), B)
                    none = gl.zeros([WARPS, BLOCK_N, BLOCK_M], gl.float32, layout=SUMS)
                    factor = now[block] * gl.expand_dims(decode_scale(w_now[block]), 1)
                    sums += mma_v2(a, b, none) * gl.expand_dims(factor, 1)
            step += 1
        total = gl.sum(gl.convert_layout(sums, STORE), 0)
        at = gl.expand_dims(out_token * groups + group, 0) * n
        at += gl.expand_dims(tile * BLOCK_N - group * n + out_row, 1)
        gl.store(
            out + at, total.to(out.dtype.element_ty), mask=gl.expand_dims(out_token < tokens, 0)
        )


@gluon.jit(
    do_not_specialize=["tokens", "k_blocks", "tiles", "groups", "x_scale_token", "x_scale_k"]
)
def warp_split_k_kernel(
    x_desc, x_scales, w_desc, scales, out, tokens, n, k_blocks, tiles, groups, x_scale_token,
    x_scale_k,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    MN_MAJOR: gl.constexpr, BF16: gl.constexpr, QUANT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply x @ w^T with one K block per warp (``warp_split_k``).

    Args:
        x_desc: int32 [groups * K / 128, T, 32], e4m3 codes; boxes [WARPS, BLOCK_M, 32].
        x_scales: float32, of which quant block r of token t and group g is at t * x_scale_token +
            (g * K / QUANT + r) * x_scale_k.
        w_desc: int32 [K / 128, groups * n, 32], the weight's codes; boxes [WARPS, BLOCK_N, 32].
        scales: scales of the weight, uint8 (ue8m0) or float32 [groups, ceil(n / QUANT), K / QUANT].
        out: result to be written, [T, groups, n].
        tokens: number of tokens T, at most BLOCK_M.
        n: rows of a group's weight, a multiple of BLOCK_N.
        k_blocks: number of K blocks, K / 128.
        tiles: number of tiles, groups * n / BLOCK_N.
        groups: number of products, one for each group.
        x_scale_token: elements between the scales of consecutive tokens.
        x_scale_k: elements between the scales of consecutive quant blocks.
        BLOCK_N: rows per tile, 16, 32 or 64, at most QUANT.
        BLOCK_M: tokens per tile, at least 8.
        WARPS: warps in the consumer.
        STAGES: number of stages in the ring.
        MN_MAJOR: True if x_scale_token is 1; scales then exist for as many rows as
            ``QuantizedRows`` has.
        BF16: True if both operands are bfloat16; K blocks are then 64 channels, without scales.
        QUANT: rows of the weight, and channels of both operands, that share a scale: 128 or 32.
        PDL: True if launched before the kernel that makes x has ended.
    """
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, BLOCK_N, 32], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, BLOCK_M, 32], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    if PDL:
        gdc_launch_dependents()
    ring = Ring(w_ring, x_ring, full, empty)
    gemm = Gemm(x_scales, scales, out, tokens, n, k_blocks, tiles, groups, x_scale_token, x_scale_k)
    gl.warp_specialize(
        [
            (_consume_split_k, (
                ring, gemm, BLOCK_N, BLOCK_M, WARPS, STAGES, MN_MAJOR, BF16, QUANT, PDL,
            )),
            (produce, (
                x_desc, w_desc, ring, n, k_blocks, tiles, BLOCK_N,
                (BLOCK_N + BLOCK_M) * WARPS * 128, WARPS, 0, STAGES, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit
def _consume_split_n(
    ring, gemm,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    MN_MAJOR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    x_scales, scales, out, tokens, n, k_blocks, tiles, groups, x_scale_token, x_scale_k = gemm
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 4)
    STORE: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, WARPS], [0, 1])
    first = gl.program_id(0)
    ctas = gl.num_programs(0)
    blocks = (n + 127) // 128
    column = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SUMS))
    out_row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, STORE))
    out_token = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, STORE))
    if PDL:
        gdc_wait()
    if MN_MAJOR:
        # MN-major scales have memory for rows in multiples of 16.
        x_scale_k = x_scale_k // 16 * 16
    f_at = x_scales + (column if MN_MAJOR else column * x_scale_token)
    inside = (column // 16 * 16 if MN_MAJOR else column) < tokens
    step = 0
    for tile in range(first, tiles, ctas):
        group = tile * BLOCK_N // n
        line = tile * BLOCK_N - group * n
        s_at = scales + (group * blocks + line // 128) * k_blocks
        f_block = f_at + group * k_blocks * x_scale_k
        sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=SUMS)
        x_scale, w_scale = gl.load(f_block, mask=inside, other=0.0), gl.load(s_at)
        for k_block in range(k_blocks):
            factor = x_scale * decode_scale(w_scale)
            f_block += x_scale_k
            s_at += 1
            more = k_block + 1 < k_blocks
            x_scale = gl.load(f_block, mask=inside & more, other=0.0)
            w_scale = gl.load(s_at, mask=more, other=0)
            slot = step % STAGES
            mbarrier.wait(ring.full.index(slot), (step // STAGES) & 1)
            packed = ring.w.index(slot).load(packed_layout_2d(BLOCK_N, WARPS, False))
            x_packed = ring.x.index(slot).load(packed_layout_2d(BLOCK_M, WARPS, True))
            # What has been read must have arrived before TMA writes valid again: a
            # barrier alone does not wait for reads in flight.
            fence_async_shared()
            mbarrier.arrive(ring.empty.index(slot))
            a = gl.convert_layout(decode_e4m3_2d(packed), A)
            b = gl.convert_layout(gl.permute(decode_e4m3_2d(x_packed), (1, 0)), B)
            part = mma_v2(a, b, gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=SUMS))
            sums += part * gl.expand_dims(factor, 0)
            step += 1
        total = gl.convert_layout(sums, STORE)
        at = gl.expand_dims(out_token * groups + group, 0) * n + gl.expand_dims(line + out_row, 1)
        gl.store(
            out + at, total.to(out.dtype.element_ty), mask=gl.expand_dims(out_token < tokens, 0)
        )


@gluon.jit(
    do_not_specialize=["tokens", "k_blocks", "tiles", "groups", "x_scale_token", "x_scale_k"]
)
def warp_split_n_kernel(
    x_desc, x_scales, w_desc, scales, out, tokens, n, k_blocks, tiles, groups, x_scale_token,
    x_scale_k,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    MN_MAJOR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply x @ w^T with rows of the weight divided among warps (``warp_split_n``).

    Arguments are those of ``warp_split_k_kernel``, but ``x_desc`` is int32 [T, groups * K / 4] in
    boxes of [BLOCK_M, 32], ``w_desc`` int32 [groups * n, K / 4] in boxes of [BLOCK_N, 32], and
    BLOCK_N 64 or 128 rows, which share scales.
    """
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, 32], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_M, 32], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    if PDL:
        gdc_launch_dependents()
    ring = Ring(w_ring, x_ring, full, empty)
    gemm = Gemm(x_scales, scales, out, tokens, n, k_blocks, tiles, groups, x_scale_token, x_scale_k)
    gl.warp_specialize(
        [
            (_consume_split_n, (
                ring, gemm, BLOCK_N, BLOCK_M, WARPS, STAGES, MN_MAJOR, PDL,
            )),
            (produce, (
                x_desc, w_desc, ring, n, k_blocks, tiles, BLOCK_N,
                (BLOCK_N + BLOCK_M) * 128, 1, 32, STAGES, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit
def _issue_wgmma(ring, step, zeros, STAGES: gl.constexpr):
    """Wait for a stage and issue its product."""
    slot = step % STAGES
    mbarrier.wait(ring.full.index(slot), (step // STAGES) & 1)
    return warpgroup_mma(
        ring.x.index(slot), ring.w.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )


@gluon.jit
def _rescale(product, x_scale, w_scale):
    return product * gl.expand_dims(x_scale * decode_scale(w_scale), 1)


@gluon.jit
def _consume_wgmma(
    ring, gemm,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    x_scales, scales, out, tokens, n, k_blocks, tiles, groups, x_scale_token, x_scale_k = gemm
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BLOCK_M // 16, 1], [16, BLOCK_N, 32])
    first = gl.program_id(0)
    ctas = gl.num_programs(0)
    blocks = (n + 127) // 128
    token = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SUMS))
    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SUMS))
    inside = token < tokens
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SUMS)
    if PDL:
        gdc_wait()
    step = 0
    for tile in range(first, tiles, ctas):
        group = tile * BLOCK_N // n
        line = tile * BLOCK_N - group * n
        s_at = scales + (group * blocks + line // 128) * k_blocks
        f_at = x_scales + token * x_scale_token + group * k_blocks * x_scale_k
        sums = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SUMS)
        for _ in range(k_blocks // IN_FLIGHT):
            # All loads are issued before the first wait.
            x1, w1 = gl.load(f_at, mask=inside, other=0.0), gl.load(s_at)
            x2, w2 = gl.load(f_at + x_scale_k, mask=inside, other=0.0), gl.load(s_at + 1)
            if IN_FLIGHT == 4:
                x3, w3 = (
                    gl.load(f_at + 2 * x_scale_k, mask=inside, other=0.0),
                    gl.load(s_at + 2),
                )
                x4, w4 = (
                    gl.load(f_at + 3 * x_scale_k, mask=inside, other=0.0),
                    gl.load(s_at + 3),
                )
            p1 = _issue_wgmma(ring, step, zeros, STAGES)
            p2 = _issue_wgmma(ring, step + 1, zeros, STAGES)
            if IN_FLIGHT == 4:
                p3 = _issue_wgmma(ring, step + 2, zeros, STAGES)
                p4 = _issue_wgmma(ring, step + 3, zeros, STAGES)
            p1 = warpgroup_mma_wait(IN_FLIGHT - 1, [p1])
            mbarrier.arrive(ring.empty.index(step % STAGES))
            sums += _rescale(p1, x1, w1)
            p2 = warpgroup_mma_wait(IN_FLIGHT - 2, [p2])
            mbarrier.arrive(ring.empty.index((step + 1) % STAGES))
            sums += _rescale(p2, x2, w2)
            if IN_FLIGHT == 4:
                p3 = warpgroup_mma_wait(1, [p3])
                mbarrier.arrive(ring.empty.index((step + 2) % STAGES))
                sums += _rescale(p3, x3, w3)
                p4 = warpgroup_mma_wait(0, [p4])
                mbarrier.arrive(ring.empty.index((step + 3) % STAGES))
                sums += _rescale(p4, x4, w4)
            f_at += IN_FLIGHT * x_scale_k
            s_at += IN_FLIGHT
            step += IN_FLIGHT
        to = out + gl.expand_dims((token * groups + group) * n + line, 1) + gl.expand_dims(row, 0)
        gl.store(to, sums.to(out.dtype.element_ty), mask=gl.expand_dims(inside, 1))


@gluon.jit(
    do_not_specialize=["tokens", "k_blocks", "tiles", "groups", "x_scale_token", "x_scale_k"]
)
def fp8_wgmma_kernel(
    x_desc, x_scales, w_desc, scales, out, tokens, n, k_blocks, tiles, groups, x_scale_token,
    x_scale_k,
    BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, IN_FLIGHT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Multiply x @ w^T by the FP8 warpgroup instruction (``fp8_wgmma``).

    Arguments are those of ``warp_split_k_kernel``, but ``x_desc`` is e4m3 [T, groups * K] in boxes
    of [BLOCK_M, 128], ``w_desc`` e4m3 [groups * n, K] in boxes of [BLOCK_N, 128]. BLOCK_N is a
    power of two from 8 to 128, and BLOCK_M 64 or 128. IN_FLIGHT products, 2 or 4, are in flight:
    STAGES is at least as many, and ``k_blocks`` a multiple.
    """
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, 128], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, 128], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    if PDL:
        gdc_launch_dependents()
    ring = Ring(w_ring, x_ring, full, empty)
    gemm = Gemm(x_scales, scales, out, tokens, n, k_blocks, tiles, groups, x_scale_token, x_scale_k)
    gl.warp_specialize(
        [
            (_consume_wgmma, (
                ring, gemm, BLOCK_N, BLOCK_M, STAGES, IN_FLIGHT, PDL,
            )),
            (produce, (
                x_desc, w_desc, ring, n, k_blocks, tiles, BLOCK_N,
                (BLOCK_N + BLOCK_M) * 128, 1, 128, STAGES, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip

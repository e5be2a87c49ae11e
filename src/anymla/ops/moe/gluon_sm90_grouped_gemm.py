"""Grouped GEMM of MXFP4 experts on Hopper for few tokens, with persistent CTAs.

    work tile   M rows of the weight for a block of pairs; tiles, block after block, are divided
                evenly among as many CTAs as are resident at once
    stage       CHUNK channels of a tile: codes, scales, and at a block's start its activations

A CTA loads STAGES stages ahead, across tiles and blocks, so that it never stops reading; a block's
activations stay in shared memory for all its tiles. Activations of w1 and w3 are loaded with the
weights, and STAGES is less than a tile's number of stages, so a new block's activations replace
those that the last tile has already used.

CTAs of w2 load weights before they wait. The list of blocks, from which the weights' addresses
follow, is complete by then: w1's kernel waited for it before it let w2's start. It is read past the
L1 cache, which may hold older data of the same address.

The weight's rows are rows of the matrix instruction, and tokens are its columns (swap AB). Eight
codes are a packed int32, which becomes e4m3 operands in registers (``formats.triton_words``);
activations are in shared memory in the order of these operands. A product covers 32 channels, which
share one scale of the weight; the sum over 128 channels, or each product, has one scale of the
activations.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR
from anymla.ops._gluon import view
from anymla.ops._gluon_ptx import gdc_launch_dependents, gdc_wait

_UNIT = gl.constexpr(64.0)  # decoded values are smaller by this factor
_FLOOR = gl.constexpr(ACTIVATION_AMAX_FLOOR)


@gluon.jit
def _decode_e2m1(words):
    """Decode int32 [M, 4] to float8e4nv [M, 32], value * 2^-6; see ``formats.triton_words``."""
    ROWS: gl.constexpr = words.shape[0]
    lower = ((words << 4) & -0x7F7F7F80) | ((words << 2) & 0x1C1C1C1C)
    upper = (words & -0x7F7F7F80) | ((words >> 2) & 0x1C1C1C1C)
    both = gl.join(lower, upper)
    even = gl.join((both & 255).to(gl.uint8), ((both >> 16) & 255).to(gl.uint8))
    odd = gl.join(((both >> 8) & 255).to(gl.uint8), ((both >> 24) & 255).to(gl.uint8))
    codes = gl.reshape(gl.join(even, odd), [ROWS, 4, 2, 4])
    codes = gl.reshape(gl.permute(codes, (0, 2, 1, 3)), [ROWS, 32])
    return codes.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _factor(scale, BYTE: gl.constexpr):
    """Return 2^(byte - 127) of one byte of each word; ``_decode_scales`` finds NaN bytes (255)."""
    bits = scale >> 1 if BYTE == 3 else scale << (23 - 8 * BYTE)
    # Byte 0 stands for 2^-127, which is subnormal.
    return gl.maximum(bits & 0x7F800000, 0x00400000).to(gl.float32, bitcast=True)


@gluon.jit
def _decode_scales(scale):
    """Decode bytes of int32 [M, R] to float32 [M, 4 R]; any NaN makes its word's first one NaN."""
    M: gl.constexpr = scale.shape[0]
    R: gl.constexpr = scale.shape[1]
    # Adding one to 255 overflows into bit 7.
    spoiled = (((scale & 0x7F7F7F7F) + 0x01010101) & scale & -0x7F7F7F80) != 0
    first = gl.where(spoiled, float("nan"), _factor(scale, 0))
    even = gl.join(first, _factor(scale, 2))
    odd = gl.join(_factor(scale, 1), _factor(scale, 3))
    return gl.reshape(gl.join(even, odd), [M, 4 * R])


@gluon.jit
def _split4(words):
    """Split words [M, 4 W] into four [M, W]."""
    M: gl.constexpr = words.shape[0]
    W: gl.constexpr = words.shape[1] // 4
    halves = gl.permute(gl.reshape(words, [M, 2, 2, W]), (0, 3, 2, 1))
    lower, upper = gl.split(halves)
    first, second = gl.split(lower)
    third, fourth = gl.split(upper)
    return first, second, third, fourth


@gluon.jit
def _product(words, x, number, ACC: gl.constexpr, N: gl.constexpr):
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=4)
    zero = gl.zeros([words.shape[0], N], gl.float32, ACC)
    return warpgroup_mma(
        gl.convert_layout(_decode_e2m1(words), A), x.index(number).permute((1, 0)), zero,
        use_acc=False, is_async=True,
    )  # fmt: skip


@gluon.jit
def _issue_wgmma(words, x, number, ACC: gl.constexpr, N: gl.constexpr):
    """Issue products of four times 32 channels: words [M, 16], x [., N, 32] from ``number`` on."""
    w0, w1, w2, w3 = _split4(words)
    p0 = _product(w0, x, number, ACC, N)
    p1 = _product(w1, x, number + 1, ACC, N)
    p2 = _product(w2, x, number + 2, ACC, N)
    p3 = _product(w3, x, number + 3, ACC, N)
    return p0, p1, p2, p3


@gluon.jit
def _wait_and_scale(
    parts, factor, x_factor, k_block, ACC: gl.constexpr, PENDING: gl.constexpr,
    QUANT: gl.constexpr,
):  # fmt: skip
    """Wait for four products and add them with factors [M, 4] and the activations' factors.

    PENDING later products may still be in flight.
    """
    p0, p1, p2, p3 = parts
    f0, f1, f2, f3 = _split4(factor)
    p0, p1, p2, p3 = warpgroup_mma_wait(PENDING, deps=[p0, p1, p2, p3])
    if QUANT == 128:
        total = p0 * _as_column(f0, ACC) + p1 * _as_column(f1, ACC)
        total = total + p2 * _as_column(f2, ACC) + p3 * _as_column(f3, ACC)
        return total * _x_scale(x_factor, k_block, ACC)
    else:
        qb = 4 * k_block
        total = p0 * _as_column(f0, ACC) * _x_scale(x_factor, qb, ACC)
        total += p1 * _as_column(f1, ACC) * _x_scale(x_factor, qb + 1, ACC)
        total += p2 * _as_column(f2, ACC) * _x_scale(x_factor, qb + 2, ACC)
        return total + p3 * _as_column(f3, ACC) * _x_scale(x_factor, qb + 3, ACC)


@gluon.jit
def _as_column(column, ACC: gl.constexpr):
    """Lay out a column [M, 1] like the sums."""
    line = gl.convert_layout(gl.reshape(column, [column.shape[0]]), gl.SliceLayout(1, ACC))
    return gl.expand_dims(line, 1)


@gluon.jit
def _split2(words):
    """Split a tile into its left and its right half."""
    M: gl.constexpr = words.shape[0]
    W: gl.constexpr = words.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(words, [M, 2, W]), (0, 2, 1)))


@gluon.jit
def _x_scale(x_factor, qb, ACC: gl.constexpr):
    """Load the factors [1, N] of the products' sum over a quant block."""
    return gl.expand_dims(x_factor.index(qb).load(gl.SliceLayout(0, ACC)) * _UNIT, 0)


@gluon.jit
def _quantize_block(value, x_bytes, x_groups, k_block, N: gl.constexpr, QUANT: gl.constexpr):
    """Quantise 128 channels [N, 128] to codes in the order of decoded weights, and to scales."""
    value = gl.reshape(value.to(gl.float32), [N, 128 // QUANT, QUANT])
    ratio = gl.maximum(gl.max(gl.abs(value), 2), _FLOOR) * (1.0 / 448.0)
    bits = ratio.to(gl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(gl.int32)
    # An infinite value has exponent 128, whose inverse is not a normal number.
    inverse = (gl.maximum(-exponent, -126) + 127) << 23
    value = value * gl.expand_dims(inverse.to(gl.float32, bitcast=True), 2)
    codes = value.to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    codes = gl.permute(gl.reshape(codes, [N, 4, 4, 4, 2]), (1, 0, 4, 2, 3))
    x_bytes.index(k_block).store(gl.reshape(codes, [4 * N, 32]))
    scale = ((exponent + 127) << 23).to(gl.float32, bitcast=True)
    x_groups.index(k_block).store(gl.permute(scale, (1, 0)))


@gluon.jit
def _quantize_activations(
    x, sorted_pairs, blocks, block, count, x_bytes, x_groups,
    K: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr, BATCH: gl.constexpr,
    QUANT: gl.constexpr,
):  # fmt: skip
    """Quantise the rows of a block's pairs, BATCH K blocks of each at once."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    column = gl.arange(0, N, layout=gl.SliceLayout(1, L))
    begin = gl.load(blocks + count + block)
    inside = begin + column < gl.load(blocks + 2 * count + block)
    pair = gl.load(sorted_pairs + begin + column, mask=inside, other=0)
    channel = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    at = x + gl.expand_dims(pair.to(gl.int64) * K, 1) + gl.expand_dims(channel, 0)
    inside = gl.expand_dims(inside, 1)
    for k_block in range(0, K // 128, BATCH):
        values = ()
        for i in gl.static_range(BATCH):
            values += (gl.load(at + i * 128, mask=inside, other=0.0),)
        for i in gl.static_range(BATCH):
            _quantize_block(values[i], x_bytes, x_groups, k_block + i, N, QUANT)
        at += BATCH * 128


_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _expert_offset(expert, stride, table, UNIT: gl.constexpr):
    """Return the elements from the first expert's tensor to this one's; a table counts in UNITs."""
    here = expert.to(gl.int64)
    if table is None:
        return here * stride
    else:
        return gl.load(table + expert) * UNIT


@gluon.jit
def _work_tile(
    work_tile, blocks, count, gate, up,
    K: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, UP: gl.constexpr,
    W_UNIT: gl.constexpr,
):  # fmt: skip
    """Return where a tile's codes and scales begin, in one matrix or in two, and its block's range.

    ``gate`` and ``up`` are pointer, stride and table of weight and of scale: w1's (or w2's) and
    w3's.
    """
    w1, w1_stride, w1_table, s1, s1_stride, s1_table = gate
    block = work_tile // TILES
    tile = (work_tile - block * TILES).to(gl.int64)
    # Read past the L1 cache, because w2's CTAs read these before they wait.
    expert = gl.load(blocks + block, cache_modifier=".cg")
    place = gl.load(blocks + count + block, cache_modifier=".cg")
    end = gl.load(blocks + 2 * count + block, cache_modifier=".cg")
    wa = w1 + _expert_offset(expert, w1_stride, w1_table, W_UNIT) + tile * (ROWS * (K // 2))
    sa = s1 + _expert_offset(expert, s1_stride, s1_table, 1) + tile * (ROWS * (K // 32))
    wb = wa
    sb = sa
    if UP:
        w3, w3_stride, w3_table, s3, s3_stride, s3_table = up
        wb = w3 + _expert_offset(expert, w3_stride, w3_table, W_UNIT) + tile * (ROWS * (K // 2))
        sb = s3 + _expert_offset(expert, s3_stride, s3_table, 1) + tile * (ROWS * (K // 32))
    return wa, wb, sa, sb, place, end


@gluon.jit
def _load_weights(
    ring, scale_ring, wa, wb, sa, sb, part,
    M: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr, UP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Load a stage's codes [M, CHUNK / 8] and scales [M, CHUNK / 128], four of either per word."""
    C: gl.constexpr = CHUNK // 8
    K_BLOCKS: gl.constexpr = CHUNK // 128
    FW: gl.constexpr = gl.BlockedLayout([1, 4], [128 // C, C // 4], [WARPS, 1], [1, 0])
    FS: gl.constexpr = gl.BlockedLayout([1, 1], [32 // K_BLOCKS, K_BLOCKS], [WARPS, 1], [1, 0])
    fr = gl.arange(0, M, layout=gl.SliceLayout(1, FW))
    sr = gl.arange(0, M, layout=gl.SliceLayout(1, FS))
    if UP:
        # Put gate and up into rows g and g + 8 of a warp's instruction, so that one thread has
        # both.
        wa = gl.where(gl.expand_dims(fr % 16 >= 8, 1), wb, wa)
        sa = gl.where(gl.expand_dims(sr % 16 >= 8, 1), sb, sa)
        fr = fr // 16 * 8 + fr % 8
        sr = sr // 16 * 8 + sr % 8
    at = wa + gl.expand_dims(fr * (K // 2), 1) + part * (CHUNK // 2)
    word = gl.arange(0, C, layout=gl.SliceLayout(0, FW))
    _copy(ring, at.to(gl.pointer_type(gl.int32)) + gl.expand_dims(word, 0))
    at = sa + gl.expand_dims(sr * (K // 32), 1) + part * (CHUNK // 32)
    word = gl.arange(0, K_BLOCKS, layout=gl.SliceLayout(0, FS))
    _copy(scale_ring, at.to(gl.pointer_type(gl.int32)) + gl.expand_dims(word, 0))


@gluon.jit
def _load_activations(
    x, x_scales, sorted_pairs, x_words, x_factors, place, end, part,
    K: gl.constexpr, N: gl.constexpr, CHUNK: gl.constexpr, PER_TOKEN: gl.constexpr,
    WARPS: gl.constexpr, QUANT: gl.constexpr,
):  # fmt: skip
    """Load CHUNK channels of the operands of a block's pairs, and their scales."""
    QUANT_BLOCKS: gl.constexpr = CHUNK // QUANT
    FX: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [WARPS, 1], [1, 0])
    FF: gl.constexpr = gl.BlockedLayout([1, 1], [32 // N, N], [WARPS, 1], [1, 0])
    group = gl.arange(0, CHUNK // 32 * N, layout=gl.SliceLayout(1, FX))
    there = place + group % N
    token = gl.load(sorted_pairs + there, mask=there < end, other=0) // PER_TOKEN
    at = x + gl.expand_dims(token.to(gl.int64) * K, 1)
    at = at + gl.expand_dims(group // N * 32, 1) + part * CHUNK
    word = gl.arange(0, 8, layout=gl.SliceLayout(0, FX))
    _copy(
        x_words, at.to(gl.pointer_type(gl.int32)) + gl.expand_dims(word, 0),
        mask=gl.expand_dims(there < end, 1),
    )  # fmt: skip
    there = place + gl.arange(0, N, layout=gl.SliceLayout(0, FF))
    token = gl.load(sorted_pairs + there, mask=there < end, other=0) // PER_TOKEN
    qb = part * QUANT_BLOCKS + gl.arange(0, QUANT_BLOCKS, layout=gl.SliceLayout(1, FF))
    at = x_scales + gl.expand_dims(token.to(gl.int64) * (K // QUANT), 0) + gl.expand_dims(qb, 1)
    _copy(x_factors, at, mask=gl.expand_dims(there < end, 0))


@gluon.jit
def _clamped_swiglu(gate, up, limit):
    """Compute the function of ``triton_swiglu.clamped_swiglu``."""
    gate = gl.where(gate > limit, limit, gate)
    up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def _epilogue(
    sums, work_tile, weights, sorted_pairs, blocks, count, out, limit,
    OUT: gl.constexpr, M: gl.constexpr, N: gl.constexpr, TILES: gl.constexpr, UP: gl.constexpr,
):  # fmt: skip
    """Store a tile's results; with UP after SwiGLU and the pairs' weights."""
    DT: gl.constexpr = out.dtype.element_ty
    block = work_tile // TILES
    tile = work_tile - block * TILES
    if UP:
        halves = gl.permute(gl.reshape(sums, [M // 16, 2, 8, N]), (0, 2, 3, 1))
        gate, up = gl.split(halves)
        value = _clamped_swiglu(gate.to(DT).to(gl.float32), up.to(DT).to(gl.float32), limit)
        value = gl.reshape(value, [M // 2, N])
    else:
        value = sums
    L: gl.constexpr = value.type.layout
    column = gl.arange(0, N, layout=gl.SliceLayout(0, L))
    place = gl.load(blocks + count + block) + column
    inside = place < gl.load(blocks + 2 * count + block)
    pair = gl.load(sorted_pairs + place, mask=inside, other=0)
    if UP:
        value = value * gl.expand_dims(gl.load(weights + pair, mask=inside, other=0.0), 0)
    ROWS: gl.constexpr = value.shape[0]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)) + tile * ROWS
    to = out + gl.expand_dims(pair.to(gl.int64) * OUT, 0) + gl.expand_dims(row, 1)
    gl.store(to, value.to(DT), mask=gl.expand_dims(inside, 0))


@gluon.jit(do_not_specialize=["count"])
def grouped_gemm_kernel(
    x, x_scales, weights, sorted_pairs, blocks, w1, w1_stride, w1_table, s1, s1_stride, s1_table,
    w3, w3_stride, w3_table, s3, s3_stride, s3_table, out, count, limit,
    K: gl.constexpr, OUT: gl.constexpr, PER_TOKEN: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, UP: gl.constexpr,
    W_UNIT: gl.constexpr, WARPS: gl.constexpr, CTAS_PER_SM: gl.constexpr, BATCH: gl.constexpr,
    QUANT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute one grouped GEMM: w1 and w3 with SwiGLU (UP), or w2.

    With UP, x is uint8, e4m3 operands [T, K] in the order of decoded weights, with ``x_scales``
    float32 [T, K / QUANT]; without, x is [pairs, K] of any dtype. ``weights`` are the pairs'
    float32 weights with UP, ``sorted_pairs`` int32 pairs sorted by expert, and ``blocks`` int32
    [3 * count + 1] as ``triton_align`` makes them. ``w1`` and ``s1`` are codes and scales of the
    first expert; others follow at a stride in elements, or at the offsets of a table, in which
    W_UNIT elements of codes, or one scale, count one. ``w3`` and ``s3`` are used with UP. ``limit``
    is SwiGLU's clamp, and ``out`` [pairs, OUT].

    A tile has M rows, with UP half of them w1's, and N pairs; a stage CHUNK channels, 256 or 512,
    STAGES of which are loaded ahead. A CTA has WARPS warps of 16 rows, and CTAS_PER_SM of them
    share an SM. BATCH K blocks of a row of w2's input are quantised at once.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 32])
    C: gl.constexpr = CHUNK // 8
    CHUNKS: gl.constexpr = K // CHUNK
    K_BLOCKS: gl.constexpr = CHUNK // 128
    ROWS: gl.constexpr = M // 2 if UP else M
    TILES: gl.constexpr = OUT // ROWS
    BY_WARP: gl.constexpr = [[16, 0], [32, 0]] if WARPS == 4 else [[16, 0], [32, 0], [64, 0]]
    BY_WORD: gl.constexpr = (
        [[8, 0], [0, 4], [0, 8], [0, 16]] if C == 32 else [[8, 0], [0, 4], [0, 8], [0, 16], [0, 32]]
    )
    BY_BLOCK: gl.constexpr = (
        [[8, 0], [0, 1], [0, 2], [0, 4]]
        if K_BLOCKS == 2
        else [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]]
    )
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        BY_WORD, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], BY_WARP, [], [M, C]
    )
    FACTORS: gl.constexpr = gl.DistributedLinearLayout(
        BY_BLOCK, [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], BY_WARP, [], [M, 4 * K_BLOCKS]
    )
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // K_BLOCKS, K_BLOCKS], [WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(
        gl.int32, [STAGES, M, C], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    scale_ring = gl.allocate_shared_memory(gl.int32, [STAGES, M, K_BLOCKS], FLAT)
    factors = gl.allocate_shared_memory(
        gl.float32,
        [M, 4 * K_BLOCKS],
        gl.SwizzledSharedLayout(4, 8 // K_BLOCKS, K_BLOCKS, [1, 0]),
    )
    x_s = gl.allocate_shared_memory(
        gl.float8e4nv, [K // 32, N, 32], gl.NVMMASharedLayout(32, 8, rank=2)
    )
    x_words = view(
        x_s, gl.int32, [CHUNKS, CHUNK // 32 * N, 8], gl.SwizzledSharedLayout(4, 4, 2, [1, 0])
    )
    x_bytes = view(x_s, gl.uint8, [K // 128, 4 * N, 32], gl.SwizzledSharedLayout(16, 4, 2, [1, 0]))
    QUANT_BLOCKS: gl.constexpr = CHUNK // QUANT
    x_factors = gl.allocate_shared_memory(gl.float32, [CHUNKS, QUANT_BLOCKS, N], FLAT)
    x_factor = view(x_factors, gl.float32, [K // QUANT, N], LINE)
    x_groups = view(x_factors, gl.float32, [K // 128, 128 // QUANT, N], FLAT)

    if PDL and UP:
        # The addresses of weights follow from the blocks, so nothing can be loaded before the wait.
        gdc_wait()
        gdc_launch_dependents()
    work_tiles = gl.load(blocks + 3 * count, cache_modifier=".cg") * TILES
    ctas = gl.num_programs(0)
    p = gl.program_id(0)
    # CTAs of one SM have neighbouring ranges, which together are more even.
    p = p % (ctas // CTAS_PER_SM) * CTAS_PER_SM + p // (ctas // CTAS_PER_SM)
    first = (p.to(gl.int64) * work_tiles // ctas).to(gl.int32)
    last = ((p + 1).to(gl.int64) * work_tiles // ctas).to(gl.int32)
    stages = (last - first) * CHUNKS

    gate = (w1, w1_stride, w1_table, s1, s1_stride, s1_table)
    up = (w3, w3_stride, w3_table, s3, s3_stride, s3_table)
    load_tile = first  # work tile of the next load, whose stage is ``part``
    part = 0
    wa, wb, sa, sb = w1, w1, s1, s1
    place, end = 0, 0
    for g in range(STAGES):
        if g < stages:
            if STAGES > CHUNKS and part == CHUNKS:
                part = 0
                load_tile = load_tile + 1
            if part == 0:
                wa, wb, sa, sb, place, end = _work_tile(
                    load_tile, blocks, count, gate, up, K, ROWS, TILES, UP, W_UNIT
                )
            _load_weights(
                ring.index(g), scale_ring.index(g), wa, wb, sa, sb, part, M, K, CHUNK, UP, WARPS
            )
            if UP:
                _load_activations(
                    x, x_scales, sorted_pairs, x_words.index(part), x_factors.index(part), place,
                    end, part, K, N, CHUNK, PER_TOKEN, WARPS, QUANT,
                )  # fmt: skip
            part += 1
        async_copy.commit_group()
    if PDL and not UP:
        gdc_wait()
        gdc_launch_dependents()
    sums = gl.zeros([M, N], gl.float32, ACC)
    for g in range(stages):
        slot = g % STAGES
        chunk = g % CHUNKS
        work_tile = first + g // CHUNKS
        new_block = (g < CHUNKS) | (work_tile % TILES == 0)
        async_copy.wait_group(STAGES - 1)
        words = ring.index(slot).load(WORDS)
        factors.store(_decode_scales(scale_ring.index(slot).load(SCALES)))
        if UP:
            if new_block:
                fence_async_shared()
        else:
            if new_block & (chunk == 0):
                _quantize_activations(
                    x,
                    sorted_pairs,
                    blocks,
                    work_tile // TILES,
                    count,
                    x_bytes,
                    x_groups,
                    K,
                    N,
                    WARPS,
                    BATCH,
                    QUANT,
                )
                fence_async_shared()
        factor = factors.load(FACTORS)
        more = g + STAGES < stages
        if more:
            if part == CHUNKS:
                part = 0
                load_tile = load_tile + 1
                wa, wb, sa, sb, place, end = _work_tile(
                    load_tile, blocks, count, gate, up, K, ROWS, TILES, UP, W_UNIT
                )
            _load_weights(
                ring.index(slot), scale_ring.index(slot), wa, wb, sa, sb, part,
                M, K, CHUNK, UP, WARPS,
            )  # fmt: skip
        number = chunk * (CHUNK // 32)
        k_block = chunk * K_BLOCKS
        if K_BLOCKS == 2:
            r0, r1 = _split2(words)
            f0, f1 = _split2(factor)
            p0 = _issue_wgmma(r0, x_s, number, ACC, N)
            p1 = _issue_wgmma(r1, x_s, number + 4, ACC, N)
            sums += _wait_and_scale(p0, f0, x_factor, k_block, ACC, 4, QUANT)
            sums += _wait_and_scale(p1, f1, x_factor, k_block + 1, ACC, 0, QUANT)
        else:
            r0, r1, r2, r3 = _split4(words)
            f0, f1, f2, f3 = _split4(factor)
            p0 = _issue_wgmma(r0, x_s, number, ACC, N)
            p1 = _issue_wgmma(r1, x_s, number + 4, ACC, N)
            sums += _wait_and_scale(p0, f0, x_factor, k_block, ACC, 4, QUANT)
            p2 = _issue_wgmma(r2, x_s, number + 8, ACC, N)
            sums += _wait_and_scale(p1, f1, x_factor, k_block + 1, ACC, 4, QUANT)
            p3 = _issue_wgmma(r3, x_s, number + 12, ACC, N)
            sums += _wait_and_scale(p2, f2, x_factor, k_block + 2, ACC, 4, QUANT)
            sums += _wait_and_scale(p3, f3, x_factor, k_block + 3, ACC, 0, QUANT)
        if more:
            if UP and (load_tile == first) | (load_tile % TILES == 0):
                _load_activations(
                    x, x_scales, sorted_pairs, x_words.index(part), x_factors.index(part), place,
                    end, part, K, N, CHUNK, PER_TOKEN, WARPS, QUANT,
                )  # fmt: skip
            part += 1
        async_copy.commit_group()
        if chunk == CHUNKS - 1:
            _epilogue(
                sums,
                work_tile,
                weights,
                sorted_pairs,
                blocks,
                count,
                out,
                limit,
                OUT,
                M,
                N,
                TILES,
                UP,
            )
            sums = gl.zeros([M, N], gl.float32, ACC)

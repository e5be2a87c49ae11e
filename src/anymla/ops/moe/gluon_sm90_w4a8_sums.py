"""Grouped GEMM of MXFP4 experts on Hopper for blocks of 16 or 32 pairs (W4A8, scaled sums).

    work tile   128 rows of an expert's weights (64 of w1 and the same 64 of w3, or 128 of w2) for a
                block of N pairs; CTAs are persistent and take every n-th tile
    stage       256 channels of a tile: packed codes, e4m3 operands of the pairs, scales of both

    producer    1 warp loads codes and operands by TMA into a ring
    scales      2 warps load the weights' scales and store them as float32
    consumers   2 warpgroups, 32 rows of either half of a tile each: decode, multiply, scale

Barriers: full[i] from TMA and scales to consumers, empty[i] back.

The weight's rows are rows of the matrix instruction, pairs its columns (swap AB), so decoded
weights go from registers into it. Eight codes become e4m3 operands by shifts and masks
(``formats.triton_words``). A product covers 32 channels, which share a scale of the weight, and
sums are multiplied with scales. That is 5 float32 operations for each column and 128 channels of a
row: with more columns it is less work to multiply scales into codes (``gluon_sm90_w4a8_gemm``).
"""

# mypy: ignore-errors

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops._gluon import view
from anymla.ops._gluon_ptx import gdc_launch_dependents, gdc_wait
from anymla.ops.moe.gluon_sm90_grouped_gemm import (
    _UNIT,
    _as_column,
    _clamped_swiglu,
    _decode_e2m1,
    _decode_scales,
    _split2,
    _split4,
)
from anymla.ops.moe.gluon_sm90_w4a8_gemm import (
    _FIRST,
    _SECOND,
    _async_load,
    _pair_weights,
    _store,
    _tiles_of_cta,
    _work_tile,
)


class Ring(NamedTuple):
    """Shared memory and barriers of all partitions.

    Attributes:
        codes: packed codes of the stages, int32 [8 STAGES, 32, 16]: of half a stage two
            pieces of either half of a tile.
        loaded: the same memory as TMA fills it, uint8 [4 STAGES, 64, 64].
        x: activations of half stages, e4m3 [2 STAGES, N, 128].
        x_scales: scales of the activations, float32 [256 / QUANT STAGES, N].
        x_loaded: the same memory as TMA fills it, [STAGES, 256 / QUANT, N].
        factors: scales of the weights of half stages, rows in the order of each consumer's
            operands, float32 [4 STAGES, 64, 4].
        factors_stored: the same memory as it is written, [2 STAGES, 128, 4].
        full: barriers of filled stages.
        empty: barriers of released stages.
    """

    codes: Any
    loaded: Any
    x: Any
    x_scales: Any
    x_loaded: Any
    factors: Any
    factors_stored: Any
    full: Any
    empty: Any


@gluon.jit
def _tile_of(blocks, count, work_tile, work_tiles, TILES: gl.constexpr):
    """Return what ``_work_tile`` does, beyond the last tile of the last one."""
    tile = gl.maximum(gl.minimum(work_tile, work_tiles - 1), 0)
    return _work_tile(blocks, count, tile, TILES)


@gluon.jit
def _produce(
    x_desc, x_scale_desc, a_desc, b_desc, ring, blocks, count, a_rows, b_rows, work_tiles,
    K: gl.constexpr, N: gl.constexpr, UP: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr, QUANT: gl.constexpr,
):  # fmt: skip
    """Load all stages of a CTA's tiles by TMA."""
    ROWS: gl.constexpr = 64 if UP else 128
    PER_STAGE: gl.constexpr = 256 // QUANT
    BYTES: gl.constexpr = 2 * (128 * 64 + N * 128) + PER_STAGE * N * 4
    step = 0
    work_tile = gl.program_id(0)
    expert, tile, place, _ = _tile_of(blocks, count, work_tile, work_tiles, TILES)
    for _number in range(_tiles_of_cta(work_tiles)):
        scales_at = work_tile // TILES * (K // QUANT)
        row_a = expert * a_rows + tile * ROWS
        row_b = expert * b_rows + tile * ROWS + (0 if UP else 64)
        x_row = place
        # Read while this tile's stages are loaded.
        work_tile += gl.num_programs(0)
        expert, tile, place, _ = _tile_of(blocks, count, work_tile, work_tiles, TILES)
        for part in range(K // 256):
            s = step % STAGES
            mbarrier.wait(ring.empty.index(s), ((step // STAGES) & 1) ^ 1)
            full = ring.full.index(s)
            mbarrier.expect(full, BYTES)
            _async_load(
                x_scale_desc, [scales_at + part * PER_STAGE, 0], full, ring.x_loaded.index(s)
            )
            for i in gl.static_range(2):
                t = 2 * s + i
                qb = 2 * part + i
                _async_load(a_desc, [row_a, qb * 64], full, ring.loaded.index(2 * t))
                _async_load(b_desc, [row_b, qb * 64], full, ring.loaded.index(2 * t + 1))
                _async_load(x_desc, [x_row, qb * 128], full, ring.x.index(t))
            step += 1


@gluon.jit
def _store_factors(ring, step, first, second, STAGES: gl.constexpr):
    """Store a stage's factors, of words [128, 1] for each of its halves; return the next step."""
    s = step % STAGES
    mbarrier.wait(ring.empty.index(s), ((step // STAGES) & 1) ^ 1)
    ring.factors_stored.index(2 * s).store(_decode_scales(first))
    ring.factors_stored.index(2 * s + 1).store(_decode_scales(second))
    mbarrier.arrive(ring.full.index(s), count=1)
    return step + 1


@gluon.jit
def _convert_scales(
    s1, s1_stride, s3, s3_stride, ring, blocks, count, work_tiles,
    K: gl.constexpr, UP: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Store the scales of every stage as float32, rows in the order of the operands'."""
    # A load has the words of as many stages as divide K, at most 16 bytes of a row.
    WORDS: gl.constexpr = 4 if K % 512 == 0 else 2
    L: gl.constexpr = gl.BlockedLayout([1, WORDS], [32, 1], [gl.num_warps(), 1], [1, 0])
    ROWS: gl.constexpr = 64 if UP else 128
    OF_ROW: gl.constexpr = K // 128
    word = gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, L)), 0)
    line = gl.arange(0, 128, layout=gl.SliceLayout(1, L))
    # Eight rows of the first half of a tile alternate with eight of the second.
    other = line // 8 % 2
    row = line // 16 * 8 + line % 8
    step = 0
    work_tile = gl.program_id(0)
    expert, tile, _, _ = _tile_of(blocks, count, work_tile, work_tiles, TILES)
    for _number in range(_tiles_of_cta(work_tiles)):
        a_offset = expert.to(gl.int64) * s1_stride + tile * (ROWS * (K // 32))
        b_offset = expert.to(gl.int64) * s3_stride + tile * (ROWS * (K // 32))
        if not UP:
            b_offset += 64 * (K // 32)
        at = gl.where(other == 0, s1 + a_offset, s3 + b_offset) + row * (K // 32)
        at = gl.expand_dims(at.to(gl.pointer_type(gl.int32)), 1) + word
        words = gl.load(at)
        second = gl.load(at + WORDS % OF_ROW)
        work_tile += gl.num_programs(0)
        expert, tile, _, _ = _tile_of(blocks, count, work_tile, work_tiles, TILES)
        for first in range(0, OF_ROW, WORDS):
            # Two loads are in flight while the words of one are stored.
            third = gl.load(at + (first + 2 * WORDS) % OF_ROW)
            if WORDS == 4:
                w0, w1, w2, w3 = _split4(words)
                step = _store_factors(ring, step, w0, w1, STAGES)
                step = _store_factors(ring, step, w2, w3, STAGES)
            else:
                w0, w1 = _split2(words)
                step = _store_factors(ring, step, w0, w1, STAGES)
            words, second = second, third


@gluon.jit
def _rows_of_both(a, b):
    """Put eight rows of b behind eight of a: [32, W] each to [64, W]."""
    W: gl.constexpr = a.shape[1]
    both = gl.reshape(gl.join(a, b), [4, 8, W, 2])
    return gl.reshape(gl.permute(both, (0, 3, 1, 2)), [64, W])


@gluon.jit
def _multiply(words, x, i: gl.constexpr, ACC: gl.constexpr, N: gl.constexpr):
    """Issue product i of half a stage, of words [64, 4] with 32 channels of x [N, 128]."""
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=4)
    some = x.slice(32 * i, 32, 1).permute((1, 0))
    zero = gl.zeros([64, N], gl.float32, ACC)
    codes = gl.convert_layout(_decode_e2m1(words), A)
    return warpgroup_mma(codes, some, zero, use_acc=False, is_async=True)


@gluon.jit
def _x_scale(ring, number, ACC: gl.constexpr):
    """Load the pairs' scales of a quant block, [1, N]."""
    return gl.expand_dims(ring.x_scales.index(number).load(gl.SliceLayout(0, ACC)), 0)


@gluon.jit
def _add_products(
    sums, ring, t, N: gl.constexpr, QUANT: gl.constexpr, CONSUMER: gl.constexpr,
    WORDS: gl.constexpr, FACTORS: gl.constexpr,
):  # fmt: skip
    """Add the four scaled products of half a stage to the sums."""
    ACC: gl.constexpr = sums.type.layout
    a = ring.codes.index(4 * t + CONSUMER).load(WORDS)
    b = ring.codes.index(4 * t + 2 + CONSUMER).load(WORDS)
    x = ring.x.index(t)
    w0, w1, w2, w3 = _split4(_rows_of_both(a, b))
    p0 = _multiply(w0, x, 0, ACC, N)
    p1 = _multiply(w1, x, 1, ACC, N)
    p2 = _multiply(w2, x, 2, ACC, N)
    p3 = _multiply(w3, x, 3, ACC, N)
    f0, f1, f2, f3 = _split4(ring.factors.index(2 * t + CONSUMER).load(FACTORS))
    p0, p1, p2, p3 = warpgroup_mma_wait(0, deps=[p0, p1, p2, p3])
    # The pairs' scales are loaded only now: products take most registers.
    if QUANT == 128:
        total = p0 * _as_column(f0, ACC) + p1 * _as_column(f1, ACC)
        total = total + p2 * _as_column(f2, ACC) + p3 * _as_column(f3, ACC)
        return sums + total * _x_scale(ring, t, ACC)
    else:
        sums += p0 * _as_column(f0, ACC) * _x_scale(ring, 4 * t, ACC)
        sums += p1 * _as_column(f1, ACC) * _x_scale(ring, 4 * t + 1, ACC)
        sums += p2 * _as_column(f2, ACC) * _x_scale(ring, 4 * t + 2, ACC)
        return sums + p3 * _as_column(f3, ACC) * _x_scale(ring, 4 * t + 3, ACC)


@gluon.jit
def _consume(
    ring, weights, sorted_pairs, blocks, out, count, limit, work_tiles,
    K: gl.constexpr, OUT: gl.constexpr, N: gl.constexpr, UP: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr, QUANT: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Multiply 32 rows of either half of every tile, and store the results."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    # Thread t of four has word t of each group of 32 channels.
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 4], [0, 8]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 16]
    )
    FACTORS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 4],
    )  # fmt: skip
    DT: gl.constexpr = out.dtype.element_ty
    step = 0
    for number in range(_tiles_of_cta(work_tiles)):
        work_tile = gl.program_id(0) + number * gl.num_programs(0)
        _, tile, place, end = _work_tile(blocks, count, work_tile, TILES)
        sums = gl.zeros([64, N], gl.float32, ACC)
        for _ in range(K // 256):
            s = step % STAGES
            mbarrier.wait(ring.full.index(s), (step // STAGES) & 1)
            sums = _add_products(sums, ring, 2 * s, N, QUANT, CONSUMER, WORDS, FACTORS)
            sums = _add_products(sums, ring, 2 * s + 1, N, QUANT, CONSUMER, WORDS, FACTORS)
            fence_async_shared()
            mbarrier.arrive(ring.empty.index(s), count=1)
            step += 1
        parts = gl.permute(gl.reshape(sums * _UNIT, [4, 2, 8, N]), (0, 2, 3, 1))
        first, second = gl.split(parts)
        first, second = gl.reshape(first, [32, N]), gl.reshape(second, [32, N])
        if UP:
            L: gl.constexpr = first.type.layout
            gate, up = first.to(DT).to(gl.float32), second.to(DT).to(gl.float32)
            value = _clamped_swiglu(gate, up, limit)
            value = value * _pair_weights(weights, sorted_pairs, place, end, N, L)
            channel = tile * 64 + 32 * CONSUMER
            _store(value, out, sorted_pairs, place, end, channel, OUT, True)
        else:
            channel = tile * 128 + 32 * CONSUMER
            _store(first, out, sorted_pairs, place, end, channel, OUT, False)
            _store(second, out, sorted_pairs, place, end, channel + 64, OUT, False)


@gluon.jit(do_not_specialize=["count", "a_rows", "b_rows"])
def w4a8_sums_kernel(
    x_desc, x_scale_desc, a_desc, b_desc, weights, sorted_pairs, blocks, s1, s1_stride, s3,
    s3_stride, out, count, a_rows, b_rows, limit,
    K: gl.constexpr, OUT: gl.constexpr, N: gl.constexpr, UP: gl.constexpr, STAGES: gl.constexpr,
    QUANT: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Compute one grouped GEMM: w1 and w3 with SwiGLU and the pairs' weights (UP), or w2.

    Args:
        x_desc: e4m3 [P, K], operands of sorted pairs in the order of decoded weights; boxes [N,
            128].
        x_scale_desc: float32 [blocks * K / QUANT, N], scales of x, block by block; boxes [256 /
            QUANT, N].
        a_desc: uint8, rows of packed codes of all experts' w1 (or w2), K / 2 bytes each; boxes [64,
            64].
        b_desc: rows of packed codes of w3 (or w2), like ``a_desc``.
        weights: weights of the pairs with UP, float32.
        sorted_pairs: int32, pairs sorted by expert.
        blocks: int32 [3 * count + 1], list of blocks as ``triton_align`` makes it.
        s1: uint8 scales of w1 (or w2) of the first expert.
        s1_stride: bytes from one expert's scales to the next's.
        s3: scales of w3 (or w2), like ``s1``.
        s3_stride: bytes from one expert's scales to the next's.
        out: with UP [P, OUT] in the order of ``sorted_pairs``, else in that of pairs.
        count: number of blocks for which ``blocks`` has space.
        a_rows: rows of ``a_desc`` from one expert to the next.
        b_rows: rows of ``b_desc`` from one expert to the next.
        limit: clamp of SwiGLU.
        K: number of input channels, a multiple of 256.
        OUT: rows of the result.
        N: pairs per block, 16 or 32.
        UP: True for w1 and w3 with SwiGLU, False for w2.
        STAGES: number of stages in the ring.
        QUANT: channels that share a scale of x, 128 or 32.
        CONSUMER_REGISTERS: registers per thread of the second consumer; the first has the rest.
        PRODUCER_REGISTERS: registers per thread of the other partitions.
        PDL: True if launched by ``pdl_launch``.
    """
    TILES: gl.constexpr = OUT // (64 if UP else 128)
    PER_STAGE: gl.constexpr = 256 // QUANT
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    loaded = gl.allocate_shared_memory(gl.uint8, [4 * STAGES, 64, 64], a_desc.layout)
    codes = view(loaded, gl.int32, [8 * STAGES, 32, 16], gl.NVMMASharedLayout(64, 32, rank=2))
    x = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, N, 128], x_desc.layout)
    x_loaded = gl.allocate_shared_memory(gl.float32, [STAGES, PER_STAGE, N], x_scale_desc.layout)
    x_scales = view(x_loaded, gl.float32, [PER_STAGE * STAGES, N], LINE)
    factors_stored = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 128, 4], FLAT)
    factors = view(factors_stored, gl.float32, [4 * STAGES, 64, 4], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    ring = Ring(codes, loaded, x, x_scales, x_loaded, factors, factors_stored, full, empty)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    work_tiles = gl.load(blocks + 3 * count) * TILES
    gl.warp_specialize(
        [
            (_consume, (
                ring, weights, sorted_pairs, blocks, out, count, limit, work_tiles,
                K, OUT, N, UP, TILES, STAGES, QUANT, _FIRST,
            )),
            (_consume, (
                ring, weights, sorted_pairs, blocks, out, count, limit, work_tiles,
                K, OUT, N, UP, TILES, STAGES, QUANT, _SECOND,
            )),
            (_convert_scales, (
                s1, s1_stride, s3, s3_stride, ring, blocks, count, work_tiles,
                K, UP, TILES, STAGES,
            )),
            (_produce, (
                x_desc, x_scale_desc, a_desc, b_desc, ring, blocks, count, a_rows, b_rows,
                work_tiles, K, N, UP, TILES, STAGES, QUANT,
            )),
        ],
        [4, 2, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip

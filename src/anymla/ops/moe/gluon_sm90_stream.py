"""Grouped products of MXFP4 experts for few tokens on Hopper, as a stream of weights.

    item      a tile of M rows of the weight for a block of pairs; items, block after block, are
              shared out evenly among programs, as many as are on the device at once
    stage     CHUNK channels of a tile: codes, scales, and where a block begins its activations

A program asks for STAGES stages ahead, whatever they belong to, so that its reading does not stop
between tiles or blocks; the activations of a block stay in shared memory for all its tiles. For
that STAGES is less than a tile's number of stages: a new block's activations then replace what has
been used by the last tile before.

w2's programs ask for weights before they wait. The plan that says which is then there, because w1's
kernel has waited for it before it lets them start; it is read past the first-level cache, which may
hold what was at its place before.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from anymla.ops._gluon import view
from anymla.ops.moe.gluon_sm90_products import (
    above,
    factors_of,
    finish,
    quantise,
    quarters,
    start,
    two,
)
from anymla.ops.moe.gluon_sm90_requests import ask_rows, ask_weights, tile_of
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait


@gluon.jit
def gated(gate, up, limit):
    """As ``triton_swiglu.gated``."""
    gate = gl.where(gate > limit, limit, gate)
    up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def _leave(
    sums, item, weights, order, blocks, count, out, limit,
    OUT: gl.constexpr, M: gl.constexpr, N: gl.constexpr, TILES: gl.constexpr, UP: gl.constexpr,
):  # fmt: skip
    """Store a tile's results; with UP after SwiGLU and the pairs' weights."""
    DT: gl.constexpr = out.dtype.element_ty
    block = item // TILES
    tile = item - block * TILES
    if UP:
        halves = gl.permute(gl.reshape(sums, [M // 16, 2, 8, N]), (0, 2, 3, 1))
        gate, up = gl.split(halves)
        value = gated(gate.to(DT).to(gl.float32), up.to(DT).to(gl.float32), limit)
        value = gl.reshape(value, [M // 2, N])
    else:
        value = sums
    L: gl.constexpr = value.type.layout
    column = gl.arange(0, N, layout=gl.SliceLayout(0, L))
    place = gl.load(blocks + count + block) + column
    inside = place < gl.load(blocks + 2 * count + block)
    pair = gl.load(order + place, mask=inside, other=0)
    if UP:
        value = value * gl.expand_dims(gl.load(weights + pair, mask=inside, other=0.0), 0)
    ROWS: gl.constexpr = value.shape[0]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)) + tile * ROWS
    to = out + gl.expand_dims(pair.to(gl.int64) * OUT, 0) + gl.expand_dims(row, 1)
    gl.store(to, value.to(DT), mask=gl.expand_dims(inside, 0))


@gluon.jit(do_not_specialize=["count"])
def stream_kernel(
    x, x_scales, weights, order, blocks, w1, w1_stride, w1_table, s1, s1_stride, s1_table,
    w3, w3_stride, w3_table, s3, s3_stride, s3_table, out, count, limit,
    K: gl.constexpr, OUT: gl.constexpr, PER_TOKEN: gl.constexpr, M: gl.constexpr,
    N: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, UP: gl.constexpr,
    W_UNIT: gl.constexpr, WARPS: gl.constexpr, TOGETHER: gl.constexpr, BATCH: gl.constexpr,
    LATER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """See the file.

    Args:
        x: with UP uint8, e4m3 operands [T, K] in the order of decoded weights, else any [pairs, K].
        x_scales: with UP float32 [T, K / 128].
        weights: float32 pairs' weights, with UP.
        order: int32, pairs by expert.
        blocks: int32 [3 * count + 1]: see ``triton_prepare``.
        w1: uint8, the first expert's codes; its stride and table are those of ``triton_stack``.
        w1_stride: likewise.
        w1_table: likewise.
        s1: its scales.
        s1_stride: likewise.
        s1_table: likewise.
        w3: as w1, with UP.
        w3_stride: likewise.
        w3_table: likewise.
        s3: as s1, with UP.
        s3_stride: likewise.
        s3_table: likewise.
        out: [pairs, OUT].
        count: see ``blocks``.
        limit: of SwiGLU.
        K: channels.
        OUT: rows of the result.
        PER_TOKEN: pairs of a token, with UP.
        M: rows of a tile; with UP half of them are w1's.
        N: pairs of a block.
        CHUNK: see the file; 256 or 512.
        STAGES: likewise.
        UP: w1 and w3 and what follows them, or w2.
        W_UNIT: of the tables.
        WARPS: of a program; 16 rows each.
        TOGETHER: programs of a multiprocessor.
        BATCH: runs of w2's input that are quantised at once.
        LATER: products under way while those before are added up, 4 or 0.
        PDL: launched while the kernels before still run.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 32])
    RC: gl.constexpr = gl.SliceLayout(0, ACC)
    C: gl.constexpr = CHUNK // 8
    CHUNKS: gl.constexpr = K // CHUNK
    RUNS: gl.constexpr = CHUNK // 128
    ROWS: gl.constexpr = M // 2 if UP else M
    TILES: gl.constexpr = OUT // ROWS
    BY_WARP: gl.constexpr = [[16, 0], [32, 0]] if WARPS == 4 else [[16, 0], [32, 0], [64, 0]]
    BY_WORD: gl.constexpr = (
        [[8, 0], [0, 4], [0, 8], [0, 16]] if C == 32 else [[8, 0], [0, 4], [0, 8], [0, 16], [0, 32]]
    )
    BY_RUN: gl.constexpr = (
        [[8, 0], [0, 1], [0, 2], [0, 4]] if RUNS == 2 else [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]]
    )
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        BY_WORD, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], BY_WARP, [], [M, C]
    )
    FACTORS: gl.constexpr = gl.DistributedLinearLayout(
        BY_RUN, [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], BY_WARP, [], [M, 4 * RUNS]
    )
    SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // RUNS, RUNS], [WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(
        gl.int32, [STAGES, M, C], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    scale_ring = gl.allocate_shared_memory(gl.int32, [STAGES, M, RUNS], FLAT)
    factors = gl.allocate_shared_memory(
        gl.float32, [M, 4 * RUNS], gl.SwizzledSharedLayout(4, 8 // RUNS, RUNS, [1, 0])
    )
    x_s = gl.allocate_shared_memory(
        gl.float8e4nv, [K // 32, N, 32], gl.NVMMASharedLayout(32, 8, rank=2)
    )
    x_words = view(
        x_s, gl.int32, [CHUNKS, CHUNK // 32 * N, 8], gl.SwizzledSharedLayout(4, 4, 2, [1, 0])
    )
    x_bytes = view(x_s, gl.uint8, [K // 128, 4 * N, 32], gl.SwizzledSharedLayout(16, 4, 2, [1, 0]))
    x_factors = gl.allocate_shared_memory(gl.float32, [CHUNKS, RUNS, N], FLAT)
    x_factor = view(x_factors, gl.float32, [CHUNKS * RUNS, N], LINE)

    if PDL and UP:
        # The plan says which weights are read, so nothing can be asked for before.
        gdc_wait()
        gdc_launch_dependents()
    items = gl.load(blocks + 3 * count, cache_modifier=".cg") * TILES
    programs = gl.num_programs(0)
    p = gl.program_id(0)
    # Neighbours on a multiprocessor have neighbouring shares, which together are more even.
    p = p % (programs // TOGETHER) * TOGETHER + p // (programs // TOGETHER)
    first = (p.to(gl.int64) * items // programs).to(gl.int32)
    last = ((p + 1).to(gl.int64) * items // programs).to(gl.int32)
    stages = (last - first) * CHUNKS

    asked = first  # the item of the stage that is asked for next, and which of its stages that is
    part = 0
    wa, wb, sa, sb = w1, w1, s1, s1
    place, end = 0, 0
    for g in range(STAGES):
        if g < stages:
            if part == 0:
                wa, wb, sa, sb, place, end = tile_of(
                    asked, blocks, count, w1, w1_stride, w1_table, s1, s1_stride, s1_table,
                    w3, w3_stride, w3_table, s3, s3_stride, s3_table, K, ROWS, TILES, UP, W_UNIT,
                )  # fmt: skip
            ask_weights(
                ring.index(g), scale_ring.index(g), wa, wb, sa, sb, part, M, K, CHUNK, UP, WARPS
            )
            if UP:
                ask_rows(
                    x, x_scales, order, x_words.index(part), x_factors.index(part), place, end,
                    part, K, N, CHUNK, PER_TOKEN, WARPS,
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
        item = first + g // CHUNKS
        fresh = (g < CHUNKS) | (item % TILES == 0)
        async_copy.wait_group(STAGES - 1)
        words = ring.index(slot).load(WORDS)
        factors.store(factors_of(scale_ring.index(slot).load(SCALES)))
        if UP:
            if fresh:
                fence_async_shared()
        else:
            if fresh & (chunk == 0):
                quantise(
                    x, order, blocks, item // TILES, count, x_bytes, x_factor, K, N, WARPS, BATCH
                )
                fence_async_shared()
        factor = factors.load(FACTORS)
        more = g + STAGES < stages
        if more:
            if part == CHUNKS:
                part = 0
                asked = asked + 1
                wa, wb, sa, sb, place, end = tile_of(
                    asked, blocks, count, w1, w1_stride, w1_table, s1, s1_stride, s1_table,
                    w3, w3_stride, w3_table, s3, s3_stride, s3_table, K, ROWS, TILES, UP, W_UNIT,
                )  # fmt: skip
            ask_weights(
                ring.index(slot), scale_ring.index(slot), wa, wb, sa, sb, part,
                M, K, CHUNK, UP, WARPS,
            )  # fmt: skip
        number = chunk * (CHUNK // 32)
        run = chunk * RUNS
        if RUNS == 2:
            r0, r1 = two(words)
            f0, f1 = two(factor)
            p0 = start(r0, x_s, number, ACC, N)
            if LATER == 0:
                sums += finish(p0, f0, ACC, 0) * above(x_factor, run, RC)
            p1 = start(r1, x_s, number + 4, ACC, N)
            if LATER != 0:
                sums += finish(p0, f0, ACC, LATER) * above(x_factor, run, RC)
            sums += finish(p1, f1, ACC, 0) * above(x_factor, run + 1, RC)
        else:
            r0, r1, r2, r3 = quarters(words)
            f0, f1, f2, f3 = quarters(factor)
            p0 = start(r0, x_s, number, ACC, N)
            if LATER == 0:
                sums += finish(p0, f0, ACC, 0) * above(x_factor, run, RC)
            p1 = start(r1, x_s, number + 4, ACC, N)
            if LATER != 0:
                sums += finish(p0, f0, ACC, LATER) * above(x_factor, run, RC)
            else:
                sums += finish(p1, f1, ACC, 0) * above(x_factor, run + 1, RC)
            p2 = start(r2, x_s, number + 8, ACC, N)
            if LATER != 0:
                sums += finish(p1, f1, ACC, LATER) * above(x_factor, run + 1, RC)
            else:
                sums += finish(p2, f2, ACC, 0) * above(x_factor, run + 2, RC)
            p3 = start(r3, x_s, number + 12, ACC, N)
            if LATER != 0:
                sums += finish(p2, f2, ACC, LATER) * above(x_factor, run + 2, RC)
            sums += finish(p3, f3, ACC, 0) * above(x_factor, run + 3, RC)
        if more:
            if UP and (asked == first) | (asked % TILES == 0):
                ask_rows(
                    x, x_scales, order, x_words.index(part), x_factors.index(part), place, end,
                    part, K, N, CHUNK, PER_TOKEN, WARPS,
                )  # fmt: skip
            part += 1
        async_copy.commit_group()
        if chunk == CHUNKS - 1:
            _leave(sums, item, weights, order, blocks, count, out, limit, OUT, M, N, TILES, UP)
            sums = gl.zeros([M, N], gl.float32, ACC)

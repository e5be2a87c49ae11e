"""Products of FP8 weights and few FP8 activations on Hopper, as fast as the weight can be read.

Grid: as many programs as run at once, each with every so-many-th tile of ROWS rows of the weight.

    w [groups x n, K]  .  x [tokens, group, K]^T  ->  y [tokens, group, n]

    producer    1 warp: WARPS runs of 128 channels of both operands at a time, by the copy engine,
                into a ring of STAGES; weights as early as the program starts
    consumer    a run a warp, which share nothing before the end of a tile, where their sums are
                added in the order of the runs

Barriers: full[i] copies -> consumer, empty[i] consumer -> producer.

Codes are decoded to float16 in registers, whose products are exact, and summed in float32; each
run's sum is then scaled. Channels go into the matrix instruction in another order, the same for
both operands: a thread has 32 neighbours of every row, which it reads 16 at a time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from anymla.ops.linear.gluon_sm90_produce import produce
from anymla.ops.linear.gluon_sm90_words import decoded, factors, halves, words_layout
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait


@gluon.jit
def _consume(
    ring, x_ring, full, empty, x_scales, scales, out, tokens, n, runs, tiles, groups,
    x_scale_token, x_scale_run,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    BY_RUN: gl.constexpr, PLAIN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2 if PLAIN else 4)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2 if PLAIN else 4)
    FACTORS: gl.constexpr = gl.SliceLayout(1, SUMS)
    LAST: gl.constexpr = gl.BlockedLayout(
        [WARPS, 1, 1], [1, min(ROWS, 32), 32 // min(ROWS, 32)], [1, 1, WARPS], [1, 2, 0]
    )
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    blocks = (n + 127) // 128
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, FACTORS))
    run = gl.arange(0, WARPS, layout=gl.SliceLayout(1, FACTORS))
    last_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(0, LAST)))
    last_token = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAST)))
    if not PLAIN:
        x_group = first * ROWS // n
        s_at = scales + (x_group * blocks + (first * ROWS - x_group * n) // 128) * runs + run
        w_scale = gl.load(s_at, mask=run < runs, other=0)
    if PDL:
        gdc_wait()
    if not PLAIN:
        if BY_RUN:
            # Rows come in sixteens where their scales lie side by side.
            x_scale_run = x_scale_run // 16 * 16
        f_at = gl.expand_dims(column if BY_RUN else column * x_scale_token, 0)
        f_at = x_scales + (f_at + gl.expand_dims(run * x_scale_run, 1))
        inside = gl.expand_dims((column // 16 * 16 if BY_RUN else column) < tokens, 0)
        # Of the step after the one that is multiplied.
        x_tile = first
        x_run = 0
        scale = gl.load(
            f_at + x_group * runs * x_scale_run, mask=gl.expand_dims(run < runs, 1) & inside,
            other=0.0,
        )  # fmt: skip
    step = 0
    for tile in range(first, tiles, programs):
        group = tile * ROWS // n
        sums = gl.zeros([WARPS, ROWS, COLUMNS], gl.float32, layout=SUMS)
        for _ in range(0, runs, WARPS):
            if not PLAIN:
                factor = scale * gl.expand_dims(factors(w_scale), 1)
                x_run += WARPS
                if x_run >= runs:
                    x_run = 0
                    x_tile += programs
                    x_group = x_tile * ROWS // n
                    block = (x_tile * ROWS - x_group * n) // 128
                    s_at = scales + (x_group * blocks + block) * runs + run
                left = gl.where(x_tile < tiles, runs - x_run, 0)
                scale = gl.load(
                    f_at + (x_group * runs + x_run) * x_scale_run,
                    mask=gl.expand_dims(run < left, 1) & inside, other=0.0,
                )  # fmt: skip
                w_scale = gl.load(s_at + x_run, mask=run < left, other=0)
            slot = step % STAGES
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            words = ring.index(slot).load(words_layout(WARPS, ROWS))
            x_words = x_ring.index(slot).load(words_layout(WARPS, COLUMNS))
            # What has been read must have arrived before the copy engine writes there again: a
            # barrier alone does not wait for reads that are under way.
            fence_async_shared()
            mbarrier.arrive(empty.index(slot))
            if PLAIN:
                a = gl.convert_layout(halves(words), A)
                b = gl.convert_layout(gl.permute(halves(x_words), (0, 2, 1)), B)
                sums = mma_v2(a, b, sums)
            else:
                a = gl.convert_layout(decoded(words), A)
                b = gl.convert_layout(gl.permute(decoded(x_words), (0, 2, 1)), B)
                part = mma_v2(a, b, gl.zeros([WARPS, ROWS, COLUMNS], gl.float32, layout=SUMS))
                sums += part * gl.expand_dims(factor, 1)
            step += 1
        total = gl.sum(gl.convert_layout(sums, LAST), 0)
        at = gl.expand_dims(last_token * groups + group, 0) * n
        at += gl.expand_dims(tile * ROWS - group * n + last_row, 1)
        gl.store(
            out + at, total.to(out.dtype.element_ty), mask=gl.expand_dims(last_token < tokens, 0)
        )


@gluon.jit(do_not_specialize=["tokens", "runs", "tiles", "groups", "x_scale_token", "x_scale_run"])
def runs_kernel(
    x_desc, x_scales, w_desc, scales, out, tokens, n, runs, tiles, groups, x_scale_token,
    x_scale_run,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    BY_RUN: gl.constexpr, PLAIN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """See the file.

    Args:
        x_desc: int32 [groups * K / 128, T, 32], e4m3 codes; boxes [WARPS, COLUMNS, 32].
        x_scales: float32, of run r of row t and group g at t * x_scale_token + (g * runs + r)
            * x_scale_run.
        w_desc: int32 [K / 128, groups * n, 32], the weight's codes; boxes [WARPS, ROWS, 32].
        scales: uint8 (ue8m0) or float32 [groups, ceil(n / 128), K / 128].
        out: [T, groups, n].
        tokens: T, at most COLUMNS.
        n: rows of a group, a multiple of ROWS.
        runs: K / 128.
        tiles: groups * n / ROWS.
        groups: see above.
        x_scale_token: see above.
        x_scale_run: see above.
        ROWS: 16, 32 or 64.
        COLUMNS: tokens of the tile, at least 8.
        WARPS: of the consumer.
        STAGES: of the ring.
        BY_RUN: x_scale_token is 1, and there are scales of as many rows as ``QuantizedRows`` has.
        PLAIN: both operands are bfloat16, runs are 64 channels, and there are no scales.
        PDL: launched before what makes x has ended.
    """
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, ROWS, 32], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, COLUMNS, 32], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    if PDL:
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (
                ring, x_ring, full, empty, x_scales, scales, out, tokens, n, runs, tiles, groups,
                x_scale_token, x_scale_run, ROWS, COLUMNS, WARPS, STAGES, BY_RUN, PLAIN,
                PDL,
            )),
            (produce, (
                x_desc, w_desc, ring, x_ring, full, empty, n, runs, tiles, ROWS,
                (ROWS + COLUMNS) * WARPS * 128, WARPS, 0, STAGES, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip

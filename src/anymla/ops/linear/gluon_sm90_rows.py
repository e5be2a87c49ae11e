"""Products of FP8 weights that have few channels and few FP8 activations on Hopper.

As ``gluon_sm90_runs``, but warps share rows instead of channels: a step is one run of 128 channels
of ROWS rows, and a tile's sums are those of its warps.

    producer    1 warp: runs of both operands by the copy engine into a ring of STAGES
    consumer    ROWS / WARPS rows a warp
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from anymla.ops.linear.gluon_sm90_produce import produce
from anymla.ops.linear.gluon_sm90_words import decoded_flat, factors, flat_layout
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait


@gluon.jit
def _consume(
    ring, x_ring, full, empty, x_scales, scales, out, tokens, n, runs, tiles, groups,
    x_scale_token, x_scale_run,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    BY_RUN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 4)
    LAST: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, WARPS], [0, 1])
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    blocks = (n + 127) // 128
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUMS))
    last_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAST))
    last_token = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAST))
    if PDL:
        gdc_wait()
    if BY_RUN:
        # Rows come in sixteens where their scales lie side by side.
        x_scale_run = x_scale_run // 16 * 16
    f_at = x_scales + (column if BY_RUN else column * x_scale_token)
    inside = (column // 16 * 16 if BY_RUN else column) < tokens
    step = 0
    for tile in range(first, tiles, programs):
        group = tile * ROWS // n
        line = tile * ROWS - group * n
        s_at = scales + (group * blocks + line // 128) * runs
        f_run = f_at + group * runs * x_scale_run
        sums = gl.zeros([ROWS, COLUMNS], gl.float32, layout=SUMS)
        x_scale, w_scale = gl.load(f_run, mask=inside, other=0.0), gl.load(s_at)
        for run in range(runs):
            factor = x_scale * factors(w_scale)
            f_run += x_scale_run
            s_at += 1
            more = run + 1 < runs
            x_scale = gl.load(f_run, mask=inside & more, other=0.0)
            w_scale = gl.load(s_at, mask=more, other=0)
            slot = step % STAGES
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            words = ring.index(slot).load(flat_layout(ROWS, WARPS, False))
            x_words = x_ring.index(slot).load(flat_layout(COLUMNS, WARPS, True))
            # What has been read must have arrived before the copy engine writes there again: a
            # barrier alone does not wait for reads that are under way.
            fence_async_shared()
            mbarrier.arrive(empty.index(slot))
            a = gl.convert_layout(decoded_flat(words), A)
            b = gl.convert_layout(gl.permute(decoded_flat(x_words), (1, 0)), B)
            part = mma_v2(a, b, gl.zeros([ROWS, COLUMNS], gl.float32, layout=SUMS))
            sums += part * gl.expand_dims(factor, 0)
            step += 1
        total = gl.convert_layout(sums, LAST)
        at = gl.expand_dims(last_token * groups + group, 0) * n + gl.expand_dims(line + last_row, 1)
        gl.store(
            out + at, total.to(out.dtype.element_ty), mask=gl.expand_dims(last_token < tokens, 0)
        )


@gluon.jit(do_not_specialize=["tokens", "runs", "tiles", "groups", "x_scale_token", "x_scale_run"])
def rows_kernel(
    x_desc, x_scales, w_desc, scales, out, tokens, n, runs, tiles, groups, x_scale_token,
    x_scale_run,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    BY_RUN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """See the file.

    Args:
        x_desc: int32 [T, groups * K / 4], e4m3 codes; boxes [COLUMNS, 32].
        x_scales: as of ``runs_kernel``.
        w_desc: int32 [groups * n, K / 4], the weight's codes; boxes [ROWS, 32].
        scales: as of ``runs_kernel``.
        out: [T, groups, n].
        tokens: T, at most COLUMNS.
        n: rows of a group, a multiple of ROWS.
        runs: K / 128.
        tiles: groups * n / ROWS.
        groups: see above.
        x_scale_token: as of ``runs_kernel``.
        x_scale_run: as of ``runs_kernel``.
        ROWS: 64 or 128, which share scales.
        COLUMNS: tokens of the tile, at least 8.
        WARPS: of the consumer.
        STAGES: of the ring.
        BY_RUN: as of ``runs_kernel``.
        PDL: launched before what makes x has ended.
    """
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, 32], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.int32, [STAGES, COLUMNS, 32], x_desc.layout)
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
                x_scale_token, x_scale_run, ROWS, COLUMNS, WARPS, STAGES, BY_RUN, PDL,
            )),
            (produce, (
                x_desc, w_desc, ring, x_ring, full, empty, n, runs, tiles, ROWS,
                (ROWS + COLUMNS) * 128, 1, 32, STAGES, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip

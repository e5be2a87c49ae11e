"""Products of FP8 weights and tens of FP8 activations on Hopper.

Grid: as many programs as run at once, each with every so-many-th tile of ROWS rows of the weight.

    x [tokens, group, K]  .  w [groups x n, K]^T  ->  y [tokens, group, n]

    producer    1 warp: runs of 128 channels of both operands, by the copy engine, into a ring of
                STAGES; weights as early as the program starts
    consumer    16 tokens a warp: products of AT_ONCE runs by the FP8 instruction, the later of
                which are under way while the first are scaled and added in float32

Barriers: full[i] copies -> consumer, empty[i] consumer -> producer. A tile has few rows rather than
a part of K, so that no sums have to be exchanged; the activations are read once more for every
tile, from the L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops.linear.gluon_sm90_produce import produce
from anymla.ops.linear.gluon_sm90_words import factors
from anymla.ops.pdl import gdc_launch_dependents, gdc_wait


@gluon.jit
def _multiply(ring, x_ring, full, step, zeros, STAGES: gl.constexpr):
    """The product of a step, under way."""
    slot = step % STAGES
    mbarrier.wait(full.index(slot), (step // STAGES) & 1)
    return warpgroup_mma(
        x_ring.index(slot), ring.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
    )


@gluon.jit
def _scaled(product, x_scale, w_scale):
    return product * gl.expand_dims(x_scale * factors(w_scale), 1)


@gluon.jit
def _consume(
    ring, x_ring, full, empty, x_scales, scales, out, tokens, n, runs, tiles, groups,
    x_scale_token, x_scale_run,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, AT_ONCE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [TOKENS // 16, 1], [16, ROWS, 32])
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    blocks = (n + 127) // 128
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, SUMS))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS))
    inside = token < tokens
    zeros = gl.zeros([TOKENS, ROWS], gl.float32, layout=SUMS)
    if PDL:
        gdc_wait()
    step = 0
    for tile in range(first, tiles, programs):
        group = tile * ROWS // n
        line = tile * ROWS - group * n
        s_at = scales + (group * blocks + line // 128) * runs
        f_at = x_scales + token * x_scale_token + group * runs * x_scale_run
        sums = gl.zeros([TOKENS, ROWS], gl.float32, layout=SUMS)
        for _ in range(runs // AT_ONCE):
            # All asked for before anything is waited for.
            x1, w1 = gl.load(f_at, mask=inside, other=0.0), gl.load(s_at)
            x2, w2 = gl.load(f_at + x_scale_run, mask=inside, other=0.0), gl.load(s_at + 1)
            if AT_ONCE == 4:
                x3, w3 = gl.load(f_at + 2 * x_scale_run, mask=inside, other=0.0), gl.load(s_at + 2)
                x4, w4 = gl.load(f_at + 3 * x_scale_run, mask=inside, other=0.0), gl.load(s_at + 3)
            p1 = _multiply(ring, x_ring, full, step, zeros, STAGES)
            p2 = _multiply(ring, x_ring, full, step + 1, zeros, STAGES)
            if AT_ONCE == 4:
                p3 = _multiply(ring, x_ring, full, step + 2, zeros, STAGES)
                p4 = _multiply(ring, x_ring, full, step + 3, zeros, STAGES)
            p1 = warpgroup_mma_wait(AT_ONCE - 1, [p1])
            mbarrier.arrive(empty.index(step % STAGES))
            sums += _scaled(p1, x1, w1)
            p2 = warpgroup_mma_wait(AT_ONCE - 2, [p2])
            mbarrier.arrive(empty.index((step + 1) % STAGES))
            sums += _scaled(p2, x2, w2)
            if AT_ONCE == 4:
                p3 = warpgroup_mma_wait(1, [p3])
                mbarrier.arrive(empty.index((step + 2) % STAGES))
                sums += _scaled(p3, x3, w3)
                p4 = warpgroup_mma_wait(0, [p4])
                mbarrier.arrive(empty.index((step + 3) % STAGES))
                sums += _scaled(p4, x4, w4)
            f_at += AT_ONCE * x_scale_run
            s_at += AT_ONCE
            step += AT_ONCE
        to = out + gl.expand_dims((token * groups + group) * n + line, 1) + gl.expand_dims(row, 0)
        gl.store(to, sums.to(out.dtype.element_ty), mask=gl.expand_dims(inside, 1))


@gluon.jit(do_not_specialize=["tokens", "runs", "tiles", "groups", "x_scale_token", "x_scale_run"])
def tens_kernel(
    x_desc, x_scales, w_desc, scales, out, tokens, n, runs, tiles, groups, x_scale_token,
    x_scale_run,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, AT_ONCE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """See the file.

    Args:
        x_desc: [T, groups * K] of e4m3, boxes [TOKENS, 128].
        x_scales: as of ``runs_kernel``.
        w_desc: [groups * n, K] of e4m3, boxes [ROWS, 128].
        scales: as of ``runs_kernel``.
        out: [T, groups, n].
        tokens: T, at most TOKENS.
        n: rows of a group, a multiple of ROWS.
        runs: K / 128, a multiple of AT_ONCE.
        tiles: groups * n / ROWS.
        groups: see above.
        x_scale_token: as of ``runs_kernel``.
        x_scale_run: as of ``runs_kernel``.
        ROWS: a power of two from 8 to 128.
        TOKENS: 64 or 128.
        STAGES: of the ring, at least AT_ONCE.
        AT_ONCE: products under way, 2 or 4.
        PDL: launched before what makes x has ended.
    """
    ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, ROWS, 128], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, 128], x_desc.layout)
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
                x_scale_token, x_scale_run, ROWS, TOKENS, STAGES, AT_ONCE, PDL,
            )),
            (produce, (
                x_desc, w_desc, ring, x_ring, full, empty, n, runs, tiles, ROWS,
                (ROWS + TOKENS) * 128, 1, 128, STAGES, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip

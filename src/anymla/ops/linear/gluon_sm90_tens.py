"""Products of FP8 weights and tens of FP8 activations on Hopper.

Grid: (programs that share the pieces, blocks of COLUMNS tokens). A piece is ROWS rows of the weight
and one of ``splits`` parts of K; a program takes every so-many-th.

    w [groups x n, K]  .  x [tokens, group, K]^T  ->  y [tokens, group, n]

    producer    1 warp: runs of 128 channels of both operands, by the copy engine, into a ring of
                STAGES; weights as early as the program starts
    consumer    16 rows a warp: products of a run, which are scaled and added in float32

Barriers: full[i] copies -> consumer, empty[i] consumer -> producer. Of a tile with several splits
every program leaves its sums, and the last one adds all of them in the order of the splits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops.gluon_early import let_dependents_start, wait_for_predecessors
from anymla.ops.linear.gluon_sm90_few import factors
from anymla.ops.linear.gluon_sm90_many import decoded_rows, token_words, weight_words

_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _next(piece, run, end, programs, splits, per):
    """The run after this one, and the piece it is of."""
    run += 1
    if run == end:
        piece += programs
        run = piece % splits * per
        end = run + per
    return piece, run, end


@gluon.jit
def _produce(
    x_desc, w_desc, ring, x_ring, full, empty, n, runs, tiles, splits, groups,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, CHANNELS: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = (ROWS + COLUMNS) * 128
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    token = gl.program_id(1) * COLUMNS
    pieces = tiles * splits
    per = runs // splits
    steps = ((pieces - first + programs - 1) // programs) * per
    piece = first
    run = first % splits * per
    end = run + per
    for i in gl.static_range(STAGES):
        there = i < steps
        mbarrier.expect(full.index(i), BYTES, pred=there)
        _copy(
            w_desc, [piece // splits * ROWS, run * CHANNELS], full.index(i), ring.index(i),
            pred=there,
        )  # fmt: skip
        piece, run, end = _next(piece, run, end, programs, splits, per)
    if EARLY:
        wait_for_predecessors()
    piece = first
    run = first % splits * per
    end = run + per
    for i in gl.static_range(STAGES):
        group = piece // splits * ROWS // n
        _copy(
            x_desc, [token, (group * runs + run) * CHANNELS], full.index(i), x_ring.index(i),
            pred=i < steps,
        )  # fmt: skip
        piece, run, end = _next(piece, run, end, programs, splits, per)
    for step in range(STAGES, steps):
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        tile = piece // splits
        mbarrier.expect(full.index(slot), BYTES)
        _copy(w_desc, [tile * ROWS, run * CHANNELS], full.index(slot), ring.index(slot))
        _copy(
            x_desc, [token, (tile * ROWS // n * runs + run) * CHANNELS], full.index(slot),
            x_ring.index(slot),
        )  # fmt: skip
        piece, run, end = _next(piece, run, end, programs, splits, per)


@gluon.jit
def _product(ring, x_ring, operand, slot, zeros, ROWS: gl.constexpr, EXACT: gl.constexpr):
    """The product of a run, under way."""
    WARPS: gl.constexpr = ROWS // 16
    if EXACT:
        A: gl.constexpr = gl.DotOperandLayout(0, zeros.type.layout, 2)
        COLUMNS: gl.constexpr = zeros.shape[1]
        words = x_ring.index(slot).load(token_words(WARPS, COLUMNS))
        a = gl.convert_layout(decoded_rows(ring.index(slot).load(weight_words(WARPS, ROWS))), A)
        operand.store(decoded_rows(words))
        fence_async_shared()
        product = warpgroup_mma(a, operand.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        product = warpgroup_mma(
            ring.index(slot), x_ring.index(slot).permute((1, 0)), zeros, use_acc=False,
            is_async=True,
        )  # fmt: skip
    return product


@gluon.jit
def _scaled(product, x_scale, w_scale):
    """The product of a run, times the scales of its tokens and of its weights."""
    scale = x_scale * factors(w_scale)
    scale = gl.convert_layout(scale, gl.SliceLayout(0, product.type.layout))
    return product * gl.expand_dims(scale, 0)


@gluon.jit
def _consume(
    ring, x_ring, operand, full, empty, x_scales, scales, out, part, tickets, tokens, n, runs,
    tiles, splits, groups, x_scale_token, x_scale_run,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, PAIRS: gl.constexpr,
    BY_RUN: gl.constexpr, EXACT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = ROWS // 16
    STEP: gl.constexpr = 16 if EXACT else 32
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, STEP])
    LINE: gl.constexpr = (
        gl.SliceLayout(0, SUMS) if BY_RUN else gl.BlockedLayout([1], [32], [WARPS], [0])
    )
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    token0 = gl.program_id(1) * COLUMNS
    pieces = tiles * splits
    per = runs // splits
    blocks = (n + 127) // 128
    if EARLY:
        wait_for_predecessors()
    token = token0 + gl.arange(0, COLUMNS, layout=LINE)
    if BY_RUN:
        # Rows come in sixteens where their scales lie side by side.
        x_scale_run = x_scale_run // 16 * 16
    inside = (token // 16 * 16 if BY_RUN else token) < tokens
    f_at = x_scales + (token if BY_RUN else token * x_scale_token)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUMS))
    # Sums of a tile in memory: what the threads of a warp have lies side by side.
    place = gl.expand_dims(row % 8 * 8 + row // 8 * (8 * COLUMNS), 1)
    place += gl.expand_dims(column % 8 + column // 8 * 64, 0)
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout=SUMS)
    step = 0
    for piece in range(first, pieces, programs):
        tile = piece // splits
        group = tile * ROWS // n
        run = piece % splits * per
        s_at = scales + (group * blocks + (tile * ROWS - group * n) // 128) * runs + run
        f_run = f_at + (group * runs + run) * x_scale_run
        sums = gl.zeros([ROWS, COLUMNS], gl.float32, layout=SUMS)
        if PAIRS:
            for _ in range(per // 2):
                one, two = step % STAGES, (step + 1) % STAGES
                x1 = gl.load(f_run, mask=inside, other=0.0)
                x2 = gl.load(f_run + x_scale_run, mask=inside, other=0.0)
                w1, w2 = gl.load(s_at), gl.load(s_at + 1)
                mbarrier.wait(full.index(one), (step // STAGES) & 1)
                p1 = _product(ring, x_ring, operand.index(0), one, zeros, ROWS, EXACT)
                mbarrier.wait(full.index(two), ((step + 1) // STAGES) & 1)
                p2 = _product(ring, x_ring, operand.index(1), two, zeros, ROWS, EXACT)
                p1 = warpgroup_mma_wait(1, [p1])
                mbarrier.arrive(empty.index(one))
                sums += _scaled(p1, x1, w1)
                p2 = warpgroup_mma_wait(0, [p2])
                mbarrier.arrive(empty.index(two))
                sums += _scaled(p2, x2, w2)
                step += 2
                s_at += 2
                f_run += 2 * x_scale_run
        else:
            for _ in range(per):
                slot = step % STAGES
                x = gl.load(f_run, mask=inside, other=0.0)
                w = gl.load(s_at)
                mbarrier.wait(full.index(slot), (step // STAGES) & 1)
                p = _product(ring, x_ring, operand.index(0), slot, zeros, ROWS, EXACT)
                p = warpgroup_mma_wait(0, [p])
                mbarrier.arrive(empty.index(slot))
                sums += _scaled(p, x, w)
                step += 1
                s_at += 1
                f_run += x_scale_run
        last = splits == 1
        if splits > 1:
            at = gl.program_id(1) * tiles + tile
            mine = part + at.to(gl.int64) * splits * (ROWS * COLUMNS)
            gl.store(mine + piece % splits * (ROWS * COLUMNS) + place, sums)
            gl.thread_barrier()
            ticket = gl.atomic_add(tickets + at, 1, sem="acq_rel", scope="gpu")
            last = ticket == splits - 1
            if last:
                gl.store(tickets + at, 0)
                gl.thread_barrier()
                sums = gl.zeros([ROWS, COLUMNS], gl.float32, layout=SUMS)
                for _ in range(splits):
                    sums += gl.load(mine + place, cache_modifier=".cg")
                    mine += ROWS * COLUMNS
        if last:
            to = gl.expand_dims((token0 + column) * groups + group, 0) * n
            to += gl.expand_dims(tile * ROWS - group * n + row, 1)
            gl.store(
                out + to, sums.to(out.dtype.element_ty),
                mask=gl.expand_dims(token0 + column < tokens, 0),
            )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "tokens", "runs", "tiles", "splits", "groups", "x_scale_token", "x_scale_run"
    ]
)  # fmt: skip
def tens_kernel(
    x_desc, x_scales, w_desc, scales, out, part, tickets, tokens, n, runs, tiles, splits, groups,
    x_scale_token, x_scale_run,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, PAIRS: gl.constexpr,
    BY_RUN: gl.constexpr, EXACT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """See the file.

    Args:
        x_desc: [T, groups * K], boxes [COLUMNS, 128 channels]; int32 words if EXACT.
        x_scales: as of ``few_kernel``.
        w_desc: [groups * n, K], boxes [ROWS, 128 channels]; int32 words if EXACT.
        scales: as of ``few_kernel``.
        out: [T, groups, n].
        part: float32 [blocks of tokens, tiles, splits, ROWS, COLUMNS] in an order of its own.
        tickets: int32 [blocks of tokens, tiles], zeros, which they are again at the end.
        tokens: T.
        n: rows of a group, a multiple of ROWS.
        runs: K / 128.
        tiles: groups * n / ROWS.
        splits: parts of K, of whole runs each, with PAIRS of an even number.
        groups: see above.
        x_scale_token: as of ``few_kernel``.
        x_scale_run: as of ``few_kernel``.
        ROWS: 64 or 128, 16 a warp.
        COLUMNS: tokens of a tile.
        STAGES: of the ring.
        PAIRS: two products are under way at a time.
        BY_RUN: x_scale_token is 1, and there are scales of as many rows as ``QuantizedRows`` has.
        EXACT: multiply float16 instead of e4m3.
        EARLY: launched before what makes x has ended.
    """
    CHANNELS: gl.constexpr = 32 if EXACT else 128
    ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, ROWS, CHANNELS], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLUMNS, CHANNELS], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if EXACT:
        operand = gl.allocate_shared_memory(
            gl.float16, [2 if PAIRS else 1, COLUMNS, 128], gl.NVMMASharedLayout(128, 16, rank=2)
        )
    else:
        operand = x_ring
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    if EARLY:
        let_dependents_start()
    gl.warp_specialize(
        [
            (_consume, (
                ring, x_ring, operand, full, empty, x_scales, scales, out, part, tickets, tokens,
                n, runs, tiles, splits, groups, x_scale_token, x_scale_run, ROWS, COLUMNS, STAGES,
                PAIRS, BY_RUN, EXACT, EARLY,
            )),
            (_produce, (
                x_desc, w_desc, ring, x_ring, full, empty, n, runs, tiles, splits, groups, ROWS,
                COLUMNS, STAGES, CHANNELS, EARLY,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip

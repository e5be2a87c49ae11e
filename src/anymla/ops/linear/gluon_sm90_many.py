"""Products of FP8 weights and tens of FP8 activations on Hopper.

Grid: (programs that share the pieces, blocks of COLUMNS tokens). A piece is ROWS rows of the weight
and one of ``splits`` parts of K; a program takes every so-many-th.

    w [groups x n, K]  .  x [tokens, group, K]^T  ->  y [tokens, group, n]

The copy engine brings runs of 128 channels, of weights and of activations, into a ring of STAGES;
weights as early as the program starts. Of a tile with several splits every program leaves its sums,
and the last one adds all of them in the order of the splits.
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
from anymla.ops.linear.gluon_sm90_words import factors

_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_meet = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.constexpr_function
def weight_words(warps, rows):
    """[rows, 32] words of which a thread has 8 neighbours, as the instruction's rows."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    shared = [[16 << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, shared, [], [rows, 32])


@gluon.constexpr_function
def token_words(warps, columns):
    """[columns, 32] words of which a thread has two neighbours of every eight."""
    shared = [[8 << bit, 0] for bit in range(warps.bit_length() - 1)]
    shared = [base if base[0] < columns else [0, 0] for base in shared]
    done = 3 + sum(base != [0, 0] for base in shared)
    registers = [[0, 1], [0, 8], [0, 16]]
    registers += [[1 << bit, 0] for bit in range(done, columns.bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, shared, [], [columns, 32])


@gluon.jit
def decoded_rows(words):
    """e4m3 words [rows, 32] to float16 [rows, 128], by steps of 16 channels of the instruction."""
    a, b, c, d = gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; .reg .b32 u, v; mov.b32 {l, h}, $4;"
        " cvt.rn.f16x2.e4m3x2 u, l; cvt.rn.f16x2.e4m3x2 v, h;"
        " mov.b32 {$0, $1}, u; mov.b32 {$2, $3}, v; }",
        "=h,=h,=h,=h,r", [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    ROWS: gl.constexpr = words.shape[0]
    value = gl.join(gl.join(a, c), gl.join(b, d))
    value = gl.reshape(value, (ROWS, 4, 8, 2, 2))
    return gl.reshape(gl.permute(value, (0, 2, 3, 1, 4)), (ROWS, 128))


@gluon.jit(
    do_not_specialize=[
        "tokens", "runs", "tiles", "splits", "groups", "x_scale_token", "x_scale_run"
    ]
)  # fmt: skip
def many_kernel(
    x_desc,
    x_scales,
    w_desc,
    scales,
    out,
    part,
    tickets,
    tokens,
    n,
    runs,
    tiles,
    splits,
    groups,
    x_scale_token,
    x_scale_run,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    EXACT: gl.constexpr,
    EARLY: gl.constexpr,
):
    """See the file.

    Args:
        x_desc: [T, groups * K], boxes [COLUMNS, 128 channels]; int32 words if EXACT.
        x_scales: as of ``runs_kernel``.
        w_desc: [groups * n, K], boxes [ROWS, 128 channels]; int32 words if EXACT.
        scales: as of ``runs_kernel``.
        out: [T, groups, n].
        part: float32 [blocks of tokens, tiles, splits, ROWS, COLUMNS] in an order of its own.
        tickets: int32 [blocks of tokens, tiles], zeros, which they are again at the end.
        tokens: T.
        n: rows of a group, a multiple of ROWS.
        runs: K / 128.
        tiles: groups * n / ROWS.
        splits: parts of K, of whole runs each.
        groups: see above.
        x_scale_token: as of ``runs_kernel``.
        x_scale_run: as of ``runs_kernel``.
        ROWS: 64 or 128, 16 a warp.
        COLUMNS: tokens of a tile.
        STAGES: of the ring.
        EXACT: multiply float16 instead of e4m3.
        EARLY: launched before what makes x has ended.
    """
    WARPS: gl.constexpr = ROWS // 16
    CHANNELS: gl.constexpr = 32 if EXACT else 128
    STEP: gl.constexpr = 16 if EXACT else 32
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, STEP])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    FACTORS: gl.constexpr = gl.SliceLayout(0, SUMS)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    BYTES: gl.constexpr = (ROWS + COLUMNS) * 128
    ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, ROWS, CHANNELS], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLUMNS, CHANNELS], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if EXACT:
        operand = gl.allocate_shared_memory(
            gl.float16, [COLUMNS, 128], gl.NVMMASharedLayout(128, 16, rank=2)
        )
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    _meet()
    if EARLY:
        let_dependents_start()
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    token0 = gl.program_id(1) * COLUMNS
    pieces = tiles * splits
    per = runs // splits
    # The next piece to be brought, and its next run.
    next_piece = first
    next_run = first % splits * per
    next_end = next_run + per
    for i in gl.static_range(STAGES):
        there = next_piece < pieces
        mbarrier.expect(full.index(i), BYTES, pred=there)
        _copy(
            w_desc, [next_piece // splits * ROWS, next_run * CHANNELS], full.index(i),
            ring.index(i), pred=there,
        )  # fmt: skip
        next_run += 1
        if next_run == next_end:
            next_piece += programs
            next_run = next_piece % splits * per
            next_end = next_run + per
    blocks = (n + 127) // 128
    x_piece = first
    x_run = first % splits * per
    x_end = x_run + per
    x_tile = first // splits
    x_group = x_tile * ROWS // n
    s_at = scales + (x_group * blocks + (x_tile * ROWS - x_group * n) // 128) * runs
    w_scale = gl.load(s_at + x_run)
    if EARLY:
        wait_for_predecessors()
    # The same runs of the activations.
    next_piece = first
    next_run = first % splits * per
    next_end = next_run + per
    for i in gl.static_range(STAGES):
        group = next_piece // splits * ROWS // n
        _copy(
            x_desc, [token0, (group * runs + next_run) * CHANNELS], full.index(i),
            x_ring.index(i), pred=next_piece < pieces,
        )  # fmt: skip
        next_run += 1
        if next_run == next_end:
            next_piece += programs
            next_run = next_piece % splits * per
            next_end = next_run + per

    token = token0 + gl.arange(0, COLUMNS, layout=LINE)
    inside = token < tokens
    f_at = x_scales + token * x_scale_token
    x_scale = gl.load(f_at + (x_group * runs + x_run) * x_scale_run, mask=inside, other=0.0)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    column = gl.arange(0, COLUMNS, layout=FACTORS)
    # Sums of a tile in memory: what the threads of a warp have lies side by side.
    place = gl.expand_dims(row % 8 * 8 + row // 8 * (8 * COLUMNS), 1)
    place += gl.expand_dims(column % 8 + column // 8 * 64, 0)
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout=SUMS)

    step = 0
    for piece in range(first, pieces, programs):
        tile = piece // splits
        group = tile * ROWS // n
        sums = gl.zeros([ROWS, COLUMNS], gl.float32, layout=SUMS)
        for _ in range(per):
            factor = gl.convert_layout(x_scale * factors(w_scale), FACTORS)
            slot = step % STAGES
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            if EXACT:
                words = x_ring.index(slot).load(token_words(WARPS, COLUMNS))
                a = gl.convert_layout(
                    decoded_rows(ring.index(slot).load(weight_words(WARPS, ROWS))), A
                )
                operand.store(decoded_rows(words))
                fence_async_shared()
                product = warpgroup_mma(
                    a, operand.permute((1, 0)), zeros, use_acc=False, is_async=True
                )
            else:
                product = warpgroup_mma(
                    ring.index(slot), x_ring.index(slot).permute((1, 0)), zeros, use_acc=False,
                    is_async=True,
                )  # fmt: skip
            product = warpgroup_mma_wait(0, [product])
            _meet()
            there = next_piece < pieces
            mbarrier.expect(full.index(slot), BYTES, pred=there)
            next_tile = next_piece // splits
            _copy(
                w_desc, [next_tile * ROWS, next_run * CHANNELS], full.index(slot),
                ring.index(slot), pred=there,
            )  # fmt: skip
            _copy(
                x_desc, [token0, (next_tile * ROWS // n * runs + next_run) * CHANNELS],
                full.index(slot), x_ring.index(slot), pred=there,
            )  # fmt: skip
            next_run += 1
            if next_run == next_end:
                next_piece += programs
                next_run = next_piece % splits * per
                next_end = next_run + per
            x_run += 1
            if x_run == x_end:
                x_piece += programs
                x_run = x_piece % splits * per
                x_end = x_run + per
                x_tile = x_piece // splits
                x_group = x_tile * ROWS // n
                block = (x_tile * ROWS - x_group * n) // 128
                s_at = scales + (x_group * blocks + block) * runs
            left = x_piece < pieces
            w_scale = gl.load(s_at + x_run, mask=left, other=0)
            x_scale = gl.load(
                f_at + (x_group * runs + x_run) * x_scale_run, mask=inside & left, other=0.0
            )
            sums += product * gl.expand_dims(factor, 0)
            step += 1
        last = splits == 1
        if splits > 1:
            at = gl.program_id(1) * tiles + tile
            mine = part + at.to(gl.int64) * splits * (ROWS * COLUMNS)
            gl.store(mine + piece % splits * (ROWS * COLUMNS) + place, sums)
            _meet()
            ticket = gl.atomic_add(tickets + at, 1, sem="acq_rel", scope="gpu")
            last = ticket == splits - 1
            if last:
                gl.store(tickets + at, 0)
                _meet()
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

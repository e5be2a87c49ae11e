"""Fallback that computes splits again in bfloat16 if float16 does not hold their rows or queries.

The kernels detect such splits by the tail's sums. Queries and rows that float16 does not hold
become NaN, which reaches all channels of a head; infinities of the tail stay in the tail. A NaN in
a listed row looks the same. The kernels write overflow flags: one number per head of every split in
memory, NaN if the head is affected, and their sum in shared memory. After its last split a CTA
checks that sum, which costs one read of shared memory, and overwrites the results of flagged
splits. Here one warpgroup does everything in turn, a quarter of the channels at a time. This is
about five times slower, and hardly ever runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.formats.nvfp4 import NVFP4_BLOCK
from anymla.formats.page_layout import V41_MAIN_FP8, get_layout
from anymla.ops._gluon import view, warpgroup_barrier
from anymla.ops._gluon_epilogue import CHANNELS, angles_of, store_quantized_block
from anymla.ops.attention.gluon_sm90_decode_epilogue import (
    LOG2E,
    NO_MAXIMUM,
    SUMS,
    denominator,
    load_sink,
    store_lse,
)
from anymla.ops.attention.gluon_sm90_decode_kv_producer import (
    LIFT,
    MASKED,
    NOPE,
    V32_SCALES,
    V32_TAIL,
    address,
    slots_of,
    v32_address,
)
from anymla.ops.attention.gluon_sm90_tile_scheduler import KEYS, split_at

_CHUNK = gl.constexpr(64)
_CHUNKS = gl.constexpr(CHANNELS.value // 64)
_CODED = gl.constexpr(NOPE.value // 64)
_FP8_BLOCK = gl.constexpr(get_layout(V41_MAIN_FP8).block)
_NVFP4_BLOCK = gl.constexpr(NVFP4_BLOCK)
# Partials are scaled to less than 2^8, so that their product with LIFT is less than 2^15.
_LARGEST_EXPONENT = gl.constexpr(127 + 7)


@gluon.jit
def _fetch_q(params, token, head0, token_stride, head_stride, to):
    """Load the first 512 channels of 64 heads to [8, 64, 64] in shared memory."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = head0 + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    column = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, L)), 0)
    row = token.to(gl.int64) * token_stride + head.to(gl.int64) * head_stride
    at = params.q + gl.expand_dims(row, 1) + column
    for chunk in range(0, _CHUNKS):
        q = gl.load(at + chunk * _CHUNK, mask=gl.expand_dims(head < params.H, 1), other=0.0)
        to.index(chunk).store(q.to(gl.float32).to(gl.bfloat16))


@gluon.jit
def _fetch_rows(valid, data, scales_at, to, L: gl.constexpr):
    """Decode a block of V4's rows to [8, 64, 64] in shared memory."""
    column = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, L)), 0)
    there = gl.expand_dims(valid, 1) & (column >= 0)
    at = gl.expand_dims(data, 1) + column
    for chunk in range(0, _CODED):
        codes = (at + chunk * _CHUNK).to(gl.pointer_type(gl.uint8))
        codes = gl.load(codes, mask=there, other=0)
        byte = gl.load((scales_at + chunk).to(gl.pointer_type(gl.uint8)), mask=valid, other=127)
        bits = byte.to(gl.int32)
        bits = gl.where(bits == 0, 0x00400000, gl.where(bits == 255, 0x7FC00000, bits << 23))
        factor = gl.expand_dims(bits.to(gl.float32, bitcast=True), 1)
        rows = codes.to(gl.float8e4nv, bitcast=True).to(gl.float32) * factor
        to.index(chunk).store(rows.to(gl.bfloat16))
    tail = (gl.expand_dims(data, 1) + NOPE + column * 2).to(gl.pointer_type(gl.bfloat16))
    to.index(_CODED).store(gl.load(tail, mask=there, other=0.0))


@gluon.jit
def _e4m3_codes(data, scales_at, there, chunk, column):
    """Decode 64 channels of e4m3 rows without a tail to float32."""
    codes = (gl.expand_dims(data, 1) + column + chunk * _CHUNK).to(gl.pointer_type(gl.uint8))
    codes = gl.load(codes, mask=there, other=0)
    scale = gl.expand_dims(scales_at, 1) + column // _FP8_BLOCK + chunk * (_CHUNK // _FP8_BLOCK)
    bits = gl.load(scale.to(gl.pointer_type(gl.uint8)), mask=there, other=0).to(gl.int32)
    bits = gl.where(bits == 0, 0x00400000, gl.where(bits == 255, 0x7FC00000, bits << 23))
    rows = codes.to(gl.float8e4nv, bitcast=True).to(gl.float32)
    return rows * bits.to(gl.float32, bitcast=True)


@gluon.jit
def _nvfp4_codes(data, scales_at, there, chunk, column):
    """Decode 64 channels of NVFP4 rows to float32."""
    codes = gl.expand_dims(data, 1) + column // 2 + chunk * (_CHUNK // 2)
    codes = gl.load(codes.to(gl.pointer_type(gl.uint8)), mask=there, other=0)
    scale = gl.expand_dims(scales_at, 1) + column // _NVFP4_BLOCK
    scale = (scale + chunk * (_CHUNK // _NVFP4_BLOCK)).to(gl.pointer_type(gl.uint8))
    scale = gl.load(scale, mask=there, other=0)
    code = codes.to(gl.int32) >> (column % 2 * 4)
    # Read as e4m3, the code's exponent is 6 too small.
    code = (code & 8) << 4 | (code & 7) << 2
    rows = code.to(gl.uint8).to(gl.float8e4nv, bitcast=True).to(gl.float32) * 64.0
    return rows * scale.to(gl.float8e4nv, bitcast=True).to(gl.float32)


@gluon.jit
def _fetch_codes(valid, data, scales_at, here, lists, to, L: gl.constexpr):
    """Decode a block of rows without a tail, e4m3 or NVFP4, to [8, 64, 64] in shared memory."""
    column = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, L)), 0)
    there = gl.expand_dims(valid, 1) & (column >= 0)
    for chunk in range(0, _CHUNKS):
        if not lists.FP4:
            rows = _e4m3_codes(data, scales_at, there, chunk, column)
        elif not lists.FP8:
            rows = _nvfp4_codes(data, scales_at, there, chunk, column)
        else:
            # Do not branch: the compiler would treat all that follows as divergent, and would
            # serialise all matrix instructions of the kernel, including those of other warps.
            fp8 = here == lists.FP8_FIRST
            first = _e4m3_codes(data, scales_at, there & fp8, chunk, column)
            second = _nvfp4_codes(data, scales_at, there & (fp8 == 0), chunk, column)
            rows = gl.where(fp8, first, second)
        to.index(chunk).store(rows.to(gl.bfloat16))


@gluon.jit
def _fetch_block(slots, here, lists, to, L: gl.constexpr):
    """Decode a block's rows to [8, 64, 64] and return where there is a row.

    ``here`` is True for slots of the first list.
    """
    valid, data, scales_at = address(slots, here, lists)
    if lists.TAIL:
        _fetch_rows(valid, data, scales_at, to, L)
    else:
        _fetch_codes(valid, data, scales_at, here, lists, to, L)
    return valid


@gluon.jit
def _fetch_tail(params, token, head0, token_stride, head_stride, to):
    """Load the last 64 of 576 channels of 64 heads to [64, 64] in shared memory."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = head0 + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    column = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, L)), 0)
    row = token.to(gl.int64) * token_stride + head.to(gl.int64) * head_stride
    at = params.q + gl.expand_dims(row, 1) + (column + _CHUNKS * _CHUNK)
    to.store(gl.load(at, mask=gl.expand_dims(head < params.H, 1), other=0.0))


@gluon.jit
def _fetch_v32_rows(valid, data, to, to_tail, L: gl.constexpr):
    """Decode a block of V3.2's rows to [8, 64, 64] and their tails to [64, 64] in shared memory."""
    column = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, L)), 0)
    there = gl.expand_dims(valid, 1) & (column >= 0)
    at = gl.expand_dims(data, 1) + column
    for chunk in range(0, _CHUNKS):
        codes = (at + chunk * _CHUNK).to(gl.pointer_type(gl.uint8))
        codes = gl.load(codes, mask=there, other=0)
        scale = (data + (V32_SCALES + chunk // 2 * 4)).to(gl.pointer_type(gl.float32))
        factor = gl.expand_dims(gl.load(scale, mask=valid, other=1.0), 1)
        rows = codes.to(gl.float8e4nv, bitcast=True).to(gl.float32) * factor
        to.index(chunk).store(rows.to(gl.bfloat16))
    tail = (gl.expand_dims(data, 1) + V32_TAIL + column * 2).to(gl.pointer_type(gl.bfloat16))
    to_tail.store(gl.load(tail, mask=there, other=0.0))


@gluon.jit
def _weigh(scores, valid, low, high, highest, sums, factor, k_s, p_s, quarter):
    """Add the values of the block in ``k_s``, weighed by its scores, to the sums of a pass."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    listed = gl.convert_layout(valid.to(gl.int32), gl.SliceLayout(0, S))
    scores = gl.where(gl.expand_dims(listed, 0) != 0, scores, MASKED)
    peak = gl.maximum(highest, gl.max(scores, 1))
    decay = gl.exp2((highest - peak) * factor)
    p = gl.exp2(scores * factor - gl.expand_dims(peak * factor, 1))
    sums = sums * decay + gl.sum(p, 1)
    p_s.store(p.to(gl.bfloat16))
    fence_async_shared()
    warpgroup_barrier()
    low = low * gl.expand_dims(decay, 1)
    high = high * gl.expand_dims(decay, 1)
    low = warpgroup_mma(p_s, k_s.index(quarter * 2), low, is_async=True)
    high = warpgroup_mma(p_s, k_s.index(quarter * 2 + 1), high, is_async=True)
    low, high = warpgroup_mma_wait(0, deps=[low, high])
    warpgroup_barrier()
    return low, high, peak, sums


@gluon.jit
def _pass(
    lists, split, factor, q_s, k_s, p_s, quarter, q_tail, k_tail, V32: gl.constexpr
):  # fmt: skip
    """Compute scores of all blocks, and sums of one quarter of the channels as two tiles of 64."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    L: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    r = gl.arange(0, KEYS, layout=gl.SliceLayout(1, L))
    low = gl.zeros([64, _CHUNK], gl.float32, S)
    high = gl.zeros([64, _CHUNK], gl.float32, S)
    highest = gl.full([64], NO_MAXIMUM, gl.float32, ROW)
    sums = gl.zeros([64], gl.float32, ROW)
    for block in range(split.first, split.last):
        slots = slots_of(block, split, lists, r)
        if V32:
            valid, data = v32_address(slots, lists)
            _fetch_v32_rows(valid, data, k_s, k_tail, L)
        else:
            valid = _fetch_block(slots, block < split.blocks0, lists, k_s, L)
        fence_async_shared()
        warpgroup_barrier()
        scores = gl.zeros([64, KEYS], gl.float32, S)
        # Do not unroll: the operands' addresses would equal the kernel's own, which the compiler
        # would then keep in registers across the kernel's loop.
        for chunk in range(0, _CHUNKS):
            scores = warpgroup_mma(
                q_s.index(chunk), k_s.index(chunk).permute((1, 0)), scores, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
        if V32:
            scores = warpgroup_mma(q_tail, k_tail.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
        low, high, highest, sums = _weigh(
            scores, valid, low, high, highest, sums, factor, k_s, p_s, quarter
        )
    return low, high, highest * factor, sums


@gluon.jit
def _store(to, row_stride, head, head0, H, column0, y, L: gl.constexpr):
    column = gl.expand_dims(column0 + gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, L)), 0)
    at = to + gl.expand_dims((head - head0).to(gl.int64) * row_stride, 1) + column
    gl.store(at, y.to(to.dtype.element_ty), mask=gl.expand_dims(head < H, 1) & (column >= 0))


@gluon.jit
def _store_output(params, split, head, head0, column, low, high, top, sums):
    """Store a quarter of the output of a whole work tile."""
    out, token, H = params.out, split.token, params.H
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    bottom = denominator(sums, top, load_sink(params, head))
    work = gl.expand_dims(gl.where(sums == 0, 0.0, 1.0 / bottom), 1)
    if out.ROPE_DIM > 0:
        row = token.to(gl.int64) * H + head0
        quarter = column // (2 * _CHUNK)
        angles = angles_of(out, token)
        store_quantized_block(
            low * work, high * work, out, angles, row, head < H, quarter, True, False
        )
    else:
        HEAD: gl.constexpr = params.OUT_HEAD
        to = out.heads + token.to(gl.int64) * params.out_token + head0.to(gl.int64) * HEAD
        _store(to, HEAD, head, head0, H, column, low * work, S)
        _store(to, HEAD, head, head0, H, column + _CHUNK, high * work, S)
    store_lse(params, split, head, top, sums)


@gluon.jit
def _store_partial(
    params, slot, head, head0, column, low, high, top, sums, largest,
    ROWS: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Store a quarter of a split's partial, times a power of two with which float16 holds it.

    Channels before the tail are also multiplied by ``LIFT``, as in other partials.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    partials, H = params.partials, params.H
    to = partials.heads + slot.to(gl.int64) * (ROWS * CHANNELS)
    exponent = gl.minimum((largest.to(gl.int32, bitcast=True) >> 23) - _LARGEST_EXPONENT, 126)
    exponent = gl.maximum(exponent, -126).to(gl.int32)
    up = ((127 + exponent) << 23).to(gl.float32, bitcast=True)
    down = ((127 - exponent) << 23).to(gl.float32, bitcast=True)
    work = gl.expand_dims(gl.where(sums == 0, 0.0, 1.0 / sums) * down, 1)
    _store(to, CHANNELS, head, head0, H, column, low * work * LIFT, S)
    tail = LIFT
    if TAIL:
        tail = gl.where(column + _CHUNK == NOPE, 1.0, LIFT)
    _store(to, CHANNELS, head, head0, H, column + _CHUNK, high * work * tail, S)
    at = partials.sums + (slot.to(gl.int64) * ROWS + (head - head0)) * SUMS
    gl.store(at, top, mask=head < H)
    gl.store(at + 1, sums, mask=head < H)
    gl.store(at + 2, up, mask=head < H)


@gluon.jit
def _largest_of(low, high, sums):
    """Return the largest magnitude in a quarter of a split's result, for each head."""
    both = gl.maximum(gl.max(gl.abs(low), 1), gl.max(gl.abs(high), 1))
    return gl.where(sums == 0, 0.0, both / sums)


@gluon.jit
def any_overflow(overflowed, ROWS: gl.constexpr):
    """True if the sum in shared memory of the overflow flags of a CTA's splits has a NaN."""
    L: gl.constexpr = gl.BlockedLayout([ROWS // 32 if ROWS > 32 else 1], [32], [4], [0])
    flags = gl.sum(overflowed.load(L), 0)  # every warp sums on its own
    return flags != flags


@gluon.jit
def _store_quarter(
    params, work, split, head, head0, quarter, low, high, top, sums, largest,
    ROWS: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Store a quarter of the channels of a split, as output or as partial."""
    column = quarter * (2 * _CHUNK)
    if not work.SPLIT:
        _store_output(params, split, head, head0, column, low, high, top, sums)
    elif work.PARTLY:
        if split.whole:
            _store_output(params, split, head, head0, column, low, high, top, sums)
        else:
            _store_partial(
                params, split.slot, head, head0, column, low, high, top, sums, largest, ROWS, TAIL
            )
    else:
        _store_partial(
            params, split.slot, head, head0, column, low, high, top, sums, largest, ROWS, TAIL
        )


@gluon.jit
def _begin(whole, work):
    """Return the first of eight steps; the first four find the largest value of partials."""
    if not work.SPLIT:
        return 4
    elif work.PARTLY:
        return gl.where(whole, 4, 0)
    else:
        return 0


@gluon.jit
def bf16_fallback(
    lists, work, params, q_memory, k_memory, p_memory, ROWS: gl.constexpr,
    q_tail_memory=None, k_tail_memory=None, V32: gl.constexpr = False,
):  # fmt: skip
    """Overwrite the results of the CTA's flagged splits.

    ``q_memory`` and ``k_memory`` are at least 64 KiB each of shared memory that is no longer in
    use, and ``p_memory`` 8 KiB. With V32 (rows of V3.2), the tails' memories have at least 8 KiB
    each. ROWS is the number of heads in a tile, as in partials. The other arguments are the
    kernels'.
    """
    q_token = params.q_token * 2  # in elements
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_s = view(q_memory, gl.bfloat16, [_CHUNKS, 64, _CHUNK], SHARED)
    k_s = view(k_memory, gl.bfloat16, [_CHUNKS, KEYS, _CHUNK], SHARED)
    p_s = view(p_memory, gl.bfloat16, [1, 64, KEYS], SHARED).index(0)
    q_tail, k_tail = None, None
    if V32:
        q_tail = view(q_tail_memory, gl.bfloat16, [1, 64, _CHUNK], SHARED).index(0)
        k_tail = view(k_tail_memory, gl.bfloat16, [1, KEYS, _CHUNK], SHARED).index(0)
    for k in range(0, work.count):
        split = split_at(k, work, lists)
        L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        at = params.partials.flags + split.number * ROWS + gl.arange(0, ROWS, layout=L)
        flags = gl.sum(gl.load(at), 0)
        if flags != flags:
            head0 = split.tile * ROWS
            head = head0 + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
            if ROWS < 64:  # heads from ROWS on belong to another tile
                head = gl.where(head < head0 + ROWS, head, params.H)
            _fetch_q(params, split.token, head0, q_token, params.Q_HEAD * 2, q_s)
            if V32:
                _fetch_tail(params, split.token, head0, q_token, params.Q_HEAD * 2, q_tail)
            largest = gl.zeros([64], gl.float32, gl.SliceLayout(1, S))
            # The largest magnitude over all channels is needed before the first partial is written.
            for step in range(_begin(split.whole, work), 8):
                quarter = step % 4
                factor = params.scale * LOG2E
                low, high, top, sums = _pass(
                    lists, split, factor, q_s, k_s, p_s, quarter, q_tail, k_tail, V32
                )
                if step < 4:
                    largest = gl.maximum(largest, _largest_of(low, high, sums))
                else:
                    _store_quarter(
                        params, work, split, head, head0, quarter, low, high, top, sums, largest,
                        ROWS, lists.TAIL,
                    )  # fmt: skip

"""Attention over DeepSeek-V3.2's rows for tiles of 64 heads on Hopper.

The kernel of ``gluon_sm90_tiles`` for keys of 576 channels, of which 512 are the value: the same
partitions, barriers and order of work, with a third part of keys and queries (the tail, 64
channels) that only the scores read, and one buffer of P instead of two, for which there is no room.
One list of one cache.
"""

from collections.abc import Iterator

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.formats.page_layout import V32_FP8, get_layout
from anymla.ops._triton import Build, Target
from anymla.ops.sparse_attention.gluon_sm90_gather import LIFT, tail_order
from anymla.ops.sparse_attention.gluon_sm90_lists import ARGUMENT_TYPES, BUILT, COUNTS, KEYS, Lists
from anymla.ops.sparse_attention.gluon_sm90_query import CHUNK, CHUNKS, load_query, misfit
from anymla.ops.sparse_attention.gluon_sm90_shares import piece, share_of
from anymla.ops.sparse_attention.gluon_sm90_softmax import (
    LOG2E,
    NO_MAXIMUM,
    SHIFT,
    bottom_of,
    dependents_may_start,
    load_sink,
    not_finite,
    note,
    predecessors_done,
    record_cut,
    record_span,
    view,
)
from anymla.ops.sparse_attention.gluon_sm90_tiles import (
    HALF,
    HEADS,
    _finish_main,
    _leave_main,
    _store_out,
    _store_part,
)
from anymla.ops.sparse_attention.gluon_sm90_turned import Output
from anymla.ops.sparse_attention.gluon_sm90_wide_gather import produce_wide
from anymla.ops.sparse_attention.gluon_sm90_wide_rescan import rescan_wide

_LAYOUT = get_layout(V32_FP8)
_TAIL = gl.constexpr(64)
_CODES = gl.constexpr(_LAYOUT.nope)
_SPILLS = 700
# As in gluon_sm90_query: 2^16 as bits of bfloat16, 2^-8, and LIFT in the exponent.
_TOO_LARGE = gl.constexpr(0x4780)
_TOO_SMALL = gl.constexpr(0x3B80)
_LIFTED = gl.constexpr(0x380)
_LIFTED_HALVES = gl.constexpr(
    "{ .reg .f32 a, b; .reg .b32 c, d; shl.b32 c, $1, 16; and.b32 d, $1, 0xffff0000; "
    "mov.b32 a, c; mov.b32 b, d; mul.f32 a, a, $2; mul.f32 b, b, $2; cvt.rn.f16x2.f32 $0, b, a; }"
)


@gluon.jit
def _load_tail(q_ptr, token, tile, H, token_stride, to, HEAD: gl.constexpr):
    """The tail of a tile of heads, times LIFT, in ``tail_order``; 1 if float16 does not hold it."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L))
    word = tail_order(gl.arange(0, _TAIL // 2, layout=gl.SliceLayout(0, L)), 4)
    start = token.to(gl.int64) * token_stride + tile * (HEADS * HEAD) + _CODES // 2
    at = gl.expand_dims(row * HEAD, 1) + gl.expand_dims(word, 0)
    inside = gl.expand_dims(tile * HEADS + row < H, 1)
    words = gl.load(q_ptr.to(gl.pointer_type(gl.int32)) + start + at, mask=inside, other=0)
    factor = gl.where(words == words, LIFT, LIFT)
    to.store(
        gl.inline_asm_elementwise(
            _LIFTED_HALVES, "=r,r,f", [words, factor], dtype=gl.int32, is_pure=True, pack=1
        )
    )
    magnitude = gl.maximum(words & 0x7FFF, (words >> 16) & 0x7FFF)
    magnitude = magnitude + gl.where(magnitude > 0, _LIFTED, 0)
    largest = gl.max(magnitude, 1)
    small = (largest > 0) & (largest < _TOO_SMALL)
    return gl.max(((largest >= _TOO_LARGE) | small).to(gl.int32), 0)


@gluon.jit
def _finish_right(
    y, stage, chunks, buffer, free, out, token, tile, H, out_token, OUT_HEAD: gl.constexpr
):
    _store_out(y, stage, chunks, buffer, out, token, tile, H, out_token, OUT_HEAD, 0)
    fence_async_shared()
    mbarrier.arrive(free.index(buffer), count=1)


@gluon.jit
def _leave_right(y, free, part_ptr, slot, tile, H, L: gl.constexpr):
    mbarrier.arrive(free, count=1)
    _store_part(y, part_ptr + HALF, slot, tile, H, L, 0)


@gluon.jit
def right_part(
    lists, share, q_ptr, out, part_ptr, marks_ptr, H, q_token, out_token,
    q_words, k_right, stage, chunks, p_s, decay_s, noticed, free, p_ready, p_free, q_ready, q_free,
    Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr,
):  # fmt: skip
    """The warpgroup of P V, channels 256 .. 511."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    R: gl.constexpr = gl.SliceLayout(1, L)
    done = 0
    handed = 0
    for k in range(0, share.count):
        token, tile, _, _, _, first, last, direct, slot, mark = piece(k, share, lists)
        mbarrier.wait(q_free, (k & 1) ^ 1)
        words = load_query(
            q_ptr + HALF, token, tile, H, q_token, q_words.index(1), HEADS, Q_HEAD, 0
        )
        wrong = misfit(words, q_ptr.dtype.element_ty == gl.float16, 0)
        fence_async_shared()
        mbarrier.arrive(q_ready, count=1)
        acc = gl.zeros([HEADS, HALF], gl.float32, L)
        for block in range(first, last):
            buffer = done % 2
            mbarrier.wait(p_ready, handed & 1)
            fence_async_shared()
            acc = acc * gl.expand_dims(decay_s.index(0).load(R), 1)
            acc = warpgroup_mma(p_s.index(0), k_right.index(buffer), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(p_free, count=1)
            if block + 1 < last:
                mbarrier.arrive(free.index(buffer), count=1)
            done += 1
            handed += 1
        mbarrier.wait(p_ready, handed & 1)
        factor = decay_s.index(0).load(R)
        mbarrier.arrive(p_free, count=1)
        handed += 1
        note(marks_ptr, mark, wrong | not_finite(acc), noticed, 1)
        y = acc * gl.expand_dims(factor * (1.0 / LIFT), 1)
        buffer = (done + 1) % 2
        if share.STREAM:
            if direct:
                _finish_right(
                    y, stage, chunks, buffer, free, out, token, tile, H, out_token, OUT_HEAD
                )
            else:
                _leave_right(y, free.index(buffer), part_ptr, slot, tile, H, L)
        elif share.SPLIT:
            _leave_right(y, free.index(buffer), part_ptr, slot, tile, H, L)
        else:
            _finish_right(y, stage, chunks, buffer, free, out, token, tile, H, out_token, OUT_HEAD)


@gluon.jit
def main_part(
    lists, share, q_ptr, out, lse_ptr, part_ptr, sums_ptr, spans_ptr, marks_ptr, sink_ptr,
    H, q_token, out_token, scale, empty, q_words, q_tail, q_s, q_tail_s, k_left, k_right, k_tail,
    stage, chunks, p_s, decay_s, bias_s, noticed, ready, free, p_ready, p_free, q_ready, q_free,
    SINK: gl.constexpr, Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr,
):  # fmt: skip
    """The warpgroup of Q K, the softmax, and P V of channels 0 .. 255."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    PER_HEAD: gl.constexpr = gl.SliceLayout(1, S)
    R: gl.constexpr = gl.SliceLayout(1, L)
    factor = scale * (LOG2E / LIFT)
    record_cut(spans_ptr, share)
    done = 0
    handed = 0
    for k in range(0, share.count):
        token, tile, _, _, _, first, last, direct, slot, mark = piece(k, share, lists)
        words = load_query(q_ptr, token, tile, H, q_token, q_words.index(0), HEADS, Q_HEAD, 0)
        wrong = misfit(words, q_ptr.dtype.element_ty == gl.float16, 0)
        wrong = wrong | _load_tail(q_ptr, token, tile, H, q_token, q_tail, Q_HEAD)
        fence_async_shared()
        mbarrier.wait(q_ready, k & 1)
        acc = gl.zeros([HEADS, HALF], gl.float32, L)
        highest = gl.full([HEADS], NO_MAXIMUM, gl.float32, PER_HEAD)
        sums = gl.zeros([HEADS], gl.float32, PER_HEAD)
        for block in range(first, last):
            buffer = done % 2
            mbarrier.wait(ready.index(buffer), (done // 2) & 1)
            fence_async_shared()
            scores = gl.zeros([HEADS, KEYS], gl.float32, S)
            bias = bias_s.index(buffer).load(gl.SliceLayout(0, S))
            scores = warpgroup_mma(
                q_tail_s, k_tail.index(buffer).permute((1, 0)), scores, use_acc=False, is_async=True
            )
            scores = warpgroup_mma(
                q_s.index(0), k_left.index(buffer).permute((1, 0)), scores, is_async=True
            )
            scores = warpgroup_mma(
                q_s.index(1), k_right.index(buffer).permute((1, 0)), scores, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            if block + 1 == last:
                mbarrier.arrive(q_free, count=1)
            scores = scores + gl.expand_dims(bias, 0)
            peak = gl.maximum(highest, gl.max(scores, 1))
            decay = gl.exp2((highest - peak) * factor)
            p = gl.exp2(scores * factor - gl.expand_dims(peak * factor - SHIFT, 1))
            sums = sums * decay + gl.sum(p, 1)
            highest = peak
            mbarrier.wait(p_free, (handed & 1) ^ 1)
            p_s.index(0).store(p.to(gl.float16))
            decay_s.index(0).store(decay)
            fence_async_shared()
            mbarrier.arrive(p_ready, count=1)
            acc = acc * gl.expand_dims(gl.convert_layout(decay, R), 1)
            acc = warpgroup_mma(p_s.index(0), k_left.index(buffer), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            if block + 1 < last:
                mbarrier.arrive(free.index(buffer), count=1)
            done += 1
            handed += 1
        head = tile * HEADS + gl.arange(0, HEADS, layout=PER_HEAD)
        top = highest * factor - SHIFT
        bottom = bottom_of(sums, top, load_sink(sink_ptr, head, H, SINK))
        scaled = gl.where(sums > 0, 1.0 / bottom, 0.0)
        if share.STREAM:
            scaled = gl.where(direct, scaled, 1.0)
        elif share.SPLIT:
            scaled = gl.full([HEADS], 1.0, gl.float32, PER_HEAD)
        mbarrier.wait(p_free, (handed & 1) ^ 1)
        decay_s.index(0).store(scaled)
        mbarrier.arrive(p_ready, count=1)
        handed += 1
        note(marks_ptr, mark, wrong | not_finite(sums), noticed, 0)
        y = acc * gl.expand_dims(gl.convert_layout(scaled, R) * (1.0 / LIFT), 1)
        buffer = (done + 1) % 2
        if share.STREAM:
            if direct:
                _finish_main(
                    y, sums, top, empty, stage, chunks, buffer, free, out, lse_ptr,
                    token, tile, head, H, out_token, OUT_HEAD,
                )  # fmt: skip
            else:
                _leave_main(
                    y, sums, top, free.index(buffer), part_ptr, sums_ptr, slot, tile, head, H, L
                )
            record_span(spans_ptr, token * share.TILES + tile, first, last, token, lists, share)
        elif share.SPLIT:
            _leave_main(
                y, sums, top, free.index(buffer), part_ptr, sums_ptr, slot, tile, head, H, L
            )
        else:
            _finish_main(
                y, sums, top, empty, stage, chunks, buffer, free, out, lse_ptr,
                token, tile, head, H, out_token, OUT_HEAD,
            )  # fmt: skip


@gluon.jit
def _low_rows(lists, share, left, right, tail, bias, ready, free):
    produce_wide(lists, share, left, right, tail, bias, ready, free, 32, 0, 2)


@gluon.jit
def _high_rows(lists, share, left, right, tail, bias, ready, free):
    produce_wide(lists, share, left, right, tail, bias, ready, free, 32, 32, 2)


@gluon.jit(do_not_specialize=COUNTS)
def wide_kernel(
    q_ptr, rows0_ptr, rows1_ptr, list0_ptr, list1_ptr, length0_ptr, length1_ptr, sink_ptr,
    out_ptr, lse_ptr, part_ptr, sums_ptr, spans_ptr, marks_ptr,
    T, H, width0, width1, limit0, limit1, stride0, stride1, splits,
    q_token, out_token, scale, empty, scales_ptr, positions_ptr, table_ptr, angles,
    TILES: gl.constexpr, SPLIT: gl.constexpr, STREAM: gl.constexpr, COST: gl.constexpr,
    SIZE: gl.constexpr, TWO: gl.constexpr, LENGTH0: gl.constexpr, LENGTH1: gl.constexpr,
    PAGE0: gl.constexpr, PAGE1: gl.constexpr, STEP0: gl.constexpr, STEP1: gl.constexpr,
    SINK: gl.constexpr, Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr,
    RIGHT_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """See the file. The arguments are those of ``tiles_kernel``; TWO is false, TURNED 0."""
    gl.static_assert(not TWO)
    gl.static_assert(TURNED == 0)
    predecessors_done()
    dependents_may_start()
    lists = Lists(
        rows0_ptr, rows1_ptr, list0_ptr, list1_ptr, length0_ptr, length1_ptr, width0, width1,
        limit0, limit1, stride0, stride1, TWO, LENGTH0, LENGTH1, PAGE0, PAGE1, STEP0, STEP1,
    )  # fmt: skip
    share = share_of(lists, T, splits, spans_ptr, TILES, SPLIT, STREAM, COST, SIZE)

    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    q_words = gl.allocate_shared_memory(gl.int32, [2, HEADS, HALF // 2], WORDS)
    q_tail = gl.allocate_shared_memory(gl.int32, [1, HEADS, _TAIL // 2], WORDS)
    left = gl.allocate_shared_memory(gl.int32, [2, KEYS, HALF // 2], WORDS)
    right = gl.allocate_shared_memory(gl.int32, [2, KEYS, HALF // 2], WORDS)
    tail = gl.allocate_shared_memory(gl.int32, [2, KEYS, _TAIL // 2], WORDS)
    q_s = view(q_words, gl.float16, [2, HEADS, HALF], HALVES)
    q_tail_s = view(q_tail, gl.float16, [1, HEADS, _TAIL], HALVES)
    k_left = view(left, gl.float16, [2, KEYS, HALF], HALVES)
    k_right = view(right, gl.float16, [2, KEYS, HALF], HALVES)
    k_tail = view(tail, gl.float16, [2, KEYS, _TAIL], HALVES)
    TYPE: gl.constexpr = q_ptr.dtype.element_ty
    out = Output(out_ptr, scales_ptr, positions_ptr, table_ptr, angles, TURNED, TYPE)
    out_beyond = Output(out_ptr + HALF, scales_ptr, positions_ptr, table_ptr, angles, TURNED, TYPE)
    out_left = view(left, TYPE, [2, HEADS, HALF], HALVES)
    out_right = view(right, TYPE, [2, HEADS, HALF], HALVES)
    left_chunks = view(left, TYPE, [2 * CHUNKS, HEADS, 2 * CHUNK], HALVES)
    right_chunks = view(right, TYPE, [2 * CHUNKS, HEADS, 2 * CHUNK], HALVES)
    p_s = gl.allocate_shared_memory(gl.float16, [1, HEADS, KEYS], HALVES)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    decay_s = gl.allocate_shared_memory(gl.float32, [1, HEADS], FLAT)
    bias_s = gl.allocate_shared_memory(gl.float32, [2, KEYS], FLAT)
    noticed = gl.allocate_shared_memory(gl.int32, [2, 1], FLAT)
    B: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    p_ready = gl.allocate_shared_memory(gl.int64, [1], B)
    p_free = gl.allocate_shared_memory(gl.int64, [1], B)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], B)
    q_free = gl.allocate_shared_memory(gl.int64, [1], B)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=2)
        mbarrier.init(free.index(i), count=2)
        noticed.index(i).store(gl.full([1], 0, gl.int32, ONE))
    mbarrier.init(p_ready, count=1)
    mbarrier.init(p_free, count=1)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=1)
    gl.warp_specialize(
        [
            (main_part, (
                lists, share, q_ptr, out, lse_ptr, part_ptr, sums_ptr, spans_ptr, marks_ptr,
                sink_ptr, H, q_token, out_token, scale, empty, q_words, q_tail.index(0), q_s,
                q_tail_s.index(0), k_left, k_right, k_tail, out_left, left_chunks, p_s,
                decay_s, bias_s, noticed, ready, free, p_ready, p_free, q_ready, q_free, SINK,
                Q_HEAD, OUT_HEAD,
            )),
            (right_part, (
                lists, share, q_ptr, out_beyond, part_ptr, marks_ptr, H, q_token, out_token,
                q_words, k_right, out_right, right_chunks, p_s, decay_s, noticed, free, p_ready,
                p_free, q_ready, q_free, Q_HEAD, OUT_HEAD,
            )),
            (_low_rows, (lists, share, left, right, tail, bias_s, ready, free)),
            (_high_rows, (lists, share, left, right, tail, bias_s, ready, free)),
        ],
        [4, 4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
    found = gl.max(noticed.index(0).load(ONE) | noticed.index(1).load(ONE), 0)
    if found != 0:
        rescan_wide(
            lists, share, q_ptr, out, lse_ptr, part_ptr, sums_ptr, marks_ptr, sink_ptr, H,
            q_token * 2, Q_HEAD * 2, out_token, OUT_HEAD, scale, empty, q_words, q_tail, left,
            tail, p_s, HEADS, SINK,
        )  # fmt: skip


def build(label: str, **constants: object) -> Build:
    """One specialisation, with pages of 64 rows unless ``constants`` says otherwise."""
    own = {
        "TILES": 2, "TWO": False, "LENGTH1": False, "RIGHT_REGISTERS": 160,
        "PRODUCER_REGISTERS": 72, "STEP0": _LAYOUT.page_stride_bytes(64),
        "Q_HEAD": _LAYOUT.channels // 2,
    }  # fmt: skip
    return Build(
        label,
        wide_kernel,
        ARGUMENT_TYPES | {"marks_ptr": "*i32"},
        BUILT | own | constants,
        divisible=("q_token", "out_token"),
        matrix=True,
        spills=_SPILLS,
    )


def builds(target: Target) -> Iterator[Build]:
    """Every way of handing out pieces."""
    if target.name != "sm_90":
        return
    yield build("whole")
    yield build("aligned", SPLIT=True)
    yield build("stream", SPLIT=True, STREAM=True, SIZE=256)
    yield build("no lengths, pages of 61", LENGTH0=False, SINK=False, PAGE0=61, STEP0=40688)

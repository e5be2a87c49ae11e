"""Attention over FP8 rows for tiles of 64 heads on Hopper.

Grid: at most one program a multiprocessor; each walks the pieces of ``gluon_sm90_shares``.

    main       QK, softmax, P V of channels 0 .. 255        208 registers
    right      P V of channels 256 .. 511                   160
    producers  rows 0 .. 31 and 32 .. 63 of each block       72 each

A block is 64 listed rows in float16, its halves of 256 channels in two allocations, double
buffered. Keys and values are the same memory. main hands P, and by how much the sums decay, to
right through shared memory; after the last block of a piece it hands over the factor of the result.
Both write their half of the result through the buffer that the last block left, which they hold
back from the producers.

The copy engine brings the queries, asked for by main when the last scores of the piece before have
been seen, and takes results and parts, where heads are whole tiles, or half a one, and lie side by
side; elsewhere threads move them. On the way through registers queries become float16, in place.

Barriers: ready[b] producers -> main (right learns through p_ready); free[b] main and right ->
producers; p_ready[s] main -> right; p_free[s] right -> main; q_here[half] copy engine -> main,
right; q_ready right -> main (its half is taken); q_free main -> right, where threads bring queries.

A barrier that a specialisation does not use is not made: once it is initialised the compiler takes
its memory for other words, which the initialisation, of another unit, then still overwrites.

The proxy fence between the producers' stores and the matrix instructions stands on the reading
side, behind the wait on ``ready``: in the producers it would wait for the loads of the next block.
"""

from collections.abc import Iterator

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)

from anymla.ops._build import Build
from anymla.ops._gluon import view
from anymla.ops._gluon_epilogue import Output
from anymla.ops.device import Target
from anymla.ops.sparse_attention.gluon_sm90_ends import HALF, HEADS
from anymla.ops.sparse_attention.gluon_sm90_gather import produce
from anymla.ops.sparse_attention.gluon_sm90_lists import ARGUMENT_TYPES, BUILT, COUNTS, KEYS, Lists
from anymla.ops.sparse_attention.gluon_sm90_parts import main_part, right_part
from anymla.ops.sparse_attention.gluon_sm90_query import CHUNK, CHUNKS
from anymla.ops.sparse_attention.gluon_sm90_rescan import any_marked, rescan
from anymla.ops.sparse_attention.gluon_sm90_shares import share_of
from anymla.ops.sparse_attention.gluon_sm90_wide_gather import produce_wide
from anymla.ops.sparse_attention.schedule import Stream

# Spill instructions at the ends of pieces and in the rescan; three in the producers' loop, none in
# the others.
_SPILLS = 700


@gluon.jit
def _rows(
    lists, share, left, right, tail, bias, ready, free, ROW0: gl.constexpr, WIDE: gl.constexpr
):
    if WIDE:
        produce_wide(lists, share, left, right, tail, bias, ready, free, 32, ROW0, 2)
    else:
        produce(lists, share, left, right, bias, ready, free, 32, ROW0, 2)


@gluon.jit(do_not_specialize=COUNTS)
def tiles_kernel(
    q_ptr, rows0_ptr, rows1_ptr, list0_ptr, list1_ptr, length0_ptr, length1_ptr, sink_ptr,
    out_ptr, lse_ptr, part_ptr, sums_ptr, spans_ptr, marks_ptr,
    T, H, width0, width1, limit0, limit1, stride0, stride1, splits,
    q_token, out_token, scale, empty, scales_ptr, positions_ptr, table_ptr, angles,
    out_copy, part_copy, q_copy,
    TILES: gl.constexpr, SPLIT: gl.constexpr, STREAM: gl.constexpr, COST: gl.constexpr,
    SIZE: gl.constexpr, TWO: gl.constexpr, LENGTH0: gl.constexpr, LENGTH1: gl.constexpr,
    PAGE0: gl.constexpr, PAGE1: gl.constexpr, STEP0: gl.constexpr, STEP1: gl.constexpr,
    SINK: gl.constexpr, Q_HEAD: gl.constexpr, OUT_HEAD: gl.constexpr,
    RIGHT_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, ROPE_DIM: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """See the file.

    SPLIT and STREAM are ``cut`` and ``stream`` of the schedule; q_token and Q_HEAD count int32
    words, limit0 and limit1 rows, STEP0 and STEP1 bytes. What comes after ``empty``, and ROPE_DIM,
    is as in ``_gluon_epilogue.Output``. WIDE: rows are those of V3.2, see ``gluon_sm90_wide``.
    """
    lists = Lists(
        rows0_ptr, rows1_ptr, list0_ptr, list1_ptr, length0_ptr, length1_ptr, width0, width1,
        limit0, limit1, stride0, stride1, TWO, LENGTH0, LENGTH1, PAGE0, PAGE1, STEP0, STEP1,
    )  # fmt: skip
    share = share_of(lists, T, splits, spans_ptr, TILES, SPLIT, STREAM, COST, SIZE)

    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    q_words = gl.allocate_shared_memory(gl.int32, [2, HEADS, HALF // 2], WORDS)
    left = gl.allocate_shared_memory(gl.int32, [2, KEYS, HALF // 2], WORDS)
    right = gl.allocate_shared_memory(gl.int32, [2, KEYS, HALF // 2], WORDS)
    q_s = view(q_words, gl.float16, [2, HEADS, HALF], HALVES)
    q_chunks = view(q_words, gl.int32, [2 * CHUNKS, HEADS, CHUNK], WORDS)
    k_left = view(left, gl.float16, [2, KEYS, HALF], HALVES)
    k_right = view(right, gl.float16, [2, KEYS, HALF], HALVES)
    TYPE: gl.constexpr = q_ptr.dtype.element_ty
    out = Output(out_ptr, scales_ptr, positions_ptr, table_ptr, angles, ROPE_DIM, TYPE)
    # There is no room for two buffers of P beside V3.2's tails.
    P: gl.constexpr = 1 if WIDE else 2
    p_s = gl.allocate_shared_memory(gl.float16, [P, HEADS, KEYS], HALVES)
    if WIDE:
        q_tail = gl.allocate_shared_memory(gl.int32, [1, HEADS, CHUNK], WORDS)
        tail = gl.allocate_shared_memory(gl.int32, [2, KEYS, CHUNK], WORDS)
        tails = (
            q_tail.index(0),
            view(q_tail, gl.float16, [1, HEADS, 2 * CHUNK], HALVES).index(0),
            view(tail, gl.float16, [2, KEYS, 2 * CHUNK], HALVES),
        )
    else:
        q_tail, tail, tails = None, None, None
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    decay_s = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    bias_s = gl.allocate_shared_memory(gl.float32, [2, KEYS], FLAT)
    noticed = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    B: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    p_ready = gl.allocate_shared_memory(gl.int64, [P, 1], B)
    p_free = gl.allocate_shared_memory(gl.int64, [P, 1], B)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], B)
    q_here, q_free = None, None
    if q_copy is None:
        q_free = gl.allocate_shared_memory(gl.int64, [1], B)
        mbarrier.init(q_free, count=1)
    else:
        q_here = gl.allocate_shared_memory(gl.int64, [2, 1], B)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=2)
        mbarrier.init(free.index(i), count=2)
        if q_copy is not None:
            mbarrier.init(q_here.index(i), count=1)
        if i < P:
            mbarrier.init(p_ready.index(i), count=1)
            mbarrier.init(p_free.index(i), count=1)
    mbarrier.init(q_ready, count=1)
    moved = (out_copy, part_copy, q_copy)
    gl.warp_specialize(
        [
            (main_part, (
                lists, share, q_ptr, out, moved, lse_ptr, sums_ptr, spans_ptr, sink_ptr, H,
                q_token, out_token, scale, empty, q_words, q_chunks, q_s, k_left, k_right, tails,
                left, p_s, decay_s, bias_s, ready, free, p_ready, p_free, q_ready, q_free, q_here,
                SINK, Q_HEAD, OUT_HEAD, WIDE,
            )),
            (right_part, (
                lists, share, q_ptr, out, moved, marks_ptr, H, q_token, out_token, q_words,
                q_chunks, k_right, right, p_s, decay_s, noticed, free, p_ready,
                p_free, q_ready, q_free, q_here, Q_HEAD, OUT_HEAD, WIDE,
            )),
            (_rows, (lists, share, left, right, tail, bias_s, ready, free, 0, WIDE)),
            (_rows, (lists, share, left, right, tail, bias_s, ready, free, 32, WIDE)),
        ],
        [4, 4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
    if any_marked(noticed, HEADS):
        rescan(
            lists, share, q_ptr, out, lse_ptr, part_ptr, sums_ptr, marks_ptr, sink_ptr, H,
            q_token * 2, Q_HEAD * 2, out_token, OUT_HEAD, scale, empty, q_words, left, p_s,
            HEADS, SINK, q_tail, tail, WIDE,
        )  # fmt: skip


def copies(**constants: object) -> tuple[dict[str, str], dict[str, None]]:
    """Types of the descriptors that a specialisation has, and constants for those it has not."""
    merged = "SPLIT" in constants and "STREAM" not in constants
    box = f"[{HEADS.value}, {HALF.value}],{NVMMASharedLayout(128, 16, rank=2)!r}>"
    there = {
        "out_copy": "" if merged or "ROPE_DIM" in constants else "bf16",
        "part_copy": "fp16" if "SPLIT" in constants else "",
        "q_copy": "" if "WIDE" in constants or "q_copy" in constants else "bf16",
    }
    types = {name: f"tensordesc<{kind}{box}" for name, kind in there.items() if kind}
    return types, {name: None for name in there if name not in types}


def build(label: str, **constants: object) -> Build:
    """One specialisation, with pages of 64 rows unless ``constants`` says otherwise."""
    types, missing = copies(**constants)
    return Build(
        label,
        tiles_kernel,
        ARGUMENT_TYPES | types | ({"out_ptr": "*i16"} if "ROPE_DIM" in constants else {}),
        {"TILES": 1, "RIGHT_REGISTERS": 160, "PRODUCER_REGISTERS": 72, "WIDE": False}
        | BUILT
        | missing
        | constants,
        divisible=("q_token", "out_token"),
        matrix=True,
        spills=_SPILLS,
    )


def builds(target: Target) -> Iterator[Build]:
    """Every way of handing out pieces, and other pages and numbers of heads."""
    if target.name != "sm_90":
        return
    yield build("whole")
    yield build("aligned", SPLIT=True)
    yield build("stream", SPLIT=True, STREAM=True, SIZE=256)
    yield build("stream, 128 heads, pages of 2", SPLIT=True, STREAM=True, TILES=2,
                PAGE1=2, STEP1=1728)  # fmt: skip
    yield build("mixed", SPLIT=True, STREAM=int(Stream.MIXED))
    yield build("mixed, 128 heads", SPLIT=True, STREAM=int(Stream.MIXED), TILES=2, q_copy=None)
    yield build("quantised", ROPE_DIM=64)
    yield build("quantised, stream", ROPE_DIM=64, SPLIT=True, STREAM=True, SIZE=256)
    yield build("planned", SPLIT=True, STREAM=int(Stream.PLANNED))
    yield build("one list, no lengths, pages of 53", TWO=False, LENGTH0=False, LENGTH1=False,
                SINK=False, PAGE0=53, STEP0=31104)  # fmt: skip

"""The prefill kernel for Hopper: 64 heads of one query against tiles of 64 rows.

Grid: as many programs as multiprocessors; program p takes tasks p, p + programs, ...; a task is a
query and a block of 64 heads. Three warpgroups share a task:

    producer  Q, then every block of rows: whole runs by the tensor copy engine, the rest row by row
    left      S = Q K^T, softmax, O[:, :256] += P K[:, :256]
    right     O[:, 256:] += P K[:, 256:]

    K buffers (2)  | rows x left 256 | rows x right 256 |   each half has its own pair of barriers

docs/performance/prefill.md has the barriers' meanings.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anymla.ops.prefill_attention.gluon_sm90_prefill_consumers import left, right
from anymla.ops.prefill_attention.gluon_sm90_prefill_producer import producer
from anymla.ops.prefill_attention.gluon_sm90_prefill_shared import Results, Shared
from anymla.ops.prefill_attention.gluon_sm90_prefill_words import reserve


@gluon.jit(do_not_specialize=["length", "stride", "window", "width", "rows", "tasks", "heads"])
def prefill_kernel(
    q,
    qdesc,
    kdesc,
    odesc,
    kv,
    runs,
    lists,
    sink,
    out,
    scales,
    positions,
    table,
    length,
    lse,
    peaks,
    scale,
    empty,
    stride,
    window,
    width,
    rows,
    tasks,
    heads,
    HEAD_BLOCKS: gl.constexpr,
    LISTED: gl.constexpr,
    BARE: gl.constexpr,
    SINK: gl.constexpr,
    WHOLE: gl.constexpr,
    QUANTISED: gl.constexpr,
    TURNED: gl.constexpr,
    COPIED: gl.constexpr,
    LATE: gl.constexpr,
    PEAKS: gl.constexpr,
    LEFT_REGISTERS: gl.constexpr,
    RIGHT_REGISTERS: gl.constexpr,
):
    """Attention of ``tasks`` = queries x blocks of heads.

    Args:
        q: [T, H, 512].
        qdesc: of q as [T * H, 512], boxes of 64 x 256.
        kdesc: of the rows [N, 512], boxes of 64 x 256.
        odesc: of ``out`` as [T * H, 512], boxes of 64 x 256; used if COPIED.
        kv: pointer to the rows.
        runs: int32 [T, 4].
        lists: int32 [T, .], ``stride`` apart; used if LISTED.
        sink: float32 [H]; used if SINK.
        out: [T, H, 512]; if QUANTISED int16 [T, H, 256], two e4m3 codes each.
        scales: float32 [T, H, 4]; used if QUANTISED, as are the next three.
        positions: int64 [T].
        table: float32 [length, TURNED], cosines then sines.
        length: rows of ``table``.
        lse: float32 [T, H].
        peaks: float32 [T, H], the largest scores; used if PEAKS.
        scale: of the scores, times log2(e).
        empty: lse of a query without rows.
        stride: of ``lists``.
        window: the most rows of a window.
        width: columns of ``lists``, or the most entries.
        rows: N.
        tasks: T * HEAD_BLOCKS.
        heads: H.
        HEAD_BLOCKS: ceil(H / 64).
        LISTED: the second scope is listed, not a run.
        BARE: there is nothing but lists; ``runs`` are their lengths, int32 [T].
        SINK: there is a sink.
        WHOLE: H is a multiple of 64.
        QUANTISED: heads are rotated back and quantised.
        TURNED: channels of a head that turn with the position.
        COPIED: the output has the rows' type and leaves by the tensor copy engine; with WHOLE only.
        LATE: accumulators are rescaled only when a maximum has grown a lot, after which the largest
            weight is no longer 1, and rounded.
        PEAKS: the largest scores are wanted.
        LEFT_REGISTERS: of a thread of ``left``.
        RIGHT_REGISTERS: of a thread of ``right``.
    """
    DT: gl.constexpr = kv.dtype.element_ty
    KL: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    V: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(DT, [2, 64, 256], KL)
    k_l = gl.allocate_shared_memory(DT, [2, 64, 256], KL)
    k_r = gl.allocate_shared_memory(DT, [2, 64, 256], KL)
    p_s = gl.allocate_shared_memory(DT, [2, 64, 64], KL)
    past_s = gl.allocate_shared_memory(gl.float32, [2, 64], V)
    factor_s = gl.allocate_shared_memory(gl.float32, [2, 64], V)
    valid_s = gl.allocate_shared_memory(gl.int32, [2, 64], V)
    masked_s = gl.allocate_shared_memory(gl.int32, [2, 4], V)
    blocks_s = gl.allocate_shared_memory(gl.int32, [2, 1], V)
    rdy_l = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    rdy_r = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    q_rdy = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    for i in gl.static_range(2):
        mbarrier.init(rdy_l.index(i), count=129)
        mbarrier.init(rdy_r.index(i), count=128)
        mbarrier.init(q_rdy.index(i), count=2 - i)
    shared = Shared(
        q_s, k_l, k_r, p_s, past_s, factor_s, valid_s, masked_s, blocks_s,
        rdy_l, rdy_r, q_rdy, reserve(),
    )  # fmt: skip
    to = Results(odesc, out, scales, positions, table, length, lse, peaks)
    gl.warp_specialize(
        [
            (
                producer,
                (
                    q, kv, kdesc, qdesc, runs, lists, stride, window, width, rows, tasks, heads,
                    shared, HEAD_BLOCKS, LISTED, BARE,
                ),
            ),
            (
                left,
                (
                    sink, to, shared, scale, empty, tasks, heads,
                    HEAD_BLOCKS, LISTED, SINK, WHOLE, QUANTISED, TURNED, COPIED, LATE, PEAKS,
                ),
            ),
            (
                right,
                (to, shared, tasks, heads, HEAD_BLOCKS, WHOLE, QUANTISED, TURNED, COPIED),
            ),
        ],
        [4, 4],
        [LEFT_REGISTERS, RIGHT_REGISTERS],
    )  # fmt: skip

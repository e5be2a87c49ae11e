"""``gluon_sm90_rescan`` for DeepSeek-V3.2's rows: in bfloat16 what float16 does not hold."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops.sparse_attention.gluon_sm90_lists import KEYS, slots_of
from anymla.ops.sparse_attention.gluon_sm90_rescan import deliver, fetch_q, weigh
from anymla.ops.sparse_attention.gluon_sm90_shares import piece
from anymla.ops.sparse_attention.gluon_sm90_softmax import (
    LOG2E,
    NO_MAXIMUM,
    view,
    warps_meet,
)
from anymla.ops.sparse_attention.gluon_sm90_wide_gather import CODES, TAIL, row_address

_CHUNK = gl.constexpr(64)
_CHUNKS = gl.constexpr(8)


@gluon.jit
def _fetch_tail(q_ptr, token, head0, H, token_stride, head_stride, to):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = head0 + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    column = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, L)), 0)
    row = token.to(gl.int64) * token_stride + head.to(gl.int64) * head_stride
    at = q_ptr + gl.expand_dims(row, 1) + (column + _CHUNKS * _CHUNK)
    to.store(gl.load(at, mask=gl.expand_dims(head < H, 1), other=0.0))


@gluon.jit
def _fetch_rows(valid, data, to, to_tail, L: gl.constexpr):
    """Decode a block of rows to [8, 64, 64] and [64, 64]."""
    column = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, L)), 0)
    there = gl.expand_dims(valid, 1) & (column >= 0)
    at = gl.expand_dims(data, 1) + column
    for chunk in range(0, _CHUNKS):
        codes = (at + chunk * _CHUNK).to(gl.pointer_type(gl.uint8))
        codes = gl.load(codes, mask=there, other=0)
        scale = (data + (CODES + chunk // 2 * 4)).to(gl.pointer_type(gl.float32))
        factor = gl.expand_dims(gl.load(scale, mask=valid, other=1.0), 1)
        rows = codes.to(gl.float8e4nv, bitcast=True).to(gl.float32) * factor
        to.index(chunk).store(rows.to(gl.bfloat16))
    tail = (gl.expand_dims(data, 1) + TAIL + column * 2).to(gl.pointer_type(gl.bfloat16))
    to_tail.store(gl.load(tail, mask=there, other=0.0))


@gluon.jit
def _pass(
    lists, token, n0, n1, blocks0, first, last, factor, q_s, q_tail, k_s, k_tail, p_s, quarter,
):  # fmt: skip
    """Scores of all blocks, and sums of one quarter of the channels, as two tiles of 64."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    PER_HEAD: gl.constexpr = gl.SliceLayout(1, S)
    L: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    r = gl.arange(0, KEYS, layout=gl.SliceLayout(1, L))
    low = gl.zeros([64, _CHUNK], gl.float32, S)
    high = gl.zeros([64, _CHUNK], gl.float32, S)
    highest = gl.full([64], NO_MAXIMUM, gl.float32, PER_HEAD)
    sums = gl.zeros([64], gl.float32, PER_HEAD)
    for block in range(first, last):
        slots = slots_of(block, last, token, n0, n1, blocks0, lists, r)
        valid, data = row_address(slots, lists)
        _fetch_rows(valid, data, k_s, k_tail, L)
        fence_async_shared()
        warps_meet()
        scores = gl.zeros([64, KEYS], gl.float32, S)
        # Not unrolled: see gluon_sm90_rescan.
        for chunk in range(0, _CHUNKS):
            scores = warpgroup_mma(
                q_s.index(chunk), k_s.index(chunk).permute((1, 0)), scores, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
        scores = warpgroup_mma(q_tail, k_tail.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        low, high, highest, sums = weigh(
            scores, valid, low, high, highest, sums, factor, k_s, p_s, quarter
        )
    return low, high, highest * factor, sums


@gluon.jit
def rescan_wide(
    lists, share, q_ptr, out, lse_ptr, part_ptr, sums_ptr, marks_ptr, sink_ptr, H,
    q_token, q_head, out_token, out_head, scale, empty, q_memory, q_tail_memory, k_memory,
    k_tail_memory, p_memory, ROWS: gl.constexpr, SINK: gl.constexpr,
):  # fmt: skip
    """Overwrite the results of the program's marked pieces.

    Arguments as in ``gluon_sm90_rescan.rescan``; the tails' memory is of at least 8 KiB.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_s = view(q_memory, gl.bfloat16, [_CHUNKS, 64, _CHUNK], SHARED)
    q_tail = view(q_tail_memory, gl.bfloat16, [1, 64, _CHUNK], SHARED).index(0)
    k_s = view(k_memory, gl.bfloat16, [_CHUNKS, KEYS, _CHUNK], SHARED)
    k_tail = view(k_tail_memory, gl.bfloat16, [1, KEYS, _CHUNK], SHARED).index(0)
    p_s = view(p_memory, gl.bfloat16, [1, 64, KEYS], SHARED).index(0)
    for k in range(0, share.count):
        token, tile, n0, n1, blocks0, first, last, direct, slot, mark = piece(k, share, lists)
        wrong = gl.load(marks_ptr + mark * 2) | gl.load(marks_ptr + mark * 2 + 1)
        if wrong != 0:
            head0 = tile * ROWS
            head = head0 + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
            fetch_q(q_ptr, token, head0, H, q_token, q_head, q_s)
            _fetch_tail(q_ptr, token, head0, H, q_token, q_head, q_tail)
            for quarter in range(0, 4):
                low, high, top, sums = _pass(
                    lists, token, n0, n1, blocks0, first, last, scale * LOG2E, q_s, q_tail, k_s,
                    k_tail, p_s, quarter,
                )  # fmt: skip
                deliver(
                    out, out_token, out_head, lse_ptr, part_ptr, sums_ptr, share, token, direct,
                    slot, head, head0, H, quarter, low, high, top, sums, empty, sink_ptr, ROWS,
                    SINK,
                )  # fmt: skip

"""Where ``gluon_sm90_columns`` leaves results, whose rows are channels: as rows of heads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._gluon import view
from anymla.ops._gluon_epilogue import store_quantized_rows
from anymla.ops.sparse_attention.gluon_sm90_gather import LIFT
from anymla.ops.sparse_attention.gluon_sm90_lists import CHANNELS
from anymla.ops.sparse_attention.gluon_sm90_query import stored
from anymla.ops.sparse_attention.gluon_sm90_softmax import SUMS, bottom_of, log_sum

HALF = gl.constexpr(256)


@gluon.jit
def _turned_over(y, words, TYPE: gl.constexpr, PART: gl.constexpr, HEADS: gl.constexpr):
    """Y [256, HEADS] as rows of heads, by way of shared memory: int32 [2, HEADS, 128]."""
    HALVES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    stage = view(words, TYPE, [2, HEADS, HALF], HALVES).index(PART)
    stage.permute((1, 0)).store(y.to(TYPE))
    return stage.load(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def _store_heads(rows, to, H, HEAD: gl.constexpr, PART: gl.constexpr, HEADS: gl.constexpr):
    """Write half of all heads; HEAD: stride of ``to``."""
    L: gl.constexpr = rows.type.layout
    head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)), 1)
    channel = gl.arange(0, HALF, layout=gl.SliceLayout(0, L))
    if PART == 1:
        channel = stored(channel, 1)
    at = to + (head * HEAD + gl.expand_dims(channel, 0) + PART * HALF)
    gl.store(at, rows, mask=head < H)


@gluon.jit
def _store_out(
    y, words, out, token, H, head0, token_stride,
    HEAD: gl.constexpr, PART: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    rows = _turned_over(y, words, out.TYPE, PART, HEADS)
    if out.ROPE_DIM > 0:
        store_quantized_rows(rows, out, token, H, head0, HEADS, PART)
    else:
        to = out.heads + token.to(gl.int64) * token_stride + head0 * HEAD
        _store_heads(rows, to, H - head0, HEAD, PART, HEADS)


@gluon.jit
def finish(
    left, right, low, sums, top, empty, words, out, lse_ptr, sink, token, H, head0, out_token,
    OUT_HEAD: gl.constexpr, HEADS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Write the result of a whole task, heads from head0 on.

    low: whether a row of right is before the tail.
    """
    head = head0 + gl.arange(0, HEADS, layout=gl.SliceLayout(0, L))
    bottom = bottom_of(sums, top, sink)
    share = gl.expand_dims(gl.where(sums > 0, 1.0 / bottom, 0.0), 0)
    small = share * (1.0 / LIFT)
    _store_out(left * small, words, out, token, H, head0, out_token, OUT_HEAD, 0, HEADS)
    right = right * gl.where(low, small, share)
    _store_out(right, words, out, token, H, head0, out_token, OUT_HEAD, 1, HEADS)
    gl.store(lse_ptr + token.to(gl.int64) * H + head, log_sum(sums, top, empty), mask=head < H)


@gluon.jit
def leave(
    left, right, sums, top, words, part_ptr, sums_ptr, slot, H, HEADS: gl.constexpr, L: gl.constexpr
):
    """Leave the result of a piece."""
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, L))
    to = part_ptr + slot.to(gl.int64) * (HEADS * CHANNELS)
    share = gl.expand_dims(gl.where(sums > 0, 1.0 / sums, 0.0), 0)
    rows = _turned_over(left * share, words, gl.float16, 0, HEADS)
    _store_heads(rows, to, H, CHANNELS, 0, HEADS)
    rows = _turned_over(right * share, words, gl.float16, 1, HEADS)
    _store_heads(rows, to, H, CHANNELS, 1, HEADS)
    at = sums_ptr + (slot.to(gl.int64) * HEADS + head) * SUMS
    gl.store(at, top, mask=head < H)
    gl.store(at + 1, sums, mask=head < H)
    gl.store(at + 2, sums * 0.0 + 1.0, mask=head < H)

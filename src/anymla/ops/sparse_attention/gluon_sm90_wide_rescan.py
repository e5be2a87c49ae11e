"""What ``gluon_sm90_rescan`` reads of DeepSeek-V3.2's rows and queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops.sparse_attention.gluon_sm90_wide_gather import CODES, TAIL

_CHUNK = gl.constexpr(64)
_CHUNKS = gl.constexpr(8)


@gluon.jit
def fetch_tail(q_ptr, token, head0, H, token_stride, head_stride, to):
    """The last 64 of 576 channels of 64 heads, to [64, 64]."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = head0 + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    column = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, L)), 0)
    row = token.to(gl.int64) * token_stride + head.to(gl.int64) * head_stride
    at = q_ptr + gl.expand_dims(row, 1) + (column + _CHUNKS * _CHUNK)
    to.store(gl.load(at, mask=gl.expand_dims(head < H, 1), other=0.0))


@gluon.jit
def fetch_wide_rows(valid, data, to, to_tail, L: gl.constexpr):
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

"""What the stream of experts asks for: a tile's weights, and a block's activations."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def away(expert, stride, table, UNIT: gl.constexpr):
    """Elements from the first expert's tensor to this one's; a table's are in units."""
    here = expert.to(gl.int64)
    if table is None:
        return here * stride
    else:
        return gl.load(table + expert) * UNIT


@gluon.jit
def tile_of(
    item, blocks, count, w1, w1_stride, w1_table, s1, s1_stride, s1_table,
    w3, w3_stride, w3_table, s3, s3_stride, s3_table,
    K: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, UP: gl.constexpr,
    W_UNIT: gl.constexpr,
):  # fmt: skip
    """Where a tile's codes and scales begin, in one matrix or two, and its block's places."""
    block = item // TILES
    tile = (item - block * TILES).to(gl.int64)
    # Past the first-level cache: w2's programs read them before they wait.
    expert = gl.load(blocks + block, cache_modifier=".cg")
    place = gl.load(blocks + count + block, cache_modifier=".cg")
    end = gl.load(blocks + 2 * count + block, cache_modifier=".cg")
    wa = w1 + away(expert, w1_stride, w1_table, W_UNIT) + tile * (ROWS * (K // 2))
    sa = s1 + away(expert, s1_stride, s1_table, 1) + tile * (ROWS * (K // 32))
    wb = wa
    sb = sa
    if UP:
        wb = w3 + away(expert, w3_stride, w3_table, W_UNIT) + tile * (ROWS * (K // 2))
        sb = s3 + away(expert, s3_stride, s3_table, 1) + tile * (ROWS * (K // 32))
    return wa, wb, sa, sb, place, end


@gluon.jit
def ask_weights(
    ring, scale_ring, wa, wb, sa, sb, part,
    M: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr, UP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A stage's codes [M, CHUNK / 8] and scales [M, CHUNK / 128], four of either to a word."""
    C: gl.constexpr = CHUNK // 8
    RUNS: gl.constexpr = CHUNK // 128
    FW: gl.constexpr = gl.BlockedLayout([1, 4], [128 // C, C // 4], [WARPS, 1], [1, 0])
    FS: gl.constexpr = gl.BlockedLayout([1, 1], [32 // RUNS, RUNS], [WARPS, 1], [1, 0])
    fr = gl.arange(0, M, layout=gl.SliceLayout(1, FW))
    sr = gl.arange(0, M, layout=gl.SliceLayout(1, FS))
    if UP:
        # Gate and up are rows g and g + 8 of a warp's instruction, so that a thread has both.
        wa = gl.where(gl.expand_dims(fr % 16 >= 8, 1), wb, wa)
        sa = gl.where(gl.expand_dims(sr % 16 >= 8, 1), sb, sa)
        fr = fr // 16 * 8 + fr % 8
        sr = sr // 16 * 8 + sr % 8
    at = wa + gl.expand_dims(fr * (K // 2), 1) + part * (CHUNK // 2)
    word = gl.arange(0, C, layout=gl.SliceLayout(0, FW))
    _copy(ring, at.to(gl.pointer_type(gl.int32)) + gl.expand_dims(word, 0))
    at = sa + gl.expand_dims(sr * (K // 32), 1) + part * (CHUNK // 32)
    word = gl.arange(0, RUNS, layout=gl.SliceLayout(0, FS))
    _copy(scale_ring, at.to(gl.pointer_type(gl.int32)) + gl.expand_dims(word, 0))


@gluon.jit
def ask_rows(
    x, x_scales, order, x_words, x_factors, place, end, part,
    K: gl.constexpr, N: gl.constexpr, CHUNK: gl.constexpr, PER_TOKEN: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """CHUNK channels of the operands of a block's pairs, and their scales."""
    RUNS: gl.constexpr = CHUNK // 128
    FX: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [WARPS, 1], [1, 0])
    FF: gl.constexpr = gl.BlockedLayout([1, 1], [32 // N, N], [WARPS, 1], [1, 0])
    group = gl.arange(0, CHUNK // 32 * N, layout=gl.SliceLayout(1, FX))
    there = place + group % N
    token = gl.load(order + there, mask=there < end, other=0) // PER_TOKEN
    at = x + gl.expand_dims(token.to(gl.int64) * K, 1)
    at = at + gl.expand_dims(group // N * 32, 1) + part * CHUNK
    word = gl.arange(0, 8, layout=gl.SliceLayout(0, FX))
    _copy(
        x_words, at.to(gl.pointer_type(gl.int32)) + gl.expand_dims(word, 0),
        mask=gl.expand_dims(there < end, 1),
    )  # fmt: skip
    there = place + gl.arange(0, N, layout=gl.SliceLayout(0, FF))
    token = gl.load(order + there, mask=there < end, other=0) // PER_TOKEN
    run = part * RUNS + gl.arange(0, RUNS, layout=gl.SliceLayout(1, FF))
    at = x_scales + gl.expand_dims(token.to(gl.int64) * (K // 128), 0) + gl.expand_dims(run, 1)
    _copy(x_factors, at, mask=gl.expand_dims(there < end, 0))

"""Grouped GEMM of MXFP4 experts on Hopper for blocks of 64 or 128 pairs (W4A8, scaled codes).

    work tile   128 rows of an expert's weights (64 of w1 and the same 64 of w3, or 128 of w2) for a
                block of N pairs; CTAs are persistent and take every n-th tile
    stage       128 channels of a tile: packed codes, e4m3 operands of the pairs, their scales

    producer    1 warp loads stages by TMA into a ring
    scales      2 warps compute, one tile ahead, each row's exponent and its groups' offsets to it
    consumers   2 warpgroups, 32 rows of either half of a tile each: decode, multiply, promote

Barriers: full[i] from TMA to consumers and empty[i] back; scales_full[i] and scales_empty[i] do the
same for scales.

The weight's rows are rows of the matrix instruction, pairs its columns (swap AB), so decoded
weights go from registers into it. e2m1 times 2^k is exact in e4m3 for any k within a window of
WINDOW binades, so the scales of a row's groups are applied to its codes relative to the row's
largest scale: a group's eight magnitudes form a table of 8 bytes, in which ``prmt`` looks codes up.
A row whose scales span more is multiplied once for every window that occurs in its tile, from the
smallest to the largest, with groups of other windows set to zero; so every weight is exact down to
2^-126 of its row's largest scale.

The instruction sums 128 channels, keeping 13 bits below the largest addend; these sums are scaled
and accumulated in float32.
"""

# mypy: ignore-errors

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anymla.ops._gluon import view
from anymla.ops._gluon_ptx import cvt_e4m3x8_e2m1x8_table, gdc_launch_dependents, gdc_wait, opaque
from anymla.ops.moe.gluon_sm90_grouped_gemm import _clamped_swiglu

# Binades of scales that e4m3 holds exactly with every e2m1 code, 0.5 being a normal number.
WINDOW = 12
_WINDOW = gl.constexpr(WINDOW)
_NEXT_WINDOW = gl.constexpr(2.0**-WINDOW)
# One bit for each window that a tile needs, at most 255 / WINDOW; above this bit, their number.
_COUNT_BIT = gl.constexpr(24)
# Addend that carries bytes of WINDOW or more into bit 7.
_TO_BIT_7 = gl.constexpr((128 - WINDOW) * 0x01010101)
# e4m3 codes of 1.5, 1, 0.5, 0 and of 6, 4, 3, 2, times 2^-5, a window's lowest scale; 6 * 2^6 is
# the largest that e4m3 holds.
_LOW = gl.constexpr(0x14100800)
_HIGH = gl.constexpr(0x24201C18)
_TOP_UNIT = gl.constexpr(2.0**-6)
_FIRST, _SECOND = gl.constexpr(0), gl.constexpr(1)

# Triton 3.6 has the function's old name.
_async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


class Ring(NamedTuple):
    """Shared memory and barriers of all partitions.

    Attributes:
        codes: packed codes of the stages, int32 [4 STAGES, 32, 16], two halves for each part of a
            tile.
        loaded: the same memory as TMA fills it, uint8 [2 STAGES, 64, 64].
        x: activations of the stages, e4m3 [STAGES, N, 128].
        x_scales: scales of the activations, float32 [STAGES, N].
        x_loaded: the same memory as TMA fills it, [STAGES, 1, N].
        shifts: exponent offsets, four groups of a row to a word, int32 [2 K / 128, 128]; see
            ``_prepare_scales``.
        shift_parts: the same memory as [8 K / 128, 32].
        factors: scale of each row of two tiles, float32 [2, 128].
        factor_parts: the same memory as [8, 32].
        windows: bits of the windows that occur in two tiles, int32 [2, 1].
        full: barriers of filled stages, from TMA to consumers.
        empty: barriers of released stages, from consumers to TMA.
        scales_full: barriers of prepared scales, one for each of two tiles.
        scales_empty: barriers of released scales, one for each of two tiles.
    """

    codes: Any
    loaded: Any
    x: Any
    x_scales: Any
    x_loaded: Any
    shifts: Any
    shift_parts: Any
    factors: Any
    factor_parts: Any
    windows: Any
    full: Any
    empty: Any
    scales_full: Any
    scales_empty: Any


@gluon.jit
def _work_tile(blocks, count, work_tile, TILES: gl.constexpr):
    """Return expert, tile, and the block's first and end place."""
    block = work_tile // TILES
    expert = gl.load(blocks + block)
    place = gl.load(blocks + count + block)
    end = gl.load(blocks + 2 * count + block)
    return expert, work_tile - block * TILES, place, end


@gluon.jit
def _tiles_of_cta(work_tiles):
    """Count this CTA's work tiles."""
    ctas = gl.num_programs(0)
    return (work_tiles - gl.program_id(0) + ctas - 1) // ctas


@gluon.jit
def _read_windows(ring, slot):
    """Load the bits of a tile's windows."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(ring.windows.index(slot).load(ONE), 0)


@gluon.jit
def _passes(windows):
    """Count the windows that occur."""
    passes = 0
    for i in gl.static_range(22):
        passes += (windows >> i) & 1
    return passes


@gluon.jit
def _produce(
    x_desc, x_scale_desc, a_desc, b_desc, ring, blocks, count, a_rows, b_rows, work_tiles,
    K: gl.constexpr, N: gl.constexpr, UP: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Load all stages of a CTA's tiles by TMA."""
    KB: gl.constexpr = K // 128
    BYTES: gl.constexpr = 128 * 64 + N * 128 + N * 4
    step = 0
    for number in range(_tiles_of_cta(work_tiles)):
        work_tile = gl.program_id(0) + number * gl.num_programs(0)
        expert, tile, place, _ = _work_tile(blocks, count, work_tile, TILES)
        scales_at = work_tile // TILES * KB
        row_a = expert * a_rows + tile * (64 if UP else 128)
        row_b = expert * b_rows + tile * (64 if UP else 128) + (0 if UP else 64)
        passes = 1
        at = 0
        while at < passes * KB:
            if at == KB - 2:
                # Read how often stages are multiplied, which their first loads need not wait for.
                # It is known before the stage that consumers end with, so they release it for this
                # partition.
                slot = number % 2
                mbarrier.wait(ring.scales_full.index(slot), (number // 2) & 1)
                passes = _passes(_read_windows(ring, slot))
            qb = at % KB
            s = step % STAGES
            mbarrier.wait(ring.empty.index(s), ((step // STAGES) & 1) ^ 1)
            full = ring.full.index(s)
            mbarrier.expect(full, BYTES)
            _async_load(a_desc, [row_a, qb * 64], full, ring.loaded.index(2 * s))
            _async_load(b_desc, [row_b, qb * 64], full, ring.loaded.index(2 * s + 1))
            _async_load(x_desc, [place, qb * 128], full, ring.x.index(s))
            _async_load(x_scale_desc, [scales_at + qb, 0], full, ring.x_loaded.index(s))
            step += 1
            at += 1


@gluon.jit
def _byte(words, j: gl.constexpr):
    return (words >> (8 * j)) & 255


@gluon.jit
def _largest_byte(words):
    """Return the largest of each word's four bytes."""
    pairs = gl.maximum(_byte(words, 0), _byte(words, 1))
    return gl.maximum(pairs, gl.maximum(_byte(words, 2), _byte(words, 3)))


@gluon.jit
def _outside(shifts):
    """Set bit 7 of each byte that is WINDOW or more."""
    return ((shifts & 0x7F7F7F7F) + _TO_BIT_7) | shifts


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def _windows_of(shifts):
    """Return the bits of the windows that contain a word's four groups."""
    bits = gl.zeros_like(shifts)
    for j in gl.static_range(4):
        bits = bits | (1 << _byte(shifts, j) // _WINDOW)
    return bits


@gluon.jit
def _scale_rows(s1, s3, a_offset, b_offset, row, K: gl.constexpr):
    """Return pointers to rows of scales as words: 64 of one tensor, then 64 of the other."""
    at = gl.where(row < 64, s1 + a_offset, s3 + b_offset) + row % 64 * (K // 32)
    return at.to(gl.pointer_type(gl.int32))


@gluon.jit
def _shifts(words, top, spoiled):
    """Return how far below its row's largest each of a word's bytes is; 0 in rows with a NaN."""
    return gl.where(spoiled, 0, top * 0x01010101 - words)


@gluon.jit
def _split4(words):
    """Split words [M, 4] into four [M]."""
    M: gl.constexpr = words.shape[0]
    lower, upper = gl.split(gl.permute(gl.reshape(words, [M, 2, 2]), (0, 2, 1)))
    first, second = gl.split(lower)
    third, fourth = gl.split(upper)
    return first, second, third, fourth


@gluon.jit
def _prepare_scales(
    s1, s1_stride, s3, s3_stride, ring, blocks, count, work_tiles,
    K: gl.constexpr, UP: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Compute rows' factors, groups' distances from the largest, and the windows that they occupy.

    A byte of ``shifts`` is how far below its row's largest a group's exponent is. A row with a NaN
    is NaN by its factor, and its groups count as equal.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    KB: gl.constexpr = K // 128
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, L))
    for number in range(_tiles_of_cta(work_tiles)):
        work_tile = gl.program_id(0) + number * gl.num_programs(0)
        expert, tile, _, _ = _work_tile(blocks, count, work_tile, TILES)
        ROWS: gl.constexpr = 64 if UP else 128
        a_offset = expert.to(gl.int64) * s1_stride + tile * (ROWS * (K // 32))
        b_offset = expert.to(gl.int64) * s3_stride + tile * (ROWS * (K // 32))
        if not UP:
            b_offset += 64 * (K // 32)
        # Compute addresses in place: those kept across partitions would be spilled.
        row = opaque(gl.arange(0, 128, layout=gl.SliceLayout(1, L)))
        at = gl.expand_dims(_scale_rows(s1, s3, a_offset, b_offset, row, K), 1)
        at = at + gl.expand_dims(word, 0)
        top = gl.zeros([128, 4], gl.int32, L)
        TWICE: gl.constexpr = KB // 8
        for two in range(TWICE):
            first, second = gl.load(at + 8 * two), gl.load(at + 8 * two + 4)
            top = gl.maximum(top, gl.maximum(_largest_byte(first), _largest_byte(second)))
        if KB % 8 != 0:
            top = gl.maximum(top, _largest_byte(gl.load(at + 8 * TWICE)))
        row_top = gl.max(top, 1)
        factor = (gl.maximum(row_top << 23, 0x00400000)).to(gl.float32, bitcast=True)
        factor = gl.where(row_top == 255, float("nan"), factor * _TOP_UNIT)
        slot = number % 2
        mbarrier.wait(ring.scales_empty.index(slot), ((number // 2) & 1) ^ 1)
        below = gl.expand_dims(row_top, 1)
        outside = gl.zeros([128, 4], gl.int32, L)
        for qb in range(0, KB, 4):
            shift = _shifts(gl.load(at + qb), below, below == 255)
            outside = outside | _outside(shift)
            w0, w1, w2, w3 = _split4(shift)
            ring.shifts.index(slot * KB + qb).store(w0)
            ring.shifts.index(slot * KB + qb + 1).store(w1)
            ring.shifts.index(slot * KB + qb + 2).store(w2)
            ring.shifts.index(slot * KB + qb + 3).store(w3)
        ring.factors.index(slot).store(factor)
        windows = 1 | (1 << _COUNT_BIT)
        if (gl.reduce(gl.reduce(outside, 1, _or), 0, _or) & -0x7F7F7F80) != 0:
            bits = gl.zeros([128, 4], gl.int32, L)
            for qb in range(0, KB, 4):
                bits = bits | _windows_of(_shifts(gl.load(at + qb), below, below == 255))
            windows = gl.reduce(gl.reduce(bits, 1, _or), 0, _or)
            number_of = 1
            for i in gl.static_range(1, 22):
                number_of = gl.where((windows >> i) != 0, i + 1, number_of)
            windows = windows | (number_of << _COUNT_BIT)
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        ring.windows.index(slot).store(gl.full([1], 0, gl.int32, ONE) + windows)
        mbarrier.arrive(ring.scales_full.index(slot), count=1)


@gluon.jit
def _decode_part(ring, s, shift_at, part, group, window, WORDS: gl.constexpr):
    """Decode a part's codes to even and odd channels int32 [32, 16], four words a group."""
    words = ring.codes.index(4 * s + part).load(WORDS)
    below = ring.shift_parts.index(4 * shift_at + part).load(gl.SliceLayout(1, WORDS))
    below = (gl.expand_dims(below, 1) >> (gl.expand_dims(group, 0) * 8)) & 255
    # Count from the bottom of the window.
    up = (_WINDOW - 1 + _WINDOW * window) - below
    inside = (up >= 0) & (up < _WINDOW)
    low = gl.where(inside, up * 0x08080800 + _LOW, 0)
    high = gl.where(inside, up * 0x08080808 + _HIGH, 0)
    return cvt_e4m3x8_e2m1x8_table(words, low, high)


@gluon.jit
def _bytes(words):
    """Split int32 words into their four bytes in order, uint8 [..., 2, 2]."""
    even = gl.join((words & 255).to(gl.uint8), ((words >> 16) & 255).to(gl.uint8))
    odd = gl.join(((words >> 8) & 255).to(gl.uint8), ((words >> 24) & 255).to(gl.uint8))
    return gl.join(even, odd)


@gluon.jit
def _decode_stage(
    ring, s, shift_at, group, window,
    CONSUMER: gl.constexpr, A: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Decode a consumer's operand [64, 128]: rows of both parts, alternating eight by eight."""
    a_even, a_odd = _decode_part(ring, s, shift_at, CONSUMER, group, window, WORDS)
    b_even, b_odd = _decode_part(ring, s, shift_at, 2 + CONSUMER, group, window, WORDS)
    words = gl.join(gl.join(a_even, a_odd), gl.join(b_even, b_odd))
    codes = gl.reshape(_bytes(words), [4, 8, 4, 4, 2, 2, 4])
    codes = gl.reshape(gl.permute(codes, (0, 5, 1, 3, 4, 2, 6)), [64, 128])
    return gl.convert_layout(codes.to(gl.float8e4nv, bitcast=True), A)


@gluon.jit
def _multiply(a, sums, ring, s):
    """Issue a stage's product."""
    ACC: gl.constexpr = sums.type.layout
    zeros = gl.zeros(sums.shape, gl.float32, ACC)
    x = ring.x.index(s).permute((1, 0))
    return warpgroup_mma(a, x, zeros, use_acc=False, is_async=True)


@gluon.jit
def _promote(p, sums, ring, s):
    """Wait for a stage's product, scale and add it, and release the stage."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    p = warpgroup_mma_wait(0, deps=[p])
    # Load only now: these take as many registers as a quarter of the sums of blocks of 128 pairs.
    x_scale = ring.x_scales.index(s).load(COLUMN)
    sums += p * gl.expand_dims(x_scale, 0)
    fence_async_shared()
    mbarrier.arrive(ring.empty.index(s), count=1)
    return sums


@gluon.jit
def _multiply_and_decode(
    a, sums, ring, step, shift_at, group, window,
    STAGES: gl.constexpr, CONSUMER: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Multiply a stage while the next one's operand is decoded.

    The product begins and ends here: ptxas keeps the registers of its operand until the wait, but
    not from one round of a loop to the next, where decoded values would overwrite them.
    """
    A: gl.constexpr = a.type.layout
    s, t = step % STAGES, (step + 1) % STAGES
    p = _multiply(a, sums, ring, s)
    mbarrier.wait(ring.full.index(t), ((step + 1) // STAGES) & 1)
    following = _decode_stage(ring, t, shift_at, group, window, CONSUMER, A, WORDS)
    return following, _promote(p, sums, ring, s)


@gluon.jit
def _store(
    value, out, sorted_pairs, place, end, channel, WIDTH: gl.constexpr, SORTED: gl.constexpr
):
    """Store [32, N], channels from ``channel`` on of a block's rows, sorted or by their pairs."""
    N: gl.constexpr = value.shape[1]
    L: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    value = gl.convert_layout(value.to(out.dtype.element_ty), L)
    line = place + gl.arange(0, N, layout=gl.SliceLayout(0, L))
    inside = line < end
    if not SORTED:
        line = gl.load(sorted_pairs + line, mask=inside, other=0)
    row = gl.arange(0, 32, layout=gl.SliceLayout(1, L))
    to = out + gl.expand_dims(line.to(gl.int64) * WIDTH + channel, 0) + gl.expand_dims(row, 1)
    gl.store(to, value, mask=gl.expand_dims(inside, 0))


@gluon.jit
def _pair_weights(weights, sorted_pairs, place, end, N: gl.constexpr, L: gl.constexpr):
    """Load the weights of a block's pairs, so that a thread has those of its columns."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    line = place + gl.arange(0, N, layout=EACH)
    pair = gl.load(sorted_pairs + line, mask=line < end, other=0)
    weight = gl.load(weights + pair, mask=line < end, other=0.0)
    return gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(0, L)), 0)


@gluon.jit
def _consume(
    ring, weights, sorted_pairs, blocks, out, count, limit, work_tiles,
    K: gl.constexpr, OUT: gl.constexpr, N: gl.constexpr, UP: gl.constexpr, TILES: gl.constexpr,
    STAGES: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Multiply 32 rows of either part of every tile, and store the results."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=4)
    # A thread has 32 channels of its rows, which share one scale.
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, 16]
    )
    KB: gl.constexpr = K // 128
    DT: gl.constexpr = out.dtype.element_ty
    group = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS)) // 4
    step = 0
    for number in range(_tiles_of_cta(work_tiles)):
        work_tile = gl.program_id(0) + number * gl.num_programs(0)
        _, tile, place, end = _work_tile(blocks, count, work_tile, TILES)
        slot = number % 2
        mbarrier.wait(ring.scales_full.index(slot), (number // 2) & 1)
        windows = _read_windows(ring, slot)
        sums = gl.zeros([64, N], gl.float32, ACC)
        for back in range(windows >> _COUNT_BIT):
            window = (windows >> _COUNT_BIT) - 1 - back
            if back > 0:
                # Express the sums so far in units of the next window.
                sums = sums * _NEXT_WINDOW
            if ((windows >> window) & 1) != 0:
                at = slot * KB
                mbarrier.wait(ring.full.index(step % STAGES), (step // STAGES) & 1)
                a = _decode_stage(ring, step % STAGES, at, group, window, CONSUMER, A, WORDS)
                for qb in range(0, KB - 2, 2):
                    b, sums = _multiply_and_decode(
                        a, sums, ring, step, at + qb + 1, group, window, STAGES, CONSUMER, WORDS
                    )
                    a, sums = _multiply_and_decode(
                        b, sums, ring, step + 1, at + qb + 2, group, window, STAGES, CONSUMER, WORDS
                    )
                    step += 2
                b, sums = _multiply_and_decode(
                    a, sums, ring, step, at + KB - 1, group, window, STAGES, CONSUMER, WORDS
                )
                p = _multiply(b, sums, ring, (step + 1) % STAGES)
                sums = _promote(p, sums, ring, (step + 1) % STAGES)
                step += 2
        parts = gl.permute(gl.reshape(sums, [4, 2, 8, N]), (0, 2, 3, 1))
        first, second = gl.split(parts)
        first, second = gl.reshape(first, [32, N]), gl.reshape(second, [32, N])
        L: gl.constexpr = first.type.layout
        ROW: gl.constexpr = gl.SliceLayout(1, L)
        factor = ring.factor_parts.index(4 * slot + CONSUMER).load(ROW)
        first = first * gl.expand_dims(factor, 1)
        factor = ring.factor_parts.index(4 * slot + 2 + CONSUMER).load(ROW)
        second = second * gl.expand_dims(factor, 1)
        mbarrier.arrive(ring.scales_empty.index(slot), count=1)
        if UP:
            gate, up = first.to(DT).to(gl.float32), second.to(DT).to(gl.float32)
            value = _clamped_swiglu(gate, up, limit)
            value = value * _pair_weights(weights, sorted_pairs, place, end, N, L)
            channel = tile * 64 + 32 * CONSUMER
            _store(value, out, sorted_pairs, place, end, channel, OUT, True)
        else:
            channel = tile * 128 + 32 * CONSUMER
            _store(first, out, sorted_pairs, place, end, channel, OUT, False)
            _store(second, out, sorted_pairs, place, end, channel + 64, OUT, False)


@gluon.jit(do_not_specialize=["count", "a_rows", "b_rows"])
def w4a8_gemm_kernel(
    x_desc, x_scale_desc, a_desc, b_desc, weights, sorted_pairs, blocks, s1, s1_stride, s3,
    s3_stride, out, count, a_rows, b_rows, limit,
    K: gl.constexpr, OUT: gl.constexpr, N: gl.constexpr, UP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute one grouped GEMM: w1 and w3 with SwiGLU and the pairs' weights (UP), or w2.

    Args:
        x_desc: e4m3 [P, K], operands of sorted pairs in the order of decoded weights; boxes [N,
            128].
        x_scale_desc: float32 [blocks * K / 128, N], scales of x, block by block; boxes [1, N].
        a_desc: uint8, rows of packed codes of all experts' w1 (or w2), K / 2 bytes each; boxes [64,
            64].
        b_desc: rows of packed codes of w3 (or w2), like ``a_desc``.
        weights: weights of the pairs with UP, float32.
        sorted_pairs: int32, pairs sorted by expert.
        blocks: int32 [3 * count + 1], list of blocks as ``triton_align`` makes it.
        s1: uint8 scales of w1 (or w2) of the first expert.
        s1_stride: bytes from one expert's scales to the next's.
        s3: scales of w3 (or w2), like ``s1``.
        s3_stride: bytes from one expert's scales to the next's.
        out: with UP [P, OUT] in the order of ``sorted_pairs``, else in that of pairs.
        count: number of blocks for which ``blocks`` has space.
        a_rows: rows of ``a_desc`` from one expert to the next.
        b_rows: rows of ``b_desc`` from one expert to the next.
        limit: clamp of SwiGLU.
        K: number of input channels, a multiple of 512.
        OUT: rows of the result.
        N: pairs per block, 64 or 128.
        UP: True for w1 and w3 with SwiGLU, False for w2.
        STAGES: number of stages in the ring.
        CONSUMER_REGISTERS: registers per thread of the second consumer; the first has the rest.
        PRODUCER_REGISTERS: registers per thread of the other partitions.
        PDL: True if launched by ``pdl_launch``.
    """
    TILES: gl.constexpr = OUT // (64 if UP else 128)
    KB: gl.constexpr = K // 128
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ML: gl.constexpr = mbarrier.MBarrierLayout()
    loaded = gl.allocate_shared_memory(gl.uint8, [2 * STAGES, 64, 64], a_desc.layout)
    codes = view(loaded, gl.int32, [4 * STAGES, 32, 16], gl.NVMMASharedLayout(64, 32, rank=2))
    x = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, N, 128], x_desc.layout)
    x_loaded = gl.allocate_shared_memory(gl.float32, [STAGES, 1, N], x_scale_desc.layout)
    x_scales = view(x_loaded, gl.float32, [STAGES, N], FLAT)
    shifts = gl.allocate_shared_memory(gl.int32, [2 * KB, 128], FLAT)
    shift_parts = view(shifts, gl.int32, [8 * KB, 32], FLAT)
    factors = gl.allocate_shared_memory(gl.float32, [2, 128], FLAT)
    factor_parts = view(factors, gl.float32, [8, 32], FLAT)
    windows = gl.allocate_shared_memory(gl.int32, [2, 1], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ML)
    scales_full = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    scales_empty = gl.allocate_shared_memory(gl.int64, [2, 1], ML)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(scales_full.index(i), count=1)
        mbarrier.init(scales_empty.index(i), count=2)
    ring = Ring(
        codes, loaded, x, x_scales, x_loaded, shifts, shift_parts, factors, factor_parts, windows,
        full, empty, scales_full, scales_empty,
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    work_tiles = gl.load(blocks + 3 * count) * TILES
    gl.warp_specialize(
        [
            (_consume, (
                ring, weights, sorted_pairs, blocks, out, count, limit, work_tiles,
                K, OUT, N, UP, TILES, STAGES, _FIRST,
            )),
            (_consume, (
                ring, weights, sorted_pairs, blocks, out, count, limit, work_tiles,
                K, OUT, N, UP, TILES, STAGES, _SECOND,
            )),
            (_prepare_scales, (
                s1, s1_stride, s3, s3_stride, ring, blocks, count, work_tiles, K, UP, TILES,
            )),
            (_produce, (
                x_desc, x_scale_desc, a_desc, b_desc, ring, blocks, count, a_rows, b_rows,
                work_tiles, K, N, UP, TILES, STAGES,
            )),
        ],
        [4, 2, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip

"""Products of MXFP4 weights and quantised activations on Hopper: weights in registers.

Rows of the weight are rows of the matrix instruction, tokens its columns. Eight codes are a word;
words become e4m3 operands where they are (``formats.triton_words``), activations lie in shared
memory in the order in which that leaves them. A product is over 32 channels, which have one scale
of the weight; what products of 128 channels add up to has one scale of the activations.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from anymla.formats.fp8_block import ACTIVATION_AMAX_FLOOR

_UNIT = gl.constexpr(64.0)  # decoded values are this much too small
_FLOOR = gl.constexpr(ACTIVATION_AMAX_FLOOR)


@gluon.jit
def _decoded(words):
    """Int32 [M, 4] to float8e4nv [M, 32], value * 2^-6; see ``formats.triton_words``."""
    ROWS: gl.constexpr = words.shape[0]
    lower = ((words << 4) & -0x7F7F7F80) | ((words << 2) & 0x1C1C1C1C)
    upper = (words & -0x7F7F7F80) | ((words >> 2) & 0x1C1C1C1C)
    both = gl.join(lower, upper)
    even = gl.join((both & 255).to(gl.uint8), ((both >> 16) & 255).to(gl.uint8))
    odd = gl.join(((both >> 8) & 255).to(gl.uint8), ((both >> 24) & 255).to(gl.uint8))
    codes = gl.reshape(gl.join(even, odd), [ROWS, 4, 2, 4])
    codes = gl.reshape(gl.permute(codes, (0, 2, 1, 3)), [ROWS, 32])
    return codes.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _factor(scale, BYTE: gl.constexpr):
    """2^(byte - 127) of one byte of each word; 255 is looked for by ``factors_of``."""
    bits = scale >> 1 if BYTE == 3 else scale << (23 - 8 * BYTE)
    # Byte 0 stands for 2^-127, which is subnormal.
    return gl.maximum(bits & 0x7F800000, 0x00400000).to(gl.float32, bitcast=True)


@gluon.jit
def factors_of(scale):
    """Float32 [M, 4 R] of the bytes of int32 [M, R]; NaN for one of a word's four is enough."""
    M: gl.constexpr = scale.shape[0]
    R: gl.constexpr = scale.shape[1]
    # Adding one to 255 overflows into bit 7.
    spoiled = (((scale & 0x7F7F7F7F) + 0x01010101) & scale & -0x7F7F7F80) != 0
    first = gl.where(spoiled, float("nan"), _factor(scale, 0))
    even = gl.join(first, _factor(scale, 2))
    odd = gl.join(_factor(scale, 1), _factor(scale, 3))
    return gl.reshape(gl.join(even, odd), [M, 4 * R])


@gluon.jit
def quarters(words):
    """Words [M, 4 W] as four [M, W]."""
    M: gl.constexpr = words.shape[0]
    W: gl.constexpr = words.shape[1] // 4
    halves = gl.permute(gl.reshape(words, [M, 2, 2, W]), (0, 3, 2, 1))
    lower, upper = gl.split(halves)
    first, second = gl.split(lower)
    third, fourth = gl.split(upper)
    return first, second, third, fourth


@gluon.jit
def _product(words, x, number, ACC: gl.constexpr, N: gl.constexpr):
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=4)
    zero = gl.zeros([words.shape[0], N], gl.float32, ACC)
    return warpgroup_mma(
        gl.convert_layout(_decoded(words), A), x.index(number).permute((1, 0)), zero,
        use_acc=False, is_async=True,
    )  # fmt: skip


@gluon.jit
def start(words, x, number, ACC: gl.constexpr, N: gl.constexpr):
    """Products of four times 32 channels: words [M, 16], x [., N, 32] from ``number`` on."""
    w0, w1, w2, w3 = quarters(words)
    p0 = _product(w0, x, number, ACC, N)
    p1 = _product(w1, x, number + 1, ACC, N)
    p2 = _product(w2, x, number + 2, ACC, N)
    p3 = _product(w3, x, number + 3, ACC, N)
    return p0, p1, p2, p3


@gluon.jit
def finish(parts, factor, ACC: gl.constexpr, LATER: gl.constexpr):
    """Their sum with factors [M, 4]; LATER products may still be under way."""
    p0, p1, p2, p3 = parts
    f0, f1, f2, f3 = quarters(factor)
    p0, p1, p2, p3 = warpgroup_mma_wait(LATER, deps=[p0, p1, p2, p3])
    total = p0 * _beside(f0, ACC) + p1 * _beside(f1, ACC)
    return total + p2 * _beside(f2, ACC) + p3 * _beside(f3, ACC)


@gluon.jit
def _beside(column, ACC: gl.constexpr):
    """[M, 1] beside the sums."""
    line = gl.convert_layout(gl.reshape(column, [column.shape[0]]), gl.SliceLayout(1, ACC))
    return gl.expand_dims(line, 1)


@gluon.jit
def two(words):
    """The left and the right half of a tile."""
    M: gl.constexpr = words.shape[0]
    W: gl.constexpr = words.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(words, [M, 2, W]), (0, 2, 1)))


@gluon.jit
def above(x_factor, run, RC: gl.constexpr):
    """Factors [1, N] of what a run's products add up to."""
    return gl.expand_dims(x_factor.index(run).load(RC) * _UNIT, 0)


@gluon.jit
def quantise_run(value, x_bytes, x_factor, run, N: gl.constexpr, L: gl.constexpr):
    """128 channels [N, 128] as codes in the order of decoded weights, and their scales."""
    value = value.to(gl.float32)
    ratio = gl.maximum(gl.max(gl.abs(value), 1), _FLOOR) * (1.0 / 448.0)
    bits = ratio.to(gl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(gl.int32)
    # An infinite value has exponent 128, whose inverse is no normal number.
    inverse = (gl.maximum(-exponent, -126) + 127) << 23
    value = value * gl.expand_dims(inverse.to(gl.float32, bitcast=True), 1)
    codes = value.to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    codes = gl.permute(gl.reshape(codes, [N, 4, 4, 4, 2]), (1, 0, 4, 2, 3))
    x_bytes.index(run).store(gl.reshape(codes, [4 * N, 32]))
    x_factor.index(run).store(((exponent + 127) << 23).to(gl.float32, bitcast=True))


@gluon.jit
def quantise(
    x, order, blocks, block, count, x_bytes, x_factor,
    K: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    """The rows of a block's pairs, BATCH runs at once."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    column = gl.arange(0, N, layout=gl.SliceLayout(1, L))
    begin = gl.load(blocks + count + block)
    inside = begin + column < gl.load(blocks + 2 * count + block)
    pair = gl.load(order + begin + column, mask=inside, other=0)
    channel = gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    at = x + gl.expand_dims(pair.to(gl.int64) * K, 1) + gl.expand_dims(channel, 0)
    inside = gl.expand_dims(inside, 1)
    for run in range(0, K // 128, BATCH):
        values = ()
        for i in gl.static_range(BATCH):
            values += (gl.load(at + i * 128, mask=inside, other=0.0),)
        for i in gl.static_range(BATCH):
            quantise_run(values[i], x_bytes, x_factor, run + i, N, L)
        at += BATCH * 128

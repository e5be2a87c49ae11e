"""GEMMs ``x @ weight^T`` of few tokens on a CPU that decode the weight in registers.

The weight is read once: a row's codes are decoded 32 channels at a time and multiplied by every
token of a tile at once, so that few tokens take no longer than reading the weight. numba compiles
the loops; the innermost one is written in LLVM's vector instructions, because no compiler turns
array accesses into table look-ups in registers.

Each result is one chain of additions over the channels in a fixed order, which depends neither on
the tile that a token falls into nor on threads.
"""

from __future__ import annotations

import functools
import struct

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from torch import Tensor

from anymla.ops._gemm import EXACT_BYTES
from anymla.ops._numba_cache import CACHE

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32, _POINTER = ir.FloatType(), ir.PointerType()

# Channels that are decoded at a time, and such groups in an iteration of the innermost loop.
GROUP, _UNROLLED = 32, 4
_LANES = 16
# Rows of a tile by its tokens: all sums stay in registers, and there are enough of them to hide the
# latency of additions. The remaining rows are multiplied one by one.
_TILES = {1: 4, 2: 4, 4: 4, 8: 2}
# How many tiles ahead codes are prefetched, and bytes of a cache line. The hardware prefetcher
# stops at page boundaries, and the rows of a tile cross several.
_AHEAD, _CACHE_LINE = 2, 64

# Kinds of kernels: the weight's format and the operands' dtype.
FP8_BF16, FP8_FLOAT32, MXFP4_BF16, MXFP4_FLOAT32 = range(4)

# The largest ue8m0 byte that ``exact_in_bf16`` allows, which tables of values are scaled to.
_LARGEST_BYTE = EXACT_BYTES[1]
_LARGEST_EXPONENT = (_LARGEST_BYTE - 127) << 7


class _BFloat(ir.Type):
    """LLVM's bfloat type, which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _vector(scalar, lanes, values=None):
    """Return a vector type, or with ``values`` a constant: one value for all lanes, or a cycle."""
    made = ir.VectorType(scalar, lanes)
    if values is None:
        return made
    listed = values if isinstance(values, list) else [values]
    return ir.Constant(made, listed * (lanes // len(listed)))


_BF16_GROUP = _vector(_I16, GROUP)
_FLOATS = _vector(_F32, _LANES)


def _call(builder, name, returns, *args):
    kind = ir.FunctionType(returns, [each.type for each in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _at(builder, pointer, offset):
    return builder.gep(pointer, [offset], source_etype=_I8)


def _load(builder, kind, pointer, offset):
    return builder.load(_at(builder, pointer, offset), typ=kind, align=1)


def _splat(builder, value, lanes):
    undefined = ir.Constant(_vector(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(first, undefined, _vector(_I32, lanes, 0))


def _half(builder, vector, start):
    """Extract half of a vector's lanes, beginning at lane ``start``."""
    lanes = ir.Constant(
        _vector(_I32, vector.type.count // 2), list(range(start, start + vector.type.count // 2))
    )
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), lanes)


def _sum_of_lanes(builder, vector):
    while vector.type.count > 1:
        half = vector.type.count // 2
        vector = builder.fadd(_half(builder, vector, 0), _half(builder, vector, half))
    return builder.extract_element(vector, _I32(0))


def _bf16_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


class _Bf16:
    """bfloat16 operands, multiplied in pairs into float32 sums (AVX512-BF16).

    A weight times its power-of-two scale is a bfloat16 number, so the scale is applied to
    exponents. Codes index tables of 32 values within a register. A scale is passed as the word to
    subtract from the bits of values with the largest scale: the subtraction saturates, so zeros
    stay zero. The word holds the number twice, so that a load broadcasts it to both halves.
    """

    nbytes = 2
    e2m1_values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    @classmethod
    def load(cls, builder, x, channel):
        """Load a group's activations."""
        return [_load(builder, _BF16_GROUP, x, builder.mul(channel, _I64(cls.nbytes)))]

    @staticmethod
    def dot(builder, total, weights, x):
        pairs = _vector(_BFloat(), GROUP)
        (w,), (v,) = weights, x
        return _call(
            builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS,
            total, builder.bitcast(w, pairs), builder.bitcast(v, pairs),
        )  # fmt: skip

    @staticmethod
    def _scaled(builder, values, word):
        """Multiply a table of bfloat16 values by a power of two; zeros lose their sign."""
        bits = [_bf16_bits(value) for value in values]
        largest = [each + _LARGEST_EXPONENT if each & 0x7FFF else 0 for each in bits]
        table = _vector(_I16, GROUP, largest)
        return _call(builder, "llvm.usub.sat.v32i16", _BF16_GROUP, table, word)

    @staticmethod
    def _look_up(builder, table, indices):
        return _call(
            builder, "llvm.x86.avx512.permvar.hi.512", _BF16_GROUP, table, indices
        )  # a table index is the lowest five bits of a lane

    @classmethod
    def fp8_scale(cls, builder, scale):
        word = builder.bitcast(_splat(builder, scale, _LANES), _BF16_GROUP)
        subnormal = cls._scaled(builder, [m * 2.0**-9 for m in range(8)], word)
        bias = (120 << 7) + _LARGEST_EXPONENT
        return subnormal, builder.sub(_vector(_I16, GROUP, bias), word)

    @classmethod
    def fp8(cls, builder, scale, codes, channel):
        """Decode e4m3 codes (s eeee mmm); also return the codes without their signs."""
        subnormal, bias = scale
        signed = builder.sext(_load(builder, _vector(_I8, GROUP), codes, channel), _BF16_GROUP)
        magnitude = builder.and_(signed, _vector(_I16, GROUP, 0x7F))
        normal = builder.add(builder.shl(magnitude, _vector(_I16, GROUP, 4)), bias)
        small = builder.icmp_unsigned("<", magnitude, _vector(_I16, GROUP, 8))
        value = builder.select(small, cls._look_up(builder, subnormal, magnitude), normal)
        sign = builder.and_(signed, _vector(_I16, GROUP, 0x8000))
        return [builder.or_(value, sign)], magnitude

    @classmethod
    def mxfp4_block(cls, builder, scales, codes, group):
        """Load the codes of four groups, and a table of magnitudes for each group's scale.

        A 16-bit word holds four codes, and channel j of every word forms operand j: eight words
        share a scale. Activations are in the same order (``in_words``).
        """
        first = _load(builder, _vector(_I32, 4), scales, builder.mul(group, _I64(4)))
        lanes = _vector(_I32, _LANES, None)
        each = ir.Constant(lanes, [lane // 4 for lane in range(_LANES)])
        words = builder.shuffle_vector(first, ir.Constant(first.type, ir.Undefined), each)
        table = cls._scaled(builder, list(cls.e2m1_values), builder.bitcast(words, _BF16_GROUP))
        offset = builder.mul(group, _I64(GROUP // 2))
        return table, _load(builder, _BF16_GROUP, codes, offset)

    @classmethod
    def mxfp4_of_block(cls, builder, block, step):
        """Decode channel ``step`` of every word."""
        table, words = block
        code = builder.lshr(words, _vector(_I16, GROUP, 4 * step)) if step else words
        scale = ir.Constant(_BF16_GROUP, [lane // 8 << 3 for lane in range(GROUP)])
        index = builder.or_(builder.and_(code, _vector(_I16, GROUP, 7)), scale)
        high = builder.shl(words, _vector(_I16, GROUP, 12 - 4 * step)) if step < 3 else words
        sign = builder.and_(high, _vector(_I16, GROUP, 0x8000))
        return [builder.or_(cls._look_up(builder, table, index), sign)]

    @classmethod
    def mxfp4_scale(cls, builder, scale):
        word = builder.bitcast(_splat(builder, scale, _LANES), _BF16_GROUP)
        return cls._scaled(builder, [s * v for s in (1.0, -1.0) for v in cls.e2m1_values], word)

    @classmethod
    def mxfp4(cls, builder, scale, codes, channel):
        # Spread four codes over 64 bits, each into the low byte of a 16-bit word. One bit above it
        # also reaches the index; the table has equal entries for both values of that bit.
        offset = builder.lshr(channel, _I64(1))
        fours = _load(builder, _vector(_I16, GROUP // 4), codes, offset)
        fours = builder.zext(fours, _vector(_I64, GROUP // 4))
        every = _vector(_I8, 2 * GROUP)
        places = _vector(_I8, 2 * GROUP, [0, 0, 4, 0, 8, 0, 12, 0])
        spread = _call(
            builder, "llvm.x86.avx512.pmultishift.qb.512", every,
            places, builder.bitcast(fours, every),
        )  # fmt: skip
        return [cls._look_up(builder, scale, builder.bitcast(spread, _BF16_GROUP))], None


class _Float32:
    """float32 operands, for float32 activations and for processors without AVX512-BF16.

    Codes are shifted to float32's exponent and mantissa. Subnormal codes get the exponent of the
    smallest normal number, which is then subtracted, so that no float32 operand is subnormal.
    """

    nbytes = 4

    @classmethod
    def load(cls, builder, x, channel):
        """Load a group's activations."""
        first = builder.mul(channel, _I64(cls.nbytes))
        second = builder.add(first, _I64(cls.nbytes * _LANES))
        return [_load(builder, _FLOATS, x, offset) for offset in (first, second)]

    @staticmethod
    def dot(builder, total, weights, x):
        for w, v in zip(weights, x, strict=True):
            total = _call(builder, "llvm.fma.v16f32", _FLOATS, w, v, total)
        return total

    @staticmethod
    def fp8_scale(builder, scale):
        return builder.bitcast(_splat(builder, scale, _LANES), _FLOATS)

    mxfp4_scale = fp8_scale

    @staticmethod
    def _values(builder, magnitude, sign, scale, mantissa_bits, bias):
        """Decode integers to float32 (exponent and mantissa, the sign in bit 31) and scale them."""
        one = 1 << mantissa_bits
        small = builder.icmp_unsigned("<", magnitude, _vector(_I32, _LANES, one))
        exponents = builder.select(
            small,
            _vector(_I32, _LANES, (128 - bias) << 23),
            _vector(_I32, _LANES, (127 - bias) << 23),
        )
        shifted = builder.shl(magnitude, _vector(_I32, _LANES, 23 - mantissa_bits))
        value = builder.bitcast(builder.add(shifted, exponents), _FLOATS)
        taken = builder.select(
            small, _vector(_F32, _LANES, 2.0 ** (1 - bias)), _vector(_F32, _LANES, 0.0)
        )
        value = builder.bitcast(builder.fsub(value, taken), _vector(_I32, _LANES))
        signed = builder.bitcast(builder.or_(value, sign), _FLOATS)
        return builder.fmul(signed, scale)

    @classmethod
    def fp8(cls, builder, scale, codes, channel):
        """Decode e4m3 codes (s eeee mmm); also return the codes without their signs."""
        loaded = _load(builder, _vector(_I8, GROUP), codes, channel)
        weights = []
        for start in (0, _LANES):
            wide = builder.zext(_half(builder, loaded, start), _vector(_I32, _LANES))
            magnitude = builder.and_(wide, _vector(_I32, _LANES, 0x7F))
            sign = builder.shl(
                builder.and_(wide, _vector(_I32, _LANES, 0x80)), _vector(_I32, _LANES, 24)
            )
            weights.append(cls._values(builder, magnitude, sign, scale, 3, 7))
        plain = builder.and_(loaded, _vector(_I8, GROUP, 0x7F))
        return weights, builder.zext(plain, _BF16_GROUP)

    @classmethod
    def mxfp4(cls, builder, scale, codes, channel):
        packed = _load(builder, _vector(_I8, _LANES), codes, builder.lshr(channel, _I64(1)))
        empty = ir.Constant(packed.type, ir.Undefined)
        weights = []
        for start in (0, _LANES // 2):
            # Duplicate every byte: its low nibble is the even channel, its high nibble the odd one.
            twice = [start + lane // 2 for lane in range(_LANES)]
            bytes_ = builder.shuffle_vector(packed, empty, _vector(_I32, _LANES, twice))
            wide = builder.zext(bytes_, _vector(_I32, _LANES))
            code = builder.lshr(wide, _vector(_I32, _LANES, [0, 4]))
            magnitude = builder.and_(code, _vector(_I32, _LANES, 7))
            sign = builder.shl(
                builder.and_(code, _vector(_I32, _LANES, 8)), _vector(_I32, _LANES, 28)
            )
            weights.append(cls._values(builder, magnitude, sign, scale, 1, 1))
        return weights, None


# Class of the operands and True for an FP8 weight, by the kind of kernel.
_KINDS = {
    FP8_BF16: (_Bf16, True),
    FP8_FLOAT32: (_Float32, True),
    MXFP4_BF16: (_Bf16, False),
    MXFP4_FLOAT32: (_Float32, False),
}


@intrinsic(prefer_literal=True)
def _tile(context, kind, rows, tokens, place):
    """Compute and store ``sum over channels of weight[r] * x[t]`` for a tile of rows and tokens.

    Args:
        context: typing context that numba passes to intrinsics.
        kind: kind of kernel, FP8_BF16 and so on, as a literal.
        rows: number of weight rows in the tile, as a literal.
        tokens: number of tokens in the tile, as a literal.
        place: nine integers that locate the operands and the result:

    - codes, codes_stride: address of the first row's codes, and bytes between rows;
    - scales, scales_stride: address of the first row's scales, 32 bits each in the form that the
      operands take, and bytes between rows, 0 if the rows share their scales;
    - x, x_stride: address of the first token's activations, and bytes between tokens;
    - channels: number of channels, a multiple of 32;
    - out, out_stride: address of the first row's float32 result for the first token, and bytes
      between tokens.
    """
    literals = (kind, rows, tokens)
    if not all(isinstance(each, types.IntegerLiteral) for each in literals):
        return None
    operands, fp8 = _KINDS[kind.literal_value]
    shape = range(rows.literal_value), range(tokens.literal_value)
    integers = types.UniTuple(types.intp, 9)
    return types.void(*literals, integers), functools.partial(_emit_tile, operands, fp8, *shape)


def _emit_tile(operands, fp8, rows, tokens, context, builder, signature, args):
    """Emit LLVM instructions for ``_tile``."""
    integers = cgutils.unpack_tuple(builder, args[3])
    codes, codes_stride, scales, scales_stride, x, x_stride, channels, out, out_stride = integers
    decode = operands.fp8 if fp8 else operands.mxfp4
    prepare = operands.fp8_scale if fp8 else operands.mxfp4_scale
    in_words = operands is _Bf16 and not fp8
    group_bytes = GROUP if fp8 else GROUP // 2
    groups_a_scale = 4 if fp8 else 1

    def addresses(first, stride, count):
        pointer = builder.inttoptr(first, _POINTER)
        return [_at(builder, pointer, builder.mul(stride, _I64(each))) for each in count]

    code_rows = addresses(codes, codes_stride, rows)
    scale_rows = addresses(scales, scales_stride, rows[:1] if fp8 else rows)
    x_rows = addresses(x, x_stride, tokens)
    sums = [
        [cgutils.alloca_once_value(builder, _vector(_F32, _LANES, 0.0)) for _ in tokens]
        for _ in rows
    ]
    none = _vector(_I16, GROUP, 0)
    largest = [cgutils.alloca_once_value(builder, none) for _ in rows] if fp8 else []

    def multiply(first, count, prefetch):
        """Add the products of ``count`` groups from group ``first`` on."""
        totals = [[builder.load(each) for each in row] for row in sums]
        largest_codes = [builder.load(each) for each in largest]
        blocks = []
        if in_words and count == _UNROLLED:
            blocks = [
                operands.mxfp4_block(builder, *each, first)
                for each in zip(scale_rows, code_rows, strict=True)
            ]
        scale = []
        for step in range(count):
            group = builder.add(first, _I64(step))
            channel = builder.mul(group, _I64(GROUP))
            if not blocks and step % groups_a_scale == 0:
                place = builder.mul(builder.udiv(group, _I64(groups_a_scale)), _I64(4))
                scale = [prepare(builder, _load(builder, _I32, each, place)) for each in scale_rows]
            xs = [operands.load(builder, each, channel) for each in x_rows]
            for row in rows:
                if prefetch and step * group_bytes % _CACHE_LINE == 0:
                    ahead = builder.mul(codes_stride, _I64(_AHEAD * len(rows)))
                    offset = builder.mul(group, _I64(group_bytes))
                    place = _at(builder, code_rows[row], builder.add(ahead, offset))
                    hints = _I32(0), _I32(3), _I32(1)  # a read, kept in all caches, of data
                    _call(builder, "llvm.prefetch.p0", ir.VoidType(), place, *hints)
                if blocks:
                    weights = operands.mxfp4_of_block(builder, blocks[row], step)
                else:
                    row_scale = scale[0 if fp8 else row]
                    weights, magnitude = decode(builder, row_scale, code_rows[row], channel)
                if fp8:
                    largest_codes[row] = _call(
                        builder, "llvm.umax.v32i16", _BF16_GROUP, largest_codes[row], magnitude
                    )
                for token in tokens:
                    totals[row][token] = operands.dot(
                        builder, totals[row][token], weights, xs[token]
                    )
        for row in rows:
            for token in tokens:
                builder.store(totals[row][token], sums[row][token])
            if fp8:
                builder.store(largest_codes[row], largest[row])

    groups = builder.udiv(channels, _I64(GROUP))
    turns = builder.udiv(groups, _I64(_UNROLLED))
    with cgutils.for_range(builder, turns) as loop:
        multiply(builder.mul(loop.index, _I64(_UNROLLED)), _UNROLLED, True)
    done = builder.mul(turns, _I64(_UNROLLED))
    with cgutils.for_range(builder, builder.sub(groups, done)) as loop:
        multiply(builder.add(done, loop.index), 1, False)

    out_rows = addresses(out, out_stride, tokens)
    for row in rows:
        is_nan = None
        if fp8:  # a NaN code, which the decoders ignore
            most = _call(
                builder, "llvm.vector.reduce.umax.v32i16", _I16, builder.load(largest[row])
            )
            is_nan = builder.icmp_unsigned("==", most, _I16(0x7F))
        for token in tokens:
            value = _sum_of_lanes(builder, builder.load(sums[row][token]))
            if is_nan is not None:
                value = builder.select(is_nan, _F32(float("nan")), value)
            builder.store(value, _at(builder, out_rows[token], _I64(4 * row)), align=4)
    return context.get_dummy_value()


def _scale_words(kind, scales, words):
    """Convert stored scales to the 32-bit words that ``_tile`` takes."""


@overload(_scale_words, prefer_literal=True)
def _scale_words_of(kind, scales, words):
    if not isinstance(kind, types.IntegerLiteral):
        return None
    if kind.literal_value in (FP8_BF16, MXFP4_BF16):

        def exponents(kind, scales, words):
            for place in range(scales.shape[0]):
                less = np.uint32(_LARGEST_BYTE) - np.uint32(scales[place])
                words[place] = np.uint32(less * np.uint32((1 << 7) + (1 << 23)))

        return exponents
    if scales.dtype == types.float32:

        def floats(kind, scales, words):
            words[:] = scales.view(np.uint32)

        return floats

    def powers(kind, scales, words):
        for place in range(scales.size):
            byte = np.uint32(scales[place])
            word = byte << np.uint32(23)
            if byte == 0:
                word = np.uint32(0x00400000)
            if byte == 255:
                word = np.uint32(0x7FC00000)
            words[place] = word

    return powers


def _rows(kind, codes, scales, x, out, first, last):
    """Compute rows ``first`` to ``last`` of the product; see ``fp8_bf16``."""


@overload(_rows, prefer_literal=True)
def _rows_of(kind, codes, scales, x, out, first, last):
    if not isinstance(kind, types.IntegerLiteral):
        return None
    fp8 = kind.literal_value in (FP8_BF16, FP8_FLOAT32)
    shared = 128 if fp8 else 1
    rows_1, rows_2, rows_4, rows_8 = (_TILES[tokens] for tokens in (1, 2, 4, 8))

    def tiles(kind, codes, scales, x, out, first, last):
        tokens, channels = x.shape
        size = 1 if tokens == 1 else 2 if tokens < 4 else 4 if tokens < 8 else 8
        step = rows_1 if size == 1 else rows_2 if size == 2 else rows_4 if size == 4 else rows_8
        words = np.empty((1 if fp8 else step, scales.shape[1]), np.uint32)
        words_at, words_stride = np.intp(words.ctypes.data), words.strides[0]
        codes_stride, x_stride, out_stride = codes.strides[0], x.strides[0], out.strides[0]
        held, row = -1, first
        while row < last:
            if row + step > last:
                size = step = 1  # remaining rows, one by one
            for each in range(step):
                if not fp8 or (each == 0 and held != row // shared):
                    _scale_words(kind, scales[row // shared + each], words[each])
            held = row // shared
            codes_at = np.intp(codes.ctypes.data) + row * codes_stride
            token = 0
            while token < tokens:
                # The last tile overlaps the one before; what both compute is the same to the bit.
                token = min(token, tokens - size)
                x_at = np.intp(x.ctypes.data) + token * x_stride
                out_at = np.intp(out.ctypes.data) + token * out_stride + 4 * row
                place = (
                    codes_at, codes_stride, words_at, words_stride,
                    x_at, x_stride, channels, out_at, out_stride,
                )  # fmt: skip
                if step == 1 and size == 1:
                    _tile(kind, 1, 1, place)
                elif size == 1:
                    _tile(kind, rows_1, 1, place)
                elif size == 2:
                    _tile(kind, rows_2, 2, place)
                elif size == 4:
                    _tile(kind, rows_4, 4, place)
                else:
                    _tile(kind, rows_8, 8, place)
                token += size
            row += step

    return tiles


@njit(nogil=True, cache=CACHE)
def fp8_bf16(codes, scales, x, out, first, last):
    """Compute rows of ``x @ weight^T`` with an e4m3 weight and a scale for 128 x 128 values.

    Args:
        codes: e4m3 codes of the weight, uint8 [N, K], K a multiple of 32.
        scales: ue8m0 scales of the weight's blocks, uint8 [ceil(N/128), ceil(K/128)], with which
            every decoded value is a normal bfloat16 number or zero.
        x: activations as the bits of bfloat16, uint16 [T, K].
        out: products, float32 [T, N]; rows ``first`` to ``last`` of the weight are written.
        first: first row of the weight to multiply, a multiple of 128.
        last: row of the weight to stop before.
    """
    _rows(0, codes, scales, x, out, first, last)


@njit(nogil=True, cache=CACHE)
def fp8_float32(codes, scales, x, out, first, last):
    """Compute ``fp8_bf16`` with float32 x and any scales, uint8 (ue8m0) or float32."""
    _rows(1, codes, scales, x, out, first, last)


@njit(nogil=True, cache=CACHE)
def mxfp4_bf16(codes, scales, x, out, first, last):
    """Compute ``fp8_bf16`` for packed e2m1 [N, K/2] with scales [N, K/32], and x ``in_words``."""
    _rows(2, codes, scales, x, out, first, last)


@njit(nogil=True, cache=CACHE)
def mxfp4_float32(codes, scales, x, out, first, last):
    """Compute ``mxfp4_bf16`` with float32 x, in its own order, and any scales."""
    _rows(3, codes, scales, x, out, first, last)


def in_words(x: Tensor) -> Tensor:
    """Reorder activations [T, K] for ``mxfp4_bf16``: 128 channels as 4 x 32 instead of 32 x 4."""
    whole = x.shape[1] // 128 * 128
    blocks = x[:, :whole].unflatten(1, (-1, 32, 4)).transpose(2, 3).flatten(1)
    return torch.cat((blocks, x[:, whole:]), 1) if whole < x.shape[1] else blocks


@functools.cache
def has_bf16_dot() -> bool:
    """Return True if this processor has AVX512-BF16 and the byte permutes that decoding needs."""
    features = binding.get_host_cpu_features()
    return all(features.get(each) for each in ("avx512bf16", "avx512bw", "avx512vbmi"))

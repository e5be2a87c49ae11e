"""GEMMs ``x @ weight^T`` of few tokens on a CPU, the weight decoded in registers as it is read.

One pass over the weight: a row's codes are decoded 32 channels at a time and multiplied at once by
every token of a tile, so that few tokens take as long as reading. numba runs the loops; the
innermost one is written in LLVM's vectors, because compilers make no table look-up in registers of
an array access.

A result is one chain of sums over the channels, in an order that depends on nothing: neither on
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
from anymla.ops._numba_rows import CACHE

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32, _POINTER = ir.FloatType(), ir.PointerType()

# Channels that are decoded at a time, and that a turn of the innermost loop takes.
GROUP, _UNROLLED = 32, 4
_LANES = 16
# Rows that a tile of so many tokens takes: sums stay in registers, and there are enough of them for
# one not to wait for the other. Rows that are left over are multiplied one by one.
_TILES = {1: 4, 2: 4, 4: 4, 8: 2}
# Rows ahead of those that are multiplied, in tiles, whose codes are fetched: the processor's own
# prefetch ends with a page, which is soon, and with several rows a tile begins several.
_AHEAD, _CACHE_LINE = 2, 64

# What a kernel is compiled for: the weight's format, and the operands.
FP8_BF16, FP8_FLOAT32, MXFP4_BF16, MXFP4_FLOAT32 = range(4)

# The largest ue8m0 byte that ``exact_in_bf16`` allows, and what it adds to bfloat16's bits.
_LARGEST_BYTE = EXACT_BYTES[1]
_LARGEST_EXPONENT = (_LARGEST_BYTE - 127) << 7


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _vector(scalar, lanes, values=None):
    """The type, or a constant of it: one value for all lanes, or a list that is repeated."""
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
    """Half of a vector's lanes, from ``start``."""
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
    """Operands in bfloat16, multiplied two at a time into float32 sums (AVX512-BF16).

    A weight times its power-of-two scale is a bfloat16 number: the scale goes into the exponents.
    Tables of 32 values are looked up within a register. A scale is given as the word by which
    exponents are less than with the largest one, so that a subtraction that saturates leaves zeros
    as they are; twice, so that it is broadcast while it is loaded.
    """

    nbytes = 2
    e2m1_values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    @classmethod
    def load(cls, builder, x, channel):
        """Activations of a group."""
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
        """A table of bfloat16 values times a power of two; zeros stay zero, without a sign."""
        bits = [_bf16_bits(value) for value in values]
        largest = [each + _LARGEST_EXPONENT if each & 0x7FFF else 0 for each in bits]
        table = _vector(_I16, GROUP, largest)
        return _call(builder, "llvm.usub.sat.v32i16", _BF16_GROUP, table, word)

    @staticmethod
    def _look_up(builder, table, indices):
        return _call(
            builder, "llvm.x86.avx512.permvar.hi.512", _BF16_GROUP, table, indices
        )  # the lowest five bits of an index count

    @classmethod
    def fp8_scale(cls, builder, scale):
        word = builder.bitcast(_splat(builder, scale, _LANES), _BF16_GROUP)
        subnormal = cls._scaled(builder, [m * 2.0**-9 for m in range(8)], word)
        bias = (120 << 7) + _LARGEST_EXPONENT
        return subnormal, builder.sub(_vector(_I16, GROUP, bias), word)

    @classmethod
    def fp8(cls, builder, scale, codes, channel):
        """Decode s eeee mmm; also the codes without their signs."""
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
        """Codes of four groups, and a table of the magnitudes for each of their scales.

        A word of the codes holds four channels, and channel j of every word is one operand: eight
        words have a scale. Activations are in that order as well (``in_words``).
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
        """Channel ``step`` of every word."""
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
        # Four codes to 64 bits, of which each goes to the low byte of a word. What stands above it
        # there is one bit of the index, by which the table does not differ.
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
    """Operands in float32, for activations of that dtype and for every other processor.

    Codes are shifted to where float32 has exponent and mantissa. Subnormal ones get the exponent
    of the smallest normal, which is taken off again, so that no operand is subnormal.
    """

    nbytes = 4

    @classmethod
    def load(cls, builder, x, channel):
        """Activations of a group."""
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
        """Decode integers: exponent and mantissa, the sign in the highest bit; times the scale."""
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
        """Decode s eeee mmm; also the codes without their signs."""
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
            # Every byte twice: its low nibble is the even channel, its high one the odd.
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


# By kind: the operands' class, whether the weight is FP8.
_KINDS = {
    FP8_BF16: (_Bf16, True),
    FP8_FLOAT32: (_Float32, True),
    MXFP4_BF16: (_Bf16, False),
    MXFP4_FLOAT32: (_Float32, False),
}


@intrinsic(prefer_literal=True)
def _tile(context, kind, rows, tokens, place):
    """Store ``sum over channels of weight[r] * x[t]`` of a tile of rows and tokens.

    Args:
        context: numba's.
        kind: what the kernel is compiled for, a literal.
        rows: of the tile, a literal.
        tokens: of the tile, a literal.
        place: nine integers: where the operands and the result are, as follows.

    - codes, codes_stride: address of the first row's codes, and bytes between rows;
    - scales, scales_stride: of the first row's scales, 32 bits each as the operands take them;
      0 bytes between rows that share them;
    - x, x_stride: of the first token's activations, and bytes between tokens;
    - channels: a multiple of 32;
    - out, out_stride: of the first row's float32 result of the first token, and bytes between
      tokens.
    """
    literals = (kind, rows, tokens)
    if not all(isinstance(each, types.IntegerLiteral) for each in literals):
        return None
    operands, fp8 = _KINDS[kind.literal_value]
    shape = range(rows.literal_value), range(tokens.literal_value)
    integers = types.UniTuple(types.intp, 9)
    return types.void(*literals, integers), functools.partial(_emit_tile, operands, fp8, *shape)


def _emit_tile(operands, fp8, rows, tokens, context, builder, signature, args):
    """LLVM's instructions of ``_tile``."""
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
                    hints = _I32(0), _I32(3), _I32(1)  # of data that is read, into every cache
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
        if fp8:  # a code that is no number, which no decoder looks for
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
    """Scales as ``_tile`` takes them, 32 bits each, from what is stored."""


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
    """Some rows of the product; see ``fp8_bf16``."""


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
                size = step = 1  # rows that are left over, one by one
            for each in range(step):
                if not fp8 or (each == 0 and held != row // shared):
                    _scale_words(kind, scales[row // shared + each], words[each])
            held = row // shared
            codes_at = np.intp(codes.ctypes.data) + row * codes_stride
            token = 0
            while token < tokens:
                # The last tile begins earlier than where the one before ends: what they share
                # comes out as it was.
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
    """Store rows of ``x @ weight^T``, an e4m3 weight with a scale for 128 x 128 values.

    Args:
        codes: uint8 [N, K], K a multiple of 32.
        scales: uint8 [ceil(N/128), ceil(K/128)], ue8m0 bytes for which every value is a normal
            bfloat16 number.
        x: [T, K] bits of bfloat16, uint16.
        out: float32 [T, N].
        first: row of the weight to begin with, a multiple of 128.
        last: row to end before.
    """
    _rows(0, codes, scales, x, out, first, last)


@njit(nogil=True, cache=CACHE)
def fp8_float32(codes, scales, x, out, first, last):
    """Like ``fp8_bf16`` with float32 x and any scales, uint8 or float32."""
    _rows(1, codes, scales, x, out, first, last)


@njit(nogil=True, cache=CACHE)
def mxfp4_bf16(codes, scales, x, out, first, last):
    """Like ``fp8_bf16`` of packed e2m1 [N, K/2] with scales [N, K/32], and x ``in_words``."""
    _rows(2, codes, scales, x, out, first, last)


@njit(nogil=True, cache=CACHE)
def mxfp4_float32(codes, scales, x, out, first, last):
    """Like ``mxfp4_bf16`` with float32 x and any scales."""
    _rows(3, codes, scales, x, out, first, last)


def in_words(x: Tensor) -> Tensor:
    """Activations [T, K] in the order of ``mxfp4_bf16``: 128 channels as 4 x 32, not 32 x 4."""
    whole = x.shape[1] // 128 * 128
    blocks = x[:, :whole].unflatten(1, (-1, 32, 4)).transpose(2, 3).flatten(1)
    return torch.cat((blocks, x[:, whole:]), 1) if whole < x.shape[1] else blocks


@functools.cache
def has_bf16_dot() -> bool:
    """Whether this processor multiplies bfloat16, and looks up in registers what it multiplies."""
    features = binding.get_host_cpu_features()
    return all(features.get(each) for each in ("avx512bf16", "avx512bw", "avx512vbmi"))

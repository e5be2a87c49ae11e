"""Access to tensors' rows by address inside numba's few-token kernels, and bfloat16 conversion.

Kernels take addresses, because a tensor's address costs a tenth of what NumPy's view of it costs,
and a decode step's kernel may take as little as two microseconds in all. Launchers ensure what lies
at an address: a backend's ``supports`` checks dtypes, ``contiguous`` the strides.
"""

from __future__ import annotations

import time

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import event
from numba.extending import intrinsic

from anymla.ops.compile_notice import NOTICE


class _Compilations(event.Listener):
    """Listener that reports compilations to the user; nested ones count as their caller's."""

    def __init__(self):
        self.depth, self.begin = 0, 0.0

    def on_start(self, what):
        """Report that a kernel which is not in the cache is being compiled."""
        self.depth += 1
        if self.depth == 1:
            self.begin = time.perf_counter()
            NOTICE.begin(what.data["dispatcher"].stats.cache_path if CACHE else "")

    def on_end(self, what):
        """Record that a compilation has ended, with or without success."""
        self.depth -= 1
        if not self.depth:
            NOTICE.add(time.perf_counter() - self.begin)


def _nothing():
    """Do nothing; this function is never compiled, only asked for its cache folder."""


def _keeps():
    """Return True if numba finds a folder for its cache: beside the package or in the home."""
    try:
        njit(cache=True)(_nothing)
    except RuntimeError:
        return False
    return True


# True if numba can keep compiled code for the next process.
CACHE = _keeps()
event.register("numba:compile", _Compilations())
# Sums may be reordered, always in the same order for a length, so that they use vectors.
SUMS = {"reassoc", "nsz", "contract"}
# Options of every kernel: division by zero gives inf or NaN as in torch; the GIL is released.
KERNEL = {"cache": CACHE, "nogil": True, "error_model": "numpy"}


def _pointer_to(kind):
    @intrinsic
    def pointer(context, place):
        def emit(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.intp), emit

    return pointer


_to_u8, _to_u16 = _pointer_to(types.uint8), _pointer_to(types.uint16)
_to_i32, _to_i64 = _pointer_to(types.int32), _pointer_to(types.int64)
_to_f32 = _pointer_to(types.float32)


@njit(inline="always")
def u8_at(place, count):
    """View ``count`` bytes at an address."""
    return carray(_to_u8(place), (count,))


@njit(inline="always")
def u16_at(place, count):
    """View ``count`` bfloat16 numbers at an address as their bits, uint16."""
    return carray(_to_u16(place), (count,))


@njit(inline="always")
def i32_at(place, count):
    """View ``count`` 32-bit integers at an address."""
    return carray(_to_i32(place), (count,))


@njit(inline="always")
def i64_at(place, count):
    """View ``count`` 64-bit integers at an address."""
    return carray(_to_i64(place), (count,))


@njit(inline="always")
def f32_at(place, count):
    """View ``count`` float32 numbers at an address."""
    return carray(_to_f32(place), (count,))


@intrinsic
def float_of(context, bits):
    """Reinterpret 32 bits as a float32."""

    def emit(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), emit


@intrinsic
def bits_of(context, value):
    """Reinterpret a float32 as its 32 bits."""

    def emit(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), emit


@njit(inline="always")
def from_bf16(bits):
    """Convert bfloat16 bits to float32."""
    return float_of(np.uint32(bits) << np.uint32(16))


@njit(inline="always")
def to_bf16(value):
    """Round a float32 to bfloat16 bits, to nearest, ties to even."""
    bits = bits_of(np.float32(value))
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(np.uint32(0x7FC0) if is_nan else rounded)


@njit(cache=CACHE)
def widen(bits, out):
    """Convert bfloat16 bits to float32, element by element."""
    for i in range(len(out)):
        out[i] = from_bf16(bits[i])


@njit(cache=CACHE)
def narrow(values, bits):
    """Round float32 numbers to bfloat16 bits, element by element."""
    for i in range(len(bits)):
        bits[i] = to_bf16(values[i])


@njit(cache=CACHE, fastmath=SUMS)
def dot_bf16(bits, x):
    """Sum the products of bfloat16 bits and float32 numbers."""
    total = np.float32(0)
    for i in range(len(x)):
        total += from_bf16(bits[i]) * x[i]
    return total


@njit(cache=CACHE, fastmath=SUMS)
def dot(row, x):
    """Sum the products of two vectors of float32 numbers."""
    total = np.float32(0)
    for i in range(len(x)):
        total += row[i] * x[i]
    return total


@njit(cache=CACHE)
def gemv_bf16(weight, rows, x, out):
    """Compute ``out[r] = weight[r] . x`` with a bfloat16 weight [rows, K] at an address."""
    width = len(x)
    for row in range(rows):
        out[row] = dot_bf16(u16_at(weight + 2 * row * width, width), x)


@njit(cache=CACHE)
def gemv_f32(weight, rows, x, out):
    """Compute ``out[r] = weight[r] . x`` with a float32 weight [rows, K] at an address."""
    width = len(x)
    for row in range(rows):
        out[row] = dot(f32_at(weight + 4 * row * width, width), x)


@njit(cache=CACHE, error_model="numpy")
def inverse_rms(x, eps):
    """Return ``1 / sqrt(mean(x^2) + eps)`` of float32 numbers."""
    return np.float32(1) / np.sqrt(dot(x, x) / np.float32(len(x)) + np.float32(eps))


@njit(cache=CACHE)
def rope_row(x, table, pairs, sign):
    """Rotate the last ``2 * pairs`` channels of x in place.

    Args:
        x: one row of channels, float32 [D], changed in place.
        table: address of the position's float32 table row, cosines then sines.
        pairs: number of channel pairs that rotate, half the table row's length.
        sign: 1 to rotate forwards, -1 to rotate backwards.
    """
    row = f32_at(table, 2 * pairs)
    first = len(x) - 2 * pairs
    for i in range(pairs):
        cos, sin = row[i], np.float32(sign) * row[pairs + i]
        even, odd = x[first + 2 * i], x[first + 2 * i + 1]
        x[first + 2 * i] = even * cos - odd * sin
        x[first + 2 * i + 1] = odd * cos + even * sin


@njit(cache=CACHE)
def table_row(table, rows, width, position):
    """Return the address of a position's row in a float32 table; positions are clamped to it."""
    return table + 4 * width * min(max(position, 0), rows - 1)


@njit(cache=CACHE)
def widen_fp8_block(codes, exponent, out):
    """Decode e4m3 codes times 2^(exponent - 127) to float32, exactly and with NaN."""
    bits = np.uint32(exponent) << np.uint32(23)
    if exponent == 0:
        bits = np.uint32(0x00400000)
    if exponent == 255:
        bits = np.uint32(0x7FC00000)
    scale = float_of(bits)
    for i in range(len(out)):
        code = np.uint32(codes[i])
        magnitude = code & np.uint32(0x7F)
        normal = float_of((magnitude << np.uint32(20)) + np.uint32(120 << 23))
        small = np.float32(magnitude) * np.float32(2.0**-9)
        value = small if magnitude < 8 else normal
        value = float_of(np.uint32(0x7FC00000)) if magnitude == 0x7F else value
        out[i] = (-value if code >= 0x80 else value) * scale

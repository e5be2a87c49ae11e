"""Number formats inside Triton kernels: e4m3, ue8m0 and e2m1.

Every conversion exists twice: by the target's own instruction (``NATIVE``) and by integer bits,
which is exact on every target and needs no FP8 type. The bits of an e4m3 code ``s eeee mmm``,
shifted into a wider float's exponent and mantissa, are that code's value times a power of two,
subnormals included; one multiplication restores it. Encoders round to the nearest code, ties to
even, and saturate. NaN stays NaN in e4m3 and becomes the largest code in e2m1, which has no NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends import backends

# Triton's compiler for Intel's GPUs marks all arithmetic as fast, so it drops a rounding whose
# result is widened again.
_DROPS_ROUNDING = tl.constexpr("intel" in backends)


@triton.jit
def widen(x):
    """Convert values to float32, also values that have just been rounded to 16 bits."""
    if _DROPS_ROUNDING and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif _DROPS_ROUNDING and x.dtype == tl.float16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
        magnitude = bits & 0x7FFF
        # Exponents are re-based from 15 to 127; that of infinities and NaN stays the largest.
        normal = (magnitude << 13) + tl.where(magnitude < 0x7C00, 112 << 23, 224 << 23)
        subnormal = (magnitude.to(tl.int32).to(tl.float32) * 2.0**-24).to(tl.uint32, bitcast=True)
        wide = tl.where(magnitude < 0x400, subnormal, normal) | ((bits & 0x8000) << 16)
        return wide.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def e4m3_to_fp32(codes, NATIVE: tl.constexpr):
    """Decode uint8 e4m3fn codes of any shape to float32; 0x7F and 0xFF give NaN."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = codes.to(tl.uint32)
    bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e4m3_to_fp16(codes, NATIVE: tl.constexpr):
    """Decode uint8 e4m3fn codes of any shape to float16, exactly; 0x7F and 0xFF give NaN."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True) * 256.0  # 2^8
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value.to(tl.float16))


@triton.jit
def fp32_to_e4m3(x, NATIVE: tl.constexpr):
    """Encode float32 to uint8 e4m3fn codes: nearest even, saturating at 448, NaN to 0x7F."""
    if NATIVE == 2:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        if NATIVE:
            clamped = tl.clamp(x, -448.0, 448.0)
            codes = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32)
        else:
            bits = x.to(tl.uint32, bitcast=True)
            magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
            # Normal codes: add half of the 20 dropped mantissa bits, ties to even, and re-base the
            # exponent from 127 to 7. A mantissa that overflows carries into the exponent by itself.
            odd = (magnitude >> 20) & 1
            normal = ((magnitude + 0x7FFFF + odd) >> 20) - (120 << 3)
            # Below 2^-6 codes are multiples of 2^-9: adding 2^14 leaves that multiple, rounded to
            # nearest even, in the mantissa's lowest bits.
            small = magnitude.to(tl.float32, bitcast=True) + 16384.0
            subnormal = small.to(tl.uint32, bitcast=True) - 0x46800000
            codes = tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
        return tl.where(x != x, 0x7F, codes).to(tl.uint8)


@triton.jit
def scale_exponent(amax, CODE_MAX: tl.constexpr, FLOOR: tl.constexpr):
    """Compute ``ceil(log2(max(amax, FLOOR) / CODE_MAX))`` as int32 from the float32 bits."""
    ratio = tl.maximum(amax, FLOOR) * (1.0 / CODE_MAX)
    bits = ratio.to(tl.int32, bitcast=True)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def exp2_int(exponent):
    """Return 2^exponent as float32 for int32 exponents -126 .. 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def ue8m0_to_fp32(codes):
    """Decode uint8 scale bytes to float32: 2^(byte - 127), NaN for 255."""
    wide = codes.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def exponent_to_ue8m0(exponent):
    """Encode an int32 exponent as a uint8 scale byte: exponent + 127 clamped to 0 .. 255."""
    return tl.minimum(tl.maximum(exponent + 127, 0), 255).to(tl.uint8)


@triton.jit
def fp32_to_e2m1(x):
    """Encode float32 to uint8 e2m1 codes 0..15: nearest even, saturating at 6, NaN to 6."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.uint8) + (a >= 0.75).to(tl.uint8) + (a > 1.25).to(tl.uint8)
    code += (a >= 1.75).to(tl.uint8) + (a > 2.5).to(tl.uint8) + (a >= 3.5).to(tl.uint8)
    code += (a > 5.0).to(tl.uint8)
    sign = (x.to(tl.uint32, bitcast=True) >> 28) & 8
    return tl.where(x == x, code | sign, 7).to(tl.uint8)


@triton.jit
def fp32_to_scaled_e2m1(x, step):
    """Encode float32 x / step to uint8 e2m1 codes 0..15 without dividing; steps are e4m3 values.

    Products of steps and of the midpoints between codes are exact, so ties are exact too; with the
    quotients of an approximate division they would not be.
    """
    a = tl.abs(x)
    code = (a > 0.25 * step).to(tl.uint8) + (a >= 0.75 * step).to(tl.uint8)
    code += (a > 1.25 * step).to(tl.uint8) + (a >= 1.75 * step).to(tl.uint8)
    code += (a > 2.5 * step).to(tl.uint8) + (a >= 3.5 * step).to(tl.uint8)
    code += (a > 5.0 * step).to(tl.uint8)
    sign = (x.to(tl.uint32, bitcast=True) >> 28) & 8
    return tl.where(x == x, code | sign, 7).to(tl.uint8)


@triton.jit
def e2m1_to_fp32(codes):
    """Decode uint8 e2m1 codes 0..15 to float32."""
    wide = codes.to(tl.uint32)
    bits = ((wide & 8) << 28) | ((wide & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def e2m1_to_fp16(codes):
    """Decode uint8 e2m1 codes 0..15 to float16."""
    wide = codes.to(tl.uint16)
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return (bits.to(tl.float16, bitcast=True) * 16384.0).to(tl.float16)  # 2^14

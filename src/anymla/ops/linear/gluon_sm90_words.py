"""Operands of Hopper's products in registers: words of FP8 codes and pairs of bfloat16.

A thread has eight neighbours of a line's 32 words, so that it reads 16 bytes at a time. Channels go
into the matrix instruction in that order, which is the same for both operands.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_RUN = gl.constexpr(128)


@gluon.constexpr_function
def words_layout(warps, rows):
    """[warps, rows, 32] words as matrix operands: warps, rows of eight, four threads a row."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    registers += [[0, 1 << bit, 0] for bit in range(3, rows.bit_length() - 1)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    shared = [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, shared, [], [warps, rows, 32])


@gluon.jit
def _values(words):
    """e4m3 words [..] to float16 [.., 2, 2]."""
    a, b, c, d = gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; .reg .b32 u, v; mov.b32 {l, h}, $4;"
        " cvt.rn.f16x2.e4m3x2 u, l; cvt.rn.f16x2.e4m3x2 v, h;"
        " mov.b32 {$0, $1}, u; mov.b32 {$2, $3}, v; }",
        "=h,=h,=h,=h,r", [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def decoded(words):
    """e4m3 words [.., 32] to float16 [.., 128], in the order of ``words_layout``."""
    W: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = words.shape[1]
    value = gl.reshape(_values(words), (W, ROWS, 4, 8, 4))
    return gl.reshape(gl.permute(value, (0, 1, 3, 2, 4)), (W, ROWS, _RUN))


@gluon.jit
def halves(words):
    """Pairs of bfloat16 [.., 32] as [.., 64], in the order of ``words_layout``."""
    a, b = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=1,
    )  # fmt: skip
    W: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = words.shape[1]
    value = gl.reshape(gl.join(a, b), (W, ROWS, 4, 8, 2))
    return gl.reshape(gl.permute(value, (0, 1, 3, 2, 4)), (W, ROWS, 64))


@gluon.jit
def factors(scale):
    """Scales as float32, from ue8m0 or as they are."""
    if scale.dtype == gl.uint8:
        wide = scale.to(gl.int32)
        bits = gl.where(wide == 0, 0x00400000, wide << 23)
        scale = gl.where(wide == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)
    return scale


@gluon.constexpr_function
def flat_layout(lines, warps, shared):
    """[lines, 32] words, sixteen lines a warp and so on, or, if ``shared``, all for every warp."""
    each = [0 if shared else 16 << bit for bit in range(warps.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4]]
    registers += [[1 << bit, 0] for bit in range(3, lines.bit_length() - 1) if 1 << bit not in each]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[line, 0] for line in each], [], [lines, 32]
    )


@gluon.jit
def decoded_flat(words):
    """e4m3 words [lines, 32] to float16 [lines, 128], in the order of ``flat_layout``."""
    LINES: gl.constexpr = words.shape[0]
    value = gl.reshape(_values(words), (LINES, 4, 8, 4))
    return gl.reshape(gl.permute(value, (0, 2, 1, 3)), (LINES, _RUN))

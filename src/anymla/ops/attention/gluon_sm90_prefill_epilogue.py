"""Epilogue of the prefill kernel: heads stored rounded, or rotated back and quantised to FP8."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._gluon import aggregate
from anymla.ops._gluon_ptx import cvt_e4m3x2_f32


@aggregate
class Results:
    """Destination of the results; the attributes are arguments of ``prefill_kernel``."""

    desc: object
    out: object
    scales: object
    positions: object
    table: object
    length: object
    lse: object
    max_logits: object

    @gluon.constexpr_function
    def __init__(self, desc, out, scales, positions, table, length, lse, max_logits):
        self.desc, self.out, self.scales = desc, out, scales
        self.positions, self.table, self.length = positions, table, length
        self.lse, self.max_logits = lse, max_logits


@gluon.jit
def store_half(y, out, row, valid, COLUMN: gl.constexpr, WHOLE: gl.constexpr):
    """Store [64, 256] rounded, in full 32-byte sectors, exchanging values within a warp."""
    OL: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 256],
    )
    o = gl.convert_layout(y.to(out.dtype.element_ty), OL)
    r = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, OL)), 1)
    c = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, OL)), 0)
    at = out + row.to(gl.int64) * 512 + (r * 512 + c + COLUMN)
    if WHOLE:
        gl.store(at, o)
    else:
        gl.store(at, o, mask=(r < valid) & (c >= 0))


@gluon.jit
def _exp2_int(exponent):
    """Return 2^exponent as float32 for int32 exponents from -126 to 127."""
    return gl.cast((exponent + 127) << 23, gl.float32, bitcast=True)


@gluon.jit
def store_half_quantized(
    y, out, scales, angles, row, valid, HALF: gl.constexpr, ROPE_DIM: gl.constexpr
):
    """Rotate back the last ROPE_DIM channels of a head and quantise [64, 256] in blocks of 128.

    ``out`` takes two codes at a time, ``scales`` four a head. ``angles`` points to the ROPE_DIM / 2
    cosines and as many sines of the query's position.
    """
    a, b = gl.split(gl.reshape(y, [64, 2, 64, 2]))
    L: gl.constexpr = a.type.layout
    if HALF == 1:
        # Only pairs of the last quantisation block rotate; elsewhere the choice folds away,
        # register by register.
        block = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
        block = gl.expand_dims(gl.expand_dims(block, 0), 2)
        pair = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
        pair = gl.expand_dims(gl.expand_dims(pair, 0), 1)
        rotates = (block == 1) & (pair >= 64 - ROPE_DIM // 2)
        at = angles + (pair + (block * 0 - 64 + ROPE_DIM // 2))
        cos = gl.load(at, mask=rotates, other=1.0)
        sin = gl.load(at + ROPE_DIM // 2, mask=rotates, other=0.0)
        rotated = gl.where(rotates, a * cos + b * sin, a)
        b = gl.where(rotates, b * cos - a * sin, b)
        a = rotated
    largest = gl.max(gl.maximum(gl.abs(a), gl.abs(b)), 2)
    ratio = gl.maximum(largest, 1e-10) * (1.0 / 448.0)
    bits = gl.cast(ratio, gl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(gl.int32)
    inverse = gl.expand_dims(_exp2_int(gl.maximum(-exponent, -126)), 2)
    both = cvt_e4m3x2_f32(a * inverse, b * inverse)
    low, high = gl.split(gl.permute(both, (0, 2, 1)))
    OL: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
    mbarriers = gl.convert_layout(low | (high << 16), OL)
    r = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, OL)), 1)
    c = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, OL)), 0)
    mask = (r < valid) & (c >= 0)
    to = out + row.to(gl.int64) * 256 + (r * 256 + c + HALF * 128)
    gl.store(to, (mbarriers & 0xFFFF).to(gl.int16), mask=mask)
    gl.store(to + 64, ((mbarriers >> 16) & 0xFFFF).to(gl.int16), mask=mask)
    SL: gl.constexpr = exponent.type.layout
    r = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, SL)), 1)
    c = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(0, SL)), 0)
    to = scales + row.to(gl.int64) * 4 + (r * 4 + c + HALF * 2)
    gl.store(to, _exp2_int(exponent), mask=(r < valid) & (c >= 0))


@gluon.jit
def angles_of(to, token, ROPE_DIM: gl.constexpr):
    """Return a pointer to the cosines of a token's position."""
    position = gl.minimum(gl.maximum(gl.load(to.positions + token), 0), to.length - 1)
    return to.table + position * ROPE_DIM

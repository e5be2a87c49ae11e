"""Device code: finished heads, rotated back and quantised to FP8 before they leave a kernel."""

import triton
import triton.language as tl

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.triton_cast import exp2_int, fp32_to_e4m3, scale_exponent
from anymla.ops.output_projection.reference import AMAX_FLOOR

_RUN = tl.constexpr(FP8_BLOCK)
_FLOOR = tl.constexpr(AMAX_FLOOR)


@triton.jit
def store_turned(
    value, first, token, head, H, codes_ptr, scales_ptr, positions_ptr, table_ptr, angles,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr,
    TYPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """What ``rotate_quantise_kernel`` makes of attention's output, bit for bit.

    Args:
        value: float32 [ROWS, WIDTH], channels ``first`` .. of heads ``head`` .. of one token.
        first: a multiple of 128, as WIDTH and D are.
        token: of which token.
        head: the first of the heads; those from H on are not stored.
        H: heads.
        codes_ptr: uint8 [T, H, D].
        scales_ptr: float32 [T, H, D / 128].
        positions_ptr: int64 [T].
        table_ptr: float32 [angles, TURNED], cosines then sines.
        angles: rows of the table.
        ROWS: a power of two.
        WIDTH: a power of two; channels from D on are not stored.
        D: channels of a head.
        TURNED: how many of them, the last, turn with the position.
        TYPE: to which the output would be rounded in between.
        NATIVE: see ``triton_cast``.
    """
    RUNS: tl.constexpr = WIDTH // _RUN
    PAIRS: tl.constexpr = _RUN // 2
    piece = tl.arange(0, ROWS * RUNS)
    row = head + piece // RUNS
    start = first + piece % RUNS * _RUN
    inside = (row < H) & (start < D)
    value = value.to(TYPE).to(tl.float32)
    even, odd = tl.split(tl.reshape(value, (ROWS * RUNS, PAIRS, 2)))
    position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), angles - 1)
    pair = (start[:, None] - (D - TURNED)) // 2 + tl.arange(0, PAIRS)[None, :]
    turns = inside[:, None] & (pair >= 0) & (pair < TURNED // 2)
    at = table_ptr + position * TURNED + pair
    cos = tl.load(at, turns, other=1.0)
    sin = tl.load(at + TURNED // 2, turns, other=0.0)
    touched = (start + _RUN > D - TURNED)[:, None]
    turned = tl.where(touched, even * cos + odd * sin, even)
    odd = tl.where(touched, odd * cos - even * sin, odd)
    even = turned
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
    exponent = scale_exponent(largest, 448.0, _FLOOR)
    # An infinite value has exponent 128, whose inverse is no normal number.
    inverse = exp2_int(tl.maximum(-exponent, -126))[:, None]
    scaled = tl.reshape(tl.join(even * inverse, odd * inverse), (ROWS * RUNS, _RUN))
    place = token.to(tl.int64) * H + row
    at = (place * D + start)[:, None] + tl.arange(0, _RUN)[None, :]
    tl.store(codes_ptr + at, fp32_to_e4m3(scaled, NATIVE), inside[:, None])
    tl.store(scales_ptr + place * (D // _RUN) + start // _RUN, exp2_int(exponent), inside)

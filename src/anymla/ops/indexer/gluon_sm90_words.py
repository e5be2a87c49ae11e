"""Shared words that Hopper's scores reserve beside what the compiler manages.

Warps of a warpgroup need not wait for each other to give a buffer back, nor to let partial sums
change hands among their own threads; the compiler's own barriers and conversions make them.

    0      barriers: one arrival of every warp of the consumers that read a buffer
    1024   partial sums of two tiles: 1,024 bytes of every warp of two consumers

The size is a multiple of 1,024, so that what the compiler manages stays aligned.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_SUMS = gl.constexpr(1024)
# From a tile's partial sums to the next one's.
SIDE = gl.constexpr(2048)


@gluon.jit
def reserve():
    """Where the shared words begin."""
    return gl.inline_asm_elementwise(
        "{ .shared .align 1024 .b8 anymla_scores[9216]; mov.u32 $0, anymla_scores; }",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def begin(words, FIRST: gl.constexpr, COUNT: gl.constexpr, WARPS: gl.constexpr):
    """Barriers that await WARPS each; to be made visible by a barrier of all threads."""
    for i in gl.static_range(COUNT):
        gl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
            " @p mbarrier.init.shared::cta.b64 [$1], $2; mov.b32 $0, 0; }",
            "=r,r,r", [words + 8 * (FIRST + i), WARPS], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def wait(words, buffer, parity):
    """Until a buffer has been given back."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2;"
        " @!p bra AGAIN; mov.b32 $0, 0; }",
        "=r,r,r", [words + 8 * buffer, parity], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def lane_of(like):
    """Of each thread in its warp, laid out as ``like``."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid;",
        "=r,r", [gl.zeros_like(like).to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def go_on(words, buffer, pages):
    """A branch around a wait for which there is no thread."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $2, 0; @p bra ON;"
        " AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], 1; @!p bra AGAIN;"
        " ON: mov.b32 $0, 0; }",
        "=r,r,r", [words + 8 * buffer, pages], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def give_back(words, buffer, scale, lane):
    """``scale``, the last that a warp has read of a buffer, which it gives back."""
    at = gl.zeros_like(scale).to(gl.int32) + words + 8 * buffer
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.u32 p, $3, 0;"
        " @p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, $2; }",
        "=f,r,f,r", [at, scale, lane], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _meet():
    """Of the threads of a warp."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def places_of_sums(words, like, WHO: gl.constexpr, ROWS: gl.constexpr):
    """Where partial sums [64, ROWS, 4] lie, laid out as ``like``: four of a key side by side."""
    L: gl.constexpr = like.type.layout
    key = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    part = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, L)))
    line = gl.expand_dims((key // 16) * 32 + key % 16, 1) + gl.expand_dims(row * 16, 0)
    part = gl.expand_dims(gl.expand_dims(part, 0), 0)
    return words + _SUMS + WHO * 2 * 2048 + gl.expand_dims(line * 16, 2) + part * 4


@gluon.jit
def place_of_sum(words, WHO: gl.constexpr, ROWS: gl.constexpr, L: gl.constexpr):
    """Where the partial sums of a key begin, [64, ROWS] laid out as L."""
    key = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))
    line = gl.expand_dims((key // 16) * 32 + key % 16, 1) + gl.expand_dims(row * 16, 0)
    return words + _SUMS + WHO * 2 * 2048 + line * 16


@gluon.jit
def put_parts(parts, places):
    """Partial sums of a tile, for all threads of the warp."""
    gl.inline_asm_elementwise(
        "st.shared.f32 [$1], $2; mov.b32 $0, 0;",
        "=r,r,f", [places, parts], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    _meet()


@gluon.jit
def sum_of_parts(place):
    """The sum of four, added as a butterfly of threads would."""
    a, b, c, d = gl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r", [place],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=False, pack=1,
    )  # fmt: skip
    return (a + c) + (b + d)

"""Barriers of the prefill kernel at which every warp arrives for itself.

The compiler's own arrival is made by one thread for its warpgroup, whose warps meet before it, and
once more before they next touch shared memory. Here a warp's threads meet, and one of them arrives.

They lie beside what the compiler manages, and take a multiple of 1,024 bytes so that what it
manages stays aligned.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Two of each.
P_RDY = gl.constexpr(0)
GO = gl.constexpr(2)
LAST = gl.constexpr(4)
FREE_L = gl.constexpr(6)
FREE_R = gl.constexpr(8)
Q_FREE = gl.constexpr(10)
_WORDS = gl.constexpr(12)


@gluon.jit
def reserve():
    """Where the barriers lie, each ready for four warps once all threads have met."""
    words = gl.inline_asm_elementwise(
        "{ .shared .align 1024 .b8 anymla_prefill[1024]; mov.u32 $0, anymla_prefill; }",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    for i in gl.static_range(_WORDS):
        gl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
            " @p mbarrier.init.shared::cta.b64 [$1], 4; mov.b32 $0, 0; }",
            "=r,r", [words + 8 * i], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return words


@gluon.jit
def wait(words, which, parity):
    """Until the phase of a parity is over."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2;"
        " @!p bra AGAIN; mov.b32 $0, 0; }",
        "=r,r,r", [words + 8 * which, parity], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def arrive(words, which):
    """What the threads of a warp have done before is done for those who wait."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l; bar.warp.sync 0xffffffff; mov.u32 l, %laneid;"
        " setp.eq.u32 p, l, 0; @p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0; }",
        "=r,r", [words + 8 * which], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip

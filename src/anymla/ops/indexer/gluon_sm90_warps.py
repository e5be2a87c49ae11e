"""What warps of Hopper's selectors find out together, by instructions that Triton does not have.

A warp reduces in one instruction, tells the others in a word of its own, and after a barrier
reduces what all have told: one barrier, and no thread that waits for a chain of exchanges.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# A warp's lanes add what lanes below them have.
_SUM_UP = gl.constexpr(
    " ".join(
        f"shfl.sync.up.b32 r|q, i, {step}, 0, 0xffffffff; @q add.s32 i, i, r;"
        for step in (1, 2, 4, 8, 16)
    )
)


@gluon.constexpr_function
def _extremes(before, reduced, behind):
    """Text that makes numbers in the order of scores of a and b, or scores of them again."""
    text = before
    for x in ("a", "b"):
        text += f"shr.s32 s, {x}, 31; and.b32 s, s, 0x7fffffff; xor.b32 {x}, {x}, s; "
        if reduced:
            text += f"redux.sync.max.s32 {x}, {x}, 0xffffffff; "
    return text + behind


@gluon.jit
def tell_extremes(at, a, b):
    """Of each warp, the largest a and the largest b, at two words of its own; NaN is larger."""
    TEXT: gl.constexpr = _extremes(
        "{ .reg .pred p; .reg .b32 l, a, b, s; mov.u32 l, %laneid; setp.eq.u32 p, l, 0;"
        " mov.b32 a, $2; mov.b32 b, $3; ",
        True,
        " @p st.shared.v2.b32 [$1], {a, b}; mov.b32 $0, 0; }",
    )
    gl.inline_asm_elementwise(
        TEXT, "=r,r,f,f", [at, a, b], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def extremes(at, WARPS: gl.constexpr):
    """The largest of what all warps have told, from ``at`` on."""
    FIRST: gl.constexpr = (
        "{ .reg .b32 l, a, b, s; mov.u32 l, %laneid; min.u32 l, l, $3; shl.b32 l, l, 3;"
        " add.u32 l, l, $2; ld.shared.v2.b32 {a, b}, [l];"
        " redux.sync.max.s32 a, a, 0xffffffff; redux.sync.max.s32 b, b, 0xffffffff; "
    )
    TEXT: gl.constexpr = _extremes(FIRST, False, " mov.b32 $0, a; mov.b32 $1, b; }")
    return gl.inline_asm_elementwise(
        TEXT, "=f,=f,r,r", [at, WARPS - 1], dtype=(gl.float32, gl.float32), is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def tell_sum(at, x):
    """The sum of each warp's x, which it also tells at a word of its own."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0;"
        " redux.sync.add.s32 $0, $2, 0xffffffff; @p st.shared.b32 [$1], $0; }",
        "=r,r,r", [at, x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def tell_ranks(at, x):
    """The sum of x in lanes below; each warp's sum is told at a word of its own."""
    TEXT: gl.constexpr = (
        "{ .reg .pred p, q; .reg .b32 i, r; mov.b32 i, $2; "
        + _SUM_UP
        + " mov.u32 r, %laneid; setp.eq.u32 p, r, 31; @p st.shared.b32 [$1], i;"
        " sub.s32 $0, i, $2; }"
    )
    return gl.inline_asm_elementwise(
        TEXT, "=r,r,r", [at, x], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def sums_before(at, warp):
    """The sum of what warps before this one have told, from ``at`` on."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l, a; mov.u32 l, %laneid; setp.lt.u32 p, l, $2; mov.b32 a, 0;"
        " shl.b32 l, l, 2; add.u32 l, l, $1; @p ld.shared.b32 a, [l];"
        " redux.sync.add.s32 $0, a, 0xffffffff; }",
        "=r,r,r", [at, warp], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def put_crossing(at, before, own, d, c, b, a, wanted, number):
    """Where counts from the first thread's on reach ``wanted``: (number, count before it, 0, 1).

    Args:
        at: where it is put.
        before: what warps before this one count.
        own: what this one counts.
        d: a thread's first count, of what has ``number``.
        c: its next, of number - 1.
        b: of number - 2.
        a: of number - 3.
        wanted: at least 1.
        number: of each thread.
    """
    TEXT: gl.constexpr = (
        "{ .reg .pred p, q; .reg .b32 i, r, t, n; setp.ge.s32 p, $2, $8; @p bra DONE;"
        " add.s32 i, $2, $3; setp.lt.s32 p, i, $8; @p bra DONE;"
        " add.s32 i, $4, $5; add.s32 i, i, $6; add.s32 i, i, $7; mov.b32 t, i; "
        + _SUM_UP
        + " add.s32 i, i, $2; setp.lt.s32 p, i, $8; @p bra DONE;"
        " sub.s32 i, i, t; setp.ge.s32 p, i, $8; @p bra DONE; mov.b32 n, $9;"
        " add.s32 t, i, $4; setp.ge.s32 p, t, $8; @p bra PUT; mov.b32 i, t; sub.s32 n, n, 1;"
        " add.s32 t, i, $5; setp.ge.s32 p, t, $8; @p bra PUT; mov.b32 i, t; sub.s32 n, n, 1;"
        " add.s32 t, i, $6; setp.ge.s32 p, t, $8; @p bra PUT; mov.b32 i, t; sub.s32 n, n, 1;"
        " PUT: mov.b32 r, 0; mov.b32 t, 1; st.shared.v4.b32 [$1], {n, i, r, t};"
        " DONE: mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(
        TEXT, "=r,r,r,r,r,r,r,r,r,r", [at, before, own, d, c, b, a, wanted, number],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip

"""Shared words of Hopper's selectors, which the compiler does not manage, and their instructions.

Triton has no atomics in shared memory, and none of its threads writes where it likes there.

    word 0     counters
         2048  how many candidates there are, three words of nothing, (score, entry) of each
         4096  the entries that are chosen, in order
         6144  the groups that are chosen, in order
         7168  what a scan has found; a counter that nobody looks at

Counters of a second and a third digit lie where candidates and entries are at other times.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops.indexer.selection_plan import MOST_GROUP_K

DIGITS = gl.constexpr(2048)
CANDIDATES = gl.constexpr(2048)
MOST_CANDIDATES = gl.constexpr(128)  # a thread each, of 4 warps
ENTRIES = gl.constexpr(2 * 2048)
GROUPS_CHOSEN = gl.constexpr(3 * 2048)
FOUND = gl.constexpr(3 * 2048 + MOST_GROUP_K)
REST = gl.constexpr(3 * 2048 + MOST_GROUP_K + 4)
_NEW = gl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7))


@gluon.jit
def meet():
    """Barrier of a program's threads."""
    if _NEW:
        gl.barrier()
    else:
        gl.thread_barrier()


@gluon.jit
def reserve():
    """Where the shared words begin."""
    return gl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 anymla_topk[28704]; mov.u32 $0, anymla_topk; }",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def clear(at):
    """Four words each."""
    gl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$1], {z, z, z, z}; mov.b32 $0, z; }",
        "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def increment(at):
    """Of a counter."""
    gl.inline_asm_elementwise(
        "red.shared.add.u32 [$1], 1; mov.b32 $0, 0;",
        "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def count_reaching(at, x, limit):
    """Increment the counters of those x that are at least ``limit``."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.f32 p, $2, $3; @p red.shared.add.u32 [$1], 1; mov.b32 $0, 0; }",
        "=r,r,f,f", [at, x, limit], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _storing(each):
    """Text and constraints: a thread's ``each`` entries, of those x that reach a limit."""
    lines = ["{ .reg .pred p; .reg .b32 a;", f"mov.b32 a, ${each};"]
    for i in range(each):
        x, entry, limit = (f"${(2 + n) * each + i}" for n in range(3))
        lines += [
            f"setp.ge.f32 p, {x}, {limit}; @p st.shared.b32 [a], {entry}; @p add.u32 a, a, 4;",
            f"mov.b32 ${i}, 0;",
        ]
    outputs, words, floats = ["=r"] * each, ["r"] * each, ["f"] * each
    return " ".join(lines) + " }", ",".join(outputs + words + floats + words + floats)


@gluon.jit
def put_in_order(at, x, limit, entry, WARPS: gl.constexpr):
    """Write the entries of all x that reach ``limit`` to the words from ``at`` on, in order."""
    THREADS: gl.constexpr = 32 * WARPS
    EACH: gl.constexpr = x.shape[0] // THREADS
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    # As float32, whose sums are not taken where comparisons are.
    count = gl.sum(gl.reshape(gl.where(x >= limit, 1.0, 0.0), [THREADS, EACH]), 1).to(gl.int32)
    LINE: gl.constexpr = count.type.layout
    count = gl.convert_layout(count, ONE)
    before = gl.associative_scan(count, 0, add) - count
    before = gl.expand_dims(gl.convert_layout(before, LINE), 1)
    before = gl.reshape(gl.broadcast(before, gl.reshape(entry, [THREADS, EACH]))[0], [x.shape[0]])
    before = gl.convert_layout(before, x.type.layout)
    STORING: gl.constexpr = _storing(EACH)
    gl.inline_asm_elementwise(
        STORING[0], STORING[1], [at + before * 4, x, entry, limit],
        dtype=gl.int32, is_pure=False, pack=EACH,
    )  # fmt: skip


@gluon.jit
def put(at, x, there):
    """A word each of those that are ``there``."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.b32 $0, 0; }",
        "=r,r,r,r", [at, x, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def get(at):
    """A word."""
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def get2(at):
    """A float32 and a word."""
    return gl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];", "=f,=r,r", [at],
        dtype=(gl.float32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def get4(at):
    """Four words."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [at],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def put3(at, x, y, z, there):
    """Three words, from those that are ``there``; the fourth becomes 1."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.shared.v4.b32 [$1], {$2, $3, $4, $5};"
        " mov.b32 $0, 0; }",
        "=r,r,r,r,r,r", [at, x, y, z, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def note(at, number, wanted, x, index):
    """Where ``number`` is ``wanted``: x and index go into the list behind the counter ``at``."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 s; .reg .b32 a; setp.ne.b32 p, $2, $3; @p bra DONE;"
        " atom.shared.add.u32 s, [$1], 1; setp.ge.u32 p, s, 128; @p bra DONE;"
        " shl.b32 a, s, 3; add.u32 a, a, $1; st.shared.v2.b32 [a+16], {$4, $5};"
        " DONE: mov.b32 $0, 0; }",
        "=r,r,r,r,f,r", [at, number, wanted, x, index], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def here(x):
    """A number x; what is made of it is not made earlier."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def add(a, b):
    """For scans."""
    return a + b

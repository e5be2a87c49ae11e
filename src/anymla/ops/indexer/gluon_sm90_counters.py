"""Shared words of Hopper's selectors, which the compiler does not manage, and their instructions.

Triton has no atomics in shared memory, and none of its threads writes where it likes there.

    word 0     counters
         2048  how many candidates there are, three words of nothing, (score, entry) of each
         4096  the entries that are chosen, in order
         6144  the groups that are chosen, in order
         7168  what a scan has found; a counter that nobody looks at
         7176  what warps tell each other: two extremes each, sums, ranks

Counters of a second and a third digit lie where candidates and entries are at other times.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops.indexer.gluon_sm90_warps import sums_before, tell_ranks
from anymla.ops.indexer.selection_plan import MOST_GROUP_K

DIGITS = gl.constexpr(2048)
CANDIDATES = gl.constexpr(2048)
MOST_CANDIDATES = gl.constexpr(128)  # a thread each, of 4 warps
ENTRIES = gl.constexpr(2 * 2048)
GROUPS_CHOSEN = gl.constexpr(3 * 2048)
FOUND = gl.constexpr(3 * 2048 + MOST_GROUP_K)
REST = gl.constexpr(3 * 2048 + MOST_GROUP_K + 4)
EXTREMES = gl.constexpr(3 * 2048 + MOST_GROUP_K + 8)
SUMS = gl.constexpr(3 * 2048 + MOST_GROUP_K + 8 + 2 * 16)
RANKS = gl.constexpr(3 * 2048 + MOST_GROUP_K + 8 + 3 * 16)
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
        "{ .shared .align 16 .b8 anymla_topk[28960]; mov.u32 $0, anymla_topk; }",
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


@gluon.constexpr_function
def _hiding(each):
    """Text and constraints: a thread's ``each`` scores, whose entries rise, before an end."""
    lines = ["{ .reg .pred h;"] + [f"mov.b32 ${i}, ${each + i};" for i in range(each)]
    lines += [f"setp.lt.s32 h, ${3 * each - 1}, ${3 * each}; @h bra ALL;"]
    for i in range(each):
        lines += [f"setp.lt.s32 h, ${2 * each + i}, ${3 * each}; @!h mov.b32 ${i}, 0xff800000;"]
    outputs, words, floats = ["=f"] * each, ["r"] * each, ["f"] * each
    return " ".join(lines) + " ALL: }", ",".join(outputs + floats + words + words)


@gluon.jit
def hide_behind(x, entry, end, WARPS: gl.constexpr):
    """x, but -inf from entry ``end`` on, which few threads have."""
    EACH: gl.constexpr = x.shape[0] // (32 * WARPS)
    HIDING: gl.constexpr = _hiding(EACH)
    return gl.inline_asm_elementwise(
        HIDING[0], HIDING[1], [x, entry, end], dtype=gl.float32, is_pure=False, pack=EACH
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
def put_in_order(words, at, x, limit, entry, WARPS: gl.constexpr):
    """Write the entries of all x that reach ``limit`` to the words from ``at`` on, in order."""
    THREADS: gl.constexpr = 32 * WARPS
    EACH: gl.constexpr = x.shape[0] // THREADS
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    # As float32, whose sums are not taken where comparisons are.
    count = gl.sum(gl.reshape(gl.where(x >= limit, 1.0, 0.0), [THREADS, EACH]), 1).to(gl.int32)
    LINE: gl.constexpr = count.type.layout
    warp = gl.arange(0, THREADS, layout=ONE) // 32
    before = tell_ranks(words + (RANKS + warp) * 4, gl.convert_layout(count, ONE))
    meet()
    before += sums_before(words + RANKS * 4, warp)
    before = gl.expand_dims(gl.convert_layout(before, LINE), 1)
    before = gl.reshape(gl.broadcast(before, gl.reshape(entry, [THREADS, EACH]))[0], [x.shape[0]])
    before = gl.convert_layout(before, x.type.layout)
    STORING: gl.constexpr = _storing(EACH)
    gl.inline_asm_elementwise(
        STORING[0], STORING[1], [at + before * 4, x, entry, limit],
        dtype=gl.int32, is_pure=False, pack=EACH,
    )  # fmt: skip


@gluon.jit
def ask_ahead(address, size):
    """One thread's wish that ``size`` bytes come into the L2."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [address, size], dtype=gl.int32, is_pure=False, pack=1,
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


@gluon.constexpr_function
def _noting(each):
    """Text and constraints: a thread's ``each`` scores, of those whose number is wanted."""
    at, number, wanted, x, entry = (
        [f"${(1 + n) * each + i}" for i in range(each)] for n in range(5)
    )
    same = [f"{number[i]}, {wanted[i]}" for i in range(each)]
    # Few threads have one.
    lines = [f"{{ .reg .pred p, q; .reg .b32 s, a; setp.eq.u32 p, {same[0]};"]
    lines += [f"setp.eq.or.u32 p, {those}, p;" for those in same[1:]] + ["@!p bra DONE;"]
    for i in range(each):
        lines += [
            f"setp.ne.u32 q, {same[i]}; @q bra PAST{i}; atom.shared.add.u32 s, [{at[i]}], 1;",
            f"setp.ge.u32 q, s, 128; @q bra PAST{i}; shl.b32 a, s, 3; add.u32 a, a, {at[i]};",
            f"st.shared.v2.b32 [a+16], {{{x[i]}, {entry[i]}}}; PAST{i}:",
        ]
    lines += ["DONE:", *(f"mov.b32 ${i}, 0;" for i in range(each)), "}"]
    outputs, words, floats = ["=r"] * each, ["r"] * each, ["f"] * each
    return " ".join(lines), ",".join(outputs + 3 * words + floats + words)


@gluon.jit
def note(at, number, wanted, x, entry, WARPS: gl.constexpr):
    """Where ``number`` is ``wanted``: x and entry go into the list behind the counter ``at``."""
    EACH: gl.constexpr = x.shape[0] // (32 * WARPS)
    NOTING: gl.constexpr = _noting(EACH)
    gl.inline_asm_elementwise(
        NOTING[0], NOTING[1], [at, number, wanted, x, entry],
        dtype=gl.int32, is_pure=False, pack=EACH,
    )  # fmt: skip


@gluon.jit
def add(a, b):
    """For scans."""
    return a + b

"""PTX instructions that Gluon has no function for, one function each, named as in the PTX ISA.

Kernels call these functions and hold no PTX themselves. Registers of 32 bits are int32 tensors,
addresses in shared memory int32, and addresses in global memory pointers or int64. A function whose
name ends in ``_if`` does nothing in threads whose condition is zero. What an instruction does to
memory keeps its order (``is_pure=False``); what only computes may be moved or dropped.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "atom_shared_append_if_equal",
    "bar_warp_sync",
    "bar_warp_sync_after",
    "cp_async_bulk_prefetch_l2",
    "cp_async_bulk_wait_group_0",
    "cvt_e4m3x2_f32",
    "cvt_e4m3x8_e2m1x8_table",
    "cvt_f16_e4m3x4",
    "cvt_f16x2_bf16x2",
    "cvt_f16x2_e2m1x8_mul",
    "cvt_f16x2_e4m3x2_prmt",
    "cvt_f16x2_e4m3x4_mul",
    "cvt_f16x2_f32",
    "fma_f16x2_zero",
    "gdc_launch_dependents",
    "gdc_wait",
    "laneid",
    "ld_global_v4_if",
    "ld_shared_b32",
    "ld_shared_f32_b32",
    "ld_shared_max_f32x2",
    "ld_shared_sum_before",
    "ld_shared_v4_b32",
    "ld_shared_v4_f32",
    "mask_from",
    "mbarrier_arrive_after_read",
    "mbarrier_arrive_warp",
    "mbarrier_init",
    "mbarrier_init_4",
    "mbarrier_wait",
    "mbarrier_wait_if_negative",
    "mov_bf16_bf16x2",
    "mul_f16x2",
    "mul_f32_unless_one",
    "nanosleep",
    "opaque",
    "prefetch_global_l1",
    "prefetch_global_l2",
    "prefetch_global_l2_codes_if",
    "prefetch_global_l2_row_if",
    "prmt_b32",
    "red_global_add_v4_f32_if",
    "red_shared_add_1",
    "redux_add_st_shared",
    "redux_max_st_shared_f32x2",
    "scan_add_st_shared",
    "shared_array",
    "st_global_v4_f32_if",
    "st_shared_b32_if",
    "st_shared_crossing",
    "st_shared_f32",
    "st_shared_in_order_if_reached",
    "st_shared_v4_if",
    "st_shared_v4_zero",
]


# --- registers and threads ----------------------------------------------------------------------


@gluon.jit
def opaque(x):
    """Copy an int32 by ``mov.u32`` so that the compiler does not know its value.

    The compiler then computes values derived from it in place. Otherwise offsets and predicates
    that are the same for all work tiles are computed once and kept, for which registers do not
    suffice; and spilled values have left the L1 cache, through which all rows go, by the time they
    are needed.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def laneid(like):
    """Return each thread's lane in its warp (``%laneid``), laid out as ``like``."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid;",
        "=r,r", [gl.zeros_like(like).to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def nanosleep(nanoseconds):
    """Suspend each thread for about ``nanoseconds``, at most 2 million, by ``nanosleep.u32``."""
    gl.inline_asm_elementwise(
        "nanosleep.u32 $1; mov.u32 $0, 0;",
        "=r,r",
        [nanoseconds],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def bar_warp_sync():
    """Synchronise the threads of a warp by ``bar.warp.sync``."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def bar_warp_sync_after(threads):
    """Synchronise a warp by ``bar.warp.sync`` with an operand per thread, which it ignores."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r,r", [threads],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _griddepcontrol(ASM: gl.constexpr, WARPGROUP: gl.constexpr):
    if WARPGROUP:
        threads = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        gl.inline_asm_elementwise(ASM, "=r,r", [threads], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def gdc_launch_dependents(WARPGROUP: gl.constexpr = False):
    """Permit the next kernel's launch by ``griddepcontrol.launch_dependents``; see ``gdc_wait``."""
    _griddepcontrol("griddepcontrol.launch_dependents; mov.b32 $0, 0;", WARPGROUP)


@gluon.jit
def gdc_wait(WARPGROUP: gl.constexpr = False):
    """Wait by ``griddepcontrol.wait`` until all earlier kernels' stores are seen.

    WARPGROUP passes the numbers of 128 threads as an operand. This only changes where the compiler
    places surrounding code: a decode kernel spills 60 registers with it, and 64 without.
    """
    _griddepcontrol("griddepcontrol.wait; mov.b32 $0, 0;", WARPGROUP)


# --- mbarriers that a kernel places itself ------------------------------------------------------


@gluon.constexpr_function
def _init_text(count):
    return (
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        f" @p mbarrier.init.shared::cta.b64 [$1], {count}; mov.b32 $0, 0; }}"
    )


@gluon.jit
def mbarrier_init(address, count):
    """Initialise an mbarrier by the first thread; a barrier of all threads makes it visible.

    ``address`` is that of the mbarrier in shared memory, and ``count`` the arrivals that end a
    phase, in a register.
    """
    TEXT: gl.constexpr = _init_text("$2")
    gl.inline_asm_elementwise(
        TEXT, "=r,r,r", [address, count], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def mbarrier_init_4(address):
    """Initialise an mbarrier for four arrivals, an immediate, as ``mbarrier_init`` does."""
    TEXT: gl.constexpr = _init_text("4")
    gl.inline_asm_elementwise(TEXT, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def mbarrier_wait(address, number, parity):
    """Wait by ``mbarrier.try_wait.parity`` until the phase of a parity is over.

    ``address`` is that of the first of several mbarriers in shared memory, ``number`` the index of
    this one among them, and ``parity`` 0 or 1.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2;"
        " @!p bra AGAIN; mov.b32 $0, 0; }",
        "=r,r,r", [address + 8 * number, parity], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def mbarrier_wait_if_negative(address, x):
    """Wait until the phase of parity 1 is over by ``mbarrier.try_wait.parity``, where x < 0.

    Callers pass an x that is never negative. The compiler does not know that, and moves nothing
    across.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $2, 0; @p bra ON;"
        " AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], 1; @!p bra AGAIN;"
        " ON: mov.b32 $0, 0; }",
        "=r,r,r", [address, x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def mbarrier_arrive_warp(address):
    """Synchronise a warp, then let its first lane arrive by ``mbarrier.arrive``."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l; bar.warp.sync 0xffffffff; mov.u32 l, %laneid;"
        " setp.eq.u32 p, l, 0; @p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0; }",
        "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def mbarrier_arrive_after_read(address, x, lane):
    """Arrive by ``mbarrier.arrive`` in threads whose ``lane`` is 0; return x, a float32 just read.

    As x passes through, the arrival comes after the load of x and before its use.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.u32 p, $3, 0;"
        " @p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, $2; }",
        "=f,r,f,r", [address, x, lane], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


# --- shared memory ------------------------------------------------------------------------------


@gluon.constexpr_function
def _shared_text(name, size, alignment):
    return f"{{ .shared .align {alignment} .b8 {name}[{size}]; mov.u32 $0, {name}; }}"


@gluon.jit
def shared_array(NAME: gl.constexpr, SIZE: gl.constexpr, ALIGNMENT: gl.constexpr):
    """Return the address of ``.shared .align ALIGNMENT .b8 NAME[SIZE]``, the kernel's own array."""
    TEXT: gl.constexpr = _shared_text(NAME, SIZE, ALIGNMENT)
    return gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ld_shared_b32(address):
    """Load an int32 by ``ld.shared.b32``."""
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ld_shared_f32_b32(address):
    """Load a float32 and an int32 behind it by ``ld.shared.v2.b32``."""
    return gl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];", "=f,=r,r", [address],
        dtype=(gl.float32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def ld_shared_v4_b32(address):
    """Load four int32 by ``ld.shared.v4.b32``."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [address],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def ld_shared_v4_f32(address):
    """Load four float32 by ``ld.shared.v4.f32``."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r", [address],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def st_shared_f32(address, x):
    """Store a float32 by ``st.shared.f32``."""
    gl.inline_asm_elementwise(
        "st.shared.f32 [$1], $2; mov.b32 $0, 0;",
        "=r,r,f", [address, x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def st_shared_b32_if(address, x, there):
    """Store an int32 by ``st.shared.b32`` where ``there``."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.b32 $0, 0; }",
        "=r,r,r,r", [address, x, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def st_shared_v4_if(address, x, y, z, there):
    """Store three int32 and a 1 behind them by ``st.shared.v4.b32`` where ``there``."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.shared.v4.b32 [$1], {$2, $3, $4, $5};"
        " mov.b32 $0, 0; }",
        "=r,r,r,r,r,r", [address, x, y, z, there.to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def st_shared_v4_zero(address):
    """Store four zeros by ``st.shared.v4.b32``."""
    gl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$1], {z, z, z, z}; mov.b32 $0, z; }",
        "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def red_shared_add_1(address):
    """Increment a counter by ``red.shared.add.u32``."""
    gl.inline_asm_elementwise(
        "red.shared.add.u32 [$1], 1; mov.b32 $0, 0;",
        "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _append_text(each):
    """Return text and constraints of ``atom_shared_append_if_equal``."""
    at, number, wanted, x, entry = (
        [f"${(1 + n) * each + i}" for i in range(each)] for n in range(5)
    )
    same = [f"{number[i]}, {wanted[i]}" for i in range(each)]
    # Most threads have no score to append, and skip the rest.
    lines = [f"{{ .reg .pred p, q; .reg .b32 s, a; setp.eq.u32 p, {same[0]};"]
    lines += [f"setp.eq.or.u32 p, {those}, p;" for those in same[1:]] + ["@!p bra DONE;"]
    for i in range(each):
        lines += [
            f"setp.ne.u32 q, {same[i]}; @q bra PAST{i}; atom.shared.add.u32 s, [{at[i]}], 1;",
            f"setp.ge.u32 q, s, 128; @q bra PAST{i}; shl.b32 a, s, 3; add.u32 a, a, {at[i]};",
            f"st.shared.v2.b32 [a+16], {{{x[i]}, {entry[i]}}}; PAST{i}:",
        ]
    lines += ["DONE:", *(f"mov.b32 ${i}, 0;" for i in range(each)), "}"]
    outputs, scratch, floats = ["=r"] * each, ["r"] * each, ["f"] * each
    return " ".join(lines), ",".join(outputs + 3 * scratch + floats + scratch)


@gluon.jit
def atom_shared_append_if_equal(address, number, wanted, x, entry, EACH: gl.constexpr):
    """Append (x, entry) to a list by ``atom.shared.add`` where ``number`` is ``wanted``.

    Args:
        address: address of the list: a counter, 12 bytes unused, then 128 pairs. The counter also
            counts pairs beyond 128, which are not stored.
        number: int32 of each element, in any layout with EACH neighbours in a thread.
        wanted: int32 to compare with.
        x: float32 to append with its entry.
        entry: int32 to append with its x.
        EACH: elements per thread.
    """
    TEXT: gl.constexpr = _append_text(EACH)
    gl.inline_asm_elementwise(
        TEXT[0], TEXT[1], [address, number, wanted, x, entry],
        dtype=gl.int32, is_pure=False, pack=EACH,
    )  # fmt: skip


@gluon.constexpr_function
def _in_order_text(each):
    """Return text and constraints of ``st_shared_in_order_if_reached``."""
    lines = ["{ .reg .pred p; .reg .b32 a;", f"mov.b32 a, ${each};"]
    for i in range(each):
        x, entry, limit = (f"${(2 + n) * each + i}" for n in range(3))
        lines += [
            f"setp.ge.f32 p, {x}, {limit}; @p st.shared.b32 [a], {entry}; @p add.u32 a, a, 4;",
            f"mov.b32 ${i}, 0;",
        ]
    outputs, scratch, floats = ["=r"] * each, ["r"] * each, ["f"] * each
    return " ".join(lines) + " }", ",".join(outputs + scratch + floats + scratch + floats)


@gluon.jit
def st_shared_in_order_if_reached(address, x, entry, limit, EACH: gl.constexpr):
    """Store a thread's entries whose x reaches ``limit`` by ``st.shared.b32``, back to back.

    Args:
        address: shared-memory address of a thread's first entry.
        x: float32, EACH neighbours in a thread.
        entry: int32 of each x to store.
        limit: float32 that an x must reach.
        EACH: elements per thread.
    """
    TEXT: gl.constexpr = _in_order_text(EACH)
    gl.inline_asm_elementwise(
        TEXT[0], TEXT[1], [address, x, entry, limit], dtype=gl.int32, is_pure=False, pack=EACH
    )  # fmt: skip


# --- reductions and scans over the warps of a CTA -----------------------------------------------
# A warp reduces in one instruction and stores its result in its own place; after a barrier, every
# warp reduces all stored results. So there is one barrier, and no chain of shuffles to wait for.


# Each lane adds the sums of the lanes below it.
_SCAN_ADD = gl.constexpr(
    " ".join(
        f"shfl.sync.up.b32 r|q, i, {step}, 0, 0xffffffff; @q add.s32 i, i, r;"
        for step in (1, 2, 4, 8, 16)
    )
)


@gluon.constexpr_function
def _max_text(before, reduced, behind):
    """Return text that maps a and b from float to ordered integer, or back."""
    text = before
    for x in ("a", "b"):
        text += f"shr.s32 s, {x}, 31; and.b32 s, s, 0x7fffffff; xor.b32 {x}, {x}, s; "
        if reduced:
            text += f"redux.sync.max.s32 {x}, {x}, 0xffffffff; "
    return text + behind


@gluon.jit
def redux_max_st_shared_f32x2(address, a, b):
    """Store a warp's largest a and largest b by ``redux.sync.max``; NaN counts as the largest.

    ``address`` is that of the warp's two words. They hold int32 in the order of floats, which
    ``ld_shared_max_f32x2`` reads.
    """
    TEXT: gl.constexpr = _max_text(
        "{ .reg .pred p; .reg .b32 l, a, b, s; mov.u32 l, %laneid; setp.eq.u32 p, l, 0;"
        " mov.b32 a, $2; mov.b32 b, $3; ",
        True,
        " @p st.shared.v2.b32 [$1], {a, b}; mov.b32 $0, 0; }",
    )
    gl.inline_asm_elementwise(
        TEXT, "=r,r,f,f", [address, a, b], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def ld_shared_max_f32x2(address, last):
    """Return the largest of the pairs that warps 0 .. ``last`` stored, by ``redux.sync.max``.

    ``address`` is that of the first warp's words; see ``redux_max_st_shared_f32x2``.
    """
    FIRST: gl.constexpr = (
        "{ .reg .b32 l, a, b, s; mov.u32 l, %laneid; min.u32 l, l, $3; shl.b32 l, l, 3;"
        " add.u32 l, l, $2; ld.shared.v2.b32 {a, b}, [l];"
        " redux.sync.max.s32 a, a, 0xffffffff; redux.sync.max.s32 b, b, 0xffffffff; "
    )
    TEXT: gl.constexpr = _max_text(FIRST, False, " mov.b32 $0, a; mov.b32 $1, b; }")
    return gl.inline_asm_elementwise(
        TEXT, "=f,=f,r,r", [address, last], dtype=(gl.float32, gl.float32), is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def redux_add_st_shared(address, x):
    """Sum x over a warp by ``redux.sync.add``; return the sum and store it in the warp's place."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0;"
        " redux.sync.add.s32 $0, $2, 0xffffffff; @p st.shared.b32 [$1], $0; }",
        "=r,r,r", [address, x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def scan_add_st_shared(address, x):
    """Return the sum of x in lower lanes by ``shfl.sync.up``, and store the warp's whole sum."""
    TEXT: gl.constexpr = (
        "{ .reg .pred p, q; .reg .b32 i, r; mov.b32 i, $2; "
        + _SCAN_ADD
        + " mov.u32 r, %laneid; setp.eq.u32 p, r, 31; @p st.shared.b32 [$1], i;"
        " sub.s32 $0, i, $2; }"
    )
    return gl.inline_asm_elementwise(
        TEXT, "=r,r,r", [address, x], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def ld_shared_sum_before(address, warp):
    """Sum the int32 that warps below ``warp`` have stored by ``redux.sync.add``."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l, a; mov.u32 l, %laneid; setp.lt.u32 p, l, $2; mov.b32 a, 0;"
        " shl.b32 l, l, 2; add.u32 l, l, $1; @p ld.shared.b32 a, [l];"
        " redux.sync.add.s32 $0, a, 0xffffffff; }",
        "=r,r,r", [address, warp], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def st_shared_crossing(address, before, own, d, c, b, a, wanted, number):
    """Store where counts, added in the order of threads, reach ``wanted``; nothing if they do not.

    The four int32 stored are the number, the count before it, 0 and 1.

    Args:
        address: shared-memory address of the four int32.
        before: sum of the counts of all warps before this one.
        own: sum of this warp's counts.
        d: first count of a thread, the one of ``number``.
        c: second count of a thread, the one of number - 1.
        b: third count of a thread, the one of number - 2.
        a: last count of a thread, the one of number - 3.
        wanted: sum to reach, at least 1.
        number: int32 of each thread.
    """
    TEXT: gl.constexpr = (
        "{ .reg .pred p, q; .reg .b32 i, r, t, n; setp.ge.s32 p, $2, $8; @p bra DONE;"
        " add.s32 i, $2, $3; setp.lt.s32 p, i, $8; @p bra DONE;"
        " add.s32 i, $4, $5; add.s32 i, i, $6; add.s32 i, i, $7; mov.b32 t, i; "
        + _SCAN_ADD
        + " add.s32 i, i, $2; setp.lt.s32 p, i, $8; @p bra DONE;"
        " sub.s32 i, i, t; setp.ge.s32 p, i, $8; @p bra DONE; mov.b32 n, $9;"
        " add.s32 t, i, $4; setp.ge.s32 p, t, $8; @p bra PUT; mov.b32 i, t; sub.s32 n, n, 1;"
        " add.s32 t, i, $5; setp.ge.s32 p, t, $8; @p bra PUT; mov.b32 i, t; sub.s32 n, n, 1;"
        " add.s32 t, i, $6; setp.ge.s32 p, t, $8; @p bra PUT; mov.b32 i, t; sub.s32 n, n, 1;"
        " PUT: mov.b32 r, 0; mov.b32 t, 1; st.shared.v4.b32 [$1], {n, i, r, t};"
        " DONE: mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(
        TEXT, "=r,r,r,r,r,r,r,r,r,r", [address, before, own, d, c, b, a, wanted, number],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# --- global memory ------------------------------------------------------------------------------


@gluon.constexpr_function
def _load_text(unordered, immediate):
    """Return the text of ``ld_global_v4_if``."""
    policy = "createpolicy.fractional.L2::evict_first.b64 p, 1.0;"
    if immediate:  # createpolicy's result as a constant, since it takes five instructions each time
        policy = "mov.b64 p, 0x12F0000000000000;"
    cached = ".nc" if unordered else ""
    return (
        f"{{ .reg .pred q; .reg .b64 p; {policy} setp.ne.s32 q, $5, 0; "
        "mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; "
        f"@q ld.global{cached}.L1::evict_last.L2::cache_hint.L2::256B.v4.u32 "
        "{$0, $1, $2, $3}, [$4], p; }"
    )


@gluon.jit
def ld_global_v4_if(
    address, there, UNORDERED: gl.constexpr = True, IMMEDIATE_POLICY: gl.constexpr = False
):
    """Load four int32 at each address by ``ld.global.v4.u32`` where ``there``, zeros elsewhere.

    The 16 bytes are kept in L1 and are the first to leave L2.

    Args:
        address: int64 address, a multiple of 16.
        there: int32, zero where nothing is read.
        UNORDERED: True to load by ``.nc``, which compilers move across barriers.
        IMMEDIATE_POLICY: True to pass the cache policy as an immediate instead of by
            ``createpolicy``.
    """
    TEXT: gl.constexpr = _load_text(UNORDERED, IMMEDIATE_POLICY)
    return gl.inline_asm_elementwise(
        TEXT, "=&r,=&r,=&r,=&r,l,r", [address, there],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def red_global_add_v4_f32_if(address, a, b, c, d, there):
    """Add four float32 in global memory by ``red.global.add.v4.f32`` where ``there`` is not 0."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $6, 0;"
        " @p red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
        "=r,l,f,f,f,f,r", [address, a, b, c, d, there], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def st_global_v4_f32_if(address, a, b, c, d, there):
    """Store four float32 by ``st.global.v4.f32`` where ``there`` is not 0."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $6, 0;"
        " @p st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
        "=r,l,f,f,f,f,r", [address, a, b, c, d, there], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def prefetch_global_l1(address):
    """Prefetch the line of each address by ``prefetch.global.L1``."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [address],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def prefetch_global_l2(address):
    """Prefetch the line of each address by ``prefetch.global.L2``."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def prefetch_global_l2_row_if(address, there, other, other_there):
    """Prefetch ``address``, 256 bytes behind it, and ``other`` by ``prefetch.global.L2``.

    ``there`` and ``other_there`` are int32, zero where nothing is prefetched.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred q; setp.ne.s32 q, $2, 0; @q prefetch.global.L2 [$1]; "
        "@q prefetch.global.L2 [$1 + 256]; setp.ne.s32 q, $4, 0; @q prefetch.global.L2 [$3]; "
        "mov.u32 $0, 0; }",
        "=r,l,r,l,r", [address, there, other, other_there],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def prefetch_global_l2_codes_if(address, there, more, other, other_there):
    """Do ``prefetch_global_l2_row_if`` with a separate condition, ``more``, 256 bytes behind."""
    gl.inline_asm_elementwise(
        "{ .reg .pred q; setp.ne.s32 q, $2, 0; @q prefetch.global.L2 [$1]; "
        "setp.ne.s32 q, $3, 0; @q prefetch.global.L2 [$1 + 256]; "
        "setp.ne.s32 q, $5, 0; @q prefetch.global.L2 [$4]; mov.u32 $0, 0; }",
        "=r,l,r,r,l,r", [address, there, more, other, other_there],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def cp_async_bulk_prefetch_l2(address, size):
    """Prefetch ``size`` bytes, a multiple of 16, by ``cp.async.bulk.prefetch.L2``.

    The first thread issues the instruction.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [address, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def cp_async_bulk_wait_group_0():
    """Wait until the TMA stores of 128 threads are complete by ``cp.async.bulk.wait_group 0``."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r",
        [gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# --- bytes and formats --------------------------------------------------------------------------


@gluon.jit
def prmt_b32(a, b, selector):
    """Select four bytes of a (0 .. 3) and b (4 .. 7) by ``prmt.b32``, one per selector nibble."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def mul_f16x2(a, b):
    """Multiply two packed float16 each by ``mul.rn.f16x2``."""
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def fma_f16x2_zero(x):
    """Compute x times 0 plus x by ``fma.rn.f16x2``, which turns an infinite float16 into NaN."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0; fma.rn.f16x2 $0, $1, z, $1; }",
        "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def cvt_f16x2_f32(x):
    """Convert float32, or its bits, to two equal packed float16 by ``cvt.rn.f16x2.f32``."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def cvt_f16x2_bf16x2(packed):
    """Convert two packed bfloat16 to two packed float16."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000;"
        " cvt.rn.f16x2.f32 $0, b, a; }",
        "=r,r", [packed], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def mov_bf16_bf16x2(packed):
    """Unpack two packed bfloat16 to two tensors by ``mov.b32 {low, high}``."""
    return gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def cvt_e4m3x2_f32(a, b):
    """Convert to two e4m3 codes by ``cvt.rn.satfinite.e4m3x2.f32``, a's in the low byte of int32.

    Values beyond 448 saturate, and NaN becomes 0x7F.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b16 c; cvt.rn.satfinite.e4m3x2.f32 c, $2, $1; cvt.u32.u16 $0, c; }",
        "=r,f,f", [a, b], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def cvt_f16_e4m3x4(packed):
    """Convert four e4m3 codes of each int32 to four float16, low byte first.

    The instruction is ``cvt.rn.f16x2.e4m3x2``.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; .reg .b32 u, v; mov.b32 {l, h}, $4;"
        " cvt.rn.f16x2.e4m3x2 u, l; cvt.rn.f16x2.e4m3x2 v, h;"
        " mov.b32 {$0, $1}, u; mov.b32 {$2, $3}, v; }",
        "=h,=h,=h,=h,r", [packed],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def cvt_f16x2_e4m3x4_mul(codes, factor):
    """Convert four e4m3 codes to two pairs of float16, times the pair ``factor``.

    The conversion is ``cvt.rn.f16x2.e4m3x2``.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; .reg .b32 a, b; mov.b32 {l, h}, $2; "
        "cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h; "
        "mul.rn.f16x2 $0, a, $3; mul.rn.f16x2 $1, b, $3; }",
        "=r,=r,r,r", [codes, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def cvt_f16x2_e4m3x2_prmt(low, high, selector):
    """Convert two of the eight e4m3 codes of two int32, each to a pair of equal float16.

    ``selector`` is that of ``prmt.b32``; its lower half chooses the first pair, its upper half the
    second.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, $3, $4; mov.b32 {l, h}, t; "
        "cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
        "=&r,=&r,r,r,r", [low, high, selector],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def cvt_f16x2_e2m1x8_mul(codes, factor):
    """Convert eight e2m1 codes of each int32 to four pairs of float16, times 2^7 and ``factor``.

    ``factor`` is two packed float16. The upper bytes of magnitudes come from a table, four at a
    time (their lower bytes are zeros), and the signs of four codes from the upper halves of bytes.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b, m, s, t; "
        "and.b32 m, $4, 0x77777777; shl.b32 t, $4, 4; "
        "prmt.b32 a, 0x5A585400, 0x62605E5C, m; shr.u32 m, m, 16; "
        "prmt.b32 b, 0x5A585400, 0x62605E5C, m; "
        "prmt.b32 s, t, $4, 0x5140; and.b32 s, s, 0x80808080; or.b32 a, a, s; "
        "prmt.b32 s, t, $4, 0x7362; and.b32 s, s, 0x80808080; or.b32 b, b, s; "
        "prmt.b32 s, a, 0, 0x1404; mul.rn.f16x2 $0, s, $5; "
        "prmt.b32 s, a, 0, 0x3424; mul.rn.f16x2 $1, s, $5; "
        "prmt.b32 s, b, 0, 0x1404; mul.rn.f16x2 $2, s, $5; "
        "prmt.b32 s, b, 0, 0x3424; mul.rn.f16x2 $3, s, $5; }",
        "=&r,=&r,=&r,=&r,r,r", [codes, factor],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def cvt_e4m3x8_e2m1x8_table(codes, low, high):
    """Convert eight e2m1 codes of each int32 to e4m3: those of even places, those of odd places.

    ``low`` and ``high`` are the e4m3 codes of magnitudes 0 .. 3 and 4 .. 7, a byte each, without
    signs.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .b32 m, a, b, c, d, s, t;
        and.b32 m, $2, 0x77777777;
        prmt.b32 a, $3, $4, m;
        shr.u32 m, m, 16;
        prmt.b32 b, $3, $4, m;
        prmt.b32 c, a, b, 0x6420;
        prmt.b32 d, a, b, 0x7531;
        shl.b32 s, $2, 4;
        and.b32 s, s, 0x80808080;
        and.b32 t, $2, 0x80808080;
        or.b32 $0, s, c;
        or.b32 $1, t, d; }""",
        "=r,=r,r,r,r", [codes, low, high], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


# --- several elements of a thread ---------------------------------------------------------------


@gluon.constexpr_function
def _mask_text(each):
    """Return text and constraints of ``mask_from``."""
    lines = ["{ .reg .pred h;"] + [f"mov.b32 ${i}, ${each + i};" for i in range(each)]
    lines += [f"setp.lt.s32 h, ${3 * each - 1}, ${3 * each}; @h bra ALL;"]
    for i in range(each):
        lines += [f"setp.lt.s32 h, ${2 * each + i}, ${3 * each}; @!h mov.b32 ${i}, 0xff800000;"]
    outputs, scratch, floats = ["=f"] * each, ["r"] * each, ["f"] * each
    return " ".join(lines) + " ALL: }", ",".join(outputs + floats + scratch + scratch)


@gluon.jit
def mask_from(x, entry, end, EACH: gl.constexpr):
    """Replace x by -inf from entry ``end`` on; threads without such an entry branch past it.

    Args:
        x: float32, EACH neighbours in a thread.
        entry: int32, rising within a thread.
        end: int32, one past the last entry that is kept.
        EACH: elements per thread.
    """
    TEXT: gl.constexpr = _mask_text(EACH)
    return gl.inline_asm_elementwise(
        TEXT[0], TEXT[1], [x, entry, end], dtype=gl.float32, is_pure=False, pack=EACH
    )  # fmt: skip


_MUL_UNLESS_ONE = gl.constexpr(
    "{ .reg .pred one, all; setp.eq.f32 one, $64, 0f3F800000; "
    "setp.eq.and.f32 one, $66, 0f3F800000, one; vote.sync.all.pred all, one, 0xffffffff; "
    + " ".join(f"mov.f32 ${i}, ${i + 32};" for i in range(32))
    + " @all bra.uni DONE; "
    + " ".join(f"mul.f32 ${i}, ${i + 32}, ${i + 64};" for i in range(32))
    + " DONE: }"
)
_MUL_UNLESS_ONE_OPERANDS = gl.constexpr(",".join(["=&f"] * 32 + ["f"] * 64))


@gluon.jit
def mul_f32_unless_one(x, factor):
    """Multiply x by ``factor``, except in warps whose factors are all 1 by ``vote.sync.all``.

    ``x`` is float32 with 32 neighbouring values in a thread, alternating pairs of rows r and r + 8
    as an accumulator has them. ``factor`` is one number per row, broadcast to x.
    """
    return gl.inline_asm_elementwise(
        _MUL_UNLESS_ONE,
        _MUL_UNLESS_ONE_OPERANDS,
        [x, factor],
        dtype=gl.float32,
        is_pure=True,
        pack=32,
    )

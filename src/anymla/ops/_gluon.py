"""Helpers shared by Gluon kernels of several families: renamed functions, barriers, views.

Some functions have different names in different versions of Triton; each is defined here once,
under one name, from what the installed version offers.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate  # public since Triton 3.9

__all__ = [
    "aggregate",
    "field",
    "gdc_launch_dependents",
    "gdc_wait",
    "mbarrier_wait",
    "opaque",
    "view",
    "warpgroup_barrier",
]

_PUBLIC_VIEW = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # since 3.9
_ONE_BARRIER = gl.constexpr(hasattr(gl, "barrier"))  # since 3.7


@gluon.constexpr_function
def field(x):
    """Wrap None and Python bools as constexprs, so that an aggregate's field can store them."""
    return gl.constexpr(x) if x is None or isinstance(x, bool) else x


@gluon.jit
def view(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same shared memory as another type and shape."""
    if _PUBLIC_VIEW:
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)


@gluon.jit
def warpgroup_barrier():
    """Barrier of the warps of a partition, or of all warps where nothing is specialised."""
    if _ONE_BARRIER:
        gl.barrier()
    else:
        gl.thread_barrier()


@gluon.jit
def mbarrier_wait(address, number, parity):
    """Wait until an mbarrier's phase of a parity is over; for barriers that a kernel places itself.

    address: of the first barrier, in shared memory; number: which of those behind it.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2;"
        " @!p bra AGAIN; mov.b32 $0, 0; }",
        "=r,r,r", [address + 8 * number, parity], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def opaque(x):
    """The same int32, as one that the compiler does not know: what follows is computed in place.

    Otherwise offsets and predicates that are the same for all work tiles are computed once and
    kept, which registers do not suffice for; and what is spilled has left the L1 cache, through
    which all rows go, by the time it is needed.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _griddepcontrol(ASM: gl.constexpr, WARPGROUP: gl.constexpr):
    if WARPGROUP:
        threads = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        gl.inline_asm_elementwise(ASM, "=r,r", [threads], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def gdc_launch_dependents(WARPGROUP: gl.constexpr = False):
    """In Gluon: the next kernel may be launched; see ``gdc_wait``."""
    _griddepcontrol("griddepcontrol.launch_dependents; mov.b32 $0, 0;", WARPGROUP)


@gluon.jit
def gdc_wait(WARPGROUP: gl.constexpr = False):
    """In Gluon: wait until all kernels before have ended, and what they wrote can be read.

    WARPGROUP: with the numbers of 128 threads as an operand, which only moves what the compiler
    does around it: a decode kernel spills 60 registers so, and 64 without.
    """
    _griddepcontrol("griddepcontrol.wait; mov.b32 $0, 0;", WARPGROUP)

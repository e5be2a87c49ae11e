"""Functions of Gluon whose names differ between versions of Triton, under one name each.

Which one is called depends on what the installed version has. Instructions that Gluon has no
function for are in ``_gluon_ptx``.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate  # public from 3.9 on

__all__ = [
    "aggregate",
    "field",
    "view",
    "warpgroup_barrier",
]

_PUBLIC_VIEW = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # from 3.9 on
_ONE_BARRIER = gl.constexpr(hasattr(gl, "barrier"))  # from 3.7 on


@gluon.constexpr_function
def field(x):
    """What an aggregate's constructor stores of a value that may be None or a bool of Python."""
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

"""Helpers shared by Gluon kernels of several families: renamed functions, barriers, views.

Some functions have different names in different versions of Triton; each is defined here once,
under one name, from what the installed version offers. Instructions that Gluon has no function for
are in ``_gluon_ptx``.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate  # public since Triton 3.9

__all__ = [
    "aggregate",
    "field",
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
    """View the same shared memory with another type and shape."""
    if _PUBLIC_VIEW:
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)


@gluon.jit
def warpgroup_barrier():
    """Synchronise the warps of a partition, or all warps where nothing is specialised."""
    if _ONE_BARRIER:
        gl.barrier()
    else:
        gl.thread_barrier()

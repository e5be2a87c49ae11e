"""One int32 in shared memory: what a warpgroup of the prefill kernel tells the others."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def put(slot, value, COUNT: gl.constexpr = 1):
    """Store one int32 in shared memory."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot.store(gl.full([COUNT], 0, gl.int32, ONE) + value)


@gluon.jit
def get(slot):
    """Load one int32 from shared memory."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(slot.load(ONE), 0)


@gluon.jit
def get_any(slot):
    """Whether one of four int32 in shared memory is not zero."""
    FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    return gl.max(slot.load(FOUR), 0)

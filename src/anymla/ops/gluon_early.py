"""What kernels in Gluon say to be launched early; ``early`` has the rules."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def let_dependents_start():
    """The next kernel may be launched."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for_predecessors():
    """Until all kernels before have ended, and what they wrote can be read."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )

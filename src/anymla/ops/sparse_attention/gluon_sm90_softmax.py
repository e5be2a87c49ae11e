"""Small steps that both forms of the kernel share: exchange between warps, marks, ends of rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops.sparse_attention.gluon_sm90_lists import counts

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NO_MAXIMUM = gl.constexpr(-1e29)
# float16 probabilities are at most 2^15, so that they keep their precision down to 2^-29.
SHIFT = gl.constexpr(15.0)
# Numbers a head that a piece leaves beside its result: reference exponent, sum, factor of the
# result, and room.
SUMS = gl.constexpr(4)


@gluon.jit
def predecessors_done():
    """If this grid was launched early, wait for those before it."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;",
        "=r,r",
        [gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def dependents_may_start():
    """Let the next grid be launched, which waits for this one's end by itself."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r,r",
        [gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_sink(sink_ptr, heads, H, SINK: gl.constexpr):
    """The sink of each head in units of log 2, or -inf. Asked for long before it is needed."""
    if SINK:
        return gl.load(sink_ptr + heads, mask=heads < H, other=0.0) * LOG2E
    else:
        return heads * 0.0 - float("inf")


@gluon.jit
def bottom_of(sums, top, sink):
    """Denominator: the sums and the sink."""
    return sums + gl.exp2(sink - top)


@gluon.jit
def log_sum(sums, top, empty):
    """Natural logarithm of the sum of the rows' exponentials; ``empty`` without rows."""
    return gl.where(sums == 0, empty, (top + gl.log2(sums)) * LN2)


@gluon.jit
def record_cut(spans_ptr, share):
    """Tell the merge which task the program's range begins in the middle of, if any."""
    if share.STREAM and not (share.MIXED or share.PLANNED):
        inside = (share.begin > 0) & (share.count > 0)
        at = spans_ptr + (share.tasks + gl.program_id(0)) * 2
        gl.store(at, gl.where(inside, share.first, -1))


@gluon.jit
def record_span(spans_ptr, task, first, last, token, lists, share):
    """Tell the merge which programs have the first and the last piece of a task."""
    if not share.PLANNED:
        _, _, _, blocks = counts(lists, token)
        if first == 0:
            gl.store(spans_ptr + task * 2, gl.program_id(0))
        if last == blocks:
            gl.store(spans_ptr + task * 2 + 1, gl.program_id(0))

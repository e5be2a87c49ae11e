"""How the warpgroups of ``gluon_sm90_parts`` come by the queries of their pieces."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from anymla.ops.sparse_attention.gluon_sm90_ends import HEADS
from anymla.ops.sparse_attention.gluon_sm90_query import CHUNKS, ask_query, load_query, take_query
from anymla.ops.sparse_attention.gluon_sm90_softmax import load_sink


@gluon.jit
def ask(
    there, q_ptr, token, tile, H, q_token, q_chunks,
    Q_HEAD: gl.constexpr, FIRST: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Ask for half of the queries of a piece, if there is one."""
    if there:
        ask_query(q_ptr, token, tile, H, q_token, q_chunks, HEADS, Q_HEAD, FIRST, CHUNKS, TAIL)


@gluon.jit
def load(
    q_ptr, token, tile, H, q_token, q_words, q_chunks, share,
    Q_HEAD: gl.constexpr, PART: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Half of the queries of a piece, now."""
    if share.SPLIT and not share.STREAM:
        load_query(q_ptr, token, tile, H, q_token, q_words.index(PART), HEADS, Q_HEAD, PART, TAIL)
    else:
        HALVES: gl.constexpr = q_ptr.dtype.element_ty == gl.float16
        FIRST: gl.constexpr = PART * CHUNKS
        ask_query(q_ptr, token, tile, H, q_token, q_chunks, HEADS, Q_HEAD, FIRST, CHUNKS, TAIL)
        take_query(q_chunks, HEADS, FIRST, CHUNKS, HALVES, TAIL)


@gluon.jit
def take_right(there, q_chunks, q_ready, HALVES: gl.constexpr, TAIL: gl.constexpr):
    """Take the queries' right half, which was asked for, and hand it to main."""
    if there:
        take_query(q_chunks, HEADS, CHUNKS, CHUNKS, HALVES, TAIL)
        fence_async_shared()
        mbarrier.arrive(q_ready, count=1)


@gluon.jit
def take_left(there, q_chunks, sink_ptr, sink_s, tile, H, HALVES: gl.constexpr, SINK: gl.constexpr):
    """Take the queries' left half; sinks go to shared memory, as registers would not keep them."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    if there:
        head = tile * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, S))
        sink = load_sink(sink_ptr, head, H, SINK)
        take_query(q_chunks, HEADS, 0, CHUNKS, HALVES, False)
        sink_s.store(sink)
        fence_async_shared()


@gluon.jit
def give_back(q_free, last):
    """After main's last scores of a piece."""
    if last:
        mbarrier.arrive(q_free, count=1)

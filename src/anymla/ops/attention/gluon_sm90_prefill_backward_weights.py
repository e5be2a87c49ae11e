"""Weights in the Hopper gradients: p and ds where a product of q and dout with rows leaves them.

Of the 64 lines of such a product, 8 heads of q are followed by the same heads of dout. A thread of
wgmma holds lines r and r + 8: the score and <dout, row> of one head.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._gluon import aggregate
from anymla.ops.attention.gluon_sm90_prefill_backward_shared import BLOCK, DIM, HEADS

_LOG2E = gl.constexpr(1.4426950408889634)
# Scores of columns that name no row are 0, which may be far above the denominator. What they give
# is multiplied with zeros or left out, so it only must be finite.
_MOST = gl.constexpr(8.0)
# Exponents of scores that are not there must not overflow before they are masked.
_LEAST = gl.constexpr(-1.0e30)


@aggregate
class Given:
    """Tensors of which weights are made beside scores; attributes are the kernels' arguments."""

    dsink: object
    dout: object
    out: object
    total: object
    delta: object
    lse: object
    dlse: object
    sink: object

    @gluon.constexpr_function
    def __init__(self, dsink, dout, out, total, delta, lse, dlse, sink):
        self.dsink, self.dout, self.out = dsink, dout, out
        self.total, self.delta, self.lse, self.dlse, self.sink = total, delta, lse, dlse, sink


@gluon.jit
def split_products(acc):
    """Split products [64, 64] to scores and <dout, row>, each [4, 8, 64]."""
    return gl.split(gl.permute(gl.reshape(acc, [4, 2, 8, BLOCK]), (0, 2, 3, 1)))


@gluon.jit
def join_weights(ds, p, SL: gl.constexpr):
    """Arrange weights of q and of dout as the lines of products, [64, 64]."""
    both = gl.permute(gl.join(ds, p), (0, 3, 1, 2))
    return gl.convert_layout(gl.reshape(both, [64, BLOCK]), SL)


@gluon.jit
def heads_like(scores):
    """Return the number of each of 32 heads, [4, 8], laid out as ``scores`` without its rows."""
    HL: gl.constexpr = gl.SliceLayout(2, scores.type.layout)
    eights = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, HL)) * 8, 1)
    return eights + gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, HL)), 0)


@gluon.jit
def load_denominators(given, at, DLSE: gl.constexpr):
    """Load log2 of denominators with and without the sink, delta and dlse, [4, 8, 1] each."""
    of_total = gl.expand_dims(gl.load(given.total + at), 2)
    of_delta = gl.expand_dims(gl.load(given.delta + at), 2)
    of_lse, of_dlse = of_total, of_delta
    if DLSE:
        of_lse = gl.load(given.lse + at)
        of_lse = gl.where(of_lse > float("-inf"), of_lse * _LOG2E, float("inf"))
        of_lse = gl.expand_dims(of_lse, 2)
        of_dlse = gl.expand_dims(gl.load(given.dlse + at), 2)
    return of_total, of_delta, of_lse, of_dlse


@gluon.jit
def _make_delta(given, first, head, w: gl.constexpr):
    """Compute <dout, out> of consumer ``w``'s heads, laid out as their numbers ``head``, [4, 8].

    ``first`` is the number of a block's first head among all tokens' heads, int64.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    r = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(1, L)), 1) + w * 32
    at = (first + r) * DIM + gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, L)), 0)
    sums = gl.zeros([32, 128], gl.float32, L)
    for j in gl.static_range(DIM // 128):
        each = gl.load(given.dout + at + j * 128).to(gl.float32)
        sums += each * gl.load(given.out + at + j * 128).to(gl.float32)
    return gl.convert_layout(gl.reshape(gl.sum(sums, 1), [4, 8]), head.type.layout)


@gluon.jit
def make_denominators(
    given, tile, head, head_block, w: gl.constexpr, SINK: gl.constexpr, DLSE: gl.constexpr
):
    """Do ``load_denominators`` from lse and sinks, and store each head's share of dsink.

    Args:
        given: pointers, of which ``total`` and ``delta`` are not used.
        tile: number of a block of 64 heads among all tokens' blocks.
        head: numbers of consumer ``w``'s 32 heads in the block, [4, 8].
        head_block: number of the block among its token's blocks.
        w: number of the consumer.
        SINK: True if heads have sinks.
        DLSE: True if lse has a gradient.
    """
    at = tile.to(gl.int64) * HEADS + head
    delta = _make_delta(given, tile.to(gl.int64) * HEADS, head, w)
    of_lse = gl.load(given.lse + at)
    total = gl.maximum(of_lse, _LEAST)
    if SINK:
        # Differences are formed before they are scaled: a sink times log2(e) may overflow.
        logit = gl.load(given.sink + head_block * HEADS + head)
        top = gl.maximum(gl.maximum(of_lse, logit), _LEAST)
        sums = gl.exp2((of_lse - top) * _LOG2E) + gl.exp2((logit - top) * _LOG2E)
        total = top + gl.log2(gl.maximum(sums, 1e-38)) / _LOG2E
        total = gl.where(top == float("inf"), top, total)
        finite = gl.abs(logit) < float("inf")
        share = gl.exp2((logit - gl.where(finite, total, 0.0)) * _LOG2E)
        # A token without rows has no output, whatever its gradient holds.
        some = finite & (of_lse > float("-inf"))
        gl.store(given.dsink + at, gl.where(some, -share * delta, 0.0))
    of_total = gl.expand_dims(total * _LOG2E, 2)
    of_delta = gl.expand_dims(delta, 2)
    of_dlse = of_delta
    if DLSE:
        of_dlse = gl.expand_dims(gl.load(given.dlse + at), 2)
    of_lse = gl.where(of_lse > float("-inf"), of_lse * _LOG2E, float("inf"))
    return of_total, of_delta, gl.expand_dims(of_lse, 2), of_dlse


@gluon.jit
def weights_of(acc, scale, of_total, of_delta, of_lse, of_dlse, DLSE: gl.constexpr):
    """Compute p and scaled ds of products in float32, [4, 8, 64] each."""
    scores, dp = split_products(acc)
    scores = scores * (scale * _LOG2E)
    p = gl.exp2(gl.minimum(scores - of_total, _MOST))
    ds = p * (dp - of_delta)
    if DLSE:
        ds += of_dlse * gl.exp2(gl.minimum(scores - of_lse, _MOST))
    return p, ds * scale

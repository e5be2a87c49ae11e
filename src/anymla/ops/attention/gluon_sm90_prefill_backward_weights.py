"""Weights in the Hopper gradients: p and ds where a product of q and dout with rows leaves them.

Of the 64 lines of such a product, 8 heads of q are followed by the same heads of dout. A thread of
wgmma holds lines r and r + 8: the score and <dout, row> of one head.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._gluon import aggregate
from anymla.ops.attention.gluon_sm90_prefill_backward_shared import BLOCK

_LOG2E = gl.constexpr(1.4426950408889634)
# Scores of columns that name no row are 0, which may be far above the denominator. What they give
# is multiplied with zeros or left out, so it only must be finite.
_MOST = gl.constexpr(8.0)


@aggregate
class Given:
    """Tensors of which weights are made beside scores; attributes are the kernels' arguments."""

    total: object
    delta: object
    lse: object
    dlse: object

    @gluon.constexpr_function
    def __init__(self, total, delta, lse, dlse):
        self.total, self.delta, self.lse, self.dlse = total, delta, lse, dlse


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
def weights_of(acc, scale, of_total, of_delta, of_lse, of_dlse, DLSE: gl.constexpr):
    """Compute p and scaled ds of products in float32, [4, 8, 64] each."""
    scores, dp = split_products(acc)
    scores = scores * (scale * _LOG2E)
    p = gl.exp2(gl.minimum(scores - of_total, _MOST))
    ds = p * (dp - of_delta)
    if DLSE:
        ds += of_dlse * gl.exp2(gl.minimum(scores - of_lse, _MOST))
    return p, ds * scale

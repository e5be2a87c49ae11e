"""Shared memory and mbarriers of the Hopper gradients of prefill attention."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anymla.ops._gluon import aggregate, view

HEADS = gl.constexpr(64)  # of a CTA
BLOCK = gl.constexpr(64)  # rows that a CTA takes at a time
DIM = gl.constexpr(512)
CHANNELS = gl.constexpr(128)  # of a block in shared memory


@aggregate
class Shared:
    """Shared memory of a CTA.

    Attributes:
        pairs: q and dout, [2 * blocks of channels, 64, channels of a block]. Consumer w has blocks
            w * blocks ..., whose lines are 8 heads of q, the same heads of dout, and so on: 32 of
            the 64 heads.
        rows: rows of a block, [blocks of channels, 64, channels of a block].
        weights: scaled ds and p of the consumers' heads, [2, 64, 64]: lines as in ``pairs``, and
            a column for each row.
        ds: scaled ds of the consumers' heads, [2, 32, 64], which is [64, 64] in order of heads.
        slots: int32 [2, 64], row numbers of a block, or -1.
        pairs_full: mbarriers of loaded halves of the channels of ``pairs``.
        pairs_empty: mbarrier of released ``pairs``.
        rows_full: mbarriers of loaded halves of the channels of ``rows``; with the first half,
            ``slots`` are stored.
        rows_empty: mbarriers of released halves of ``rows``.
        weights_full: mbarrier of ``weights`` and ``ds`` that both consumers have stored.
        weights_empty: mbarrier of ``weights`` and ``ds`` that both consumers have read.
    """

    pairs: object
    rows: object
    weights: object
    ds: object
    slots: object
    pairs_full: object
    pairs_empty: object
    rows_full: object
    rows_empty: object
    weights_full: object
    weights_empty: object

    @gluon.constexpr_function
    def __init__(
        self, pairs, rows, weights, ds, slots,
        pairs_full, pairs_empty, rows_full, rows_empty, weights_full, weights_empty,
    ):  # fmt: skip
        self.pairs, self.rows, self.weights, self.ds, self.slots = pairs, rows, weights, ds, slots
        self.pairs_full, self.pairs_empty = pairs_full, pairs_empty
        self.rows_full, self.rows_empty = rows_full, rows_empty
        self.weights_full, self.weights_empty = weights_full, weights_empty


@gluon.jit
def allocate(DTYPE: gl.constexpr):
    """Allocate shared memory, and initialise its mbarriers."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    BLOCKS: gl.constexpr = DIM // CHANNELS
    pairs = gl.allocate_shared_memory(DTYPE, [2 * BLOCKS, 64, CHANNELS], TILE)
    rows = gl.allocate_shared_memory(DTYPE, [BLOCKS, BLOCK, CHANNELS], TILE)
    weights = gl.allocate_shared_memory(DTYPE, [2, 64, BLOCK], TILE)
    ds = gl.allocate_shared_memory(DTYPE, [2, 32, BLOCK], TILE)
    slots = gl.allocate_shared_memory(gl.int32, [2, BLOCK], FLAT)
    pairs_full = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    pairs_empty = gl.allocate_shared_memory(gl.int64, [1], ONE)
    rows_full = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    rows_empty = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    weights_full = gl.allocate_shared_memory(gl.int64, [1], ONE)
    weights_empty = gl.allocate_shared_memory(gl.int64, [1], ONE)
    for i in gl.static_range(2):
        mbarrier.init(pairs_full.index(i), count=1)
        mbarrier.init(rows_full.index(i), count=1)
        mbarrier.init(rows_empty.index(i), count=1)
    mbarrier.init(pairs_empty, count=2)
    mbarrier.init(weights_full, count=2)
    mbarrier.init(weights_empty, count=2)
    return Shared(
        pairs, rows, weights, ds, slots,
        pairs_full, pairs_empty, rows_full, rows_empty, weights_full, weights_empty,
    )  # fmt: skip


@gluon.jit
def ds_of_all_heads(shared):
    """View ``ds`` as [64, 64]."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return view(shared.ds, shared.ds.dtype, [HEADS, BLOCK], TILE)


@gluon.jit
def counts_of(ranges, token, window, width):
    """Load numbers of rows of a token's two scopes; return the first's and all blocks as well.

    There is one block at least, so that every token passes the same mbarriers.
    """
    count0 = gl.maximum(gl.minimum(gl.load(ranges + token * 4 + 1), window), 0)
    count1 = gl.maximum(gl.minimum(gl.load(ranges + token * 4 + 3), width), 0)
    blocks0 = (count0 + BLOCK - 1) // BLOCK
    blocks = gl.maximum(blocks0 + (count1 + BLOCK - 1) // BLOCK, 1)
    return count0, count1, blocks0, blocks

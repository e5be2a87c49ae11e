"""Memory that the warpgroups of the prefill kernel share: buffers, flags, and mbarriers.

The kernel places the mbarriers of the second half itself, and every warp arrives at them on its
own. In the compiler's own arrival one thread arrives for its warpgroup, whose warps synchronise
before it, and once more before they next touch shared memory. Here the threads of one warp
synchronise, and one of them arrives. These mbarriers lie beside the memory that the compiler
manages, and take a multiple of 1,024 bytes so that the latter stays aligned.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._gluon import aggregate
from anymla.ops._gluon_ptx import mbarrier_arrive_warp, mbarrier_init_4, mbarrier_wait, shared_array

# Indices of the mbarriers that the kernel places itself, two of each.
P_FULL = gl.constexpr(0)
S_DONE = gl.constexpr(2)
SUM_FULL = gl.constexpr(4)
EMPTY_L = gl.constexpr(6)
EMPTY_R = gl.constexpr(8)
Q_EMPTY = gl.constexpr(10)
_MBARRIERS = gl.constexpr(12)


@aggregate
class Shared:
    """Shared memory of a CTA; there are two of each.

    Attributes:
        q: [64, 256], halves of the queries.
        k_l: channels 0 .. 255 of rows, [64, 256] for each of two blocks; then a finished output.
        k_r: channels 256 .. 511 of the same rows.
        p: weights of a block's rows, [64, 64].
        rescale_factor: float32 [64], factors of the sums so far.
        factor: float32 [64], reciprocal of the sums of a query.
        valid: int32 [64], not 0 for rows that count.
        masked: int32 [4], not 0 if some rows of a quarter do not count.
        blocks: int32 [1], number of blocks of a query.
        full_l: mbarriers of filled buffers ``k_l``.
        full_r: mbarriers of filled buffers ``k_r``.
        q_full: mbarriers of loaded halves of the queries; with the first half, ``blocks`` is
            stored.
        mbarriers: address of the mbarriers at which every warp arrives on its own.
    """

    q: object
    k_l: object
    k_r: object
    p: object
    rescale_factor: object
    factor: object
    valid: object
    masked: object
    blocks: object
    full_l: object
    full_r: object
    q_full: object
    mbarriers: object

    @gluon.constexpr_function
    def __init__(
        self, q, k_l, k_r, p, rescale_factor, factor, valid, masked, blocks,
        full_l, full_r, q_full, mbarriers,
    ):  # fmt: skip
        self.q, self.k_l, self.k_r = q, k_l, k_r
        self.p, self.rescale_factor, self.factor = p, rescale_factor, factor
        self.valid, self.masked, self.blocks = valid, masked, blocks
        self.full_l, self.full_r, self.q_full, self.mbarriers = full_l, full_r, q_full, mbarriers


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
    """Return the largest of four int32 in shared memory, which are flags of 0 or 1."""
    FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    return gl.max(slot.load(FOUR), 0)


@gluon.jit
def init_mbarriers():
    """Initialise the mbarriers for four arrivals each and return their address.

    A barrier must follow.
    """
    mbarriers = shared_array("anymla_prefill", 1024, 1024)
    for i in gl.static_range(_MBARRIERS):
        mbarrier_init_4(mbarriers + 8 * i)
    return mbarriers


@gluon.jit
def wait(mbarriers, which, parity):
    """Wait until the phase of this parity is over."""
    mbarrier_wait(mbarriers, which, parity)


@gluon.jit
def arrive(mbarriers, which):
    """Arrive once for a warp, after all of its threads have come."""
    mbarrier_arrive_warp(mbarriers + 8 * which)

"""What the warpgroups of the prefill kernel share: shared memory, flags in it, and mbarriers.

The mbarriers of the second half are placed by hand, and every warp arrives at them for itself. The
compiler's own arrival is made by one thread for its warpgroup, whose warps meet before it, and once
more before they next touch shared memory. Here a warp's threads meet, and one of them arrives. They
lie beside what the compiler manages, and take a multiple of 1,024 bytes so that what it manages
stays aligned.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._gluon import aggregate
from anymla.ops._gluon_ptx import mbarrier_arrive_warp, mbarrier_init_4, mbarrier_wait, shared_array

# Numbers of the mbarriers placed by hand, two of each.
P_FULL = gl.constexpr(0)
S_DONE = gl.constexpr(2)
SUM_FULL = gl.constexpr(4)
EMPTY_L = gl.constexpr(6)
EMPTY_R = gl.constexpr(8)
Q_EMPTY = gl.constexpr(10)
_MBARRIERS = gl.constexpr(12)


@aggregate
class Shared:
    """Shared memory of a CTA; of each, two.

    Attributes:
        q: [64, 256], halves of the queries.
        k_l: [64, 256], channels 0..255 of rows, two blocks of them; then a finished output.
        k_r: their channels 256..511.
        p: [64, 64], weights.
        rescale_factor: float32 [64], factors of what has been added up before.
        factor: float32 [64], one over the sums of a query.
        valid: int32 [64], whether rows count.
        masked: int32 [4], whether some of a quarter of them do not.
        blocks: int32 [1], of a query.
        full_l: mbarriers, here and below: ``k_l`` is filled.
        full_r: ``k_r`` is.
        q_full: half of the queries is loaded; with the first half, ``blocks`` is stored.
        mbarriers: address of those at which every warp arrives for itself.
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
    """Whether one of four int32 in shared memory is not zero."""
    FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    return gl.max(slot.load(FOUR), 0)


@gluon.jit
def init_mbarriers():
    """Address of the mbarriers, each initialised for four arrivals; to be followed by a barrier."""
    mbarriers = shared_array("anymla_prefill", 1024, 1024)
    for i in gl.static_range(_MBARRIERS):
        mbarrier_init_4(mbarriers + 8 * i)
    return mbarriers


@gluon.jit
def wait(mbarriers, which, parity):
    """Wait until the phase of a parity is over."""
    mbarrier_wait(mbarriers, which, parity)


@gluon.jit
def arrive(mbarriers, which):
    """Arrive once for a warp, after all of its threads."""
    mbarrier_arrive_warp(mbarriers + 8 * which)

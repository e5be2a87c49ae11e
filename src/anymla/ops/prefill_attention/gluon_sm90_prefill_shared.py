"""What the warpgroups of the prefill kernel share: memory and barriers, and where results go."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.language.core import _aggregate as aggregate  # public from 3.9 on


@aggregate
class Shared:
    """Shared memory of a program; of each, two.

    Attributes:
        q: [64, 256], halves of the queries.
        k_l: [64, 256], left halves of rows, two blocks of them; then a finished output.
        k_r: their right halves.
        p: [64, 64], weights.
        past: float32 [64], factors of what has been added up before.
        factor: float32 [64], one over the sums of a query.
        valid: int32 [64], whether rows count.
        masked: int32 [4], whether some of a quarter of them do not.
        blocks: int32 [1], of a query.
        rdy_l: barriers, here and below: a left half of rows is there.
        rdy_r: a right half is.
        q_rdy: a half of the queries is there, with the left one the number of blocks.
        words: barriers at which warps arrive, see ``gluon_sm90_prefill_words``.
    """

    q: object
    k_l: object
    k_r: object
    p: object
    past: object
    factor: object
    valid: object
    masked: object
    blocks: object
    rdy_l: object
    rdy_r: object
    q_rdy: object
    words: object

    @gluon.constexpr_function
    def __init__(
        self, q, k_l, k_r, p, past, factor, valid, masked, blocks,
        rdy_l, rdy_r, q_rdy, words,
    ):  # fmt: skip
        self.q, self.k_l, self.k_r = q, k_l, k_r
        self.p, self.past, self.factor = p, past, factor
        self.valid, self.masked, self.blocks = valid, masked, blocks
        self.rdy_l, self.rdy_r, self.q_rdy, self.words = rdy_l, rdy_r, q_rdy, words


@aggregate
class Results:
    """Where results go; arguments of ``prefill_kernel``."""

    desc: object
    out: object
    scales: object
    positions: object
    table: object
    length: object
    lse: object
    peaks: object

    @gluon.constexpr_function
    def __init__(self, desc, out, scales, positions, table, length, lse, peaks):
        self.desc, self.out, self.scales = desc, out, scales
        self.positions, self.table, self.length = positions, table, length
        self.lse, self.peaks = lse, peaks

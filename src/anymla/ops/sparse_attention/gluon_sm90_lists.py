"""Which rows a token reads: blocks of columns, slots, addresses.

A token's blocks are 64 columns of its first list, then 64 columns of its second; at least one, so
that a token without rows gets its zeros. How blocks are shared out: ``gluon_sm90_shares``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops._gluon import aggregate

_LAYOUT = get_layout(MAIN_FP8)
KEYS = gl.constexpr(64)
DATA = gl.constexpr(_LAYOUT.data_bytes)
SCALES = gl.constexpr(_LAYOUT.scale_bytes)
NOPE = gl.constexpr(_LAYOUT.nope)
CHANNELS = gl.constexpr(_LAYOUT.channels)


@aggregate
class Lists:
    """Both lists of all tokens and the caches they point into; see the kernels' arguments."""

    rows0: gl.tensor
    rows1: gl.tensor
    list0: gl.tensor
    list1: gl.tensor
    length0: gl.tensor
    length1: gl.tensor
    width0: gl.tensor
    width1: gl.tensor
    limit0: gl.tensor
    limit1: gl.tensor
    stride0: gl.tensor
    stride1: gl.tensor
    TWO: gl.constexpr
    LENGTH0: gl.constexpr
    LENGTH1: gl.constexpr
    PAGE0: gl.constexpr
    PAGE1: gl.constexpr
    STEP0: gl.constexpr
    STEP1: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, rows0, rows1, list0, list1, length0, length1, width0, width1, limit0, limit1,
        stride0, stride1, TWO, LENGTH0, LENGTH1, PAGE0, PAGE1, STEP0, STEP1,
    ):  # fmt: skip
        self.rows0 = rows0
        self.rows1 = rows1
        self.list0 = list0
        self.list1 = list1
        self.length0 = length0
        self.length1 = length1
        self.width0 = width0
        self.width1 = width1
        self.limit0 = limit0
        self.limit1 = limit1
        self.stride0 = stride0
        self.stride1 = stride1
        self.TWO = gl.constexpr(TWO)
        self.LENGTH0 = gl.constexpr(LENGTH0)
        self.LENGTH1 = gl.constexpr(LENGTH1)
        self.PAGE0 = gl.constexpr(PAGE0)
        self.PAGE1 = gl.constexpr(PAGE1)
        self.STEP0 = gl.constexpr(STEP0)
        self.STEP1 = gl.constexpr(STEP1)


@gluon.jit
def length_of(lengths, token, there, width, GIVEN: gl.constexpr):
    """Columns in use of a token's list: at most all of it, which is what they are unless given."""
    if GIVEN:
        return gl.minimum(gl.maximum(gl.load(lengths + token, mask=there, other=0), 0), width)
    else:
        return width


@gluon.jit
def counts(lists, token):
    """Columns in use of both lists of a token, and blocks of the first and of both."""
    n0 = length_of(lists.length0, token, token >= 0, lists.width0, lists.LENGTH0)
    blocks0 = (n0 + KEYS - 1) // KEYS
    n1 = n0 * 0
    if lists.TWO:
        n1 = n1 + length_of(lists.length1, token, token >= 0, lists.width1, lists.LENGTH1)
    blocks = gl.maximum(blocks0 + (n1 + KEYS - 1) // KEYS, 1)
    return n0, n1, blocks0, blocks


@gluon.jit
def slots_of(block, last, token, n0, n1, blocks0, lists, r):
    """What the list says in columns ``r`` of a block, -1 where there is no column.

    Nothing is done with it here: a producer loads the list of a later block, and whatever looked
    at the values would wait for them.
    """
    if lists.TWO:
        here = block < blocks0
        column = gl.where(here, block, block - blocks0) * KEYS + r
        row0 = lists.list0.to(gl.int64) + token * lists.stride0.to(gl.int64) * 4
        row1 = lists.list1.to(gl.int64) + token * lists.stride1.to(gl.int64) * 4
        row = gl.where(here, row0, row1).to(gl.pointer_type(gl.int32))
        n = gl.where(here, n0, n1)
    else:
        column = block * KEYS + r
        row = lists.list0 + token * lists.stride0.to(gl.int64)
        n = n0
    return gl.load(row + column, mask=(column < n) & (block < last), other=-1)


@gluon.jit
def address(slots, here, lists):
    """Whether there is a row, and the addresses of its data and of its scales.

    ``here``: the slots are those of the first list.
    """
    limit = lists.limit0
    if lists.TWO:
        limit = gl.where(here, limit, lists.limit1)
    valid = (slots >= 0) & (slots < limit)
    slots = gl.where(valid, slots, 0).to(gl.uint32)
    PAGE0: gl.constexpr = lists.PAGE0
    PAGE1: gl.constexpr = lists.PAGE1
    STEP0: gl.constexpr = lists.STEP0
    STEP1: gl.constexpr = lists.STEP1
    pages = slots // PAGE0
    entries = PAGE0
    base = lists.rows0.to(gl.int64)
    if lists.TWO:
        base = gl.where(here, base, lists.rows1.to(gl.int64))
        if PAGE0 != PAGE1:
            pages = gl.where(here, pages, slots // PAGE1)
            entries = gl.where(here, PAGE0, PAGE1)
    if lists.TWO and STEP0 != STEP1:
        start = pages.to(gl.int64) * gl.where(here, STEP0, STEP1).to(gl.int64) + base
    else:
        start = pages.to(gl.int64) * STEP0 + base
    entry = (slots - pages * entries).to(gl.int32)
    return valid, start + entry * DATA, start + (entries * DATA + entry * SCALES)


# For builds without a device: types of the kernels' arguments, and constants that both forms have.
COUNTS = (
    "T", "H", "width0", "width1", "limit0", "limit1", "stride0", "stride1", "splits", "angles",
)  # fmt: skip
ARGUMENT_TYPES = {
    **dict.fromkeys(("q_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("rows0_ptr", "rows1_ptr"), "*u8"),
    **dict.fromkeys(("list0_ptr", "list1_ptr", "length0_ptr", "length1_ptr"), "*i32"),
    **dict.fromkeys(("sink_ptr", "lse_ptr", "sums_ptr"), "*fp32"),
    "part_ptr": "*fp16",
    "spans_ptr": "*i32",
    "marks_ptr": "*fp32",
    **dict.fromkeys(("scales_ptr", "table_ptr"), "*fp32"),
    "positions_ptr": "*i64",
    **dict.fromkeys((*COUNTS, "q_token", "out_token"), "i32"),
    **dict.fromkeys(("scale", "empty"), "fp32"),
}
_PAGE_BYTES = _LAYOUT.page_stride_bytes(64)
BUILT = {
    "SPLIT": False, "STREAM": False, "COST": 4, "SIZE": 128, "TWO": True,
    "LENGTH0": True, "LENGTH1": True, "PAGE0": 64, "PAGE1": 64,
    "STEP0": _PAGE_BYTES, "STEP1": _PAGE_BYTES, "SINK": True,
    "Q_HEAD": _LAYOUT.channels // 2, "OUT_HEAD": _LAYOUT.channels, "ROPE_DIM": 0,
}  # fmt: skip

"""Tile scheduler of Hopper's decode kernels: which CTA computes which splits of which work tiles.

A *work tile* is one tile of heads of one token, a *split* a range of a work tile's blocks. A
token's blocks are 64 columns of its first list, then 64 columns of its second; at least one, so
that a token without rows gets its zeros. ``config.Schedule`` says how a launch hands out splits:

    Cut.NONE       data-parallel: CTAs take whole work tiles in turn.
    Cut.EVERY      every work tile is cut into the same number of splits, each by its own length;
                   split v belongs to CTA v mod CTAs.
    Cut.TAIL       data-parallel with split tail: whole work tiles as long as there is one for every
                   CTA; the rest is cut as above.
    Cut.STREAM_K   all blocks of all work tiles, in order, plus a fixed cost for each, are cut into
                   one work range for every CTA. A CTA's first and last split may be parts of a
                   work tile; but where cutting costs more than it saves, cuts move to the nearest
                   end of a work tile.
    Cut.BY_BLOCKS  every CTA takes one split at most, of as few blocks as that leaves them: a work
                   tile is cut into as many as its own blocks ask for.

    BY_WIDTH        splits are ranges of the blocks of full lists, so that nothing waits for lengths
                    before it reads the list; ONE_BLOCK: as many splits as there are blocks.
    LONGEST_FIRST   the longest tokens come first, and in every second wave CTAs take them in the
                    opposite order. What is left for the last wave are the shortest, which are cut
                    where that ends sooner: if all are about as long, it does.
    PLANNED         ranges, or the order, are read from a plan that ``plan_work_kernel`` made once
                    for all layers of a step. Lists may be shorter or longer than those that it was
                    made for: a work tile's last split ends where the work tile does.

A plan of an order is the order of tokens, int32 [T], and whether the last wave is better not cut.
Of stream-K it is
    int32 [work tiles + CTAs, 2]   what ``combine_stream_k_kernel`` reads: first and last CTA of
                                   every work tile that is cut; for every CTA the work tile that its
                                   range begins in the middle of, or -1
    int32 [CTAs, 4]                first work tile, splits, first block of the first split, end
                                   block of the last split or 0
and of BY_BLOCKS
    int32 [work tiles, 2]          what ``combine_splits_kernel`` reads: first split, how many
    int32 [CTAs, 4]                as above
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anymla.ops._gluon import aggregate, field, view
from anymla.ops._gluon_ptx import gdc_wait
from anymla.ops.attention.decode_config import AT_ONCE as _AT_ONCE
from anymla.ops.attention.decode_config import KEYS as _KEYS
from anymla.ops.attention.decode_config import LONG_SPLIT as _LONG_SPLIT
from anymla.ops.attention.decode_config import MOST_ORDERED_TOKENS, Cut

KEYS, AT_ONCE, LONG_SPLIT = (gl.constexpr(each) for each in (_KEYS, _AT_ONCE, _LONG_SPLIT))
_NONE = gl.constexpr(int(Cut.NONE))
_TAIL = gl.constexpr(int(Cut.TAIL))
_STREAM_K = gl.constexpr(int(Cut.STREAM_K))
_BY_BLOCKS = gl.constexpr(int(Cut.BY_BLOCKS))
# Units of work, which are blocks and fixed costs, that a CTA of stream-K has at least; fewer CTAs
# work if there are not enough.
_LEAST = gl.constexpr(4)
# What combining costs a CTA, in units.
_COMBINE = gl.constexpr(6)
# A cut so close to a work tile's end moves to the end: splits of a block or less cost more than
# they save.
_SNAP = gl.constexpr(2)
# Of keys that tokens are ordered by.
_TOKENS = gl.constexpr(MOST_ORDERED_TOKENS)
_MOST_BLOCKS = gl.constexpr((1 << 30) // MOST_ORDERED_TOKENS)
# What cutting the last wave costs besides, in units.
_CUTTING = gl.constexpr(5)
RANGE = gl.constexpr(4)  # numbers of a CTA in a plan
# Arguments of the kernels that do not make a specialisation.
COUNTS = (
    "T", "H", "width0", "width1", "limit0", "limit1", "stride0", "stride1", "splits", "angles",
)  # fmt: skip


@aggregate
class Lists:
    """Both lists of all tokens and the caches they point into: pairs, first and second.

    Attributes:
        rows: caches, as bytes.
        slots: int32 [T, .], the lists.
        lengths: int32 [T], columns in use of each list; read if LENGTH0, LENGTH1.
        widths: columns of a list.
        limits: rows that the cache has.
        strides: from one token's list to the next.
        TWO: there is a second list.
        LENGTH0: lists have lengths; LENGTH1 likewise.
        PAGE0: rows of a page; PAGE1 likewise.
        STEP0: bytes from one page to the next; STEP1 likewise.
        CODEC0: how rows are coded, a ``RowCodec``; None for V3.2's; CODEC1 likewise.
        TAIL: the last channels of rows are bfloat16 (V4's).
        FP8: rows of a list are e4m3; FP8_FIRST: those of the first.
        FP4: rows of a list are NVFP4.
    """

    rows: object
    slots: object
    lengths: object
    widths: object
    limits: object
    strides: object
    TWO: gl.constexpr
    LENGTH0: gl.constexpr
    LENGTH1: gl.constexpr
    PAGE0: gl.constexpr
    PAGE1: gl.constexpr
    STEP0: gl.constexpr
    STEP1: gl.constexpr
    CODEC0: gl.constexpr
    CODEC1: gl.constexpr
    TAIL: gl.constexpr
    FP8: gl.constexpr
    FP8_FIRST: gl.constexpr
    FP4: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, rows, slots, lengths, widths, limits, strides,
        TWO, LENGTH0, LENGTH1, PAGE0, PAGE1, STEP0, STEP1, CODEC0=None, CODEC1=None,
    ):  # fmt: skip
        self.rows, self.slots, self.lengths = rows, slots, lengths
        self.widths, self.limits, self.strides = widths, limits, strides
        self.TWO = gl.constexpr(TWO)
        self.LENGTH0 = gl.constexpr(LENGTH0)
        self.LENGTH1 = gl.constexpr(LENGTH1)
        self.PAGE0 = gl.constexpr(PAGE0)
        self.PAGE1 = gl.constexpr(PAGE1)
        self.STEP0 = gl.constexpr(STEP0)
        self.STEP1 = gl.constexpr(STEP1)
        self.CODEC0, self.CODEC1 = gl.constexpr(CODEC0), gl.constexpr(CODEC1)
        codecs = [] if CODEC0 is None else [CODEC0, CODEC1]
        self.TAIL = gl.constexpr(any(each.nope < each.channels for each in codecs))
        fp8 = [each.kind == "split_fp8" for each in codecs]
        self.FP8, self.FP8_FIRST = gl.constexpr(any(fp8)), gl.constexpr(any(fp8[:1]))
        self.FP4 = gl.constexpr(any(each.kind == "row_nvfp4" for each in codecs))


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
    n0 = length_of(lists.lengths[0], token, token >= 0, lists.widths[0], lists.LENGTH0)
    blocks0 = (n0 + KEYS - 1) // KEYS
    n1 = n0 * 0
    if lists.TWO:
        n1 = n1 + length_of(lists.lengths[1], token, token >= 0, lists.widths[1], lists.LENGTH1)
    blocks = gl.maximum(blocks0 + (n1 + KEYS - 1) // KEYS, 1)
    return n0, n1, blocks0, blocks


@gluon.jit
def place_of(k, cta, ctas):
    """Which split of its wave k a CTA takes, if the longest come first."""
    return gl.where(k % 2 == 1, ctas - 1 - cta, cta)


@gluon.jit
def _rank_keys(lists, tokens, T):
    """Numbers that are the larger, the earlier a token is taken: by blocks, then by number."""
    there = tokens < T
    n0 = length_of(lists.lengths[0], tokens, there, lists.widths[0], lists.LENGTH0)
    blocks = tokens * 0 + (n0 + KEYS - 1) // KEYS
    if lists.TWO:
        n1 = length_of(lists.lengths[1], tokens, there, lists.widths[1], lists.LENGTH1)
        blocks = blocks + (n1 + KEYS - 1) // KEYS
    keys = gl.minimum(gl.maximum(blocks, 1), _MOST_BLOCKS) * _TOKENS + (_TOKENS - 1 - tokens)
    return gl.where(there, keys, -1).to(gl.int32)


@gluon.jit
def _better_whole(units, rank, T, splits, ctas, HEAD_TILES: gl.constexpr, COST: gl.constexpr):
    """Whether the work tiles of the last wave had better not be cut, as 0 or 1.

    Args:
        units: of work in each token's work tiles.
        rank: the tokens' places in the order.
        T: tokens.
        splits: of a work tile that is cut.
        ctas: of the launch.
        HEAD_TILES: tiles of heads.
        COST: of a work tile or split besides its blocks.
    """
    work_tiles = T * HEAD_TILES
    late = rank >= work_tiles // ctas * ctas // HEAD_TILES
    total = gl.sum(units, 0) * HEAD_TILES // ctas
    rest = gl.sum(gl.where(late, units, 0), 0) * HEAD_TILES // ctas
    longest = gl.max(units, 0)
    largest = gl.max(gl.where(late, units, 0), 0)
    whole = gl.maximum(longest, total + largest // 2)
    # Work tiles that are all as long end after whole waves.
    equal = longest * T == gl.sum(units, 0)
    whole = gl.where(equal, (work_tiles + ctas - 1) // ctas * longest, whole)
    split = (gl.maximum(largest - COST, 0) + splits - 1) // splits + COST
    return (whole <= gl.maximum(longest, total - rest) + split + _CUTTING).to(gl.int32)


@gluon.jit
def order_tokens(
    lists, order, T, splits, ctas, HEAD_TILES: gl.constexpr, COST: gl.constexpr,
    SIZE: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Write down in which order tokens are taken; every CTA does, and all write the same.

    SIZE: a power of two of at least T, 128 and at most 512. If TAIL, returns, and writes behind
    the order, whether the work tiles of the last wave are better not cut.
    """
    K: gl.constexpr = gl.BlockedLayout([SIZE // 128], [32], [4], [0])
    L: gl.constexpr = gl.BlockedLayout([SIZE // 128, 32], [32, 1], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = gl.allocate_shared_memory(gl.int32, [SIZE], FLAT)
    keys.store(_rank_keys(lists, gl.arange(0, SIZE, layout=K), T))
    chunks = view(keys, gl.int32, [SIZE // 32, 32], FLAT)
    tokens = gl.arange(0, SIZE, layout=gl.SliceLayout(1, L))
    key = _rank_keys(lists, tokens, T)
    own = gl.expand_dims(key, 1)
    rank = tokens * 0
    for chunk in range(0, (T + 31) // 32):
        others = gl.expand_dims(chunks.index(chunk).load(gl.SliceLayout(0, L)), 0)
        rank += gl.sum((others > own).to(gl.int32), 1)
    gl.store(order + rank, tokens, mask=tokens < T)
    if TAIL:
        units = gl.where(key >= 0, key // _TOKENS + COST, 0)
        uncut = _better_whole(units, rank, T, splits, ctas, HEAD_TILES, COST)
        gl.store(order + T, uncut)
        return uncut
    else:
        return T * 0


@aggregate
class WorkRange:
    """The splits of one CTA.

    Attributes:
        first: number of the first split, or of the first work tile (stream-K).
        count: how many splits.
        begin: first block of the first split (stream-K).
        end: end block of the last split, 0 for all of its work tile (stream-K).
        work_tiles: tokens x tiles of heads.
        splits: of a work tile that is cut, or of the first one; 0 if none is cut after all.
        HEAD_TILES: tiles of heads.
        SPLIT: work tiles may be cut.
        PARTLY: some are and some are not, which is known at run time.
        TAIL: data-parallel with split tail.
        PLANNED: see the file, like the others.
        LONGEST_FIRST: likewise.
        order: int32 [T], tokens in the order in which they are taken, if LONGEST_FIRST.
        BY_WIDTH: likewise.
        ONE_BLOCK: likewise.
        BY_BLOCKS: likewise.
    """

    first: gl.tensor
    count: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    work_tiles: gl.tensor
    splits: gl.tensor
    HEAD_TILES: gl.constexpr
    SPLIT: gl.constexpr
    PARTLY: gl.constexpr
    TAIL: gl.constexpr
    PLANNED: gl.constexpr
    LONGEST_FIRST: gl.constexpr
    order: gl.tensor
    BY_WIDTH: gl.constexpr
    ONE_BLOCK: gl.constexpr
    BY_BLOCKS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, first, count, begin, end, work_tiles, splits, HEAD_TILES, SPLIT, PARTLY, TAIL,
        PLANNED, LONGEST_FIRST, order, BY_WIDTH=False, ONE_BLOCK=False, BY_BLOCKS=False,
    ):  # fmt: skip
        self.first = first
        self.count = count
        self.begin = begin
        self.end = end
        self.work_tiles = work_tiles
        self.splits = splits
        self.HEAD_TILES = gl.constexpr(HEAD_TILES)
        self.SPLIT = gl.constexpr(SPLIT)
        self.PARTLY = gl.constexpr(PARTLY)
        self.TAIL = gl.constexpr(TAIL)
        self.PLANNED = gl.constexpr(PLANNED)
        self.LONGEST_FIRST = gl.constexpr(LONGEST_FIRST)
        self.order = order
        self.BY_WIDTH = gl.constexpr(BY_WIDTH)
        self.ONE_BLOCK = gl.constexpr(ONE_BLOCK)
        self.BY_BLOCKS = gl.constexpr(BY_BLOCKS)


@gluon.jit
def _count(total, cta, ctas, LONGEST_FIRST: gl.constexpr):
    """How many of all splits a CTA takes."""
    if LONGEST_FIRST:
        waves = total // ctas
        last = place_of(waves, cta, ctas) < total - waves * ctas
        return waves + last.to(gl.int32)
    else:
        return (total - cta + ctas - 1) // ctas


@gluon.jit
def _even_range(
    work_tiles, splits, order, HEAD_TILES: gl.constexpr, SPLIT: gl.constexpr,
    LONGEST_FIRST: gl.constexpr, BY_WIDTH: gl.constexpr, ONE_BLOCK: gl.constexpr,
):  # fmt: skip
    """Work of this CTA where every work tile has as many splits."""
    total = work_tiles * splits
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    count = _count(total, cta, ctas, LONGEST_FIRST)
    zero = cta * 0
    return WorkRange(
        cta, count, zero, zero, work_tiles, splits, HEAD_TILES, SPLIT, False, False, False,
        LONGEST_FIRST, order, BY_WIDTH, ONE_BLOCK,
    )  # fmt: skip


@gluon.jit
def _tail_range(
    work_tiles, splits, uncut, order, HEAD_TILES: gl.constexpr, LONGEST_FIRST: gl.constexpr
):
    """Work of this CTA where only the last wave is cut; uncut: it is not after all."""
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    whole = work_tiles // ctas * ctas
    if LONGEST_FIRST:
        splits = gl.where(uncut != 0, 0, splits)
    total = whole + (work_tiles - whole) * gl.maximum(splits, 1)
    count = _count(total, cta, ctas, LONGEST_FIRST)
    zero = cta * 0
    return WorkRange(
        cta, count, zero, zero, work_tiles, splits, HEAD_TILES, True, True, True, False,
        LONGEST_FIRST, order,
    )  # fmt: skip


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _cut(place, tokens, ends, cost, blocks, T, uncut, COST: gl.constexpr, HEAD_TILES: gl.constexpr):
    """The work tile and block that a range starting at ``place`` starts with."""
    passed = (ends <= place) & (tokens < T)
    token = gl.sum(passed.to(gl.int32), 0)
    start = gl.max(gl.where(passed, ends, 0), 0)
    here = tokens == token
    units = gl.maximum(gl.sum(gl.where(here, cost, 0), 0), 1)
    most = gl.maximum(gl.sum(gl.where(here, blocks, 0), 0), 1)
    tile = (place - start) // units
    done = place - start - tile * units
    block = gl.minimum(gl.maximum(done - COST, 0), most)
    block = gl.where(block < _SNAP, 0, gl.where(most - block < _SNAP, most, block))
    block = gl.where(uncut, gl.where(done * 2 < units, 0, most), block)
    work_tile = token * HEAD_TILES + tile
    whole = block >= most
    return gl.where(whole, work_tile + 1, work_tile), gl.where(whole, 0, block)


@gluon.jit
def _blocks_of_all(lists, T, SIZE: gl.constexpr):
    """Numbers of SIZE tokens, and the blocks of each, at least one."""
    tokens = gl.arange(0, SIZE, layout=gl.BlockedLayout([SIZE // 128], [32], [4], [0]))
    there = tokens < T
    n0 = length_of(lists.lengths[0], tokens, there, lists.widths[0], lists.LENGTH0)
    blocks = tokens * 0 + (n0 + KEYS - 1) // KEYS
    if lists.TWO:
        n1 = length_of(lists.lengths[1], tokens, there, lists.widths[1], lists.LENGTH1)
        blocks = blocks + (n1 + KEYS - 1) // KEYS
    return tokens, gl.maximum(blocks, 1)


@gluon.jit
def _by_blocks_range(lists, T, HEAD_TILES: gl.constexpr, SIZE: gl.constexpr):
    """Work of this CTA if it has one split at most; SIZE as in ``_stream_k_range``."""
    tokens, blocks = _blocks_of_all(lists, T, SIZE)
    there = tokens < T
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    # The fewest blocks of a split with which there are no more splits than CTAs; and no more of a
    # work tile than are combined at a time, unless they are long.
    most = gl.max(gl.where(there, blocks, 0), 0)
    least = gl.minimum((most + AT_ONCE - 1) // AT_ONCE, LONG_SPLIT)
    while least < most:
        middle = (least + most) // 2
        needed = gl.sum(gl.where(there, (blocks + middle - 1) // middle, 0), 0) * HEAD_TILES
        least = gl.where(needed <= ctas, least, middle + 1)
        most = gl.where(needed <= ctas, middle, most)
    splits = gl.where(there, (blocks + least - 1) // least, 0)
    ends = gl.associative_scan(splits * HEAD_TILES, 0, _add)
    passed = (ends <= cta) & there
    token = gl.sum(passed.to(gl.int32), 0)
    start = gl.max(gl.where(passed, ends, 0), 0)
    here = tokens == token
    own = gl.maximum(gl.sum(gl.where(here, splits, 0), 0), 1)
    each = (gl.sum(gl.where(here, blocks, 0), 0) + own - 1) // own
    tile = (cta - start) // own
    number = cta - start - tile * own
    begin = number * each
    # The last one ends where the work tile does.
    end = gl.where(number + 1 < own, begin + each, 0)
    # One that has none repeats a block for nobody, if it is told so by a plan.
    some = token < T
    count = some.to(gl.int32)
    first = gl.where(some, token * HEAD_TILES + tile, 0)
    begin = gl.where(some, begin, 0)
    end = gl.where(some, end, 1)
    return WorkRange(
        first, count, begin, end, T * HEAD_TILES, own, HEAD_TILES, True, False, False, False,
        False, lists.slots[0], BY_BLOCKS=True,
    )  # fmt: skip


@gluon.jit
def _stream_k_range(lists, T, HEAD_TILES: gl.constexpr, COST: gl.constexpr, SIZE: gl.constexpr):
    """Work of this CTA in stream-K; SIZE is a power of two of at least max(T, 128)."""
    tokens, blocks = _blocks_of_all(lists, T, SIZE)
    cost = gl.where(tokens < T, blocks + COST, 0)
    ends = gl.associative_scan(cost * HEAD_TILES, 0, _add)
    total = gl.max(ends, 0).to(gl.int64)
    # The longest range, if work tiles stay whole and if they are cut.
    ctas = gl.num_programs(0)
    longest = gl.max(cost, 0).to(gl.int64)
    even = total // ctas
    waves = (T * HEAD_TILES + ctas - 1) // ctas
    whole = gl.where(longest * (T * HEAD_TILES) == total, waves * longest, even + longest // 2)
    uncut = whole <= even + (COST + _COMBINE)
    cta = gl.program_id(0)
    working = gl.minimum(ctas, gl.maximum(total // _LEAST, 1))
    low = gl.minimum(cta * total // working, total).to(gl.int32)
    high = gl.minimum((cta + 1) * total // working, total).to(gl.int32)
    first, begin = _cut(low, tokens, ends, cost, blocks, T, uncut, COST, HEAD_TILES)
    last, end = _cut(high, tokens, ends, cost, blocks, T, uncut, COST, HEAD_TILES)
    count = last - first + gl.where(end > 0, 1, 0)
    count = gl.where((first == last) & (begin >= end), 0, count)
    first = gl.where(count > 0, first, 0)
    return WorkRange(
        first, count, begin, end, T * HEAD_TILES, T * 0 + 1, HEAD_TILES, True, True, False, False,
        False, lists.slots[0],
    )  # fmt: skip


@gluon.jit
def _planned_range(plan, T, HEAD_TILES: gl.constexpr):
    """Work of this CTA in a plan of stream-K."""
    work_tiles = T * HEAD_TILES
    at = plan + (work_tiles + gl.num_programs(0)) * 2 + gl.program_id(0) * RANGE
    return WorkRange(
        gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), work_tiles, T * 0 + 1,
        HEAD_TILES, True, True, False, True, False, plan,
    )  # fmt: skip


@gluon.jit
def _planned_split(plan, T, HEAD_TILES: gl.constexpr):
    """Work of this CTA in a plan of BY_BLOCKS, which ``split_at`` reads: nothing waits here."""
    zero = T * 0
    return WorkRange(
        zero, zero + 1, zero, zero, T * HEAD_TILES, zero + 1, HEAD_TILES, True, False, False,
        True, False, plan, BY_BLOCKS=True,
    )  # fmt: skip


@gluon.jit
def work_range(
    lists, T, splits, plan, HEAD_TILES: gl.constexpr, CUT: gl.constexpr,
    LONGEST_FIRST: gl.constexpr, PLANNED: gl.constexpr, BY_WIDTH: gl.constexpr,
    ONE_BLOCK: gl.constexpr, COST: gl.constexpr, SIZE: gl.constexpr,
):  # fmt: skip
    """Work of this CTA; the constants are those of ``config.Schedule``.

    plan: int32; what was planned, or memory for the order of tokens.
    """
    TAIL: gl.constexpr = CUT == _TAIL
    NOW: gl.constexpr = LONGEST_FIRST and not PLANNED
    # Every partition waits for itself, before it reads anything.
    if NOW or CUT == _STREAM_K or (CUT == _BY_BLOCKS and not PLANNED):
        gdc_wait(WARPGROUP=True)
    uncut = T * 0
    if NOW:
        ctas = gl.num_programs(0)
        uncut = order_tokens(lists, plan, T, splits, ctas, HEAD_TILES, COST, SIZE, TAIL)
    if TAIL:
        if LONGEST_FIRST and PLANNED:
            gdc_wait(WARPGROUP=True)
            uncut = gl.load(plan + T)
        return _tail_range(T * HEAD_TILES, splits, uncut, plan, HEAD_TILES, LONGEST_FIRST)
    elif CUT == _STREAM_K:
        if PLANNED:
            return _planned_range(plan, T, HEAD_TILES)
        else:
            return _stream_k_range(lists, T, HEAD_TILES, COST, SIZE)
    elif CUT == _BY_BLOCKS:
        if PLANNED:
            return _planned_split(plan, T, HEAD_TILES)
        else:
            return _by_blocks_range(lists, T, HEAD_TILES, SIZE)
    else:
        return _even_range(
            T * HEAD_TILES, splits, plan, HEAD_TILES, CUT != _NONE, LONGEST_FIRST, BY_WIDTH,
            ONE_BLOCK,
        )  # fmt: skip


@aggregate
class Split:
    """A split: blocks first .. last - 1 of a work tile.

    Attributes:
        token: of the work tile.
        tile: of heads.
        n0: columns in use of the token's first list.
        n1: of its second.
        blocks0: blocks of the first list, which come first.
        first: block.
        last: block, exclusive.
        whole: the split is its work tile and writes the result; else it stores a partial.
        slot: of the partial.
        number: of the split among all of the launch.
    """

    token: gl.tensor
    tile: gl.tensor
    n0: gl.tensor
    n1: gl.tensor
    blocks0: gl.tensor
    first: gl.tensor
    last: gl.tensor
    whole: object
    slot: gl.tensor
    number: gl.tensor

    @gluon.constexpr_function
    def __init__(self, token, tile, n0, n1, blocks0, first, last, whole, slot, number):
        self.token, self.tile = token, tile
        self.n0, self.n1, self.blocks0 = n0, n1, blocks0
        self.first, self.last, self.whole = first, last, field(whole)
        self.slot, self.number = slot, number


@gluon.jit
def split_at(k, work, lists):
    """Split k of the CTA."""
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    if work.TAIL:
        number = work.first + k * ctas
        if work.LONGEST_FIRST:
            number = k * ctas + place_of(k, cta, ctas)
        uncut = work.work_tiles // ctas * ctas
        whole = number < uncut
        slot = number - uncut
        if work.LONGEST_FIRST:
            whole = whole | (work.splits == 0)
        splits = gl.maximum(work.splits, 1)
        work_tile = gl.where(whole, number, uncut + slot // splits)
        token = work_tile // work.HEAD_TILES
        if work.LONGEST_FIRST:
            token = gl.load(work.order + token)
        n0, n1, blocks0, blocks = counts(lists, token)
        each = gl.where(whole, blocks, (blocks + splits - 1) // splits)
        first = gl.where(whole, 0, (slot - (work_tile - uncut) * splits) * each)
        last = gl.maximum(gl.minimum(blocks, first + each), first + 1)
    elif work.PARTLY:
        work_tile = work.first + k
        token = work_tile // work.HEAD_TILES
        n0, n1, blocks0, blocks = counts(lists, token)
        first = gl.where(k == 0, work.begin, 0)
        cut = (k + 1 == work.count) & (work.end > 0)
        last = gl.where(cut, work.end, blocks)
        if work.PLANNED:
            last = gl.maximum(gl.minimum(last, blocks), first + 1)
        whole = (first == 0) & ~cut
        slot = gl.where(first > 0, ctas + cta, cta)
        number = gl.where(first > 0, work.work_tiles + cta, work_tile)
    elif work.BY_BLOCKS:
        work_tile, first, end = work.first + k, work.begin, work.end
        if work.PLANNED:
            at = work.order + work.work_tiles * 2 + cta * RANGE
            work_tile, first, end = gl.load(at), gl.load(at + 2), gl.load(at + 3)
        token = work_tile // work.HEAD_TILES
        n0, n1, blocks0, blocks = counts(lists, token)
        last = gl.where(end > 0, gl.minimum(end, blocks), blocks)
        last = gl.maximum(last, first + 1)
        slot = cta + k
        whole = False
        number = slot
    elif work.SPLIT:
        slot = work.first + k * ctas
        work_tile = slot // work.splits
        token = work_tile // work.HEAD_TILES
        n0, n1, blocks0, blocks = counts(lists, token)
        first = slot - work_tile * work.splits
        # A split without blocks still takes one, whose columns are past the end of the lists.
        if work.BY_WIDTH:
            wide0 = blocks0 * 0 + (lists.widths[0] + KEYS - 1) // KEYS
            end = gl.where(n1 > 0, wide0 + (n1 + KEYS - 1) // KEYS, blocks0)
            blocks0 = wide0
            if work.ONE_BLOCK:
                last = first + 1
            else:
                wide = wide0
                if lists.TWO:
                    wide = wide + (lists.widths[1] + KEYS - 1) // KEYS
                each = (gl.maximum(wide, 1) + work.splits - 1) // work.splits
                first = first * each
                last = gl.maximum(gl.minimum(end, first + each), first + 1)
        else:
            each = (blocks + work.splits - 1) // work.splits
            first = first * each
            last = gl.maximum(gl.minimum(blocks, first + each), first + 1)
        whole = False
        number = slot
    else:
        slot = work.first + k * ctas
        if work.LONGEST_FIRST:
            slot = k * ctas + place_of(k, cta, ctas)
        work_tile = slot
        token = work_tile // work.HEAD_TILES
        if work.LONGEST_FIRST:
            token = gl.load(work.order + token)
        n0, n1, blocks0, blocks = counts(lists, token)
        first = slot * 0
        last = blocks
        whole = True
        number = slot
    tile = work_tile % work.HEAD_TILES
    return Split(token, tile, n0, n1, blocks0, first, last, whole, slot, number)


@gluon.jit
def record_begin(spans_ptr, work):
    """Tell the combine which work tile the CTA's range begins in the middle of, if any."""
    if work.PARTLY and not (work.TAIL or work.PLANNED):
        inside = (work.begin > 0) & (work.count > 0)
        at = spans_ptr + (work.work_tiles + gl.program_id(0)) * 2
        gl.store(at, gl.where(inside, work.first, -1))
    if work.BY_BLOCKS and not work.PLANNED:
        _record_splits(spans_ptr, work)


@gluon.jit
def _record_splits(spans_ptr, work):
    """Tell the combine which splits a work tile has; the CTA with the first of them does."""
    starts = (work.count > 0) & (work.begin == 0)
    gl.store(spans_ptr + work.first * 2, gl.program_id(0), mask=starts)
    gl.store(spans_ptr + work.first * 2 + 1, work.splits, mask=starts)


@gluon.jit
def record_span(spans_ptr, work_tile, split, lists, work):
    """Tell the combine which CTAs have the first and the last split of a work tile."""
    if not work.PLANNED:
        _, _, _, blocks = counts(lists, split.token)
        if split.first == 0:
            gl.store(spans_ptr + work_tile * 2, gl.program_id(0))
        if split.last == blocks:
            gl.store(spans_ptr + work_tile * 2 + 1, gl.program_id(0))


@gluon.jit(do_not_specialize=("T", "width0", "width1", "splits", "ctas"))
def plan_work_kernel(
    length0_ptr, length1_ptr, plan_ptr, T, width0, width1, splits, ctas,
    HEAD_TILES: gl.constexpr, COST: gl.constexpr, SIZE: gl.constexpr, TWO: gl.constexpr,
    LENGTH0: gl.constexpr, LENGTH1: gl.constexpr, LONGEST_FIRST: gl.constexpr,
    BY_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Make a plan; grid: the CTAs of the decode kernel, or one for the order. See the file."""
    lengths, widths = (length0_ptr, length1_ptr), (width0, width1)
    lists = Lists(
        lengths, lengths, lengths, widths, widths, widths, TWO, LENGTH0, LENGTH1, 1, 1, 0, 0
    )
    if LONGEST_FIRST:
        order_tokens(lists, plan_ptr, T, splits, ctas, HEAD_TILES, COST, SIZE, True)
    elif BY_BLOCKS:
        work = _by_blocks_range(lists, T, HEAD_TILES, SIZE)
        _record_splits(plan_ptr, work)
        _store_range(plan_ptr + work.work_tiles * 2, work)
    else:
        _plan_stream_k(lists, plan_ptr, T, HEAD_TILES, COST, SIZE)


@gluon.jit
def _plan_stream_k(
    lists, plan_ptr, T, HEAD_TILES: gl.constexpr, COST: gl.constexpr, SIZE: gl.constexpr
):
    work = _stream_k_range(lists, T, HEAD_TILES, COST, SIZE)
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    inside = (work.begin > 0) & (work.count > 0)
    gl.store(plan_ptr + (work.work_tiles + cta) * 2, gl.where(inside, work.first, -1))
    # The last split starts its work tile and does not end it; the first ends its work tile, having
    # begun elsewhere.
    starts = (work.end > 0) & ((work.count > 1) | (work.begin == 0)) & (work.count > 0)
    ends = inside & ((work.count > 1) | (work.end == 0))
    gl.store(plan_ptr + (work.first + work.count - 1) * 2, cta, mask=starts)
    gl.store(plan_ptr + work.first * 2 + 1, cta, mask=ends)
    _store_range(plan_ptr + (work.work_tiles + ctas) * 2, work)


@gluon.jit
def _store_range(ranges_ptr, work):
    at = ranges_ptr + gl.program_id(0) * RANGE
    gl.store(at, work.first)
    gl.store(at + 1, work.count)
    gl.store(at + 2, work.begin)
    gl.store(at + 3, work.end)

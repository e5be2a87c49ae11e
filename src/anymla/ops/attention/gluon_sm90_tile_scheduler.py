"""Tile scheduler of Hopper's decode kernels, which assigns splits of work tiles to CTAs.

A *work tile* is one tile of heads of one token, and a *split* is a range of a work tile's blocks. A
token's blocks are 64 columns each of its first list, then of its second. There is at least one, so
that a token without rows gets its zeros. ``config.Schedule`` says how a launch hands out splits:

    Cut.NONE       data-parallel: CTAs take whole work tiles in turn.
    Cut.EVERY      every work tile is cut into the same number of splits, each by its own length;
                   split v belongs to CTA v mod CTAs.
    Cut.TAIL       data-parallel with split tail: work tiles stay whole as long as there is one for
                   every CTA; the rest is cut as in Cut.EVERY.
    Cut.STREAM_K   all blocks of all work tiles, in order, plus a fixed cost for each work tile, are
                   cut into one work range per CTA. A CTA's first and last split may be parts of a
                   work tile; but where cutting costs more than it saves, cuts move to the nearest
                   end of a work tile.
    Cut.BY_BLOCKS  every CTA takes at most one split. Splits have as few blocks as the number of
                   CTAs permits, and a work tile is cut into as many as its own blocks need.

    BY_WIDTH        splits are ranges of the blocks of full lists, so that nothing waits for lengths
                    before it reads the list. With ONE_BLOCK there are as many splits as blocks.
    LONGEST_FIRST   the longest tokens come first, and in every second wave CTAs take them in the
                    opposite order. The shortest are left for the last wave, which is cut only where
                    that ends sooner, as when all tokens are about as long.
    PLANNED         ranges, or the order, are read from a plan that ``plan_work_kernel`` made once
                    for all layers of a step. Lists may be shorter or longer than those that it was
                    made for: a work tile's last split ends where the work tile does.

A plan of an order is int32 [T], the order of tokens, and one more number, 1 if the last wave is
better not cut. A plan of stream-K is
    int32 [work tiles + CTAs, 2]   read by ``combine_stream_k_kernel``: first and last CTA of every
                                   work tile that is cut; for every CTA the work tile in whose
                                   middle its range begins, or -1
    int32 [CTAs, 4]                first work tile, number of splits, first block of the first
                                   split, end block of the last split or 0
and a plan of BY_BLOCKS is
    int32 [work tiles, 2]          read by ``combine_splits_kernel``: first split, number of splits
    int32 [CTAs, 4]                the four numbers of stream-K
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
# Least work of a CTA of stream-K, in units of one block; fewer CTAs work if there is not enough.
_LEAST = gl.constexpr(4)
# Cost of combining for a CTA, in units of one block.
_COMBINE = gl.constexpr(6)
# A cut this many blocks or fewer from a work tile's end moves to the end: such short splits cost
# more than they save.
_SNAP = gl.constexpr(2)
# Tokens are ordered by keys of blocks * _TOKENS + place, which must fit 31 bits.
_TOKENS = gl.constexpr(MOST_ORDERED_TOKENS)
_MOST_BLOCKS = gl.constexpr((1 << 30) // MOST_ORDERED_TOKENS)
# Fixed cost of cutting the last wave, in units of one block.
_CUTTING = gl.constexpr(5)
RANGE = gl.constexpr(4)  # numbers per CTA in a plan
# Arguments for which the kernels are not specialised.
COUNTS = (
    "T", "H", "width0", "width1", "limit0", "limit1", "stride0", "stride1", "splits", "angles",
)  # fmt: skip


@aggregate
class Lists:
    """Both lists of all tokens and the caches they point into, as pairs of first and second.

    Attributes:
        rows: both caches as bytes.
        slots: int32 [T, columns] of each list, slots of its cache.
        lengths: int32 [T], columns in use of each list; read if LENGTH0, LENGTH1.
        widths: number of columns of each list.
        limits: number of rows in each cache.
        strides: elements from one token's list to the next.
        TWO: True if there is a second list.
        LENGTH0: True if the first list has lengths.
        LENGTH1: True if the second list has lengths.
        PAGE0: rows per page of the first cache.
        PAGE1: rows per page of the second cache.
        STEP0: bytes from one page of the first cache to the next.
        STEP1: bytes from one page of the second cache to the next.
        CODEC0: ``RowCodec`` of the first cache's rows; None for V3.2's rows.
        CODEC1: ``RowCodec`` of the second cache's rows, or None.
        TAIL: True if the last channels of rows are bfloat16 (V4).
        FP8: True if rows of either list are e4m3.
        FP8_FIRST: True if rows of the first list are e4m3.
        FP4: True if rows of either list are NVFP4.
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
    """Return the columns in use of a token's list: its length if GIVEN, else its whole width."""
    if GIVEN:
        return gl.minimum(gl.maximum(gl.load(lengths + token, mask=there, other=0), 0), width)
    else:
        return width


@gluon.jit
def counts(lists, token):
    """Return the columns in use of a token's two lists, and the blocks of the first and of both."""
    n0 = length_of(lists.lengths[0], token, token >= 0, lists.widths[0], lists.LENGTH0)
    blocks0 = (n0 + KEYS - 1) // KEYS
    n1 = n0 * 0
    if lists.TWO:
        n1 = n1 + length_of(lists.lengths[1], token, token >= 0, lists.widths[1], lists.LENGTH1)
    blocks = gl.maximum(blocks0 + (n1 + KEYS - 1) // KEYS, 1)
    return n0, n1, blocks0, blocks


@gluon.jit
def place_of(k, cta, ctas):
    """Return which split of its wave k a CTA takes if the longest tokens come first."""
    return gl.where(k % 2 == 1, ctas - 1 - cta, cta)


@gluon.jit
def _rank_keys(lists, tokens, T):
    """Compute sort keys, larger for tokens taken earlier: by blocks, then by lower number."""
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
    """Estimate whether to leave the work tiles of the last wave uncut; return 1 if so, else 0.

    Args:
        units: work in each work tile of each token, in units of one block.
        rank: place of each token in the order.
        T: number of tokens.
        splits: number of splits of a cut work tile.
        ctas: number of CTAs launched.
        HEAD_TILES: number of head tiles per token.
        COST: fixed cost of a work tile or split, in units of one block.
    """
    work_tiles = T * HEAD_TILES
    late = rank >= work_tiles // ctas * ctas // HEAD_TILES
    total = gl.sum(units, 0) * HEAD_TILES // ctas
    rest = gl.sum(gl.where(late, units, 0), 0) * HEAD_TILES // ctas
    longest = gl.max(units, 0)
    largest = gl.max(gl.where(late, units, 0), 0)
    whole = gl.maximum(longest, total + largest // 2)
    # If all work tiles are equally long, they end after whole waves.
    equal = longest * T == gl.sum(units, 0)
    whole = gl.where(equal, (work_tiles + ctas - 1) // ctas * longest, whole)
    split = (gl.maximum(largest - COST, 0) + splits - 1) // splits + COST
    return (whole <= gl.maximum(longest, total - rest) + split + _CUTTING).to(gl.int32)


@gluon.jit
def order_tokens(
    lists, order, T, splits, ctas, HEAD_TILES: gl.constexpr, COST: gl.constexpr,
    SIZE: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Write the order in which tokens are taken; every CTA writes the same.

    SIZE is a power of two of at least T, from 128 to 512. With TAIL, return, and write behind the
    order, 1 if the work tiles of the last wave are better not cut.
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
    """All splits of one CTA; names in capitals are explained at the top of the file.

    Attributes:
        first: number of the first split, or of the first work tile (stream-K).
        count: number of splits of this CTA.
        begin: first block of the first split (stream-K).
        end: end block of the last split, 0 for all of its work tile (stream-K).
        work_tiles: number of work tiles, tokens x head tiles.
        splits: number of splits of a work tile that is cut, or of the first one; 0 if none is cut
            after all.
        HEAD_TILES: number of head tiles per token.
        SPLIT: True if work tiles may be cut.
        PARTLY: True if the cut work tiles are known only at run time.
        TAIL: True for data-parallel with split tail.
        PLANNED: True if ranges or the order come from a plan.
        LONGEST_FIRST: True if CTAs take the longest tokens first.
        order: int32 [T], order in which tokens are taken if LONGEST_FIRST.
        BY_WIDTH: True if splits are those of full lists.
        ONE_BLOCK: True if every split is one block.
        BY_BLOCKS: True if a CTA has one split at most.
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
    """Count the splits that a CTA takes out of ``total``."""
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
    """Compute this CTA's work where every work tile has the same number of splits."""
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
    """Compute this CTA's work where only the last wave is cut, or nothing if ``uncut`` is not 0."""
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
    """Return the work tile and the block at which a range that starts at ``place`` begins."""
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
    """Return numbers of SIZE tokens, and the blocks of each, at least one."""
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
    """Compute this CTA's work if it has at most one split; SIZE is that of ``_stream_k_range``."""
    tokens, blocks = _blocks_of_all(lists, T, SIZE)
    there = tokens < T
    cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    # Search for the fewest blocks per split with which there are no more splits than CTAs. A work
    # tile has no more splits than are combined at a time, unless its splits are long.
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
    # The last split ends where the work tile does.
    end = gl.where(number + 1 < own, begin + each, 0)
    # A CTA without a split would repeat a block that nobody uses, if a plan told it to.
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
    """Compute this CTA's work in stream-K; SIZE is a power of two of at least max(T, 128)."""
    tokens, blocks = _blocks_of_all(lists, T, SIZE)
    cost = gl.where(tokens < T, blocks + COST, 0)
    ends = gl.associative_scan(cost * HEAD_TILES, 0, _add)
    total = gl.max(ends, 0).to(gl.int64)
    # Compare the longest range if work tiles stay whole with that if they are cut.
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
    """Read this CTA's work from a plan of stream-K."""
    work_tiles = T * HEAD_TILES
    at = plan + (work_tiles + gl.num_programs(0)) * 2 + gl.program_id(0) * RANGE
    return WorkRange(
        gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), work_tiles, T * 0 + 1,
        HEAD_TILES, True, True, False, True, False, plan,
    )  # fmt: skip


@gluon.jit
def _planned_split(plan, T, HEAD_TILES: gl.constexpr):
    """Leave this CTA's work in a plan of BY_BLOCKS to ``split_at``, so that nothing waits here."""
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
    """Compute this CTA's work; the constants are those of ``config.Schedule``.

    ``plan`` is int32, a plan or memory for the order of tokens.
    """
    TAIL: gl.constexpr = CUT == _TAIL
    NOW: gl.constexpr = LONGEST_FIRST and not PLANNED
    # Each partition does its own PDL wait before it reads anything.
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
    """Blocks ``first`` to ``last`` - 1 of a work tile.

    Attributes:
        token: token of the work tile.
        tile: head tile of the work tile.
        n0: columns in use of the token's first list.
        n1: columns in use of its second list.
        blocks0: number of blocks of the first list, which come first.
        first: index of the first block.
        last: index behind the last block.
        whole: True if the split is its whole work tile and writes the result; else it stores a
            partial.
        slot: slot at which its partial is stored.
        number: number of the split among all of the launch.
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
    """Return split k of this CTA."""
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
        # A split without blocks still computes one, whose columns are past the end of the lists.
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
    """Tell the combine in the middle of which work tile the CTA's range begins, if it does."""
    if work.PARTLY and not (work.TAIL or work.PLANNED):
        inside = (work.begin > 0) & (work.count > 0)
        at = spans_ptr + (work.work_tiles + gl.program_id(0)) * 2
        gl.store(at, gl.where(inside, work.first, -1))
    if work.BY_BLOCKS and not work.PLANNED:
        _record_splits(spans_ptr, work)


@gluon.jit
def _record_splits(spans_ptr, work):
    """Tell the combine the splits of a work tile, if this CTA has the first of them."""
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
    """Make a plan, on a grid like that of the decode kernel, or of one CTA for an order."""
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

"""Every choice of sparse attention's kernels, as pure functions of shapes and the machine.

``choose_schedule`` serves Hopper's kernels (Gluon): it chooses the tile of heads and the way in
which work is cut. It takes the schedule that should end first: ``TIMES`` holds the time of a split
and of a block for each tile, and ``predicted_us`` counts the rest. The lists' lengths lie on the
device and are not known here; the kernels cut every token's own blocks.
``gluon_sm90_tile_scheduler`` defines the ways to cut. ``choose_tile`` and ``choose_splits`` serve
the portable kernels (Triton).

Numbers below were measured on an H200 unless they say otherwise; shapes are heads, tokens, columns
of both lists. Sections are those of docs/performance/sparse_attention.md.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterator

from anymla.ops.device import Target

# Hopper ------------------------------------------------------------------------------------------

KEYS = 64  # listed rows in one block

# With at most this many heads, keys are the rows of the matrix products (swap_ab); with more, heads
# are (m64). 17 to 32 heads may use either ("Two kernels").
SWAP_AB_HEADS = 32
# Cost of starting and ending a work tile that stream-K reckons with, in blocks.
TILE_COST = 4
MOST_STREAM_K_TOKENS = 2048
# Each CTA orders tokens by comparing every token with every other, so their number is limited. For
# 128 heads and 64 requests of two queries with lengths up to 1,024, tokens in their given order
# take 92 us and the longest first 65 us ("Cutting the work").
MOST_ORDERED_TOKENS = 512
# Blocks in one split of a batch-invariant call, and the largest number of splits.
_INVARIANT_BLOCKS = 4
_MOST_INVARIANT = 8

M64 = 64  # heads in a tile of the m64 kernel
# Registers per thread; consumer warpgroup 0 gets the rest of 512 (m64) or of 512 / 2 (swap_ab).
CONSUMER1_REGISTERS = 160
M64_PRODUCER_REGISTERS = 72
SWAP_AB_PRODUCER_REGISTERS = 136
# Number of row blocks that shared memory buffers, by heads in a tile. A third fits with 16 heads.
SWAP_AB_BUFFERS = {16: 3, 32: 2}


@dataclasses.dataclass(frozen=True)
class TileTimes:
    """Measured times in microseconds of the parts of a call with one tile size; a call adds them.

    Attributes:
        start: fixed time of every call.
        split: time to start and end a split, or a work tile that is not cut.
        block: time for one block of 64 rows.
        partly: time added to each split when only some work tiles are cut.
        combine: fixed time of the combine kernel.
        partial: time to combine one head of one split.
        many: time added when a work tile has more than ``AT_ONCE`` splits.
        by_width: time saved when splits follow list width and the kernel need not read lengths.
        one_block: time saved instead of ``by_width`` when every such split is one block.
        stream_k: time added by stream-K, whose combine launches a CTA per two heads of every CTA.
    """

    start: float
    split: float
    block: float
    partly: float
    combine: float
    partial: float
    many: float
    by_width: float
    one_block: float
    stream_k: float


# Fitted by least squares over 1,357 schedules of 172 shapes, 144 of them random, from the blocks of
# the busiest CTA; the fits are off by 7, 3 and 5 % ("The choice by times").
TIMES = {
    16: TileTimes(1.9, 2.1, 1.79, 1.3, 1.3, 0.0015, 1.9, 0.7, 1.1, 0.7),
    32: TileTimes(3.1, 2.4, 2.65, 3.0, 1.6, 0.0009, 1.6, 0.2, 2.6, 0.0),
    64: TileTimes(1.3, 4.6, 2.30, 2.6, 0.5, 0.0006, 2.0, 0.0, 0.8, 3.6),
}
# Partials that a combine reads at once.
AT_ONCE = 16
# Time of a kernel that works out ranges or the order itself, and the estimated time of one that
# reads its split from a plan.
_UNPLANNED_US, _PLANNED_US = 3.5, 0.7
# Assumed share of calls whose lists with lengths are full; in the others lengths are taken to be
# uniform from 0 to the width.
_FULL = 0.35
# Lists of at most this many blocks are windows, which are full.
_WINDOW_BLOCKS = 2
# Number of tokens that stand for all, and standard deviations by which the largest of 132 sums
# exceeds their mean.
_SAMPLES, _WORST = 32, 2.4
# A split of BY_BLOCKS has at least the blocks that leave a work tile ``AT_ONCE`` splits, but need
# not have more than this many.
LONG_SPLIT = 4


class Cut(enum.IntEnum):
    """Ways to cut work tiles into splits, defined in ``gluon_sm90_tile_scheduler``."""

    NONE = 0
    EVERY = 1
    TAIL = 2
    STREAM_K = 3
    BY_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Parameters of a launch on Hopper.

    Attributes:
        heads: heads in a tile: 16 or 32 (swap_ab), or 64 (m64).
        head_tiles: number of head tiles per token.
        ctas: number of CTAs launched.
        splits: number of splits of a cut work tile, 1 if none is cut; with BY_BLOCKS the largest
            number that any work tile may have.
        cut: rule that selects the work tiles to cut.
        longest_first: True if CTAs take the tokens with the longest lists first.
        planned: True if a plan made once for all layers of a step holds the ranges or the order.
        by_width: True if splits are those of full lists, so that the kernel need not wait for
            lengths.
        one_block: True if ``by_width`` and every split is one block.
        invariant: True if results must not depend on the other tokens of the call.
    """

    heads: int
    head_tiles: int
    ctas: int
    splits: int = 1
    cut: Cut = Cut.NONE
    longest_first: bool = False
    planned: bool = False
    by_width: bool = False
    one_block: bool = False
    invariant: bool = False

    @property
    def combined(self) -> bool:
        """True if every work tile is cut, so that only the combine kernel writes heads."""
        return self.cut in (Cut.EVERY, Cut.BY_BLOCKS)

    def first_cut(self, tokens: int) -> int:
        """Return the index of the first work tile that is cut; all before it are whole."""
        return tokens * self.head_tiles // self.ctas * self.ctas if self.cut == Cut.TAIL else 0

    def split_count(self, tokens: int) -> int:
        """Return how many split numbers a launch over ``tokens`` tokens uses."""
        work_tiles, whole = tokens * self.head_tiles, self.first_cut(tokens)
        if self.cut == Cut.STREAM_K:
            return work_tiles + self.ctas
        if self.cut == Cut.BY_BLOCKS:
            return self.ctas
        return whole + (work_tiles - whole) * self.splits

    def slots(self, tokens: int) -> int:
        """Return how many partials a launch over ``tokens`` tokens needs memory for."""
        if self.cut == Cut.NONE:
            return 1
        if self.cut == Cut.STREAM_K:
            return 2 * self.ctas
        return self.split_count(tokens) - self.first_cut(tokens)

    def seen_tokens(self, tokens: int) -> int:
        """Return the number of tokens that every CTA examines, rounded up to a compiled size."""
        if self.cut in (Cut.STREAM_K, Cut.BY_BLOCKS) and not self.planned:
            return stream_k_size(tokens)
        if self.longest_first and not self.planned:
            return 256 if tokens <= 256 else MOST_ORDERED_TOKENS
        return 128

    def query_by_tma(self, v32: bool) -> bool:
        """True if TMA may load the queries of tiles of 64 heads.

        With two head tiles and only the tail cut, loading by TMA takes 8 % longer.
        """
        return not (v32 or (self.cut == Cut.TAIL and self.head_tiles > 1))


def stream_k_size(tokens: int) -> int:
    """Round the number of tokens that CTAs of stream-K examine up to 128, 512 or 2,048."""
    if tokens <= 128:
        return 128
    return 512 if tokens <= 512 else MOST_STREAM_K_TOKENS


def tile_heads(heads: int) -> int:
    """Return the smallest number of heads in a tile that suits ``heads``: 16, 32 or 64."""
    if heads > SWAP_AB_HEADS:
        return M64
    return 16 if heads <= 16 else 32


def blocks_of(widths: tuple[int, ...]) -> int:
    """Count the blocks of a token whose lists of these widths are full; at least one."""
    return max(1, sum(-(-width // KEYS) for width in widths))


@functools.lru_cache(4096)
def choose_schedule(
    tokens: int,
    heads: int,
    widths: tuple[int, ...],
    sm_count: int,
    *,
    lengths: bool = False,
    batch_invariant: bool = False,
    planned: bool = False,
    v32: bool = False,
) -> Schedule:
    """Choose the schedule of a call on Hopper that should end first.

    Args:
        tokens: number of query tokens T, at least 1.
        heads: query heads H, at least 1.
        widths: columns of each list.
        sm_count: number of SMs on the device.
        lengths: True if the lists have lengths of their own.
        batch_invariant: True to cut a token the same way in any batch.
        planned: True if a plan made by ``sparse_attention_plan`` holds, or can hold, the ranges or
            the order.
        v32: True for V3.2's rows, which only tiles of 64 heads read, by producers that wait for
            the lengths in any case.
    """
    blocks = blocks_of(widths)
    if batch_invariant:
        tile = tile_heads(heads)
        head_tiles = -(-heads // tile)
        work_tiles = tokens * head_tiles
        splits = min(_MOST_INVARIANT, -(-blocks // _INVARIANT_BLOCKS))
        ctas = min(work_tiles * splits, sm_count)
        cut = Cut.EVERY if splits > 1 else Cut.NONE
        return Schedule(tile, head_tiles, ctas, splits, cut, invariant=True)
    some = list(
        schedules(tokens, heads, blocks, sm_count, lengths=lengths, planned=planned, v32=v32)
    )
    full, ragged = (blocks,), _ragged(tokens, widths)
    took = [predicted_us(each, tokens, heads, blocks, full) for each in some]
    score = [us / min(took) for us in took]
    if lengths and blocks > _WINDOW_BLOCKS:
        took = [predicted_us(each, tokens, heads, blocks, ragged) for each in some]
        least = min(took)
        score = [_FULL * a + (1 - _FULL) * us / least for a, us in zip(score, took, strict=True)]
    return some[score.index(min(score))]


def schedules(
    tokens: int,
    heads: int,
    blocks: int,
    sm_count: int,
    *,
    lengths: bool = False,
    planned: bool = False,
    v32: bool = False,
) -> Iterator[Schedule]:
    """Yield the candidates of ``choose_schedule`` for full lists of ``blocks`` blocks a token."""
    for tile in TIMES:
        head_tiles = -(-heads // tile)
        work_tiles = tokens * head_tiles
        if (v32 and tile < M64) or (head_tiles > 1 and tile < M64 and work_tiles > sm_count):
            continue
        whole = [Schedule(tile, head_tiles, min(work_tiles, sm_count))]
        rest = work_tiles % sm_count
        if work_tiles > sm_count and rest:
            for splits in _counts(blocks, min(sm_count // rest, blocks)):
                whole.append(dataclasses.replace(whole[0], splits=splits, cut=Cut.TAIL))
        yield from whole
        if lengths and work_tiles > sm_count and tokens <= MOST_ORDERED_TOKENS:
            for each in whole:
                yield dataclasses.replace(each, longest_first=True, planned=planned)
        for splits in _counts(blocks, min(sm_count // work_tiles, blocks)):
            cut = Schedule(tile, head_tiles, work_tiles * splits, splits, Cut.EVERY)
            yield cut
            if splits == blocks:
                yield dataclasses.replace(cut, by_width=True, one_block=True)
            elif not v32:
                yield dataclasses.replace(cut, by_width=True)
        if work_tiles <= sm_count and lengths:
            most = min(blocks, max(AT_ONCE, -(-blocks // LONG_SPLIT)), sm_count)
            yield Schedule(tile, head_tiles, sm_count, most, Cut.BY_BLOCKS, planned=planned)
        if tokens <= MOST_STREAM_K_TOKENS and work_tiles * blocks > sm_count:
            own = lengths and planned
            yield Schedule(tile, head_tiles, sm_count, cut=Cut.STREAM_K, planned=own)


def _counts(blocks: int, most: int) -> Iterator[int]:
    """Yield up to three numbers of splits, at most ``most``, that leave no split without blocks."""
    for _ in range(3):
        if most < 2:
            return
        longest = -(-blocks // most)
        splits = -(-blocks // longest)
        yield splits
        most = min(splits - 1, splits * 3 // 4)


def least_blocks(longest: int) -> int:
    """Return the fewest blocks in a BY_BLOCKS split when the longest token has ``longest``."""
    return min(-(-longest // AT_ONCE), LONG_SPLIT)


def _ragged(tokens: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    """List blocks of sample tokens, the longest first, whose last lists vary evenly in length."""
    count = min(tokens, _SAMPLES)
    whole = sum(-(-width // KEYS) for width in widths[:-1])
    return tuple(
        max(1, whole + -(-(widths[-1] * number) // (KEYS * (count + 1))))
        for number in range(count, 0, -1)
    )


def predicted_us(
    schedule: Schedule, tokens: int, heads: int, blocks: int, sample: tuple[int, ...]
) -> float:
    """Predict the time of a call in microseconds from ``TIMES``.

    Args:
        schedule: schedule to be judged.
        tokens: number of query tokens T.
        heads: query heads H.
        blocks: blocks per token when its lists are full.
        sample: blocks of each sample token, the longest first.
    """
    times, cut = TIMES[schedule.heads], schedule.cut
    splits, walked, partials = _load(schedule, tokens, blocks, sample)
    us = times.start + splits * times.split + walked * times.block
    if cut in (Cut.TAIL, Cut.STREAM_K):
        us += splits * times.partly
    if cut != Cut.NONE:
        us += times.combine + partials * min(heads, schedule.heads) * times.partial
        us += times.many * (schedule.splits > AT_ONCE)
    if cut == Cut.STREAM_K:
        us += times.stream_k
    if schedule.by_width:
        us -= times.one_block if schedule.one_block else times.by_width
    if schedule.planned:
        return us + _PLANNED_US * (cut == Cut.BY_BLOCKS)
    shared_out = schedule.longest_first or cut in (Cut.STREAM_K, Cut.BY_BLOCKS)
    return us + _UNPLANNED_US * shared_out


def _load(
    schedule: Schedule, tokens: int, blocks: int, sample: tuple[int, ...]
) -> tuple[float, float, float]:
    """Return splits and blocks of the busiest CTA, and the number of partials to combine."""
    ctas, cut, most = schedule.ctas, schedule.cut, schedule.splits
    work_tiles = tokens * schedule.head_tiles
    longest, mean = sample[0], sum(sample) / len(sample)
    waves = -(-work_tiles // ctas)
    share = work_tiles * mean / ctas
    equal = longest == sample[-1] and len(sample) <= 1
    if cut == Cut.EVERY:
        return 1, -(-(blocks if schedule.by_width else longest) // most), work_tiles * most
    if cut == Cut.BY_BLOCKS:
        return _one_each(ctas, work_tiles, sample)
    if cut == Cut.STREAM_K:
        if work_tiles % ctas == 0 and equal:
            return waves, waves * longest, 0
        return waves + 1, share + 1, 2 * min(work_tiles, ctas)
    if equal:
        if cut == Cut.NONE:
            return waves, waves * longest, 0
        left = work_tiles % ctas * most
        return waves, (waves - 1) * longest + -(-longest // most), left
    if schedule.longest_first:
        return waves, max(longest, share + 0.4 * mean), 0
    # Without an order, the busiest CTA is the one that drew the longest tokens.
    spread = (sum((each - mean) ** 2 for each in sample) / len(sample)) ** 0.5
    if cut == Cut.NONE:
        return waves, min(waves * longest, waves * mean + _WORST * spread * waves**0.5), 0
    whole = waves - 1
    drawn = min(whole * longest, whole * mean + _WORST * spread * whole**0.5)
    return waves, drawn + -(-longest // most), work_tiles % ctas * most


def _one_each(ctas: int, work_tiles: int, sample: tuple[int, ...]) -> tuple[float, float, float]:
    """Return ``_load`` for BY_BLOCKS, where a CTA has at most one split."""
    longest = sample[0]
    for walked in range(least_blocks(longest), longest + 1):
        splits = work_tiles * sum(-(-each // walked) for each in sample) / len(sample)
        if splits <= ctas:
            break
    return 1, walked, splits


@dataclasses.dataclass(frozen=True)
class CombineTile:
    """Share of the work that each CTA of ``combine_splits_kernel`` combines.

    Attributes:
        group: heads per CTA.
        width: channels per CTA.
        at_once: partials read at once.
        warps: warps per CTA.
    """

    group: int
    width: int
    at_once: int
    warps: int


# CTAs that are launched in the time that one takes. More heads than that with few partials each are
# combined in groups.
_COMBINE_CTAS = 1056
_COMBINE_GROUP, FEW_PARTIALS = 4, 4
# Stream-K's combine: partials read at once, and heads per CTA.
STREAM_K_AT_ONCE, STREAM_K_GROUP = 8, 2


def choose_combine_tile(
    heads: int, channels: int, most: int, *, by_blocks: bool = False
) -> CombineTile:
    """Choose the tile of ``combine_splits_kernel``.

    Args:
        heads: number of heads to combine over all work tiles.
        channels: channels per head.
        most: power of two that no head has more partials than.
        by_blocks: True for BY_BLOCKS, where most heads have far fewer partials than ``most``.
    """
    if heads > _COMBINE_CTAS and (most <= FEW_PARTIALS or by_blocks):
        return CombineTile(_COMBINE_GROUP, channels, most, 4)
    if heads * 2 > _COMBINE_CTAS:
        return CombineTile(1, channels, min(most, 8), 1)
    return CombineTile(1, channels // 2, min(most, 16), 1)


# Triton ------------------------------------------------------------------------------------------

MODES = ("float16", "bfloat16", "float32")
# Values of CODED, the kind of a row: plain; e4m3 with a power of two per block and a bfloat16 tail
# (V4); e4m3 with float32 scales before the tail (V3.2); e4m3 without a tail (V4.1); NVFP4.
PLAIN, FP8_TAIL, INLINE, FP8_CODES, NVFP4 = 0, 1, 2, 3, 4
_KIB = 1024
# Largest number of CTAs that share a token's lists in a batch-invariant call.
_INVARIANT_SPLITS = 4


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tile and launch parameters of the portable kernel.

    Attributes:
        heads: heads per CTA, a power of two of at least 16, or of at least 8 on Arc A.
        keys: listed rows per step, with the same limits as ``heads``.
        warps: warps per CTA.
        once: True to decode a row once for both products; see ``triton_decode.decode_tile``.
        ahead: True to load the next block's rows while this block is computed, and for ``copied``
            tiles, which always do, to decode them as well.
        words: True to decode e4m3 codes four at a time.
        per_sm: CTAs that registers and shared memory of an SM hold; known of ``ahead`` and
            ``copied`` tiles.
        row_parts: number of parts into which ``triton_decode.walk_rows`` divides the channels of a
            row, never in float16; 0 for ``triton_decode.walk``, which has several tiles of
            channels.
        copied: True for the kernel of ``gluon_sm80_decode``, which copies rows as they lie in the
            cache, 32 in a step.
    """

    heads: int
    keys: int
    warps: int
    once: bool = True
    ahead: bool = False
    words: bool = False
    per_sm: int = 1
    row_parts: int = 0
    copied: bool = False


# Each is the fastest of some forty tiles for FP8 rows and 128 + 512 slots. Pipelines deeper than 1
# and products of rows x heads were slower everywhere.
_ONE_STEP = Tile(16, 32, 4)
# For rows without a tail (V4.1): 4 warps spill 77 registers on sm_90 and 249 on sm_120, and 8 warps
# none. This is known from compiled code and was not timed.
_ONE_STEP_CODES = Tile(16, 32, 8)
_FEW_HEADS = Tile(16, 64, 8)
_HALF_HEADS = Tile(32, 64, 8)
_MANY_HEADS = Tile(64, 64, 8, once=False)


@dataclasses.dataclass(frozen=True)
class CopiedTimes:
    """Measured times in microseconds of the parts of a call of ``gluon_sm80_decode``.

    Attributes:
        warps: warps of a CTA.
        call: fixed time of every call.
        start: time to start and end a CTA that has an SM to itself.
        step: time of a step of such a CTA.
        native_step: the same where an instruction converts e4m3.
        shared: factor of both where two CTAs share an SM.
        combine: fixed time of the combine kernel, as far as ``call`` does not have it.
        partial: time to combine one head of one split.
    """

    warps: int
    call: float
    start: float
    step: float
    native_step: float
    shared: float
    combine: float
    partial: float


# V4's rows on other NVIDIA GPUs, by heads of a tile: least squares over 404 calls of 23 shapes as
# sm_80 on an H200; steps of the other column as sm_89. Of 28 shapes timed later, 5 of them others,
# in up to 13 cuts, they are off by 7 % (root mean square), by 4 % where a cut takes at most 1.3
# times the fastest's time; what is chosen as sm_80 is within 1 % of the fastest (one cut was not
# timed). 32 heads by 8 warps were at most 5 % faster than the best of these, 16 rows a step and two
# or three copied blocks in flight slower. CTAs have 59, 59 and 83 KiB of shared memory: an SM with
# 100 KiB (sm_86, sm_89, sm_120) holds one of any.
COPIED_TIMES = {
    16: CopiedTimes(4, 3.2, 2.5, 1.64, 1.40, 1.5, 0.5, 0.00048),
    32: CopiedTimes(4, 2.7, 6.0, 3.05, 2.99, 1.3, -0.9, 0.00062),
    64: CopiedTimes(8, 5.8, 6.3, 3.48, 3.22, 1.0, -2.6, 0.00081),
}
# 64 heads with the next block decoded ahead, in 115 KiB of shared memory: start and step are fitted
# to 106 calls of 17 shapes, timed beside 110 of the tile above, and are off by 4 %. It takes 0.91
# to 0.97 of that one's time where CTAs have ten steps and more, and up to 1.06 where they have
# fewer. ``native_step`` is in proportion, and was not timed: sm_89 has too little shared memory.
COPIED_AHEAD_TIMES = CopiedTimes(8, 5.8, 7.9, 3.15, 2.92, 1.0, -2.6, 0.00081)
COPIED_ROWS = 32  # rows in a step of them
# Other coded rows there: a block is loaded while the one before is computed. 16 heads by words and
# by 4 warps need this shared memory. 16 heads and 128 requests of 128 + 512 rows of V4: as sm_80
# 55 us by 4 warps and 72 by 8, as sm_89 47 by 16 x 64. Tiles of other targets are those that spill
# nothing.
AHEAD_SHARED_BYTES = 160 * _KIB
# Plain rows there, as in prefill. 1,024 queries of 64 heads with 128 + 512 rows as sm_80: 756 us,
# where 8 warps take 1,286; 16 heads 285 us, where 32 rows take 333; as sm_89 the same within 2 %.
_MANY_PLAIN_HEADS, _FEW_PLAIN_HEADS = Tile(32, 32, 4), Tile(16, 64, 4)
# Rows in whose time a CTA of tiles ``ahead`` starts and ends, and partials are combined; and the
# time of a step where two CTAs share an SM. From 41 rows, each cut in up to 13 ways on an H200.
_START_ROWS, _COMBINE_ROWS, _SHARED_SM = 100, 80, 1.4


# Intel's GPUs, as compiled by IGC 2.40.14 (docs/intel.md): this tile spills nothing and takes 2,400
# instructions per key over all warps. With 16 keys a step it is 3,100; the tiles above take 8,700
# and spill 820 registers.
_ROW_PARTS = Tile(16, 32, 16, row_parts=16)
_ROW_CHANNELS, _ROW_VALUES = 576, 512
# Arc A multiplies in float32, whose matrix instruction may sum 8 terms. This tile spills 48
# registers; 16 keys a step spill 293, and bfloat16, which sums 16 terms, spills 562.
_ARC_A_ROW_PARTS = Tile(16, 8, 32, row_parts=16)
# 16 heads of wider rows would need 80 KiB of shared memory; Arc A has 64 KiB.
_ARC_A_WIDE_ROW_PARTS = Tile(8, 8, 32, row_parts=16)
# RDNA: a wave of 32 lanes has 256 registers, and gfx11 holds matrix operands twice in a wave.
# Executed on one token of 16 heads and 128 FP8 rows (docs/amd.md), this tile takes 0.72 of the
# instructions that heads x channels take on gfx1151 and 0.81 on gfx1201, and spills nothing there.
_NARROW_ROW_PARTS = Tile(16, 16, 8, row_parts=8)
# Warps for other rows on Intel, without matrix products: 16 spill nothing, 8 spill 36 registers and
# 4 some 840.
_XPU_WARPS = 16


def choose_mode(narrow: bool, coded: bool, target: Target) -> str:
    """Choose the operand type of the products: the narrowest that keeps the promised accuracy.

    Args:
        narrow: True if queries and rows are bfloat16 or coded.
        coded: True if all rows are coded.
        target: machine that runs the kernel. Intel's GPUs and RDNA multiply coded rows in
            bfloat16, which holds them exactly whatever their scales: a second walk for rows that
            float16 does not hold would double the code.
    """
    if not narrow or target.arc_a:
        return "float32"
    divided = target.backend == "xpu" or target.narrow
    return "float16" if coded and not divided else "bfloat16"


def choose_tile(
    heads: int,
    keys: int,
    tokens: int | None,
    mode: str,
    target: Target,
    channels: int = 512,
    values: int = 512,
    *,
    tailless: bool = False,
    packed: bool = False,
    copied: bool = False,
) -> Tile:
    """Choose the tile of the portable kernel.

    Args:
        heads: query heads H.
        keys: columns of a token's lists, over both lists.
        tokens: number of query tokens T, or None for a tile that suits any number.
        mode: operand type of the products, one of MODES.
        target: machine that runs the kernel.
        channels: channels per row.
        values: leading channels of a row that are the value.
        tailless: True if some rows are e4m3 codes throughout.
        packed: True if some rows are NVFP4.
        copied: True if ``gluon_sm80_decode`` takes the rows: V4's, whole, at multiples of 16 bytes.
    """
    one_step = _ONE_STEP_CODES if tailless else _ONE_STEP
    fits = channels <= _ROW_CHANNELS and values <= _ROW_VALUES
    if target.arc_a:
        if not fits:
            return Tile(16, 8, 2 * _XPU_WARPS)
        return _ARC_A_ROW_PARTS if channels <= 512 else _ARC_A_WIDE_ROW_PARTS
    if target.backend == "xpu":
        whole = mode == "bfloat16" and fits
        return _ROW_PARTS if whole else Tile(16, 16, _XPU_WARPS)
    if target.backend == "cpu":
        return Tile(16, 32, 4)
    if target.narrow:
        return _NARROW_ROW_PARTS if mode == "bfloat16" and fits else Tile(16, 16, 8)
    if mode == "float32" or target.shared_bytes < 64 * _KIB:
        return Tile(16, 16, 4)
    if target.backend != "cuda":
        return Tile(16, 32, 4)
    if target.name != "sm_90":
        if mode == "float16" and copied:
            return _copied_tile(heads, keys, tokens, target)
        if mode == "float16":
            return _ahead_tile(heads, target, dense=tailless or packed)
        # Plain rows have no registers for a block ahead. 32 heads and 32 rows of more than 512
        # channels are 104 KiB.
        fits = channels <= 512 or target.shared_bytes >= 128 * _KIB
        if not fits:
            return one_step
        return _MANY_PLAIN_HEADS if heads > 16 else _FEW_PLAIN_HEADS
    if tokens is not None:
        # There are enough SMs to give every step of every token one, or half of one.
        steps = tokens * -(-heads // _ONE_STEP.heads) * -(-keys // _ONE_STEP.keys)
        if steps <= target.sm_count * (2 if heads > 32 else 1):
            return one_step
    if heads > 32:
        return _MANY_HEADS
    return _FEW_HEADS if heads <= 16 else _HALF_HEADS


def _ahead_tile(heads: int, target: Target, *, dense: bool) -> Tile:
    """Choose the tile for coded rows on NVIDIA's GPUs other than Hopper, with rows loaded ahead.

    ``dense`` is True for V4.1's rows, which have more scales and are larger when decoded by words.
    """
    ampere = not target.native_e4m3
    large = ampere and target.shared_bytes >= AHEAD_SHARED_BYTES
    if heads > 16:
        return Tile(32, 32, 8, ahead=True)
    if large and not dense:
        return Tile(16, 32, 4, ahead=True, words=True, per_sm=2)
    if target.name == "sm_89" and not dense:
        return Tile(16, 64, 8, ahead=True)
    return Tile(16, 32, 8, ahead=True, words=large)


def copied_tiles(heads: int, *, large: bool) -> list[Tile]:
    """List the tiles of ``gluon_sm80_decode`` that waste less than half of their heads.

    Args:
        heads: number of query heads.
        large: True if an SM has ``AHEAD_SHARED_BYTES`` of shared memory.
    """
    return [
        Tile(
            each, COPIED_ROWS, times.warps, copied=True, ahead=large and each == 64,
            per_sm=2 if large and each < 64 else 1,
        )
        for each, times in COPIED_TIMES.items()
        if each < 2 * max(heads, 16)
    ]  # fmt: skip


@functools.lru_cache(1024)
def _copied_tile(heads: int, keys: int, tokens: int | None, target: Target) -> Tile:
    """Choose the tile of ``gluon_sm80_decode`` whose call should end first; 16 heads for any."""
    tiles = copied_tiles(heads, large=target.shared_bytes >= AHEAD_SHARED_BYTES)
    if tokens is None:
        return tiles[0]
    steps, sm_count = max(1, -(-keys // COPIED_ROWS)), target.sm_count

    def duration(tile: Tile) -> float:
        ctas, native = tokens * -(-heads // tile.heads), bool(target.native_e4m3)
        return min(
            _copied_us(ctas, steps, each, tile, sm_count, native=native)
            for each in _split_counts(steps)
        )

    return min(tiles, key=duration)


def _copied_us(
    ctas: int, steps: int, splits: int, tile: Tile, sm_count: int, *, native: bool = False
) -> float:
    """Predict a call's time in microseconds from ``COPIED_TIMES``.

    Arguments are those of ``_splits_by_waves``; ``native`` is True where Triton converts e4m3 by an
    instruction.
    """
    times = COPIED_AHEAD_TIMES if tile.ahead else COPIED_TIMES[tile.heads]
    step = times.native_step if native else times.step
    us = times.call + _waves(ctas * splits, tile, sm_count, times.shared) * (
        times.start + -(-steps // splits) * step
    )
    partials = ctas * tile.heads * splits
    return us + (times.combine + partials * times.partial) * (splits > 1)


def _waves(ctas: int, tile: Tile, sm_count: int, shared: float) -> float:
    """Return the time of all waves of CTAs, in that of one CTA that has an SM to itself.

    ``shared`` is the time of one that shares its SM.
    """
    shared = shared if tile.per_sm > 1 else 1.0
    waves, rest = divmod(ctas, sm_count * tile.per_sm)
    # The last wave has SMs to itself if no two of its CTAs need to share one.
    return waves * shared + (min(rest, 1) if rest <= sm_count else shared)


def _split_counts(steps: int) -> list[int]:
    """List numbers of splits; of several with the same longest split, only the smallest."""
    return sorted({-(-steps // each) for each in range(1, steps + 1)})


def choose_splits(ctas: int, keys: int, tile: Tile, sm_count: int) -> int:
    """Choose the number of CTAs of the portable kernel that share a token's lists.

    Args:
        ctas: CTAs without splits, tokens x blocks of heads.
        keys: columns of a token's lists, over both lists.
        tile: tile chosen for the call.
        sm_count: number of SMs on the device.

    Returns:
        A number of at least 1 and at most one per step.
    """
    steps = max(1, -(-keys // tile.keys))
    if tile.ahead or tile.copied:
        return _splits_by_waves(max(ctas, 1), steps, tile, sm_count)
    most = min(sm_count // max(ctas, 1), steps)
    if most <= 1:
        return 1
    # The fewest splits whose longest is no longer than with ``most`` of them.
    return -(-steps // -(-steps // most))


@functools.lru_cache(1024)
def _splits_by_waves(ctas: int, steps: int, tile: Tile, sm_count: int) -> int:
    """Choose the splits whose waves of CTAs should end first; arguments as in ``choose_splits``."""
    start, combine = _START_ROWS / tile.keys, _COMBINE_ROWS / tile.keys

    def duration(splits: int) -> float:
        if tile.copied:
            return _copied_us(ctas, steps, splits, tile, sm_count)
        waves = _waves(ctas * splits, tile, sm_count, _SHARED_SM)
        return waves * (-(-steps // splits) + start) + combine * (splits > 1)

    return min(_split_counts(steps), key=duration)


def invariant_splits(keys: int, tile: Tile) -> int:
    """Choose the number of CTAs that share a token's lists in a batch-invariant call."""
    return choose_splits(1, keys, tile, _INVARIANT_SPLITS)


def combine_warps(splits: int, target: Target) -> int:
    """Choose the warps per CTA of the portable combine kernel."""
    warps = 4 if splits > 8 else 2
    if target.narrow and splits > 64:
        return 8  # with 4 warps a thread holds 256 values, and up to 43 registers are spilled
    if target.arc_a:
        return 4 * warps
    return 2 * warps if target.intel else warps

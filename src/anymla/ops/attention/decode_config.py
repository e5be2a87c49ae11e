"""Every choice of sparse attention's kernels, as pure functions of shapes and the machine.

``choose_schedule`` is Hopper's (Gluon): tiles of heads, and how the work is cut. It takes the
schedule that should end first: ``TIMES`` says how long a split and a block of each tile take, and
the rest is counting (``predicted_us``). Lengths lie on the device and are not known here; the
kernels cut every token's own blocks. ``gluon_sm90_tile_scheduler`` says what the ways to cut mean.
``choose_tile`` and ``choose_splits`` are the portable kernels' (Triton).

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

KEYS = 64  # listed rows of a block

# Up to so many heads keys are the rows of matrices (swap_ab), above it heads (m64); 17 to 32 may
# be either ("Two kernels").
SWAP_AB_HEADS = 32
# Units that stream-K takes the start and the end of a work tile for, in blocks.
TILE_COST = 4
MOST_STREAM_K_TOKENS = 2048
# CTAs compare each token with each to order them. 128 heads, 64 requests of two queries, lengths up
# to 1,024: 92 us in turn, 65 us the longest first ("Cutting the work").
MOST_ORDERED_TOKENS = 512
# Blocks of a split in a batch-invariant call, and the most splits.
_INVARIANT_BLOCKS = 4
_MOST_INVARIANT = 8

M64 = 64  # heads of a tile whose rows are heads
# Registers of a thread; consumer warpgroup 0 gets the rest of 512 (m64) or 512 / 2 (swap_ab).
CONSUMER1_REGISTERS = 160
M64_PRODUCER_REGISTERS = 72
SWAP_AB_PRODUCER_REGISTERS = 136
# Blocks of rows in shared memory by heads of a tile: three where 32 heads leave the space.
SWAP_AB_BUFFERS = {16: 3, 32: 2}


@dataclasses.dataclass(frozen=True)
class TileTimes:
    """Microseconds of what a tile's kernel and its combine do; a call takes their sum.

    Attributes:
        start: of a call.
        split: start and end of a split, or of a work tile that is whole.
        block: of 64 rows.
        partly: more of a split where some work tiles are cut and others are not.
        combine: of a second kernel.
        partial: of a head of a split to combine.
        many: where there are more than ``AT_ONCE`` splits of a work tile.
        by_width: less where nothing waits for lengths.
        one_block: likewise, with splits of one block.
        stream_k: more of stream-K, whose combine has a CTA for two heads of every CTA.
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


# Least squares over 1,357 schedules of 172 shapes, 144 of them random, with the blocks of the CTA
# that has most; off by 7, 3 and 5 % ("The choice by times").
TIMES = {
    16: TileTimes(1.9, 2.1, 1.79, 1.3, 1.3, 0.0015, 1.9, 0.7, 1.1, 0.7),
    32: TileTimes(3.1, 2.4, 2.65, 3.0, 1.6, 0.0009, 1.6, 0.2, 2.6, 0.0),
    64: TileTimes(1.3, 4.6, 2.30, 2.6, 0.5, 0.0006, 2.0, 0.0, 0.8, 3.6),
}
# Partials that a combine reads at a time.
AT_ONCE = 16
# Of a kernel that works out ranges, or the order, by itself; and, reckoned, of one that reads its
# split.
_UNPLANNED_US, _PLANNED_US = 3.5, 0.7
# How often lists that have lengths are thought to be full; else their lengths are even from 0 on.
_FULL = 0.35
# Lists of so few blocks are windows, which are full.
_WINDOW_BLOCKS = 2
# Tokens that stand for all; and how far the largest of 132 sums is above the mean.
_SAMPLES, _WORST = 32, 2.4
# Splits of BY_BLOCKS have as many blocks, at least, as leave ``AT_ONCE`` of a work tile, or this.
LONG_SPLIT = 4


class Cut(enum.IntEnum):
    """Which work tiles are cut into splits; see ``gluon_sm90_tile_scheduler``."""

    NONE = 0
    EVERY = 1
    TAIL = 2
    STREAM_K = 3
    BY_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a call is launched on Hopper.

    Attributes:
        heads: heads of a tile: 16 or 32 (swap_ab), or 64 (m64).
        head_tiles: tiles of heads.
        ctas: of the launch.
        splits: of a work tile that is cut by numbers; 1 for none. Of BY_BLOCKS the most of any.
        cut: which work tiles are cut.
        longest_first: CTAs take the longest tokens first.
        planned: ranges, or the order, were worked out before, once for all layers of a step.
        by_width: splits are those of full lists, so that the kernel need not wait for lengths.
        one_block: of them each is one block.
        invariant: results must not depend on the other tokens of the call.
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
        """Whether all work tiles are cut, so that their combine alone writes heads."""
        return self.cut in (Cut.EVERY, Cut.BY_BLOCKS)

    def first_cut(self, tokens: int) -> int:
        """Work tiles before this one are whole."""
        return tokens * self.head_tiles // self.ctas * self.ctas if self.cut == Cut.TAIL else 0

    def split_count(self, tokens: int) -> int:
        """How many splits have a number, so many tokens at a time."""
        work_tiles, whole = tokens * self.head_tiles, self.first_cut(tokens)
        if self.cut == Cut.STREAM_K:
            return work_tiles + self.ctas
        if self.cut == Cut.BY_BLOCKS:
            return self.ctas
        return whole + (work_tiles - whole) * self.splits

    def slots(self, tokens: int) -> int:
        """How many splits have memory for their partial, so many tokens at a time."""
        if self.cut == Cut.NONE:
            return 1
        if self.cut == Cut.STREAM_K:
            return 2 * self.ctas
        return self.split_count(tokens) - self.first_cut(tokens)

    def seen_tokens(self, tokens: int) -> int:
        """Tokens that every CTA looks at, at least; few sizes, because each is compiled."""
        if self.cut in (Cut.STREAM_K, Cut.BY_BLOCKS) and not self.planned:
            return stream_k_size(tokens)
        if self.longest_first and not self.planned:
            return 256 if tokens <= 256 else MOST_ORDERED_TOKENS
        return 128

    def query_by_tma(self, v32: bool) -> bool:
        """Whether TMA may bring queries to tiles of 64 heads.

        Where some work tiles are cut, two tiles take 8 % longer if it does.
        """
        return not (v32 or (self.cut == Cut.TAIL and self.head_tiles > 1))


def stream_k_size(tokens: int) -> int:
    """Tokens that the CTAs of stream-K look at."""
    if tokens <= 128:
        return 128
    return 512 if tokens <= 512 else MOST_STREAM_K_TOKENS


def tile_heads(heads: int) -> int:
    """Heads of a tile where tokens are few."""
    if heads > SWAP_AB_HEADS:
        return M64
    return 16 if heads <= 16 else 32


def blocks_of(widths: tuple[int, ...]) -> int:
    """Blocks of a token whose lists are full; at least one."""
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
    """The schedule of a call on Hopper.

    Args:
        tokens: T, at least 1.
        heads: query heads H, at least 1.
        widths: columns of the lists.
        sm_count: SMs of the device.
        lengths: the lists have lengths of their own.
        batch_invariant: cut a token the same way in any batch.
        planned: what to cut, or the order, is or can be worked out before; see
            ``sparse_attention_plan``.
        v32: rows are those of V3.2, which have tiles of 64 heads alone, and whose producers wait
            for the lengths in any case.
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
    """All that may be the best of a call; of full lists so many blocks, see ``choose_schedule``."""
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
    """Numbers of splits, of which none is without blocks, at most so many: the largest few."""
    for _ in range(3):
        if most < 2:
            return
        longest = -(-blocks // most)
        splits = -(-blocks // longest)
        yield splits
        most = min(splits - 1, splits * 3 // 4)


def least_blocks(longest: int) -> int:
    """The fewest blocks of a split of BY_BLOCKS where the longest lists have so many."""
    return min(-(-longest // AT_ONCE), LONG_SPLIT)


def _ragged(tokens: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Blocks of some tokens, the longest first, whose last lists are of any length."""
    count = min(tokens, _SAMPLES)
    whole = sum(-(-width // KEYS) for width in widths[:-1])
    return tuple(
        max(1, whole + -(-(widths[-1] * number) // (KEYS * (count + 1))))
        for number in range(count, 0, -1)
    )


def predicted_us(
    schedule: Schedule, tokens: int, heads: int, blocks: int, sample: tuple[int, ...]
) -> float:
    """How long a call should take.

    Args:
        schedule: of the call.
        tokens: T.
        heads: query heads H.
        blocks: of full lists.
        sample: blocks of tokens that stand for all, the longest first.
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
    """Splits and blocks of the CTA that has most of them; partials that are combined."""
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
    # In turn, the CTA that has most of all has drawn long ones.
    spread = (sum((each - mean) ** 2 for each in sample) / len(sample)) ** 0.5
    if cut == Cut.NONE:
        return waves, min(waves * longest, waves * mean + _WORST * spread * waves**0.5), 0
    whole = waves - 1
    drawn = min(whole * longest, whole * mean + _WORST * spread * whole**0.5)
    return waves, drawn + -(-longest // most), work_tiles % ctas * most


def _one_each(ctas: int, work_tiles: int, sample: tuple[int, ...]) -> tuple[float, float, float]:
    """``_load`` of BY_BLOCKS."""
    longest = sample[0]
    for walked in range(least_blocks(longest), longest + 1):
        splits = work_tiles * sum(-(-each // walked) for each in sample) / len(sample)
        if splits <= ctas:
            break
    return 1, walked, splits


@dataclasses.dataclass(frozen=True)
class CombineTile:
    """What a CTA of ``combine_splits_kernel`` combines.

    Attributes:
        group: heads.
        width: channels.
        at_once: partials that are read at a time.
        warps: of the CTA.
    """

    group: int
    width: int
    at_once: int
    warps: int


# CTAs that are launched in the time that one takes; and what more heads are combined by, if
# they have few partials.
_COMBINE_CTAS = 1056
_COMBINE_GROUP, FEW_PARTIALS = 4, 4
# Of stream-K: partials at a time, heads of a CTA.
STREAM_K_AT_ONCE, STREAM_K_GROUP = 8, 2


def choose_combine_tile(
    heads: int, channels: int, most: int, *, by_blocks: bool = False
) -> CombineTile:
    """The tile of a combine.

    Args:
        heads: of all work tiles.
        channels: of a head.
        most: partials of one at most, 2^n.
        by_blocks: most of them have far fewer.
    """
    if heads > _COMBINE_CTAS and (most <= FEW_PARTIALS or by_blocks):
        return CombineTile(_COMBINE_GROUP, channels, most, 4)
    if heads * 2 > _COMBINE_CTAS:
        return CombineTile(1, channels, min(most, 8), 1)
    return CombineTile(1, channels // 2, min(most, 16), 1)


# Triton ------------------------------------------------------------------------------------------

MODES = ("float16", "bfloat16", "float32")
# What CODED says of the rows: plain; e4m3 with a power of two for every block and a bfloat16 tail
# (V4), or float32 scales before the tail (V3.2), or no tail (V4.1); NVFP4.
PLAIN, FP8_TAIL, INLINE, FP8_CODES, NVFP4 = 0, 1, 2, 3, 4
_KIB = 1024
# CTAs that share a token's lists in a batch-invariant call.
_INVARIANT_SPLITS = 4


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a CTA of the portable kernel computes.

    Attributes:
        heads: heads of a CTA, a power of two of at least 16; on Arc A of 8.
        keys: listed rows a step, likewise.
        keys_first: swap_ab: products are rows x heads instead of heads x rows.
        warps: of a CTA.
        stages: depth of the pipeline of row loads; 1 is none.
        once: see ``triton_decode.coded_tile``.
        row_parts: rows are one tile whose channels are so many parts (``triton_decode.walk_rows``),
            not in float16; 0 for several tiles of channels.
    """

    heads: int
    keys: int
    keys_first: bool
    warps: int
    stages: int = 1
    once: bool = True
    row_parts: int = 0


# FP8 rows, 128 + 512 slots: the fastest of some forty tiles each. Pipelines deeper than 1 and
# rows x heads lost everywhere.
_ONE_STEP = Tile(16, 32, False, 4)
# Of rows without a tail, V4.1's: 4 warps spill 77 registers on sm_90 and 249 on sm_120, 8 none. As
# compiled; not timed.
_ONE_STEP_CODES = Tile(16, 32, False, 8)
_FEW_HEADS = Tile(16, 64, False, 8)
_HALF_HEADS = Tile(32, 64, False, 8)
_MANY_HEADS = Tile(64, 64, False, 8, once=False)


# Intel, compiled by IGC 2.40.14 (docs/intel.md): no spills, and for a key 2,400 instructions of all
# warps; 16 keys a step take 3,100, and the tiles above 8,700 and spill 820 registers.
_ROW_PARTS = Tile(16, 32, False, 16, row_parts=16)
_ROW_CHANNELS, _ROW_VALUES = 576, 512
# Arc A, in float32, whose products may have 8 terms: 48 registers are spilled; 16 keys a step spill
# 293, bfloat16's 16 terms 562.
_ARC_A_ROW_PARTS = Tile(16, 8, False, 32, row_parts=16)
# 16 heads of wider rows take 80 KiB of its 64 KiB of shared memory.
_ARC_A_WIDE_ROW_PARTS = Tile(8, 8, False, 32, row_parts=16)
# Other rows there, without matrix products: no spills, 8 warps spill 36 registers and 4 some 840.
_XPU_WARPS = 16


def choose_mode(narrow: bool, coded: bool, target: Target) -> str:
    """Type of the products' operands: the narrowest that keeps what the contract promises.

    Args:
        narrow: queries and rows are bfloat16, or coded.
        coded: all rows are coded.
        target: the machine. On Intel's GPUs coded rows are multiplied in bfloat16, which holds them
            exactly, whatever their scales: a second walk for those that float16 does not hold is
            twice the code.
    """
    if not narrow or target.arc_a:
        return "float32"
    return "float16" if coded and target.backend != "xpu" else "bfloat16"


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
) -> Tile:
    """The tile of a call of the portable kernel.

    Args:
        heads: query heads H.
        keys: columns of the lists of a token.
        tokens: T, or None for a tile that suits any number.
        mode: one of MODES, the type of the products' operands.
        target: the machine.
        channels: of a row.
        values: leading channels of a row that are the value.
        tailless: some rows are e4m3 codes throughout.
    """
    one_step = _ONE_STEP_CODES if tailless else _ONE_STEP
    fits = channels <= _ROW_CHANNELS and values <= _ROW_VALUES
    if target.arc_a:
        if not fits:
            return Tile(16, 8, False, 2 * _XPU_WARPS)
        return _ARC_A_ROW_PARTS if channels <= 512 else _ARC_A_WIDE_ROW_PARTS
    if target.backend == "xpu":
        whole = mode == "bfloat16" and fits
        return _ROW_PARTS if whole else Tile(16, 16, False, _XPU_WARPS)
    if target.backend == "cpu":
        return Tile(16, 32, False, 4)
    if target.name.startswith("gfx1"):
        return Tile(16, 16, False, 8)
    if mode == "float32" or target.shared_bytes < 64 * _KIB:
        return Tile(16, 16, False, 4)
    if target.backend != "cuda":
        return Tile(16, 32, False, 4)
    if target.name != "sm_90":
        # 32 heads and 32 rows of more than 512 channels are 104 KiB.
        fits = channels <= 512 or target.shared_bytes >= 128 * _KIB
        return Tile(32, 32, False, 8) if heads > 16 and fits else one_step
    if tokens is not None:
        # Every step of every token has an SM of its own, or half of one.
        steps = tokens * -(-heads // _ONE_STEP.heads) * -(-keys // _ONE_STEP.keys)
        if steps <= target.sm_count * (2 if heads > 32 else 1):
            return one_step
    if heads > 32:
        return _MANY_HEADS
    return _FEW_HEADS if heads <= 16 else _HALF_HEADS


def choose_splits(ctas: int, keys: int, tile: Tile, sm_count: int) -> int:
    """How many CTAs of the portable kernel share a token's lists.

    Args:
        ctas: tokens x blocks of heads.
        keys: columns of the lists of a token.
        tile: of the call.
        sm_count: SMs of the device.

    Returns:
        At least 1, at most one for every step.
    """
    steps = max(1, -(-keys // tile.keys))
    most = min(sm_count // max(ctas, 1), steps)
    if most <= 1:
        return 1
    # As few as leave the longest split as short.
    return -(-steps // -(-steps // most))


def invariant_splits(keys: int, tile: Tile) -> int:
    """How many CTAs share a token's lists in a batch-invariant call."""
    return choose_splits(1, keys, tile, _INVARIANT_SPLITS)


def combine_warps(splits: int, target: Target) -> int:
    """Warps of a CTA of the portable combine."""
    warps = 4 if splits > 8 else 2
    if target.narrow and splits > 64:
        return 8  # 4 warps hold 256 values a thread, and spill up to 43
    if target.arc_a:
        return 4 * warps
    return 2 * warps if target.intel else warps

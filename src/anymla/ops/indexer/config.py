"""Choices of algorithm and tile for the indexer's kernels: pure functions of shapes and target.

A selection processes its tokens in chunks: it writes scores into scratch and then takes the top-k
of each row by one of four algorithms, which are all exact and give the same result:

- "all": no row has more than k entries, so nothing is scored.
- "row": a row's scores stay in registers and are searched directly. One CTA for each row.
- "groups": the score kernel also writes the maximum of every 16 scores. The k-th largest maximum
  bounds the k-th score from below, so only the top-k groups are read. One CTA for each row.
- "samples": 2,048 samples of a row give a threshold that slightly more than k scores pass; those
  are collected and selected from. One CTA for each row, or several for few long rows.

Thresholds were measured on an H200 with the shapes beside them; see docs/performance/indexer.md.
"""

from __future__ import annotations

import dataclasses

from anymla.ops._gemm_config import uses_mma_sync
from anymla.ops._sizes import cdiv, next_power_of_2
from anymla.ops.device import Target

# Number of neighbouring entries that share a maximum.
GROUP = 16

# Thresholds, with the shape of the measurement behind each (requests x queries x entries).
#
# Top-k. The "groups" kernel keeps all maxima of a row and all scores of k groups in registers.
MAX_GROUPS = 16_384
MAX_GROUPS_K = 1024
# Longest row kept whole; maxima say nothing if no more groups exist than are kept. 128 x 1 x 8192.
MAX_ROW_ENTRIES = 16_384
# Without histograms, rows beyond these numbers of rows and entries are sampled. 2048 x 8192.
_MANY_ROWS, _MANY_ROWS_ENTRIES = 256, 4096
# Maxima make prefill's scores a tenth slower, so only longer rows use them. 2048 x 65536.
_SHORT_ROW = 16_384
# A few long rows are split over several CTAs each. 1 x 1 x 262144.
_FEW_ROWS, _LONG_ROW, _ROW_SPLITS = 4, 131_072, 32
# From more rows on, CTAs are small and several share an SM. Prefill 2048 x 8192, 2048 x 65536.
_SMALL_CTA_ROWS = 128
# One wave of an H200: with more rows, two top-k CTAs share an SM. Prefill 2048 x 8192.
_SM90_SMALL_CTA_ROWS = 132
# A chunk's rows fill whole waves of two rows an SM. Prefill 8192 x 262144.
_CHUNK_ROWS_PER_SM = 2

# Scores: number of CTAs that fills any GPU, and most tiles of one CTA. 128 x 1 x 32768.
_SCORE_CTAS, _MAX_TILES_PER_CTA = 1024, 64
# Keys of all requests above which a single row keeps two key tiles in flight: 152 instead of 158 us
# at 4 million keys, but 47 instead of 45 at one million. 128 x 1 x 32768, 32 x 1 x 32768.
_DEEP_PIPELINE_KEYS = 1 << 21
# Keys of all requests up to which mma.sync's score tiles are small, so that SMs have a CTA each.
_FEW_PAGED_KEYS = 1 << 15
_FOUR_STAGES_SHARED_BYTES = 128 * 1024
# sm_90: tiles per SM from which on CTAs use all its registers. 128 x 1 x 2048, 128 x 2 x 8192.
_SM90_MANY_TILES, _SM90_MANY_TILES_OF_PAIRS = 16, 40
# sm_90: most splits of a context in one launch, and a CTA's start-up time in tiles.
_SM90_MAX_SPLITS, _SM90_STARTUP_TILES = 132, 8

# topk_per_row: columns that a CTA loads together (of short and of long rows), number of CTAs that
# fills any GPU, and most candidates that the splits of a row may leave.
_TOPK_SMALL_BLOCK, _TOPK_BLOCK = 1024, 4096
_TOPK_CTAS = 512
_TOPK_MAX_CANDIDATES = 2 * _TOPK_BLOCK
# More winners than this are ranked by counting, since a sorting network would be too large.
_TOPK_MAX_SORTED = 2048


# --- select_topk -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SelectConfig:
    """Algorithm, chunk size and tile sizes of one ``select_topk`` call.

    Attributes:
        algorithm: name of the algorithm, "all", "row", "groups" or "samples".
        chunk: number of tokens that are scored at a time.
        padded_k: k rounded up to a power of two, at least 16.
        elements: for "row", a row's entries rounded up to a power of two.
        groups: for "groups", a row's maxima rounded up to a power of two.
        splits: for "samples", number of CTAs that share a row.
        capacity: for "samples", most candidates that a split can hold.
        samples: for "samples", number of scores that the threshold is taken from.
        block: for "samples", scores that a CTA loads together; 0 to decide by the number of rows.
    """

    algorithm: str
    chunk: int
    padded_k: int
    elements: int = 0
    groups: int = 0
    splits: int = 1
    capacity: int = 0
    samples: int = 2048
    block: int = 0

    def row_bytes(self, entries: int) -> int:
        """Return the bytes of scratch for one token of a chunk."""
        if self.algorithm == "all":
            return 0
        scores = 4 * padded_entries(entries)
        if self.algorithm == "row":
            return scores
        if self.algorithm == "groups":
            return scores + 4 * padded_entries(entries) // GROUP + 4 * self.padded_k
        return scores + self.splits * (8 * self.capacity + 4)


def padded_entries(entries: int) -> int:
    """Round a number of entries up to whole groups of maxima and lines of 64 bytes."""
    return cdiv(entries, GROUP * GROUP) * GROUP * GROUP


def choose_select_config(
    rows: int,
    entries: int,
    k: int,
    *,
    target: Target,
    scratch_bytes: int,
    histograms: bool = False,
    further_row_bytes: int = 0,
) -> SelectConfig:
    """Choose algorithm and sizes of a ``select_topk`` call.

    Args:
        rows: number of tokens of the call.
        entries: most entries that a token may see.
        k: number of entries that a token keeps.
        target: architecture of the device, with its number of SMs.
        scratch_bytes: most bytes that the rows of a chunk may take.
        histograms: True if top-k uses histograms in shared memory (sm_90), so that sampling pays
            neither for few rows nor for many.
        further_row_bytes: bytes of scratch that each row takes in addition.

    Raises:
        ValueError: if one token takes more than ``scratch_bytes``.
    """
    padded_k = next_power_of_2(max(k, 16))
    if entries <= k:
        return SelectConfig("all", rows, padded_k)
    any_row = histograms or rows <= _MANY_ROWS
    max_row = min(GROUP * k, MAX_ROW_ENTRIES if any_row else _MANY_ROWS_ENTRIES)
    if target.arc_a:
        max_row = min(max_row, MAX_ROW_ENTRIES // 2)  # longer ones spill 122 registers
    few = rows <= _FEW_ROWS and entries >= _LONG_ROW and not histograms
    short = not any_row and entries <= _SHORT_ROW
    groups = next_power_of_2(cdiv(entries, GROUP))
    if entries <= max_row:
        config = SelectConfig("row", rows, padded_k, elements=next_power_of_2(max(entries, 64)))
    elif few or short or k > _max_groups_k(target) or groups > MAX_GROUPS:
        # The slack over k is more than three standard deviations of the sampling error.
        capacity = 4096 if k <= 1024 else 8192
        splits = _ROW_SPLITS if few else 1
        config = SelectConfig("samples", rows, padded_k, splits=splits, capacity=capacity)
    else:
        config = SelectConfig("groups", rows, padded_k, groups=max(groups, 64))
    row_bytes = config.row_bytes(entries) + further_row_bytes
    most = scratch_bytes // row_bytes
    if most < 1:
        raise ValueError(
            f"select_topk: scratch_bytes must be >= {row_bytes} for rows of "
            f"{entries} entries, got {scratch_bytes}"
        )
    wave = _CHUNK_ROWS_PER_SM * target.sm_count
    if most < rows and most >= wave:
        most = most // wave * wave
    elif most < rows and most > 1:
        most = most // 2 * 2
    return dataclasses.replace(config, chunk=min(rows, most))


def _max_groups_k(target: Target) -> int:
    """Return the largest k whose top-k groups fit a CTA.

    Intel's compiler moves the addresses of their 16 k scores through shared memory, 72 KiB for a k
    of 512.
    """
    if not target.intel:
        return MAX_GROUPS_K
    return 256 if target.arc_a else 512


def row_warps(elements: int, groups: int, rows: int, target: Target) -> int:
    """Return the warps of a "row" or "groups" CTA: at most 32 values a thread."""
    lanes = max(elements, groups) * (2 if target.arc_a else 1)
    # On Intel, 32 values a thread spill 52 registers.
    small = rows > _SMALL_CTA_ROWS and not target.intel
    threads = max(64, min(1024, lanes // (32 if small else 16)))
    return max(1, threads // target.warp_size)


def row_registers(rows: int, target: Target) -> dict[str, int]:
    """Return launch options of all algorithms: with many rows, registers for several CTAs an SM."""
    return {"maxnreg": 128} if rows > _SMALL_CTA_ROWS and target.backend == "cuda" else {}


def sample_block_and_warps(rows: int, config: SelectConfig, target: Target) -> tuple[int, int]:
    """Return how many scores a "samples" CTA loads together, and its number of warps."""
    many = rows > _SMALL_CTA_ROWS
    threads = 256 if many and config.capacity <= 4096 else 512
    block = config.block or (4096 if many else 8192)
    if target.arc_a:
        block //= 4  # the whole block spills up to 155 registers there, a quarter 45
    return block, max(1, threads // target.warp_size)


@dataclasses.dataclass(frozen=True)
class Sm90TopkConfig:
    """Registers and row layout of a ``gluon_sm90_topk`` CTA.

    Attributes:
        warps: number of warps of the CTA.
        registers: largest number of registers of a thread; 0 for no limit.
        groups: padded number of maxima, at least one a thread; 0 if rows are read whole.
        elements: padded number of entries, or of candidates from groups, at least one a thread.
    """

    warps: int
    registers: int
    groups: int
    elements: int


def choose_sm90_topk_config(config: SelectConfig, rows: int) -> Sm90TopkConfig:
    """Choose 8 to 32 values a thread; with many rows, registers for two CTAs an SM."""
    elements = config.elements or config.padded_k * GROUP
    most = max(elements, config.groups)
    warps = max(4, min(16, most // 8 // 32))
    groups = max(config.groups, 32 * warps) if config.groups else 0
    registers = 64 if rows > _SM90_SMALL_CTA_ROWS and warps == 16 and most <= 8192 else 0
    return Sm90TopkConfig(warps, registers, groups, max(elements, 32 * warps))


# --- scores ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """Tile of ``triton_scores``: keys times the heads of a few rows. Passed as a constexpr.

    Attributes:
        rows: number of query rows in the tile.
        heads: heads of a row, padded to a power of two.
        width: channels of a head, padded to a power of two.
        block_k: number of channels that one step multiplies.
        keys: number of keys in the tile.
        warps: number of warps of the CTA.
        stages: number of pipeline stages for tiles of keys.
    """

    rows: int
    heads: int
    width: int
    block_k: int
    keys: int
    warps: int
    stages: int


def choose_score_config(
    rows: int,
    heads: int,
    width: int,
    math: str,
    target: Target,
    *,
    paged_keys: int | None = None,
    listed: bool = False,
) -> ScoreConfig:
    """Choose the score tile for rows that share their keys.

    Heads are the wide dimension of the product: one row of 64 heads against 128 keys fills the
    accumulators of four warps. On Hopper two rows against 64 keys do so, too. Elsewhere a CTA takes
    one row: as PTX of sm_80 and sm_89 on an H200 that takes 0.65 to 0.99 of the time of two, for 1
    to 32 requests of 2 to 6 rows. Rows then have the same bits whether their keys are all entries
    or those of listed blocks, which no two rows share.

    Args:
        rows: number of query rows that share keys.
        heads: number of heads of a row.
        width: number of channels of a key.
        math: arithmetic of the product, as ``math_of`` returns it.
        target: architecture of the device.
        paged_keys: number of keys of all requests, if a block table lists their pages; else None.
            Page ids are then prefetched as well, two loads deep: four stages keep one tile of keys
            in flight, five stages two. A single row has large tiles, of which fewer CTAs then fit.
        listed: True if the table lists blocks of a few entries. A CTA then has only a tile or two,
            and further prefetches take 6 to 9 % longer (1, 8 and 32 rows of 16,384 entries, H100).
    """
    padded_heads, narrow = next_power_of_2(heads), target.narrow
    together = 1
    if rows > 1 and target.name in ("sm_90", "interpreter"):
        together = max(1, (64 if math == "fp32" else 128) // padded_heads)
    padded_heads = max(padded_heads, 16 // together)
    columns = together * padded_heads
    padded_width = max(next_power_of_2(width), 32)
    if target.arc_a:
        # Four scores a thread, or two where keys may be e2m1, whose steps are blocks of 32
        # channels.
        block_k, most = (16, 4096) if math == "fp16" else (32, 2048)
        keys = max(16, min(most // columns, 64))
        return ScoreConfig(together, padded_heads, padded_width, block_k, keys, 32, 1)
    if math == "fp32":
        # Without matrix instructions, a thread keeps its operands' channels in registers.
        keys, warps = (16, 8) if target.backend == "xpu" else (32, 4)
        return ScoreConfig(together, padded_heads, padded_width, 32, keys, warps, 1)
    if uses_mma_sync(target) and math in ("fp16", "e4m3"):
        # As sm_80 and sm_89 on an H200, two warps that share 64 heads' queries take 0.74 to 0.86 of
        # the time of four, from 32 rows of 2,048 keys to a prefill; with less there, CTAs are few.
        few = paged_keys is not None and paged_keys <= _FEW_PAGED_KEYS
        keys, warps = (64, 4) if few else (128, 2)
        keys = max(16, min(keys, 8192 // columns, 128 * 128 // padded_width))
        return ScoreConfig(together, padded_heads, padded_width, padded_width, keys, warps, 2)
    # Limited by accumulators and by the bytes of a key tile.
    keys = max(16, min((2048 if narrow else 8192) // columns, 128 * 128 // padded_width, 128))
    stages = 4 if target.shared_bytes >= _FOUR_STAGES_SHARED_BYTES else 2
    if paged_keys is not None and stages == 4 and target.backend == "cuda":
        stages = 5 if together > 1 or paged_keys >= _DEEP_PIPELINE_KEYS else 4
    if listed:
        stages = min(stages, 2)
    # On Intel 4 warps spill 100 registers and 8 warps none (docs/intel.md). On RDNA 8 warps spill
    # up to 42 by Triton 3.7.1, and 4 warps none.
    warps = 8 if target.backend == "xpu" else 4
    return ScoreConfig(together, padded_heads, padded_width, padded_width, keys, warps, stages)


def decodes_words(target: Target, math: str) -> bool:
    """Return True where decoding four e4m3 codes at a time takes fewer instructions."""
    by_bits = target.backend == "cuda" and not target.dot_e4m3
    return (by_bits or target.backend == "xpu") and math in ("fp16", "bf16")


def score_registers(config: ScoreConfig, math: str, filled: bool, target: Target) -> dict[str, int]:
    """Return launch options: FP8 CTAs of two rows fit four to an SM, unless they fill columns."""
    bounded = math == "e4m3" and config.rows > 1 and target.backend == "cuda" and not filled
    return {"maxnreg": 128} if bounded else {}


def split_size(groups: int, keys: int, config: ScoreConfig) -> int:
    """Return the number of keys in a split, for ``keys`` keys and ``groups`` groups of rows."""
    tiles = cdiv(max(keys, 1), config.keys)
    splits = max(cdiv(_SCORE_CTAS, max(groups, 1)), cdiv(tiles, _MAX_TILES_PER_CTA))
    return cdiv(tiles, min(splits, tiles)) * config.keys


@dataclasses.dataclass(frozen=True)
class Sm90ScoreConfig:
    """Pipeline and registers of ``gluon_sm90_scores``' CTAs.

    Attributes:
        overlap: True if a tile's products run while the sums of the tile before are taken.
        ctas_per_sm: number of CTAs that fit on an SM.
        registers: largest number of registers of a thread at kernel entry; 0 for an equal share.
        consumer_registers: number of registers of a consumer thread after reallocation.
    """

    overlap: bool
    ctas_per_sm: int
    registers: int
    consumer_registers: int


SM90_OVERLAP = Sm90ScoreConfig(True, 1, 0, 232)
# CTAs with little work leave registers to the top-k kernel, which PDL starts early. The products of
# pairs need 90 registers from the start.
SM90_FEW_PAIRS = Sm90ScoreConfig(False, 1, 96, 128)
SM90_SINGLE = Sm90ScoreConfig(False, 2, 80, 104)
SM90_FEW_SINGLE = dataclasses.replace(SM90_SINGLE, ctas_per_sm=1)


def choose_sm90_score_config(
    groups: int, tiles: int, pairs: bool, sm_count: int
) -> Sm90ScoreConfig:
    """Choose the config for ``groups`` rows, or pairs of rows if ``pairs``, with ``tiles`` each."""
    tiles_per_sm = groups * tiles / sm_count
    if pairs:
        return SM90_OVERLAP if tiles_per_sm > _SM90_MANY_TILES_OF_PAIRS else SM90_FEW_PAIRS
    return SM90_SINGLE if tiles_per_sm > _SM90_MANY_TILES else SM90_FEW_SINGLE


def sm90_context_splits(groups: int, tiles: int, ctas: int) -> int:
    """Return the number of context splits that leaves the fewest CTAs idle in the last wave.

    A CTA's start-up time counts as tiles.

    Args:
        groups: number of groups of rows; each group passes over all tiles.
        tiles: number of key tiles of the context.
        ctas: number of CTAs that are resident on the device at a time.
    """

    def cost(splits: int) -> int:
        waves = cdiv(groups * splits, ctas)
        return waves * (cdiv(tiles, splits) + _SM90_STARTUP_TILES)

    return min(range(1, max(1, min(_SM90_MAX_SPLITS, tiles)) + 1), key=cost)


# --- topk_per_row ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TopkConfig:
    """Splits and block sizes of ``topk_per_row``.

    Attributes:
        splits: number of CTAs that share a row.
        block: number of columns that a CTA of a split loads together.
        merge_block: number of candidates that the merging CTA loads together.
        resident: True if a split fits in one block, so that it stays in registers.
        merge_resident: True if the candidates of a row fit in one block.
        sorted: True to sort winners by a network, False to rank them by counting.
    """

    splits: int
    block: int
    merge_block: int
    resident: bool
    merge_resident: bool
    sorted: bool


def choose_topk_config(rows: int, columns: int, kept: int) -> TopkConfig:
    """Choose the config for ``kept`` = min(k, columns) winners of each row."""
    splits = min(
        cdiv(columns, _TOPK_BLOCK),
        cdiv(_TOPK_CTAS, max(rows, 1)),
        _TOPK_MAX_CANDIDATES // kept,
        columns // (2 * kept),
    )
    splits = max(splits, 1)
    split, candidates = cdiv(columns, splits), splits * kept
    block, merge_block = (
        _TOPK_BLOCK if n > _TOPK_SMALL_BLOCK else _TOPK_SMALL_BLOCK for n in (split, candidates)
    )
    return TopkConfig(
        splits,
        block,
        merge_block,
        split <= block,
        candidates <= merge_block,
        kept <= _TOPK_MAX_SORTED,
    )


def topk_warps(block: int, resident: bool, target: Target) -> int:
    """Return the warps of a CTA with ``block`` columns; ``resident`` columns stay in registers."""
    large = block > _TOPK_SMALL_BLOCK
    if target.arc_a:
        # 16 warps spill 77 registers if columns stay in registers; 32 spill 133 if they do not.
        return (32 if resident else 16) if large else 8
    return 8 if large else 4


def candidates_warps(target: Target) -> int:
    """Return the warps of a CTA that finds or masks candidate blocks."""
    return 8 if target.arc_a else 4


def rank_warps(target: Target) -> int:
    """Return the warps of a CTA that ranks winners by counting."""
    return 8 if target.arc_a else 4


def sort_warps(winners: int, target: Target) -> int:
    """Return the warps of a CTA that sorts ``winners`` winners."""
    if target.intel:
        # 256 winners a warp spill 202 registers; on Arc A, 128 spill 230.
        return max(1, min(winners // (64 if target.arc_a else 128), 32 if target.arc_a else 16))
    return max(1, min(winners // 256, 8))

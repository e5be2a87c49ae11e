"""Every choice of the indexer's kernels, as pure functions of shapes and the target.

A selection takes its tokens a chunk at a time: scores into scratch, then top-k of each row by one
of four algorithms, all exact and with the same result:

- "all": no row has more than k entries; nothing is scored.
- "row": a row's scores are held in registers and searched as they are. One CTA a row.
- "groups": the score kernel also writes the maximum of every 16 scores. The k-th largest of these
  bounds the k-th score from below, so only the top-k groups are read. One CTA a row.
- "samples": 2,048 samples of a row give a threshold that a few more than k scores pass; they are
  collected and selected from. One CTA a row, or several for few long rows.

Thresholds were measured on an H200; docs/performance/indexer.md has the rows named beside them.
"""

from __future__ import annotations

import dataclasses

from anymla.ops.device import Target

# Entries that share a maximum.
GROUP = 16

# Threshold, and what it was measured on (requests x queries x entries).
#
# Top-k. The "groups" kernel holds all maxima of a row and all scores of k groups in registers.
MAX_GROUPS = 16_384
MAX_GROUPS_K = 1024
# Rows held whole; with no more groups than are kept, maxima tell nothing. 128 x 1 x 8192.
MAX_ROW_ENTRIES = 16_384
# Without histograms more rows than this are sampled beyond 4,096 entries. Prefill 2048 x 8192.
_MANY_ROWS, _MANY_ROWS_ENTRIES = 256, 4096
# Maxima cost prefill scores a tenth: worth it only for longer rows. Prefill 2048 x 65536.
_SHORT_ROW = 16_384
# Few long rows are split over several CTAs each. 1 x 1 x 262144.
_FEW_ROWS, _LONG_ROW, _ROW_SPLITS = 4, 131_072, 32
# More rows want small CTAs, several to an SM. Prefill 2048 x 8192, 2048 x 65536.
_SMALL_CTA_ROWS = 128
# A wave of an H200: beyond it two top-k CTAs share an SM. Prefill 2048 x 8192.
_SM90_SMALL_CTA_ROWS = 132
# A chunk of rows is a whole number of waves of two rows an SM. Prefill 8192 x 262144.
_CHUNK_ROWS_PER_SM = 2

# Scores. CTAs that fill any GPU, and the most tiles that one of them takes. 128 x 1 x 32768.
_SCORE_CTAS, _MAX_TILES_PER_CTA = 1024, 64
# Keys of all requests from which on one row has two tiles of keys in flight: 152 against 158 us at
# 4 million keys, 47 against 45 at one million. 128 x 1 x 32768, 32 x 1 x 32768.
_DEEP_PIPELINE_KEYS = 1 << 21
_FOUR_STAGES_SHARED_BYTES = 128 * 1024
# sm_90: tiles an SM from which on its registers are all used. 128 x 1 x 2048, 128 x 2 x 8192.
_SM90_MANY_TILES, _SM90_MANY_TILES_OF_PAIRS = 16, 40
# sm_90: splits of a context in one launch, and tiles that take as long as starting a CTA.
_SM90_MAX_SPLITS, _SM90_STARTUP_TILES = 132, 8

# topk_per_row: columns that a CTA loads together, CTAs that fill any GPU, and the most candidates
# that the splits of a row may leave.
_TOPK_SMALL_BLOCK, _TOPK_BLOCK = 1024, 4096
_TOPK_CTAS = 512
_TOPK_MAX_CANDIDATES = 2 * _TOPK_BLOCK
# More winners are ranked by counting, because a sorting network grows too large.
_TOPK_MAX_SORTED = 2048


def cdiv(a: int, b: int) -> int:
    """Quotient of a and b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


# --- select_topk -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SelectConfig:
    """How a call selects.

    Attributes:
        algorithm: "all", "row", "groups" or "samples".
        chunk: tokens that are scored at a time.
        padded_k: k, rounded up to a power of two.
        elements: "row": entries of a row, rounded up to a power of two.
        groups: "groups": maxima of a row, rounded up to a power of two.
        splits: "samples": CTAs that share a row.
        capacity: "samples": candidates that a split can hold.
        samples: "samples": scores that the threshold is taken from.
        block: "samples": scores that a CTA loads together; 0 for what suits the number of rows.
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
        """Scratch that a token of a chunk takes."""
        if self.algorithm == "all":
            return 0
        scores = 4 * padded_entries(entries)
        if self.algorithm == "row":
            return scores
        if self.algorithm == "groups":
            return scores + 4 * padded_entries(entries) // GROUP + 4 * self.padded_k
        return scores + self.splits * (8 * self.capacity + 4)


def padded_entries(entries: int) -> int:
    """Columns of the scores of ``entries`` entries: whole groups of maxima, lines of 64 bytes."""
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
    """The config of a call.

    Args:
        rows: tokens.
        entries: entries that a token may see.
        k: entries that it keeps.
        target: of the device, with its number of SMs.
        scratch_bytes: bound of what ``rows`` rows take.
        histograms: top-k by histograms in shared memory (sm_90), for which neither few rows nor
            many are worth sampling.
        further_row_bytes: scratch that a row takes besides.

    Raises:
        ValueError: one token takes more than ``scratch_bytes``.
    """
    padded_k = next_power_of_2(max(k, 16))
    if entries <= k:
        return SelectConfig("all", rows, padded_k)
    any_row = histograms or rows <= _MANY_ROWS
    max_row = min(GROUP * k, MAX_ROW_ENTRIES if any_row else _MANY_ROWS_ENTRIES)
    if target.arc_a:
        max_row = min(max_row, MAX_ROW_ENTRIES // 2)  # all of them spill 122 registers there
    few = rows <= _FEW_ROWS and entries >= _LONG_ROW and not histograms
    short = not any_row and entries <= _SHORT_ROW
    groups = next_power_of_2(cdiv(entries, GROUP))
    if entries <= max_row:
        config = SelectConfig("row", rows, padded_k, elements=next_power_of_2(max(entries, 64)))
    elif few or short or k > _max_groups_k(target) or groups > MAX_GROUPS:
        # Enough for three standard deviations of sampling and then some.
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
    """Most entries that a row's top-k groups may be kept for.

    Intel's compiler moves the addresses of their 16 k scores through shared memory: 72 KiB for 512.
    """
    if not target.intel:
        return MAX_GROUPS_K
    return 256 if target.arc_a else 512


def row_warps(elements: int, groups: int, rows: int, target: Target) -> int:
    """Warps of "row" and "groups": 32 values a thread at most, and small CTAs for many rows."""
    lanes = max(elements, groups) * (2 if target.arc_a else 1)
    # Intel: 32 values a thread spill 52 registers.
    small = rows > _SMALL_CTA_ROWS and not target.intel
    threads = max(64, min(1024, lanes // (32 if small else 16)))
    return max(1, threads // target.warp_size)


def row_registers(rows: int, target: Target) -> dict[str, int]:
    """Launch options of all algorithms: many rows want several CTAs on an SM."""
    return {"maxnreg": 128} if rows > _SMALL_CTA_ROWS and target.backend == "cuda" else {}


def sample_block_and_warps(rows: int, config: SelectConfig, target: Target) -> tuple[int, int]:
    """Scores that a CTA of "samples" loads together, and its warps."""
    many = rows > _SMALL_CTA_ROWS
    threads = 256 if many and config.capacity <= 4096 else 512
    block = config.block or (4096 if many else 8192)
    if target.arc_a:
        block //= 4  # whole, it spills up to 155 registers there; a quarter, 45
    return block, max(1, threads // target.warp_size)


@dataclasses.dataclass(frozen=True)
class Sm90TopkConfig:
    """How a CTA of ``gluon_sm90_topk`` holds a row.

    Attributes:
        warps: of the CTA.
        registers: of a thread, at most; 0 for no limit.
        groups: maxima, as many as threads at least; 0 for whole rows.
        elements: entries, or candidates from groups, as many as threads at least.
    """

    warps: int
    registers: int
    groups: int
    elements: int


def choose_sm90_topk_config(config: SelectConfig, rows: int) -> Sm90TopkConfig:
    """8 to 32 values a thread; of many rows two CTAs share an SM."""
    elements = config.elements or config.padded_k * GROUP
    most = max(elements, config.groups)
    warps = max(4, min(16, most // 8 // 32))
    groups = max(config.groups, 32 * warps) if config.groups else 0
    registers = 64 if rows > _SM90_SMALL_CTA_ROWS and warps == 16 and most <= 8192 else 0
    return Sm90TopkConfig(warps, registers, groups, max(elements, 32 * warps))


# --- scores ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """A tile of ``triton_scores``: keys against the heads of a few rows. A constexpr.

    Attributes:
        rows: rows of queries.
        heads: heads of a row, padded.
        width: channels, padded.
        block_k: channels that are multiplied at a time.
        keys: keys.
        warps: warps of the CTA.
        stages: tiles of keys in flight.
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
    """The tile for rows that share their keys.

    Heads are the wide dimension of the product: a row of 64 heads against 128 keys, or two rows
    against 64 keys, fill a warpgroup's accumulators.

    Args:
        rows: rows of queries that share keys.
        heads: heads of a row.
        width: channels of a key.
        math: arithmetic of the product.
        target: of the device.
        paged_keys: keys of all requests, if they are found through a block table. Page ids are
            then copied ahead as well, two loads deep: of four stages one tile of keys is in
            flight, of five two. A row alone has large tiles, of which fewer CTAs then fit.
        listed: the table lists blocks of a few entries, and a CTA has a tile or two of them: more
            loads ahead take 6 to 9 % longer (1, 8 and 32 rows of 16,384 entries, H100).
    """
    padded_heads = next_power_of_2(heads)
    narrow = target.narrow
    # Arc A: two rows spill 120 registers, and take a third more instructions than one and one.
    columns = 64 if math == "fp32" or rows == 1 or narrow or target.arc_a else 128
    together = 1 if rows == 1 else max(1, columns // padded_heads)
    padded_heads = max(padded_heads, 16 // together)
    columns = together * padded_heads
    padded_width = max(next_power_of_2(width), 32)
    if target.arc_a:
        # Four scores a thread, or two where keys may be e2m1 and a step is a block of them.
        block_k, most = (16, 4096) if math == "fp16" else (32, 2048)
        keys = max(16, min(most // columns, 64))
        return ScoreConfig(together, padded_heads, padded_width, block_k, keys, 32, 1)
    if math == "fp32":
        # Without matrix instructions a thread keeps its operands' channels in registers.
        keys, warps = (16, 8) if target.backend == "xpu" else (32, 4)
        return ScoreConfig(together, padded_heads, padded_width, 32, keys, warps, 1)
    # Accumulators, and bytes of a tile of keys.
    keys = max(16, min((2048 if narrow else 8192) // columns, 128 * 128 // padded_width, 128))
    stages = 4 if target.shared_bytes >= _FOUR_STAGES_SHARED_BYTES else 2
    if paged_keys is not None and stages == 4 and target.backend == "cuda":
        stages = 5 if together > 1 or paged_keys >= _DEEP_PIPELINE_KEYS else 4
    if listed:
        stages = min(stages, 2)
    # Intel: 4 warps spill 100 registers, or 195 for two rows, 8 none (docs/intel.md).
    warps = 8 if narrow or target.backend == "xpu" else 4
    return ScoreConfig(together, padded_heads, padded_width, padded_width, keys, warps, stages)


def decodes_words(target: Target, math: str) -> bool:
    """Whether e4m3 codes are decoded four at a time: where that takes fewer instructions."""
    return target.backend == "xpu" and math in ("fp16", "bf16")


def score_registers(config: ScoreConfig, math: str, filled: bool, target: Target) -> dict[str, int]:
    """Launch options: CTAs of two rows of FP8 products fit four to an SM unless they fill."""
    bounded = math == "e4m3" and config.rows > 1 and target.backend == "cuda" and not filled
    return {"maxnreg": 128} if bounded else {}


def split_size(groups: int, keys: int, config: ScoreConfig) -> int:
    """Keys of a split, of ``keys``, if there are ``groups`` groups of rows."""
    tiles = cdiv(max(keys, 1), config.keys)
    splits = max(cdiv(_SCORE_CTAS, max(groups, 1)), cdiv(tiles, _MAX_TILES_PER_CTA))
    return cdiv(tiles, min(splits, tiles)) * config.keys


@dataclasses.dataclass(frozen=True)
class Sm90ScoreConfig:
    """How CTAs of ``gluon_sm90_scores`` work.

    Attributes:
        overlap: the products of a tile run while the sums of the tile before are taken.
        ctas_per_sm: CTAs that fit an SM.
        registers: of a thread when the kernel begins, at most; 0 for an equal part of them all.
        consumer_registers: of a consumer's thread later on.
    """

    overlap: bool
    ctas_per_sm: int
    registers: int
    consumer_registers: int


SM90_OVERLAP = Sm90ScoreConfig(True, 1, 0, 232)
# CTAs that have little to do leave registers to the top-k kernel, which is launched by PDL. The
# products of pairs need 90 registers from the beginning.
SM90_FEW_PAIRS = Sm90ScoreConfig(False, 1, 96, 128)
SM90_SINGLE = Sm90ScoreConfig(False, 2, 80, 104)
SM90_FEW_SINGLE = dataclasses.replace(SM90_SINGLE, ctas_per_sm=1)


def choose_sm90_score_config(
    groups: int, tiles: int, pairs: bool, sm_count: int
) -> Sm90ScoreConfig:
    """The config for ``groups`` rows or, ``pairs``, pairs of rows over ``tiles`` tiles each."""
    tiles_per_sm = groups * tiles / sm_count
    if pairs:
        return SM90_OVERLAP if tiles_per_sm > _SM90_MANY_TILES_OF_PAIRS else SM90_FEW_PAIRS
    return SM90_SINGLE if tiles_per_sm > _SM90_MANY_TILES else SM90_FEW_SINGLE


def sm90_context_splits(groups: int, tiles: int, ctas: int) -> int:
    """Splits of the context: the number that leaves the fewest CTAs idle in the last wave.

    What a CTA spends before its first tile counts as tiles.

    Args:
        groups: groups of rows, each over all tiles.
        tiles: tiles of the context.
        ctas: CTAs that the device holds at a time.
    """

    def cost(splits: int) -> int:
        waves = cdiv(groups * splits, ctas)
        return waves * (cdiv(tiles, splits) + _SM90_STARTUP_TILES)

    return min(range(1, max(1, min(_SM90_MAX_SPLITS, tiles)) + 1), key=cost)


# --- topk_per_row ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TopkConfig:
    """How ``topk_per_row`` selects.

    Attributes:
        splits: splits of a row.
        block: columns of a split that a CTA loads together.
        merge_block: the same among the candidates of all splits.
        resident: a split fits one block.
        merge_resident: the candidates of a row fit one block.
        sorted: winners are sorted, not ranked by counting.
    """

    splits: int
    block: int
    merge_block: int
    resident: bool
    merge_resident: bool
    sorted: bool


def choose_topk_config(rows: int, columns: int, kept: int) -> TopkConfig:
    """The config for ``kept`` = min(k, columns) winners."""
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
    """Warps of a CTA that loads ``block`` columns together, once and for all if ``resident``."""
    large = block > _TOPK_SMALL_BLOCK
    if target.arc_a:
        # 16 spill 77 registers where columns stay in registers, 32 spill 133 where they do not.
        return (32 if resident else 16) if large else 8
    return 8 if large else 4


def candidates_warps(target: Target) -> int:
    """Warps of a CTA that takes blocks of scores, or hides them."""
    return 8 if target.arc_a else 4


def rank_warps(target: Target) -> int:
    """Warps of a CTA that ranks winners by counting."""
    return 8 if target.arc_a else 4


def sort_warps(winners: int, target: Target) -> int:
    """Warps of a CTA that sorts so many winners."""
    if target.intel:
        # 256 winners a warp spill 202 registers; on Arc A 128 spill 230.
        return max(1, min(winners // (64 if target.arc_a else 128), 32 if target.arc_a else 16))
    return max(1, min(winners // 256, 8))

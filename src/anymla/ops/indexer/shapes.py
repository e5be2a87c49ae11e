"""Named real shapes of the indexer: released models, and the cases of builds and benchmarks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class IndexerShape:
    """Sizes of one model's indexer.

    Attributes:
        heads: number of index heads.
        channels: number of channels of a head and of a key.
        rope: number of channels that rotate.
        page_size: number of entries in a page of the index cache.
        topk: number of entries that a token keeps.
        ratio: number of tokens that an entry stands for.
    """

    heads: int
    channels: int
    rope: int
    page_size: int
    topk: int
    ratio: int


V4_FLASH = IndexerShape(64, 128, 64, 64, 512, 4)
V4_PRO = dataclasses.replace(V4_FLASH, topk=1024)
# Layers of V4.1 that select within blocks.
V41_FLASH = dataclasses.replace(V4_FLASH, heads=32, page_size=256, ratio=1)


@dataclasses.dataclass(frozen=True)
class SelectShape:
    """Selection of ``requests`` x ``queries`` rows over ``keys`` entries; prefills are causal."""

    requests: int
    queries: int
    keys: int
    prefill: bool = False

    @property
    def rows(self) -> int:
        """Number of queries over all requests."""
        return self.requests * self.queries

    @property
    def label(self) -> str:
        """Short name of the shape for tables."""
        if self.prefill:
            return f"prefill {self.queries} x {self.keys}"
        return f"decode {self.requests} x {self.queries} x {self.keys}"


DECODES = tuple(
    SelectShape(requests, queries, keys)
    for keys in (2048, 8192, 32_768, 262_144)
    for requests in (1, 8, 32, 128)
    for queries in (1, 2)
)
PREFILLS = tuple(
    SelectShape(1, queries, keys, prefill=True)
    for queries in (2048, 8192)
    for keys in (8192, 65_536, 262_144)
)
# Selections to build, with k: those above as far as their kernels differ, V4-Flash's first, then
# V4-Pro's, a tiny model's and V3.2's k.
SELECTIONS = (
    *((shape, V4_FLASH.topk) for shape in DECODES if shape.requests in (1, 128)),
    *((shape, V4_FLASH.topk) for shape in PREFILLS if shape.queries == 2048),
    *((SelectShape(32, 1, keys), V4_FLASH.topk) for keys in (512, 1024, 65_536)),
    *((SelectShape(32, 1, keys), V4_PRO.topk) for keys in (8192, 16_384, 32_768, 65_536, 262_144)),
    (SelectShape(1, 1, 262_144), V4_PRO.topk),
    (SelectShape(1, 2048, 65_536, prefill=True), V4_PRO.topk),
    *((SelectShape(2, 1, keys), 16) for keys in (1024, 32_768, 65_536, 262_144)),
    (SelectShape(1, 2048, 65_536, prefill=True), 16),
    (SelectShape(1, 2048, 65_536, prefill=True), 2048),
    (SelectShape(1, 1, 262_144), 2048),
    (SelectShape(32, 1, 65_536), 2048),
)
RAGGED_SELECTIONS = tuple((SelectShape(32, queries, 65_536), V4_FLASH.topk) for queries in (1, 2))


@dataclasses.dataclass(frozen=True)
class RowsShape:
    """``topk_per_row`` over ``rows`` rows of ``columns`` scores each."""

    rows: int
    columns: int
    k: int

    def __str__(self) -> str:
        return f"top {self.k} of {self.rows} x {self.columns}"


# One shape for each size of sorting network and of block before it; the last rank by counting.
RANKINGS = (
    RowsShape(32, 1024, 16),
    RowsShape(32, 4096, 128),
    RowsShape(512, 8192, 256),
    RowsShape(32, 32_768, 512),
    RowsShape(512, 65_536, 1024),
    RowsShape(1, 262_144, 16),
    RowsShape(1, 262_144, 512),
    RowsShape(32, 32_768, 2048),
    RowsShape(32, 32_768, 4096),
)
# DeepSeek-V4.1's candidate blocks: entries in a block, and number of blocks that are kept.
CANDIDATE_BLOCK, CANDIDATE_BLOCKS = 8, 2048
# Selections within candidate blocks.
WITHIN_BLOCKS = (SelectShape(1, 1, 262_144), SelectShape(32, 1, 65_536))

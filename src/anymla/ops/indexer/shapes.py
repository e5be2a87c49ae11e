"""The indexer's named real shapes: released models, and the cases of builds and benchmarks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class IndexerShape:
    """Sizes of a model's indexer.

    Attributes:
        heads: index heads.
        channels: of a head and of a key.
        rope: channels that are rotated.
        page_size: entries of a page of the index cache.
        topk: entries that a token keeps.
        ratio: tokens of an entry.
    """

    heads: int
    channels: int
    rope: int
    page_size: int
    topk: int
    ratio: int


V4_FLASH = IndexerShape(64, 128, 64, 64, 512, 4)
V4_PRO = dataclasses.replace(V4_FLASH, topk=1024)
# The layers that select within blocks.
V41_FLASH = dataclasses.replace(V4_FLASH, heads=32, page_size=256, ratio=1)


@dataclasses.dataclass(frozen=True)
class SelectShape:
    """Sizes of a selection: ``requests`` of ``queries`` each over ``keys``; prefills are causal."""

    requests: int
    queries: int
    keys: int
    prefill: bool = False

    @property
    def rows(self) -> int:
        """Queries in all."""
        return self.requests * self.queries

    @property
    def label(self) -> str:
        """For people."""
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
# What selections are built for, and k: those above as far as other kernels run, V4-Flash's first,
# then V4-Pro's, a tiny model's and k of V3.2.
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
    """``topk_per_row`` of ``rows`` rows of ``columns`` scores."""

    rows: int
    columns: int
    k: int

    def __str__(self) -> str:
        return f"top {self.k} of {self.rows} x {self.columns}"


# One a size of the sorting network, and of the blocks before it; the last are ranked.
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
# DeepSeek-V4.1's blocks of entries that later layers select within: entries of a block, and blocks.
CANDIDATE_BLOCK, CANDIDATE_BLOCKS = 8, 2048
# Selections within them.
WITHIN_BLOCKS = (SelectShape(1, 1, 262_144), SelectShape(32, 1, 65_536))

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

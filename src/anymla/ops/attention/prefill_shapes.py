"""Named shapes of prefill attention: the last tokens of a sequence, in V4's kinds of layers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """Shape of one call of prefill attention.

    Attributes:
        tokens: number of query tokens.
        heads: heads per query.
        context: tokens in the sequence, whose last ones are the queries.
        ratio: tokens compressed into one entry; 0 for layers without entries.
        topk: entries that the indexer selects, or 0 to attend to all.
        window: tokens in the window.
    """

    tokens: int
    heads: int
    context: int
    ratio: int = 0
    topk: int = 0
    window: int = 128

    @property
    def entries(self) -> int:
        """Compressed entries in the whole sequence."""
        return self.context // self.ratio if self.ratio else 0

    def __str__(self) -> str:
        seen = f"top {self.topk}" if self.topk else f"{self.entries} entries"
        return f"{self.tokens} tokens, {self.heads} heads, {seen}"


FLASH_WINDOW = PrefillShape(4096, 64, 32_768)
FLASH_SELECTED = PrefillShape(4096, 64, 32_768, 4, 512)
FLASH_ALL = PrefillShape(4096, 64, 32_768, 128)
# DeepSeek-V3.2's layers list tokens themselves, and have no window.
V32_SELECTED = PrefillShape(4096, 128, 32_768, 1, 2048, window=0)
PRO_SELECTED = PrefillShape(4096, 128, 32_768, 4, 1024)
PRO_ALL = PrefillShape(4096, 128, 32_768, 128)
# One GPU's share of the heads under tensor parallelism, which does not fill a tile.
SPLIT_SELECTED = PrefillShape(4096, 16, 32_768, 4, 512)
SPLIT_ALL = PrefillShape(4096, 16, 32_768, 128)

"""Named shapes of prefill attention: the last tokens of a sequence, in V4's kinds of layers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """One call.

    Attributes:
        tokens: queries.
        heads: of a query.
        context: tokens of the sequence, the queries being its last.
        ratio: tokens of an entry; 0 for layers without entries.
        topk: entries that the indexer selects, or 0 for all.
        window: tokens of the window.
    """

    tokens: int
    heads: int
    context: int
    ratio: int = 0
    topk: int = 0
    window: int = 128

    @property
    def entries(self) -> int:
        """Entries of the sequence."""
        return self.context // self.ratio if self.ratio else 0

    def __str__(self) -> str:
        seen = f"top {self.topk}" if self.topk else f"{self.entries} entries"
        return f"{self.tokens} tokens, {self.heads} heads, {seen}"


FLASH_WINDOW = PrefillShape(4096, 64, 32_768)
FLASH_SELECTED = PrefillShape(4096, 64, 32_768, 4, 512)
FLASH_ALL = PrefillShape(4096, 64, 32_768, 128)
PRO_SELECTED = PrefillShape(4096, 128, 32_768, 4, 1024)
PRO_ALL = PrefillShape(4096, 128, 32_768, 128)
# Heads of one of several GPUs, which do not fill a tile.
SPLIT_SELECTED = PrefillShape(4096, 16, 32_768, 4, 512)
SPLIT_ALL = PrefillShape(4096, 16, 32_768, 128)

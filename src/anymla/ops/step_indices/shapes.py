"""Named shapes of a step's index rows: V4's layers by ratio, and their pages."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RowsShape:
    """Sizes of a step's index rows for one kind of layer.

    Attributes:
        ratio: number of tokens of an entry; 1 for rows of the window.
        page_size: number of entries in a page.
        topk: number of entries that a token selects, or most that it sees if it sees all.
        requests: number of requests of the step.
        queries: number of tokens of each request.
        pages: number of pages in a request's row of the block table.
        window: number of tokens in the window.
    """

    ratio: int
    page_size: int
    topk: int
    requests: int = 32
    queries: int = 1
    pages: int = 1000
    window: int = 128

    @property
    def tokens(self) -> int:
        """Number of tokens of the step."""
        return self.requests * self.queries

    def __str__(self) -> str:
        return f"ratio {self.ratio}, pages of {self.page_size}, {self.topk} entries"


FLASH_WINDOW = RowsShape(1, 64, 128)
FLASH_SELECTED = RowsShape(4, 64, 512)
PRO_SELECTED = RowsShape(4, 64, 1024)
# Layers that see all entries: contexts of 8,192 and a million tokens; vLLM's pages are 256 tokens.
SHORT_ALL = RowsShape(128, 2, 64)
LONG_ALL = RowsShape(128, 2, 8192)
# Sizes of which none is a power of two.
ODD = RowsShape(5, 3, 100)
SHAPES = (FLASH_WINDOW, FLASH_SELECTED, PRO_SELECTED, SHORT_ALL, LONG_ALL, ODD)

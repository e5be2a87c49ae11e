"""Named shapes of a step's rows: V4's layers by ratio, and where their entries are."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RowsShape:
    """A step over one kind of layer.

    Attributes:
        ratio: tokens of an entry; 1 for the window's rows.
        page_size: entries of a page.
        topk: entries that a token selects, or all of its entries' number at most.
        requests: of the step.
        queries: of a request.
        pages: of a request's block table.
        window: tokens of the window.
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
        """Of the step."""
        return self.requests * self.queries

    def __str__(self) -> str:
        return f"ratio {self.ratio}, pages of {self.page_size}, {self.topk} entries"


FLASH_WINDOW = RowsShape(1, 64, 128)
FLASH_SELECTED = RowsShape(4, 64, 512)
PRO_SELECTED = RowsShape(4, 64, 1024)
# All entries: of 8,192 tokens, and of a million; vLLM has pages of 256 tokens.
SHORT_ALL = RowsShape(128, 2, 64)
LONG_ALL = RowsShape(128, 2, 8192)
# Nothing is a power of two.
ODD = RowsShape(5, 3, 100)
SHAPES = (FLASH_WINDOW, FLASH_SELECTED, PRO_SELECTED, SHORT_ALL, LONG_ALL, ODD)

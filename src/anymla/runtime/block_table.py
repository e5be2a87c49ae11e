"""The block tables of one cache group, which map a request's tokens to pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anymla.runtime.cache_groups import CacheGroup, ceil_div
from anymla.runtime.page_pool import NULL_PAGE, PagePool
from anymla.runtime.upload import upload

# Rows of a table begin at multiples of 64 bytes: Triton compiles a kernel once for sizes that are
# multiples of 16 and once more for other sizes, so that padded rows and column counts need one
# build.
_COLUMN_STEP = 16


def joint_tables(
    groups: Sequence[CacheGroup], *, max_requests: int, max_seq_len: int, device: torch.device
) -> tuple[Tensor, dict[str, range]]:
    """Allocate the tables of all groups side by side, so that one access reaches a request in all.

    Returns:
        int32 [max_requests + 1, columns] filled with null pages, and by group name the columns that
        belong to the group.
    """
    counts = [_in_steps(ceil_div(max_seq_len, group.tokens_per_page)) for group in groups]
    ends = list(accumulate(counts))
    columns = {
        group.name: range(end - count, end)
        for group, count, end in zip(groups, counts, ends, strict=True)
    }
    shape = max_requests + 1, ends[-1]
    return torch.full(shape, NULL_PAGE, dtype=torch.int32, device=device), columns


class BlockTable:
    """Block tables int32 [max_requests + 1, columns] on the device, and the pages held on the host.

    Column j of a row covers tokens j * tokens_per_page onwards. Columns without a page hold the
    null page, so that no column names a page that was returned to the pool. The last row serves
    padding requests and never has a page. Changes reach the device in one write per step, when the
    tables are next read.

    Attributes:
        joint_columns: range of columns of the joint tables that belong to this group.
        device_table: int32 [max_requests + 1, columns], the tables as of the last write.
    """

    def __init__(
        self, group: CacheGroup, pool: PagePool, tables: Tensor, joint_columns: range
    ) -> None:
        """Start without pages.

        Args:
            group: cache group that the tables belong to.
            pool: free pages of the group.
            tables: int32 joint tables from ``joint_tables``.
            joint_columns: the group's columns within ``tables``.
        """
        self.group = group
        self.pool = pool
        self.joint_columns = joint_columns
        self.device_table = tables[:, joint_columns.start : joint_columns.stop]
        self._joint = tables
        self._columns = len(joint_columns)
        max_requests = len(tables) - 1
        self._first = [0] * max_requests
        self._pages: list[deque[int]] = [deque() for _ in range(max_requests)]
        self._kept: list[dict[int, int]] = [{} for _ in range(max_requests)]
        self._changes: dict[tuple[int, int], int] = {}

    def held(self, row: int) -> dict[int, int]:
        """Return column -> page of all pages of ``row``, those kept for a rewind included."""
        return self._kept[row] | dict(enumerate(self._pages[row], self._first[row]))

    def extend(self, row: int, length: int) -> None:
        """Take pages until every complete entry of the first ``length`` tokens has a slot."""
        pages = self._pages[row]
        for column in range(self._first[row] + len(pages), self.group.pages(length)):
            page = self.pool.take()
            pages.append(page)
            self._changes[row, column] = page

    def slide(self, row: int, confirmed: int, kept_at: int | None = None) -> None:
        """Return the pages that tokens at ``confirmed`` and later do not read.

        For a row that begins at a later position, because its earlier tokens were computed
        elsewhere, such pages are never taken.

        Args:
            row: row of the request.
            confirmed: number of tokens that are final.
            kept_at: length that ``rewind`` may return to; pages that tokens from there on read are
                kept. None if there is no such length.
        """
        obsolete = self.group.obsolete_pages(confirmed)
        kept = range(0) if kept_at is None else self._columns_read(kept_at)
        self._drop_before(row, obsolete, kept)
        if not self._pages[row]:
            self._first[row] = max(self._first[row], obsolete)

    def clear(self, row: int) -> None:
        """Return every page of ``row``."""
        self._drop_before(row, self._first[row] + len(self._pages[row]))
        self._first[row] = 0
        for page in self._kept[row].values():
            self.pool.put_back(page)
        self._kept[row].clear()

    def can_rewind(self, row: int, length: int) -> bool:
        """True if ``row`` still holds every page that tokens at ``length`` and later read."""
        return self.held(row).keys() >= set(self._columns_read(length))

    def rewind(self, row: int, length: int) -> None:
        """Go back to ``length`` tokens, or stay there, and return the pages that are not read.

        Args:
            row: row of the request.
            length: number of tokens for which ``can_rewind`` holds.
        """
        held = self.held(row)
        read = self._columns_read(length)
        for column, page in held.items():
            if column not in read:
                self.pool.put_back(page)
                self._changes[row, column] = NULL_PAGE
        for column in read:
            self._changes[row, column] = held[column]
        self._kept[row].clear()
        self._pages[row] = deque(held[column] for column in read)
        self._first[row] = read.start

    def _columns_read(self, length: int) -> range:
        """Return the columns with entries of the first ``length`` tokens that later tokens read."""
        return range(self.group.obsolete_pages(length), self.group.pages(length))

    def rows(self, rows: Tensor, max_seq_len: int) -> Tensor:
        """Return the tables of a step's requests.

        Args:
            rows: int32 or int64 [R] on the device, rows of the requests.
            max_seq_len: longest of the requests in tokens; the tables are cut to its columns.

        Returns:
            int32 [R, P] page numbers, P at least 1.
        """
        self.write_changes()
        return self.device_table[:, : self.columns(max_seq_len)].index_select(0, rows)

    @property
    def num_changes(self) -> int:
        """Number of changes that have not reached the device."""
        return len(self._changes)

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return and clear the changes: indices into the flat joint tables, and their new pages."""
        width, first = self._joint.shape[1], self.joint_columns.start
        places = [row * width + first + column for row, column in self._changes]
        pages = list(self._changes.values())
        self._changes.clear()
        return places, pages

    def write_changes(self) -> None:
        """Write the changes to the device."""
        if self._changes:
            places, pages = upload(self.take_changes(), self.device_table.device)
            self._joint.view(-1).scatter_(0, places.long(), pages)

    def host_rows(self, rows: list[int], max_seq_len: int) -> NDArray[np.int32]:
        """Return ``rows`` of the tables as a NumPy array; the device must be the CPU."""
        table: NDArray[np.int32] = self.device_table.numpy()
        for where, page in self._changes.items():
            table[where] = page
        self._changes.clear()
        columns = self.columns(max_seq_len)
        if len(rows) == 1:
            return table[rows[0] : rows[0] + 1, :columns].copy()
        return table[rows, :columns]

    def columns(self, max_seq_len: int) -> int:
        """Return the columns that requests of this length need, a multiple of ``_COLUMN_STEP``."""
        return min(self._columns, _in_steps(ceil_div(max_seq_len, self.group.tokens_per_page)))

    def _drop_before(self, row: int, column: int, kept: range = range(0)) -> None:
        pages = self._pages[row]
        while pages and self._first[row] < column:
            page, first = pages.popleft(), self._first[row]
            if first in kept:
                self._kept[row][first] = page
            else:
                self.pool.put_back(page)
            self._changes[row, first] = NULL_PAGE
            self._first[row] += 1


def _in_steps(columns: int) -> int:
    return max(1, ceil_div(columns, _COLUMN_STEP)) * _COLUMN_STEP

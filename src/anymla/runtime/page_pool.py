"""The free list of one cache group's pages, with reservations made when a request is admitted."""

from __future__ import annotations

NULL_PAGE = 0


class PagePool:
    """Hands out page numbers 1 .. num_pages - 1; page 0 is the null page and never leaves.

    A request reserves its worst case once and takes pages within it. Reservations never exceed the
    capacity, so ``take`` cannot fail and no request stalls half way through.

    Attributes:
        name: name of the cache group, for messages.
        num_pages: number of pages of the group's tensors, the null page included.
        reserved: number of pages promised to admitted requests.
    """

    def __init__(self, name: str, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"page pool {name!r}: needs at least the null page, got {num_pages}")
        self.name = name
        self.num_pages = num_pages
        self.reserved = 0
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._is_out = bytearray(num_pages)

    @property
    def capacity(self) -> int:
        """Most pages that can be out at once."""
        return self.num_pages - 1

    @property
    def held(self) -> int:
        """Number of pages that are out now."""
        return self.capacity - len(self._free)

    def can_reserve(self, pages: int) -> bool:
        """True if ``pages`` more pages can be promised."""
        return self.reserved + pages <= self.capacity

    def reserve(self, pages: int) -> None:
        """Promise ``pages`` pages to a request."""
        assert pages >= 0
        assert self.can_reserve(pages), (self.name, pages, self.reserved)
        self.reserved += pages

    def cancel(self, pages: int) -> None:
        """Take a promise back once its pages have been returned."""
        assert 0 <= pages <= self.reserved, (self.name, pages, self.reserved)
        self.reserved -= pages
        assert self.held <= self.reserved, (self.name, self.held, self.reserved)

    def take(self) -> int:
        """Take a free page; the one returned last comes first."""
        assert self.held < self.reserved, f"page pool {self.name!r}: taking beyond reservations"
        page = self._free.pop()
        self._is_out[page] = 1
        return page

    def put_back(self, page: int) -> None:
        """Return a page."""
        assert self._is_out[page], f"page pool {self.name!r}: page {page} is not out"
        self._is_out[page] = 0
        self._free.append(page)

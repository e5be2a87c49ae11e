"""Rows of a cache, listed for each query: the one form in which attention takes them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from anymla.formats.pages import pages_of

_LARGEST_INT32 = 2**31 - 1


class CacheRows(NamedTuple):
    """One cache and the rows of it that each query attends to.

    Attributes:
        cache: pages [P, B, row] (or [P, B, 1, row]) in ``layout``; any page stride.
        layout: id of the layout of the pages.
        indices: slots ``page * B + offset``, [T, K] (or [T, 1, K]) int32, in any order.
        lengths: number of leading columns of ``indices`` in use, [T] int32; None for all K.
    """

    cache: Tensor
    layout: str
    indices: Tensor
    lengths: Tensor | None = None

    def dense(self) -> CacheRows:
        """Return the rows with 3-D pages, 2-D slots of unit stride, and contiguous lengths."""
        indices = dense(self.indices)
        lengths = None if self.lengths is None else self.lengths.contiguous()
        return CacheRows(pages_of(self.cache), self.layout, indices, lengths)

    def part(self, tokens: slice) -> CacheRows:
        """Return the rows of a slice of the queries."""
        lengths = None if self.lengths is None else self.lengths[tokens]
        return self._replace(indices=self.indices[tokens], lengths=lengths)

    @property
    def width(self) -> int:
        """Number of columns K of the list."""
        return self.indices.shape[-1]

    @property
    def limit(self) -> int:
        """Number of slots of the cache, at most 2^31 - 1; slots outside are skipped."""
        return min(self.cache.shape[0] * self.cache.shape[1], _LARGEST_INT32)


def dense(indices: Tensor) -> Tensor:
    """Return lists [T, K] or [T, 1, K] as [T, K] with unit stride along K."""
    indices = flat(indices)
    return indices if not indices.numel() or indices.stride(1) == 1 else indices.contiguous()


def flat(indices: Tensor) -> Tensor:
    """Drop the singleton middle dimension that FlashMLA's callers carry."""
    if isinstance(indices, Tensor) and indices.ndim == 3 and indices.shape[1] == 1:
        return indices.squeeze(1)
    return indices

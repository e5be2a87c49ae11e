"""Attention inputs over poisoned, scattered caches, with their float64 result."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops.attention import CacheRows
from anymla.testing.conformance.expected import Attention, attend
from anymla.testing.generate import GuardedCache, guarded_cache, hostile_indices
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries


@dataclasses.dataclass
class Scope:
    """One cache and the rows that each token reads.

    Attributes:
        guarded: cache of which only the rows in use are written; all else is poison.
        layout: layout id of the cache.
        indices: int32 [T, K] slots, hostile from column ``lengths`` on.
        lengths: int32 [T], number of valid slots.
    """

    guarded: GuardedCache
    layout: str
    indices: Tensor
    lengths: Tensor

    @property
    def cache(self) -> Tensor:
        """Tensor of the cache."""
        return self.guarded.cache

    @property
    def listed(self) -> CacheRows:
        """The rows in the form that attention takes."""
        return CacheRows(self.cache, self.layout, self.indices, self.lengths)

    def rows(self, token: int) -> Tensor:
        """Return the float64 rows that a token reads, without hostile indices."""
        slots = self.indices[token, : self.lengths[token]].long()
        inside = (slots >= 0) & (slots < self.cache.shape[0] * self.cache.shape[1])
        return ROW_FORMATS[self.layout].decode(
            *read_entries(self.cache, slots[inside], self.layout)
        )


def scope(
    tokens: int,
    width: int,
    *,
    lengths: list[int] | None = None,
    page: int = 64,
    layout: str = MAIN_FP8,
    poison_behind: bool = False,
) -> Scope:
    """Make a cache of which each token reads ``lengths[t]`` random rows of ``width`` listed.

    Columns after the length hold invalid slots or, with ``poison_behind``, slots of the cache that
    were never written, which are NaN.
    """
    counts = torch.tensor([width] * tokens if lengths is None else lengths, dtype=torch.int32)
    used = max(1, 3 * width // 2)
    pages = used // page + 3
    guarded = guarded_cache(layout, pages, page)
    order = torch.randperm(pages * page)
    slots, unused = order[:used], order[used:]
    guarded.write(slots, torch.randn(used, guarded.layout.channels))
    indices = hostile_indices(pages * page, tokens, width)
    if poison_behind:
        indices = unused[torch.randint(len(unused), (tokens, width))].int()
    for token, count in enumerate(counts.tolist()):
        indices[token, :count] = slots[torch.randperm(used)[:count]].int()
    return Scope(guarded, layout, indices, counts)


@dataclasses.dataclass
class Scene:
    """Queries, one or two scopes, a sink, and the width of the values (None for whole rows)."""

    q: Tensor
    main: Scope
    extra: Scope | None = None
    sink: Tensor | None = None
    value_dim: int | None = None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments of ``sparse_attention``."""
        keywords: dict[str, Any] = {"sink": self.sink}
        if self.value_dim is not None:
            keywords["value_dim"] = self.value_dim
        rows = [self.main.listed]
        if self.extra is not None:
            rows.append(self.extra.listed)
        return (self.q, rows), keywords

    def expected(self) -> Attention:
        """Compute the float64 result."""
        rows = []
        for token in range(len(self.q)):
            part = self.main.rows(token)
            if self.extra is not None:
                part = torch.cat((part, self.extra.rows(token)))
            rows.append(part)
        return attend(self.q, rows, self.sink, value_dim=self.value_dim)


def scene(
    tokens: int = 3, heads: int = 4, width: int = 40, extra: int = 24, *, sink: bool = False
) -> Scene:
    """Make bfloat16 queries over a window cache of 64-entry pages and one of 2-entry pages.

    There is no sink by default: a library that drops the sink fails the cases about it, and the
    other cases still judge it.
    """
    return Scene(
        torch.randn(tokens, heads, 512).bfloat16(),
        scope(tokens, width),
        scope(tokens, extra, page=2) if extra else None,
        torch.randn(heads) if sink else None,
    )


def coded(*shape: int) -> Tensor:
    """Draw float32 values that e4m3 holds exactly, so that libraries of FP8 can take them."""
    return torch.randn(*shape).to(torch.float8_e4m3fn).float()

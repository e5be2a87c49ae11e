"""Cache groups: the caches that a model needs, and the tokens that a page of each holds.

Every kind of cache is a group: one pool of page numbers, one block table a request, and one tensor
a layer. A page number means the same page in all layers of the group. Layers that read what another
layer writes have no tensor of their own. Page sizes are those of vLLM for DeepSeek-V4: 64 window
rows, the entries of 256 tokens, 4 or 8 states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from anymla.layers.spec import WINDOW_GROUP, LayerSpec

CacheKind = Literal["window", "compressed", "index", "state", "index_state"]

WINDOW_PAGE_TOKENS = 64
COMPRESSED_PAGE_TOKENS = 256
OVERLAP_STATE_PAGE_TOKENS = 4
STATE_PAGE_TOKENS = 8


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up to an integer."""
    return -(-a // b)


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """One kind of cache. A length below is a number of tokens 0 .. length - 1 of one request.

    Attributes:
        name: name of the group: "window", "c4", "index", "state_c4", "state_index", ...
        kind: name of the ``LayerCache`` field that holds its tensors.
        page_size: number of entries per page.
        ratio: tokens per entry; only complete entries are stored. 1 for windows and states.
        retention: a token at position p reads only entries of tokens > p - retention; None if it
            reads all.
        layers: indices of the group's layers in the model's list of layer specs.
        dense: True if some layer attends to all entries instead of a selection.
        selection_width: smallest number of entries that an indexer of the group selects; 0 without
            indexers.
    """

    name: str
    kind: CacheKind
    page_size: int
    ratio: int
    retention: int | None
    layers: tuple[int, ...]
    dense: bool = False
    selection_width: int = 0

    @property
    def tokens_per_page(self) -> int:
        """Tokens that one page covers."""
        return self.page_size * self.ratio

    def lists_entries(self, length: int) -> bool:
        """True if a layer attends to every entry of ``length`` tokens.

        A layer with an indexer does so while all entries fit in its selection.
        """
        return self.dense or 0 < self.selection_width >= length // self.ratio

    def pages(self, length: int) -> int:
        """Return the leading pages that hold the complete entries of ``length`` tokens."""
        return ceil_div(length // self.ratio, self.page_size)

    def obsolete_pages(self, confirmed: int) -> int:
        """Return the number of leading pages that no token at ``confirmed`` or later reads."""
        if self.retention is None:
            return 0
        return max(0, confirmed - self.retention + 1) // self.tokens_per_page

    def worst_case_pages(self, length: int, step_tokens: int) -> int:
        """Return the most pages that a request of ``length`` tokens holds at once.

        Args:
            length: number of tokens that the request may ever write.
            step_tokens: most tokens that it writes in one step.
        """
        if self.retention is None:
            return self.pages(length)
        # Before a step at least retention - 1 tokens are kept; in the worst alignment, n
        # consecutive tokens touch ceil((n - 1) / page) + 1 pages.
        run = self.retention - 1 + step_tokens
        return min(self.pages(length), ceil_div(run - 1, self.page_size) + 1)

    def kept_pages(self) -> int:
        """Return the most pages that are kept for a rewind to an earlier length."""
        if self.retention is None or self.retention == 1:
            return 0
        return ceil_div(self.retention - 2, self.page_size) + 1


def cache_groups(specs: Sequence[LayerSpec]) -> tuple[CacheGroup, ...]:
    """Derive the groups of a model's layers, draft layers included if they run.

    Args:
        specs: specs of the layers, at least one.

    Returns:
        Groups in a fixed order: the window first, then by ratio.

    Raises:
        ValueError: layers that cannot share a group, that is windows of several lengths, or one
            ratio both with and without overlap.
    """
    every = range(len(specs))
    window = _same("sliding window", (spec.window for spec in specs))
    groups = [CacheGroup(WINDOW_GROUP, "window", WINDOW_PAGE_TOKENS, 1, window, tuple(every))]
    for ratio in sorted({spec.ratio for spec in specs if spec.ratio}):
        layers = tuple(i for i in every if specs[i].ratio == ratio)
        groups += _groups_of_entries(specs, layers)
    return tuple(groups)


def _groups_of_entries(specs: Sequence[LayerSpec], layers: tuple[int, ...]) -> list[CacheGroup]:
    """Return the groups of the layers of one ratio: entries, index keys, and the states of both."""
    first = specs[layers[0]]
    ratio = first.ratio
    assert first.compressed_group is not None
    kept = _same(f"overlap at ratio {ratio}", (specs[i].pooled_tokens for i in layers))
    entries = max(1, COMPRESSED_PAGE_TOKENS // ratio)
    states = OVERLAP_STATE_PAGE_TOKENS if first.overlap else STATE_PAGE_TOKENS
    dense = any(specs[i].attends_to_all for i in layers)
    width = min((specs[i].selection_width for i in layers if specs[i].selects), default=0)
    writers = tuple(i for i in layers if specs[i].compresses)
    groups = [
        CacheGroup(
            first.compressed_group, "compressed", entries, ratio, None, writers, dense, width
        )
    ]
    stateful = tuple(i for i in writers if specs[i].state_group)
    if stateful:
        name = specs[stateful[0]].state_group
        assert name is not None
        groups.append(CacheGroup(name, "state", states, 1, kept, stateful))
    keyed = tuple(i for i in writers if specs[i].keeps_keys)
    if keyed:
        groups.append(CacheGroup(first.index_group, "index", entries, ratio, None, keyed))
    pooled = tuple(i for i in keyed if specs[i].index_state_group)
    if pooled:
        name = specs[pooled[0]].index_state_group
        assert name is not None
        groups.append(CacheGroup(name, "index_state", states, 1, kept, pooled))
    return groups


def _same(what: str, values: Iterable[int]) -> int:
    """Return the one value that all of ``values`` equal."""
    value, *others = set(values)
    if others:
        raise ValueError(f"layers that share a cache need the same {what}")
    return value

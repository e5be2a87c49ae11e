"""Which caches a model needs, and how many tokens a page of each holds.

Every kind of cache is a group of its own: one pool of page numbers, one block table a request, and
one tensor a layer, in which a page number means the same page for all layers of the group. Layers
that read what another one writes have no tensor of their own there.
Page sizes are vLLM's for DeepSeek-V4: 64 window rows, the entries of 256 tokens, 4 or 8 states.
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
    """The integer a / b rounded up."""
    return -(-a // b)


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """One kind of cache. A length below is a number of tokens 0 .. length - 1 of one request.

    Attributes:
        name: "window", "c4", "index", "state_c4", "state_index", ...
        kind: the field of ``LayerCache`` that holds its tensors.
        page_size: entries per page.
        ratio: tokens per entry; only complete entries are stored. 1 for windows and states.
        retention: a token at p reads entries of tokens > p - retention only; None: all of them.
        layers: positions in the model's list of layer specs.
        dense: some layer attends to all entries, not to a selection.
        selection_width: fewest entries that an indexer of the group selects; 0 without indexers.
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
        """Whether a layer attends to every entry of ``length`` tokens.

        One with an indexer does while all entries fit in its selection.
        """
        return self.dense or 0 < self.selection_width >= length // self.ratio

    def pages(self, length: int) -> int:
        """Pages, from the first on, that hold the complete entries of ``length`` tokens."""
        return ceil_div(length // self.ratio, self.page_size)

    def obsolete_pages(self, confirmed: int) -> int:
        """Leading pages that no token at position ``confirmed`` or later will read."""
        if self.retention is None:
            return 0
        return max(0, confirmed - self.retention + 1) // self.tokens_per_page

    def worst_case_pages(self, length: int, step_tokens: int) -> int:
        """Most pages a request of ``length`` tokens holds at once.

        Args:
            length: all tokens the request may ever write.
            step_tokens: most tokens it writes in one step.
        """
        if self.retention is None:
            return self.pages(length)
        # Before a step at least retention - 1 tokens are kept; at the worst alignment a run of n
        # tokens touches ceil((n - 1) / page) + 1 pages.
        run = self.retention - 1 + step_tokens
        return min(self.pages(length), ceil_div(run - 1, self.page_size) + 1)

    def kept_pages(self) -> int:
        """Most pages that are laid aside for going back to an earlier length."""
        if self.retention is None or self.retention == 1:
            return 0
        return ceil_div(self.retention - 2, self.page_size) + 1


def cache_groups(specs: Sequence[LayerSpec]) -> tuple[CacheGroup, ...]:
    """Derive the groups of a model's layers, draft layers included if they run.

    Args:
        specs: at least one.

    Returns:
        Groups in a fixed order: the window first, then by ratio.

    Raises:
        ValueError: layers that cannot share a group: windows of several lengths, one ratio with
            and without overlap.
    """
    every = range(len(specs))
    window = _same("sliding window", (spec.window for spec in specs))
    groups = [CacheGroup(WINDOW_GROUP, "window", WINDOW_PAGE_TOKENS, 1, window, tuple(every))]
    for ratio in sorted({spec.ratio for spec in specs if spec.ratio}):
        layers = tuple(i for i in every if specs[i].ratio == ratio)
        groups += _groups_of_entries(specs, layers)
    return tuple(groups)


def _groups_of_entries(specs: Sequence[LayerSpec], layers: tuple[int, ...]) -> list[CacheGroup]:
    """Groups of the layers of one ratio: entries, keys, and the states of both."""
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
    """The one value that all of them have."""
    value, *others = set(values)
    if others:
        raise ValueError(f"layers that share a cache need the same {what}")
    return value

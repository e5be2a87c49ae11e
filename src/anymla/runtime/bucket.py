"""The sizes at which decode steps are set up once and for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from anymla.runtime.cache_groups import CacheGroup
from anymla.runtime.span import Span

# From one ceiling of the context to the next: what a step costs follows its ceiling in part.
_CONTEXT_FACTOR = 8


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """A step of fixed size.

    Attributes:
        max_seq_len: longest request that it can take.
        tokens: rows of each request.
        requests: how many requests it has room for.
    """

    max_seq_len: int
    tokens: int
    requests: int

    @property
    def rows(self) -> int:
        """Rows of the step, padding included."""
        return self.requests * self.tokens

    def holds(self, spans: Sequence[Span]) -> bool:
        """Whether a step of these spans fits."""
        return len(spans) <= self.requests and all(
            len(span.token_ids) <= self.tokens and span.stop <= self.max_seq_len for span in spans
        )


def request_counts(most: int) -> list[int]:
    """Powers of two below ``most``, and ``most``."""
    counts = []
    count = 1
    while count < most:
        counts.append(count)
        count *= 2
    return [*counts, most]


def context_ceilings(groups: Sequence[CacheGroup], max_seq_len: int) -> list[int]:
    """Lengths that steps are set up for, the last one ``max_seq_len``.

    The first is the longest at which indexers need not choose, because all entries fit in their
    selection; each further one is eight times as long.
    """
    widths = [
        (group.selection_width + 1) * group.ratio - 1 for group in groups if group.selection_width
    ]
    ceiling = min(widths, default=4096)
    ceilings = []
    while ceiling < max_seq_len:
        ceilings.append(ceiling)
        ceiling *= _CONTEXT_FACTOR
    return [*ceilings, max_seq_len]


def decode_buckets(
    groups: Sequence[CacheGroup], max_requests: int, max_seq_len: int, widths: Sequence[int]
) -> list[Bucket]:
    """All buckets of an engine, the cheapest first: one token a request, and one with drafts.

    Args:
        groups: the engine's cache groups.
        max_requests: requests that run at once.
        max_seq_len: longest request.
        widths: how many drafts.
    """
    return sorted(
        Bucket(ceiling, tokens, requests)
        for ceiling in context_ceilings(groups, max_seq_len)
        for tokens in {1, *(1 + width for width in widths)}
        for requests in request_counts(max_requests)
    )


def smallest(buckets: Sequence[Bucket], spans: Sequence[Span]) -> Bucket | None:
    """The first bucket that holds the spans; None if none does."""
    return next((bucket for bucket in buckets if bucket.holds(spans)), None)

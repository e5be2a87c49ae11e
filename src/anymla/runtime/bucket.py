"""The fixed sizes of decode steps, for which buffers and graphs are prepared in advance."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from anymla.runtime.cache_groups import CacheGroup
from anymla.runtime.span import Span

# Factor from one context ceiling to the next. A step's time depends on its ceiling, but only in
# part.
_CONTEXT_FACTOR = 8


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """Size of a decode step that is prepared in advance.

    Attributes:
        max_seq_len: longest request in tokens that the step can take.
        tokens: rows of each request, its newest token and drafts.
        requests: number of requests that the step has room for.
    """

    max_seq_len: int
    tokens: int
    requests: int

    @property
    def rows(self) -> int:
        """Rows of the step, padding included."""
        return self.requests * self.tokens

    def holds(self, spans: Sequence[Span]) -> bool:
        """True if a step of these spans fits."""
        return len(spans) <= self.requests and all(
            len(span.token_ids) <= self.tokens and span.stop <= self.max_seq_len for span in spans
        )


def request_counts(most: int) -> list[int]:
    """Return the powers of two below ``most``, and ``most``."""
    counts = []
    count = 1
    while count < most:
        counts.append(count)
        count *= 2
    return [*counts, most]


def context_ceilings(groups: Sequence[CacheGroup], max_seq_len: int) -> list[int]:
    """Return the lengths that steps are prepared for, the last one ``max_seq_len``.

    The first is the longest at which indexers select every entry, because all entries fit in their
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
    """Return all buckets of an engine, the cheapest first, for each width in ``widths``.

    Args:
        groups: cache groups of the engine.
        max_requests: number of requests that run at once.
        max_seq_len: longest request in tokens.
        widths: numbers of drafts that a step may verify.
    """
    return sorted(
        Bucket(ceiling, tokens, requests)
        for ceiling in context_ceilings(groups, max_seq_len)
        for tokens in {1, *(1 + width for width in widths)}
        for requests in request_counts(max_requests)
    )


def smallest(buckets: Sequence[Bucket], spans: Sequence[Span]) -> Bucket | None:
    """Return the first bucket that holds the spans; None if none does."""
    return next((bucket for bucket in buckets if bucket.holds(spans)), None)

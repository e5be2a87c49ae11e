"""The number of drafts that a step verifies, chosen for the most tokens a second lately.

All requests of a step have the same width, so that steps come in few sizes. The choice rests on two
measurements. How often the first, second, ... draft was right together with all before it is the
same on all ranks. The time of a step of each width differs, so rank 0 chooses for all. A draft is
accepted only if it is the model's own choice; therefore no width changes a text.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence

import torch

from anymla.layers.ranks import Ranks

# Number of step times that are kept for each size and width, and how many a choice needs.
_TIMES, _ENOUGH = 9, 3
# Steps between two choices; one of them verifies all drafts, to learn what they would bring.
_PERIOD = 32
# Decay of the counts of earlier steps, per step.
_MEMORY = 0.995
# Prior counts: one draft in two is right.
_RIGHT, _TRIED = 1.0, 2.0


def draft_widths(draft_tokens: int) -> tuple[int, ...]:
    """Return the widths that are tried: none, few, and all drafts."""
    return tuple(sorted({min(width, draft_tokens) for width in (0, 1, 2, 3, draft_tokens)}))


class DraftWidth:
    """Chooses the number of drafts that each step verifies."""

    def __init__(self, draft_tokens: int, ranks: Ranks, device: torch.device) -> None:
        """Start without measurements.

        Args:
            draft_tokens: most drafts of a request.
            ranks: processes that must choose alike; each takes the same steps.
            device: device of this rank.
        """
        self._widths = draft_widths(draft_tokens)
        self._ranks = ranks
        self._device = device
        self._right = [_RIGHT] * draft_tokens
        self._tried = [_TRIED] * draft_tokens
        self._times: dict[tuple[int, int], collections.deque[float]] = {}
        self._seen: collections.Counter[tuple[int, int]] = collections.Counter()
        self._chosen: dict[int, int] = {}
        self._steps: collections.Counter[int] = collections.Counter()

    def observe(
        self, requests: int, verified: Sequence[tuple[int, int]], seconds: float | None
    ) -> None:
        """Record the outcome of a step.

        Args:
            requests: number of requests in the step.
            verified: for each request, the number of drafts verified and the number that were
                right.
            seconds: duration of the step; None if it did other work as well.
        """
        for count, right in verified:
            for place in range(count):
                self._tried[place] = _MEMORY * self._tried[place] + 1
                self._right[place] = _MEMORY * self._right[place] + (place < right)
        width = max((count for count, _ in verified), default=0)
        if seconds is not None and width in self._widths:
            key = _size(requests), width
            self._times.setdefault(key, collections.deque(maxlen=_TIMES)).append(seconds)
            self._seen[key] += 1

    def next(self, requests: int) -> int:
        """Return the number of drafts of each request that the next step verifies.

        Args:
            requests: number of requests of that step, the same on all ranks.
        """
        size = _size(requests)
        for width in reversed(self._widths):
            if self._seen[size, width] < _ENOUGH:
                return width
        place = self._steps[size] % _PERIOD
        self._steps[size] += 1
        if place == 0:
            (self._chosen[size],) = self._ranks.agree([self._best(size)], self._device)
        return self._widths[-1] if place == _PERIOD - 1 else self._chosen[size]

    def _best(self, size: int) -> int:
        """Return the width with the most tokens a second; of equals the narrowest."""
        speeds = {}
        for width in self._widths:
            rates = zip(self._right[:width], self._tried[:width], strict=True)
            tokens = 1 + sum(right / tried for right, tried in rates)
            speeds[width] = tokens / statistics.median(self._times[size, width])
        return max(self._widths, key=lambda width: (speeds[width], -width))


def _size(requests: int) -> int:
    """Return the next power of two: steps of similar request counts take similar time."""
    return 1 << max(0, requests - 1).bit_length()

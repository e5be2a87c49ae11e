"""How many drafts a step verifies: as many as have brought most tokens a second lately.

All requests of a step have the same width, so that a step is one of few sizes. What is known is
measured: how often the first, second, ... draft of a request was right together with all before
it, which is the same on all ranks, and what steps of each width took, which is not; so rank 0
chooses for all. Since drafts are accepted only where they are the model's own choice, no width
changes a text.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence

import torch

from anymla.layers.ranks import Ranks

# Steps of a size and width whose times are kept, and how many are needed to believe them.
_TIMES, _ENOUGH = 9, 3
# Steps from one choice to the next; one of them verifies everything, to see what it would bring.
_PERIOD = 32
# What one more step leaves of the counts of those before.
_MEMORY = 0.995
# One draft in two was right, before anything is known.
_RIGHT, _TRIED = 1.0, 2.0


def draft_widths(draft_tokens: int) -> tuple[int, ...]:
    """The widths that are tried: none, few, and all drafts."""
    return tuple(sorted({min(width, draft_tokens) for width in (0, 1, 2, 3, draft_tokens)}))


class DraftWidth:
    """Chooses the width of each step."""

    def __init__(self, draft_tokens: int, ranks: Ranks, device: torch.device) -> None:
        """Know nothing yet.

        Args:
            draft_tokens: most drafts of a request.
            ranks: the processes that must choose alike; each takes the same steps.
            device: of this rank.
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
        """Note a step.

        Args:
            requests: of the step.
            verified: of each, how many drafts were verified, and how many of them were right.
            seconds: what the step took; None where it did something besides.
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
        """Drafts of each request that the next step shall verify.

        Args:
            requests: of that step, which all ranks know alike.
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
        """The width of most tokens a second; of equals the narrowest."""
        speeds = {}
        for width in self._widths:
            rates = zip(self._right[:width], self._tried[:width], strict=True)
            tokens = 1 + sum(right / tried for right, tried in rates)
            speeds[width] = tokens / statistics.median(self._times[size, width])
        return max(self._widths, key=lambda width: (speeds[width], -width))


def _size(requests: int) -> int:
    """Steps of about as many requests take about as long: the next power of two."""
    return 1 << max(0, requests - 1).bit_length()

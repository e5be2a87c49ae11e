"""Where looking at values is free."""

from __future__ import annotations

from torch import Tensor


def at_hand(x: Tensor) -> bool:
    """Whether values of ``x`` can be looked at for free; on a device it would wait for its queue.

    Implementations look at lengths to leave work out where they may, and never to be correct.
    """
    return x.is_cpu

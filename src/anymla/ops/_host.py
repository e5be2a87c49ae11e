"""Where a backend may look at values without making a device wait."""

from __future__ import annotations

from torch import Tensor


def on_host(x: Tensor) -> bool:
    """Whether reading values of ``x`` in Python costs no synchronisation.

    Backends branch on values only where this holds; elsewhere they mask. Call it through this
    module, so that a test can run the masking branch on the CPU.
    """
    return x.is_cpu

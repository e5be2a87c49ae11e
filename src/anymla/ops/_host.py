"""Test for tensors whose values can be read without synchronising with a device."""

from __future__ import annotations

from torch import Tensor


def on_host(x: Tensor) -> bool:
    """Return True if reading values of ``x`` in Python needs no device synchronisation.

    Backends branch on values only where this is True and mask elsewhere. Call it through this
    module, so that a test can run the masking branch on the CPU.
    """
    return x.is_cpu

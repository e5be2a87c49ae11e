"""Copies small integers from the host to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNED = 4  # elements of 16 bytes


def upload(lists: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Copy lists to int32 tensors on the device, all in a single copy without waiting.

    The results share one allocation, in which each begins at a multiple of 16 bytes: kernels are
    compiled for aligned and for other addresses.
    """
    starts = [0, *accumulate(-(-len(values) // _ALIGNED) * _ALIGNED for values in lists)]
    flat = torch.zeros(starts[-1], dtype=torch.int32)
    host = flat.numpy()
    for start, values in zip(starts, lists, strict=False):
        host[start : start + len(values)] = values
    moved = to_device(flat, device)
    return tuple(
        moved[start : start + len(values)] for start, values in zip(starts, lists, strict=False)
    )


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device; CPU tensors are returned as they are."""
    if device.type == "cpu":
        return host
    # torch keeps the pinned block until the copy has finished.
    return host.pin_memory().to(device, non_blocking=True)

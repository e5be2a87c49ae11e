"""Small integers on their way from the host to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(lists: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """One int32 tensor for each list, all in a single copy that the host does not wait for.

    The results share one allocation.
    """
    flat = torch.tensor([value for values in lists for value in values], dtype=torch.int32)
    sizes = [len(values) for values in lists]
    return to_device(flat, device).split(sizes)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; CPU tensors are returned as they are."""
    if device.type == "cpu":
        return host
    # torch keeps the pinned block until the copy has been made.
    return host.pin_memory().to(device, non_blocking=True)

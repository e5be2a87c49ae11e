"""The check of an argument that is a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.formats.pages import PageLayout
from anymla.ops._check import require


def check_cache(
    operation: str,
    name: str,
    cache: Tensor,
    layout_id: str,
    *,
    channels: int,
    device: torch.device,
) -> PageLayout:
    """Require that ``cache`` is a cache of that layout, with rows of ``channels``, on ``device``.

    Args:
        operation: for the message.
        name: of the argument, for the message.
        cache: [P, B, row] or [P, B, 1, row].
        layout_id: explicit layout.
        channels: width of the rows that the caller reads or writes.
        device: where the other tensors are.

    Returns:
        The layout.

    Raises:
        TypeError: the cache is not a tensor of the layout's dtype.
        ValueError: unknown layout, another shape, other strides, or another device.
    """
    layout = get_layout(layout_id)
    if not isinstance(cache, Tensor):
        raise TypeError(f"{operation}: {name} must be a tensor, got {type(cache).__name__}")
    layout.check(cache, operation, name)
    require(
        layout.channels == channels,
        operation,
        "layout",
        f"one of {channels} channels",
        f"{layout_id} of {layout.channels}",
    )
    require(cache.device == device, operation, name, f"on {device}", cache.device)
    return layout

"""Check of an argument that must be a paged cache."""

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
    """Require that ``cache`` is a cache of a layout and width, on ``device``.

    Args:
        operation: name of the operation, for error messages.
        name: name of the argument, for error messages.
        cache: value of the argument, [P, B, row] or [P, B, 1, row] of the layout's dtype.
        layout_id: identifier of the layout, as ``get_layout`` takes it.
        channels: channels of the rows that the caller reads or writes.
        device: device of the other tensors.

    Returns:
        The layout with that identifier.

    Raises:
        TypeError: if the cache is not a tensor of the layout's dtype.
        ValueError: if the layout is unknown, or shape, strides or device are wrong.
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

"""Reads rows of the engine's caches by their places.

Whatever a faulty engine holds, nothing outside its tensors may be read: on a GPU that would end
the process. What is read instead is judged as wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.interchange import MAIN_FP8_FNUZ, FnuzMainLayout, dump_layout
from anymla.formats.page_layout import get_layout


def slots_of(tables: Tensor, places: Tensor, page_size: int) -> Tensor:
    """Return slots of places [M, n] in requests, by their rows [M, pages] of a block table."""
    places = places.long().clamp(min=0)
    pages = (places // page_size).clamp(max=tables.shape[1] - 1)
    return tables.gather(1, pages).long() * page_size + places % page_size


def before(positions: Tensor, count: int) -> Tensor:
    """Return the last ``count`` places up to each position [M], its own included: [M, count]."""
    return positions.unsqueeze(1) + torch.arange(1 - count, 1, device=positions.device)


def rows_at(slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return page and offset of each slot."""
    slots = slots.to(cache.device).long().clamp(0, cache.shape[0] * cache.shape[1] - 1)
    return slots // cache.shape[1], slots % cache.shape[1]


def planes_at(
    cache: Tensor, slots: Tensor, layout: str, prefix: str = "", *, fnuz: bool = False
) -> dict[str, Tensor]:
    """Return the bytes of rows, as ``data`` and ``scales`` with a prefix to their names.

    Args:
        cache: pages of a cache.
        slots: slots of the rows.
        layout: id of the rows' layout.
        prefix: prefix to the names.
        fnuz: True if main rows hold e4m3fnuz codes, which are returned as OCP's.
    """
    data, scales = get_layout(layout).planes(cache)
    assert scales is not None
    page, offset = rows_at(slots, cache)
    data, scales = data[page, offset], scales[page, offset]
    if fnuz:
        other = dump_layout(MAIN_FP8_FNUZ)
        assert isinstance(other, FnuzMainLayout)
        data, scales = other.to_base(data, scales)
    return {f"{prefix}data": data, f"{prefix}scales": scales}

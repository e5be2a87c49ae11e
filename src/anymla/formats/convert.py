"""A cache in another layout."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.formats.interchange import dump_layout
from anymla.formats.pages import PageLayout

_ROWS = 4096  # at a time


@dataclasses.dataclass(frozen=True)
class Loss:
    """Count and size of the differences that a conversion made.

    Attributes:
        values: number of converted values.
        changed: values that read back differently (NaN as NaN is no change).
        largest: largest finite difference.
    """

    values: int
    changed: int
    largest: float


def convert_cache(cache: Tensor, source_id: str, target_id: str, rows: int) -> tuple[Tensor, Loss]:
    """Decode the first ``rows`` slots and encode them in another layout; page by page.

    Where the layouts differ in nothing but their arrangement, entries are copied as they are:
    another quantiser's bytes, once decoded, would not all be coded alike.

    Args:
        cache: [P, B, row_elements], pages in ``source_id``.
        source_id: layout of the cache.
        target_id: layout of the result, of as many channels.
        rows: slots to convert; the others are zero bytes in the result.

    Returns:
        [P, B, row_elements] in ``target_id`` with that layout's page stride, and what changed.

    Raises:
        ValueError: unknown layout, rows of different widths, or rows beyond the cache.
    """
    source, target = dump_layout(source_id), dump_layout(target_id)
    if source.channels != target.channels:
        raise ValueError(
            f"{source_id} holds rows of {source.channels} channels and {target_id} of "
            f"{target.channels}: neither can become the other"
        )
    pages, entries = cache.shape[:2]
    if not 0 <= rows <= pages * entries:
        raise ValueError(f"rows must be within 0..{pages * entries}, got {rows}")
    result = target.allocate(pages, entries)
    if _rearranged(source, target) == target:
        given_planes, kept_planes = source.planes(cache), target.planes(result)
        for given_plane, kept_plane in zip(given_planes, kept_planes, strict=True):
            if given_plane is not None and kept_plane is not None:
                page, offset = torch.arange(rows) // entries, torch.arange(rows) % entries
                kept_plane[page, offset] = given_plane[page, offset]
        return result, Loss(rows * source.channels, 0, 0.0)
    changed, largest = 0, 0.0
    for slots in torch.arange(rows).split(_ROWS):
        given = source.read(cache, slots, torch.float64)
        # bfloat16 values and their products with powers of two are exact in float32.
        target.write(result, slots, given.float())
        kept = target.read(result, slots, torch.float64)
        other = (kept != given) & ~(kept.isnan() & given.isnan())
        changed += int(other.sum())
        difference = (kept - given).abs()[other]
        finite = difference[difference.isfinite()]
        largest = max(largest, float(finite.max()) if finite.numel() else 0.0)
    return result, Loss(rows * source.channels, changed, largest)


def _rearranged(source: PageLayout, target: PageLayout) -> PageLayout:
    """Rearrange the source's record into pages like the target's."""
    return dataclasses.replace(
        source,
        layout_id=target.layout_id,
        alignment=target.alignment,
        interleaved=target.interleaved,
    )

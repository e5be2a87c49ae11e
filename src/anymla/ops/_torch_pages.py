"""Paged caches in torch: slots of entries, and reads and writes of rows by slot."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.formats.pages import PageLayout, pages_of
from anymla.formats.torch_rows import decode_rows, encode_rows, write_row
from anymla.ops import _host

# Rows decoded at a time on the CPU, so that intermediates stay in a core's own cache.
_BLOCK_ROWS = 256
# Up to this many rows are encoded one by one.
_FEW_ROWS = 4


def slots_of(entries: Tensor, requests: Tensor, block_table: Tensor, page_size: int) -> Tensor:
    """Translate entries of requests to slots of the cache, -1 for entries that do not exist.

    Args:
        entries: indices of entries within their request, int64 of any shape.
        requests: indices of the requests, integers that broadcast to ``entries``.
        block_table: page ids of each request in order, [R, P] int32.
        page_size: number of entries in a page.

    Returns:
        Slots, int64 of the shape of ``entries``.
    """
    rows, columns = block_table.shape
    if block_table.numel() == 0:
        return torch.full_like(entries, -1)
    page = torch.div(entries, page_size, rounding_mode="floor")
    exists = (page >= 0) & (page < columns) & (requests >= 0) & (requests < rows)
    cell = torch.where(exists, requests.long() * columns + page, 0)
    physical = block_table.reshape(-1).take(cell).long()
    slot = physical * page_size + (entries - page * page_size)
    return torch.where(exists & (physical >= 0), slot, -1)


def read_rows(k_cache: Tensor, slots: Tensor, layout: str, out: Tensor) -> None:
    """Decode the rows at ``slots`` into ``out``; a slot outside the cache gives a zero row.

    Args:
        k_cache: cache to read, [P, B, row] or [P, B, 1, row].
        slots: slots to read, [n] integers, ``page * B + offset``.
        layout: identifier of the cache's layout.
        out: decoded rows, [n, channels] floating point, written; rows may be strided.
    """
    cache, row_layout = pages_of(k_cache), get_layout(layout)
    count, (pages, entries) = slots.shape[0], cache.shape[:2]
    if not pages or not count:
        out.zero_()
        return
    inside = slots_inside(slots, pages * entries)
    known = slots.long() if inside is None else torch.where(inside, slots, 0).long()
    step = _BLOCK_ROWS if _host.on_host(slots) else count
    for start in range(0, count, step):
        part = slice(start, start + step)
        decode_rows(row_layout, *read_entries(cache, known[part], row_layout), out[part])
    if inside is not None:
        out.masked_fill_(~inside.unsqueeze(1), 0)


def write_rows(k_cache: Tensor, slots: Tensor, rows: Tensor, layout: str) -> None:
    """Encode rows and store them at ``slots``; slots outside the cache are skipped.

    Args:
        k_cache: cache to write, [P, B, row] or [P, B, 1, row].
        slots: slots to write, [n] int64; those inside the cache are distinct.
        rows: rows to encode, [n, channels] floating point.
        layout: identifier of the cache's layout.
    """
    cache, row_layout = pages_of(k_cache), get_layout(layout)
    if slots.shape[0] <= _FEW_ROWS and _host.on_host(slots):
        for row, slot in enumerate(slots.tolist()):
            _write_one(row_layout, cache, slot, rows[row : row + 1])
        return
    slots, rows, nothing = writable(slots, rows, cache.shape[0] * cache.shape[1])
    count = slots.shape[0]
    if not count:
        return
    planes = _dense_planes(row_layout, cache)
    coded = [cache.new_empty((count, each.shape[2]), dtype=torch.uint8) for each in planes]
    data, scales = _values_and_scales(row_layout, coded)
    encode_rows(row_layout, rows, data, scales, on_host=_host.on_host(slots))
    for plane, entries in zip(planes, coded, strict=True):
        scatter_entries(plane, slots, entries, unless=nothing)


def read_entries(cache: Tensor, slots: Tensor, layout: PageLayout) -> tuple[Tensor, Tensor | None]:
    """Copy the stored bytes of entries.

    Args:
        cache: cache to read, [P, B, row].
        slots: slots to read, [n] int64, all inside the cache.
        layout: layout of the cache.

    Returns:
        Values uint8 [n, data_bytes], and scales uint8 [n, scale_bytes] or None for a layout without
        scales. Both are views of one tensor if the layout is interleaved.
    """
    planes = _dense_planes(layout, cache)
    return _values_and_scales(layout, [gather_entries(plane, slots) for plane in planes])


def _dense_planes(layout: PageLayout, cache: Tensor) -> list[Tensor]:
    """Return views [P, B, n] of a cache in which the entries of a page are contiguous."""
    if layout.interleaved:
        return [cache]
    return [plane for plane in layout.planes(cache) if plane is not None]


def _values_and_scales(layout: PageLayout, parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Split entries, gathered from ``_dense_planes``, into values and scales."""
    if layout.interleaved:
        return parts[0][:, : layout.data_bytes], parts[0][:, layout.data_bytes :]
    return parts[0], parts[1] if len(parts) > 1 else None


def _write_one(layout: PageLayout, cache: Tensor, slot: int, row: Tensor) -> None:
    """Encode one row [1, channels] directly into its entry; a slot outside is skipped."""
    pages, entries = cache.shape[:2]
    if not 0 <= slot < pages * entries:
        return
    page, offset = divmod(slot, entries)
    if write_row(layout, cache, page, offset, row[0]):
        return
    data, scales = (
        plane
        if plane is None
        else plane.as_strided(
            (1, plane.shape[2]),
            (plane.shape[2], 1),
            plane.storage_offset() + page * plane.stride(0) + offset * plane.stride(1),
        )
        for plane in layout.planes(cache)
    )
    assert data is not None
    encode_rows(layout, row, data, scales, on_host=True)


def slots_inside(slots: Tensor, capacity: int) -> Tensor | None:
    """Return a mask [n] of slots in 0 .. capacity - 1, or None if all are known to be inside."""
    if _host.on_host(slots):
        if not slots.numel():
            return None
        low, high = torch.aminmax(slots)
        if int(low) >= 0 and int(high) < capacity:
            return None
    return (slots >= 0) & (slots < capacity)


def writable(slots: Tensor, rows: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Restrict a write to the slots that are inside the cache.

    On the host, other slots are dropped. On a device, how many there are is unknown, so they are
    replaced by the first slot inside: storing the same row twice changes nothing.

    Args:
        slots: slots to write, [n] int64.
        rows: one row for each slot, [n, ...].
        capacity: number of slots of the cache.

    Returns:
        Slots [m] inside the cache, their rows [m, ...], and a bool scalar tensor that is true if no
        slot was inside, in which case the write must store what is there already. The scalar is
        None where some slot is known to be inside, or nothing is left to write.
    """
    if not capacity:
        return slots[:0], rows[:0], None
    inside = slots_inside(slots, capacity)
    if inside is None or not slots.shape[0]:
        return slots, rows, None
    if _host.on_host(slots):
        kept = inside.nonzero().squeeze(1)
        return slots.index_select(0, kept), rows.index_select(0, kept), None
    source = torch.arange(slots.shape[0], device=slots.device)
    source = torch.where(inside, source, inside.int().argmax())
    slots = slots.index_select(0, source).clamp(0, capacity - 1)
    return slots, rows.index_select(0, source), ~inside.any()


def gather_entries(plane: Tensor, slots: Tensor) -> Tensor:
    """Copy entries [m, n] at slots [m], all inside, out of a plane [P, B, n] of any page stride."""
    units, index = _units(plane, slots)
    return units.index_select(0, index).view(slots.shape[0], plane.shape[2])


def scatter_entries(
    plane: Tensor, slots: Tensor, values: Tensor, *, unless: Tensor | None = None
) -> None:
    """Copy entries [m, n] into a plane at slots [m], all inside; equal slots need equal entries.

    Where ``unless``, a bool scalar tensor, is true, the plane keeps its contents.
    """
    units, index = _units(plane, slots)
    values = values.view(-1, units.shape[1])
    # torch copies element by element here, so the elements are made as wide as possible.
    if units.dtype is torch.uint8:
        word = math.gcd(units.shape[1], units.storage_offset(), 8)
        dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[word]
        units, values = units.view(dtype), values.view(dtype)
    if unless is not None:
        values = torch.where(unless, units.index_select(0, index), values)
    units.index_copy_(0, index, values)


def _units(plane: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """View a plane as one column of equally long units, and list the units of every slot.

    A unit is the longest run of elements that divides both an entry and the page stride. Layouts
    align pages such that it is a whole entry or a large part of one.
    """
    pages, entries, width = plane.shape
    unit = math.gcd(width, plane.stride(0)) if pages > 1 else width
    per_page, per_entry = plane.stride(0) // unit, width // unit
    if pages == 1:
        per_page = entries * per_entry
    count = (pages - 1) * per_page + entries * per_entry
    units = plane.as_strided((count, unit), (unit, 1))
    index = slots * per_entry if per_entry > 1 else slots
    if per_page != entries * per_entry:
        index = torch.add(index, slots // entries, alpha=per_page - entries * per_entry)
    if per_entry > 1:
        unit_of_entry = torch.arange(per_entry, device=slots.device)
        index = (index.unsqueeze(1) + unit_of_entry).flatten()
    return units, index

"""Views of a running request's caches: decoded rows, and dumps of its pages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from anymla.formats.cache_dump import save_cache
from anymla.formats.page_layout import get_layout
from anymla.runtime.cache_groups import CacheGroup, CacheKind
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.request import RequestState

PAGE_KINDS: tuple[CacheKind, ...] = ("window", "compressed", "index")


@dataclasses.dataclass(frozen=True)
class HeldRows:
    """Consecutive cache rows of one request.

    Attributes:
        first: number of the first row: a position for windows and states, else a compressed entry.
        rows: decoded values of each row, [n, channels].
    """

    first: int
    rows: Tensor


def read_rows(
    store: CacheStore,
    state: RequestState,
    layer: int,
    kind: CacheKind,
    dtype: torch.dtype = torch.float32,
) -> HeldRows:
    """Decode the final rows that a request still holds in one cache of one layer.

    Raises:
        ValueError: the layer has no such cache.
    """
    group = _group(store, layer, kind)
    cache: Tensor = getattr(store.layers[layer], kind)
    pages, first, count = _held(store, group, state)
    entries = torch.arange(count, device=cache.device)
    physical = torch.tensor(pages, dtype=torch.int64, device=cache.device)
    page = physical[entries // group.page_size]
    if kind not in PAGE_KINDS:
        return HeldRows(first, cache[page, entries % group.page_size].to(dtype))
    slots = page * group.page_size + entries % group.page_size
    return HeldRows(first, get_layout(_layout_id(store, layer, kind)).read(cache, slots, dtype))


def dump_pages(
    store: CacheStore, state: RequestState, layer: int, kind: CacheKind, path: str | Path
) -> None:
    """Save the pages that a request holds in one cache of one layer, as they lie in memory.

    The dump's metadata names the request, layer, kind, the first row and how many rows are final;
    later slots of the last page are undefined.

    Raises:
        ValueError: the layer has no such cache, or it holds plain states.
    """
    if kind not in PAGE_KINDS:
        raise ValueError(f"only {', '.join(PAGE_KINDS)} caches have a page layout, not {kind!r}")
    group = _group(store, layer, kind)
    layout_id = _layout_id(store, layer, kind)
    layout = get_layout(layout_id)
    pages, first, count = _held(store, group, state)
    cache: Tensor = getattr(store.layers[layer], kind)
    held = layout.allocate(len(pages), group.page_size, cache.device)
    source, target = layout.planes(cache), layout.planes(held)
    where = torch.tensor(pages, dtype=torch.int64, device=cache.device)
    for plane, copy in zip(source, target, strict=True):
        if plane is not None and copy is not None:
            copy.copy_(plane.index_select(0, where))
    meta = {
        "request": state.request.request_id,
        "layer": layer,
        "kind": kind,
        "first": first,
        "rows": count,
    }
    save_cache(path, held, layout_id, meta)


def _group(store: CacheStore, layer: int, kind: CacheKind) -> CacheGroup:
    for group in store.groups:
        if group.kind == kind and layer in group.layers:
            return group
    raise ValueError(f"layer {layer} keeps no {kind} cache")


def _held(store: CacheStore, group: CacheGroup, state: RequestState) -> tuple[list[int], int, int]:
    """Return the pages with final rows, the number of their first row, and their count."""
    final = state.computed // group.ratio
    held = store.tables[group.name].held(state.row)
    first = min(held, default=0) * group.page_size
    pages = [page for column, page in held.items() if column * group.page_size < final]
    return pages, first, max(0, final - first)


def _layout_id(store: CacheStore, layer: int, kind: CacheKind) -> str:
    return store.layers[layer].format.of(kind)

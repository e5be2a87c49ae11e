"""Caches full of random rows, so that attention and selection have something to do."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.runtime.cache_groups import CacheGroup
from anymla.runtime.cache_store import CacheStore

_ROWS = 8192  # written at a time


def fill_randomly(store: CacheStore) -> None:
    """Write every row of every cache; caches on the meta device hold none."""
    for group in store.groups:
        for cache in store.tensors(group):
            if not cache.is_meta:
                _fill(store, group, cache)


def _fill(store: CacheStore, group: CacheGroup, cache: Tensor) -> None:
    if group.kind in ("state", "index_state"):
        cache.normal_()
        return
    formats = store.layers[group.layers[0]].format
    _write(formats.index if group.kind == "index" else formats.main, cache, None)


def random_rows(
    layout_id: str,
    slots: int,
    page: int,
    device: torch.device | str = "cpu",
    random: torch.Generator | None = None,
) -> Tensor:
    """A cache of at least so many rows, all of them random."""
    cache = get_layout(layout_id).allocate(-(-slots // page), page, device=device)
    _write(layout_id, cache, random)
    return cache


@functools.cache
def shared_rows(layout_id: str, slots: int, page: int, device: torch.device | str) -> Tensor:
    """The same for all cases of a command; what else they draw does not depend on it."""
    return random_rows(layout_id, slots, page, device, torch.Generator(device).manual_seed(0))


def _write(layout_id: str, cache: Tensor, random: torch.Generator | None) -> None:
    layout = get_layout(layout_id)
    draw = functools.partial(torch.randn, device=cache.device, generator=random)
    for some in torch.arange(cache.shape[0] * cache.shape[1], device=cache.device).split(_ROWS):
        layout.write(cache, some, draw(len(some), layout.channels))

"""Caches full of random rows, so that attention and selection have something to do."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.runtime.cache_groups import CacheGroup
from anymla.runtime.cache_store import CacheStore

_ROWS = 8192  # written at a time


def fill_randomly(store: CacheStore) -> None:
    """Write every row of every cache."""
    for group in store.groups:
        for cache in store.tensors(group):
            _fill(store, group, cache)


def _fill(store: CacheStore, group: CacheGroup, cache: Tensor) -> None:
    if group.kind in ("state", "index_state"):
        cache.normal_()
        return
    formats = store.layers[group.layers[0]].format
    layout = get_layout(formats.index if group.kind == "index" else formats.main)
    slots = torch.arange(cache.shape[0] * cache.shape[1], device=store.device)
    for some in slots.split(_ROWS):
        layout.write(cache, some, torch.randn(len(some), layout.channels, device=store.device))

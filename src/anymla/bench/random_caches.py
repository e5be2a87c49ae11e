"""Caches full of random rows, so that attention and selection have something to do."""

from __future__ import annotations

import functools
import zlib

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.runtime.cache_groups import CacheGroup
from anymla.runtime.cache_store import CacheStore

# Rows of caches, and pages of state caches, that are written at once.
_ROWS, _STATE_PAGES = 8192, 256
# Number of different rows in a cache that attention reads; the others are copies. Keys that a
# selection compares all differ.
_DISTINCT_ROWS = 65536


def fill_randomly(store: CacheStore, seed: int | None = None) -> None:
    """Write every row of every cache; caches on the meta device hold none.

    Args:
        store: caches whose rows are overwritten.
        seed: page p of a layer's cache has the same rows then, however many pages there are; None:
            from torch's generator.
    """
    for group in store.groups:
        for layer, cache in zip(group.layers, store.tensors(group), strict=True):
            if cache.is_meta:
                continue
            random = None
            if seed is not None:
                random = torch.Generator(cache.device)
                random.manual_seed(zlib.crc32(f"{seed} {group.name} {layer}".encode()))
            _fill(store, group, cache, random)


def _fill(
    store: CacheStore, group: CacheGroup, cache: Tensor, random: torch.Generator | None
) -> None:
    if group.kind in ("state", "index_state") and random is None:
        cache.normal_()
        return
    if group.kind in ("state", "index_state"):
        for some in cache.split(_STATE_PAGES):
            some.copy_(_drawn(len(some), _STATE_PAGES, cache.shape[1:], cache.device, random))
        return
    formats = store.layers[group.layers[0]].format
    if group.kind == "index":
        _write(formats.index, cache, random)
        return
    pages = min(len(cache), -(-_DISTINCT_ROWS // cache.shape[1]))
    _write(formats.of(group.kind), cache[:pages], random)
    for first in range(pages, len(cache), pages):
        rest = cache[first : first + pages]
        rest.copy_(cache[: len(rest)])


def random_rows(
    layout_id: str,
    slots: int,
    page: int,
    device: torch.device | str = "cpu",
    random: torch.Generator | None = None,
) -> Tensor:
    """Make a cache of at least this many rows, all of them random."""
    cache = get_layout(layout_id).allocate(-(-slots // page), page, device=device)
    _write(layout_id, cache, random)
    return cache


@functools.cache
def shared_rows(layout_id: str, slots: int, page: int, device: torch.device | str) -> Tensor:
    """Make the random rows once for all cases of a command, independent of their other draws."""
    return random_rows(layout_id, slots, page, device, torch.Generator(device).manual_seed(0))


def _write(layout_id: str, cache: Tensor, random: torch.Generator | None) -> None:
    layout = get_layout(layout_id)
    for some in torch.arange(cache.shape[0] * cache.shape[1], device=cache.device).split(_ROWS):
        rows = _drawn(len(some), _ROWS, (layout.channels,), cache.device, random)
        layout.write(cache, some, rows)


def _drawn(
    count: int,
    most: int,
    shape: tuple[int, ...],
    device: torch.device,
    random: torch.Generator | None,
) -> Tensor:
    """Draw [count, *shape] from a normal distribution; with a generator, the first of ``most``."""
    # The values of a draw depend on its size.
    drawn = torch.randn(
        (count if random is None else most, *shape), device=device, generator=random
    )
    return drawn[:count]

"""Cache bytes that a text of a given length takes."""

from __future__ import annotations

import dataclasses

from anymla.formats.page_layout import get_layout
from anymla.formats.state_layout import state_page_stride_bytes
from anymla.layers.caches import CACHE_FORMATS, CacheFormat
from anymla.layers.spec import LayerSpec
from anymla.model.config import ModelConfig
from anymla.model.layer_specs import layer_specs
from anymla.runtime.cache_groups import CacheGroup, cache_groups


@dataclasses.dataclass(frozen=True)
class GroupSize:
    """Cache sizes of one group.

    Attributes:
        name: name of the cache group.
        layers: number of layers that keep a cache of this group.
        page_bytes: bytes of one page of one layer, padding included.
        tokens_per_page: number of tokens that a page covers.
        held_bytes: by context length, what one request holds at most, all layers together, when
            it is read or written token by token.
    """

    name: str
    layers: int
    page_bytes: int
    tokens_per_page: int
    held_bytes: dict[int, int]


def cache_sizes(config: ModelConfig, kv_cache: str, contexts: list[int]) -> list[GroupSize]:
    """Return the sizes of every cache group.

    Args:
        config: configuration of the model.
        kv_cache: name of a cache format, a key of ``CACHE_FORMATS``.
        contexts: context lengths in tokens.
    """
    specs = layer_specs(config)
    sizes = []
    for group in cache_groups(specs):
        of_a_page = page_bytes(group, specs[group.layers[0]], CACHE_FORMATS[kv_cache])
        held = {
            length: group.worst_case_pages(length, 1) * of_a_page * len(group.layers)
            for length in contexts
        }
        sizes.append(
            GroupSize(group.name, len(group.layers), of_a_page, group.tokens_per_page, held)
        )
    return sizes


def page_bytes(group: CacheGroup, spec: LayerSpec, cache_format: CacheFormat) -> int:
    """Return the bytes from one page of a layer to the next, padding included."""
    layout = get_layout(cache_format.of(group.kind))
    if group.kind in ("state", "index_state"):
        width = layout.channels * spec.pooled_tokens // spec.ratio
        return state_page_stride_bytes(group.page_size, width)
    return layout.page_stride_bytes(group.page_size)

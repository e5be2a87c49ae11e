"""Layers that compress, select and name candidates, for themselves and for later layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from anymla.layers.spec import Candidates
from anymla.model.config_fields import ConfigError, Fields, unsupported

_KV, _INDEX = "kv_source_layer_ids", "index_source_layer_ids"
_CANDIDATE = "candidate_source_layer_id"


@dataclasses.dataclass(frozen=True)
class Sources:
    """Layers that others share caches or selections of; a source is the last up to a layer.

    Attributes:
        kv: indices of layers that write compressed entries and their index keys.
        index: indices of layers that select among entries.
        candidates: the layer whose selection narrows those of later ones, or None.
    """

    kv: tuple[int, ...]
    index: tuple[int, ...]
    candidates: Candidates | None = None


def own_sources(fields: Fields, ratios: Sequence[int], selected_ratio: int) -> Sources:
    """Make every layer its own source; those of ``selected_ratio`` select.

    Args:
        fields: fields of the configuration, which may leave the sources out.
        ratios: ratio of each backbone layer; 0 for none.
        selected_ratio: tokens per entry in layers whose indexer selects.

    Raises:
        ConfigError: the configuration names other sources.
    """
    layers = range(len(ratios))
    kv = tuple(layer for layer in layers if ratios[layer])
    index = tuple(layer for layer in layers if ratios[layer] == selected_ratio)
    for name, own, which in (
        (_KV, kv, "that compresses"),
        (_INDEX, index, f"of ratio {selected_ratio}"),
    ):
        if fields.has(name) and fields.integers(name) != own:
            raise unsupported(name, fields.values[name], f"every layer {which}")
    fields.only(_CANDIDATE, -1)
    return Sources(kv, index)


def listed_sources(fields: Fields, ratios: Sequence[int], topk: int) -> Sources:
    """Read ``kv_source_layer_ids``, ``index_source_layer_ids`` and ``candidate_*``.

    Args:
        fields: fields of the configuration.
        ratios: ratio of each backbone layer; 0 for none.
        topk: number of entries that an indexer selects.

    Raises:
        ConfigError: a list is missing or not ascending, names a layer that keeps no entries, or
            leaves one without a source of its own ratio; or later layers cannot use the candidates.
    """
    kv = _layers(fields, _KV, ratios)
    index = _layers(fields, _INDEX, ratios)
    unselected = [layer for layer in kv if layer not in index]
    if unselected:
        raise unsupported(_INDEX, list(index), f"all of {_KV} = {list(kv)}")
    for layer, ratio in enumerate(ratios):
        source = last_source(kv, layer)
        if not ratio:
            continue
        if source is None or ratios[source] != ratio:
            raise ConfigError(
                f"config: layer {layer} of ratio {ratio} has no layer of that ratio in "
                f"kv_source_layer_ids that its entries come from"
            )
    return Sources(kv, index, _candidates(fields, kv, index, topk))


def last_source(sources: Sequence[int], layer: int) -> int | None:
    """Return the largest listed layer up to ``layer``; None without one."""
    return max((source for source in sources if source <= layer), default=None)


def _layers(fields: Fields, name: str, ratios: Sequence[int]) -> tuple[int, ...]:
    listed = fields.integers(name)
    if list(listed) != sorted(set(listed)):
        raise unsupported(name, list(listed), "layers in ascending order, each once")
    for layer in listed:
        if layer >= len(ratios) or not ratios[layer]:
            raise unsupported(name, list(listed), f"layers that compress; layer {layer} does not")
    return listed


def _candidates(
    fields: Fields, kv: Sequence[int], index: Sequence[int], topk: int
) -> Candidates | None:
    name = _CANDIDATE
    value = fields.values.get(name)
    if value is None or value == -1:
        return None
    source = fields.integer(name)
    if source not in kv:
        raise unsupported(name, source, f"one of {_KV} = {list(kv)}, or -1")
    behind = [layer for layer in index if layer > source and last_source(kv, layer) != source]
    if behind:
        raise unsupported(
            name, source, f"the entries of every later index source; layer {behind[0]} has others"
        )
    found = Candidates(
        source,
        fields.integer("candidate_topk_blocks", minimum=1),
        fields.integer("candidate_block_size", minimum=1),
    )
    if found.least_entries < topk:
        raise unsupported(
            "candidate_topk_blocks",
            found.blocks,
            f"blocks that always hold index_topk = {topk} entries; these may hold "
            f"{found.least_entries}",
        )
    return found

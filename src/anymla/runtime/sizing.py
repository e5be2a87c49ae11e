"""Sizes of the page pools of each cache group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from anymla.layers.caches import CACHE_FORMATS, CacheFormat
from anymla.layers.spec import LayerSpec
from anymla.model.transformer import Transformer
from anymla.runtime.cache_groups import CacheGroup, cache_groups
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request


def running_specs(model: Transformer, options: EngineOptions) -> tuple[LayerSpec, ...]:
    """Return the layers that need caches: the backbone, and the drafter if drafts are on.

    The drafter is the first of several MTP layers, or every stage of a DSpark drafter.

    Raises:
        ValueError: drafts are requested and the model has no draft layer.
    """
    backbone = model.config.num_hidden_layers
    if not options.draft_tokens:
        return model.layer_specs[:backbone]
    if drafts_blocks(model.layer_specs):
        return model.layer_specs
    if len(model.layer_specs) == backbone:
        raise ValueError("speculation needs a drafter, and this model has none")
    return model.layer_specs[: backbone + 1]


def drafts_blocks(specs: Sequence[LayerSpec]) -> bool:
    """True if a DSpark drafter is among the layers."""
    return specs[-1].role == "dspark"


def block_size(trained: int, options: EngineOptions) -> int:
    """Return the rows of a DSpark drafter's block, at least the ``trained`` number."""
    return max(trained, options.draft_tokens)


def cache_format(options: EngineOptions) -> CacheFormat:
    """Return the row formats that ``options.kv_cache`` names.

    Raises:
        ValueError: the name is unknown.
    """
    if options.kv_cache not in CACHE_FORMATS:
        known = ", ".join(CACHE_FORMATS)
        raise ValueError(f"kv_cache must be one of {known}, got {options.kv_cache!r}")
    return CACHE_FORMATS[options.kv_cache]


def pages_needed(
    groups: Sequence[CacheGroup], request: Request, options: EngineOptions
) -> dict[str, int]:
    """Return the most pages, by group, that a request holds at once."""
    return {
        group.name: _most_pages(group, request.max_written, len(request.token_ids), options)
        for group in groups
    }


def _most_pages(group: CacheGroup, length: int, prompt: int, options: EngineOptions) -> int:
    """Return the most pages of one group that a request of ``length`` tokens holds at once.

    Args:
        group: cache group of the pages.
        length: number of tokens that reach the caches.
        prompt: number of tokens of the request's prompt.
        options: sizes of the engine.
    """
    pages = group.worst_case_pages(length, options.step_tokens(prompt))
    if options.keep_caches:
        pages = min(group.pages(length), pages + group.kept_pages())
    return pages


def pool_sizes(groups: Sequence[CacheGroup], options: EngineOptions) -> dict[str, int]:
    """Return the usable pages by group: as given, else for ``max_requests`` of ``max_seq_len``.

    Raises:
        ValueError: pages are given for a group that the model does not have.
    """
    longest = options.max_seq_len
    sizes = {
        group.name: options.max_requests * _most_pages(group, longest, longest, options)
        for group in groups
    }
    given: Mapping[str, int] = options.pages or {}
    if unknown := given.keys() - sizes.keys():
        raise ValueError(
            f"pages for unknown cache groups {sorted(unknown)}; there are {sorted(sizes)}"
        )
    return sizes | dict(given)


def options_for(
    model: Transformer, options: EngineOptions, requests: Sequence[Request]
) -> EngineOptions:
    """Return options whose pools hold just what the given requests need.

    ``max_requests`` is lowered to their number, ``max_seq_len`` becomes the longest, and the pools
    hold the worst case of the ``max_requests`` most demanding requests together.
    """
    groups = cache_groups(running_specs(model, options))
    needs = [pages_needed(groups, request, options) for request in requests]
    at_once = min(options.max_requests, len(requests))
    pages = {}
    for group in groups:
        most = sorted((need[group.name] for need in needs), reverse=True)
        pages[group.name] = sum(most[:at_once])
    return dataclasses.replace(
        options,
        max_requests=at_once,
        max_seq_len=max(request.max_length for request in requests),
        pages=pages,
    )

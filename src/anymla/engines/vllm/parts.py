"""Attention layers of vLLM whose indexer and compressors are anymla's."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from anymla.engines.vllm.compressor import AnymlaCompressor
from anymla.engines.vllm.indexer import AnymlaIndexer, AnymlaIndexerCache
from anymla.engines.vllm.report import COMPRESSOR, INDEXER, VARIABLE


class _WithParts:
    """Mixin before an attention class of vLLM or anymla, which replaces the layer's parts.

    vLLM 0.33 asks its layers for the indexer's class. Where vLLM does not ask (0.32, the main
    compressor, and its CPU layer), the class of the built object is replaced.

    Attributes:
        parts: names in ``report.PARTS`` that are replaced.
    """

    parts: frozenset[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self
        if layer.compressor is not None and COMPRESSOR in self.parts:
            check_rows(layer)
            _exchange(layer.compressor, AnymlaCompressor)
        if layer.indexer is not None:
            theirs: Any = type(layer.indexer)
            if not issubclass(theirs, AnymlaIndexer | _PoolingIndexer):
                _exchange(layer.indexer, _indexer(theirs, self.parts))
            if INDEXER in self.parts:
                _exchange(layer.indexer.k_cache, AnymlaIndexerCache)
            if COMPRESSOR in self.parts:
                _exchange(layer.indexer.compressor, AnymlaCompressor)

    def _get_indexer_cls(self, vllm_config: Any) -> type:
        base: Any = super()
        return _indexer(base._get_indexer_cls(vllm_config), self.parts)


def check_rows(layer: Any) -> None:
    """Check that rows have the 584 bytes that anymla's compressor writes.

    Raises:
        ValueError: the layer's rows have another size.
    """
    if layer.kv_cache_dtype != "fp8_ds_mla":
        raise ValueError(
            f"{VARIABLE} asks for {COMPRESSOR}, but {type(layer).__name__} keeps its cache "
            f"as {layer.kv_cache_dtype}: ask for attention as well, or choose FlashMLA"
        )


class _PoolingIndexer:
    """Mixin before an indexer, whose keys anymla's compressor then writes."""

    def _get_compressor_cls(self) -> type:
        return AnymlaCompressor


@functools.cache
def with_parts(attention: type, parts: frozenset[str]) -> type:
    """Return the attention class, under its own name, that builds these parts as anymla's."""
    if not parts & {INDEXER, COMPRESSOR}:
        return attention
    return type(attention.__name__, (_WithParts, attention), {"parts": parts})


@functools.cache
def _indexer(theirs: Any, parts: frozenset[str]) -> type:
    """Return the indexer's class with one or both of its parts replaced."""
    indexer = AnymlaIndexer if INDEXER in parts else theirs
    bases = (_PoolingIndexer, indexer) if COMPRESSOR in parts else (indexer,)
    return type(indexer.__name__, bases, {})


def _exchange(module: nn.Module, ours: type) -> None:
    if not isinstance(module, ours):
        module.__class__ = ours

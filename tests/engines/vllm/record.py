"""Keeps steps of a worker for ``replay.py``: what the plugin is given, and what comes out.

``compare.py`` calls ``keep`` with the inputs of each part of a layer and with what vLLM's own
kernel makes of them. Metadata are kept as they lie in vLLM's memory, strides included.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context

SOME_ROWS = 16
STEPS = 5  # a prefill, and four tokens that close an entry of ratio 4 between them

_layers: dict[str, dict[str, Any]] = {}


def start(model: nn.Module) -> None:
    """From now on the first layer of each ratio keeps its steps."""
    seen = set()
    for module in model.modules():
        ratio = getattr(module, "compress_ratio", None)
        if hasattr(module, "wo_a_groups") and ratio not in seen:
            seen.add(ratio)
            _layers[module.prefix] = {"constants": _constants(module), "steps": [], "count": 0}


def save(path: str) -> int:
    """Write all that was kept; how many bytes it takes."""
    with gzip.open(path, "wb", compresslevel=6) as file:
        torch.save(list(_layers.values()), file)
    return Path(path).stat().st_size


def keep(module: str, part: str, **values: Any) -> None:
    """Inputs and results of a part of a layer; a step begins with the part "query".

    Args:
        module: prefix of the layer, or of a module inside it.
        part: of the layer.
        values: tensors and numbers by name.
    """
    held = next((_layers[p] for p in _layers if module == p or module.startswith(f"{p}.")), None)
    if held is None:
        return
    if part == "query":
        held["count"] += 1
        held["steps"] += [{}] if held["count"] <= STEPS else []
    if held["count"] <= STEPS:
        held["steps"][-1][part] = {name: pack(value) for name, value in values.items()}


def keep_metadata(module: Any) -> None:
    """Metadata of a layer's step, and how its caches lie in memory; not what they hold.

    The first step is a prefill, so that nothing in them is older than the first step.
    """
    metadata = get_forward_context().attn_metadata
    caches = {module.swa_cache_layer.prefix: module.swa_cache_layer.kv_cache}
    for compressor in _compressors(module):
        caches[compressor.state_cache.prefix] = compressor.state_cache.kv_cache
        held = compressor._static_forward_context[compressor.k_cache_prefix].kv_cache
        caches[compressor.k_cache_prefix] = held
    shapes, fields = {}, {}
    for name, cache in caches.items():
        pages = int(metadata[name].block_table.max()) + 2
        shapes[name] = {"size": (pages, *cache.shape[1:]), "stride": cache.stride()}
        shapes[name]["dtype"] = str(cache.dtype).removeprefix("torch.")
        plain = {key: value for key, value in vars(metadata[name]).items() if _is_plain(value)}
        fields[name] = {key: pack(value) for key, value in plain.items()}
    keep(module.prefix, "metadata", shapes=shapes, fields=fields)


def some_rows(tokens: int) -> Tensor:
    """A few tokens, the first and the last among them: results of all would fill the file."""
    return torch.arange(tokens - 1, -1, -max(1, tokens // SOME_ROWS)).flip(0)


def pack(value: Any) -> Any:
    """A tensor with the memory that it spans; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    reach = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    flat = value.detach().as_strided((reach if value.numel() else 0,), (1,)).clone()
    return {"flat": flat, "size": tuple(value.shape), "stride": value.stride()}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, Tensor | int | float | str)


def _compressors(module: Any) -> list[Any]:
    of_keys = [] if module.indexer is None else [module.indexer.compressor]
    return ([] if module.compressor is None else [module.compressor]) + of_keys


def _constants(module: Any) -> dict[str, Any]:
    """Everything that the plugin reads from a layer and that no step changes."""
    names = ("prefix", "compress_ratio", "q_lora_rank", "head_dim", "eps", "scale")
    held = {name: getattr(module, name) for name in names}
    held["window_prefix"] = module.swa_cache_layer.prefix
    tensors = {
        "q_norm": module.q_norm.weight,
        "kv_norm": module.kv_norm.weight,
        "attn_sink": module.attn_sink,
        "wo_a_groups": module.wo_a_groups,
        "cos_sin": module.rotary_emb.cos_sin_cache[:256],
    }
    held |= {name: pack(tensor.data) for name, tensor in tensors.items()}
    held["compressors"] = [_of_compressor(each) for each in _compressors(module)]
    if module.indexer is not None:
        indexer = module.indexer
        fields = ("topk_tokens", "compress_ratio", "n_head", "head_dim", "softmax_scale")
        held["indexer"] = {name: getattr(indexer, name) for name in (*fields, "use_fp4_kv")}
        held["indexer"]["k_prefix"] = indexer.k_cache.prefix
    return held


def _of_compressor(compressor: Any) -> dict[str, Any]:
    names = ("compress_ratio", "overlap", "head_dim", "use_fp4_cache", "rms_norm_eps")
    held = {name: getattr(compressor, name) for name in (*names, "k_cache_prefix")}
    tensors = {"ape": pack(compressor.ape.data), "norm": pack(compressor.norm.weight.data)}
    return held | tensors | {"state_prefix": compressor.state_cache.prefix}

"""What of vLLM's the plugin names, looked up in the vLLM installed here: ``names.py ANSWER.json``.

Run by a process of its own, because importing vLLM warns and patches torch.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm import ModelRegistry
from vllm.plugins import load_general_plugins

from anymla.engines.vllm import pinned, plugin, report

ARCHITECTURE = "DeepseekV4ForCausalLM"
OWN_HELPERS = {"_entries", "_keep_wo_a", "backend", "layout", "scratch_bytes", "_select"}
OWN_HELPERS |= {"_choose_all", "_fits", "_queries", "_chunks", "_selected_entries"}
OWN_HELPERS |= {"_compressed_kv_cache"}  # V4.1's
# Of V4.1's adapters.
OWN_HELPERS |= {"_insert_window", "adopt", "_hashes", "coded"}
OWN_HELPERS |= {"_attend", "_attend_by_slots", "_attend_decoded"}
OWN_HELPERS |= {"_hold_wo_a", "prepare_wo_a", "wo_a_codes", "site", "held"}
OWN_HELPERS |= {"_keep_table", "_route", "run", "lists", "first", "side", "token_experts"}
FROM_033_ON = {"_get_cache_cls", "_get_attn_cls", "_compress_norm_rope_store"}


def names_in_source(module: str) -> set[str]:
    """Top-level names of a module that may not be importable on this machine."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return set()
    found: set[str] = set()
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def missing(wanted: Iterable[tuple[str, str]]) -> list[str]:
    """Those of (module, top-level name) that are not there."""
    return [f"{module}:{name}" for module, name in wanted if name not in names_in_source(module)]


def wanted_in_source() -> list[tuple[str, str]]:
    """Seams of every platform, and the functions that vLLM's CUDA models call."""
    from anymla.engines.vllm.hyper_connection import FUNCTIONS

    wanted = [(seam.module, seam.name) for seam in pinned.PLATFORMS.values()]
    wanted += [tuple(seam.base.split(":")) for seam in pinned.PLATFORMS.values()]
    backbone, *drafts = pinned.CUDA_MODELS
    wanted += [(backbone, name) for name in FUNCTIONS]
    called = "mhc_post_tilelang", "hc_head_fused_kernel_tilelang"
    wanted += [(draft, name) for draft in drafts for name in called]
    memory = ("current_workspace_manager", "is_workspace_manager_initialized")
    wanted += [("vllm.v1.worker.workspace", name) for name in memory]
    return wanted


def changed_overrides() -> list[str]:
    """Methods of anymla's classes that vLLM's do not have, or have with other parameters."""
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention

    from anymla.engines.vllm import (
        attention,
        compressor,
        experts,
        hyper_connection,
        indexer,
        linears,
        metadata,
        v41_attention,
        v41_compressor,
        v41_engram,
        v41_indexer,
        v41_metadata,
    )

    classes = [
        attention.AnymlaAttention,
        compressor.AnymlaCompressor,
        indexer.AnymlaIndexer,
        indexer.AnymlaIndexerCache,
        indexer.AnymlaSparseAttnIndexer,
        metadata.CompressedBuilder,
        metadata.WindowBuilder,
        experts.AnymlaMoE,
        experts.Mxfp4Experts,
        linears.Fp8Attention,
        linears.Fp8Linear,
        linears.SharedExpert,
        *(metadata.SPARSE_BACKEND, metadata.INDEXER_BACKEND, metadata.WINDOW_BACKEND),
        v41_attention.AnymlaV41Attention,
        v41_compressor.AnymlaStateCache,
        v41_compressor.AnymlaV41Compressor,
        v41_engram.AnymlaEngram,
        v41_engram.AnymlaNgrams,
        v41_indexer.AnymlaV41IndexerCache,
        v41_indexer.AnymlaV41Indexer,
        v41_indexer.AnymlaV41Scores,
        v41_metadata.V41IndexBuilder,
        *(v41_metadata.SPARSE_BACKEND, v41_metadata.INDEXER_BACKEND),
    ]
    mixins = (
        attention.AttentionAdapter,
        indexer.IndexerAdapter,
        metadata.IndexMetadata,
        metadata.Uneven,
    )
    cpu_only = {"_wrap_wo_a_process_weights_after_loading", "process_weights_after_loading"}
    problems = []
    for ours in classes:
        above = ours.__mro__[1]
        mixed = vars(above) if above in mixins else {}
        bases = [ours.__mro__[2] if above in mixins else above]
        if ours is attention.AnymlaAttention:
            bases.append(DeepseekV4Attention)
        for name, value in {**mixed, **vars(ours)}.items():
            if name.startswith("__") or name in OWN_HELPERS | FROM_033_ON:
                continue
            for base in bases:
                layer = base in (DeepseekV4Attention, v41_attention.DeepseekV4Attention)
                if layer and name in cpu_only:
                    continue
                if not hasattr(base, name):
                    if name not in base.__annotations__:
                        problems.append(f"{base.__name__}.{name} is gone")
                    continue
                dispatched = ours is indexer.AnymlaSparseAttnIndexer and name == "forward"
                theirs = inspect.getattr_static(base, "forward_native" if dispatched else name)
                if inspect.isfunction(value) and names_of(theirs)[: len(names_of(value))] != (
                    names_of(value)
                ):
                    problems.append(f"{base.__name__}.{name}{inspect.signature(theirs)}")
    ours, theirs = indexer.AnymlaSparseAttnIndexer, indexer.SparseAttnIndexer
    if names_of(theirs.__init__)[:9] != names_of(ours.__init__)[:9]:
        problems.append("SparseAttnIndexer.__init__")
    for base, function in {
        "MHCPreOp": hyper_connection.pre,
        "MHCPostOp": hyper_connection.post,
        "MHCFusedPostPreOp": hyper_connection.post_pre,
        "HCHeadOp": hyper_connection.head,
    }.items():
        theirs = hyper_connection.LAYERS[base].__mro__[1].forward_cuda
        if names_of(theirs)[1:] != names_of(function):
            problems.append(f"{base}.forward_cuda{inspect.signature(theirs)}")
    return problems


def names_of(function: Any) -> list[str]:
    """Parameters by name, without one for all others."""
    every = inspect.signature(function).parameters.values()
    return [each.name for each in every if each.kind is not each.VAR_KEYWORD]


def changed_kernels() -> list[str]:
    """Metadata kernels whose arguments are no longer those of their stand-ins."""
    from vllm.triton_utils import dispatcher

    counts = {
        "token_request_mapping": 5,
        "prefill_gather_lengths": 8,
        "window_indices": 18,
        "compressed_slots": 12,
    }
    problems = []
    for name, ours in pinned.METADATA_KERNELS.items():
        original, _ = dispatcher._registry[name]
        arguments = dispatcher._kernel_arg_names(original)
        if len(arguments) != counts[ours]:
            problems.append(f"{name}{arguments}")
    return problems


if __name__ == "__main__":
    in_tree = repr(ModelRegistry.models[ARCHITECTURE])
    plugin.register()
    plugin.register()
    load_general_plugins()
    import torch

    answer = {
        "in_tree": in_tree,
        "registered": repr(ModelRegistry.models[ARCHITECTURE]),
        "cuda_initialised": torch.cuda.is_initialized(),
    }
    if report.mode() != "off":
        from anymla.engines.vllm import model

        model.exchange()  # as the first model that is built
        answer |= {
            "missing": missing(wanted_in_source()),
            "canary": missing([("vllm.models.deepseek_v4.attention", "NoSuchAttention")]),
            "overrides": changed_overrides(),
            "kernels": changed_kernels(),
        }
    Path(sys.argv[1]).write_text(json.dumps(answer))

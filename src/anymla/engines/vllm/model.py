"""vLLM's DeepSeek-V4 models with anymla's layers; imported when a model is loaded."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.custom_op import CustomOp
from vllm.models.deepseek_v4 import (
    DeepseekV4ForCausalLM,
    DeepSeekV4MTP,
    DSparkDeepseekV4ForCausalLM,
)
from vllm.triton_utils.dispatcher import register_kernels

from anymla.engines.vllm import compile_watch, cpu_kernels, drafts, hyper_connection, report
from anymla.engines.vllm.attention import AnymlaAttention
from anymla.engines.vllm.indexer import AnymlaSparseAttnIndexer
from anymla.engines.vllm.parts import with_parts
from anymla.engines.vllm.pinned import (
    ATTENTION_MODULE,
    CUDA_MODELS,
    DSPARK_MODULES,
    METADATA_KERNELS,
    PLATFORMS,
    WARM_UP_MODULE,
)

_LOG = init_logger("vllm.plugins.anymla")  # only loggers below vllm have a handler
_MACHINE = report.this_machine()
_PLAN = report.plan(_MACHINE, report.mode())
_REPLACED = frozenset(part.name for part in _PLAN if part.replaced)
_REHEARSED = {report.ATTENTION, report.INDEXER, report.COMPRESSOR}
# parts that are replaced after the model is built
_LATER = {report.LINEARS: "linears", report.EXPERTS: "experts"}


@functools.cache
def exchange() -> None:
    """Replace the functions that vLLM looks up by name, for every model of the process."""
    if report.MHC in _REPLACED:
        for name, layer in hyper_connection.LAYERS.items():
            CustomOp.register_oot(layer, name=name)
        for module in CUDA_MODELS if _MACHINE.platform == "cuda" else ():
            found = vars(importlib.import_module(module))
            found.update((n, f) for n, f in hyper_connection.FUNCTIONS.items() if n in found)
    if report.DRAFT_MODEL in _REPLACED and _MACHINE.platform in DSPARK_MODULES:
        drafter: Any = importlib.import_module(DSPARK_MODULES[_MACHINE.platform])
        drafter._insert_context_kv = drafts.inserting(drafter._insert_context_kv)
    if report.METADATA_KERNELS in _REPLACED:
        register_kernels({name: vars(cpu_kernels)[ours] for name, ours in METADATA_KERNELS.items()})


def _replaced(vllm_config: Any) -> frozenset[str]:
    return frozenset(p.name for p in report.within(_PLAN, vllm_config) if p.replaced)


@contextlib.contextmanager
def _anymla_layers(vllm_config: Any) -> Iterator[None]:
    """Use anymla's classes for the replaced parts while a model is built.

    vLLM's attention would also register its Triton kernels for compilation at start-up. They never
    run here, and some cannot be compiled, so nothing is registered while attention is replaced.
    Kernels of parts that stay vLLM's are then compiled at their first use.
    """
    platform, kernels = PLATFORMS[_MACHINE.platform], vllm_config.kernel_config
    model: Any = importlib.import_module(platform.module)
    attention: Any = importlib.import_module(ATTENTION_MODULE)
    theirs, warmup = getattr(model, platform.name), kernels.enable_jit_warmup
    scores = attention.SparseAttnIndexer
    replaced = _replaced(vllm_config)
    setattr(model, platform.name, _attention_of(theirs, replaced & frozenset(report.PARTS)))
    if report.INDEXER in replaced:
        attention.SparseAttnIndexer = AnymlaSparseAttnIndexer  # vLLM 0.32 asks no layer for it
    kernels.enable_jit_warmup = warmup and report.ATTENTION not in replaced
    # vLLM's kernel of a whole layer on gfx950 would run past the replaced parts.
    whole = getattr(kernels, "monokernel", False)
    if whole and replaced & {report.ATTENTION, report.MHC}:
        _LOG.warning_once("anymla: without vLLM's monokernel, which no replaced part is in")
        kernels.monokernel = False
    try:
        yield
    finally:
        if whole:
            kernels.monokernel = whole
        setattr(model, platform.name, theirs)
        attention.SparseAttnIndexer = scores
        kernels.enable_jit_warmup = warmup


def _attention_of(theirs: Any, parts: frozenset[str]) -> Any:
    """Replace the attention class of a platform's model, or the function that returns it."""
    if report.ATTENTION in parts:
        ours = with_parts(AnymlaAttention, parts)
        return ours if isinstance(theirs, type) else lambda _: ours
    if isinstance(theirs, type):
        return with_parts(theirs, parts)
    return lambda config: with_parts(theirs(config), parts)


class _WithAnymlaLayers(nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        for line in report.lines(_MACHINE, report.within(_PLAN, vllm_config)):
            _LOG.info_once(line, scope="global")
        replaced = _replaced(vllm_config)
        if not report.has_vision_tower(vllm_config):
            exchange()
        with _anymla_layers(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        for name in (module for part, module in _LATER.items() if part in replaced):
            importlib.import_module(f"anymla.engines.vllm.{name}").install(self)


class AnymlaDeepseekV4(_WithAnymlaLayers, DeepseekV4ForCausalLM):
    """The backbone, audited on request."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        compile_watch.install()
        if _replaced(vllm_config) >= _REHEARSED and importlib.util.find_spec(WARM_UP_MODULE):
            from anymla.engines.vllm import warm_up

            warm_up.register(self, vllm_config)
        if report.audited() and report.has_vision_tower(vllm_config):
            _LOG.warning_once("anymla: a model with a vision tower is not audited", scope="global")
        elif report.audited():
            from anymla.engines.vllm import audit

            self.anymla_audit = audit.start(self)


class AnymlaDeepseekV4Draft(_WithAnymlaLayers, DeepSeekV4MTP):
    """The draft (MTP) model."""


class AnymlaDeepseekV4DSpark(_WithAnymlaLayers, DSparkDeepseekV4ForCausalLM):
    """The draft model whose tokens see each other (DSpark)."""

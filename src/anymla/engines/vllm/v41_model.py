"""vLLM's DeepSeek-V4.1 model with anymla's layers; imported when a model is loaded.

Only the text model is built; a checkpoint's weights for images are not read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.logger import init_logger
from vllm.models.deepseek_v41.nvidia.model import DeepseekV41LLMForCausalLM
from vllm.triton_utils.dispatcher import register_kernels

from anymla.engines.vllm import compile_watch, cpu_kernels, hyper_connection, report
from anymla.engines.vllm.parts import check_rows
from anymla.engines.vllm.pinned import METADATA_KERNELS, V41_MODEL
from anymla.engines.vllm.v41_attention import AnymlaV41Attention
from anymla.engines.vllm.v41_compressor import AnymlaV41Compressor
from anymla.engines.vllm.v41_engram import AnymlaEngram, AnymlaNgrams
from anymla.engines.vllm.v41_indexer import AnymlaV41Indexer

_LOG = init_logger("vllm.plugins.anymla")  # only loggers below vllm have a handler
_MACHINE = report.this_machine()
_PLAN = report.v41_plan(_MACHINE, report.mode())
_REPLACED = frozenset(part.name for part in _PLAN if part.replaced)
_THEIRS: Any = importlib.import_module(V41_MODEL)

if report.METADATA_KERNELS in _REPLACED:
    register_kernels({name: vars(cpu_kernels)[ours] for name, ours in METADATA_KERNELS.items()})


class _WithV41Parts:
    """Mixin before an attention class of vLLM or anymla, which replaces the layer's parts.

    Attributes:
        parts: names in ``report.V41_PARTS`` that are replaced.
    """

    parts: frozenset[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layer: Any = self
        if layer.compressor is not None and report.COMPRESSOR in self.parts:
            check_rows(layer)
            layer.compressor.__class__ = AnymlaV41Compressor
            layer.compressor.adopt()

    def _indexer_cls(self, k_cache: Any) -> type:
        base: Any = super()
        return AnymlaV41Indexer if report.INDEXER in self.parts else base._indexer_cls(k_cache)


@functools.cache
def _with_parts(attention: type, parts: frozenset[str]) -> type:
    """Return the attention class, under its own name, that builds these parts as anymla's."""
    if not parts & {report.INDEXER, report.COMPRESSOR}:
        return attention
    return type(attention.__name__, (_WithV41Parts, attention), {"parts": parts})


@contextlib.contextmanager
def _anymla_layers(vllm_config: Any) -> Iterator[None]:
    """Use anymla's classes while a model is built; functions stay replaced afterwards.

    As in V4's model, vLLM's Triton kernels are not compiled at start-up while attention is
    replaced.
    """
    parts = _REPLACED
    select, kernels = _THEIRS._select_dsv4_attn_cls, vllm_config.kernel_config
    names: dict[str, Any] = {
        "_select_dsv4_attn_cls": lambda config: _with_parts(
            AnymlaV41Attention if report.ATTENTION in parts else select(config), parts
        )
    }
    if report.ENGRAM in parts:
        names |= {"Engram": AnymlaEngram, "NgramHashState": AnymlaNgrams}
    if report.MHC in parts:
        vars(_THEIRS).update(hyper_connection.V41_FUNCTIONS)
        names["supports_mhc_overlap"] = lambda _: False
    before = {name: vars(_THEIRS)[name] for name in names}
    warmup = kernels.enable_jit_warmup
    vars(_THEIRS).update(names)
    kernels.enable_jit_warmup = warmup and report.ATTENTION not in parts
    try:
        yield
    finally:
        vars(_THEIRS).update(before)
        kernels.enable_jit_warmup = warmup


def _check(vllm_config: Any) -> None:
    """Refuse configurations that the adapters do not support.

    Raises:
        NotImplementedError: the configuration needs an unsupported feature.
    """
    parallel, engram = vllm_config.parallel_config, vllm_config.engram_config
    refused = {
        "drafts": vllm_config.speculative_config is not None,
        "contexts that are split between ranks": (
            parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1
        ),
        "microbatches": parallel.use_ubatching,
        "n-gram tables in huge pages": (
            report.ENGRAM in _REPLACED and engram is not None and engram.use_thp
        ),
    }
    for what, asked in refused.items():
        if asked:
            raise NotImplementedError(f"the plugin's adapters of {report.V41} have no {what}")


class AnymlaDeepseekV41(DeepseekV41LLMForCausalLM):
    """The backbone of DeepSeek-V4.1."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        for line in report.lines(_MACHINE, _PLAN, report.V41):
            _LOG.info_once(line, scope="global")
        _check(vllm_config)
        if report.audited():
            _LOG.warning_once("anymla: %s is not audited", report.V41, scope="global")
        if vllm_config.model_config.hf_config.vision_n_layers:
            _LOG.info_once("anymla: the text model alone, images are not read", scope="global")
        # Bounded replay would run the last layers on fewer tokens than the step has, which bypasses
        # their adapters.
        if vllm_config.cache_config.swa_bounded_replay:
            _LOG.info_once(
                "anymla: bounded replay, an approximation that shortens prompts' steps, is off",
                scope="global",
            )
        vllm_config.cache_config.swa_bounded_replay = False
        with _anymla_layers(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        compile_watch.install()

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Load weights as vLLM does; drop its router's image bias without a vision tower."""
        if not self.config.vision_n_layers:
            weights = (each for each in weights if not each[0].endswith(".gate.bias_vl"))
        loaded: set[str] = super().load_weights(weights)
        return loaded

    def process_weights_after_loading(self) -> None:
        """Process weights as vLLM does, but keep the first site's weight for each stream."""
        first = self.model.layers[self.model.start_layer]
        if report.MHC in _REPLACED:
            first.hc_attn_fn_broadcast = None  # absent if this was called before
        super().process_weights_after_loading()
        if report.MHC in _REPLACED:
            first.hc_attn_fn_broadcast = first.hc_attn_fn.data

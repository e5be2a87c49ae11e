"""vLLM's DeepSeek-V4 models, built with anymla's layers; imported where a model is loaded."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.custom_op import CustomOp
from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM, DeepSeekV4MTP
from vllm.triton_utils.dispatcher import register_kernels

from anymla.engines.vllm import cpu_kernels, hyper_connection, report
from anymla.engines.vllm.attention import AnymlaAttention
from anymla.engines.vllm.indexer import AnymlaSparseAttnIndexer
from anymla.engines.vllm.pinned import CUDA_MODELS, METADATA_KERNELS, SEAMS

_LOG = init_logger("vllm.plugins.anymla")  # only loggers below vllm have a handler
_MACHINE = report.this_machine()
_PARTS = report.plan(_MACHINE, report.mode())
_REPLACED = {part.name for part in _PARTS if part.replaced}

CustomOp.register_oot(AnymlaSparseAttnIndexer, name="SparseAttnIndexer")
if report.HYPER_CONNECTIONS in _REPLACED:
    for _name, _layer in hyper_connection.LAYERS.items():
        CustomOp.register_oot(_layer, name=_name)
    for _module in CUDA_MODELS if _MACHINE.platform == "cuda" else ():
        _globals = vars(importlib.import_module(_module))
        _globals.update((n, f) for n, f in hyper_connection.FUNCTIONS.items() if n in _globals)
if report.METADATA_KERNELS in _REPLACED:
    register_kernels({name: vars(cpu_kernels)[ours] for name, ours in METADATA_KERNELS.items()})


@contextlib.contextmanager
def _anymla_layers(vllm_config: Any) -> Iterator[None]:
    """While a model is built, its attention class is anymla's.

    vLLM's layers would also register their Triton kernels to be compiled at start-up. They never
    run here, and some cannot be compiled on the device: nothing is registered meanwhile.
    """
    seam, kernels = SEAMS[_MACHINE.platform], vllm_config.kernel_config
    module = importlib.import_module(seam.module)
    theirs, warmup = getattr(module, seam.name), kernels.enable_jit_warmup
    ours = AnymlaAttention if isinstance(theirs, type) else lambda _: AnymlaAttention
    setattr(module, seam.name, ours)
    kernels.enable_jit_warmup = False
    try:
        yield
    finally:
        setattr(module, seam.name, theirs)
        kernels.enable_jit_warmup = warmup


class _WithAnymlaLayers(nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        _LOG.info_once(report.summary(_MACHINE, _PARTS), scope="global")
        with _anymla_layers(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)


class AnymlaDeepseekV4(_WithAnymlaLayers, DeepseekV4ForCausalLM):
    """The backbone."""


class AnymlaDeepseekV4Draft(_WithAnymlaLayers, DeepSeekV4MTP):
    """The draft (MTP) model."""

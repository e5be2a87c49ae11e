"""vLLM's model with parts of anymla's, built on the meta device of a machine without that device:
``construct.py ANSWER.json CHECKPOINT DEVICE``, DEVICE as ``Machine.name``, with ``+AITER`` behind
it if AMD's library of kernels is to be taken for installed.

The platform says that it is such a device, and
compiled modules of vLLM's are empty: what is built is all
but the experts, whose kernels are looked up while they are built. With another version's source in
front of the path it is that version's model, as far as it goes with the packages installed here.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn


class Empty(types.ModuleType):
    """A module whose functions do nothing."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _Operations:
    """Of a compiled module: whether something is supported; nothing is."""

    def __getattr__(self, name: str) -> Any:
        if "supports" not in name:
            raise AttributeError(name)
        return lambda *_: False


def pretend(device: str = "sm_90") -> Any:
    """From now on vLLM finds that device; its platform is returned."""
    for name in ("Event", "Stream"):  # torch's own need the device
        for module in (torch.cuda, torch.xpu):
            setattr(module, name, type(name, (), {}))
    if device.startswith("gfx"):
        return _pretend_rocm(device)
    return _pretend_xpu() if device == "XPU" else _pretend_cuda(device)


def _no_compiled_modules(*names: str) -> None:
    for name in names:
        for module in (name, f"{name}_stable_libtorch"):
            sys.modules[f"vllm.{module}"] = Empty(module)
        setattr(torch.ops, name, _Operations())


def _pretend_cuda(device: str) -> Any:
    major, minor = divmod(int(device.removeprefix("sm_")), 10)
    _no_compiled_modules("_C", "_moe_C")
    for module in ("vllm_flash_attn", "vllm_flash_attn.flash_attn_interface"):
        sys.modules[f"vllm.{module}"] = Empty(module)
    from vllm import platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    class Pretended(cuda.NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(major, minor)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 140 << 30

    platforms._current_platform = Pretended()
    return Pretended


def _pretend_xpu() -> Any:
    kernels = "", "._C", "._moe_C", "._xpu_C", ".flash_attn_interface", ".rotary"
    for module in (*kernels, ".fused_moe_interface", ".xpumem_allocator"):
        sys.modules[f"vllm_xpu_kernels{module}"] = Empty(f"vllm_xpu_kernels{module}")
    from vllm import platforms
    from vllm.platforms import xpu

    class Pretended(xpu.XPUPlatform):
        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "Intel Data Center GPU Max"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 64 << 30

    platforms._current_platform = Pretended()
    return Pretended


def _pretend_rocm(device: str) -> Any:
    """The architecture's name comes from AMD's library, without which vLLM asks the device."""
    device, _, library_of_kernels = device.partition("+")
    _no_compiled_modules("_C", "_moe_C", "_rocm_C")
    library: Any = Empty("amdsmi")
    library.AmdSmiException = RuntimeError
    library.amdsmi_get_processor_handles = lambda: [0]
    library.amdsmi_get_gpu_asic_info = lambda _: {"target_graphics_version": device}
    sys.modules["amdsmi"] = library
    from vllm import platforms
    from vllm.platforms import rocm

    class Pretended(rocm.RocmPlatform):
        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "AMD Instinct"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 192 << 30

    platforms._current_platform = Pretended()
    if library_of_kernels:
        from vllm._aiter_ops import rocm_aiter_ops

        rocm_aiter_ops.is_enabled = staticmethod(lambda: True)
    return Pretended


IMAGES = "force with images"


class NoExperts(nn.Module):
    shared_experts = experts = None

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.gate = nn.Identity()


def audited(built: nn.Module) -> dict[str, Any]:
    """The methods that an audit of the model would record, counted by "class.method"; and how many
    attention layers it takes for such as store e4m3fnuz codes, or rotate heads back."""
    from anymla.audit.auditor import Auditor
    from anymla.audit.settings import Settings
    from anymla.engines.vllm import report
    from anymla.engines.vllm.audit import attention
    from anymla.engines.vllm.audit.hooks import Hooks
    from anymla.engines.vllm.audit.method import LOG

    hooks = Hooks(built, Auditor(Settings.of(""), LOG, {}, []))
    watched = [w for methods in hooks._methods.values() for m in methods for w in m.watched()]
    layers = [m for m in built.modules() if hasattr(m, "swa_cache_layer")]
    with mock.patch.object(report, "this_machine", side_effect=RuntimeError("looked up in a step")):
        fnuz = sum(map(attention._holds_fnuz, layers))
    return {
        "audited": collections.Counter(
            f"{type(each).__name__}.{name}" for each, name, _ in watched
        ),
        "fnuz rows": fnuz,
        "rotated back": sum(map(attention._rotates_back, layers)),
    }


def _has_cache(module: Any) -> bool:
    return hasattr(module, "get_kv_cache_spec")


def build(checkpoint: str, platform: Any) -> dict[str, Any]:
    """By the parts that are replaced: how many modules of each class, and of which class of
    anymla's those are that vLLM had built as its own."""
    import vllm
    import vllm.model_executor.layers.sparse_attn_indexer as scores
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    import anymla.engines.vllm.experts  # noqa: F401  while vLLM's class has its name
    from anymla.engines.vllm import model, parts, report
    from anymla.engines.vllm.pinned import PLATFORMS

    config = EngineArgs(checkpoint, max_model_len=4096, max_num_seqs=4).create_engine_config()
    config.kernel_config.enable_jit_warmup = False  # it asks for TileLang and CuTe
    platform.device_type, scores.has_deep_gemm = "meta", lambda: True
    theirs: Any = importlib.import_module(PLATFORMS[report.this_machine().platform].module)
    theirs.DeepseekV4MoE = NoExperts
    theirs.DeepseekV4ForCausalLM.set_moe_parameters = lambda self: None
    exchange, exchanged, found = parts._exchange, collections.Counter(), {}

    def counted(module: nn.Module, ours: type) -> None:
        before = type(module)
        exchange(module, ours)
        exchanged[ours.__name__] += type(module) is not before

    parts._exchange = counted
    # The metadata are those of the vLLM that is installed, not of a source in front of it.
    report.installed_version = lambda: vllm.__version__.partition("+")[0]
    with set_current_vllm_config(config):
        store = f"file://{Path(sys.argv[1]).with_suffix('.store')}"
        init_distributed_environment(1, 0, store, 0, "gloo")
        initialize_model_parallel(1, 1)
        # A vision tower first: nothing may have been exchanged for another model yet.
        for chosen in (IMAGES, "auto", "auto on two GPUs", *report.PARTS, "force"):
            config.model_config.hf_config.vision_n_layers = 2 if chosen == IMAGES else 0
            config.model_config.hf_config.vision_max_n_token = 384
            model._PLAN = report.plan(report.this_machine(), chosen.partition(" ")[0])
            several = mock.patch.object(config.parallel_config, "data_parallel_size", 2)
            if chosen == "force":  # vLLM's layers of hyper-connections are replaced by name
                model._REPLACED = frozenset(part.name for part in model._PLAN if part.replaced)
                model.exchange.cache_clear()
            config.compilation_config.static_forward_context.clear()
            exchanged.clear()
            with torch.device("meta"), several if "two" in chosen else contextlib.nullcontext():
                built = model.AnymlaDeepseekV4(vllm_config=config)
            names = collections.Counter(type(each).__name__ for each in built.modules())
            layers = config.compilation_config.static_forward_context.items()
            caches = {n: repr(m.get_kv_cache_spec(config)) for n, m in layers if _has_cache(m)}
            found[chosen] = {"classes": names, "exchanged": +exchanged}
            found[chosen]["caches"] = caches
            found[chosen]["for all"] = bool(model.exchange.cache_info().currsize)
            attentions: list[Any] = [m for m in built.modules() if hasattr(m, "swa_cache_layer")]
            found[chosen]["streams"] = sum(m.aux_stream_list is not None for m in attentions)
            found[chosen]["shuffled"] = sum(
                hasattr(m, "prepare_attn_preshuffle") for m in attentions
            )
            if report.this_machine().platform == "rocm":
                found[chosen] |= audited(built)
    return found


if __name__ == "__main__":
    torch.set_default_dtype(torch.bfloat16)
    Path(sys.argv[1]).write_text(json.dumps(build(sys.argv[2], pretend(sys.argv[3]))))

"""Modules of vLLM's in which every class exists and is empty, for machines without vLLM."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from torch import nn

# What ``get_forward_context`` returns: the metadata of the step that runs.
context = types.SimpleNamespace(attn_metadata=None, additional_kwargs={})
# vLLM's manager of scratch memory, if there is to be one.
workspace = types.SimpleNamespace(manager=None)


class _StandIn(types.ModuleType):
    """One of them."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)  # a module in it
        made = type(name, (nn.Module,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


def _all_decode(cm: Any, decode_threshold: int) -> tuple[int, int, int, int]:
    """Requests and tokens of a step: decodes, prefills; their tokens likewise."""
    return len(cm.block_table_tensor), 0, cm.num_actual_tokens, 0


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for everything in ``vllm``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "vllm":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        if module.__name__ == "vllm.forward_context":
            module.get_forward_context = lambda: context
        if module.__name__ == "vllm.config":
            module.get_current_vllm_config = lambda: None
        if module.__name__ == "vllm.v1.attention.backends.utils":
            module.split_decodes_and_prefills = _all_decode
        if module.__name__ == "vllm.v1.worker.workspace":
            module.current_workspace_manager = lambda: workspace.manager
            module.is_workspace_manager_initialized = lambda: workspace.manager is not None
        if module.__name__ == "vllm.platforms":
            module.current_platform = types.SimpleNamespace(
                is_cuda=lambda: True,
                is_rocm=lambda: False,
                device_name="cuda",
                get_device_capability=lambda: types.SimpleNamespace(major=9, minor=0),
            )


def install() -> None:
    """From now on ``import vllm`` finds stand-ins; the platform is CUDA, sm_90."""
    sys.meta_path.insert(0, _Finder())

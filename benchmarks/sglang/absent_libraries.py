"""Stand-ins for CUDA libraries that SGLang imports, where a machine does not have them.

Without ``flash_mla`` its stand-in is ``anymla.compat.flash_mla``, so that its class of scheduling
metadata exists; a call that reaches it by SGLang's own function raises. On a GPU ``flash_mla`` may
be sgl-flash-mla's folder with its library for Hopper alone (``_C_legacy.abi3.so``): that one is
loaded, and nothing is asked of the other.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_OPTIONAL = (
    "sgl_kernel", "torchvision", "flashinfer", "deep_gemm", "decord", "torchcodec",
    # The server's, which its model runner imports.
    "fastapi", "uvicorn", "opentelemetry",
)  # fmt: skip


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return mock.MagicMock(name=f"{spec.name}.{name}")

        module.__dict__["__getattr__"] = attribute
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("FlashMLA is not installed here")


def install() -> None:
    """Install the stand-ins, once; without a GPU Triton kernels are interpreted from here on."""
    if "flash_mla" in sys.modules:
        return
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    # transformers asks torchvision for its version, which a stand-in does not have.
    import transformers.image_utils
    import transformers.models.auto.processing_auto
    import transformers.processing_utils

    assert transformers.image_utils
    absent = [name for name in _OPTIONAL if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Absent(absent))
    found = importlib.util.find_spec("flash_mla")
    if found is None or not torch.cuda.is_available():
        _install_flash_mla()
    elif not any(Path(found.origin or "").parent.glob("cuda.*.so")):
        _load_half(Path(found.origin or "").parent)


def _install_flash_mla() -> None:
    from anymla.compat import flash_mla as ours

    theirs: Any = types.ModuleType("flash_mla")
    theirs.__path__ = []
    theirs.FlashMLASchedMeta = ours.FlashMLASchedMeta
    theirs.get_mla_metadata = ours.get_mla_metadata
    theirs.flash_mla_with_kvcache = theirs.flash_mla_sparse_fwd = _refuse
    theirs.fused_norm_rope_attn_rope_cast = types.ModuleType("fused_norm_rope_attn_rope_cast")
    sys.modules["flash_mla"] = sys.modules["flash_mla.flash_mla_interface"] = theirs


def _load_half(folder: Path) -> None:
    """Load the library for Hopper of an sgl-flash-mla that lacks the other one."""
    torch.ops.load_library(str(next(folder.glob("_C_legacy.*.so"))))
    loader: Any = types.ModuleType("flash_mla._loader")
    loader.has_legacy = lambda: True
    loader.get_ops = lambda use_legacy: torch.ops.flash_mla_legacy
    sys.modules["flash_mla._loader"] = loader

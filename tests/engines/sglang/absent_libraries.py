"""Stand-ins for CUDA libraries that SGLang imports, on a machine that cannot have them.

FlashMLA's is ``anymla.compat.flash_mla``, so its class of scheduling metadata exists; a call that
reaches it by SGLang's own function raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

_ABSENT = ("sgl_kernel", "torchvision", "flashinfer", "deep_gemm", "decord", "torchcodec")


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in _ABSENT:
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
    """Install the stand-ins, once; Triton kernels are interpreted from here on."""
    if "flash_mla" in sys.modules:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    # transformers asks torchvision for its version, which a stand-in does not have.
    import transformers.image_utils
    import transformers.models.auto.processing_auto
    import transformers.processing_utils

    assert transformers.image_utils
    from anymla.compat import flash_mla as ours

    sys.meta_path.append(_Absent())
    theirs: Any = types.ModuleType("flash_mla")
    theirs.__path__ = []
    theirs.FlashMLASchedMeta = ours.FlashMLASchedMeta
    theirs.get_mla_metadata = ours.get_mla_metadata
    theirs.flash_mla_with_kvcache = theirs.flash_mla_sparse_fwd = _refuse
    theirs.fused_norm_rope_attn_rope_cast = types.ModuleType("fused_norm_rope_attn_rope_cast")
    sys.modules["flash_mla"] = sys.modules["flash_mla.flash_mla_interface"] = theirs

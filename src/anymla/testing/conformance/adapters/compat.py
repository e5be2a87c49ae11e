"""This package under the names of FlashMLA and DeepGEMM, judged as they are."""

from __future__ import annotations

from anymla.compat import deep_gemm as deep_gemm_names
from anymla.compat import flash_mla as flash_mla_names
from anymla.runtime.devices import default_device
from anymla.testing.conformance.adapters import Adapter, deep_gemm, flash_mla


def adapter() -> Adapter:
    """Both at once, on any device."""
    attention = flash_mla.adapter_of(flash_mla_names, "anymla.compat", needs_gpu=False)
    scores = deep_gemm.adapter_of(deep_gemm_names, "anymla.compat", needs_gpu=False)
    return Adapter(
        "anymla.compat",
        {**attention.functions, **scores.functions},
        translates=(*attention.translates, *scores.translates),
        excused={**scores.excused, **attention.excused},
        # On a GPU they are taken from the same instructions as DeepGEMM's.
        dot_error=None if default_device() == "cpu" else scores.dot_error,
    )

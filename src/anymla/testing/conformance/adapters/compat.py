"""Adapter of ``anymla.compat``, which is judged like FlashMLA and DeepGEMM themselves."""

from __future__ import annotations

from anymla.compat import deep_gemm as deep_gemm_names
from anymla.compat import flash_mla as flash_mla_names
from anymla.runtime.devices import default_device
from anymla.testing.conformance.adapters import Adapter, deep_gemm, flash_mla


def adapter() -> Adapter:
    """Return the adapter of both interfaces, for any device."""
    attention = flash_mla.adapter_of(flash_mla_names, "anymla.compat", needs_gpu=False)
    scores = deep_gemm.adapter_of(deep_gemm_names, "anymla.compat", needs_gpu=False)
    return Adapter(
        "anymla.compat",
        {**attention.functions, **scores.functions},
        translates=(*attention.translates, *scores.translates),
        excused={**scores.excused, **attention.excused},
        # On a GPU the operations use the same instructions as DeepGEMM.
        dot_error=None if default_device() == "cpu" else scores.dot_error,
    )

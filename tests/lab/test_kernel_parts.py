"""Each kernel of a step in ``benchmarks/vllm`` counts for its part."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "vllm"
# As torch's profiler names them.
THEIRS = {
    "void marlin_moe_wna16::Marlin<1125899906909960l, 562949953487106l>": "experts' products",
    "void marlin::Marlin<1125899906909960l, 2814749767172868l>": "FP8 products",
    "deep_gemm::sm90_fp8_gemm_1d2d_impl": "FP8 products",
    "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT": "other products",
    "void legacy::sm90::decode::sparse::flash_fwd_splitkv_mla_fp8_sparse_kernel": "attention",
    "void smxx::decode::flash_fwd_mla_combine_kernel<cutlass::bfloat16_t>": "attention",
    "mhc_pre_big_fuse_with_norm_tilelang_kernel": "hyper-connections",
    "void vllm::moe::topkGatingSoftplusSqrt<4, 64, 4, 16, 32>": "router",
    "void vllm::moe::moe_align_block_size_small_batch_expert_kernel": "experts, rest",
    "void vllm::deepseek_v4_fused_ops::fusedDeepseekV4QNormRopeKVInsert": "norm, rope, cache",
}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "kernel_parts", raising=False)
    return importlib.import_module("kernel_parts")


@pytest.mark.parametrize("name", THEIRS)
def test_a_kernel_of_vllms_is_known_by_its_name(parts: ModuleType, name: str) -> None:
    assert parts.part_of(name) == THEIRS[name]


def test_a_kernel_here_belongs_to_its_family(parts: ModuleType) -> None:
    """A KeyError is a family that no part was given to."""
    found = parts.own_kernels()
    assert len(found) > 80
    expected = {
        "decode_swap_ab_kernel": "attention", "combine_float32_kernel": "attention",
        "gemm_swap_ab_kernel": "FP8 products", "down_kernel": "experts' products",
        "gates_kernel": "hyper-connections", "close_kernel": "indexer",
    }  # fmt: skip
    assert {name: parts.part_of(name) for name in expected} == expected


def test_what_is_named_one_by_one_exists(parts: ModuleType) -> None:
    assert parts._ONE_BY_ONE.keys() <= parts.own_kernels().keys()

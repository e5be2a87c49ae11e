import math
from pathlib import Path
from typing import Any

import pytest
from official_configs import FLASH, PRO

from anymla.model.checkpoint import TensorInfo
from anymla.model.config import ModelConfig
from anymla.model.schema import (
    FLOAT_DTYPES,
    LinearShape,
    expected_linears,
    expected_plain,
    expected_tensors,
    linear_tensors,
    weight_kind,
)

# Shapes in the files of DeepSeek-V4-Pro: layer 2 has ratio 4 and routes by token id, 3 has 128.
PRO_LINEARS = {
    "layers.2.attn.wq_a": (1536, 7168),
    "layers.2.attn.wq_b": (65536, 1536),
    "layers.2.attn.wkv": (512, 7168),
    "layers.2.attn.wo_a": (16384, 4096),
    "layers.2.attn.wo_b": (7168, 16384),
    "layers.2.attn.compressor.wkv": (1024, 7168),
    "layers.3.attn.compressor.wgate": (512, 7168),
    "layers.2.attn.indexer.wq_b": (8192, 1536),
    "layers.2.attn.indexer.weights_proj": (64, 7168),
    "layers.2.attn.indexer.compressor.wkv": (256, 7168),
    "layers.2.ffn.experts.383.w1": (3072, 7168),
    "layers.2.ffn.experts.0.w2": (7168, 3072),
    "layers.2.ffn.shared_experts.w3": (3072, 7168),
    "mtp.0.e_proj": (7168, 7168),
    "mtp.0.h_proj": (7168, 7168),
    "mtp.0.attn.wo_b": (7168, 16384),
}
PRO_PLAIN = {
    "embed.weight": (129280, 7168),
    "head.weight": (129280, 7168),
    "norm.weight": (7168,),
    "hc_head_fn": (4, 28672),
    "hc_head_base": (4,),
    "hc_head_scale": (1,),
    "layers.2.attn.q_norm.weight": (1536,),
    "layers.2.attn.kv_norm.weight": (512,),
    "layers.2.attn.attn_sink": (128,),
    "layers.2.attn.compressor.ape": (4, 1024),
    "layers.3.attn.compressor.ape": (128, 512),
    "layers.3.attn.compressor.norm.weight": (512,),
    "layers.2.attn.indexer.compressor.ape": (4, 256),
    "layers.2.attn.indexer.compressor.norm.weight": (128,),
    "layers.0.attn_norm.weight": (7168,),
    "layers.0.ffn_norm.weight": (7168,),
    "layers.0.hc_attn_fn": (24, 28672),
    "layers.0.hc_ffn_base": (24,),
    "layers.0.hc_ffn_scale": (3,),
    "layers.0.ffn.gate.weight": (384, 7168),
    "layers.0.ffn.gate.tid2eid": (129280, 6),
    "layers.3.ffn.gate.bias": (384,),
    "mtp.0.enorm.weight": (7168,),
    "mtp.0.hnorm.weight": (7168,),
    "mtp.0.norm.weight": (7168,),
    "mtp.0.hc_head_fn": (4, 28672),
    "mtp.0.ffn.gate.bias": (384,),
}
ABSENT = (
    "layers.3.attn.indexer.wq_b",
    "layers.0.ffn.gate.bias",
    "layers.3.ffn.gate.tid2eid",
    "mtp.0.attn.compressor.ape",
    "mtp.0.embed.weight",
    "mtp.1.enorm.weight",
    "layers.61.attn_norm.weight",
)


def info(dtype: str) -> TensorInfo:
    return TensorInfo((1,), dtype, Path("file"), 1, "")


@pytest.fixture(scope="module")
def pro() -> ModelConfig:
    return ModelConfig.from_dict(PRO)


def test_official_linears(pro: ModelConfig) -> None:
    linears = expected_linears(pro)
    assert {n: (linears[n].rows, linears[n].columns) for n in PRO_LINEARS} == PRO_LINEARS


def test_official_plain_tensors(pro: ModelConfig) -> None:
    plain = expected_plain(pro)
    assert {name: plain[name].shape for name in PRO_PLAIN} == PRO_PLAIN
    assert plain["layers.0.ffn.gate.tid2eid"].dtypes == ("I64", "I32")


@pytest.mark.parametrize("name", ABSENT)
def test_what_a_layer_does_not_have(pro: ModelConfig, name: str) -> None:
    assert name not in expected_tensors(pro)
    assert name.removesuffix(".weight") not in expected_linears(pro)


@pytest.mark.parametrize(("values", "billions"), [(FLASH, 284), (PRO, 1573)], ids=["flash", "pro"])
def test_official_parameter_count(values: dict[str, Any], billions: int) -> None:
    """DeepSeek says 284 B and 1.6 T, without the draft layer."""
    expected = expected_tensors(ModelConfig.from_dict(values).without_drafts())
    sizes = [math.prod(one.shape) for one in expected.values() if one.dtypes == FLOAT_DTYPES]
    assert round(sum(sizes) / 1e9) == billions


def test_a_window_only_layer_has_no_compressor() -> None:
    names = [n for n in expected_tensors(ModelConfig.from_dict(FLASH)) if n.startswith("layers.0.")]
    assert names
    assert not [n for n in names if "compressor" in n or "indexer" in n]


def test_tied_embeddings_need_no_head() -> None:
    tied = expected_plain(ModelConfig.from_dict(FLASH | {"tie_word_embeddings": True}))
    assert tied["head.weight"].optional
    assert not expected_plain(ModelConfig.from_dict(FLASH))["head.weight"].optional


@pytest.mark.parametrize(
    ("tensors", "kind"),
    [
        ({}, "plain"),
        ({"p.weight": "BF16"}, "plain"),
        ({"p.weight": "F32"}, "plain"),
        ({"p.weight": "F8_E4M3", "p.scale": "F8_E8M0"}, "fp8"),
        ({"p.weight": "F8_E4M3"}, "fp8"),
        ({"p.weight": "I8", "p.scale": "F8_E8M0"}, "mxfp4"),
        ({"p.weight": "U8", "p.scale": "U8"}, "mxfp4"),
        ({"p.weight": "U8", "p.weight_scale": "F8_E4M3"}, "nvfp4"),
    ],
)
def test_kind_follows_the_file(tensors: dict[str, str], kind: str) -> None:
    assert weight_kind({name: info(dtype) for name, dtype in tensors.items()}, "p") == kind


def test_tensors_of_each_kind() -> None:
    # The scales of V4-Pro's wq_a and experts, and an edge block: 130 rows need two.
    every = ("plain", "fp8", "mxfp4", "nvfp4")
    wq_a, expert = LinearShape(1536, 7168, every), LinearShape(3072, 7168, every)
    assert linear_tensors("p", wq_a, "fp8")["p.scale"].shape == (12, 56)
    assert linear_tensors("p", LinearShape(130, 64, every), "fp8")["p.scale"].shape == (2, 1)
    mxfp4 = linear_tensors("p", expert, "mxfp4")
    assert mxfp4["p.weight"].shape == (3072, 3584)
    assert mxfp4["p.scale"].shape == (3072, 224)
    nvfp4 = linear_tensors("p", expert, "nvfp4")
    assert nvfp4["p.weight"].shape == (3072, 3584)
    assert nvfp4["p.weight_scale"].shape == (3072, 448)
    assert list(nvfp4) == ["p.weight", "p.weight_scale", "p.weight_scale_2"]
    assert list(linear_tensors("p", wq_a, "plain")) == ["p.weight"]

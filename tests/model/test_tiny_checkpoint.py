import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import SMALL
from safetensors.torch import load_file

from anymla.model.checkpoint import Checkpoint
from anymla.model.config import ConfigError, ModelConfig
from anymla.model.verify import verify
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_noise import Noise
from anymla.testing.tiny_options import TinySharing, default_ratios

SHARING = TinySharing.of((0, 2))


def small(**changes: Any) -> TinyOptions:
    return TinyOptions(**{**vars(SMALL), **changes})


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


# DeepSeek's dtypes, by the end of the name, for --weights fp4.
DTYPES = {
    "embed.weight": "BF16",
    "norm.weight": "BF16",
    "attn.wq_a.weight": "F8_E4M3",
    "attn.wq_a.scale": "F8_E8M0",
    "attn.wo_a.weight": "F8_E4M3",
    "attn.attn_sink": "F32",
    "attn.compressor.wkv.weight": "BF16",
    "attn.compressor.ape": "F32",
    "attn.compressor.norm.weight": "BF16",
    "attn.indexer.wq_b.scale": "F8_E8M0",
    "attn.indexer.weights_proj.weight": "BF16",
    "hc_attn_fn": "F32",
    "hc_ffn_base": "F32",
    "hc_head_scale": "F32",
    "ffn.gate.weight": "BF16",
    "ffn.gate.bias": "F32",
    "ffn.gate.tid2eid": "I64",
    "ffn.experts.0.w1.weight": "I8",
    "ffn.experts.0.w2.scale": "F8_E8M0",
    "ffn.shared_experts.w3.weight": "F8_E4M3",
    "mtp.0.e_proj.weight": "F8_E4M3",
    "mtp.0.enorm.weight": "BF16",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(root / "packed", SMALL, twin=root / "twin")
    return root / "packed", root / "twin"


def test_default_is_complete_and_quick(tmp_path: Path) -> None:
    began = time.process_time()
    write_tiny_checkpoint(tmp_path)
    assert time.process_time() - began < 5
    config = ModelConfig.from_dir(tmp_path)
    assert config.backbone_ratios == (0, 4, 128, 4)
    # Sizes that vLLM's CPU kernels have.
    assert (config.n_routed_experts, config.num_experts_per_tok, config.index_topk) == (64, 6, 512)
    assert verify(Checkpoint.open(tmp_path), config).ok


@pytest.mark.parametrize("suffix", DTYPES)
def test_deepseeks_dtypes(written: tuple[Path, Path], suffix: str) -> None:
    checkpoint = Checkpoint.open(written[0])
    dtypes = {info.dtype for name, info in checkpoint.items() if f".{name}".endswith(f".{suffix}")}
    assert dtypes == {DTYPES[suffix]}


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "bf16"},
        {"weights": "fp8"},
        {"weights": "fp8", "scale_format": "fp32"},
        {"nvfp4_attention": True},
        {"weights": "bf16", "nvfp4_attention": True},
        {"shards": 5},
        {"mtp": 0},
        {"mtp": 2},
        {"ratios": (128,), "hash_layers": 0},
        {"ratios": (8, 2, 0), "rope_factor": 1.0, "window": 7, "vocab": 300},
    ],
    ids=str,
)
def test_every_variant_verifies(changes: dict[str, Any], tmp_path: Path) -> None:
    options = small(**changes)
    write_tiny_checkpoint(tmp_path / "packed", options, twin=tmp_path / "twin")
    for directory in (tmp_path / "packed", tmp_path / "twin"):
        report = verify(Checkpoint.open(directory), ModelConfig.from_dir(directory))
        assert report.ok, report.summary()
        assert len(list(directory.glob("*.safetensors"))) == options.shards


def test_unquantised_checkpoints_have_no_scales(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, small(weights="bf16"))
    assert not [name for name in Checkpoint.open(tmp_path) if name.endswith(".scale")]
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"quantization_config", "expert_dtype"} & config.keys()


def test_twin_is_unquantised_and_shares_the_rest(written: tuple[Path, Path]) -> None:
    packed, twin = (load_file(path / "model.safetensors") for path in written)
    assert {tensor.dtype for tensor in twin.values()} == {
        torch.bfloat16,
        torch.float32,
        torch.int64,
    }
    shared = [name for name in twin if packed[name].dtype == twin[name].dtype]
    assert len(shared) > 50
    for name in shared:
        assert torch.equal(packed[name], twin[name])


def test_same_options_same_bytes(tmp_path: Path, written: tuple[Path, Path]) -> None:
    write_tiny_checkpoint(tmp_path, SMALL)
    assert digests(tmp_path) == digests(written[0])


def test_another_seed_other_values(tmp_path: Path, written: tuple[Path, Path]) -> None:
    write_tiny_checkpoint(tmp_path, small(seed=1))
    one = load_file(written[0] / "model.safetensors")
    other = load_file(tmp_path / "model.safetensors")
    same = [
        name
        for name in one
        if one[name].dtype in (torch.bfloat16, torch.float32)
        and torch.equal(one[name], other[name])
    ]
    assert same == []


def test_shards_hold_the_same_tensors(tmp_path: Path, written: tuple[Path, Path]) -> None:
    write_tiny_checkpoint(tmp_path, small(shards=3))
    one, many = Checkpoint.open(written[0]), Checkpoint.open(tmp_path)
    assert set(one) == set(many)
    for name in one:
        a, b = one.tensor(name).reshape(-1), many.tensor(name).reshape(-1)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_values_are_neither_constant_nor_wild(written: tuple[Path, Path]) -> None:
    for name, tensor in load_file(written[1] / "model.safetensors").items():
        values = tensor.double()
        assert bool(values.isfinite().all()), name
        assert values.numel() == 1 or float(values.std()) > 1e-3, name
        if tensor.dtype != torch.int64:
            assert float(values.abs().max()) < 8, name


def test_hash_table_names_different_experts(written: tuple[Path, Path]) -> None:
    table = load_file(written[0] / "model.safetensors")["layers.0.ffn.gate.tid2eid"]
    assert table.shape == (SMALL.vocab, SMALL.experts_per_token)
    assert all(len(set(row)) == len(row) for row in table.tolist())
    assert set(table.flatten().tolist()) == set(range(SMALL.experts))


def test_noise_is_pinned() -> None:
    """Golden values: changing them changes every tiny checkpoint."""
    sample = Noise(0).normal("embed.weight", 2, 3)
    again = Noise(0).normal("embed.weight", 2, 3)
    assert torch.equal(sample, again)
    assert Noise(0).distinct("t", 2, 3, 5).tolist() == [[0, 1, 2], [2, 4, 3]]
    # Each is the sum of four bytes, shifted and scaled.
    sums = torch.round(sample * 147.80166 + 510).int()
    assert sums.tolist() == [[419, 504, 733], [691, 443, 525]]


def test_noise_is_normal_enough() -> None:
    n = 200_000
    sample = Noise(3).normal("x", n).double()
    # Five deviations of the estimates of mean and variance (kurtosis is near 3).
    assert abs(float(sample.mean())) < 5 / n**0.5
    assert abs(float(sample.var()) - 1) < 5 * (2 / n) ** 0.5
    assert float(sample.abs().max()) < 3.46
    other = Noise(3).normal("y", n).double()
    assert abs(float((sample * other).mean())) < 5 / n**0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "int4"}, r"weights must be bf16 or fp8 or fp4 or nvfp4, got 'int4'"),
        ({"scale_format": "bf16"}, r"scale_format must be ue8m0 or fp32, got 'bf16'"),
        ({"ratios": ()}, r"ratios must name at least one layer"),
        ({"vocab": 200}, r"vocab must be at least 258, got 200"),
        ({"shards": 0}, r"shards must be at least 1, got 0"),
        ({"hidden": 100}, r"hidden must be a multiple of 32 for FP4 experts, got 100"),
        ({"moe_size": 48}, r"moe_size must be a multiple of 32 for FP4 experts, got 48"),
        ({"sharing": SHARING, "mtp": 0, "hash_layers": 1}, r"hash_layers and mtp must be 0"),
        ({"sharing": SHARING, "mtp": 1, "hash_layers": 0}, r"hash_layers and mtp must be 0"),
        (
            {"q_lora": 40, "nvfp4_attention": True},
            r"q_lora must be a multiple of 16 for NVFP4, got 40",
        ),
        (
            {"o_lora": 12, "nvfp4_attention": True},
            r"o_groups \* o_lora must be a multiple of 16 for NVFP4",
        ),
    ],
)
def test_options_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_options_that_no_model_can_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"o_groups is 3, supported: a divisor of "):
        write_tiny_checkpoint(tmp_path / "x", small(o_groups=3))
    assert not (tmp_path / "x").exists()


def test_other_peoples_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    with pytest.raises(ValueError, match=r"is not empty and holds no tiny checkpoint to replace"):
        write_tiny_checkpoint(tmp_path, SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_twin_needs_its_own_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the twin needs a directory of its own"):
        write_tiny_checkpoint(tmp_path / "a", SMALL, twin=tmp_path / "b" / ".." / "a")


def test_an_earlier_tiny_checkpoint_is_replaced(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, small(shards=3))
    write_tiny_checkpoint(tmp_path, small(weights="bf16"))
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert verify(Checkpoint.open(tmp_path), ModelConfig.from_dir(tmp_path)).ok


def test_default_ratios() -> None:
    assert default_ratios(1) == (0,)
    assert default_ratios(6) == (0, 4, 128, 4, 128, 4)

"""Checkpoints that others quantised: NVIDIA's experts, drafts left as they were, an FP8 head."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import SMALL, Tensors, changed

from anymla.cli.checkpoint_report import checkpoint_report
from anymla.formats.fp8_block import dequantize_fp8_weight, quantize_fp8_weight
from anymla.formats.nvfp4 import quantize_nvfp4
from anymla.model.checkpoint import CheckpointError
from anymla.model.config import ConfigError, ModelConfig
from anymla.model.load import load_model
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.testing.published import FLASH
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

PROMPT = tuple(range(2, 14))
# As in config.json of nvidia/DeepSeek-V4-Flash-NVFP4 and of its V4.1, whose lists are longer.
NVFP4 = FLASH["quantization_config"] | {
    "quant_algo": "MIXED_PRECISION",
    "moe_quant_algo": "NVFP4",
    "group_size": 16,
    "kv_cache_quant_algo": None,
    "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
    "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
        }
    },
    "producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"},
}


@pytest.fixture(scope="module")
def fp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fp4")
    write_tiny_checkpoint(directory, SMALL)
    return directory


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Experts as NVIDIA's releases have them, and a checkpoint of the same values in bf16."""
    directory = tmp_path_factory.mktemp("nvfp4")
    options = TinyOptions(**{**vars(SMALL), "weights": "nvfp4"})
    write_tiny_checkpoint(directory / "packed", options, twin=directory / "twin")
    return directory / "packed", directory / "twin"


def run(directory: Path, **how: Any) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, in float32 unless ``how`` says otherwise."""
    given = {"dtype": torch.float32, "drafts": "off", "progress": False} | how
    request = Request("only", PROMPT, max_new_tokens=6)
    with contextlib.redirect_stderr(io.StringIO()):
        model = load_model(directory, **given)
    engine = Engine.for_requests(model, EngineOptions(kv_cache="fp32"), [request])
    (done,) = engine.run([request])
    return list(done.token_ids), list(done.logprobs)


def assert_alike(
    found: tuple[list[int], list[float]], wanted: tuple[list[int], list[float]]
) -> None:
    """The same tokens, whose sums may have been made in another order."""
    assert found[0] == wanted[0]
    assert found[1] == pytest.approx(wanted[1], abs=1e-4)


def test_nvidias_configuration() -> None:
    config = ModelConfig.from_dict(FLASH | {"quantization_config": NVFP4})
    assert config.quantization is not None
    assert (config.quantization.method, config.quantization.experts) == ("fp8", "NVFP4")
    assert config.expert_dtype == "fp4"


def test_nvfp4_experts_compute_what_their_values_do(nvfp4: tuple[Path, Path]) -> None:
    packed, twin = nvfp4
    assert_alike(run(packed), run(twin))
    # Nothing is rounded to another format on the way: not with activations in bfloat16 either.
    _, logprobs = run(packed, dtype=torch.bfloat16)
    assert all(map(math.isfinite, logprobs))


def test_a_factor_that_is_no_power_of_two_is_exact(
    nvfp4: tuple[Path, Path], tmp_path: Path
) -> None:
    """weight_scale_2 is taken as it is: experts of 3/4 of the values have 3/4 of the factor."""
    packed, _ = nvfp4

    def scale(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(".weight_scale_2")]:
            tensors[name] = tensors[name] * 0.75

    model, three_quarters = (
        load_model(each, dtype=torch.float32, drafts="off", progress=False)
        for each in (packed, changed(packed, tmp_path, scale))
    )
    for one, other in zip(model.layers, three_quarters.layers, strict=True):
        factors = one.ffn._more["global_scales"]
        assert factors.shape == (4, 3)
        assert torch.equal(other.ffn._more["global_scales"], factors * 0.75)


def test_scales_that_nothing_reads_are_named(nvfp4: tuple[Path, Path], tmp_path: Path) -> None:
    packed, _ = nvfp4

    def add(tensors: Tensors) -> None:
        for name in ("k_scale", "v_scale"):
            tensors[f"layers.0.attn.{name}"] = torch.tensor(1.0)
        tensors["mtp.0.e_proj.input_scale"] = torch.ones(1)

    directory = changed(packed, tmp_path, add)
    count = 3 * 4 * 3 + 3
    with contextlib.redirect_stderr(io.StringIO()) as said:
        load_model(directory, progress=False)
    assert said.getvalue() == (
        f"{directory}: {count} static scale tensors (*.input_scale, *.k_scale, *.v_scale) are not "
        "read\n"
    )
    assert checkpoint_report(directory, "fp8")["ok"]


def test_a_manifest_beside_the_configuration(nvfp4: tuple[Path, Path], tmp_path: Path) -> None:
    """Older tools of NVIDIA's say it there alone; config.json has the last word."""
    packed, _ = nvfp4
    directory = changed(packed, tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match="but config has no quantization_config"):
        load_model(directory, progress=False)
    manifest = directory / "hf_quant_config.json"
    said = {"quant_algo": "MIXED_PRECISION", "exclude_modules": ["head"], "group_size": 16}
    manifest.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    config = ModelConfig.from_dir(directory)
    assert config.quantization is not None
    assert config.quantization.method == "modelopt"
    assert_alike(run(directory), run(packed))
    for text, message in (("{", "cannot be read: "), ("{}", "has no object named quantization")):
        manifest.write_text(text)
        with pytest.raises(ConfigError, match=rf"hf_quant_config\.json: {message}"):
            ModelConfig.from_dir(directory)
        assert ModelConfig.from_dir(packed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_quant_algo": "IQ3_WIRE"}, r"moe_quant_algo is 'IQ3_WIRE', supported: 'NVFP4' or"),
        ({"group_size": 32}, r"quantization_config.group_size is 32, supported: 16"),
    ],
)
def test_what_a_configuration_may_not_say(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(FLASH | {"quantization_config": NVFP4 | changes})


def test_experts_that_are_not_what_the_configuration_says(
    fp4: Path, nvfp4: tuple[Path, Path], tmp_path: Path
) -> None:
    packed, _ = nvfp4
    said = json.loads((fp4 / "config.json").read_text())["quantization_config"]
    directory = changed(fp4, tmp_path / "a", quantization_config=said | {"moe_quant_algo": "NVFP4"})
    with pytest.raises(CheckpointError, match="as mxfp4, but config says moe_quant_algo NVFP4"):
        load_model(directory, progress=False)
    plain = {"quantization_config": said, "expert_dtype": "fp8"}
    with pytest.raises(CheckpointError, match="stored as nvfp4, but config says expert_dtype fp8"):
        load_model(changed(packed, tmp_path / "b", **plain), progress=False)


def test_experts_that_somebody_decoded(nvfp4: tuple[Path, Path], tmp_path: Path) -> None:
    """A checkpoint in bf16 whose configuration still has what it was made of."""
    packed, twin = nvfp4
    assert "expert_dtype" not in json.loads((twin / "config.json").read_text())
    left = changed(twin, tmp_path, expert_dtype="fp4")
    assert_alike(run(left), run(packed))


@pytest.mark.parametrize("word", ["nvfp4", "MXFP4"])
def test_words_for_the_experts(word: str) -> None:
    values = FLASH | {"quantization_config": NVFP4 | {"moe_quant_algo": word}}
    quantization = ModelConfig.from_dict(values).quantization
    assert quantization is not None
    assert quantization.experts == word.upper()


def dense_drafts(tensors: Tensors) -> None:
    """Experts of the drafter in bf16."""
    for name in [name for name in tensors if name.startswith("mtp.") and ".experts." in name]:
        if name.endswith(".weight"):
            rows, half = tensors[name].shape
            del tensors[name.replace(".weight", ".scale")]
            noise = torch.Generator().manual_seed(rows + half)
            tensors[name] = torch.randn(rows, 2 * half, generator=noise).bfloat16() / 8


def nvfp4_drafts(tensors: Tensors) -> None:
    """And in NVFP4, which its backbone's are not."""
    dense_drafts(tensors)
    for name in [name for name in tensors if name.startswith("mtp.") and ".ffn.experts." in name]:
        codes, scales, whole = quantize_nvfp4(tensors[name].float())
        prefix = name.removesuffix(".weight")
        tensors[name] = codes
        tensors[f"{prefix}.weight_scale"] = scales.view(torch.float8_e4m3fn)
        tensors[f"{prefix}.weight_scale_2"] = whole.view(())


@pytest.mark.parametrize("change", [dense_drafts, nvfp4_drafts])
@pytest.mark.parametrize("drafter", ["mtp", "dspark"])
def test_drafts_of_another_kind_than_the_backbone(
    drafter: str, change: Callable[[Tensors], None], tmp_path: Path
) -> None:
    write_tiny_checkpoint(tmp_path / "fp4", TinyOptions(**{**vars(SMALL), "drafter": drafter}))
    directory = changed(tmp_path / "fp4", tmp_path / "changed", change)
    assert_alike(run(directory, drafts=drafter), run(tmp_path / "fp4"))


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
@pytest.mark.parametrize("names", [("head",), ("embed", "head"), ("embed",)])
def test_a_vocabulary_in_fp8(
    fp4: Path, tmp_path: Path, names: tuple[str, ...], scale_format: str
) -> None:
    """The head, the embedding or both in blocks of e4m3: the same as of the values they hold."""

    def store(tensors: Tensors) -> None:
        for name in names:
            codes, scale = quantize_fp8_weight(tensors[f"{name}.weight"].float(), scale_format)
            tensors[f"{name}.weight"] = codes.view(torch.float8_e4m3fn)
            stored = scale if scale_format == "fp32" else scale.view(torch.float8_e8m0fnu)
            tensors[f"{name}.scale"] = stored

    def decode(tensors: Tensors) -> None:
        for name in names:
            codes, scale = quantize_fp8_weight(tensors[f"{name}.weight"].float(), scale_format)
            tensors[f"{name}.weight"] = dequantize_fp8_weight(codes, scale)

    packed = changed(fp4, tmp_path / "packed", store)
    assert_alike(run(packed), run(changed(fp4, tmp_path / "values", decode)))
    report = checkpoint_report(packed, "fp8")
    assert report["ok"]


def test_a_tied_head_in_fp8(fp4: Path, tmp_path: Path) -> None:
    def tie(tensors: Tensors) -> None:
        codes, scale = quantize_fp8_weight(tensors["embed.weight"].float(), "ue8m0")
        tensors["embed.weight"] = codes.view(torch.float8_e4m3fn)
        tensors["embed.scale"] = scale.view(torch.float8_e8m0fnu)
        del tensors["head.weight"]

    model = load_model(
        changed(fp4, tmp_path, tie, tie_word_embeddings=True), dtype=torch.float32, progress=False
    )
    assert torch.equal(model.lm_head, model.embedding)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"head.weight": (48, 80)}, r"head is stored as mxfp4, can read plain or fp8"),
        ({"head.scale": (1, 1)}, r"unexpected head\.scale"),
    ],
)
def test_a_vocabulary_that_cannot_be_read(
    fp4: Path, tmp_path: Path, stored: dict[str, tuple[int, int]], message: str
) -> None:
    def put(tensors: Tensors) -> None:
        tensors |= {name: torch.zeros(size, dtype=torch.uint8) for name, size in stored.items()}

    with pytest.raises(CheckpointError, match=message):
        load_model(changed(fp4, tmp_path, put), progress=False)


def test_no_limit_of_swiglu(tmp_path: Path) -> None:
    """0 is none: as with a limit that nothing reaches."""
    write_tiny_checkpoint(tmp_path / "limited", SMALL)
    free, far = (
        run(changed(tmp_path / "limited", tmp_path / str(limit), swiglu_limit=limit))
        for limit in (0, 1e30)
    )
    assert_alike(free, far)
    assert free[1] != pytest.approx(run(tmp_path / "limited")[1], abs=1e-4)

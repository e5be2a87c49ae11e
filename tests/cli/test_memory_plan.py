"""``anymla inspect`` of a configuration and an index: the memory that a model would take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from anymla.cli.main import main
from anymla.formats.fp8_block import FP8_BLOCK
from anymla.layers.linear import WeightKind
from anymla.model.config import ModelConfig
from anymla.model.schema import expected_linears, expected_plain, expected_tables, linear_tensors
from anymla.runtime.cache_size import cache_sizes
from anymla.testing.published import FLASH, FLASH_41
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

SMALL: dict[str, Any] = {"experts": 8, "experts_per_token": 2, "shards": 2}
MODELS = {
    "fp4": TinyOptions(**SMALL),
    "fp8": TinyOptions(**SMALL, weights="fp8"),
    "bf16": TinyOptions(**SMALL, weights="bf16"),
    "nvfp4": TinyOptions(**SMALL, weights="nvfp4", drafter="dspark", stages=1),
    "nvfp4 attention": TinyOptions(**SMALL, nvfp4_attention=True),
    "v4.1": TinyOptions.shared(**SMALL, drafter="dspark", stages=1, draft_experts=4),
}


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


def report_of(out: Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    result = inspect(*arguments, "--json", out)
    assert result.exit_code == code, result.output
    return dict(json.loads(out.read_text()))


def described(directory: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(directory / name, target / name)
    return target


@pytest.mark.parametrize("kind", MODELS)
def test_the_description_of_a_checkpoint_has_its_sizes(kind: str, tmp_path: Path) -> None:
    """Without a byte of weights: the same tensors, parts, kinds and plan as with all of them."""
    whole = tmp_path / "whole"
    write_tiny_checkpoint(whole, MODELS[kind])
    alone = described(whole, tmp_path / "alone")
    with_weights, without = (
        report_of(tmp_path / "out.json", "--checkpoint", each, "--memory", 1)
        for each in (whole, alone)
    )
    assert (with_weights.pop("described"), without.pop("described")) == (False, True)
    for report in (with_weights, without):
        del report["directory"]
        report["unread"] = [line.partition(": ")[2] for line in report["unread"]]
    assert without == with_weights
    said = inspect("--checkpoint", alone)
    assert "\nno weights are here: sizes follow from config.json and the index\n" in said.output


def published(directory: Path, values: dict[str, Any], experts: WeightKind) -> Path:
    """The description of a published model, with its experts in that kind and FP8 elsewhere."""
    config = ModelConfig.from_dict(values)
    names = list(expected_plain(config))
    for prefix, shape in expected_linears(config).items():
        expert = ".ffn.experts." in prefix
        kind: WeightKind = experts if expert else "fp8" if "fp8" in shape.kinds else "plain"
        names += linear_tensors(prefix, shape, kind, FP8_BLOCK)
    for prefix in expected_tables(config):
        names += [f"{prefix}.weight", f"{prefix}.scale"]
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(names, "model-1.safetensors"),
    }
    (directory / "config.json").write_text(json.dumps(values))
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def test_v4_flash_on_gpus_of_80_gb(tmp_path: Path) -> None:
    """Sizes of the published model: 160 GB, of which 137 are experts."""
    directory = published(tmp_path, FLASH, "mxfp4")
    report = report_of(tmp_path / "out.json", "--checkpoint", directory, "--memory", 80)
    assert report["ok"]
    assert 155e9 < report["bytes"] < 165e9
    plan = {int(ranks): each for ranks, each in report["plan"]["ranks"].items()}
    assert list(plan) == [1, 2, 4, 8]
    weights = {ranks: each["weight_bytes"] for ranks, each in plan.items()}
    # Experts are shared evenly; what is on every GPU is a few GB.
    assert weights[1] == pytest.approx(report["bytes"], rel=0.01)
    assert all(weights[2 * n] < 0.56 * weights[n] for n in (1, 2, 4))
    assert plan[1]["fit"]["longest"] == plan[2]["fit"]["longest"] == 0
    for ranks in (4, 8):
        fit = plan[ranks]["fit"]
        assert fit["free_bytes"] == int(80e9 * 0.9) - weights[ranks]
        assert fit["longest"] == 1048576
        sizes = cache_sizes(ModelConfig.from_dict(FLASH), "fp8", [65536])
        held = sum(size.held_bytes[65536] for size in sizes)
        assert fit["texts"]["65536"] == fit["free_bytes"] // held > 10


def test_the_longest_text_is_the_longest(tmp_path: Path) -> None:
    values = FLASH | {"n_routed_experts": 8}
    directory = published(tmp_path, values, "mxfp4")
    config = ModelConfig.from_dict(values)

    def held(length: int) -> int:
        return sum(each.held_bytes[length] for each in cache_sizes(config, "fp8", [length]))

    weights = report_of(tmp_path / "out.json", "--checkpoint", directory)["plan"]["ranks"]["8"]
    memory = (weights["weight_bytes"] + held(100_000)) / 0.9 / 1e9
    plan = report_of(tmp_path / "out.json", "--checkpoint", directory, "--memory", memory)["plan"]
    fit = plan["ranks"]["8"]["fit"]
    assert held(fit["longest"]) <= fit["free_bytes"] < held(fit["longest"] + 1024)
    assert fit["longest"] == pytest.approx(100_000, abs=1024)


def test_nvfp4_and_tables_of_n_grams(tmp_path: Path) -> None:
    """Experts with a scale for 16 channels take more; tables stay in their files."""
    sizes = {}
    few = {"n_routed_experts": 16, "dspark_n_routed_experts": 16}
    values = FLASH_41 | {"text_config": FLASH_41["text_config"] | few}
    for kind in ("mxfp4", "nvfp4"):
        directory = tmp_path / kind
        directory.mkdir()
        published(directory, values, kind)  # type: ignore[arg-type]
        sizes[kind] = report_of(tmp_path / "out.json", "--checkpoint", directory)
    experts = {kind: each["parts"]["routed experts"]["bytes"] for kind, each in sizes.items()}
    # 4 bits a value, and 8 for 32 or 16 of them.
    assert experts["nvfp4"] / experts["mxfp4"] == pytest.approx(4.5 / 4.25, rel=1e-4)
    whole = sizes["mxfp4"]
    kept = whole["plan"]["ranks"]["1"]["weight_bytes"]
    assert whole["parts"]["engram"]["bytes"] > 190e9
    assert kept < whole["bytes"] - 190e9


def test_what_an_index_lacks_or_has_too_much_is_listed(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "whole", MODELS["fp4"])
    directory = described(tmp_path / "whole", tmp_path / "alone")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"].pop("layers.0.attn.wkv.weight")
    index["weight_map"] |= {"extra.weight": file, "vision.x.weight": file}
    path.write_text(json.dumps(index))
    report = report_of(tmp_path / "out.json", "--checkpoint", directory, code=1)
    assert report["missing"] == ["layers.0.attn.wkv.weight"]
    assert "extra.weight" in report["unexpected"]
    assert report["unread"] == [f"{directory}: 1 vision tensors (vision.*) are not read"]


def test_some_of_the_weights_are_not_a_description(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, MODELS["fp4"])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    result = inspect("--checkpoint", tmp_path)
    assert result.exit_code == 2
    assert "names model-00002-of-00002.safetensors, which does not exist" in result.stderr


def test_a_table_that_can_be_read(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, MODELS["fp4"])
    lines = inspect("--checkpoint", tmp_path, "--memory", "0.05").output.splitlines()
    at = lines.index("memory of each GPU")
    assert lines[at + 1].split() == ["GPUs", "1", "2"]
    assert lines[at + 2].split()[0] == "weights"
    assert lines[at + 3] == "of 50.0 MB, a tenth kept free"
    labels = ["left for caches", "longest text", "texts of 1024", "texts of 8192"]
    assert [line[2:22].strip() for line in lines[at + 4 : at + 8]] == labels
    # Without a memory there is nothing to fit into.
    assert "longest text" not in inspect("--checkpoint", tmp_path).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "80"], "give exactly one of --checkpoint and --cache"),
        (["--cache", "x", "--memory", "80"], "--memory goes with --checkpoint"),
        (["--checkpoint", "x", "--memory", "0"], "0.0 is not in the range x>0"),
        (["--checkpoint", "x", "--memory", "nan"], "must be finite"),
        (["--checkpoint", "x", "--memory", "much"], "'much' is not a valid float"),
    ],
)
def test_memory_is_a_number_of_a_checkpoint(arguments: list[str], message: str) -> None:
    result = inspect(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr

"""DeepSeek-V4.1's checkpoint: what is read, what is left alone, what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from v41_cases import shared

from anymla.cli.checkpoint_report import checkpoint_report
from anymla.cli.generate import command as generate
from anymla.cli.inspect import command as inspect
from anymla.cli.make_tiny import command as make_tiny
from anymla.cli.score import command as score
from anymla.layers.ranks import Ranks
from anymla.model.checkpoint import Checkpoint, CheckpointError
from anymla.model.config import ConfigError, ModelConfig
from anymla.model.drafts import unread_lines
from anymla.model.load import load_model
from anymla.model.tokenizer import TokenizerError
from anymla.runtime.cache_size import cache_sizes
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.testing.published import FLASH_41
from anymla.testing.tiny_checkpoint import write_tiny_checkpoint

OPTIONS = dataclasses.replace(shared(weights="fp4", hidden=64, experts=4), moe_size=64)
PROMPT = tuple(range(3, 60))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shared")
    write_tiny_checkpoint(directory, OPTIONS)
    return directory


def _changed(
    checkpoint: Path, directory: Path, *without: str, text: Any = None, **tensors: Any
) -> Path:
    """A copy with other tensors, and other fields of the text model."""
    stored = load_file(checkpoint / "model.safetensors") | tensors
    kept = {name: value for name, value in stored.items() if name not in without}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"] |= text or {}
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((checkpoint / name).read_bytes())
    return directory


def _generate(directory: Path, **options: Any) -> tuple[int, ...]:
    model = load_model(directory, dtype=torch.float32, progress=False)
    request = Request("only", PROMPT, max_new_tokens=6)
    engine = Engine.for_requests(model, EngineOptions(kv_cache="nvfp4", **options), [request])
    return engine.run([request])[0].token_ids


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drafting")
    changes = {"drafter": "dspark", "draft_experts": 3, "draft_experts_per_token": 2}
    write_tiny_checkpoint(directory, dataclasses.replace(OPTIONS, **changes))
    return directory


def test_images_are_left_alone_and_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {
        "vision.patch_embed.weight": torch.zeros(2),
        "aligner.weight": torch.zeros(2),
        "image_start": torch.zeros(2),
    }
    directory = _changed(checkpoint, tmp_path, **more)
    line = f"{directory}: 3 vision tensors (vision.*, aligner.*, image_*) are not read\n"
    load_model(directory, progress=False)
    assert capsys.readouterr().err == line
    load_model(directory, ranks=Ranks(1, 2), progress=False)
    assert capsys.readouterr().err == ""
    assert _generate(directory) == _generate(checkpoint)
    asked = ["--checkpoint", str(directory), "--prompt", "The", "--max-new-tokens", "1"]
    told = CliRunner().invoke(generate, asked)
    assert told.exit_code == 0
    assert told.stderr.startswith(line)


def test_prompts_with_images_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """By the commands before anything is loaded, and by the engine."""
    directory = _changed(checkpoint, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"image_token_id": PROMPT[5]}))
    said = f"token id {PROMPT[5]} stands for an image (image_token_id), and images are not read\n"
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"token_ids": PROMPT}))
    common = ["--checkpoint", str(directory), "--json", str(tmp_path / "out.json")]
    for command, option, name in (
        (generate, "--requests-file", f"{tokens} line 1: request '1'"),
        (score, "--token-ids", "request 'score'"),
    ):
        told = CliRunner().invoke(command, [*common, option, str(tokens)])
        assert (told.exit_code, told.stderr) == (2, f"Error: {name}: {said}")
    with pytest.raises(ValueError, match="images are not read"):
        _generate(directory)


def test_a_configuration_of_the_text_model_alone(checkpoint: Path, tmp_path: Path) -> None:
    directory = _changed(checkpoint, tmp_path)
    whole = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(whole["text_config"]))
    with pytest.raises(CheckpointError, match="stored as fp8, but config has no quantization_con"):
        load_model(directory, progress=False)
    said = {"quantization_config": whole["quantization_config"]}
    (directory / "config.json").write_text(json.dumps(whole["text_config"] | said))
    assert _generate(directory) == _generate(checkpoint)


def test_the_drafter_is_read(drafting: Path, checkpoint: Path) -> None:
    model = load_model(drafting, progress=False)
    assert model.dspark is not None
    assert len(model.dspark.stages) == 3
    assert model.dspark.tapped == (5, 6, 7)
    experts = [len(each.ffn.w1.weights) for each in (*model.layers, *model.dspark.stages)]
    assert experts == [4] * 8 + [3] * 3
    assert load_model(drafting, drafts="off", progress=False).dspark is None
    # Without the drafter's tensors its fields say nothing.
    assert _generate(drafting, draft_tokens=4) == _generate(drafting) == _generate(checkpoint)
    with pytest.raises(CheckpointError, match=r"holds a DSpark drafter, asked for: MTP layers"):
        load_model(drafting, drafts="mtp", progress=False)
    with pytest.raises(CheckpointError, match=r"holds no drafter, asked for: a DSpark drafter"):
        load_model(checkpoint, drafts="dspark", progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mtp.2.markov_head.markov_w1.weight": 2},
            r"unexpected mtp.2.markov_head.markov_w1.weight$",
        ),
        ({"mtp.2.hc_head_fn": 2}, r"unexpected mtp.2.hc_head_fn$"),
        ({"mtp.0.e_proj.weight": 2}, r"mtp.0.e_proj.weight belongs to MTP layers, but config"),
        ({"mtp.2.markov_head.head.weight": None}, r"missing mtp.2.markov_head.head.weight$"),
        ({"mtp.1.ffn.experts.2.w2.weight": None}, r"missing mtp.1.ffn.experts.2.w2.weight; unexp"),
        ({"mtp.1.attn.compressor.norm.weight": 2}, r"unexpected mtp.1.attn.compressor.norm.weig"),
    ],
)
def test_tensors_of_a_drafter_are_refused_by_name(
    drafting: Path, tmp_path: Path, changes: dict[str, int | None], message: str
) -> None:
    without = [name for name, size in changes.items() if size is None]
    more = {name: torch.zeros(size) for name, size in changes.items() if size is not None}
    _changed(drafting, tmp_path, *without, **more)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path, progress=False)


def test_the_bias_of_image_tokens_is_not_read(checkpoint: Path, tmp_path: Path) -> None:
    biases = {f"layers.{layer}.ffn.gate.bias_vl": torch.full((9,), 1e4) for layer in range(8)}
    changed = _changed(checkpoint, tmp_path, **biases)
    assert unread_lines(Checkpoint.open(changed), ModelConfig.from_dir(changed)) == [
        f"{changed}: 8 vision tensors (*.ffn.gate.bias_vl) are not read"
    ]
    assert _generate(changed) == _generate(checkpoint)


def test_a_tokenizer_of_another_size_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    _changed(checkpoint, tmp_path, text={"engram_compressed_vocab_size": 200})
    with pytest.raises(ConfigError, match=r"is 200, but tokenizer.json has 2.. tokens after norm"):
        load_model(tmp_path, progress=False)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer.json, which Engram's hashes need"):
        load_model(tmp_path, progress=False)


def test_a_table_with_rows_to_spare_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    # Primes from 499 on are others, whose sum is smaller.
    _changed(checkpoint, tmp_path, text={"engram_vocab_size": 499})
    with pytest.raises(ConfigError, match=r"engram_num_embeddings is \d+, supported: \d+ for laye"):
        load_model(tmp_path, progress=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.1.engram.embed.scale", "missing layers.1.engram.embed.scale"),
        ("layers.4.attn.indexer.wk.weight", "missing layers.4.attn.indexer.wk.weight"),
    ],
)
def test_what_is_missing_is_named(
    checkpoint: Path, tmp_path: Path, name: str, message: str
) -> None:
    _changed(checkpoint, tmp_path, name)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path, progress=False)


def test_what_a_layer_does_not_own_is_unexpected(checkpoint: Path, tmp_path: Path) -> None:
    stray = {"layers.6.attn.indexer.wk.weight": torch.zeros(128, 512)}
    _changed(checkpoint, tmp_path, **stray)
    with pytest.raises(CheckpointError, match=r"unexpected layers.6.attn.indexer.wk.weight"):
        load_model(tmp_path, progress=False)


def test_tables_stay_in_their_files(checkpoint: Path) -> None:
    model = load_model(checkpoint, progress=False)
    table = model.layers[1].engram.table
    assert table.weight.dtype == torch.uint8
    assert table.scale is not None


def test_bytes_a_token_are_those_of_the_report() -> None:
    # 288 of an entry and 68 of its key, of three layers for each two tokens and one for each.
    context = 1 << 20
    sizes = cache_sizes(ModelConfig.from_dict(FLASH_41), "nvfp4", [context])
    held = {size.name: size.held_bytes[context] / context for size in sizes}
    assert {name: held[name] for name in ("c1", "c2", "index_c1", "index_c2")} == {
        "c1": 288.0, "c2": 432.0, "index_c1": 68.0, "index_c2": 102.0,
    }  # fmt: skip


def test_sources_are_reported_where_layers_share(tmp_path: Path) -> None:
    options = shared(
        (0, 2, 1), candidate_source=-1, engram_layers=(), hidden=64, experts=4, moe_size=64
    )
    write_tiny_checkpoint(tmp_path / "own", options)
    assert checkpoint_report(tmp_path / "own", "nvfp4")["sources"] is None
    options = shared(
        (0, 2, 2), candidate_source=-1, engram_layers=(), hidden=64, experts=4, moe_size=64
    )
    write_tiny_checkpoint(tmp_path / "shared", options)
    assert checkpoint_report(tmp_path / "shared", "nvfp4")["sources"] == {
        "kv": (1,), "index": (1,), "candidates": None,
    }  # fmt: skip


def test_the_help_names_both_models() -> None:
    for command in (generate, make_tiny):
        assert "DeepSeek-V4 or V4.1" in CliRunner().invoke(command, ["--help"]).output


def test_the_command_line(tmp_path: Path) -> None:
    directory = str(tmp_path / "tiny")
    sizes = ["--hidden", "64", "--q-lora", "32", "--o-lora", "32", "--heads", "4"]
    sizes += ["--experts", "8", "--moe-size", "32"]
    made = CliRunner().invoke(make_tiny, [directory, "--model", "v4.1", *sizes])
    assert made.exit_code == 0, made.output
    shown = CliRunner().invoke(inspect, ["--checkpoint", directory, "--kv-cache", "nvfp4"])
    assert shown.exit_code == 0, shown.output
    assert "layers 8, ratios 0,0,2,2,1,1,1,1; no drafter; experts 8\n" in shown.output
    assert "layers that write entries: 2, 4; that select: 2, 4, 6" in shown.output
    assert "layer 4 keeps 2048 blocks of 8 entries that later layers select within" in shown.output
    assert "layers 1, 4 read n-grams of up to 4 tokens" in shown.output
    drafter = ["--drafter", "dspark", "--draft-experts", "4", "--draft-experts-per-token", "2"]
    made = CliRunner().invoke(make_tiny, [directory, "--model", "v4.1", *sizes, *drafter])
    assert made.exit_code == 0, made.output
    shown = CliRunner().invoke(inspect, ["--checkpoint", directory, "--kv-cache", "nvfp4"])
    assert shown.exit_code == 0, shown.output
    assert "ratios 0,0,2,2,1,1,1,1; DSpark drafter of 3 stages; experts 8\n" in shown.output
    assert "from the streams that layers 5, 6, 7 begin with; Markov rank 32, a con" in shown.output
    asked = [directory, "--speculate", "--kv-cache", "nvfp4", "--max-new-tokens", "9"]
    told = CliRunner().invoke(generate, ["--checkpoint", *asked, "--prompt", "The"])
    assert told.exit_code == 0, told.output

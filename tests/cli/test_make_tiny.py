import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from anymla.cli.main import main
from anymla.model.checkpoint import Checkpoint
from anymla.model.config import DSparkConfig, ModelConfig
from anymla.model.verify import verify

SMALL = [
    "--hidden=64",
    "--heads=2",
    "--o-groups=1",
    "--q-lora=32",
    "--o-lora=32",
    "--index-heads=2",
    "--experts=4",
    "--experts-per-token=2",
    "--moe-size=32",
]


def make_tiny(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["make-tiny", *map(str, arguments), *SMALL])


def test_writes_a_checkpoint_and_its_twin(tmp_path: Path) -> None:
    result = make_tiny(tmp_path / "a", "--twin", tmp_path / "b")
    assert result.exit_code == 0, result.output
    for directory in (tmp_path / "a", tmp_path / "b"):
        checkpoint = Checkpoint.open(directory)
        assert verify(checkpoint, ModelConfig.from_dir(directory)).ok
        size = f"{checkpoint.nbytes / 1e6:.1f} MB"
        assert f"{directory}: {len(checkpoint)} tensors, {size}\n" in result.output


def test_every_option_arrives(tmp_path: Path) -> None:
    options = [
        "--weights=fp8",
        "--ratios=4,0,128",
        "--index-topk=9",
        "--hash-layers=2",
        "--window=100",
        "--rope-factor=4",
        "--mtp=2",
        "--vocab=300",
        "--scale-format=fp32",
        "--shards=2",
        "--seed=7",
    ]
    assert make_tiny(tmp_path, *options).exit_code == 0
    config = ModelConfig.from_dir(tmp_path)
    assert config.compress_ratios == (4, 0, 128, 0, 0)
    assert (config.hidden_size, config.num_attention_heads, config.o_groups) == (64, 2, 1)
    assert (config.q_lora_rank, config.o_lora_rank, config.index_n_heads) == (32, 32, 2)
    assert (config.n_routed_experts, config.num_experts_per_tok) == (4, 2)
    assert (config.moe_intermediate_size, config.num_hash_layers) == (32, 2)
    assert (config.index_topk, config.sliding_window, config.vocab_size) == (9, 100, 300)
    assert config.yarn is not None
    assert config.yarn.factor == 4
    assert config.max_position_embeddings == 4 * 65536
    assert config.expert_dtype == "fp8"
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint["layers.0.attn.wq_a.scale"].dtype == "F32"
    assert len({info.file for info in checkpoint.values()}) == 2
    assert json.loads((tmp_path / "config.json").read_text())["anymla_tiny"]["seed"] == 7


def test_a_dspark_drafter(tmp_path: Path) -> None:
    options = ["--drafter=dspark", "--stages=2", "--block=4", "--markov-rank=12", "--vocab=300"]
    assert make_tiny(tmp_path, *options, "--layers=4").exit_code == 0
    checkpoint, config = Checkpoint.open(tmp_path), ModelConfig.from_dir(tmp_path)
    assert verify(checkpoint, config).ok
    assert config.dspark == DSparkConfig(
        stages=2,
        block_size=4,
        noise_token_id=299,
        target_layer_ids=(1, 2, 3),
        taps_at_entry=False,
        markov_rank=12,
        experts=4,
        experts_per_token=2,
    )
    assert "mtp.1.markov_head.markov_w1.weight" in checkpoint
    assert checkpoint["mtp.0.main_proj.weight"].shape == (64, 3 * 64)
    assert checkpoint["mtp.0.main_proj.weight"].dtype == "F8_E4M3"
    # As published, where it is wrong.
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_layers_follow_the_pattern(tmp_path: Path) -> None:
    assert make_tiny(tmp_path, "--layers", 5).exit_code == 0
    assert ModelConfig.from_dir(tmp_path).backbone_ratios == (0, 4, 128, 4, 128)


def test_nvfp4_attention(tmp_path: Path) -> None:
    assert make_tiny(tmp_path, "--nvfp4-attention").exit_code == 0
    assert "layers.1.attn.compressor.wkv.weight_scale_2" in Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratios", "0,x"], "must be integers with commas between, got '0,x'"),
        (["--ratios", "0,-4"], "compress_ratios is [0, -4, 0], supported: a list of integers >= 0"),
        (["--ratios", "0,4", "--layers", "3"], "--layers 3 contradicts --ratios, which has 2"),
        (["--o-groups", "0"], "0 is not in the range x>=1"),
        (["--weights", "int4"], "'int4' is not one of 'bf16', 'fp8', 'fp4'"),
        (["--vocab", "100"], "Error: vocab must be at least 258, got 100"),
        (["--rope-factor", "0.5"], "0.5 is not in the range x>=1"),
        (["--rope-factor", "inf"], "must be finite, got inf"),
        (["--rope-factor", "nan"], "must be finite, got nan"),
        (["--rope-factor", "1e300"], "rope_factor must be in [1, 32768], got 1e+300"),
        (["--vocab", "1000000000"], "vocab must be at most 1048576, got 1000000000"),
        (["--layers", "1000000000"], "1000000000 is not in the range 1<=x<=512"),
        (["--mtp", "1000000000"], "layers, with those that draft, must"),
        (["--experts", "100000000"], "experts of all layers must be at most 65536"),
        (["--hidden", "1000000000"], " weights, a tiny one at most 2147483648"),
        (["--ratios", "1000000000000"], "compress_ratios is 1000000000000, supported: integers <="),
        (["--window", "10000000000"], "window must be at most the longest position, 1048576"),
        (["--index-topk", "10000000000"], "index_topk must be at most the longest position"),
        (["--shards", "1000000000"], "shards must be at most one for each tensor"),
    ],
)
def test_bad_options(tmp_path: Path, arguments: list[str], message: str) -> None:
    # click takes the last of repeated options, so these win over the small sizes.
    command = ["make-tiny", str(tmp_path / "x"), *SMALL, *arguments]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mtp", "1"], "--mtp 1: --model v4.1 has no MTP layers, so 0 or --drafter dspark"),
        (["--hash-layers", "2"], "--hash-layers 2: --model v4.1 has no such layers, so 0"),
        (
            ["--ratios", "0,4,128,4"],
            "--ratios 0,4,128,4: with --model v4.1 layers of one ratio stand together, those of 0 "
            "aside; layer 3 is apart from layer 1",
        ),
        (["--index-topk", "16378"], "--index-topk 16378: with --model v4.1 at most 16377"),
        (["--index-topk", "100000"], "--index-topk 100000: with --model v4.1 at most 16377"),
    ],
)
def test_bad_options_of_shared_layers(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = make_tiny(tmp_path / "x", "--model", "v4.1", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_options_of_shared_layers_at_their_limits(tmp_path: Path) -> None:
    options = ["--ratios=4,0,4,2", "--index-topk=16377", "--mtp=0", "--hash-layers=0"]
    result = make_tiny(tmp_path / "x", "--model", "v4.1", *options)
    assert result.exit_code == 0, result.output
    result = make_tiny(tmp_path / "x", "--model", "v4.1", "--drafter=dspark", "--mtp=1")
    assert result.exit_code == 0, result.output
    # No layer selects.
    options = ["--ratios=0,0", "--index-topk=100000"]
    result = make_tiny(tmp_path / "x", "--model", "v4.1", *options)
    assert result.exit_code == 0, result.output


def test_directory_that_is_in_use(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = make_tiny(tmp_path)
    assert result.exit_code == 2
    assert result.stderr == (
        f"Error: {tmp_path}: is not empty and holds no tiny checkpoint to replace\n"
    )


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = make_tiny(tmp_path / "file" / "x")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {tmp_path / 'file'}")
    assert result.stderr.endswith(": Not a directory\n")

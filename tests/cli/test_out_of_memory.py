import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from anymla.cli.main import main
from anymla.formats.cache_dump import save_cache
from anymla.formats.page_layout import MAIN_FP8, get_layout


def fails(pattern, *arguments):
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    (line,) = [each for each in result.stderr.splitlines() if each.startswith("Error: ")]
    assert pattern in line
    assert len(line) < 420


@pytest.fixture
def has(monkeypatch):
    return lambda nbytes: monkeypatch.setattr("anymla.ops.memory.host_bytes", lambda: nbytes)


@pytest.mark.parametrize(
    ("option", "value", "pattern"),
    [
        ("--hidden", 10**9, "weights, a tiny one at most 2147483648"),
        ("--vocab", 10**9, "vocab must be at most 1048576, got 1000000000"),
        ("--heads", 10**9, "weights, a tiny one at most 2147483648"),
        ("--experts", 10**9, "experts of all layers must be at most 65536, got 5000000000"),
        ("--mtp", 10**9, "layers, with those that draft, must be at most 512, got 1000000004"),
        ("--layers", 10**9, "1000000000 is not in the range 1<=x<=512"),
        ("--shards", 10**9, "shards must be at most one for each tensor, got 1000000000"),
        ("--window", 10**9, "window must be at most the longest position, 1048576"),
    ],
)
def test_a_tiny_checkpoint_that_is_not(has, tmp_path, option, value, pattern):
    has(64e9)
    fails(pattern, "make-tiny", tmp_path / "x", "--o-groups", 1, option, value)
    assert not (tmp_path / "x").exists()


def test_a_dump_that_is_larger_than_memory(has, tmp_path):
    path = tmp_path / "dump"
    save_cache(path, get_layout(MAIN_FP8).allocate(4, 64), MAIN_FP8)
    has(path.stat().st_size - 1)
    fails(f"reading {path} needs 150", "inspect", "--cache", path)
    has(path.stat().st_size)
    fails(f"decoding {path} needs 2.1 MB", "inspect", "--cache", path)


@pytest.mark.parametrize("command", ["generate", "score"])
def test_weights_that_hold_nan(tiny, tmp_path, command):
    """A large tensor, whose values nobody looks at before they are used."""
    directory = tmp_path / "c"
    shutil.copytree(tiny, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["layers.0.attn.wkv.scale"].view(torch.uint8).fill_(255)
    save_file(tensors, directory / "model.safetensors")
    text = tmp_path / "text"
    text.write_text("some text")
    options = ["--json", tmp_path / "o.json"]
    fails("are not numbers", command, "--checkpoint", directory, "--prompt-file", text, *options)
    assert not (tmp_path / "o.json").exists()

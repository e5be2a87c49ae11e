"""Checkpoints by their names on the Hub, from a cache that a test has filled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from anymla import LLM
from anymla.cli.main import main
from anymla.model.config import ConfigError
from anymla.model.hub import local_checkpoint
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
errors = pytest.importorskip("huggingface_hub.errors")

NAME, SHA = "some-owner/Tiny-V4.1", "0123456789abcdef0123456789abcdef01234567"
COMMAND = "hf download some-owner/Tiny-V4.1 --include '*.json' '*.jinja' '*.safetensors'"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache, empty, without a network, in a directory where nothing else is."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def snapshot(cache: Path, *refs: str, name: str = NAME, sha: str = SHA, shards: int = 2) -> Path:
    """Put a tiny checkpoint there, as what these references mean."""
    repository = cache / f"models--{name.replace('/', '--')}"
    directory = repository / "snapshots" / sha
    directory.mkdir(parents=True)
    write_tiny_checkpoint(directory, TinyOptions(ratios=(0,), experts=8, shards=shards))
    for ref in refs:
        place = repository / "refs" / ref
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(sha)
    return directory


def fetching(monkeypatch: pytest.MonkeyPatch, fetch: Callable[..., Any]) -> list[dict[str, Any]]:
    """Have ``fetch`` stand for the network; what it is called with."""
    calls: list[dict[str, Any]] = []
    original = huggingface_hub.snapshot_download

    def download(name: str, **how: Any) -> Any:
        if how["local_files_only"]:
            return original(name, **how)
        calls.append({"name": name, **how})
        return fetch(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_a_directory_comes_first(cache: Path) -> None:
    snapshot(cache, "main")
    here = Path(NAME)
    here.mkdir(parents=True)
    assert local_checkpoint(NAME) == here
    assert local_checkpoint(here) == here


@pytest.mark.parametrize(
    "name", ["checkpoint", "./some/tiny", "/nowhere/at/all", "a/b/c", "../tiny/x", "", "a b/c"]
)
def test_what_is_no_name_is_a_path(cache: Path, name: str) -> None:
    """Whoever reads it then says that it is not there."""
    assert local_checkpoint(name) == Path(name)


@pytest.mark.parametrize("revision", ["", "@main", "@v2", "@refs/pr/3", f"@{SHA}"])
def test_a_cached_snapshot_needs_no_network(cache: Path, revision: str) -> None:
    directory = snapshot(cache, "main", "v2", "refs/pr/3")
    assert local_checkpoint(f"{NAME}{revision}") == directory


def test_a_model_by_its_name(cache: Path) -> None:
    directory = snapshot(cache, "main")
    by_name, by_path = (LLM(each, device="cpu") for each in (NAME, directory))
    done, again = (llm.generate("The", max_new_tokens=3) for llm in (by_name, by_path))
    assert done.token_ids == again.token_ids


def test_what_is_not_here_says_what_to_type(cache: Path) -> None:
    message = f"{NAME}: no such directory, and not in the Hub's cache; with a network: {COMMAND}"
    with pytest.raises(ConfigError) as caught:
        local_checkpoint(NAME)
    assert str(caught.value) == message
    snapshot(cache, "main")
    with pytest.raises(ConfigError, match=r"Tiny-V4\.1 --revision v9 --include"):
        local_checkpoint(f"{NAME}@v9")


def test_a_snapshot_that_lacks_a_file_is_not_taken(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = snapshot(cache, "main")
    shard = directory / "model-00002-of-00002.safetensors"
    shard.rename(directory / "elsewhere")
    with pytest.raises(ConfigError, match=f"lacks {shard.name}; with a network: hf down"):
        local_checkpoint(NAME)
    # Its description is whole.
    assert local_checkpoint(NAME, weights=False) == directory

    def fetch(name: str) -> str:
        (directory / "elsewhere").rename(shard)
        return str(directory)

    calls = fetching(monkeypatch, fetch)
    assert local_checkpoint(NAME) == directory
    assert [call["name"] for call in calls] == [NAME]


def test_of_a_repository_only_a_checkpoint_is_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first level's weights and what describes them: no code, and no other layouts."""
    calls = fetching(monkeypatch, lambda name: str(snapshot(cache, "main")))
    local_checkpoint(f"{NAME}@main")
    (call,) = calls
    assert (call["name"], call["revision"]) == (NAME, "main")
    files = [
        "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "chat_template.jinja", "hf_quant_config.json", "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
    ]  # fmt: skip
    others = [
        "inference/model.py", "modeling.py", "encoding/encoding_dsv4.py", "README.md",
        "original/model.safetensors", "pytorch_model.bin", "inference/config.json",
    ]  # fmt: skip
    kept = huggingface_hub.utils.filter_repo_objects(
        [*files, *others],
        allow_patterns=call["allow_patterns"],
        ignore_patterns=call["ignore_patterns"],
    )
    assert list(kept) == files


def test_a_plan_is_made_without_the_weights(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fetching(monkeypatch, lambda name: str(snapshot(cache, "main")))
    local_checkpoint(NAME, weights=False)
    assert "*.safetensors" not in calls[0]["allow_patterns"]


def raising(kind: type[Exception], text: str) -> Callable[[str], Any]:
    def fetch(name: str) -> Any:
        error = kind.__new__(kind)
        Exception.__init__(error, text)
        error.args = (text,)
        raise error

    return fetch


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.RepositoryNotFoundError, "the Hub has no repository some-owner/Tiny-V4.1, or a pr"),
        (errors.GatedRepoError, "some-owner/Tiny-V4.1 is gated on the Hub: accept its terms"),
        (errors.RevisionNotFoundError, "the Hub's some-owner/Tiny-V4.1 has no revision v9"),
        (errors.LocalEntryNotFoundError, "not in the Hub's cache; with a network: hf download"),
        (OSError, "it cannot be fetched: the disk is full"),
        (RuntimeError, "it cannot be fetched: RuntimeError: the disk is full"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], message: str
) -> None:
    fetching(monkeypatch, raising(kind, "the disk is full\nand more"))
    with pytest.raises(ConfigError) as caught:
        local_checkpoint(f"{NAME}@v9")
    assert str(caught.value).startswith(f"{NAME}@v9: no such directory, and {message}")
    assert "\n" not in str(caught.value)


def test_without_the_library_a_name_says_how_to_install_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"need huggingface_hub: pip install huggingface-hub$"):
        local_checkpoint(NAME)
    assert local_checkpoint("nowhere") == Path("nowhere")


COMMANDS: dict[str, list[str]] = {
    "generate": ["--prompt", "The", "--max-new-tokens", "2"],
    "score": ["--prompt-file", "text", "--json", "out.json"],
    "inspect": [],
    "warm-up": [],
    "chat": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_names(cache: Path, command: str) -> None:
    snapshot(cache, "main")
    Path("text").write_text("The end")
    if command in ("inspect", "score"):
        done = CliRunner().invoke(main, [command, "--checkpoint", NAME, *COMMANDS[command]])
        assert (done.exit_code, done.stderr) == (0, "")
    name = "some-owner/Other@v2"
    wrong = CliRunner().invoke(main, [command, "--checkpoint", name, *COMMANDS[command]])
    said = f"Error: {name}: no such directory, and not in the Hub's cache; with a network: hf down"
    assert (wrong.exit_code, wrong.stderr[: len(said)]) == (2, said)
    assert wrong.stderr.count("\n") == 1


def test_a_program_finds_the_cache_by_its_environment(cache: Path) -> None:
    snapshot(cache, "main")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    command = [sys.executable, "-m", "anymla", "generate", "--checkpoint", NAME]
    done = subprocess.run(
        [*command, *COMMANDS["generate"]], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "tokens/s" in done.stderr
    assert len(done.stderr.splitlines()) == 1

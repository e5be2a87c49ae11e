"""How commands end: nothing that the system or a user does to them is a traceback."""

import errno
import io
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors import SafetensorError

from anymla.cli import files
from anymla.cli.files import read_text_lines
from anymla.cli.main import main
from anymla.formats.files import naming
from anymla.runtime.devices import named_device
from anymla.testing import tiny_checkpoint
from lab.__main__ import main as lab

FULL = Path("/dev/full")
NO_SPACE = "No space left on device"
needs_full = pytest.mark.skipif(not FULL.is_char_device(), reason="there is no /dev/full here")


def run(*arguments: object, given: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=given)


def is_one_line(result: Result, code: int, message: str) -> None:
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def started(*arguments: str, stdout: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "anymla", *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize("arguments", [("--help",), ("conformance", "--list")])
def test_a_reader_that_has_gone_is_no_error(arguments) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = started(*arguments, stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@needs_full
def test_an_output_that_is_full_is_named() -> None:
    with FULL.open("w") as full:
        done = started("--help", stdout=full.fileno())
    assert done.returncode == 1
    assert done.stderr == f"Error: standard output: {NO_SPACE}\n"


@needs_full
def test_a_full_disk_is_no_usage_error_and_names_the_file(tiny) -> None:
    generate = ("generate", "--checkpoint", tiny, "--prompt", "a", "--max-new-tokens", 1)
    for words in (("inspect", "--checkpoint", tiny), generate):
        is_one_line(run(*words, "--json", FULL), 1, f"/dev/full: {NO_SPACE}")
    assert FULL.is_char_device()


def test_rows_name_a_full_disk_too(tmp_path, monkeypatch) -> None:
    def full(self: io.TextIOBase, lines: object) -> None:
        raise OSError(errno.ENOSPC, NO_SPACE)

    class Full(io.StringIO):
        writelines = full

    real = pathlib.Path.open
    rows = tmp_path / "rows.jsonl"
    monkeypatch.setattr(
        pathlib.Path, "open", lambda self, *a, **k: Full() if self == rows else real(self, *a, **k)
    )
    result = run(
        "conformance", "--backend", "torch", "--case", "A1", "--device", "cpu", "--json", rows
    )
    is_one_line(result, 1, f"{rows}: {NO_SPACE}")


def test_a_file_that_could_not_be_written_whole_is_removed(tmp_path, monkeypatch) -> None:
    target = tmp_path / "half.json"
    real = pathlib.Path.open

    def half(self: Path, *arguments: str, **named: str) -> object:
        file = real(self, *arguments, **named)
        write = file.write

        class Half:
            def __enter__(self) -> object:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def write(self, text: str) -> None:
                write(text[:3])
                raise OSError(errno.ENOSPC, NO_SPACE)

        return Half()

    monkeypatch.setattr(pathlib.Path, "open", half)
    with pytest.raises(OSError, match=NO_SPACE) as caught:
        files.write_text(target, '{"whole": true}')
    assert caught.value.filename == str(target)
    assert not target.exists()


def test_what_safetensors_says_of_the_system_is_an_error_of_the_file() -> None:
    said = f"Error while serializing: I/O error: {NO_SPACE} (os error 28)"
    with pytest.raises(OSError, match=NO_SPACE) as caught, naming("x"):
        raise SafetensorError(said)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "x")
    with pytest.raises(SafetensorError, match="header too large"), naming("x"):
        raise SafetensorError("header too large")


def full_disk(tensors: object, path: Path, metadata: object) -> None:
    Path(path).write_bytes(b"half")
    raise SafetensorError(f"Error while serializing: I/O error: {NO_SPACE} (os error 28)")


def test_a_full_disk_leaves_no_half_checkpoint(tmp_path, monkeypatch) -> None:
    small = ("--hidden=64", "--heads=2", "--o-groups=1", "--experts=4", "--experts-per-token=2")
    words = ("make-tiny", *small, "--layers=1", "--mtp=0")
    monkeypatch.setattr(tiny_checkpoint, "save_file", full_disk)
    target = tmp_path / "a" / "b"
    is_one_line(run(*words, target), 1, f"{target}/model.safetensors: {NO_SPACE}")
    assert not (tmp_path / "a").exists()

    there = tmp_path / "there"
    there.mkdir()
    result = run(*words, "--twin", target, "--shards=2", there)
    is_one_line(result, 1, f"{there}/model-00001-of-00002.safetensors: {NO_SPACE}")
    assert list(tmp_path.iterdir()) == [there]
    assert list(there.iterdir()) == []


def test_a_full_disk_leaves_no_half_dump(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("anymla.formats.cache_dump.save_file", full_disk)
    words = ("--prompt", "a", "--max-new-tokens", 1, "--dump-cache", tmp_path / "dumps")
    result = run("generate", "--checkpoint", tiny, *words)
    is_one_line(result, 1, f"dumps/request0.layer0.window.safetensors: {NO_SPACE}")
    assert list((tmp_path / "dumps").iterdir()) == []


def test_a_dash_is_stdin(tiny, tmp_path) -> None:
    generate = ("generate", "--checkpoint", tiny, "--max-new-tokens", 2, "--ignore-eos")
    alone = run(*generate, "--prompt", "ünd")
    assert alone.exit_code == 0
    piped = run(*generate, "--prompt-file", "-", given="ünd")
    assert piped.stdout == alone.stdout, piped.output
    batch = run(*generate, "--requests-file", "-", given='{"prompt": "ünd", "id": "x"}\n')
    assert batch.stdout == f"[x] {alone.stdout}"
    score = run(
        "score", "--checkpoint", tiny, "--token-ids", "-", "--json", tmp_path / "s", given="[1, 2]"
    )
    assert score.exit_code == 0, score.output
    assert json.loads((tmp_path / "s").read_text())["token_ids"] == [1, 2]
    bad = run(*generate, "--prompt-file", "-", given=b"\xff")
    is_one_line(bad, 2, "-: not UTF-8: invalid start byte at byte 0")


def test_a_dash_is_stdout(tiny) -> None:
    words = ("--checkpoint", tiny, "--json", "-")
    generated = run("generate", *words, "--prompt", "a", "--max-new-tokens", 2)
    assert json.loads(generated.stdout)["results"][0]["id"] == "prompt"
    assert json.loads(run("inspect", *words).stdout)["ok"] is True
    scored = run("score", *words, "--prompt-file", "-", given="ab")
    assert len(json.loads(scored.stdout)["logprobs"]) == 3


def test_an_input_is_not_overwritten(tiny, tmp_path) -> None:
    words = ("--prompt", "a", "--max-new-tokens", 1, "--dump-cache", tmp_path)
    assert run("generate", "--checkpoint", tiny, *words).exit_code == 0
    dump = tmp_path / "request0.layer0.window.safetensors"
    before = dump.read_bytes()
    other = tmp_path / "other"
    other.hardlink_to(dump)
    for output in (dump, other, tmp_path / ".." / tmp_path.name / dump.name):
        result = run("inspect", "--cache", dump, "--convert", "rows_bf16_512", "--output", output)
        is_one_line(result, 2, f"--output {output}: would overwrite the input {dump}")
        result = run("inspect", "--cache", dump, "--json", output)
        is_one_line(result, 2, f"--json {output}: would overwrite the input {dump}")
    assert dump.read_bytes() == before
    text = tmp_path / "text"
    text.write_text("mine")
    result = run("score", "--checkpoint", tiny, "--prompt-file", text, "--json", text)
    is_one_line(result, 2, "would overwrite the input")
    assert text.read_text() == "mine"


def test_a_device_is_not_replaced_by_a_file(tiny, tmp_path) -> None:
    """Dumps are renamed into place, which would put a file where /dev/null is."""
    os.mkfifo(tmp_path / "pipe")
    words = ("--convert", "rows_bf16_512", "--output", tmp_path / "pipe")
    is_one_line(run("inspect", "--cache", tmp_path / "x", *words), 2, "exists and is no file")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("name", ["foo", "", "cuda:-1", "meta", "mps", "cuda:99", "xpu:7"])
@pytest.mark.parametrize("command", ["doctor", "conformance"])
def test_a_device_that_means_nothing_is_one_line(command, name) -> None:
    is_one_line(run(command, "--device", name), 2, f"Error: --device {name}: ")


def test_the_cpu_has_one_name() -> None:
    assert str(named_device("cpu:0")) == "cpu"


def test_a_module_that_is_missing_is_one_line(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lab.build_matrix", None)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "lab.build_matrix")
    # Imported as an attribute of its package it would be found without its module.
    monkeypatch.delattr("lab.build_matrix", raising=False)
    words = ["build-matrix", "--first", "file", "--target", "sm_90"]
    is_one_line(CliRunner().invoke(lab, words), 2, "this installation has no module triton")


def test_names_that_are_not_utf8_are_shown() -> None:
    result = run("inspect", "--checkpoint", os.fsdecode(b"/none\xff"))
    is_one_line(result, 2, "no such directory")


@pytest.mark.parametrize("command", ["generate", "score"])
def test_a_panic_of_the_tokenizer_is_one_line(tiny, tmp_path, command) -> None:
    """Rust prints it to file descriptor 2 before it is an exception."""
    directory, prompt = tmp_path / "panics", tmp_path / "prompt.txt"
    shutil.copytree(tiny, directory)
    prompt.write_text("a")
    inner = json.loads((directory / "tokenizer.json").read_text())
    inner["post_processor"]["special_tokens"] = {}
    (directory / "tokenizer.json").write_text(json.dumps(inner))
    options = ["--checkpoint", str(directory), "--prompt-file", str(prompt), "--json", "-"]
    done = started(command, *options, stdout=subprocess.PIPE)
    assert done.returncode == 2
    assert re.fullmatch(r"Error: [^\n]*(no entry found|cannot be re)[^\n]*\n", done.stderr)
    assert done.stdout == ""


@pytest.mark.parametrize("option", ["--prompt-file", "--requests-file"])
def test_a_pipe_that_nobody_writes_to(tiny, tmp_path, option) -> None:
    os.mkfifo(tmp_path / "pipe")
    began = time.monotonic()
    result = run("generate", "--checkpoint", tiny, option, tmp_path / "pipe")
    is_one_line(result, 2, f"{tmp_path}/pipe: a pipe that nobody writes to")
    assert time.monotonic() - began < 20


def test_a_pipe_with_a_writer_is_read(tmp_path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("a\n\nbä\n",))
    writer.start()
    assert list(read_text_lines(pipe)) == [(1, "a"), (3, "bä")]
    writer.join()


def test_a_socket_in_the_place_of_a_text(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    result = run("generate", "--checkpoint", tiny, "--prompt-file", "socket")
    is_one_line(result, 2, "socket: not a file, but a socket")


def test_a_pipe_that_nobody_reads(tiny, tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    words = ("--prompt", "a", "--max-new-tokens", 1, "--json", tmp_path / "pipe")
    is_one_line(
        run("generate", "--checkpoint", tiny, *words), 2, f"{tmp_path}/pipe: a pipe that nobody"
    )


NAMES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.mark.parametrize("name", [*NAMES, "model.safetensors"])
def test_a_pipe_in_a_checkpoint(tiny, tmp_path, name) -> None:
    shutil.copytree(tiny, tmp_path / "copy")
    (tmp_path / "copy" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "copy" / name)
    result = run("generate", "--checkpoint", tmp_path / "copy", "--prompt", "a")
    is_one_line(result, 2, "not a file, but a pipe")
    assert name in result.stderr
    assert str(tmp_path) in result.stderr


@pytest.mark.parametrize("command", ["replay", "inspect"])
def test_a_pipe_in_the_place_of_a_dump(tmp_path, command) -> None:
    os.mkfifo(tmp_path / "pipe")
    words = {"replay": [], "inspect": ["--cache"]}[command]
    is_one_line(run(command, *words, tmp_path / "pipe"), 2, "not a file, but a pipe")


def test_a_long_line_of_a_batch(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("anymla.cli.files.MAX_TEXT_BYTES", 1 << 16)
    path = tmp_path / "batch"
    path.write_text('{"prompt": "a"}\n{"prompt": "' + "a" * (1 << 16) + '"}\n')
    result = run("generate", "--checkpoint", tiny, "--requests-file", path)
    is_one_line(result, 2, f"{path} line 2: longer than 65536 bytes")

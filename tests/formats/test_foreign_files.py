import io
import os
import pickle
import socket
import zipfile
from pathlib import Path

import pytest

from anymla.formats.foreign_files import kind_of, kind_of_text, why_no_checkpoint
from anymla.formats.untrusted import Refused, open_file, read_bytes, read_object

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5234567890\n"


def zipped() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("archive/data.pkl", "x")
    return held.getvalue()


@pytest.mark.parametrize(
    ("held", "kind"),
    [
        (LFS, "a Git LFS pointer; git lfs pull fetches the file"),
        (b"", "empty; its download did not finish"),
        (b"<!DOCTYPE html>\n<html>", "a web page, not the file; its download failed"),
        (b"\xef\xbb\xbf  \n<HTML lang=en>", "a web page, not the file; its download failed"),
        (b"GGUF\x03\0\0\0" + bytes(90), "a GGUF file of llama.cpp, which is not read; "),
        (zipped(), "a zip archive, as torch.save writes it; "),
        *[
            (pickle.dumps({"a": [1.0] * 9}, protocol), "a pickle, which is not read; ")
            for protocol in range(2, 6)
        ],
        (bytes(4096), "zeros; its download did not finish"),
    ],
)
def test_kinds(held: bytes, kind: str) -> None:
    assert (kind_of(held) or "").startswith(kind)
    assert (kind_of_text(held) or "").startswith(kind)


def test_text_of_a_server() -> None:
    for said in (b"Entry not found", b'{"error":"Repository not found"}'):
        assert kind_of(said) is None
        assert kind_of_text(said) == f"text: {said.decode()!r}"


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([], ""),
        (["a.gguf"], " (it holds a.gguf, a GGUF file of llama.cpp, which is not read; "),
        (["pytorch_model.bin"], " (it holds pytorch_model.bin, a pickle of PyTorch, "),
        (["a.gguf", "m.safetensors.incomplete"], " (its download did not finish: m.saf"),
        ([".cache/huggingface/download/x.incomplete"], " (its download did not finish: x.inc"),
    ],
)
def test_a_directory_without_a_checkpoint(names: list[str], why: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    said = why_no_checkpoint(tmp_path)
    assert said.startswith(why)
    assert bool(said) == bool(why)


def test_a_file_in_the_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(99))
    assert "a GGUF file of llama.cpp" in why_no_checkpoint(tmp_path / "model.gguf")
    (tmp_path / "model.safetensors").write_bytes((90).to_bytes(8, "little") + b'{"a":1}')
    assert "name the directory" in why_no_checkpoint(tmp_path / "model.safetensors")
    assert why_no_checkpoint(tmp_path / "nowhere") == ""


def special(path: Path, kind: str) -> str:
    """Make something that is no file; what it is called."""
    if kind == "fifo":
        os.mkfifo(path)
        return "a pipe"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
        return "a socket"
    if kind == "device":
        path.symlink_to("/dev/zero")
        return "a device"
    path.mkdir()
    return "a directory"


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "directory"])
def test_what_is_no_file_is_refused_at_once(kind: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    what = special(Path("config.json"), kind)
    for read in (open_file, read_bytes, read_object):
        with pytest.raises(Refused, match=f"^not a file, but {what}$"):
            read(Path("config.json"))


def test_a_pointer_in_the_place_of_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(LFS)
    with pytest.raises(Refused, match=r"^a Git LFS pointer; git lfs pull fetches the file$"):
        read_object(tmp_path / "config.json")
    (tmp_path / "config.json").write_bytes(b"{")
    with pytest.raises(Refused, match=r"^not JSON: "):
        read_object(tmp_path / "config.json")

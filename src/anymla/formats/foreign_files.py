"""Recognition of files that stand in a checkpoint's place: a pointer, a web page, a pickle.

A loader could only say that the file lacks its own format's header, which helps nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

# Formats recognised by their first bytes, in this order.
_BEGINNINGS = (
    (
        b"version https://git-lfs.github.com/spec/",
        "a Git LFS pointer; git lfs pull fetches the file",
    ),
    (b"GGUF", "a GGUF file of llama.cpp, which is not read; safetensors are"),
    (b"ggjt", "a GGML file of llama.cpp, which is not read; safetensors are"),
    (b"lmgg", "a GGML file of llama.cpp, which is not read; safetensors are"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes it; safetensors are read"),
    (b"\x1f\x8b", "a gzip archive; unpack it"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it"),
    (b"\x80\x02", "a pickle, which is not read; safetensors are"),
    (b"\x80\x03", "a pickle, which is not read; safetensors are"),
    (b"\x80\x04", "a pickle, which is not read; safetensors are"),
    (b"\x80\x05", "a pickle, which is not read; safetensors are"),
    (b"\x89HDF\r\n", "an HDF5 file, which is not read; safetensors are"),
)
_PAGES = (b"<!doctype", b"<html", b"<?xml", b"<head", b"<error", b"<!--")
_HEAD = 256
_SHOWN = 60
# Suffixes of the files that tools leave of an unfinished download.
_UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".download", ".tmp")
_OTHER_WEIGHTS = (
    (".gguf", "a GGUF file of llama.cpp, which is not read; safetensors are"),
    (".ggml", "a GGML file of llama.cpp, which is not read; safetensors are"),
    (".bin", "a pickle of PyTorch, which is not read; safetensors are"),
    (".pth", "a pickle of PyTorch, which is not read; safetensors are"),
    (".pt", "a pickle of PyTorch, which is not read; safetensors are"),
    (".h5", "a file of TensorFlow, which is not read; safetensors are"),
    (".msgpack", "a file of Flax, which is not read; safetensors are"),
    (".onnx", "an ONNX file, which is not read; safetensors are"),
)
_MOST_LISTED = 10_000


def kind_of(head: bytes) -> str | None:
    """Describe a file that begins with these bytes; None if it may be a valid one.

    Args:
        head: first bytes of the file, at least 256 if it has as many.
    """
    head = head[:_HEAD]
    if not head:
        return "empty; its download did not finish"
    for beginning, kind in _BEGINNINGS:
        if head.startswith(beginning):
            return kind
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_PAGES):
        return "a web page, not the file; its download failed"
    if not head.strip(b"\0"):
        return "zeros; its download did not finish"
    return None


def kind_of_text(head: bytes) -> str | None:
    """Describe a file as ``kind_of`` does, or by its first text line, often a server's error.

    Args:
        head: first bytes of a file that should be binary.
    """
    kind = kind_of(head)
    if kind is not None:
        return kind
    line = head[:_HEAD].split(b"\n")[0].strip()[:_SHOWN]
    if len(line) >= 8 and all(0x20 <= byte < 0x7F for byte in line):
        return f"text: {line.decode()!r}"
    return None


def why_no_checkpoint(directory: Path) -> str:
    """Describe the contents of a path that is no checkpoint, to end a message; "" if unknown.

    Args:
        directory: path that was given as a checkpoint; it may be a file, or absent.
    """
    try:
        if directory.is_file():
            with directory.open("rb") as file:
                kind = kind_of(file.read(_HEAD))
            return f" ({kind})" if kind else " (a file: name the directory that it is in)"
        if not directory.is_dir():
            return ""
        names = sorted(path.name for path in _some(directory.iterdir()))
        # huggingface_hub keeps unfinished downloads into a directory here.
        fetched = directory / ".cache" / "huggingface" / "download"
        fetching = [path.name for path in _some(fetched.iterdir())] if fetched.is_dir() else []
    except OSError:
        return ""
    for name in [*names, *sorted(fetching)]:
        if name.endswith(_UNFINISHED):
            return f" (its download did not finish: {name})"
    for ending, kind in _OTHER_WEIGHTS:
        found = [name for name in names if name.endswith(ending)]
        if found:
            return f" (it holds {found[0]}, {kind})"
    return ""


def _some(paths: Iterable[Path]) -> list[Path]:
    return [path for path, _ in zip(paths, range(_MOST_LISTED), strict=False)]

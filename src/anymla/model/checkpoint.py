"""The safetensors files of a checkpoint directory, read in place."""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from anymla.formats.foreign_files import kind_of_text, why_no_checkpoint
from anymla.formats.untrusted import MOST_BYTES, Refused, open_file, parse_object, read_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# Bytes of one element of the supported dtypes, by safetensors' names.
ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
}

_MOST_DIMENSIONS = 64
_HEAD_BYTES = 256  # bytes that tell other files from safetensors


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message is one line that names the file or tensor."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor in a file's header.

    Attributes:
        shape: shape of the tensor as stored.
        dtype: safetensors' name of the dtype: "BF16", "F8_E4M3", "F8_E8M0", "I8", ...
        file: path of the file that holds it.
        nbytes: size in bytes.
        stored_name: name of the tensor in the file.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path
    nbytes: int
    stored_name: str


class Checkpoint(Mapping[str, TensorInfo]):
    """The tensors of a checkpoint by DeepSeek's names; values are read on demand.

    Files saved by ``transformers`` use names of its own for some tensors; they are translated.

    Attributes:
        directory: directory of the files.
    """

    def __init__(self, directory: Path, tensors: dict[str, TensorInfo]) -> None:
        self.directory = directory
        self._tensors = tensors
        self._open: dict[Path, Any] = {}

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Read the headers of a single ``model.safetensors``, or of all shards of an index.

        No tensor data is read.

        Raises:
            CheckpointError: the directory does not exist or has no safetensors, a file is missing,
                truncated or of another format, or an index does not match its shards.
        """
        directory = Path(directory)
        if not directory.is_dir():
            why = why_no_checkpoint(directory)
            raise CheckpointError(f"{directory}: no such directory{why}")
        # A dangling link, or a directory, has an error message of its own.
        if os.path.lexists(directory / INDEX_FILE):
            return cls(directory, _translated(_sharded(directory)))
        if os.path.lexists(directory / SINGLE_FILE):
            return cls(directory, _translated(_header(directory / SINGLE_FILE)))
        raise CheckpointError(
            f"{directory}: not a checkpoint, it has neither {SINGLE_FILE} nor {INDEX_FILE}"
            f"{why_no_checkpoint(directory)}"
        )

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def kept(self, wanted: Callable[[str], bool]) -> Checkpoint:
        """Return the checkpoint restricted to the tensors whose names are wanted."""
        return Checkpoint(self.directory, {n: info for n, info in self.items() if wanted(n)})

    @property
    def nbytes(self) -> int:
        """Size in bytes of all tensors together."""
        return sum(info.nbytes for info in self._tensors.values())

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Read one tensor.

        On the CPU it is a view of the memory-mapped file: nothing is copied, pages are read when
        they are touched, and writes change this process only.

        Raises:
            CheckpointError: there is no such tensor, or the file changed since it was opened.
        """
        if name not in self._tensors:
            raise CheckpointError(f"{self.directory}: no tensor {name}")
        info = self._tensors[name]
        file = info.file
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            mapped: Tensor = self._open[file].get_tensor(info.stored_name)
        except (OSError, RuntimeError, SafetensorError) as error:
            # torch raises RuntimeError if the system refuses a mapping.
            raise CheckpointError(f"{file}: cannot read {name}: {_first_line(error)}") from None
        return mapped.to(device)


def deepseek_name(name: str) -> str:
    """Translate the name of a tensor that transformers 5 saved to DeepSeek's name.

    Its ``save_pretrained`` translates most names back, but leaves a prefix and these names.
    """
    if not name.startswith("model."):
        return name
    name = name.removeprefix("model.")
    name = name.replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def _translated(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    out: dict[str, TensorInfo] = {}
    for stored, info in tensors.items():
        name = deepseek_name(stored)
        if name in out:
            raise CheckpointError(
                f"{info.file}: holds {name} twice, as {out[name].stored_name} too"
            )
        out[name] = info
    return out


def _sharded(directory: Path) -> dict[str, TensorInfo]:
    """Read the headers of all shards that the index names, and check them against it."""
    path = directory / INDEX_FILE
    try:
        weight_map = read_object(path)["weight_map"]
        placed = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, Refused) as error:
        raise CheckpointError(f"{path}: cannot be read: {_first_line(error)}") from None
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: has no weight_map from tensor names to files") from None
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(placed.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{path}: names {file!r}, which is not a plain file name")
        if not (directory / file).exists():
            why = why_no_checkpoint(directory)
            raise CheckpointError(f"{path}: names {file}, which does not exist{why}")
        for name, info in _header(directory / file).items():
            if placed.get(name) != file:
                raise CheckpointError(
                    f"{info.file}: holds {name}, which {INDEX_FILE} puts elsewhere"
                )
            tensors[name] = info
    absent = sorted(placed.keys() - tensors.keys())
    if absent:
        raise CheckpointError(
            f"{directory / placed[absent[0]]}: does not hold {enumerate_some(absent)}"
        )
    return tensors


def _header(path: Path) -> dict[str, TensorInfo]:
    """Parse a safetensors header and check that the file is complete.

    Source: the format description in the safetensors repository (8 bytes of header length, little
    endian; JSON; the tensors' bytes without gaps).
    """
    head = b"none"
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD_BYTES)
            (length,) = struct.unpack("<Q", head[:8])
            if 8 + length > size:
                raise _no_header(path, head, f"truncated, its header alone is {length} bytes")
            if length > MOST_BYTES:
                why = f"its header is {length} bytes, safetensors allows {MOST_BYTES}"
                raise _no_header(path, head, why)
            file.seek(8)
            header = parse_object(file.read(length))
    except (OSError, struct.error, Refused) as error:
        why = f"not a safetensors file: header: {_first_line(error)}"
        raise _no_header(path, head, why) from None
    header.pop("__metadata__", None)
    tensors: dict[str, TensorInfo] = {}
    end = 0
    for name, entry in header.items():
        try:
            shape, dtype = _sizes(entry["shape"]), str(entry["dtype"])
            begin, stop = _sizes(entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{path}: bad header entry for {name}") from None
        if dtype not in ITEM_BYTES:
            raise CheckpointError(
                f"{path}: {name} has dtype {dtype}, can read {', '.join(ITEM_BYTES)}"
            )
        if stop - begin != math.prod(shape) * ITEM_BYTES[dtype]:
            raise CheckpointError(
                f"{path}: {name} is {dtype} {list(shape)} in {stop - begin} bytes, which do not fit"
            )
        tensors[name] = TensorInfo(shape, dtype, path, stop - begin, name)
        end = max(end, stop)
    if size != 8 + length + end:
        raise CheckpointError(
            f"{path}: truncated or overwritten, it has {size} bytes and should have "
            f"{8 + length + end}"
        )
    return tensors


def _no_header(path: Path, head: bytes, why: str) -> CheckpointError:
    """Create the error for a file without a header, with the file's actual format if known."""
    kind = kind_of_text(head)
    return CheckpointError(f"{path}: {f'not a safetensors file, but {kind}' if kind else why}")


def _sizes(values: object) -> tuple[int, ...]:
    """Check a list of integers from 0 on, no longer than torch's shapes.

    Raises:
        ValueError: the value is anything else.
    """
    if not isinstance(values, list) or len(values) > _MOST_DIMENSIONS:
        raise ValueError
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError
    return tuple(values)


def enumerate_some(items: Sequence[str]) -> str:
    """Name the first three items, and count the others."""
    listed = ", ".join(items[:3])
    return listed if len(items) <= 3 else f"{listed} and {len(items) - 3} more"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__

"""A case: one execution of a layer's method for a few tokens, with all that a check needs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from anymla.formats.files import naming
from anymla.formats.untrusted import Refused, parse_object, read_bytes

_FORMAT, _VERSION = "anymla-audit-case", "1"
_MOST_BYTES = 1 << 30


class CaseError(ValueError):
    """A file that holds no case; the message is one line that names the file."""


@dataclasses.dataclass
class Case:
    """Inputs, cached bytes and results of a method for the sampled tokens.

    Attributes:
        method: name of the check that judges it, a key of ``checks.CHECKS``.
        layer: name of the layer in the engine.
        requests: name of each token's request in the engine.
        positions: position of each token.
        tensors: tensors that the check reads, by name.
        numbers: settings that the check reads, by name.
        step: number of the engine's step.
        made_by: versions and device, for the reader of a dump.
    """

    method: str
    layer: str
    requests: list[str]
    positions: list[int]
    tensors: dict[str, Tensor]
    numbers: dict[str, float | int | str] = dataclasses.field(default_factory=dict)
    step: int = 0
    made_by: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.numel() * each.element_size() for each in self.tensors.values())

    def digest(self) -> str:
        """Return a digest of the tensors' bytes: equal for two dumps of the same inputs."""
        found = hashlib.sha256()
        for name in sorted(self.tensors):
            held = self.tensors[name].detach().cpu().contiguous()
            found.update(f"{name} {held.dtype} {list(held.shape)};".encode())
            flat = held.reshape(-1).view(torch.uint8)
            found.update(flat.numpy().tobytes() if held.numel() else b"")
        return found.hexdigest()[:16]

    def take(self, *names: str) -> list[Tensor]:
        """Return tensors by name; KeyError names one that is missing."""
        return [self.tensors[name] for name in names]

    def number(self, name: str) -> float:
        """Return a number by name; KeyError if it is missing."""
        return float(self.numbers[name])

    def to(self, device: torch.device | str) -> Case:
        """Return the case with its tensors on ``device``."""
        moved = {name: each.to(device) for name, each in self.tensors.items()}
        return dataclasses.replace(self, tensors=moved)

    def apart(self) -> Case:
        """Return the case with copies of its tensors, as views may keep more memory alive."""
        own = {name: each.clone() for name, each in self.tensors.items()}
        return dataclasses.replace(self, tensors=own)


def to_bytes(case: Case, found: dict[str, Any] | None = None) -> bytes:
    """Serialise a case as the bytes of a safetensors file.

    Args:
        case: case with tensors on the CPU.
        found: JSON values kept with it, the finding of the check.
    """
    words = {
        "method": case.method,
        "layer": case.layer,
        "requests": case.requests,
        "positions": case.positions,
        "numbers": case.numbers,
        "step": case.step,
        "made_by": case.made_by,
        "found": found or {},
    }
    header = {"format": _FORMAT, "version": _VERSION, "case": json.dumps(words)}
    held = {name: each.detach().contiguous() for name, each in case.tensors.items()}
    return save(held, metadata=header)


def from_bytes(text: bytes) -> tuple[Case, dict[str, Any]]:
    """Read the case of ``to_bytes``, and its finding.

    Raises:
        CaseError: the bytes hold no case.
    """
    try:
        tensors = load(text)
        size = int.from_bytes(text[:8], "little")
        header = parse_object(text[8 : 8 + size]).get("__metadata__", {})
        if header.get("format") != _FORMAT or header.get("version") != _VERSION:
            raise CaseError(f"not an audit's case (format {header.get('format')!r})")
        words = parse_object(header["case"])
        case = Case(
            str(words["method"]),
            str(words["layer"]),
            [str(each) for each in words["requests"]],
            [int(each) for each in words["positions"]],
            tensors,
            dict(words["numbers"]),
            int(words["step"]),
            dict(words["made_by"]),
        )
        return case, dict(words["found"])
    except CaseError:
        raise
    except (SafetensorError, Refused, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CaseError(f"not an audit's case ({reason})") from error


def save_case(path: str | Path, case: Case, found: dict[str, Any] | None = None) -> None:
    """Write a case and its finding to a safetensors file that only its owner can read.

    Raises:
        OSError: the file cannot be written, or exists (as a link, too); the message names it.
    """
    write_private(path, to_bytes(case, found))


def write_private(path: str | Path, held: bytes) -> None:
    """Write a new file that only its owner can read.

    Raises:
        OSError: the file cannot be written, or exists (as a link, too); the message names it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with naming(path), os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(held)


def load_case(path: str | Path) -> tuple[Case, dict[str, Any]]:
    """Read a case and the finding that was written with it.

    Raises:
        CaseError: the file holds no case; the message names it.
        OSError: the file cannot be read.
    """
    try:
        return from_bytes(read_bytes(Path(path), _MOST_BYTES))
    except (CaseError, Refused) as error:
        raise CaseError(f"{path}: {error}") from error

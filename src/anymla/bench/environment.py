"""Device and versions of a measurement, without anything that names the machine's user."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import anymla


def environment(command: str) -> dict[str, Any]:
    """Return the fields that every row carries.

    Args:
        command: command line that reproduces the row.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "command": command,
        "commit": _commit(),
        "device": "cpu",
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "anymla": anymla.__version__,
    }


def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = dict(
            line.split(":", 1)
            for line in info.read_text(encoding="utf-8").splitlines()
            if ":" in line
        )
        for key, value in fields.items():
            if key.strip() == "model name":
                flags = {k.strip(): v for k, v in fields.items()}.get("flags", "")
                bf16 = ", bf16 instructions" if "avx512_bf16" in flags else ""
                return value.strip() + bf16
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the sources' commit, with "+" if they were changed since; None without a checkout."""
    source = Path(__file__).parent
    try:
        head = _git(source, "rev-parse", "--short=10", "HEAD")
        changed = _git(source, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def _git(where: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(where), *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()

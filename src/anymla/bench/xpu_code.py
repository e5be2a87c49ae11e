"""Find Intel's offline compiler, which makes machine code without a device."""

from __future__ import annotations

import os
import shutil


def missing() -> str:
    """Return the reason why nothing can be built for Intel's GPUs here; "" if it can."""
    return "" if ocloc() else "Intel's offline compiler is neither on PATH nor in ANYMLA_OCLOC"


def ocloc() -> str | None:
    """Return the path of the compiler; None if there is none."""
    return os.environ.get("ANYMLA_OCLOC") or shutil.which("ocloc")

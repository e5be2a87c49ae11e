"""The check, without an import, that vLLM's source has all seams that the plugin relies on."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from anymla.engines.seams import missing, source_of
from anymla.engines.vllm.pinned import seams_of
from anymla.engines.vllm.pinned_v41 import v41_seams_of


def source_of_vllm() -> Path:
    """Return the folder of the installed package ``vllm``, which is not imported."""
    return source_of("vllm")


def missing_seams(root: Path, platform: str, parts: Collection[str]) -> list[str]:
    """List the seams that are missing or have other parameters, one line each.

    Args:
        root: folder of the package ``vllm``.
        platform: name of the platform in vLLM.
        parts: names in ``report.PARTS`` that are to be replaced.
    """
    return missing(root, seams_of(platform, parts))


def missing_v41_seams(root: Path, platform: str, parts: Collection[str]) -> list[str]:
    """List the same for DeepSeek-V4.1; ``parts`` are names in ``report.V41_PARTS``."""
    return missing(root, v41_seams_of(platform, parts))

"""Which device tests run on, and whether Triton's kernels are interpreted for it.

Imports no operation: Triton and anymla read TRITON_INTERPRET when they are first imported.
"""

from __future__ import annotations

import os

import torch


def default_device() -> str:
    """The accelerator that torch sees, "cuda" or "xpu", else "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if torch.xpu.is_available() else "cpu"


def prepare(device: str | None = None) -> None:
    """Before the operations are imported: without a GPU, Triton kernels are interpreted."""
    if (device or default_device()) != "cpu":
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from anymla.ops.device import has_triton

    if os.environ["TRITON_INTERPRET"] == "1" and has_triton():
        from anymla.testing.triton_interpreter import install

        install()

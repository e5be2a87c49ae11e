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


def named_device(name: str | None = None) -> torch.device:
    """The device of that name, or the default one.

    Raises:
        ValueError: the name means nothing here, or torch does not see the device.
    """
    words = f"--device {name}"
    try:
        device = torch.device(default_device() if name is None else name)
    except RuntimeError:
        raise ValueError(f"{words}: must be cpu, cuda or xpu") from None
    if device.type == "cpu":
        return torch.device("cpu")
    module = {"cuda": torch.cuda, "xpu": torch.xpu}.get(device.type)
    if module is None:
        raise ValueError(f"{words}: must be cpu, cuda or xpu")
    if (device.index or 0) >= module.device_count():
        raise ValueError(f"{words}: torch sees no such device on this machine")
    return device


def prepare(device: str | None = None, *, compiled: bool = False) -> None:
    """Before the operations are imported: without a GPU, Triton kernels are interpreted.

    Args:
        device: of the calls; the default one without.
        compiled: on a CPU they are compiled instead, as ``anymla.testing.opencl`` does.

    Raises:
        ValueError: kernels cannot be compiled for a CPU here.
    """
    if (device or default_device()) != "cpu":
        return
    if compiled:
        from anymla.testing import opencl

        if opencl.missing():
            raise ValueError(f"--compiled: {opencl.missing()}")
        opencl.install()
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from anymla.ops.device import has_triton

    if os.environ["TRITON_INTERPRET"] == "1" and has_triton():
        from anymla.ops.triton_interpreter import install

        install()

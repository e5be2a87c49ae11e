"""The device that a model or a command runs on."""

from __future__ import annotations

import torch

# Accelerators of torch that support neither FP8 nor float64 tensors.
_LACKING = ("mps",)


def default_device() -> str:
    """Return the type of the accelerator that torch sees ("cuda", "xpu", ...), or "cpu"."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None or found.type in _LACKING else found.type


def named_device(name: str | torch.device | None = None, option: str = "--device") -> torch.device:
    """Find the device of a name.

    Args:
        name: "cpu", "cuda", "cuda:1", "xpu", ...; None or "auto" for the accelerator if there is
            one, else the CPU.
        option: name of the argument in error messages.

    Raises:
        ValueError: the name is unknown, or torch does not see the device.
    """
    if name is None or name == "auto":
        name = default_device()
    said = f"{option} {name}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{said}: must be cpu, cuda, xpu or auto") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type not in ("cuda", "xpu", default_device()):
        raise ValueError(f"{said}: must be cpu, cuda, xpu or auto")
    if (device.index or 0) >= torch.get_device_module(device).device_count():
        raise ValueError(f"{said}: torch sees no such device on this machine")
    return device

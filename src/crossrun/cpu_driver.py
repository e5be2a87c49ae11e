"""Triton's driver for compiled kernels that run on CPU tensors, whatever executes them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

# A kernel, its arguments with their Triton types, the grid, and the kernel's metadata.
Launch = Callable[[Any, list[tuple[str, Any]], tuple[int, int, int], Any], None]


class CpuDriver(DriverBase):  # type: ignore[misc]
    """One pretended device, whose kernels end before their launch returns; it has no streams."""

    def __init__(
        self,
        target: GPUTarget,
        properties: dict[str, Any],
        load: Callable[[str, bytes], tuple[Any, ...]],
        launch: Launch,
    ) -> None:
        """Drive a pretended device.

        Args:
            target: target that kernels are compiled for.
            properties: limits of a launch, as Triton asks a device for them.
            load: function of a kernel's name and compiled code that returns Triton's module,
                kernel, registers, spills and, where Triton takes it, the most threads of a CTA.
            launch: function that runs a kernel to its end.
        """
        self._target = target
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda name, code, *_: load(name, code),
        )
        self.launcher_cls = _launcher(launch)

    @classmethod
    def is_active(cls) -> bool:
        """Return False: this driver is chosen explicitly, never detected."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return the type as it is: no launcher is compiled."""
        return ty

    def get_current_device(self) -> int:
        """Return the only device, 0."""
        return 0

    def get_current_stream(self, device: int) -> None:
        """Return None, since kernels run when they are launched."""
        return None

    def get_current_target(self) -> GPUTarget:
        """Return the target that kernels are compiled for."""
        return self._target

    def get_active_torch_device(self) -> torch.device:
        """Return torch's CPU device."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return torch's module of the device."""
        return torch.cpu

    def get_benchmarker(self) -> Any:
        """Raise an error, since there is no benchmarker."""
        raise NotImplementedError("times on this device mean nothing")


def _launcher(launch: Launch) -> type:
    class Launcher:
        """Runs one compiled kernel to its end."""

        def __init__(self, source: Any, metadata: Any) -> None:
            self._kinds, self._metadata = list(source.signature.values()), metadata

        def __call__(self, x: int, y: int, z: int, stream: None, kernel: Any, *rest: Any) -> None:
            # Packed and launch metadata and two hooks precede the kernel's own arguments.
            pairs = zip(self._kinds, rest[4:], strict=True)
            given = [(kind, value) for kind, value in pairs if kind != "constexpr"]
            launch(kernel, given, (x, y, z), self._metadata)

    return Launcher

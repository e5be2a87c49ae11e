"""The operations' Triton backends, compiled for an AMD GPU and interpreted on CPU tensors.

``crossrun.amd`` executes the kernels; ``install()`` here tells the operations as well, which choose
their tiles as for that GPU and take CPU tensors from then on:

    from anymla.testing.amd_on_cpu import install
    install("gfx942")                                # before the first kernel
    rms_norm(x, weight, 1e-6, backend="triton")      # compiled for an MI300X, on a CPU
"""

from __future__ import annotations

import functools
from typing import Any

from anymla.ops.moe.inputs import ExpertTensors
from anymla.testing.device_bridge import admit_cpu_tensors
from crossrun import amd
from crossrun.amd import missing

__all__ = ["install", "missing"]


@functools.cache
def install(name: str) -> Any:
    """Run the Triton backends of this process compiled for a GPU; further calls do nothing.

    Args:
        name: "gfx942", "gfx950", "gfx1151" or "gfx1201".

    Returns:
        The ``Device`` of ``crossrun.amd``.

    Raises:
        RuntimeError: something is not installed, or the process has another target.
    """
    device = amd.install(name)
    admit_cpu_tensors(name)
    _reach_experts(device)
    return device


def _reach_experts(device: Any) -> None:
    """Let kernels reach the experts of a list, of which they are given the first."""
    made = ExpertTensors.__init__

    @functools.wraps(made)
    def noted(self: ExpertTensors, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if self.addresses is not None and isinstance(self._kept, list):
            device.reach(*self._kept)

    ExpertTensors.__init__ = noted  # type: ignore[method-assign]

"""Choice between compiled and interpreted Triton kernels for a device's tests and cases.

Imports no operation: Triton and anymla read TRITON_INTERPRET when they are first imported.
"""

from __future__ import annotations

import os

from anymla.runtime.devices import default_device


def prepare(device: str | None = None, *, compiled: bool = False) -> None:
    """Set up Triton before operations are imported: without a GPU, kernels are interpreted.

    Args:
        device: name of the calls' device; None for the default one.
        compiled: True to compile kernels on a CPU, as ``anymla.testing.intel_on_cpu`` does.

    Raises:
        ValueError: kernels cannot be compiled for a CPU here.
    """
    if (device or default_device()) != "cpu":
        return
    if compiled:
        from anymla.testing import intel_on_cpu

        if intel_on_cpu.missing():
            raise ValueError(f"--compiled: {intel_on_cpu.missing()}")
        intel_on_cpu.install()
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from anymla.ops.device import has_triton

    if os.environ["TRITON_INTERPRET"] == "1" and has_triton():
        from crossrun.interpreter import install

        install()

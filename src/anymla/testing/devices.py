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
        compiled: True to compile kernels on a CPU, as ``anymla.testing.opencl`` does.

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

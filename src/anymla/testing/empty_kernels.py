"""Launches of Triton's kernels up to the call of CUDA's driver, without a GPU.

Nothing is compiled: a stand-in for the compiled kernel takes its arguments as Triton's launchers
do, and runs nothing. So the host's part of a launch can be counted, timed and inspected.
"""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


class EmptyKernel:
    """Stand-in for a compiled kernel of sm_90.

    Attributes:
        src: source that would have been compiled.
        name: name of the kernel.
        launched: callback with the arguments that CUDA's driver would get.
    """

    function = packed_metadata = None

    def __init__(self, source: Any, launched: Callable[..., None]) -> None:
        """Take the place of the compilation of Triton's ``ASTSource``."""
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.driver import CudaLauncher
        from triton.compiler.compiler import CompiledKernel

        self.src, self.name = source, source.fn.__name__
        self.launch_metadata = types.MethodType(CompiledKernel.launch_metadata, self)
        self.metadata = types.SimpleNamespace(
            target=GPUTarget("cuda", 90, 32), num_ctas=1, tensordesc_meta=None,
            global_scratch_size=0, global_scratch_align=1,
            profile_scratch_size=0, profile_scratch_align=1,
            launch_cooperative_grid=False, launch_pdl=False, instrumentation_mode="",
        )  # fmt: skip
        self.run = CudaLauncher(source, self.metadata)
        self.run.launch = launched

    def _init_handles(self) -> None:
        """Load no module."""


@contextlib.contextmanager
def empty_kernels(
    launched: Callable[[str, tuple[Any, ...]], None] | None = None,
) -> Iterator[collections.Counter[str]]:
    """Count launches inside the block by kernel; Triton uses a pretended driver.

    Args:
        launched: callback with a kernel's name and the arguments that Triton passes to CUDA's
            driver.
    """
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    counts: collections.Counter[str] = collections.Counter()

    class Driver:
        utils = types.SimpleNamespace(launch=None)
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        allocate_default_profile_scratch = staticmethod(lambda size, align, stream: None)

    def compiled(
        self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attrs: Any,
        warmup: bool,
    ) -> Any:  # fmt: skip
        name = self.fn.__qualname__

        def count(*args: Any) -> None:
            counts[name] += 1
            if launched is not None:
                launched(name, args)

        self.cache_key  # noqa: B018, finds the globals that every launch compares
        made = EmptyKernel(self.ASTSource(self, signature, constants, attrs), count)
        self.device_caches[device][0][key] = made
        return made

    driver.set_active(Driver())
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "_do_compile", compiled))
        # Objects that Triton makes for CUDA's driver; 3.6 compiles a launcher for each signature.
        made: dict[str, Any] = {
            "annotate_arguments": None,
            "make_kernel_signature": None,
            "make_launcher": "",
            "library_dirs": [],
            "compile_module_from_src": types.SimpleNamespace(launch=None),
        }
        for part, answer in made.items():
            if hasattr(nvidia, part):
                patches.enter_context(mock.patch.object(nvidia, part, return_value=answer))
        yield counts

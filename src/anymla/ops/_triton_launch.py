"""Prepared launches: repeated launches of a Triton kernel in which only the tensors change.

``kernel[grid](...)`` looks the compiled code up by every argument, constant and option at each
launch, which takes the host 14 to 30 us on a CPU of 2023, whereas CUDA's driver needs 4. A step's
layers launch the same kernels with the same numbers. So a launcher prepares a launch once for what
it depends on, keeps it, and calls it with tensors:

    @functools.lru_cache(LAUNCHES)
    def _scaling(count: int, device: torch.device) -> PreparedLaunch:
        config = choose_config(count, target_of(device))
        return PreparedLaunch(kernel, (cdiv(count, config.block),), count, BLOCK=config.block)

    _scaling(x.numel(), x.device)(x, out)

The first launch goes through Triton. Its compiled kernel is reused for tensors of the same dtypes
and alignments, which is what Triton's look-up depends on if numbers and constants are the same. In
Triton 3.6 to 3.9, ``kernel.run`` takes a grid, a stream, and what ``CompiledKernel.__getitem__``
passes to it; this file passes the same. All other cases go through Triton each time: another
version, another vendor's driver, a profiler's hook, a replaced ``JITFunction.run``, the
interpreter.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from anymla.ops.device import INTERPRETED

# Largest number of prepared launches that a launcher keeps; they differ mostly in the number of
# tokens.
LAUNCHES = 256

_TRITONS = JITFunction.__module__
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
_KNOWN = (3, 6) <= _VERSION <= (3, 9) and not INTERPRETED


def cdiv(a: int, b: int) -> int:
    """Return ceil(a / b); Triton's own, which also works in kernels, takes the host 2 us."""
    return -(-a // b)


class PreparedLaunch:
    """Kernel with its grid, numbers, constants and options; each call gives it tensors."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: Any, **options: Any) -> None:
        """Store the launch's arguments; nothing is compiled.

        Args:
            kernel: kernel whose parameters are tensors, then ``numbers``, then constants.
            grid: number of CTAs in up to three dimensions.
            numbers: values of the parameters after the tensors, in order.
            options: constants and launch options, which must not be changed afterwards.
        """
        self._kernel, self._numbers, self._options = kernel, numbers, options
        self._grid = (*grid, 1, 1)[:3]
        self._compiled: dict[Any, tuple[Any, ...]] = {}

    def __call__(self, *tensors: Any) -> None:
        """Launch on the current device's current stream.

        Args:
            tensors: tensors or descriptors of tensors, in order; None and numbers are allowed among
                them.
        """
        if not _KNOWN or JITFunction.run.__module__ != _TRITONS or _has_hooks():
            self._launch(tensors)
            return
        kinds = [
            (x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else _kind(x) for x in tensors
        ]
        device = driver.active.get_current_device()
        key = (device, *kinds)
        found = self._compiled.get(key)
        if found is None:
            self._keep(key, len(tensors), self._launch(tensors))
            return
        run, function, packed, constants = found
        stream = driver.active.get_current_stream(device)
        run(*self._grid, stream, function, packed, None, None, None, *tensors, *constants)

    def _launch(self, tensors: tuple[Any, ...]) -> Any:
        return self._kernel[self._grid](*tensors, *self._numbers, **self._options)

    def _keep(self, key: tuple[Any, ...], tensors: int, compiled: Any) -> None:
        # Code for other vendors depends on more: AMD's on the size of a tensor.
        if compiled is None or compiled.metadata.target.backend != "cuda":
            return
        parameters = [*self._kernel.signature.parameters.values()][tensors + len(self._numbers) :]
        constants = [self._options.get(each.name, each.default) for each in parameters]
        parts = compiled.run, compiled.function, compiled.packed_metadata
        if len(self._compiled) >= LAUNCHES:  # numbers among the tensors may take many values
            self._compiled.clear()
        self._compiled[key] = (*parts, (*self._numbers, *constants))


def _kind(x: Any) -> Any:
    """Return the part of an argument that compiled code depends on, if it is not a tensor."""
    if x is None or isinstance(x, int | float):
        return x
    return x.base.dtype, tuple(x.block_shape), x.layout


def _has_hooks() -> bool:
    """Return True if a profiler has hooked launches."""
    runtime = triton.knobs.runtime  # Triton 3.3 has no knobs, and is not in _KNOWN
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)

"""Launches of which only the tensors change.

``kernel[grid](...)`` finds compiled code by every argument, constant and option, each time: 14 to
30 us of the host's on a CPU of 2023, where CUDA's driver needs 4. Layers of a step launch the same
kernels with the same numbers, so a launcher prepares a launch once for what it depends on, keeps
it, and calls it with tensors:

    @functools.lru_cache(LAUNCHES)
    def _scaling(count: int, device: torch.device) -> PreparedLaunch:
        config = choose_config(count, target_of(device))
        return PreparedLaunch(kernel, (cdiv(count, config.block),), count, BLOCK=config.block)

    _scaling(x.numel(), x.device)(x, out)

The first launch goes through Triton. Its compiled kernel serves later ones of tensors with the same
dtypes and alignments: what Triton's own look-up depends on where numbers and constants are the
same. ``kernel.run`` of Triton 3.6 to 3.9 takes a grid, a stream, and what their
``CompiledKernel.__getitem__`` hands to it, which is what is done here. Everything else goes through
Triton each time: another version, another vendor's driver, a profiler's hook, a replaced
``JITFunction.run``, the interpreter.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from anymla.ops.device import INTERPRETED

# Prepared launches that a launcher keeps: numbers of tokens, mostly.
LAUNCHES = 256

_TRITONS = JITFunction.__module__
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
_KNOWN = (3, 6) <= _VERSION <= (3, 9) and not INTERPRETED


def cdiv(a: int, b: int) -> int:
    """ceil(a / b); Triton's own, which also runs inside kernels, takes the host 2 us."""
    return -(-a // b)


class PreparedLaunch:
    """A kernel with its grid, numbers, constants and options; tensors are given by each call."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: Any, **options: Any) -> None:
        """Prepare; nothing is compiled.

        Args:
            kernel: its parameters are tensors, then ``numbers``, then constants.
            grid: CTAs.
            numbers: parameters after the tensors, in their order.
            options: constants, and options of the launch; not to be changed.
        """
        self._kernel, self._numbers, self._options = kernel, numbers, options
        self._grid = (*grid, 1, 1)[:3]
        self._compiled: dict[Any, tuple[Any, ...]] = {}

    def __call__(self, *tensors: Any) -> None:
        """Launch on the current device's current stream.

        Args:
            tensors: tensors or descriptors of such; also None, and numbers among them.
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
        # What other vendors' code depends on is more: AMD's on how large a tensor is.
        if compiled is None or compiled.metadata.target.backend != "cuda":
            return
        parameters = [*self._kernel.signature.parameters.values()][tensors + len(self._numbers) :]
        constants = [self._options.get(each.name, each.default) for each in parameters]
        parts = compiled.run, compiled.function, compiled.packed_metadata
        if len(self._compiled) >= LAUNCHES:  # numbers among tensors may be any
            self._compiled.clear()
        self._compiled[key] = (*parts, (*self._numbers, *constants))


def _kind(x: Any) -> Any:
    """What compiled code depends on of an argument that is no tensor."""
    if x is None or isinstance(x, int | float):
        return x
    return x.base.dtype, tuple(x.block_shape), x.layout


def _has_hooks() -> bool:
    """Whether a profiler wants to see launches."""
    runtime = triton.knobs.runtime  # Triton 3.3 has none, and is not known
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)

"""Launches of Gluon kernels on CPU tensors, taken over from Triton."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from crossrun.hopper.errors import NotModelled
from crossrun.hopper.machine import run


@functools.cache
def install(*, seed: int | None = 0) -> None:
    """Run ``kernel[grid](...)`` of this process on the CPU if its tensors are there.

    So a launcher that is written for a GPU runs as it is. Launches on tensors of a GPU remain
    Triton's; further calls with the same seed do nothing.

    Args:
        seed: seed of the interleavings, as ``run`` takes it; None for the fastest run.
    """

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not _on_cpu((*args, *options.values())):
            return JITFunction.run(self, *args, grid=grid, warmup=warmup, **options)
        signature = inspect.signature(self.fn)
        named = {name: options.pop(name) for name in [*options] if name in signature.parameters}
        if options.get("num_ctas", 1) != 1:
            raise NotModelled("clusters of several CTAs")
        if callable(grid):
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            grid = grid(bound.arguments)
        if not warmup:
            run(self, grid, *args, seed=seed, num_warps=options.get("num_warps", 4), **named)
        return None

    GluonJITFunction.run = launch


def _on_cpu(values: tuple[Any, ...]) -> bool:
    """True if there are tensors, descriptors' included, and all of them are on the CPU."""
    tensors = [getattr(value, "base", value) for value in values]
    devices = [each.device.type for each in tensors if isinstance(each, Tensor)]
    return bool(devices) and set(devices) == {"cpu"}

"""Which specialisations of Triton kernels a run would compile, found out without a GPU.

Inside the context every launch is noted as what Triton would look its compiled code up by. Kernels
are not run, but for those that compute rows and slots, which tensors are indexed with; so other
results are garbage, which whoever uses this must not let decide anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import anymla.ops
from anymla.ops.device import Target
from anymla.ops.registry import Operation

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
_RUN = "anymla.ops.selection."
Key = tuple[Any, ...]


@contextlib.contextmanager
def noted_specialisations(target: Target, processors: int) -> Iterator[set[Key]]:
    """Note launches as on a device of ``target`` with so many SMs.

    Needs Triton's interpreter to be on (TRITON_INTERPRET=1), in which kernels take CPU tensors.
    """
    from triton.runtime.interpreter import InterpretedFunction

    seen: set[Key] = set()
    really_run = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        seen.add(specialisation(self, args, kwargs))
        if self.fn.__module__.startswith(_RUN):
            really_run(self, *args, grid=grid, warmup=warmup, **kwargs)

    answers = {"target_of": dataclasses.replace(target, sm_count=processors)}
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(InterpretedFunction, "run", run))
        for name, answer in answers.items():
            for module in _modules_with(name):
                known = functools.partial(_answer, answer)
                patches.enter_context(mock.patch.object(module, name, known))
        # What has been kept about the CPU is not of the target, nor the other way round.
        _forget_devices()
        patches.callback(_forget_devices)
        yield seen


def _forget_devices() -> None:
    """Empty the caches of the operations' functions of a device, and their choices."""
    for path, module in list(sys.modules.items()):
        if path.startswith("anymla.ops."):
            for function in list(vars(module).values()):
                if isinstance(function, Operation):
                    function.forget()
                if isinstance(function, functools._lru_cache_wrapper) and (
                    "device" in inspect.signature(function).parameters
                ):
                    function.cache_clear()


def _answer(answer: Any, device: torch.device) -> Any:
    return answer


def _modules_with(name: str) -> list[Any]:
    """Modules of the package that know a function of this name; all kernels are imported first."""
    for family in pkgutil.iter_modules(anymla.ops.__path__, "anymla.ops."):
        if family.ispkg:
            paths = importlib.import_module(family.name).__path__
            for module in pkgutil.iter_modules(paths, f"{family.name}."):
                if ".triton_" in module.name:
                    importlib.import_module(module.name)
    return [
        module
        for path, module in list(sys.modules.items())
        if path.startswith("anymla.") and callable(getattr(module, name, None))
    ]


def specialisation(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """What a launch's compiled code depends on: the rules of triton.runtime.jit."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    hints = kernel.fn.__annotations__
    counts = set(kernel.kwargs["do_not_specialize"] or ())
    parts: list[Any] = [kernel.fn.__module__, kernel.fn.__name__]
    for place, name in enumerate(kernel.arg_names):
        if name not in given:
            continue  # its default, which is always the same
        value = given[name]
        if "constexpr" in str(hints.get(name, "")):
            parts.append((name, str(value)))
        else:
            parts.append((name, _argument(value, name in counts or place in counts)))
    parts += [(option, given[option]) for option in _OPTIONS if option in given]
    return tuple(parts)


def _argument(value: Any, is_count: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        size = "i32" if -(2**31) <= value < 2**31 else "i64"
        if is_count:
            return size
        return 1 if value == 1 else (size, value % 16 == 0)
    return type(value).__name__

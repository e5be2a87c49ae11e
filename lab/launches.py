"""Builds of all kernels that launchers launch, found without running a kernel or having a GPU.

Inside ``recorded_launches`` operations are called with tensors on the meta device, which represents
a device of the target, or with CPU tensors. Each launch is recorded under the key by which Triton
looks up its compiled code. Kernels do not run, so results are garbage and must not decide anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch

import anymla.ops
import lab.builds
from anymla.ops import device as device_facts
from anymla.ops.device import INTERPRETED, Target
from anymla.ops.registry import Operation, Support
from crossrun.targets import triton_target
from lab.build import Build
from lab.kernel_files import kernel_modules

META = torch.device("meta")
Key = tuple[Any, ...]


class Launches:
    """Recorded launches, by what their compiled code depends on.

    Attributes:
        label: name of the call being made; a build keeps that of the first call that launched it.
        builds: builds found so far, by ``Build.key``.
    """

    def __init__(self, target: Target) -> None:
        """Start without launches, on ``target``."""
        from triton.compiler import make_backend

        with triton_target(target) as described:
            self._backend = make_backend(described)
        self._binders: dict[Any, tuple[Any, Any]] = {}
        self._known: set[tuple[Any, str, str]] = set()
        self.label = ""
        self.builds: dict[Key, Build] = {}

    def note(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Record a launch, whose arguments by name are among ``options``."""
        function, bind = self._binder(kernel)
        bound, specialisation, rest = bind(*args, **options)
        key = (kernel.fn, str(specialisation), str(rest))
        if key not in self._known:
            self._known.add(key)
            made = self._build(function, options, bound, specialisation)
            self.builds.setdefault(made.key, made)

    def _build(
        self, function: Any, options: dict[str, Any], bound: dict[str, Any], specialisation: Any
    ) -> Build:
        """Make the build that ``JITFunction.run`` would compile for a launch of a new kind."""
        parsed = self._backend.parse_options(dict(options))
        names = function.arg_names
        unknown = [name for name in options if name not in {*vars(parsed), *names}]
        assert not unknown, f"{function.fn.__name__}: {unknown}"
        assert all(isinstance(kind, str) for kind, _ in specialisation), "tuples"
        kinds = {name: kind for name, (kind, _) in zip(names, specialisation, strict=True)}
        hints = {name: known or "" for name, (_, known) in zip(names, specialisation, strict=True)}
        return Build(
            self.label,
            function,
            {name: kind for name, kind in kinds.items() if kind != "constexpr"},
            {name: bound[name] for name, kind in kinds.items() if kind == "constexpr"},
            num_warps=parsed.num_warps,
            num_stages=options.get("num_stages"),
            # Pointers are assumed to be aligned.
            divisible=tuple(
                name
                for name, kind in kinds.items()
                if kind[0] in "iu"
                and ["tt.divisibility", 16] in self._backend.parse_attr(hints[name])
            ),
            fp_fusion=parsed.enable_fp_fusion,
            registers=options.get("maxnreg") or 0,
            near=tuple(
                name
                for name, kind in kinds.items()
                if kind.startswith("*")
                and ["tt.pointer_range", 32] in self._backend.parse_attr(hints[name])
            ),
        )

    def _binder(self, kernel: Any) -> tuple[Any, Any]:
        if kernel.fn not in self._binders:
            from triton.runtime.jit import JITFunction, create_function_from_signature

            # An interpreted kernel has no signature; its function has that of the compiled kernel.
            function = kernel if isinstance(kernel, JITFunction) else _compiled_form(kernel)
            self._binders[kernel.fn] = (
                function,
                create_function_from_signature(function.signature, function.params, self._backend),
            )
        return self._binders[kernel.fn]


def _compiled_form(kernel: Any) -> Any:
    from triton.runtime.jit import JITFunction

    return JITFunction(kernel.fn, **kernel.kwargs)


@contextlib.contextmanager
def recorded_launches(target: Target, *, run: str = "") -> Iterator[Launches]:
    """Record launches inside the block, as on a device of ``target``.

    Args:
        target: target with its number of SMs.
        run: prefix of modules whose interpreted kernels run as well.
    """
    launches = Launches(target)
    with contextlib.ExitStack() as patches:
        for kind in _kernel_types():
            patches.enter_context(mock.patch.object(kind, "run", _noting(launches, run, kind.run)))
        patches.enter_context(pretended_device(target))
        yield launches


def _noting(launches: Launches, run: str, really_run: Callable[..., None]) -> Callable[..., None]:
    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.note(self, args, kwargs)
        if run and self.fn.__module__.startswith(run):
            really_run(self, *args, grid=grid, warmup=warmup, **kwargs)

    return note


@contextlib.contextmanager
def pretended_device(target: Target) -> Iterator[None]:
    """Make the meta device one of ``target``, or the CPU for interpreted kernels."""
    with contextlib.ExitStack() as patches:
        _import_kernels()
        _answer(patches, "target_of", target)
        if not INTERPRETED:
            _answer(patches, "runs_gluon", target.name == "sm_90")
            patches.enter_context(mock.patch.object(device_facts, "_support", _supported))
            graphs = {"is_current_stream_capturing": False, "synchronize": None}
            for name, answer in graphs.items():
                patches.enter_context(mock.patch.object(torch.cuda, name, _always(answer)))
        # Cached facts about a device are not the target's, nor the other way round.
        _forget_devices()
        patches.callback(_forget_devices)
        yield


def _kernel_types() -> list[Any]:
    from triton.runtime.jit import JITFunction

    if INTERPRETED:
        from triton.runtime.interpreter import InterpretedFunction

        return [InterpretedFunction, JITFunction]  # Gluon is not interpreted
    return [JITFunction]


def _supported(device_type: str) -> Support:
    return Support(device_type == "meta", "launches are noted of meta tensors")


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _answer(patches: contextlib.ExitStack, name: str, answer: Any) -> None:
    """Make the function of that name return ``answer`` in all modules that have it."""
    for path, module in list(sys.modules.items()):
        if path.startswith(("anymla.", "lab.")) and callable(getattr(module, name, None)):
            patches.enter_context(mock.patch.object(module, name, _always(answer)))


def _forget_devices() -> None:
    """Clear the caches of the operations' modules that are keyed by device."""
    for path, module in list(sys.modules.items()):
        if path.startswith(("anymla.ops.", "lab.builds.")):
            for kept in list(vars(module).values()):
                if isinstance(kept, functools._lru_cache_wrapper):
                    if "device" in inspect.signature(kept).parameters:
                        kept.cache_clear()
                elif isinstance(kept, Operation):
                    kept.forget()
                elif isinstance(kept, dict):
                    kept.pop(META, None)


def _import_kernels() -> None:
    """Import all kernel files, so that the functions they import from others are known."""
    for names in kernel_modules().values():
        for name in names:
            if not (INTERPRETED and ".gluon_" in name):
                importlib.import_module(name)


def derived_families() -> list[str]:
    """List the families of ``anymla.ops`` whose builds ``lab.builds`` derives."""
    families = {each.name for each in pkgutil.iter_modules(anymla.ops.__path__) if each.ispkg}
    return [
        each.name for each in pkgutil.iter_modules(lab.builds.__path__) if each.name in families
    ]


def derived_builds(family: str, target: Target) -> list[Build]:
    """Return a derived family's builds in the order of launches, with its file's requirements."""
    return judged(family, _launched(family, target, f"anymla.ops.{family}."), target)


def judged(family: str, builds: Iterable[Build], target: Target) -> list[Build]:
    """Return builds of a family's kernels with the requirements in its file of ``builds``.

    Builds of a file without ``judgement`` must compile without spills.
    """
    module = importlib.import_module(f"lab.builds.{family}")
    if not hasattr(module, "judgement"):
        return list(builds)
    return [dataclasses.replace(each, judgement=module.judgement(each, target)) for each in builds]


def shared_builds(target: Target) -> list[Build]:
    """Return builds of the kernels that families share, each once, without exceptions."""
    builds: dict[Key, Build] = {}
    for family in derived_families():
        for build in _launched(family, target, "anymla.ops._"):
            builds.setdefault(build.key, build)
    return list(builds.values())


def _launched(family: str, target: Target, module: str) -> list[Build]:
    """List builds that a family's calls launch, of modules whose name begins with ``module``."""
    calls = importlib.import_module(f"lab.builds.{family}").calls
    with recorded_launches(target) as launches:
        for launches.label, call in calls(target):
            call()
    return [each for each in launches.builds.values() if each.module.startswith(module)]

"""Call a function once a module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call a function with a module: now if it is imported already, else when it will be.

    Args:
        name: full name of the module.
        call: function of the module; called once, after the module's own code has run.
    """
    module = sys.modules.get(name)
    if module is not None:
        call(module)
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that asks the others for one module, and extends its loader by a call."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        # importlib.util.find_spec would import the parent, which is being imported.
        position = sys.meta_path.index(self)
        for finder in sys.meta_path[position + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is None:
            return spec
        execute, call = loader.exec_module, self._call

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # Not in find_spec, which programs also call to ask whether a module exists.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                call(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

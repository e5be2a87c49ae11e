"""Other libraries that are timed beside this package, an adapter each.

An adapter says whether its library can run here, and takes a case's inputs to calls of it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any

from anymla.cli.bad_input import BadInput
from anymla.ops.registry import BackendUnavailable, Support


class Peer:
    """A library that may be installed.

    Attributes:
        name: field of rows that holds the library's version.
        title: name of the library in reports.
        modules: names that it may be imported by; the first that can be is taken.
    """

    name: str
    title: str
    modules: tuple[str, ...]

    def __init__(self, find: Callable[[str], Any] = importlib.import_module) -> None:
        """Import nothing yet."""
        self._find = find

    @functools.cached_property
    def _found(self) -> tuple[Any, str]:
        """The module, or None and why not."""
        said = []
        for name in self.modules:
            try:
                return self._find(name), ""
            except (ImportError, OSError) as error:
                said.append(f"{name}: {error}")
        return None, "; ".join(said)

    def available(self) -> Support:
        """Return whether the library can run here, and if not, why."""
        module, said = self._found
        return Support(module is not None, f"{self.title} cannot be imported ({said})")

    def require(self, option: str) -> None:
        """Raise BadInput, naming the option of the command line, where the library cannot run."""
        support = self.available()
        if not support:
            raise BadInput(f"{option}: {support.reason}")

    @property
    def module(self) -> Any:
        """Module that has the library's functions.

        Raises:
            BackendUnavailable: if the library cannot be imported.
        """
        support = self.available()
        if not support:
            raise BackendUnavailable(support.reason)
        return self._found[0]

    def version(self) -> str | None:
        """Return the version of the module or of the package that ships it; None if unknown."""
        if found := getattr(self.module, "__version__", None):
            return str(found)
        package = getattr(self.module, "__name__", "").partition(".")[0]
        try:
            return f"{package} {metadata.version(package)}"
        except (metadata.PackageNotFoundError, ValueError):  # the latter for no name
            return None

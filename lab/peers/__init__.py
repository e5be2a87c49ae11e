"""Other libraries that are timed beside this package, an adapter each.

An adapter says whether its library can run here, and takes a case's inputs to calls of it. A
library is installed, or lies unpacked in a folder that ``ANYMLA_PEERS`` names, which comes first.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from anymla.cli.bad_input import BadInput
from anymla.ops.registry import BackendUnavailable, Support

_Peer = TypeVar("_Peer", bound="Peer")

# Folders of packages inside a folder of unpacked wheels: that of CuTe DSL is not at its top.
_INSIDE = ("", "nvidia_cutlass_dsl/dsl_packages")


def folders() -> list[Path]:
    """Return the folders of unpacked libraries that ``ANYMLA_PEERS`` names."""
    return [Path(name) for name in os.environ.get("ANYMLA_PEERS", "").split(os.pathsep) if name]


def find_module(name: str) -> Any:
    """Import a module, from the folders of unpacked libraries before anywhere else."""
    paths = [str(folder / inside) for folder in folders() for inside in _INSIDE]
    # They stay: a library may import its parts when it is first called.
    sys.path[:0] = [path for path in paths if path not in sys.path and Path(path).is_dir()]
    return importlib.import_module(name)


def find_file(*names: str) -> Path:
    """Return the first file of these names in the folders of unpacked libraries.

    Raises:
        ImportError: there is none.
    """
    for folder in folders():
        for name in names:
            if (folder / name).is_file():
                return folder / name
    places = ", ".join(map(str, folders())) or "ANYMLA_PEERS, which names no folder"
    raise ImportError(f"no {' or '.join(names)} in {places}")


def operations(namespace: str, needed: str) -> Any:
    """Return torch operations that have been loaded.

    Raises:
        ImportError: the needed one is not among them.
    """
    found = getattr(torch.ops, namespace)
    if not hasattr(found, needed):
        raise ImportError(f"it has no {needed}")
    return found


def library_version(library: Path) -> str:
    """Return a digest that identifies a library's file, and the version that lies beside it."""
    digest = hashlib.sha256(library.read_bytes()).hexdigest()[:12]
    beside = library.with_name("VERSION")
    stated = f"{beside.read_text(encoding='utf-8').strip()}, " if beside.is_file() else ""
    return f"{stated}{library.name} sha256 {digest}"


class Peer:
    """A library that may be installed or lie in a folder.

    Attributes:
        name: field of rows that holds the library's version.
        title: name of the library in reports.
        modules: names that it may be imported by; the first that can be is taken.
    """

    name: str
    title: str
    modules: tuple[str, ...]

    def __init__(self, find: Callable[[str], Any] = find_module) -> None:
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


def present_peers(option: str, peers: Sequence[_Peer]) -> list[_Peer]:
    """Return the peers that are here, and say why others are not; at least one must be.

    Raises:
        BadInput: none is here.
    """
    reasons = [support.reason for peer in peers if not (support := peer.available())]
    if len(reasons) == len(peers):
        raise BadInput(f"{option}: {'; '.join(reasons)}")
    for reason in reasons:
        click.echo(f"not timed: {reason}", err=True)
    return [peer for peer in peers if peer.available()]

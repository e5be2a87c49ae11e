"""Python processes that this package starts: none imports from the working directory.

Python puts the working directory in front of everything else for ``-m`` and ``-c``, so that a
``torch.py`` which lies there would run in the place of torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

_SAFE_PATH = "PYTHONSAFEPATH"
_ENVIRONMENT = threading.Lock()


def python_command(*words: str) -> list[str]:
    """Return a child's command: this interpreter, without the working directory in its path."""
    return [sys.executable, "-P", *words]


def same_modules() -> dict[str, str]:
    """Return environment variables with which a child imports what this process would import."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextlib.contextmanager
def working_directory_shut_out() -> Iterator[None]:
    """Set PYTHONSAFEPATH while multiprocessing starts a child, whose command takes no options."""
    with _ENVIRONMENT:
        before = os.environ.get(_SAFE_PATH)
        os.environ[_SAFE_PATH] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_SAFE_PATH]
            else:
                os.environ[_SAFE_PATH] = before

"""Keys of compiled kernels that are the same in every process.

Triton keeps compiled code under a key that holds, among others, the constexpr globals of all
functions that a kernel calls. It reads a callee's globals before it has looked for them
(``DependenciesFinder._update_hash`` in Triton 3.3 to 3.9), and finds them only if another kernel
called the same function earlier. So a kernel would be compiled again wherever kernels are launched
in another order: in service after a start that compiled them, and on a machine that received them.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def hash_callees_first() -> None:
    """Make Triton look for a callee's globals before it reads them, where the caller is anymla's.

    Others' kernels keep their keys, and a Triton that finds globals otherwise is left as it is.
    """
    from triton.runtime import jit

    finder = getattr(jit, "DependenciesFinder", None)
    update = getattr(finder, "_update_hash", None)
    if finder is None or update is None:
        return

    def hash_callee_first(self: Any, function: Any) -> None:
        if self.globals["__name__"].startswith("anymla."):
            getattr(function, "cache_key", None)  # computing it finds the globals
        update(self, function)

    finder._update_hash = hash_callee_first

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
    """Make Triton look for a callee's globals before it reads them, from now on."""
    from triton.runtime.jit import DependenciesFinder

    update = DependenciesFinder._update_hash

    def hash_callee_first(self: Any, function: Any) -> None:
        getattr(function, "cache_key", None)
        update(self, function)

    DependenciesFinder._update_hash = hash_callee_first
